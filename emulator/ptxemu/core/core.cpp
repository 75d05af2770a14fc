// Executes a parsed PTX kernel on the CPU: one translation unit.
#include "api.h"
#include "cuda_runtime.h"
