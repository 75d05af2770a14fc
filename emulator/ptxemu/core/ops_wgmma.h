// Handlers: the tensor cores of sm_90.
#pragma once
#include "handler.h"
#include "matrix.h"
#include "memory.h"
#include "numerics.h"
#include "queues.h"

static void use_registers(const Ctx& c, const Opnd& o, int shape) {
  Warp& w = c.w;
  const char* missing = nullptr;
  for (auto& e : o.v) {
    auto& r = w.wgmma_registers[e.tracked];
    if (r.touched == w.wgmma_fences)
      missing = "wgmma uses a register that was accessed since the last wgmma.fence, if any";
    else if (shape && r.shape != shape && r.started && r.used == w.wgmma_fences)
      missing = "wgmma uses the accumulator of one of another shape without wgmma.fence";
    r.used = w.wgmma_fences;
    r.started = c.m.tick;
    if (shape) r.shape = shape;
  }
  if (missing) c.hazard("missing-wgmma-fence", Str(missing) + " (" + where(c) + ")");
}
static Status h_wgmma_fence(ARGS) {
  CONVERGED_ALL("wgmma.fence")
  c.w.wgmma_fences++;
  return NEXT;
}

// ---- multiplication

// i0 N, i1 operand format code, i2 D is f16, i3 B format
static void wgmma_run(const Async& op, Cta& t, Warp& w, bool rs, OperandDesc a, OperandDesc b,
                      bool acc, int sa, int sb, bool ta, bool tb) {
  const Instr& I = *op.ins;
  const Actor me = op.actor(w.wgmma_agent, op.issued);
  Fmt f = (Fmt)I.i1, fb = (Fmt)I.i3;
  int N = I.i0, K = 32 / fmt_bytes(f);
  static float A[16 * 32], B[256 * 32], D[256 / 8][2][32][2];  // D: blocks of 16 rows and 8 columns
  const Opnd& d = I.o[0];
  if (rs) {
    int per = K == 32 ? 4 : K == 16 ? 2 : 1;
    for (int j = 0; j < 4; j++) {
      u64* r = w.R(I.o[1].v[j].slot);
      for (int l = 0; l < 32; l++) {
        u32 v = (u32)r[l];
        for (int e = 0; e < per; e++)
          A[((l >> 2) + 8 * (j & 1)) * K + (l & 3) * per + e + (K / 2) * (j >> 1)] =
              fmt_load(f, (u8*)&v + e * fmt_bytes(f));
      }
    }
  } else
    load_operand(op, me, t, a, ta, 16 * (w.id % 4), 16, f, A);
  load_operand(op, me, t, b, tb, 0, N, fb, B);
  if (sa * sb < 0)
    for (int i = 0; i < 16 * K; i++) A[i] = -A[i];
  // In a block, lane l has two columns, from 2 * (l % 4) on, of the rows l / 4 and 8 + l / 4.
  if (!acc)
    memset(D, 0, N / 8 * sizeof *D);
  else
    for (int i = 0; i < N / 4; i++) {
      auto& x = D[i / 2][i % 2];
      if (I.i2) {
        const u64* r = w.R(d.v[i].slot);
        for (int l = 0; l < 32; l++)
          for (int e = 0; e < 2; e++) x[l][e] = half_to_float((u16)(r[l] >> 16 * e));
      } else {
        const u64 *even = w.R(d.v[2 * i].slot), *odd = w.R(d.v[2 * i + 1].slot);
        for (int l = 0; l < 32; l++) {
          x[l][0] = bits<float>((u32)even[l]);
          x[l][1] = bits<float>((u32)odd[l]);
        }
      }
    }
  if (op.m->opt.hopper_arithmetic && f == F_E4M3 && fb == F_E4M3 && !I.i2)
    hopper_matmul(D[0][0][0], 8, 16 * 8, A, B, 16, N);
  else
    matmul(D[0][0][0], 8, 16 * 8, A, B, 16, N, K);
  op.launch->counts.mma_flops += 2ull * 16 * N * K;
  for (int i = 0; i < N / 4; i++) {
    auto& x = D[i / 2][i % 2];
    if (I.i2) {
      u64* r = w.R(d.v[i].slot);
      for (int l = 0; l < 32; l++)
        r[l] = float_to_half(x[l][0]) | (u32)float_to_half(x[l][1]) << 16;
    } else {
      u64 *even = w.R(d.v[2 * i].slot), *odd = w.R(d.v[2 * i + 1].slot);
      for (int l = 0; l < 32; l++) {
        even[l] = bits<u32>(x[l][0]);
        odd[l] = bits<u32>(x[l][1]);
      }
    }
  }
}
static Status h_wgmma(ARGS) {
  CONVERGED_ALL("wgmma")
  bool rs = I.o[1].kind == 'V';
  OperandDesc a{}, b{};
  if (!rs) {
    a = smem_desc(c, RS(1)[0], true);
    for (int l = 1; l < 32; l++)
      if (RS(1)[l] != RS(1)[0]) fail(c, "wgmma descriptor differs between lanes");
  }
  b = smem_desc(c, RS(2)[0], true);
  bool acc = predval(c, I.o[3], 0);
  int sa = (int)RS(4)[0], sb = (int)RS(5)[0];
  bool ta = false, tb = false;
  size_t k = 6;
  if (fmt_bytes((Fmt)I.i1) == 2) {
    if (!rs) ta = RS(k++)[0];
    tb = RS(k)[0];
  }
  if (!c.w.wgmma_agent) c.w.wgmma_agent = new_agent(c.m, c.cta, c.w.id, "wgmma");
  use_registers(c, I.o[0], I.i0);
  if (rs) use_registers(c, I.o[1], 0);
  Cta* t = &c.cta;
  Warp* w = &c.w;
  Async op = async_operation(c, ~0u, "wgmma");
  c.w.wgmma_groups.open++;
  enqueue(c.m, c.w.wgmma,
          [=] { wgmma_run(op, *t, *w, rs, a, b, acc, sa, sb, ta, tb); }, I.line, "wgmma");
  return NEXT;
}
static Status h_wgmma_commit(ARGS) {
  CONVERGED_ALL("wgmma.commit_group")
  c.w.wgmma_groups.commit(c.m.tick);
  return NEXT;
}
static Status h_wgmma_wait(ARGS) {
  CONVERGED_ALL("wgmma.wait_group")
  // The PTX ISA does not say that this orders the lanes' accesses, but kernels rely on it: after
  // it, one lane of a consumer warp releases a buffer that all lanes have read. The lanes' own
  // later accesses still need bar.warp.sync.
  c.w.released = c.m.tick - 1;
  size_t keep = (size_t)RS(0)[0];
  auto& groups = c.w.wgmma_groups;
  Tick done = 0;
  for (; groups.committed.size() > keep; groups.committed.pop_front())
    done = groups.committed.front().tick;
  // In the mode random, a part of a group may already have run: the queue then has fewer operations
  // than the groups count.
  size_t left = groups.open;
  for (auto& g : groups.committed) left += g.operations;
  while (c.w.wgmma.q.size() > left) run_front(c.m, c.w.wgmma);
  if (done) {
    c.w.wgmma_done = done;
    c.w.knowledge.learn({c.w.wgmma_agent, ~0u, done, done});
  }
  return NEXT;
}
