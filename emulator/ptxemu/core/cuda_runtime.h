// Replaces the CUDA runtime for the DSL's compiled host code.
#pragma once
#include "tensor_map.h"

typedef int (*launch_cb)(void*, const void*, void**);
typedef void* (*load_cb)(const void*);
typedef void* (*getk_cb)(void*, const char*);
typedef void (*alloc_cb)(void*, uint64_t);
typedef int (*settle_cb)();  // completes all launches
static launch_cb g_launch;
static load_cb g_load;
static getk_cb g_getk;
static alloc_cb g_alloc;
static settle_cb g_settle;
API void ptxemu_set_callbacks(launch_cb a, load_cb b, getk_cb c, alloc_cb d, settle_cb e) {
  g_launch = a;
  g_load = b;
  g_getk = c;
  g_alloc = d;
  g_settle = e;
}
API int _cudaLaunchKernelEx(const void* cfg, void* fn, void** args) {
  return g_launch(fn, cfg, args);
}
API int _cudaLaunchKernel(void*, ...) {
  fprintf(stderr, "ptxemu: _cudaLaunchKernel unsupported\n");
  return 999;
}
API int _cudaLibraryLoadData(void** lib, const void* code, void*, void*, unsigned, void*, void*,
                             unsigned) {
  *lib = g_load(code);
  return *lib ? 0 : 200;
}
API int _cudaLibraryGetKernel(void** k, void* lib, const char* name) {
  *k = g_getk(lib, name);
  return *k ? 0 : 500;
}
API int _cudaLibraryUnload(void*) { return 0; }
API int _cuKernelGetAttribute(int* v, int, void*, int) {
  *v = 0;
  return 0;
}
API int _cudaDeviceGetAttribute(int* v, int attr, int) {
  *v = attr == 97 ? 232448 : attr == 16 ? 148 : 1;
  return 0;
}
API int _cudaGetDevice(int* d) {
  *d = 0;
  return 0;
}
API int _cudaGetDeviceCount(int* d) {
  *d = 1;
  return 0;
}
API int _cuDeviceGet(int* d, int) {
  *d = 0;
  return 0;
}
API int _cudaSetDevice(int) { return 0; }
API int _cudaKernelSetAttributeForDevice(void*, int, int, int) { return 0; }
API int _cudaFuncSetAttribute(void*, int, int) { return 0; }
API int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int, size_t) {
  *n = 1;
  return 0;
}
API int _cudaDeviceSynchronize() { return g_settle(); }
API int _cudaStreamSynchronize(void*) { return g_settle(); }
API int _cudaMemcpy(void* d, const void* s, size_t n, int) {
  if (int status = g_settle()) return status;
  memcpy(d, s, n);
  return 0;
}
API int _cudaMemcpyAsync(void* d, const void* s, size_t n, int kind, void*) {
  return _cudaMemcpy(d, s, n, kind);
}
API int _cudaMemset(void* d, int v, size_t n) {
  if (int status = g_settle()) return status;
  memset(d, v, n);
  return 0;
}
API int _cudaMemsetAsync(void* d, int v, size_t n, void*) { return _cudaMemset(d, v, n); }
API int _cudaMalloc(void** p, size_t n) {
  *p = aligned_alloc(256, (n + 255) & ~255ull);
  g_alloc(*p, n);
  return 0;
}
API int _cudaMallocAsync(void** p, size_t n, void*) { return _cudaMalloc(p, n); }
API int _cudaFree(void* p) {
  if (int status = g_settle()) return status;
  g_alloc(p, 0);
  free(p);
  return 0;
}
API int _cudaFreeAsync(void* p, void*) { return _cudaFree(p); }
API int cuda_dialect_init_library_once(void** lib, int (*init)(void**), int (*load)(void**, int),
                                       void (*err)(const char*, const char*)) {
  if (*lib) return 0;
  void* l = nullptr;
  int rc = init(&l);
  if (!rc && load) rc = load(&l, 0);
  if (rc) {
    err("RuntimeError", "ptxemu: loading the kernel failed (see stderr)");
    return -1;
  }
  *lib = l;
  return 0;
}
API void cuda_dialect_unload_library_once(void**) {}
API const char* cuda_dialect_get_error_name(int e) {
  return e == 719 ? "ptxemu: kernel failed (see stderr)" : "ptxemu error";
}
API void cuda_dialect_assert_success(int e) {
  if (e) {
    fprintf(stderr, "ptxemu: cuda error %d\n", e);
    abort();
  }
}
API void cuda_dialect_print_on_error(int e) {
  if (e) fprintf(stderr, "ptxemu: cuda error %d\n", e);
}
typedef void (*raise_parts)(const char*, const char**, int);
API void CuteDSLRT_TVMFFISetRaisedCudaError(raise_parts err, int code) {
  const char* parts[1] = {cuda_dialect_get_error_name(code)};
  if (err) err("RuntimeError", parts, 1);
}
API void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(raise_parts err, int code) {
  CuteDSLRT_TVMFFISetRaisedCudaError(err, code);
}
// Write a tensor map in the bit layout of the DSL's inline encoder (see decode_tmap). The arguments
// must meet the requirements of the driver API's cuTensorMapEncodeTiled.
API int _cuTensorMapEncodeTiled(void* map, int dtype, u32 rank, void* addr, const u64* dim,
                                const u64* stride, const u32* box, const u32* estride,
                                int interleave, int swizzle, int l2, int oob) {
  auto refuse = [](const char* why) {
    fprintf(stderr, "ptxemu: cuTensorMapEncodeTiled: %s\n", why);
    return 1;  // CUDA_ERROR_INVALID_VALUE
  };
  static const int hw[14] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7, 8, 11};
  static const int ebits[14] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4};
  if (dtype < 0 || dtype > 13) return refuse("this data type is not modelled");
  if (interleave || swizzle == 5 || oob) return refuse("this form is not modelled");
  if (rank < 1 || rank > 5) return refuse("the rank is not 1 to 5");
  if ((u64)map % 64) return refuse("the map is not 64-byte aligned");
  if ((u64)addr % 16) return refuse("the address is not 16-byte aligned");
  u64 row = (u64)box[0] * ebits[dtype] / 8;
  if (row % 16) return refuse("a box's row is not a multiple of 16 bytes");
  if (swizzle < 0 || swizzle > 6 || row > SWIZZLE_SPAN[swizzle])
    return refuse("a box's row exceeds the swizzle's span");
  u64 w[16] = {0};
  w[0] = (u64)addr;
  u64 sw = swizzle > 3 ? 3 : swizzle, atom = swizzle == 4 ? 1 : swizzle == 6 ? 3 : 0;
  w[1] = 2 | (u64)(rank - 1) << 4 | (u64)hw[dtype] << 7 | sw << 13 |
         (u64)(dtype == 11 || dtype == 12) << 16 | (u64)(l2 & 3) << 17 | atom << 19;
  for (u32 i = 0; i < rank; i++) {
    if (dim[i] < 1 || dim[i] > 1ull << 32) return refuse("a dimension is not 1 to 2^32");
    if (box[i] < 1 || box[i] > 256) return refuse("a box's dimension is not 1 to 256");
    if (estride[i] != 1) return refuse("element strides are not modelled");
    w[4 + i / 2] |= (u64)(u32)(dim[i] - 1) << (32 * (i % 2));
    if (i == 0)
      w[6] |= (u64)(box[0] - 1) << 56;
    else
      w[7] |= (u64)(box[i] - 1) << (8 * (i - 1));
    if (i + 1 < rank) {
      if (stride[i] % 16) return refuse("a stride is not a multiple of 16 bytes");
      if (stride[i] >= 1ull << 40) return refuse("a stride is not below 2^40 bytes");
      u64 q = stride[i] >> 4;
      static const int wd[4] = {1, 2, 2, 3}, ps[4] = {32, 0, 32, 0};
      w[wd[i]] |= (q & 0xffffffff) << ps[i];
      w[3] |= (q >> 32 & 15) << (32 + 4 * i);
    }
  }
  memcpy(map, w, 128);
  return 0;
}
