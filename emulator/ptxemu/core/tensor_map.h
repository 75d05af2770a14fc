// Tensor maps: their 128 bytes, their boxes, swizzled shared memory.
#pragma once
#include "memory.h"

struct TensorMap {
  u64 addr;
  int rank, dtype, ebits, swizzle;
  u64 dim[5], stride[5];
  u32 box[5];
};
// The most bytes of a box's row, by swizzle mode.
static const u32 SWIZZLE_SPAN[7] = {1u << 30, 32, 64, 128, 128, 128, 128};
// Decode a 128-byte descriptor, in the layout of the DSL's host code.
static TensorMap decode_tmap(const u8* p, const Ctx& c) {
  u64 w[8];
  memcpy(w, p, 64);
  TensorMap t;
  memset(&t, 0, sizeof t);
  t.addr = w[0];
  u32 f = (u32)w[1];
  t.rank = (f >> 4 & 7) + 1;
  t.dtype = f >> 7 & 15;
  int interleave = f >> 11 & 3;
  t.swizzle = f >> 13 & 3;
  static const int size[16] = {8,  16, 32, 32, 64, 64, 16, 32,
                               32, 64, 16, 4,  0,  0,  0,  0};  // 11: packed 4-bit
  t.ebits = size[t.dtype];
  int atom = f >> 19 & 3;
  if (atom) {
    if (t.swizzle != 3 || atom == 2)
      fail(c, fmt("tensor map word 1 is %#lx: swizzle atom not modelled", w[1]));
    t.swizzle = 3 + atom;
  }
  if ((f & 15) != 2 || t.rank > 5 || !t.ebits || interleave)
    fail(c, fmt("tensor map word 1 is %#lx: form not modelled", w[1]));
  if (w[6] >> 32 & 0xffffff) fail(c, "tensor map with element strides is not modelled");
  t.dim[0] = (u32)w[4] + 1ull;
  t.dim[1] = (w[4] >> 32) + 1;
  t.dim[2] = (u32)w[5] + 1ull;
  t.dim[3] = (w[5] >> 32) + 1;
  t.dim[4] = (u32)w[6] + 1ull;
  u64 lo[5] = {0, w[1] >> 32, (u32)w[2], w[2] >> 32, (u32)w[3]};
  t.stride[0] = 0;
  for (int i = 1; i < 5; i++) t.stride[i] = (lo[i] | (w[3] >> (32 + 4 * (i - 1)) & 15) << 32) << 4;
  t.box[0] = (w[6] >> 56) + 1;
  for (int i = 1; i < 5; i++) t.box[i] = (w[7] >> (8 * (i - 1)) & 255) + 1;
  for (int i = t.rank; i < 5; i++) {
    t.dim[i] = 1;
    t.box[i] = 1;
  }
  // CUDA driver API, cuTensorMapEncodeTiled. No descriptor can break its other rules (strides that
  // are multiples of 16 bytes and below 2^40, boxes of up to 256): the fields cannot hold more.
  if (t.addr % 16)
    fail(c, fmt("tensor map of memory at %#lx, which is not 16-byte aligned", t.addr));
  if (t.box[0] * t.ebits / 8 % 16) fail(c, "tensor map box row is not a multiple of 16 bytes");
  if (t.box[0] * t.ebits / 8 > SWIZZLE_SPAN[t.swizzle])
    fail(c, "tensor map box row exceeds the swizzle span");
  return t;
}
// The tensor map of an instruction and the first coordinates of the box. For tile::gather4 and
// tile::scatter4: a column and four rows.
struct BoxStart {
  TensorMap map;
  std::array<s32, 5> at;
  bool four_rows;
};
// Swizzle modes: 1, 2, 3 = 32, 64, 128 bytes with 16-byte atoms; 4 = 128 bytes with 32-byte atoms;
// 6 = with 64-byte atoms
static inline u32 swizzle_addr(u32 a, int mode) {
  switch (mode) {
    case 4: return a ^ ((a >> 7 & 3) << 5);
    case 6: return a ^ ((a >> 7 & 1) << 6);
  }
  return a ^ ((a >> 7 & ((1u << mode) - 1)) << 4);
}
static u32 box_bytes(const BoxStart& b) {
  const u32* box = b.map.box;
  u32 bytes = box[0] * box[1] * box[2] * box[3] * box[4] * b.map.ebits / 8;
  return b.four_rows ? 4 * bytes : bytes;
}

// Call fn(offset, address, first, end) for every row of a box. `offset` is the row's offset in
// shared memory before the swizzle. The bytes `first` to `end` of the row lie in the tensor, none
// if the two are equal. `address` is the global address of the byte `first`.
template <class F>
static void tmap_walk(const TensorMap& t, const s32* co, u32 lin, F fn) {
  u32 row_bytes = t.box[0] * t.ebits / 8;
  for (u32 i4 = 0; i4 < t.box[4]; i4++)
    for (u32 i3 = 0; i3 < t.box[3]; i3++)
      for (u32 i2 = 0; i2 < t.box[2]; i2++)
        for (u32 i1 = 0; i1 < t.box[1]; i1++, lin += row_bytes) {
          s64 x[5] = {co[0], (s64)co[1] + i1, (s64)co[2] + i2, (s64)co[3] + i3, (s64)co[4] + i4};
          bool in = true;
          u64 g = t.addr;
          for (int d = 1; d < t.rank; d++) {
            if (x[d] < 0 || x[d] >= (s64)t.dim[d]) in = false;
            g += x[d] * t.stride[d];
          }
          s64 start = x[0] * t.ebits / 8, size = (s64)t.dim[0] * t.ebits / 8;
          s64 first = std::max<s64>(start, 0), end = std::min<s64>(start + row_bytes, size);
          if (!in || end <= first)
            fn(lin, (u64)0, 0u, 0u);
          else
            fn(lin, g + first, (u32)(first - start), (u32)(end - start));
        }
}
template <class F>
static void box_walk(const BoxStart& b, F fn) {
  if (!b.four_rows) return tmap_walk(b.map, b.at.data(), 0, fn);
  for (u32 i = 0; i < 4; i++) {
    s32 at[5] = {b.at[0], b.at[1 + i], 0, 0, 0};
    tmap_walk(b.map, at, i * box_bytes(b) / 4, fn);
  }
}
// Return the offsets in shared memory of a box's chunks, row by row.
static const std::vector<u32>& box_chunks(const BoxStart& b, u32 base) {
  static std::vector<u32> at;
  at.clear();
  for (u32 a = base, end = base + box_bytes(b); a < end; a += 16)
    at.push_back(b.map.swizzle ? swizzle_addr(a, b.map.swizzle) : a);
  return at;
}
static void check_whole_tensor(const Ctx& c, const TensorMap& t) {
  u64 last = t.addr;
  for (int d = 0; d < t.rank; d++) last += (t.dim[d] - 1) * t.stride[d];
  last += (t.dim[0] * t.ebits + 7) / 8 - 1;
  check_global(c, t.addr, 1, false);
  check_global(c, last, 1, false);
}
static BoxStart box_start(const Ctx& c, u64 map, const Opnd& coordinates, int lane,
                          bool four_rows) {
  check_global(c, map, 128, false);
  // CUDA driver API: "tensorMap address must be aligned to 64 bytes".
  if (map % 64) fail(c, fmt("tensor map at %#lx, which is not 64-byte aligned", map));
  BoxStart b{decode_tmap((u8*)map, c), {}, four_rows};
  size_t n = coordinates.v.size();
  if (four_rows) {
    if (c.launch().sm90) fail(c, "gather4 and scatter4 need sm_100");
    // CuTe DSL, Triton and Mojo encode a box of one row.
    if (b.map.rank != 2 || b.map.box[1] != 1)
      fail(c, fmt("gather4 or scatter4 with a map of rank %d and boxes of %u rows: not modelled",
                  b.map.rank, b.map.box[1]));
  } else if ((int)n != b.map.rank)
    fail(c, fmt("tensor map has rank %d, instruction has %zu coordinates", b.map.rank, n));
  for (size_t i = 0; i < n; i++) b.at[i] = (s32)c.w.R(coordinates.v[i].slot)[lane];
  // An illegal instruction: for loads on an H200 (docs/notes/gemm_sm90.md), for loads and stores in
  // triton-lang/triton issues 7385 and 8657.
  s64 bits = (s64)b.at[0] * b.map.ebits;
  if (bits % 128)
    fail(c,
         fmt("box at innermost coordinate %d, %.1f bytes from the row's start: not a multiple of "
             "16 bytes, an illegal instruction on hardware",
             b.at[0], bits / 8.0));
  check_whole_tensor(c, b.map);
  return b;
}
// CUDA programming guide, table "Alignment requirements for multi-dimensional bulk tensor
// asynchronous copy operations". A swizzle uses address bits, whatever the alignment beyond that.
static void check_box_in_shared(const Ctx& c, const char* what, u32 address) {
  if ((address & OFF_MASK) % 128)
    fail(c, fmt("%s shared offset %u, which is not 128-byte aligned", what, address & OFF_MASK));
}
