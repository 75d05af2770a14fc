// Handlers: tensor memory and the tensor cores of sm_100.
#pragma once
#include "handler.h"
#include "matrix.h"
#include "mbarrier.h"
#include "memory.h"
#include "queues.h"
#include "tensor_map.h"

// PTX ISA, tcgen05 issue granularity: with cta_group::2, a warp of each CTA of the pair executes
// alloc, dealloc and relinquish_alloc_permit; the first may wait for the second. True if both have.
static bool pair_is_here(Ctx& c, const Str& call) {
  if (c.ins->i0 != 2) return true;
  if (c.cta.cluster->ctas.size() < 2) fail(c, call + ": cta_group::2 needs a cluster of two CTAs");
  const Cta& other = *c.cta.cluster->ctas[c.cta.rank ^ 1];
  if (!c.g.arrived) {
    if (!c.w.knowledge.memory.find(other.agent))
      c.hazard("cta-not-started", call + " with cta_group::2: nothing orders it after the start of "
                                         "the other CTA of the pair (" + where(c) + ")");
    c.cta.pair_calls.push_back(call);
    c.g.arrived = true;
    c.g.token = c.cta.pair_calls.size();
    c.m.effects++;
  }
  const auto& peer = other.pair_calls;
  if (peer.size() < c.g.token) {
    c.g.why = [call] {
      return call + " with cta_group::2: the other CTA of the pair has not asked for it";
    };
    return false;
  }
  if (peer[c.g.token - 1] != call)
    fail(c, call + " with cta_group::2, but the other CTA asks for " + peer[c.g.token - 1]);
  return true;
}
static Actor warp_actor(const Ctx& c) {
  Actor a = thread_actor(c, 0);
  a.lanes = 0;
  return a;
}
static Status h_tc_alloc(ARGS) {
  CONVERGED_ALL("tcgen05.alloc")
  int l = __builtin_ctz(c.mask);
  u32 n = (u32)RS(1)[l];
  if (!pair_is_here(c, fmt("tcgen05.alloc of %u columns", n))) return BLOCK;
  Cta& t = c.cta;
  if (n < 32 || n > 512 || (n & (n - 1))) fail(c, fmt("tcgen05.alloc of %u columns", n));
  if (!t.tmem_permit) fail(c, "tcgen05.alloc after relinquish_alloc_permit");
  for (u32 s = 0; s + n <= 512; s += n) {
    bool ok = true;
    for (u32 i = s; i < s + n; i++)
      if (t.tmem_owner[i] >= 0) {
        ok = false;
        break;
      }
    if (!ok) continue;
    for (u32 i = s; i < s + n; i++) {
      t.tmem_owner[i] = (s8)c.w.id;
      for (int r = 0; r < 128; r++) t.tmem_init[(size_t)r * 512 + i] = 0;
    }
    Actor me = warp_actor(c);
    me.agent = t.agent;
    me.strong = true;
    struct {  // earlier accesses do not matter
      bool passes(const Access&) { return true; }
      void report(const Access&, u64) {}
    } unchecked;
    for (u32 quarter = 0; quarter < 4; quarter++)
      t.tmem_shadow.access(me, 4 * (quarter * 512 + s), 4 * n, true, unchecked);
    for (Clock* k : {&c.w.knowledge.memory, &c.w.knowledge.tensor, &c.w.tensor}) {
      k->learn({t.agent, ~0u, c.m.tick, c.m.tick});
      // A pair allocates collectively: the other CTA has allocated, too.
      if (I.i0 == 2) k->learn({t.cluster->ctas[t.rank ^ 1]->agent, ~0u, ~0ull, ~0ull});
    }
    u32 v = s;
    u32 a = to_shared(c, I.i1, addr_of(c, I.o[0], l, I.i1));
    mem_write(c, 2, a, 4, (u8*)&v, l);
    c.w.synchronise(~0u, c.m.tick);  // PTX ISA: every lane may read the address after it
    c.m.effects++;
    c.g.arrived = false;
    return NEXT;
  }
  c.g.why = [n] { return fmt("tcgen05.alloc: no %u free TMEM columns", n); };
  return BLOCK;
}
// True if MMAs or copies are outstanding. A commit without a waiter does no harm.
static bool tc_busy(const Cta& t) {
  for (auto& op : t.tc.q)
    if (strcmp(op.what, "tcgen05.commit")) return true;
  return false;
}
static Status h_tc_dealloc(ARGS) {
  CONVERGED_ALL("tcgen05.dealloc")
  int l = __builtin_ctz(c.mask);
  u32 a = (u32)RS(0)[l], n = (u32)RS(1)[l];
  if (!pair_is_here(c, fmt("tcgen05.dealloc of %u columns at %u", n, a))) return BLOCK;
  c.g.arrived = false;
  for (u32 i = a; i < a + n; i++) {
    if (i >= 512 || c.cta.tmem_owner[i] < 0)
      fail(c, fmt("tcgen05.dealloc of column %u, which is not allocated", i));
    c.cta.tmem_owner[i] = -1;
  }
  // PTX ISA, tcgen05.dealloc: with cta_group::2 it comes after the accesses of both CTAs.
  Actor me = warp_actor(c);
  me.strong = true;
  for (int r = 0; r < I.i0; r++) {
    Cta& t = *c.cta.cluster->ctas[c.cta.rank ^ r];
    bool busy = tc_busy(t);
    for (auto& w : t.warps) busy |= !w.tmem_loads.empty() || !w.tmem_stores.empty();
    if (busy)
      c.hazard("tmem-dealloc-in-flight",
               "tcgen05.dealloc while asynchronous tcgen05 operations are outstanding");
    for (u32 quarter = 0; quarter < 4; quarter++)
      order_tmem(c.m, c.launch(), me, t, quarter, a, n, true, I.line);
  }
  c.m.effects++;
  return NEXT;
}
static Status h_tc_relinquish(ARGS) {
  CONVERGED_ALL("tcgen05.relinquish_alloc_permit")
  if (!pair_is_here(c, "tcgen05.relinquish_alloc_permit")) return BLOCK;
  c.g.arrived = false;
  c.cta.tmem_permit = false;
  return NEXT;
}
// Row and column of lane l and register j, for each shape.
static inline void tmem_map(int shape, int l, int j, u32 split, u32& row, u32& col) {
  switch (shape) {
    case 0:
      row = l;
      col = j;
      break;
    case 1:
      row = (l & 1) * 8 + (l >> 2);
      col = (l >> 1 & 1) + 2 * j;
      break;
    case 2:
      row = (l >> 2) + 8 * (j & 1);
      col = (l & 3) + 4 * (j >> 1);
      break;
    case 3:
      row = (l >> 2) + 8 * (j >> 1 & 1);
      col = (l & 3) * 2 + (j & 1) + 8 * (j >> 2);
      break;
    default:
      row = l & 15;
      col = j + (l >> 4) * split;
      break;
  }
}
// ld: operands {regs}, [addr]; st: [addr], {regs}.  i0 shape, i1 st, i2 pack/unpack 16-bit
static Status h_tc_ldst(ARGS) {
  CONVERGED_ALL("tcgen05.ld/st")
  const Opnd &A = I.o[I.i1 ? 0 : 1], &V = I.i1 ? I.o.back() : I.o[0];
  u32 split = 0;
  if (I.i0 == 4) split = (u32)c.w.R(I.o[I.i1 ? 1 : 2].slot)[0];
  int n = V.kind == 'V' ? (int)V.v.size() : 1;
  const char* what = I.i1 ? "tcgen05.st" : "tcgen05.ld";
  u32 base = (u32)addr_of(c, A, 0);
  for (int l = 1; l < 32; l++)
    if ((u32)addr_of(c, A, l) != base) fail(c, "TMEM address differs between lanes");
  u32 lane0 = base >> 16, col0 = base & 0xffff;
  int quad = c.w.id % 4;
  // A warp reaches only its own quarter of the lanes. In NVIDIA's 1cta_mma_a_from_tmem.py every
  // warp passes lane 0 and expects its own quarter: lane 0 is relative, any other quarter is an
  // error.
  if (lane0 == 0 && quad) {
    c.hazard("tmem-lane-zero", fmt("%s: warp %d passes lane 0; taken as its own lanes %d-%d", what,
                                   c.w.id, quad * 32, quad * 32 + 31));
    lane0 = quad * 32;
  }
  if (lane0 / 32 != (u32)quad)
    fail(c, fmt("%s: warp %d may only access TMEM lanes %d-%d, address has lane %u", what, c.w.id,
                quad * 32, quad * 32 + 31, lane0));
  if (I.i0 == 0 && lane0 % 32)
    fail(c, "32x32b access with a lane offset that is not a multiple of 32");
  if (I.i0 != 0 && lane0 % 16)
    fail(c, "16-lane access with a lane offset that is not a multiple of 16");
  int per = I.i2 ? 2 : 1;
  bool uninit = false;
  u32 maxcol = 0;
  for (int j = 0; j < n; j++) {
    u64* r = c.w.R(V.kind == 'V' ? V.v[j].slot : V.slot);
    for (int l = 0; l < 32; l++)
      for (int h = 0; h < per; h++) {
        u32 row, col;
        tmem_map(I.i0, l, j * per + h, split, row, col);
        if (I.i2 && I.i0) {
          u32 r1, c1;
          tmem_map(I.i0, l, j, split, r1, c1);
          row = r1;
          col = 2 * c1 + h;
        }
        col += col0;
        row += lane0;
        maxcol = std::max(maxcol, col);
        if (col >= 512 || c.cta.tmem_owner[col] < 0)
          fail(c, fmt("%s touches TMEM column %u, which is not allocated", what, col));
        u32& cell = tmem_cell(c.cta, row, col);
        u8& init = c.cta.tmem_init[(size_t)row * 512 + col];
        if (I.i1) {
          cell = I.i2 ? (u32)(r[l] >> 16 * h) & 0xffff : (u32)r[l];
          init = 3;
          c.w.tmem_stores.push_back(row * 512 + col);
        } else {
          if (!init) uninit = true;
          if (!I.i2)
            r[l] = cell;
          else if (h == 0)
            r[l] = cell & 0xffff;
          else
            r[l] |= (u64)(cell & 0xffff) << 16;
        }
      }
  }
  if (uninit)
    c.hazard("uninitialised-tmem-read",
             fmt("tcgen05.ld reads TMEM cells never written (%s)", where(c).c_str()));
  if (I.i1) c.m.effects++;
  // A load's registers are filled at once; registers.h checks that they are not used before the
  // wait. The check of tensor memory counts a load as complete at the wait.
  Knowledge known = c.w.knowledge;
  known.tensor = c.w.tensor;
  Actor me = warp_actor(c);
  me.knowledge = &known;
  if (I.i1)
    order_tmem(c.m, c.launch(), me, c.cta, quad, col0, maxcol - col0 + 1, true, I.line);
  else
    c.w.tmem_loads.push_back({col0, maxcol - col0 + 1, I.line, known});
  for (u32 i : I.moved_to) c.w.loaded_from_tmem[i] = c.m.tick;
  return NEXT;
}
// The warp's loads and stores so far.
static Known own_tensor(const Ctx& c) { return {c.w.agent, ~0u, c.m.tick, c.m.tick}; }
static Status h_tc_wait_ld(ARGS) {
  CONVERGED_ALL("tcgen05.wait::ld")
  Actor me = warp_actor(c);
  for (auto& load : c.w.tmem_loads) {
    me.knowledge = &load.knowledge;
    order_tmem(c.m, c.launch(), me, c.cta, c.w.id % 4, load.column, load.columns, false, load.line);
  }
  c.w.tmem_loads.clear();
  c.w.tmem_loads_done = c.m.tick;
  c.w.tensor.learn(own_tensor(c));
  return NEXT;
}
// Cells have bit 1 of tmem_init from tcgen05.st until the warp's tcgen05.wait::st.
static Status h_tc_wait_st(ARGS) {
  CONVERGED_ALL("tcgen05.wait::st")
  for (u32 i : c.w.tmem_stores) c.cta.tmem_init[i] &= ~2;
  c.w.tmem_stores.clear();
  c.w.tensor.learn(own_tensor(c));
  return NEXT;
}
// PTX ISA, tcgen05.fence. before_thread_sync orders the thread's tcgen05 operations before its next
// release; after_thread_sync orders acquired operations before its next tcgen05 operations.
static Status h_tc_fence(ARGS) {  // i0: before_thread_sync
  if (I.i0)
    c.w.knowledge.tensor.learn(own_tensor(c));
  else
    c.w.tensor.join(c.w.knowledge.tensor);
  return NEXT;
}
// i0 cta_group, i1 kind (0 f16 1 tf32 2 f8f6f4 3 i8)
static Status h_tc_mma(ARGS) {
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    MmaArgs x;
    x.cg = I.i0;
    x.kind = I.i1;
    x.d = (u32)addr_of(c, I.o[0], l);
    if (x.cg == 2 && (c.cta.rank & 1))
      c.hazard("mma-issued-by-odd-cta",
               "tcgen05.mma.cta_group::2 issued by the odd CTA of the pair");
    x.a_tmem = I.o[1].kind == 'A';
    if (x.a_tmem)
      x.a_addr = (u32)addr_of(c, I.o[1], l);
    else
      x.a = smem_desc(c, c.w.R(I.o[1].slot)[l], false);
    x.b = smem_desc(c, RS(2)[l], false);
    x.idesc = (u32)RS(3)[l];
    int k = 4;
    if (I.i2) {
      x.vec = I.i2;
      x.sfa = (u32)addr_of(c, I.o[4], l) & 0x3fffffff;
      x.sfb = (u32)addr_of(c, I.o[5], l) & 0x3fffffff;
      k = 6;
    } else if ((int)I.o.size() > k && I.o[k].kind == 'V') {
      for (auto& v : I.o[k].v) x.disable.push_back((u32)c.w.R(v.slot)[l]);
      k++;
    }
    x.acc = predval(c, I.o[k], l);
    k++;
    if ((int)I.o.size() > k) fail(c, "tcgen05.mma with scale-input-d is not modelled");
    u32 id = x.idesc;
    int N = (id >> 17 & 63) * 8, M = (id >> 24 & 31) * 16,
        cf = x.vec ? (x.kind == 3 ? 2 : 1) : id >> 4 & 3;
    if (id & (x.vec ? 0x80000007u : 0xC0000007u))
      fail(c, fmt("instruction descriptor %#x: sparsity or shift bits not modelled", id));
    if ((id & 8) && x.kind != 3) fail(c, "saturation applies to kind::i8 only");
    x.f16acc = cf == 0;
    if (x.kind == 3 ? cf != 2 : cf == 0 ? x.kind != 0 && x.kind != 2 : cf != 1)
      fail(c, fmt("instruction descriptor %#x: accumulator format %d not modelled", id, cf));
    x.fa = idesc_fmt(c, x.kind, id >> 7 & 7);
    x.fb = idesc_fmt(c, x.kind, id >> 10 & 7);
    x.i8 = x.kind == 3;
    bool okM = x.cg == 1 ? M == 64 || M == 128 : M == 128 || M == 256;
    if (!okM || N == 0 || N > 256 || N % ((x.cg == 2 || (M == 128 && x.cg == 1)) ? 16 : 8))
      fail(c, fmt("instruction descriptor %#x: shape M=%d N=%d is not valid for cta_group::%d", id,
                  M, N, x.cg));
    if (x.cg == 2 && c.cta.cluster->ctas.size() < 2)
      fail(c, "cta_group::2 needs a cluster of at least two CTAs");
    Cta* t = &c.cta;
    if (c.launch().sm90) fail(c, "tcgen05 on sm_90");
    Async op = async_operation(c, 1u << l, "tcgen05.mma");
    op.knowledge.tensor = c.w.tensor;
    enqueue(c.m, c.cta.tc, [=] { umma(op, *t, x); }, I.line, "tcgen05.mma");
  }
  return NEXT;
}
// Copy from shared to tensor memory. i0 cta_group, i1 rows, i2 columns of 32 bits, i3 replication
// (0 none, 1 x4, 2 x2::02_13, 3 x2::01_23)
static Status h_tc_cp(ARGS) {
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    u32 dst = (u32)addr_of(c, I.o[0], l);
    OperandDesc d = smem_desc(c, RS(1)[l], false);
    Cta* self = &c.cta;
    const Instr* ins = &I;
    Async op = async_operation(c, 1u << l, "tcgen05.cp");
    enqueue(c.m, c.cta.tc,
            [=] {
               Actor me = op.actor(self->tc_agent, op.issued);
               for (int k = 0; k < ins->i0; k++) {
                 Cta& t = ins->i0 == 1 ? *self : *self->cluster->ctas[(self->rank & ~1) | k];
                 u32 col = dst & 0xffff, lane0 = dst >> 16;
                 tmem_check_cols(t, col, ins->i2, ins->line, "tcgen05.cp");
                 for (int r = 0; r < ins->i1; r++)
                   for (int j = 0; j < ins->i2 / 4; j++) {
                     u32 off = d.swz ? (r % 8) * (16 << d.swz) + (r / 8) * d.sbo + j * 16
                                     : (r % 8) * 16 + (r / 8) * d.sbo + j * d.lbo;
                     u32 a = d.swz ? swizzle_addr(d.start + off, d.swz) : d.start + off;
                     const u8* p = async_read(op, me, t, a, 16);
                     int copies = ins->i3 == 0 ? 1 : ins->i3 == 1 ? 4 : 2;
                     for (int q = 0; q < copies; q++) {
                       u32 lane = lane0 + (ins->i3 == 1   ? r + 32 * q
                                           : ins->i3 == 2 ? r + 64 * q
                                           : ins->i3 == 3 ? (r / 32) * 64 + r % 32 + 32 * q
                                                          : r);
                       for (int e = 0; e < 4; e++) {
                         memcpy(&tmem_cell(t, lane, col + 4 * j + e), p + 4 * e, 4);
                         t.tmem_init[(size_t)lane * 512 + col + 4 * j + e] = 1;
                       }
                     }
                   }
               }
             },
             I.line, "tcgen05.cp");
  }
  return NEXT;
}
static Status h_tc_commit(ARGS) {  // i0 cta_group, i1 space, i2 multicast
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    u32 a = to_shared(c, I.i1, addr_of(c, I.o[0], l, I.i1));
    u32 ranks = I.i2 ? (u32)RS(1)[l] & 0xffff : 1u << (a >> RANK_SHIFT);
    if (ranks >> c.cta.cluster->ctas.size())
      fail(c, fmt("multicast mask %#x names CTAs outside the cluster", ranks));
    Cta* self = &c.cta;
    Async op = async_operation(c, 1u << l, "tcgen05.commit");
    // PTX ISA, tcgen05.commit: it performs tcgen05.fence::before_thread_sync.
    op.knowledge.learn(op.own);
    op.knowledge.tensor.learn(own_tensor(c));
    for (Clock* k : {&op.knowledge.memory, &op.knowledge.tensor})
      k->learn({c.cta.tc_agent, ~0u, op.issued, op.issued});
    enqueue(c.m, c.cta.tc,
            [=] {
               Actor me = op.actor(self->tc_agent, op.issued);
               for (u32 r = 0; r < 16; r++)
                 if (ranks >> r & 1)
                   mbar_arrive(*op.m, me, *self, (a & OFF_MASK) | r << RANK_SHIFT, 1, 0,
                               op.ins->line, nullptr, op.knowledge);
             },
             I.line, "tcgen05.commit");
  }
  return NEXT;
}
