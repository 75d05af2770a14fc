// Handlers: the tensor cores of sm_90.
#pragma once
#include "ops_tcgen05.h"

// ---- registers
//
// PTX ISA, wgmma.fence: it must stand before the first WGMMA, and between an access to a register
// and a WGMMA that uses it as accumulator or fragment of A, except between WGMMAs of one shape on
// one accumulator. And these registers must not be accessed before a wgmma.wait_group for the
// WGMMA.
//
// Compilers put moves between the fence and the WGMMA, where an accumulator lives in another
// virtual register, and moves of constants into registers whose contents are not used. Neither is
// an access in ptxas's eyes: a move between registers takes its source's state over, one of a
// constant changes nothing.

static void track(Program& p, const Opnd& o, bool& more) {
  if (o.kind == 'V')
    for (auto& e : o.v) track(p, e, more);
  else if (o.kind == 'R' && o.slot >= 0)
    more |= p.tracked.emplace(o.slot, (u32)p.tracked.size()).second;
}
static void touched_by(const Program& p, const Opnd& o, std::vector<u32>& out) {
  for (auto& e : o.v) touched_by(p, e, out);
  auto i = p.tracked.find(o.slot);
  if (i != p.tracked.end()) out.push_back(i->second);
}
static Status h_wgmma(ARGS);
static void track_registers(Program& p) {
  std::set<int> constant;
  for (auto& x : p.consts) constant.insert(x.first);
  for (auto& x : p.specials) constant.insert(x.first);
  bool more = false;
  for (auto& I : p.code)
    if (I.fn == h_wgmma) {
      track(p, I.o[0], more);
      if (I.o[1].kind == 'V') track(p, I.o[1], more);
    }
  auto move = [](const Instr& I) {
    return I.fn == h_mov && I.o[0].kind == 'R' && I.o[1].kind == 'R';
  };
  while (more) {
    more = false;
    for (auto& I : p.code)
      if (move(I) && p.tracked.count(I.o[0].slot) && !constant.count(I.o[1].slot))
        track(p, I.o[1], more);
  }
  for (auto& I : p.code) {
    if (I.fn == h_wgmma) {
      for (auto& o : I.o)
        for (auto& e : o.v) e.tracked = p.tracked.at(e.slot);
      continue;
    }
    for (auto& o : I.o) touched_by(p, o, I.tracked);
    I.copies = move(I);
  }
}
// Of every other instruction that names a tracked register.
static void touch_registers(const Ctx& c, const Instr& I) {
  Warp& w = c.w;
  for (u32 i : I.tracked)
    if (w.wgmma_registers[i].started > w.wgmma_done) {
      c.hazard("wgmma-register-in-flight",
               "a register that wgmma uses is accessed before a wgmma.wait_group for it (" +
                   where(c) + ")");
      break;
    }
  if (!I.copies)
    for (u32 i : I.tracked) w.wgmma_registers[i].touched = w.wgmma_fences;
  else if (I.tracked.size() == 2)
    w.wgmma_registers[I.tracked[0]].touched = w.wgmma_registers[I.tracked[1]].touched;
}
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
  static float A[16 * 32], B[256 * 32], D[256 / 8][2][32][2];  // of D 16 rows by 8 columns at a time
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
  // Lane l has columns 2 * (l % 4) and the next of row l / 4 (h = 0) and of row 8 + l / 4 (h = 1).
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
  matmul(D[0][0][0], 8, 16 * 8, A, B, 16, N, K);
  op.launch->counts.mma_flops += 2ull * 16 * N * K;
  for (int i = 0; i < N / 4; i++) {
    auto& x = D[i / 2][i % 2];
    if (I.i2) {
      u64* r = w.R(d.v[i].slot);
      for (int l = 0; l < 32; l++) r[l] = float_to_half(x[l][0]) | (u32)float_to_half(x[l][1]) << 16;
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
  // The PTX ISA does not say that this orders the lanes' accesses; but kernels take it for granted:
  // one lane of a consumer warp gives back after it what all lanes have read before.
  if (!converged(c, ~0u, "wgmma.wait_group", true)) return BLOCK;
  size_t keep = (size_t)RS(0)[0];
  auto& groups = c.w.wgmma_groups;
  Tick done = 0;
  for (; groups.committed.size() > keep; groups.committed.pop_front())
    done = groups.committed.front().tick;
  // In random mode part of a group may already have run: the queue then holds fewer operations than
  // the counts say.
  size_t left = groups.open;
  for (auto& g : groups.committed) left += g.operations;
  while (c.w.wgmma.q.size() > left) run_front(c.m, c.w.wgmma);
  if (done) {
    c.w.wgmma_done = done;
    c.w.knowledge.learn({c.w.wgmma_agent, ~0u, done, done});
  }
  return NEXT;
}
