// Handlers: integers, floating point, conversions, predicates, moves.
#pragma once
#include "handler.h"
#include "numerics.h"
#include "special_functions.h"
#include "types.h"

template <class T, class F>
static Status un(Ctx& c, const Instr& I, F f) {
  u64 *d = RS(0), *a = RS(1);
  lanes(c.mask, [&](int l) { d[l] = Val<T>::put(f(Val<T>::get(a[l]))); });
  return NEXT;
}
template <class T, class F>
static Status bi(Ctx& c, const Instr& I, F f) {
  u64 *d = RS(0), *a = RS(1), *b = RS(2);
  lanes(c.mask, [&](int l) { d[l] = Val<T>::put(f(Val<T>::get(a[l]), Val<T>::get(b[l]))); });
  return NEXT;
}
template <class T, class F>
static Status tri(Ctx& c, const Instr& I, F f) {
  u64 *d = RS(0), *a = RS(1), *b = RS(2), *e = RS(3);
  lanes(c.mask, [&](int l) {
    d[l] = Val<T>::put(f(Val<T>::get(a[l]), Val<T>::get(b[l]), Val<T>::get(e[l])));
  });
  return NEXT;
}
// Two 32-bit (or 16-bit) values in one register.
template <class T, int W, class F>
static Status packed(Ctx& c, const Instr& I, int n, F f) {
  u64* r[4];
  for (int i = 0; i <= n; i++) r[i] = RS(i);
  lanes(c.mask, [&](int l) {
    u64 out = 0;
    for (int h = 0; h < 2; h++) {
      typename Val<T>::type x[3] = {};
      for (int i = 0; i < n; i++)
        x[i] = Val<T>::get(r[i + 1][l] >> (h * W) & (W == 32 ? 0xffffffffull : 0xffffull));
      out |= Val<T>::put(f(x)) << (h * W);
    }
    r[0][l] = out;
  });
  return NEXT;
}
[[noreturn]] static void unmodelled(const Ctx& c) {
  fail(c, "instruction not modelled: " + c.ins->op);
}

#define BY_INT(t, ...) \
  switch (t) {         \
    case T_U16: {      \
      typedef u16 T;   \
      __VA_ARGS__;     \
    }                  \
    case T_S16: {      \
      typedef s16 T;   \
      __VA_ARGS__;     \
    }                  \
    case T_U32: {      \
      typedef u32 T;   \
      __VA_ARGS__;     \
    }                  \
    case T_S32: {      \
      typedef s32 T;   \
      __VA_ARGS__;     \
    }                  \
    case T_U64: {      \
      typedef u64 T;   \
      __VA_ARGS__;     \
    }                  \
    case T_S64: {      \
      typedef s64 T;   \
      __VA_ARGS__;     \
    }                  \
    default: break;    \
  }
#define BY_FLT(t, ...)  \
  switch (t) {          \
    case T_F32: {       \
      typedef float T;  \
      __VA_ARGS__;      \
    }                   \
    case T_F64: {       \
      typedef double T; \
      __VA_ARGS__;      \
    }                   \
    case T_F16: {       \
      typedef f16t T;   \
      __VA_ARGS__;      \
    }                   \
    case T_BF16: {      \
      typedef bf16t T;  \
      __VA_ARGS__;      \
    }                   \
    default: break;     \
  }

// I.i0 = type for all arithmetic handlers
static Status h_add(ARGS) {
  BY_INT(I.i0, return bi<T>(c, I, [](T a, T b) { return (T)((u64)a + (u64)b); }))
  bool sat = I.i1;
  BY_FLT(I.i0, return bi<T>(c, I, [sat](auto a, auto b) {
           auto r = a + b;
           if (sat) r = r < 0 ? 0 : r > 1 ? 1 : r;
           return r;
         }))
  if (I.i0 == T_F32X2) return packed<float, 32>(c, I, 2, [](float* x) { return x[0] + x[1]; });
  if (I.i0 == T_F16X2) return packed<f16t, 16>(c, I, 2, [](float* x) { return x[0] + x[1]; });
  if (I.i0 == T_BF16X2) return packed<bf16t, 16>(c, I, 2, [](float* x) { return x[0] + x[1]; });
  unmodelled(c);
}
static Status h_sub(ARGS) {
  BY_INT(I.i0, return bi<T>(c, I, [](T a, T b) { return (T)((u64)a - (u64)b); }))
  BY_FLT(I.i0, return bi<T>(c, I, [](auto a, auto b) { return a - b; }))
  if (I.i0 == T_F32X2) return packed<float, 32>(c, I, 2, [](float* x) { return x[0] - x[1]; });
  if (I.i0 == T_F16X2) return packed<f16t, 16>(c, I, 2, [](float* x) { return x[0] - x[1]; });
  if (I.i0 == T_BF16X2) return packed<bf16t, 16>(c, I, 2, [](float* x) { return x[0] - x[1]; });
  unmodelled(c);
}
// float32 and one operand of I.i0: d = a + c, or with I.i1 negative a - c
static Status h_add_mixed(ARGS) {
  u64 *d = RS(0), *a = RS(1), *e = RS(2);
  lanes(c.mask, [&](int l) {
    float x = I.i0 == T_F16 ? half_to_float((u16)a[l]) : bf16_to_float((u16)a[l]);
    float y = Val<float>::get(e[l]);
    d[l] = Val<float>::put(I.i1 < 0 ? x - y : x + y);
  });
  return NEXT;
}
// d = a * b + c in float32, a and b of I.i0
static Status h_fma_mixed(ARGS) {
  u64 *d = RS(0), *a = RS(1), *b = RS(2), *e = RS(3);
  auto get = [&](u64 v) { return I.i0 == T_F16 ? half_to_float((u16)v) : bf16_to_float((u16)v); };
  lanes(c.mask, [&](int l) {
    d[l] = Val<float>::put(std::fma(get(a[l]), get(b[l]), Val<float>::get(e[l])));
  });
  return NEXT;
}
// I.i1: 0 lo, 1 hi, 2 wide
template <class T>
static u64 mul_int(u64 a, u64 b, int part) {
  const int W = sizeof(T) * 8;
  __int128 p = (__int128)Val<T>::get(a) * (__int128)Val<T>::get(b);
  if (!std::is_signed<T>::value)
    p = (__int128)((unsigned __int128)(u64)Val<T>::get(a) * (u64)Val<T>::get(b));
  if (part == 1) return Val<T>::put((T)(p >> W));
  if (part == 2) return W == 32 ? (u64)p : (u64)p & 0xffffffffull;
  return Val<T>::put((T)p);
}
static Status h_mul(ARGS) {
  BY_INT(I.i0, {
    u64 *d = RS(0), *a = RS(1), *b = RS(2);
    int p = I.i1;
    lanes(c.mask, [&](int l) { d[l] = mul_int<T>(a[l], b[l], p); });
    return NEXT;
  })
  BY_FLT(I.i0, return bi<T>(c, I, [](auto a, auto b) { return a * b; }))
  if (I.i0 == T_F32X2) return packed<float, 32>(c, I, 2, [](float* x) { return x[0] * x[1]; });
  if (I.i0 == T_F16X2) return packed<f16t, 16>(c, I, 2, [](float* x) { return x[0] * x[1]; });
  if (I.i0 == T_BF16X2) return packed<bf16t, 16>(c, I, 2, [](float* x) { return x[0] * x[1]; });
  unmodelled(c);
}
static Status h_mad(ARGS) {
  BY_INT(I.i0, {
    u64 *d = RS(0), *a = RS(1), *b = RS(2), *e = RS(3);
    int p = I.i1;
    u64 keep = p == 2           ? (sizeof(T) == 2 ? 0xffffffffull : ~0ull)
               : sizeof(T) == 8 ? ~0ull
                                : (1ull << (8 * (sizeof(T) & 7))) - 1;
    lanes(c.mask, [&](int l) { d[l] = (mul_int<T>(a[l], b[l], p) + e[l]) & keep; });
    return NEXT;
  })
  unmodelled(c);
}
// Directed rounding, as in the exponential function of CUDA's library.
static Status h_fma_directed(ARGS) {
  int before = std::fegetround();
  std::fesetround(I.i1);
  Status status = tri<float>(c, I, [](float a, float b, float x) {
    volatile float va = a, vb = b, vx = x;  // no operation may pass a change of the mode
    volatile float r = std::fma(va, vb, vx);
    return r;
  });
  std::fesetround(before);
  return status;
}
static Status h_fma(ARGS) {
  bool relu = I.i1;
  if (I.i0 == T_F32)
    return tri<float>(c, I, [](float a, float b, float x) { return std::fma(a, b, x); });
  if (I.i0 == T_F64)
    return tri<double>(c, I, [](double a, double b, double x) { return std::fma(a, b, x); });
  if (I.i0 == T_F16)
    return tri<f16t>(c, I, [relu](float a, float b, float x) {
      float r = std::fma((double)a, b, x);
      return relu && r < 0 ? 0.f : r;
    });
  if (I.i0 == T_BF16)
    return tri<bf16t>(c, I, [relu](float a, float b, float x) {
      float r = std::fma(a, b, x);
      return relu && r < 0 ? 0.f : r;
    });
  if (I.i0 == T_F32X2)
    return packed<float, 32>(c, I, 3, [](float* x) { return std::fma(x[0], x[1], x[2]); });
  if (I.i0 == T_F16X2)
    return packed<f16t, 16>(c, I, 3, [](float* x) { return std::fma(x[0], x[1], x[2]); });
  if (I.i0 == T_BF16X2)
    return packed<bf16t, 16>(c, I, 3, [](float* x) { return std::fma(x[0], x[1], x[2]); });
  unmodelled(c);
}
static Status h_div(ARGS) {
  BY_INT(I.i0, return bi<T>(c, I, [](T a, T b) {
           return b == 0                                     ? (T) ~(T)0
                  : (std::is_signed<T>::value && b == (T)-1) ? (T)(0 - (u64)a)
                                                             : (T)(a / b);
         }))
  BY_FLT(I.i0, return bi<T>(c, I, [](auto a, auto b) { return a / b; }))
  unmodelled(c);
}
static Status h_rem(ARGS) {
  BY_INT(I.i0, return bi<T>(c, I, [](T a, T b) {
           return b == 0 ? a : (std::is_signed<T>::value && b == (T)-1) ? (T)0 : (T)(a % b);
         }))
  unmodelled(c);
}
template <class T>
static T fmin2(T a, T b, bool nan) {
  if (std::isnan(a) || std::isnan(b)) return nan ? (T)NAN : std::isnan(a) ? b : a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T>
static T fmax2(T a, T b, bool nan) {
  if (std::isnan(a) || std::isnan(b)) return nan ? (T)NAN : std::isnan(a) ? b : a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
// I.i1: bit 0 passes on a NaN, bit 1 replaces a negative result by 0
static Status h_min(ARGS) {
  bool n = I.i1 & 1, relu = I.i1 & 2;
  BY_INT(I.i0, return bi<T>(c, I, [relu](T a, T b) {
           T x = a < b ? a : b;
           return relu && x < 0 ? (T)0 : x;
         }))
  if (I.o.size() == 4 && I.i0 == T_F32)
    return tri<float>(c, I, [n](float a, float b, float x) { return fmin2(fmin2(a, b, n), x, n); });
  BY_FLT(I.i0, return bi<T>(c, I, [n](auto a, auto b) { return fmin2(a, b, n); }))
  if (I.i0 == T_F16X2)
    return packed<f16t, 16>(c, I, 2, [n](float* x) { return fmin2(x[0], x[1], n); });
  if (I.i0 == T_BF16X2)
    return packed<bf16t, 16>(c, I, 2, [n](float* x) { return fmin2(x[0], x[1], n); });
  unmodelled(c);
}
static Status h_max(ARGS) {
  bool n = I.i1 & 1, relu = I.i1 & 2;
  BY_INT(I.i0, return bi<T>(c, I, [relu](T a, T b) {
           T x = a > b ? a : b;
           return relu && x < 0 ? (T)0 : x;
         }))
  if (I.o.size() == 4 && I.i0 == T_F32)
    return tri<float>(c, I, [n](float a, float b, float x) { return fmax2(fmax2(a, b, n), x, n); });
  BY_FLT(I.i0, return bi<T>(c, I, [n](auto a, auto b) { return fmax2(a, b, n); }))
  if (I.i0 == T_F16X2)
    return packed<f16t, 16>(c, I, 2, [n](float* x) { return fmax2(x[0], x[1], n); });
  if (I.i0 == T_BF16X2)
    return packed<bf16t, 16>(c, I, 2, [n](float* x) { return fmax2(x[0], x[1], n); });
  unmodelled(c);
}
static Status h_neg(ARGS) {
  BY_INT(I.i0, return un<T>(c, I, [](T a) { return (T)(0 - (u64)a); }))
  BY_FLT(I.i0, return un<T>(c, I, [](auto a) { return -a; }))
  if (I.i0 == T_F16X2 || I.i0 == T_BF16X2)
    return un<u32>(c, I, [](u32 a) { return a ^ 0x80008000u; });
  unmodelled(c);
}
static Status h_abs(ARGS) {
  BY_INT(I.i0, return un<T>(c, I, [](T a) { return a < 0 ? (T)(0 - (u64)a) : a; }))
  BY_FLT(I.i0, return un<T>(c, I, [](auto a) { return std::fabs(a); }))
  if (I.i0 == T_F16X2 || I.i0 == T_BF16X2)
    return un<u32>(c, I, [](u32 a) { return a & 0x7fff7fffu; });
  unmodelled(c);
}
static Status h_logic(ARGS) {  // i0: 0 and 1 or 2 xor 3 not; i1: bytes (0 = predicate)
  u64 keep = I.i1 == 0 ? 1 : I.i1 == 8 ? ~0ull : (1ull << (8 * I.i1)) - 1;
  u64 *d = RS(0), *a = RS(1);
  if (I.i0 == 3) {
    lanes(c.mask, [&](int l) { d[l] = ~a[l] & keep; });
    return NEXT;
  }
  u64* b = RS(2);
  u64 na = I.o[1].kind == 'N' ? 1 : 0, nb = I.o[2].kind == 'N' ? 1 : 0;
  switch (I.i0) {
    case 0: lanes(c.mask, [&](int l) { d[l] = (a[l] ^ na) & (b[l] ^ nb) & keep; }); break;
    case 1: lanes(c.mask, [&](int l) { d[l] = ((a[l] ^ na) | (b[l] ^ nb)) & keep; }); break;
    case 2: lanes(c.mask, [&](int l) { d[l] = ((a[l] ^ na) ^ (b[l] ^ nb)) & keep; }); break;
  }
  return NEXT;
}
static Status h_shift(ARGS) {  // i1: 0 shl, 1 shr
  BY_INT(I.i0, {
    u64 *d = RS(0), *a = RS(1), *b = RS(2);
    const u32 W = sizeof(T) * 8;
    bool right = I.i1;
    lanes(c.mask, [&](int l) {
      u32 s = (u32)b[l];
      T v = Val<T>::get(a[l]);
      if (right)
        v = s >= W ? (std::is_signed<T>::value && v < 0 ? (T)-1 : (T)0) : (T)(v >> s);
      else
        v = s >= W ? (T)0 : (T)((u64)v << s);
      d[l] = Val<T>::put(v);
    });
    return NEXT;
  })
  unmodelled(c);
}
static Status h_shf(ARGS) {  // i0: 1 right; i1: 1 wrap
  u64 *d = RS(0), *a = RS(1), *b = RS(2), *s = RS(3);
  lanes(c.mask, [&](int l) {
    u32 n = I.i1 ? (u32)s[l] & 31 : std::min<u32>((u32)s[l], 32);
    u64 v = (b[l] & 0xffffffff) << 32 | (a[l] & 0xffffffff);
    d[l] = I.i0 ? (u32)(v >> n) : (u32)((v << n) >> 32);
  });
  return NEXT;
}
static Status h_bits(ARGS) {  // i1 selects the function, i0 the type
  u64 *d = RS(0), *a = RS(1);
  int W = ty_bytes(I.i0) * 8;
  bool sg = I.i0 == T_S32 || I.i0 == T_S64;
  lanes(c.mask, [&](int l) {
    u64 v = W == 64 ? a[l] : a[l] & 0xffffffffull, r = 0;
    switch (I.i1) {
      case 0: r = __builtin_popcountll(v); break;
      case 1: r = v ? __builtin_clzll(v) - (64 - W) : W; break;
      case 2:
        for (int i = 0; i < W; i++) r |= (v >> i & 1) << (W - 1 - i);
        break;
      case 3: {
        if (sg && v >> (W - 1) & 1) v = ~v & (W == 64 ? ~0ull : 0xffffffffull);
        r = v ? 63 - __builtin_clzll(v) : 0xffffffffull;
        if (v && I.i2) r = W - 1 - r;
        break;
      }  // bfind
    }
    d[l] = r;
  });
  return NEXT;
}
static Status h_bfe(ARGS) {
  u64 *d = RS(0), *a = RS(1), *p = RS(2), *n = RS(3);
  int W = ty_bytes(I.i0) * 8;
  bool sg = I.i0 == T_S32 || I.i0 == T_S64;
  lanes(c.mask, [&](int l) {
    u32 pos = p[l] & 255, len = n[l] & 255;
    u64 v = W == 64 ? a[l] : a[l] & 0xffffffffull;
    u64 sign = 0;
    if (sg && len) {
      u32 top = std::min<u32>(pos + len - 1, W - 1);
      sign = v >> top & 1;
    }
    u64 r = 0;
    for (int i = 0; i < W; i++)
      r |= (u64)(((u32)i < len && pos + i < (u32)W) ? v >> (pos + i) & 1 : sign) << i;
    d[l] = r;
  });
  return NEXT;
}
static Status h_bfi(ARGS) {
  u64 *d = RS(0), *a = RS(1), *b = RS(2), *p = RS(3), *n = RS(4);
  int W = ty_bytes(I.i0) * 8;
  lanes(c.mask, [&](int l) {
    u64 r = b[l];
    u32 pos = p[l] & 255, len = n[l] & 255;
    for (u32 i = 0; i < len && pos + i < (u32)W; i++) {
      r &= ~(1ull << (pos + i));
      r |= (a[l] >> i & 1) << (pos + i);
    }
    d[l] = W == 64 ? r : r & 0xffffffffull;
  });
  return NEXT;
}
static Status h_prmt(ARGS) {
  u64 *d = RS(0), *a = RS(1), *b = RS(2), *s = RS(3);
  lanes(c.mask, [&](int l) {
    u64 v = (b[l] & 0xffffffff) << 32 | (a[l] & 0xffffffff);
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
      u32 q = s[l] >> (4 * i) & 15;
      u8 x = v >> (8 * (q & 7));
      if (q & 8) x = (s8)x < 0 ? 0xff : 0;
      r |= (u32)x << (8 * i);
    }
    d[l] = r;
  });
  return NEXT;
}
static Status h_lop3(ARGS) {
  u64 *d = RS(0), *a = RS(1), *b = RS(2), *e = RS(3), *f = RS(4);
  lanes(c.mask, [&](int l) {
    u32 r = 0, t = (u32)f[l], x = (u32)a[l], y = (u32)b[l], z = (u32)e[l];
    for (int k = 0; k < 8; k++)
      if (t >> k & 1) r |= (k & 4 ? x : ~x) & (k & 2 ? y : ~y) & (k & 1 ? z : ~z);
    d[l] = r;
  });
  return NEXT;
}
static Status h_selp(ARGS) {
  u64 *d = RS(0), *a = RS(1), *b = RS(2);
  int by = ty_bytes(I.i0);
  u64 keep = by == 8 ? ~0ull : (1ull << (8 * by)) - 1;
  lanes(c.mask, [&](int l) { d[l] = (predval(c, I.o[3], l) ? a[l] : b[l]) & keep; });
  return NEXT;
}
template <class T>
static bool cmp(T a, T b, int op) {
  switch (op) {
    case 0: return a == b;
    case 1: return a != b;
    case 2: return a < b;
    case 3: return a <= b;
    case 4: return a > b;
    case 5: return a >= b;
  }
  bool nan = a != a || b != b;
  switch (op) {
    case 6: return nan || a == b;
    case 7: return nan || a != b;
    case 8: return nan || a < b;
    case 9: return nan || a <= b;
    case 10: return nan || a > b;
    case 11: return nan || a >= b;
    case 12: return !nan;
    case 13: return nan;
  }
  return false;
}
template <class T>
static u32 compare(Ctx& c, const u64* a, const u64* b, int op) {
  u32 r = 0;
  lanes(c.mask, [&](int l) { r |= (u32)cmp(Val<T>::get(a[l]), Val<T>::get(b[l]), op) << l; });
  return r;
}
static u32 compare_floats(Ctx& c, const u64* a, const u64* b, int op) {
  if (op != 1) return compare<float>(c, a, b, op);
  // Not equal, and neither is a NaN.
  return compare<float>(c, a, b, 12) & ~compare<float>(c, a, b, 0);
}
// i0 type, i1 comparison, i2 boolean op (0 none 1 and 2 or 3 xor), i3 number of destinations, i4 of
// set (not setp): result type + 1
static Status h_setp(ARGS) {
  int nd = I.i3;
  const u64 *a = RS(nd), *b = RS(nd + 1);
  u32 result;
  switch (I.i0) {
    case T_U8: result = compare<u8>(c, a, b, I.i1); break;
    case T_U16: result = compare<u16>(c, a, b, I.i1); break;
    case T_S16: result = compare<s16>(c, a, b, I.i1); break;
    case T_U32: result = compare<u32>(c, a, b, I.i1); break;
    case T_S32: result = compare<s32>(c, a, b, I.i1); break;
    case T_U64: result = compare<u64>(c, a, b, I.i1); break;
    case T_S64: result = compare<s64>(c, a, b, I.i1); break;
    case T_F32: result = compare_floats(c, a, b, I.i1); break;
    case T_F64: result = compare<double>(c, a, b, I.i1); break;
    case T_F16: result = compare<f16t>(c, a, b, I.i1); break;
    case T_BF16: result = compare<bf16t>(c, a, b, I.i1); break;
    default: unmodelled(c);
  }
  u64 yes = I.i4 == 0 ? 1 : I.i4 - 1 == T_F32 ? 0x3f800000ull : 0xffffffffull;
  lanes(c.mask, [&](int l) {
    bool r = result >> l & 1, q = !r;
    if (I.i2) {
      bool x = predval(c, I.o[nd + 2], l);
      r = I.i2 == 1 ? r && x : I.i2 == 2 ? r || x : r != x;
      q = I.i2 == 1 ? q && x : I.i2 == 2 ? q || x : q != x;
    }
    if (I.o[0].slot >= 0) c.w.R(I.o[0].slot)[l] = r ? yes : 0;
    if (nd == 2 && I.o[1].slot >= 0) c.w.R(I.o[1].slot)[l] = q;
  });
  return NEXT;
}
static Status h_math(ARGS) {  // i1: function, i2: approx.ftz
  if (I.i2 && c.m.opt.hopper_arithmetic) {
    if (I.i1 == 1) return un<float>(c, I, hopper_rcp);
    if (I.i1 == 3) return un<float>(c, I, hopper_ex2);
  }
  return un<float>(c, I, [&](float x) -> float {
    switch (I.i1) {
      case 0: return std::sqrt(x);
      case 1: return 1.0f / x;
      case 2: return 1.0f / std::sqrt(x);
      case 3: return std::exp2(x);
      case 4: return std::log2(x);
      case 5: return std::sin(x);
      case 6: return std::cos(x);
      case 7: return std::tanh(x);
    }
    return 0;
  });
}
static Status h_math64(ARGS) {
  return un<double>(c, I, [&](double x) { return I.i1 == 0 ? std::sqrt(x) : 1.0 / x; });
}
static Status h_copysign(ARGS) {
  return bi<float>(c, I, [](float a, float b) { return std::copysign(b, a); });
}

// mov, possibly packing or unpacking vectors
static Status h_mov(ARGS) {
  const Opnd &d = I.o[0], &s = I.o[1];
  int by = I.i0;
  if (d.kind == 'V') {  // unpack
    int n = d.v.size(), w = by * 8 / n;
    u64* a = RS(1);
    u64* a2 = by == 16 ? c.w.R(s.slot + 1) : nullptr;
    // read before write: a destination may be the source
    u64 v[32], v2[32];
    memcpy(v, a, sizeof v);
    if (a2) memcpy(v2, a2, sizeof v2);
    for (int i = 0; i < n; i++)
      if (d.v[i].slot >= 0) {
        u64* o = c.w.R(d.v[i].slot);
        lanes(c.mask, [&](int l) {
          u64 x = by == 16 && i * w >= 64 ? v2[l] >> (i * w - 64) : v[l] >> (i * w);
          o[l] = w == 64 ? x : x & ((1ull << w) - 1);
        });
      }
  } else if (s.kind == 'V') {  // pack
    int n = s.v.size(), w = by * 8 / n;
    u64 v[32] = {}, v2[32] = {};
    for (int i = 0; i < n; i++) {
      u64* a = c.w.R(s.v[i].slot);
      for (int l = 0; l < 32; l++) {
        u64 x = w == 64 ? a[l] : a[l] & ((1ull << w) - 1);
        if (i * w < 64)
          v[l] |= x << (i * w);
        else
          v2[l] |= x << (i * w - 64);
      }
    }
    u64* o = RS(0);
    lanes(c.mask, [&](int l) { o[l] = v[l]; });
    if (by == 16) {
      u64* o2 = c.w.R(d.slot + 1);
      lanes(c.mask, [&](int l) { o2[l] = v2[l]; });
    }
  } else {
    u64 keep = by == 0 ? 1 : by >= 8 ? ~0ull : (1ull << (8 * by)) - 1;
    u64 *o = RS(0), *a = RS(1);
    if (s.kind == 'N')
      lanes(c.mask, [&](int l) { o[l] = ~a[l] & 1; });
    else
      lanes(c.mask, [&](int l) { o[l] = a[l] & keep; });
    if (by == 16) {
      u64 *o2 = c.w.R(d.slot + 1), *a2 = c.w.R(s.slot + 1);
      lanes(c.mask, [&](int l) { o2[l] = a2[l]; });
    }
  }
  return NEXT;
}
static Status h_mov_clock(ARGS) {
  u64* o = RS(0);
  c.m.clock += 100;
  lanes(c.mask, [&](int l) { o[l] = c.m.clock; });
  return NEXT;
}

// cvt.  i0 destination type, i1 source type, i2 rounding (0 rn,1 rz,2 rm,3 rp,4 rni,5 rzi,6 rmi,7
// rpi), i3 flags 1 sat 2 relu 4 satfinite
enum { X_E4M3X2 = 100, X_E5M2X2, X_UE8M0X2, X_TF32, X_E2M1X2 };
static double cvt_read(int t, u64 v) {
  switch (t) {
    case T_F32: return bits<float>((u32)v);
    case T_F64: return bits<double>(v);
    case T_F16: return half_to_float((u16)v);
    case T_BF16: return bf16_to_float((u16)v);
  }
  return 0;
}
static bool is_float(int t) { return t == T_F32 || t == T_F64 || t == T_F16 || t == T_BF16; }
static s64 int_read(int t, u64 v) {
  switch (t) {
    case T_U8: return (u8)v;
    case T_S8: return (s8)v;
    case T_U16: return (u16)v;
    case T_S16: return (s16)v;
    case T_U32: return (u32)v;
    case T_S32: return (s32)v;
  }
  return (s64)v;
}
static double round_int(double x, int rm) {
  switch (rm & 3) {
    case 0: return std::nearbyint(x);
    case 1: return std::trunc(x);
    case 2: return std::floor(x);
  }
  return std::ceil(x);
}
static float round_to_float(double x, int rm) {
  float f = (float)x;
  if (rm == 1 && std::fabs((double)f) > std::fabs(x)) f = std::nextafter(f, 0.f);
  if (rm == 2 && (double)f > x) f = std::nextafter(f, -INFINITY);
  if (rm == 3 && (double)f < x) f = std::nextafter(f, INFINITY);
  return f;
}
static u64 to_half_like(double x, int t, int rm, int fl) {
  if ((fl & 2) && x < 0) x = 0;
  u16 h = t == T_F16 ? float_to_half((float)x) : float_to_bf16((float)x);
  auto back = [&](u16 v) {
    return t == T_F16 ? (double)half_to_float(v) : (double)bf16_to_float(v);
  };
  if (rm == 1 && !std::isnan(x) && std::fabs(back(h)) > std::fabs(x)) h--;
  if ((fl & 1)) {
    if (x <= 0 || std::isnan(x))
      h = 0;
    else if (x > 1)
      h = t == T_F16 ? 0x3c00 : 0x3f80;
  }
  if ((fl & 4) && std::isinf(back(h))) h = (h & 0x8000) | (t == T_F16 ? 0x7bff : 0x7f7f);
  return h;
}
static Status h_cvt(ARGS) {
  int dt = I.i0, st = I.i1, rm = I.i2, fl = I.i3;
  u64 *d = RS(0), *a = RS(1), *b = I.o.size() > 2 ? RS(2) : nullptr;
  lanes(c.mask, [&](int l) {
    u64 v = a[l], r = 0;
    if (dt == T_F16X2 || dt == T_BF16X2) {
      int ht = dt == T_F16X2 ? T_F16 : T_BF16;
      if (st == T_F32)
        r = to_half_like(cvt_read(T_F32, v), ht, rm, fl) << 16 |
            to_half_like(cvt_read(T_F32, b[l]), ht, rm, fl);
      else if (st == X_E4M3X2 || st == X_E5M2X2) {
        float* t = st == X_E4M3X2 ? g_e4m3 : g_e5m2;
        r = to_half_like(t[v >> 8 & 255], ht, 0, fl) << 16 | to_half_like(t[v & 255], ht, 0, fl);
      } else if (st == X_UE8M0X2)
        r = (u64)to_half_like(std::ldexp(1.0, (int)(v >> 8 & 255) - 127), ht, 0, 0) << 16 |
            to_half_like(std::ldexp(1.0, (int)(v & 255) - 127), ht, 0, 0);
      else if (st == X_E2M1X2)
        r = to_half_like(small_to_float(v >> 4 & 15, 2, 1, 2), ht, 0, fl) << 16 |
            to_half_like(small_to_float(v & 15, 2, 1, 2), ht, 0, fl);
      else
        unmodelled(c);
    } else if (dt == X_E4M3X2 || dt == X_E5M2X2) {
      float hi, lo;
      if (st == T_F32) {
        hi = cvt_read(T_F32, v);
        lo = cvt_read(T_F32, b[l]);
      } else if (st == T_F16X2) {
        hi = half_to_float(v >> 16);
        lo = half_to_float(v);
      } else if (st == T_BF16X2) {
        hi = bf16_to_float(v >> 16);
        lo = bf16_to_float(v);
      } else
        unmodelled(c);
      if (fl & 2) {
        if (hi < 0) hi = 0;
        if (lo < 0) lo = 0;
      }
      auto q = [&](float x) {
        return dt == X_E4M3X2 ? float_to_small(x, 4, 3, 1, true) : float_to_small(x, 5, 2, 0, true);
      };
      r = q(hi) << 8 | q(lo);
    } else if (dt == X_E2M1X2 && st == T_F32) {
      r = float_to_small(cvt_read(T_F32, v), 2, 1, 2, true) << 4 |
          float_to_small(cvt_read(T_F32, b[l]), 2, 1, 2, true);
    } else if (dt == X_UE8M0X2 && st == T_F32) {
      auto q = [&](float x) -> u64 {
        x = std::fabs(x);
        if (std::isnan(x)) return 255;
        if (x == 0) return 0;
        int e;
        float m = std::frexp(x, &e);
        int v = e - 1 + 127;
        if (rm == 3 && m != 0.5f) v++;
        return v < 0 ? 0 : v > 254 ? 254 : v;
      };
      r = q(cvt_read(T_F32, v)) << 8 | q(cvt_read(T_F32, b[l]));
    } else if (dt == X_TF32) {
      u32 u = (u32)v;
      if (rm == 1)
        u &= 0xffffe000u;
      else if (rm == 8)
        u = (u + 0x1000) & 0xffffe000u;
      else
        u = (u + 0xfff + (u >> 13 & 1)) & 0xffffe000u;
      r = u;
    } else if (dt > 50 || st > 50)
      unmodelled(c);
    else if (is_float(dt)) {
      double x = is_float(st) ? cvt_read(st, v) : st == T_U64 ? (double)v : (double)int_read(st, v);
      if (rm >= 4) x = round_int(x, rm);
      if (dt == T_F32) {
        float f = !is_float(st) && (st == T_U64 || st == T_S64) && rm == 0
                      ? (st == T_U64 ? (float)v : (float)(s64)v)
                      : round_to_float(x, rm & 3);
        if (fl & 1) f = f > 0 ? std::min(f, 1.f) : 0.f;
        if ((fl & 2) && f < 0) f = 0;
        r = bits<u32>(f);
      } else if (dt == T_F64)
        r = bits<u64>(x);
      else
        r = to_half_like(x, dt, rm, fl);
    } else if (is_float(st)) {
      double x = round_int(cvt_read(st, v), rm & 3);
      if (std::isnan(x)) x = 0;
      auto clampd = [&](double lo, double hi) { return x < lo ? lo : x > hi ? hi : x; };
      switch (dt) {
        case T_U8: r = (u8)clampd(0, 255); break;
        case T_S8: r = (u8)(s8)clampd(-128, 127); break;
        case T_U16: r = (u16)clampd(0, 65535); break;
        case T_S16: r = (u16)(s16)clampd(-32768, 32767); break;
        case T_U32: r = (u32)clampd(0, 4294967295.0); break;
        case T_S32: r = (u32)(s32)clampd(-2147483648.0, 2147483647.0); break;
        case T_U64: r = x >= 18446744073709551615.0 ? ~0ull : x < 0 ? 0 : (u64)x; break;
        case T_S64:
          r = x >= 9223372036854775807.0    ? 0x7fffffffffffffffull
              : x <= -9223372036854775808.0 ? 1ull << 63
                                            : (u64)(s64)x;
          break;
        default: unmodelled(c);
      }
    } else {
      s64 x = int_read(st, v);
      if (fl & 1) {  // saturate
        if (st == T_U64 && x < 0) x = 0x7fffffffffffffffll;
        switch (dt) {
          case T_U8: x = std::max<s64>(0, std::min<s64>(x, 255)); break;
          case T_S8: x = std::max<s64>(-128, std::min<s64>(x, 127)); break;
          case T_U16: x = std::max<s64>(0, std::min<s64>(x, 65535)); break;
          case T_S16: x = std::max<s64>(-32768, std::min<s64>(x, 32767)); break;
          case T_U32: x = std::max<s64>(0, std::min<s64>(x, 4294967295ll)); break;
          case T_S32: x = std::max<s64>(-2147483648ll, std::min<s64>(x, 2147483647ll)); break;
          default: break;
        }
      }
      int by = ty_bytes(dt);
      // A register wider than the destination type gets a sign- or zero-extended value. Keep the
      // low bits: the next instruction reads them with its own type.
      u64 keep = by == 8 ? ~0ull : (1ull << (8 * by)) - 1;
      r = (u64)x & keep;
      if (dt == T_S8 || dt == T_S16) r = (u64)x & (by == 1 ? 0xffffull : 0xffffffffull);
    }
    d[l] = r;
  });
  return NEXT;
}
