from triton_interpreter import DEVICE, interpreter_that_rounds  # moved

__all__ = ["DEVICE", "interpreter_that_rounds"]
