// Number formats of the GPU: half, bfloat16, the 8-, 6- and 4-bit floats and TF32.
#pragma once
#include "base.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

template <class T, class U>
static inline T bits(U x) {
  T r;
  static_assert(sizeof(T) == sizeof(U), "");
  memcpy(&r, &x, sizeof r);
  return r;
}

#ifdef __F16C__  // before GCC 12 there is no _Float16 for x86
static inline float half_to_float(u16 h) { return _cvtsh_ss(h); }
static inline u16 float_to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
#else
static inline float half_to_float(u16 h) { return (float)bits<_Float16>(h); }
static inline u16 float_to_half(float f) { return bits<u16>((_Float16)f); }
#endif
static inline float bf16_to_float(u16 h) { return bits<float>((u32)h << 16); }
static inline u16 float_to_bf16(float f) {
  u32 u = bits<u32>(f);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
// A small float with e exponent bits and m mantissa bits. kind 0: IEEE-like with inf; 1: e4m3fn;
// 2: without inf and NaN.
static float small_to_float(u32 v, int e, int m, int kind) {
  u32 sign = v >> (e + m) & 1, ex = v >> m & ((1u << e) - 1), man = v & ((1u << m) - 1);
  int bias = (1 << (e - 1)) - 1;
  float r;
  if (kind == 0 && ex == (1u << e) - 1)
    r = man ? NAN : INFINITY;
  else if (kind == 1 && ex == (1u << e) - 1 && man == (1u << m) - 1)
    r = NAN;
  else if (ex == 0)
    r = std::ldexp((float)man, 1 - bias - m);
  else
    r = std::ldexp((float)(man | 1u << m), (int)ex - bias - m);
  return sign ? -r : r;
}
static u32 float_to_small(float f, int e, int m, int kind, bool satfinite) {
  u32 sign = bits<u32>(f) >> 31;
  float a = std::fabs(f);
  int bias = (1 << (e - 1)) - 1;
  u32 nanv = kind == 0 ? (((1u << e) - 1) << m | ((1u << m) - 1)) : (1u << (e + m)) - 1;
  u32 maxv = kind == 0   ? (((1u << e) - 2) << m | ((1u << m) - 1))
             : kind == 1 ? (1u << (e + m)) - 2
                         : (1u << (e + m)) - 1;
  if (std::isnan(f)) return kind == 2 ? maxv : (kind == 1 ? 0x7f : nanv);
  float maxf = small_to_float(maxv, e, m, kind);
  int ex;
  std::frexp(a, &ex);
  ex -= 1;
  if (a == 0) return sign << (e + m);
  if (ex < 1 - bias) ex = 1 - bias;
  float q = std::nearbyint(std::ldexp(a, m - ex));  // round to nearest even
  float r = std::ldexp(q, ex - m);
  if (r > maxf) {
    if (satfinite || kind == 2) return sign << (e + m) | maxv;
    return sign << (e + m) | (kind == 0 ? ((1u << e) - 1) << m : 0x7f);
  }
  u32 out;
  if (r < std::ldexp(1.0f, 1 - bias))
    out = (u32)std::ldexp(r, bias - 1 + m);
  else {
    int x;
    float fr = std::frexp(r, &x);
    x -= 1;
    out = (u32)(x + bias) << m | ((u32)std::ldexp(fr * 2 - 1, m));
  }
  return sign << (e + m) | out;
}
static float g_e4m3[256], g_e5m2[256];
struct InitTables {
  InitTables() {
    for (int i = 0; i < 256; i++) {
      g_e4m3[i] = small_to_float(i, 4, 3, 1);
      g_e5m2[i] = small_to_float(i, 5, 2, 0);
    }
  }
} g_init_tables;

// Convert sixteen e4m3 numbers as vectors, without the table. Numbers below 8 have no leading 1, and
// no step may make a denormal float32, which takes a hundred cycles.
static inline void e4m3_to_float(const u8* p, float* out) {
  typedef u8 Bytes __attribute__((vector_size(16)));
  typedef s32 Words __attribute__((vector_size(64)));
  typedef float Floats __attribute__((vector_size(64)));
  Bytes bytes;
  memcpy(&bytes, p, 16);
  Words v = __builtin_convertvector(bytes, Words), number = v & 0x7f;
  Words small = (Words)(__builtin_convertvector(number, Floats) * 0x1p-9f);
  Words r = number < 8 ? small : (number << 20) + (120 << 23);
  r = number == 0x7f ? 0x7fc00000 + 0 * v : r;  // NaN
  r |= v >> 7 << 31;
  memcpy(out, &r, 64);
}

enum Fmt {
  F_F16,
  F_BF16,
  F_TF32,
  F_E4M3,
  F_E5M2,
  F_E2M3,
  F_E3M2,
  F_E2M1,
  F_U8,
  F_S8,
  F_FP4
};  // F_E2M1: one per byte; F_FP4: two per byte
static int fmt_bits(Fmt f) { return f == F_TF32 ? 32 : f <= F_BF16 ? 16 : f == F_FP4 ? 4 : 8; }
static int fmt_bytes(Fmt f) { return std::max(1, fmt_bits(f) / 8); }
static inline float fmt_load(Fmt f, const u8* p) {
  switch (f) {
    case F_F16: {
      u16 v;
      memcpy(&v, p, 2);
      return half_to_float(v);
    }
    case F_BF16: {
      u16 v;
      memcpy(&v, p, 2);
      return bf16_to_float(v);
    }
    case F_TF32: {
      u32 v;
      memcpy(&v, p, 4);
      return bits<float>(v & 0xffffe000u);
    }
    case F_E4M3: return g_e4m3[*p];
    case F_E5M2: return g_e5m2[*p];
    case F_E2M3: return small_to_float(*p & 63, 2, 3, 2);
    case F_E3M2: return small_to_float(*p & 63, 3, 2, 2);
    case F_E2M1:
      return small_to_float(*p >> 2 & 15, 2, 1, 2);  // unpacked in the middle of the byte
    case F_U8: return *p;
    case F_S8: return (s8)*p;
    case F_FP4: return 0;  // see fmt_load_at
  }
  return 0;
}
static inline float fmt_load_at(Fmt f, const u8* p, int i) {  // element i of a packed row
  return f == F_FP4 ? small_to_float(p[i / 2] >> (4 * (i & 1)) & 15, 2, 1, 2)
                    : fmt_load(f, p + i * fmt_bytes(f));
}
