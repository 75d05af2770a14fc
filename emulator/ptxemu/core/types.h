// PTX types: names, sizes, values in registers, atomic operations on two values.
#pragma once
#include "machine.h"
#include "numerics.h"

struct f16t {
  float v;
};
struct bf16t {
  float v;
};
template <class T>
struct Val;
#define INTVAL(T, U)                          \
  template <>                                 \
  struct Val<T> {                             \
    typedef T type;                           \
    static T get(u64 x) { return (T)x; }      \
    static u64 put(T x) { return (u64)(U)x; } \
  };
INTVAL(u8, u8)
INTVAL(s8, u8)
INTVAL(u16, u16)
INTVAL(s16, u16)
INTVAL(u32, u32)
INTVAL(s32, u32)
INTVAL(u64, u64)
INTVAL(s64, u64) template <>
struct Val<float> {
  typedef float type;
  static float get(u64 x) { return bits<float>((u32)x); }
  static u64 put(float x) { return bits<u32>(x); }
};
template <>
struct Val<double> {
  typedef double type;
  static double get(u64 x) { return bits<double>(x); }
  static u64 put(double x) { return bits<u64>(x); }
};
template <>
struct Val<f16t> {
  typedef float type;
  static float get(u64 x) { return half_to_float((u16)x); }
  static u64 put(float x) { return float_to_half(x); }
};
template <>
struct Val<bf16t> {
  typedef float type;
  static float get(u64 x) { return bf16_to_float((u16)x); }
  static u64 put(float x) { return float_to_bf16(x); }
};

enum Ty {
  T_U8,
  T_S8,
  T_U16,
  T_S16,
  T_U32,
  T_S32,
  T_U64,
  T_S64,
  T_F32,
  T_F64,
  T_F16,
  T_BF16,
  T_F32X2,
  T_F16X2,
  T_BF16X2,
  T_B128,
  T_PRED,
  T_NONE
};
static Ty parse_type(const Str& s) {
  static const std::map<Str, Ty> t = {{"u8", T_U8},         {"b8", T_U8},       {"s8", T_S8},
                                      {"u16", T_U16},       {"b16", T_U16},     {"s16", T_S16},
                                      {"u32", T_U32},       {"b32", T_U32},     {"s32", T_S32},
                                      {"u64", T_U64},       {"b64", T_U64},     {"s64", T_S64},
                                      {"f32", T_F32},       {"f64", T_F64},     {"f16", T_F16},
                                      {"bf16", T_BF16},     {"f32x2", T_F32X2}, {"f16x2", T_F16X2},
                                      {"bf16x2", T_BF16X2}, {"b128", T_B128},   {"pred", T_PRED}};
  auto it = t.find(s);
  return it == t.end() ? T_NONE : it->second;
}
static int ty_bytes(int t) {
  static const int b[] = {1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 2, 2, 8, 4, 4, 16, 1, 0};
  return b[t];
}
static u64 atom_apply(int op, int t, u64 old, u64 b, u64 x) {
  // op: 0 add 1 min 2 max 3 and 4 or 5 xor 6 exch 7 cas 8 inc 9 dec
  switch (op) {
    case 3: return old & b;
    case 4: return old | b;
    case 5: return old ^ b;
    case 6: return b;
    case 7: return old == b ? x : old;
    case 8: return (u32)old >= (u32)b ? 0 : old + 1;
    case 9: return old == 0 || (u32)old > (u32)b ? b : old - 1;
  }
#define ATOM2(T)                                                                       \
  {                                                                                    \
    auto p = Val<T>::get(old), q = Val<T>::get(b);                                     \
    return Val<T>::put(op == 0 ? p + q : op == 1 ? (p < q ? p : q) : (p > q ? p : q)); \
  }
  switch (t) {
    case T_U32:
    ATOM2(u32) case T_S32:
    ATOM2(s32) case T_U64:
    ATOM2(u64) case T_S64:
    ATOM2(s64) case T_F32:
    ATOM2(float) case T_F64:
    ATOM2(double) case T_F16:
    ATOM2(f16t) case T_BF16:
      ATOM2(bf16t)
    case T_F16X2: {
      u64 r = 0;
      for (int h = 0; h < 2; h++) {
        float p = half_to_float(old >> 16 * h), q = half_to_float(b >> 16 * h);
        r |= (u64)float_to_half(op == 0   ? p + q
                                : op == 1 ? std::min(p, q)
                                          : std::max(p, q))
             << 16 * h;
      }
      return r;
    }
    case T_BF16X2: {
      u64 r = 0;
      for (int h = 0; h < 2; h++) {
        float p = bf16_to_float(old >> 16 * h), q = bf16_to_float(b >> 16 * h);
        r |= (u64)float_to_bf16(op == 0   ? p + q
                                : op == 1 ? std::min(p, q)
                                          : std::max(p, q))
             << 16 * h;
      }
      return r;
    }
  }
  throw EmuError{fmt("atomic operation %d on type %d not modelled", op, t)};
}
