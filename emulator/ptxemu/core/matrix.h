// Operands of the tensor cores in shared memory, tensor memory, and tcgen05.mma itself.
#pragma once
#include "memory.h"
#include "numerics.h"
#include "tensor_map.h"

struct OperandDesc {
  u32 start, lbo, sbo;
  int swz;
};
static OperandDesc smem_desc(const Ctx& c, u64 d, bool sm90) {
  OperandDesc r;
  r.start = (d & 0x3fff) << 4;
  r.lbo = (d >> 16 & 0x3fff) << 4;
  r.sbo = (d >> 32 & 0x3fff) << 4;
  int base = d >> 49 & 7;
  if (base) fail(c, "matrix descriptor with a base offset is not modelled");
  if (sm90) {
    static const int b[4] = {0, 3, 2, 1};
    r.swz = b[d >> 62 & 3];
  } else {
    static const int b[8] = {0, 4, 3, -1, 2, -1, 1, -1};
    r.swz = b[d >> 61 & 7];
    if ((d >> 46 & 3) != 1)
      fail(c, fmt("tcgen05 matrix descriptor %#lx does not have version 1", d));
    if (d >> 52 & 1)
      fail(c, "matrix descriptor with absolute leading-dimension mode is not modelled");
  }
  if (r.swz < 0) fail(c, fmt("matrix descriptor %#lx: swizzle mode not modelled", d));
  return r;
}
// Convert the elements of 16 bytes.
static void load_chunk(Fmt f, const u8* p, float* out) {
  if (f == F_E4M3)  // by far the most frequent
    e4m3_to_float(p, out);
  else
    for (int e = 0; e < 128 / fmt_bits(f); e++) out[e] = fmt_load_at(f, p, e);
}
// Read rows x 32 bytes of an operand as floats: out[row * K + k].
static void load_operand(const Async& op, const Actor& me, Cta& t, const OperandDesc& d,
                         bool mn_major, int row0, int rows, Fmt f, float* out) {
  int K = 256 / fmt_bits(f), T = 128 / fmt_bits(f), W = d.swz == 4 ? 8 : 1 << d.swz,
      KA = d.swz == 4 ? 4 : 8;  // KA: rows of a swizzle atom along K
  if (d.swz == 4 && !mn_major)
    throw EmuError{fmt("%s: 32-byte-atom swizzle is only for MN-major operands, PTX line %d",
                       op.what, op.ins->line)};
  static std::vector<u32> at;  // offsets of the chunks, in reading order
  at.clear();
  auto chunk = [&](u32 off) {
    at.push_back(d.swz ? swizzle_addr(d.start + off, d.swz) : d.start + off);
  };
  if (!mn_major) {
    for (int r = row0; r < row0 + rows; r++)
      for (int j = 0; j < 2; j++)
        chunk(d.swz ? (r % 8) * (16 << d.swz) + (r / 8) * d.sbo + j * 16
                    : (r % 8) * 16 + (r / 8) * d.sbo + j * d.lbo);
  } else {
    for (int k = 0; k < K; k++)
      for (int cx = row0 / T; cx < (row0 + rows + T - 1) / T; cx++)
        chunk(d.swz ? (cx % W) * 16 + (cx / W) * d.lbo + (k % KA) * (16 * W) + (k / KA) * d.sbo
                    : cx * d.sbo + (k % 8) * 16 + (k / 8) * d.lbo);
  }
  if (!clean_chunks(op, me, t, at, false))
    for (u32 off : at) async_read(op, me, t, off, 16);
  const u32* next = at.data();
  if (!mn_major) {
    for (int i = 0; i < 2 * rows; i++) load_chunk(f, &t.smem[*next++], out + i * T);
  } else {
    float values[32];
    for (int k = 0; k < K; k++)
      for (int cx = row0 / T; cx < (row0 + rows + T - 1) / T; cx++) {
        load_chunk(f, &t.smem[*next++], values);
        for (int e = 0; e < T; e++) {
          int r = cx * T + e;
          if (r >= row0 && r < row0 + rows) out[(size_t)(r - row0) * K + k] = values[e];
        }
      }
  }
}
typedef float Eight __attribute__((vector_size(32), aligned(4)));
// Eight numbers at any address. clang forgets the alignment of a reference, not that of a struct.
struct AnyEight {
  Eight v;
};
// acc += A[M][K] * B[N][K], float32 accumulation in k order; M and N are multiples of 8. Eight
// columns of a row of acc are contiguous. The next row begins `row` floats further, the next eight
// columns `columns` floats further.
static void matmul(float* acc, int row, int columns, const float* A, const float* B, int M, int N,
                   int K) {
  const int MOST_K = 64;  // of 4-bit elements
  Eight b[MOST_K];        // eight columns of B, k by k
  for (int n = 0; n < N; n += 8) {
    for (int k = 0; k < K; k++)
      for (int j = 0; j < 8; j++) b[k][j] = B[(size_t)(n + j) * K + k];
    for (int i = 0; i < M; i += 8) {
      float* to = acc + (size_t)i * row + (size_t)n / 8 * columns;
      const float* a = A + (size_t)i * K;
      auto at = [&](int r) { return (AnyEight*)(to + (size_t)r * row); };
      // Eight variables, which stay in registers, unlike an array.
      Eight s0 = at(0)->v, s1 = at(1)->v, s2 = at(2)->v, s3 = at(3)->v;
      Eight s4 = at(4)->v, s5 = at(5)->v, s6 = at(6)->v, s7 = at(7)->v;
      for (int k = 0; k < K; k++, a++) {
        s0 += a[0] * b[k];
        s1 += a[K] * b[k];
        s2 += a[2 * K] * b[k];
        s3 += a[3 * K] * b[k];
        s4 += a[4 * K] * b[k];
        s5 += a[5 * K] * b[k];
        s6 += a[6 * K] * b[k];
        s7 += a[7 * K] * b[k];
      }
      at(0)->v = s0, at(1)->v = s1, at(2)->v = s2, at(3)->v = s3;
      at(4)->v = s4, at(5)->v = s5, at(6)->v = s6, at(7)->v = s7;
    }
  }
}
// acc += A[M][K] * B[N][K] of e4m3 values, K = 32, as Hopper's WGMMA adds. Arguments as of
// `matmul`. The rule, measured on an H200: align the products and the sum to the largest exponent among them,
// a product's being the sum of its factors'; drop what lies below the 13th fraction bit, towards
// zero; add exactly; drop what lies below the 13th fraction bit of the new sum, towards zero.
static void hopper_matmul(float* acc, int row, int columns, const float* A, const float* B, int M,
                          int N) {
  typedef s32 Ints __attribute__((vector_size(32), aligned(4)));
  const int K = 32, FRACTION = 13;
  // The power of two at or below |x|; 0 for 0. It is exact for subnormal e4m3, too.
  auto power = [](float x) { return bits<float>(bits<u32>(x) & 0x7f800000u); };
  Eight b[K], b_power[K];
  for (int n = 0; n < N; n += 8) {
    for (int k = 0; k < K; k++)
      for (int j = 0; j < 8; j++) {
        b[k][j] = B[(size_t)(n + j) * K + k];
        b_power[k][j] = power(b[k][j]);
      }
    for (int i = 0; i < M; i++) {
      auto to = (AnyEight*)(acc + (size_t)i * row + (size_t)n / 8 * columns);
      Eight sum = to->v;
      const float* a = A + (size_t)i * K;
      Eight largest = (Eight)((Ints)sum & 0x7f800000), plain = sum;
      for (int k = 0; k < K; k++) {
        Eight p = power(a[k]) * b_power[k];
        largest = p > largest ? p : largest;
        plain += a[k] * b[k];
      }
      Eight none = Eight{} + 0x1p-60f;  // all are zero
      largest = largest > none ? largest : none;
      Eight to_units = (float)(1 << FRACTION) / largest;
      Ints units = __builtin_convertvector(sum * to_units, Ints);  // towards zero
      for (int k = 0; k < K; k++) units += __builtin_convertvector(a[k] * b[k] * to_units, Ints);
      Eight total = __builtin_convertvector(units, Eight) / to_units;
      total = (Eight)((Ints)total & ~((1 << (23 - FRACTION)) - 1));
      to->v = plain - plain == Eight{} ? total : plain;  // NaN and infinity stay
    }
  }
}

static u32& tmem_cell(Cta& t, u32 lane, u32 col) { return t.tmem[(size_t)lane * 512 + col]; }
static void tmem_check_cols(const Cta& t, u32 col, u32 n, int line, const char* what) {
  for (u32 i = col; i < col + n; i++)
    if (i >= 512 || t.tmem_owner[i] < 0)
      throw EmuError{
          fmt("%s touches TMEM column %u, which is not allocated (CTA rank %d), PTX line %d", what,
              i, t.rank, line)};
}
static Fmt idesc_fmt(const Ctx& c, int kind, int code) {
  if (kind == 0) {
    if (code == 0) return F_F16;
    if (code == 1) return F_BF16;
  }
  if (kind == 1 && code == 2) return F_TF32;
  if (kind == 2) switch (code) {
      case 0: return F_E4M3;
      case 1: return F_E5M2;
      case 3: return F_E2M3;
      case 4: return F_E3M2;
      case 5: return F_E2M1;
    }
  if (kind == 4 && (code == 1 || code == 5))
    return F_FP4;  // 5 is what NVIDIA's 2cta_mma_blockscale_m128.py encodes
  if (kind == 3) {
    if (code == 0) return F_U8;
    if (code == 1) return F_S8;
  }
  fail(c, fmt("instruction descriptor: operand format %d is not valid for this kind", code));
}

struct MmaArgs {
  u32 d;
  bool a_tmem;
  u32 a_addr;
  OperandDesc a, b;
  u32 idesc;
  bool acc;
  int cg, kind;
  std::vector<u32> disable;
  Fmt fa, fb;
  bool i8, f16acc;
  int vec = 0;
  u32 sfa = 0, sfb = 0;  // block scaling: elements per scale (0: none), TMEM addresses
};
// tcgen05.mma. The layout of a CTA's part of D: cta_group::1 with M=64 uses 16 of every 32 lanes;
// cta_group::2 with M=128 splits N over lanes 0-63 and 64-127.
static void umma(const Async& op, Cta& issuer, const MmaArgs& x) {
  const Actor me = op.actor(issuer.tc_agent, op.issued);
  Launch& l = *op.launch;
  int line = op.ins->line;
  u32 id = x.idesc;
  int N = (id >> 17 & 63) * 8, M = (id >> 24 & 31) * 16;
  bool an = id >> 13 & 1, bn = id >> 14 & 1, amn = id >> 15 & 1, bmn = id >> 16 & 1;
  int K = 256 / fmt_bits(x.fa);
  const char* what = "tcgen05.mma";
  // Scale of row r, block q of this instruction: TMEM lane r % 32 (replicated per quarter), column
  // r / 32, byte id + q.
  auto scale = [&](Cta& t, u32 addr, int first, int r, int q, u32 lane0 = 0) -> float {
    u32 col = (addr & 0xffff) + r / 32, lane = lane0 + r % 32;
    tmem_check_cols(t, col, 1, line, "tcgen05.mma scale factor");
    if (!t.tmem_init[(size_t)lane * 512 + col])
      l.hazard("uninitialised-tmem-read", line, "tcgen05.mma reads a scale factor never written");
    u8 v = tmem_cell(t, lane, col) >> (8 * ((first + q) & 3));
    return id >> 23 & 1 ? (v == 255 ? NAN : std::ldexp(1.0f, (int)v - 127)) : std::fabs(g_e4m3[v]);
  };
  Cluster& cl = *issuer.cluster;
  Cta* pair[2] = {&issuer, nullptr};
  if (x.cg == 2) {
    pair[0] = cl.ctas[issuer.rank & ~1].get();
    pair[1] = cl.ctas[issuer.rank | 1].get();
  }
  std::vector<float> B((size_t)N * K);
  if (x.cg == 1)
    load_operand(op, me, issuer, x.b, bmn, 0, N, x.fb, B.data());
  else
    for (int c = 0; c < 2; c++)
      load_operand(op, me, *pair[c], x.b, bmn, 0, N / 2, x.fb, B.data() + (size_t)c * (N / 2) * K);
  int rows = x.cg == 2 ? M / 2 : M;
  std::vector<float> B0 = B;
  for (int c = 0; c < x.cg; c++) {
    visit(*op.m, l, me, *pair[c], line);
    if (x.vec)
      for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k++)
          B[(size_t)n * K + k] =
              B0[(size_t)n * K + k] *
              // with D split over lanes 0-63 and 64-127, the scales of the upper half of N sit in
              // the upper lanes too
              (rows == 64 && x.cg == 2 && n >= N / 2
                   ? scale(*pair[c], x.sfb, id >> 4 & 3, n - N / 2, k / x.vec, 64)
                   : scale(*pair[c], x.sfb, id >> 4 & 3, n, k / x.vec));
    Cta& t = *pair[c];
    std::vector<float> A((size_t)rows * K), acc((size_t)rows * N, 0.f);
    std::vector<s64> iacc(x.i8 ? (size_t)rows * N : 0, 0);
    u32 col0 = x.d & 0xffff;
    int ncols = rows == 64 && x.cg == 2 ? N / 2 : N;
    // Call fn(lane, index of its first result in acc): each lane has `ncols` results, from col0 on.
    auto each_lane = [&](auto fn) {
      for (int r = 0; r < rows; r++)
        for (int n = 0; n < N; n += ncols) {
          u32 lane = (x.d >> 16) + (rows == 64 && x.cg == 1 ? (r / 16) * 32 + r % 16 : r);
          fn(n ? lane + 64 : lane, (size_t)r * N + n);
        }
    };
    tmem_check_cols(t, col0, ncols, line, what);
    for (u32 quarter = 0; quarter < 4; quarter++)
      order_tmem(*op.m, l, me, t, quarter, col0, ncols, true, line);
    if (x.a_tmem) {
      u32 ac = x.a_addr & 0xffff, al = x.a_addr >> 16;
      tmem_check_cols(t, ac, 8, line, what);
      for (int r = 0; r < rows; r++) {
        u32 lane = al + (rows == 64 && x.cg == 1 ? (r / 16) * 32 + r % 16 : r);
        for (int k = 0; k < K; k++)
          A[(size_t)r * K + k] = fmt_load_at(x.fa, (const u8*)&tmem_cell(t, lane, ac), k);
        for (int q = 0; q < 8; q++)
          if (t.tmem_init[(size_t)lane * 512 + ac + q] & 2)
            l.hazard("tmem-store-not-waited", line,
                     "tcgen05.mma reads TMEM written by tcgen05.st without tcgen05.wait::st");
        for (int q = 0; q < 8; q++)
          if (!t.tmem_init[(size_t)lane * 512 + ac + q])
            l.hazard("uninitialised-tmem-read", line,
                     "tcgen05.mma A operand reads TMEM never written");
      }
    } else
      load_operand(op, me, t, x.a, amn, 0, rows, x.fa, A.data());
    if (x.vec)
      for (int r = 0; r < rows; r++)
        for (int k = 0; k < K; k++)
          A[(size_t)r * K + k] *= scale(t, x.sfa, id >> 29 & 3, r, k / x.vec);
    if (an != bn)
      for (auto& v : A) v = -v;
    l.counts.mma_flops += 2ull * rows * N * K;
    bool uninit = false;
    if (x.acc)
      each_lane([&](u32 lane, size_t first) {
        const u8* init = &t.tmem_init[(size_t)lane * 512 + col0];
        const u32* cells = &tmem_cell(t, lane, col0);
        u8 every = 1, any = 0;
        for (int j = 0; j < ncols; j++) {
          every &= init[j] != 0;
          any |= init[j];
        }
        if (!every) uninit = true;
        if (any & 2)
          l.hazard(
              "tmem-store-not-waited", line,
              "tcgen05.mma accumulates onto TMEM written by tcgen05.st without tcgen05.wait::st");
        for (int j = 0; j < ncols; j++)
          if (x.i8)
            iacc[first + j] = (s32)cells[j];
          else
            acc[first + j] = x.f16acc ? half_to_float((u16)cells[j]) : bits<float>(cells[j]);
      });
    if (uninit)
      l.hazard("uninitialised-tmem-read", line, "tcgen05.mma accumulates onto TMEM never written");
    if (!x.i8)
      matmul(acc.data(), N, 8, A.data(), B.data(), rows, N, K);
    else
      for (int r = 0; r < rows; r++)
        for (int n = 0; n < N; n++) {
          s64 v = 0;
          for (int k = 0; k < K; k++) v += (s64)A[(size_t)r * K + k] * (s64)B[(size_t)n * K + k];
          iacc[(size_t)r * N + n] += v;
        }
    each_lane([&](u32 lane, size_t first) {
      u32 dl = lane + (x.cg == 2 ? c * 128 : 0);
      if (x.disable.size() > dl / 32 && (x.disable[dl / 32] >> (dl % 32) & 1)) return;
      u32* cells = &tmem_cell(t, lane, col0);
      for (int j = 0; j < ncols; j++) {
        float v = acc[first + j];
        s64 iv = x.i8 ? iacc[first + j] : 0;
        if (id & 8) iv = std::max<s64>(-2147483648ll, std::min<s64>(2147483647ll, iv));
        cells[j] = x.i8 ? (u32)(s32)iv : x.f16acc ? float_to_half(v) : bits<u32>(v);
      }
      memset(&t.tmem_init[(size_t)lane * 512 + col0], 1, ncols);
    });
  }
}
