// ex2.approx.ftz.f32 and rcp.approx.ftz.f32 with a Hopper GPU's bits.
//
// The special function unit has a parabola for each of 64 (ex2) or 128 (rcp) segments of a binade,
// and evaluates it in fixed point (Oberman and Siu, ARITH 2005). ex2.csv and rcp.csv have a segment
// a line: value, slope and curvature, of 26, 16 and 10 bits. They were found from the results of an
// H200, and are those that envytools read from a G80 (nvhw/sfu_tab.c).
#pragma once
#include "numerics.h"

static const s32 EX2[3 * 64] = {
#include "ex2.csv"
};
static const s32 RCP[3 * 128] = {
#include "rcp.csv"
};
static const s32 LEADING_ONE = 1 << 23;
static const u32 FTZ_NAN = 0x7fffffff;

// x * x / 2^19, x below 2^17. The unit drops the bits of each partial product below 2^18.
static s64 truncated_square(u64 x) {
  u64 sum = 0;
  for (int bit = 0; bit < 17; bit++)
    if (x >> bit & 1) sum += (x << bit) >> 18;
  return sum >> 1;
}
// The significand, at least 2^23 and at most 2^24, for a fraction of 23 bits.
static s32 ex2_significand(u32 fraction) {
  const s32* at = EX2 + 3 * (fraction >> 17);
  s64 x = fraction & 0x1ffff;
  return (((s64)at[0] << 13) + at[1] * x + at[2] * truncated_square(x) + 0x77e2) >> 15;
}
static s32 rcp_significand(u32 fraction) {
  const s32* at = RCP + 3 * (fraction >> 16);
  s64 x = fraction & 0xffff;
  return (((s64)at[0] << 13) + at[1] * x + at[2] * truncated_square(2 * x) + 0x47e7) >> 15;
}
static float hopper_ex2(float x) {
  if (x != x) return bits<float>(FTZ_NAN);
  if (std::fabs(x) >= 128) return x > 0 ? INFINITY : 0.0f;
  s32 fixed = (s32)(std::fabs(x) * 0x1p23f);  // towards zero
  bool is_whole = fixed % LEADING_ONE == 0;
  if (x < 0) fixed = is_whole ? -fixed : ~fixed;
  s32 exponent = (fixed >> 23) + 127;
  if (exponent <= 0) return 0;  // subnormal
  return bits<float>((exponent - 1) * LEADING_ONE + ex2_significand(fixed & (LEADING_ONE - 1)));
}
static float hopper_rcp(float x) {
  u32 number = bits<u32>(x), sign = number & 1u << 31, fraction = number & (LEADING_ONE - 1);
  s32 exponent = number >> 23 & 255;
  if (x != x) return bits<float>(FTZ_NAN);
  if (exponent == 255) return bits<float>(sign);
  if (exponent == 0) return bits<float>(sign | 0x7f800000);  // zero or subnormal
  s32 result = (252 - exponent) * LEADING_ONE + rcp_significand(fraction);
  return bits<float>(sign | (result < LEADING_ONE ? 0 : result));
}
