// Handlers: TMA, bulk copies, cp.async, st.async, ldmatrix and stmatrix, tensormap.replace.
#pragma once
#include "handler.h"
#include "mbarrier.h"
#include "memory.h"
#include "numerics.h"
#include "queues.h"
#include "tensor_map.h"
#include "types.h"

// Start an operation of cp.async.bulk with bulk groups.
static void bulk_op(Ctx& c, int l, AsyncOp op) {
  if (c.m.opt.mode == 0) {
    op.run();
    op.run = [] {};
    c.m.effects++;
  }
  c.w.bulk[l].open.push_back(std::move(op));
}
static Async bulk_store(Ctx& c, int l, const char* what) {
  if (!c.w.bulk_read_agent) {
    c.w.bulk_read_agent = new_agent(c.m, c.cta, c.w.id, "bulk store from shared memory");
    c.w.bulk_write_agent = new_agent(c.m, c.cta, c.w.id, "bulk store");
  }
  return async_operation(c, 1u << l, what);
}
// Run a lane's oldest groups, all but `keep`; return the tick of the last one's commit.
static Tick drain_bulk(Machine& m, BulkGroups& b, size_t keep) {
  Tick last = 0;
  while (b.committed.size() > keep) {
    auto g = std::move(b.committed.front());
    b.committed.pop_front();
    last = g.tick;
    for (auto& op : g.operations) op.run();
    m.effects++;
  }
  return last;
}
static Status h_bulk_commit(ARGS) {
  lanes(c.mask, [&](int l) {
    c.w.bulk[l].commit(c.m.tick);
    c.w.bulk[l].writing.push_back(c.m.tick);
  });
  return NEXT;
}
static Status h_bulk_wait(ARGS) {  // i0: only until shared memory has been read
  lanes(c.mask, [&](int l) {
    BulkGroups& b = c.w.bulk[l];
    size_t keep = (size_t)RS(0)[l];
    Tick read = drain_bulk(c.m, b, keep);
    if (read) c.w.knowledge.learn({c.w.bulk_read_agent, 1u << l, 0, read});
    for (; !I.i0 && b.writing.size() > keep; b.writing.pop_front())
      c.w.knowledge.learn({c.w.bulk_write_agent, 1u << l, 0, b.writing.front()});
  });
  return NEXT;
}
// Return the mbarrier that a multicast copy signals in the destination CTA `rank`.
static u32 mcast_bar(u32 bar, u32 rank, int cg) {
  return (bar & OFF_MASK) | (cg == 2 ? ((rank & ~1u) | (bar >> RANK_SHIFT & 1)) : rank)
                                << RANK_SHIFT;
}
// Load a box; return the bytes that were read from global memory.
static u64 load_box(const Async& op, const Actor& me, Cta& t, const BoxStart& box, u32 base) {
  auto& at = box_chunks(box, base);
  if (!clean_chunks(op, me, t, at, true)) {
    for (u32 to : at) in_shared(op, t, to, 16);
    for (u32 to : at) order_shared(*op.m, *op.launch, me, t, to, 16, true, op.ins->line);
  }
  u32 chunks = box.map.box[0] * box.map.ebits / 128;  // of a row
  u64 loaded = 0;
  box_walk(box, [&](u32 lin, u64 g, u32 first, u32 end) {
    const u8* p = first == end ? nullptr : async_read_global(op, me, g, end - first) - first;
    loaded += end - first;
    for (u32 i = 0; i < chunks; i++) {
      u8* to = &t.smem[at[lin / 16 + i]];
      u32 a = std::max(16 * i, first), b = std::min(16 * i + 16, end);
      if (a == 16 * i && b == a + 16)
        memcpy(to, p + a, 16);
      else {
        memset(to, 0, 16);
        if (a < b) memcpy(to + a % 16, p + a, b - a);
      }
    }
  });
  for (u32 to : at) memset(&t.init[to], 1, 16);
  return loaded;
}
// Tensor load. i0 cta_group (0 none), i1 multicast, i2 gather4
static Status h_tma_load(ARGS) {
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    BoxStart box = box_start(c, addr_of(c, I.o[1], l), I.o[2], l, I.i2);
    u32 dst = (u32)addr_of(c, I.o[0], l, 2), bar = (u32)addr_of(c, I.o[3], l, 2);
    check_box_in_shared(c, "TMA load to", dst);
    u32 ranks = 1u << (dst >> RANK_SHIFT);
    if (I.i1) ranks = (u32)RS(4)[l] & 0xffff;
    if (ranks >> c.cta.cluster->ctas.size())
      fail(c, fmt("multicast mask %#x names CTAs outside the cluster", ranks));
    shared_target(c.cta, dst, box_bytes(box), &c);
    Cta* self = &c.cta;
    int cg = I.i0;
    bool mc = I.i1;
    // PTX ISA, cp.async.bulk.tensor: the mbarrier is the destination CTA's; with cta_group::2 it
    // may also be the one of the pair's other CTA.
    u32 difference = dst >> RANK_SHIFT ^ bar >> RANK_SHIFT;
    if (!mc && difference > (cg == 2))
      fail(c, fmt("TMA load into CTA rank %u with an mbarrier of CTA rank %u", dst >> RANK_SHIFT,
                  bar >> RANK_SHIFT));
    Async op = async_operation(c, 1u << l, "TMA load");
    enqueue(c.m, self->cluster->tma,
            [=] {
               u64 loaded = 0;
               for (u32 r = 0; r < 16; r++)
                 if (ranks >> r & 1) {
                   u32 target = mc ? mcast_bar(bar, r, cg) : bar;
                   Actor me = copy_actor(op, *self, target);
                   me.box = true;
                   loaded = load_box(op, me, *self->cluster->ctas[r], box, dst & OFF_MASK);
                   mbar_complete(op, me, *self, target, box_bytes(box));
                 }
               op.launch->counts.tma_loaded += loaded;
             },
             I.line, "TMA load");
  }
  return NEXT;
}
// Return the type of a tensor map's elements, for a reduction.
static Ty element_type(int dtype) {
  static const Ty types[] = {T_NONE, T_NONE, T_U32,  T_S32, T_U64, T_S64,
                             T_F16,  T_F32,  T_NONE, T_F64, T_BF16};
  Ty t = dtype < 11 ? types[dtype] : T_NONE;
  if (t == T_NONE) throw EmuError{fmt("TMA reduce: element type %d not modelled", dtype)};
  return t;
}
static void reduce_bytes(int t, int op, u8* g, const u8* s, int n) {
  int by = ty_bytes(t);
  for (int i = 0; i < n; i += by) {
    u64 a = 0, b = 0;
    memcpy(&a, g + i, by);
    memcpy(&b, s + i, by);
    u64 r = atom_apply(op, t, a, b, 0);
    memcpy(g + i, &r, by);
  }
}
// Tensor store or reduction. i0: reduction op + 1, or 0; i2 scatter4
static Status h_tma_store(ARGS) {
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    BoxStart box = box_start(c, addr_of(c, I.o[0], l), I.o[1], l, I.i2);
    u32 src = (u32)addr_of(c, I.o[2], l, 2);
    check_box_in_shared(c, "TMA store from", src);
    Cta* s = &shared_target(c.cta, src, box_bytes(box), &c);
    int red = I.i0;
    Async op = bulk_store(c, l, "TMA store");
    u32 reads = c.w.bulk_read_agent, writes = c.w.bulk_write_agent;
    bulk_op(c, l,
            {[=] {
               Actor reader = op.actor(reads, op.issued), writer = op.actor(writes, op.issued);
               writer.strong = red;
               auto& at = box_chunks(box, src & OFF_MASK);
               if (!clean_chunks(op, reader, *s, at, false))
                 for (u32 from : at) async_read(op, reader, *s, from, 16);
               box_walk(box, [&](u32 lin, u64 g, u32 first, u32 end) {
                 if (first == end) return;
                 u8* to = async_write_global(op, writer, g, end - first) - first;
                 op.launch->counts.tma_stored += end - first;
                 for (u32 a = first, b; a < end; a = b) {
                   b = std::min(a / 16 * 16 + 16, end);
                   const u8* p = &s->smem[at[(lin + a) / 16] + a % 16];
                   if (red)
                     reduce_bytes(element_type(box.map.dtype), red - 1, to + a, p, b - a);
                   else
                     memcpy(to + a, p, b - a);
                 }
               });
             },
             I.line, "TMA store"});
  }
  return NEXT;
}
// Linear bulk copies. i0: 0 global->shared, 1 shared->global, 2 shared->shared::cluster; i1
// multicast; i2 reduction op+1; i3 reduction type
static Status h_bulk_copy(ARGS) {
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    u32 n = (u32)RS(2)[l];
    Cta* self = &c.cta;
    // PTX ISA, cp.async.bulk: size and both addresses are multiples of 16.
    if (n % 16) fail(c, fmt("bulk copy of %u bytes, which is not a multiple of 16", n));
    auto aligned = [&](u64 dst, u64 src) {
      if (dst % 16 || src % 16) fail(c, "bulk copy address is not 16-byte aligned");
    };
    int red = I.i2, ty = I.i3;
    if (I.i0 == 0) {
      u64 src = addr_of(c, I.o[1], l);
      check_global(c, src, n, false);
      u32 dst = (u32)addr_of(c, I.o[0], l), bar = (u32)addr_of(c, I.o[3], l);
      aligned(dst, src);
      u32 ranks = I.i1 ? (u32)RS(4)[l] & 0xffff : 1u << (dst >> RANK_SHIFT);
      bool mc = I.i1;
      shared_target(c.cta, dst, n, &c);
      Async op = async_operation(c, 1u << l, "bulk copy");
      enqueue(c.m, self->cluster->tma,
              [=] {
                 op.launch->counts.tma_loaded += n;
                 for (u32 r = 0; r < 16; r++)
                   if (ranks >> r & 1) {
                     u32 target = mc ? mcast_bar(bar, r, 1) : bar;
                     Actor me = copy_actor(op, *self, target);
                     const u8* p = async_read_global(op, me, src, n);
                     async_write(op, me, *self->cluster->ctas[r], dst & OFF_MASK, p, n);
                     mbar_complete(op, me, *self, target, n);
                   }
               },
               I.line, "bulk copy");
    } else if (I.i0 == 1) {
      u64 dst = addr_of(c, I.o[0], l);
      check_global(c, dst, n, true);
      u32 src = (u32)addr_of(c, I.o[1], l);
      Cta* s = &shared_target(c.cta, src, n, &c);
      aligned(dst, src);
      Async op = bulk_store(c, l, "bulk store");
      u32 reads = c.w.bulk_read_agent, writes = c.w.bulk_write_agent;
      bulk_op(c, l,
              {[=] {
                 Actor writer = op.actor(writes, op.issued);
                 writer.strong = red;
                 const u8* p = async_read(op, op.actor(reads, op.issued), *s, src & OFF_MASK, n);
                 u8* to = async_write_global(op, writer, dst, n);
                 op.launch->counts.tma_stored += n;
                 if (red)
                   reduce_bytes(ty, red - 1, to, p, n);
                 else
                   memcpy(to, p, n);
               },
               I.line, "bulk store"});
    } else {
      u32 dst = (u32)addr_of(c, I.o[0], l), src = (u32)addr_of(c, I.o[1], l),
          bar = (u32)addr_of(c, I.o[3], l);
      aligned(dst, src);
      Cta *s = &shared_target(c.cta, src, n, &c), *d = &shared_target(c.cta, dst, n, &c);
      Async op = async_operation(c, 1u << l, "bulk copy");
      enqueue(c.m, self->cluster->tma,
              [=] {
                 Actor me = copy_actor(op, *self, bar);
                 me.strong = red;
                 const u8* p = async_read(op, me, *s, src & OFF_MASK, n);
                 u32 to = dst & OFF_MASK;
                 if (red) {
                   std::vector<u8> sum(d->smem.begin() + to, d->smem.begin() + to + n);
                   reduce_bytes(ty, red - 1, sum.data(), p, n);
                   async_write(op, me, *d, to, sum.data(), n);
                 } else
                   async_write(op, me, *d, to, p, n);
                 mbar_complete(op, me, *self, bar, n);
               },
               I.line, "bulk copy");
    }
  }
  return NEXT;
}
static u32 cpasync_agent(const Ctx& c) {
  if (!c.w.cpasync_agent) c.w.cpasync_agent = new_agent(c.m, c.cta, c.w.id, "cp.async");
  return c.w.cpasync_agent;
}
// cp.async (Ampere): operands [dst],[src],size{,src-size or ignore}
static Status h_cp_async(ARGS) {
  struct One {
    u32 dst;
    u64 src;
    u32 n, sn;
    int lane;
    Known own;
  };
  std::vector<One> v;
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    One o;
    o.lane = l;
    o.own = own_accesses(c.w, 1u << l, c.w.together, c.m.tick);
    o.dst = (u32)addr_of(c, I.o[0], l);
    o.src = addr_of(c, I.o[1], l);
    o.n = (u32)RS(2)[l];
    if (o.n != 4 && o.n != 8 && o.n != 16) fail(c, fmt("cp.async of %u bytes", o.n));
    o.sn = I.o.size() > 3 && !I.i0 ? std::min((u32)RS(3)[l], o.n) : o.n;
    if (o.sn) check_global(c, o.src, o.sn, false);
    if (o.dst % o.n || (o.sn && o.src % o.n)) fail(c, "misaligned cp.async");
    shared_target(c.cta, o.dst, o.n, &c);
    v.push_back(o);
  }
  Cta* self = &c.cta;
  u32 agent = cpasync_agent(c);
  Async op = async_operation(c, 0, "cp.async");
  c.w.cpasync_groups.open++;
  enqueue(c.m, c.w.cpasync,
          [=, copies = c.w.copies] {
             Actor me = op.actor(agent, op.issued);
             me.copied = true;
             me.copies_agent = agent;
             me.copies = &copies;
             for (auto& o : v) {
               u8 buf[16] = {0};
               me.lanes = 1u << o.lane;
               me.own = &o.own;
               if (o.sn) memcpy(buf, async_read_global(op, me, o.src, o.sn), o.sn);
               async_write(op, me, *self, o.dst & OFF_MASK, buf, o.n);
               op.launch->counts.loaded += o.sn;
             }
           },
           I.line, "cp.async");
  return NEXT;
}
static Status h_cpasync_commit(ARGS) {
  c.w.cpasync_groups.commit(c.m.tick);
  return NEXT;
}
static Status h_cpasync_wait(ARGS) {  // i0: for all, committed or not
  auto& groups = c.w.cpasync_groups;
  size_t keep = I.i0 ? 0 : (size_t)RS(0)[__builtin_ctz(c.mask)];
  while (groups.committed.size() > keep) {
    int n = groups.committed.front().operations;
    c.w.cpasync_done = groups.committed.front().tick;
    groups.committed.pop_front();
    while (n-- > 0 && !c.w.cpasync.q.empty()) run_front(c.m, c.w.cpasync);
  }
  // cp.async.mbarrier.arrive is in the queue between the copies, but in no group.
  if (keep == 0)
    while (!c.w.cpasync.q.empty()) run_front(c.m, c.w.cpasync);
  if (I.i0) c.w.cpasync_done = c.m.tick;
  // A lane that waits sees its own copies. The other lanes see them after a synchronisation.
  // Groups are the warp's: of diverged lanes the first one's wait counts for all that wait.
  lanes(c.mask, [&](int l) { c.w.copies[l] = c.w.cpasync_done; });
  if (c.w.cpasync_agent) c.w.lanes_of_copies |= c.mask;
  return NEXT;
}
static Status h_cpasync_mbar(ARGS) {  // i0: noinc; i1 space
  std::vector<std::pair<u32, int>> at;
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    at.push_back({to_shared(c, I.i1, addr_of(c, I.o[0], l, I.i1)), l});
    if (!I.i0) mbar_in_use(c.cta, at.back().first, &c, I.line).pending++;
  }
  Cta* self = &c.cta;
  u32 agent = cpasync_agent(c);
  Async op = async_operation(c, c.mask, "cp.async.mbarrier.arrive");
  enqueue(c.m, c.w.cpasync,
          [=] {
             Actor me = op.actor(agent, op.issued);
             for (auto& a : at) {
               Knowledge k;
               k.learn({agent, 1u << a.second, 0, op.issued});
               mbar_arrive(*op.m, me, *self, a.first, 1, 0, op.ins->line, nullptr, k);
             }
           },
           I.line, "cp.async.mbarrier.arrive");
  return NEXT;
}
static Status h_st_async(ARGS) {  // [addr], value, [mbar]
  int by = ty_bytes(I.i0), n = I.i2;
  lanes(c.mask, [&](int l) {
    u32 a = (u32)addr_of(c, I.o[0], l), bar = (u32)addr_of(c, I.o[2], l);
    u8 buf[64];
    const Opnd& s = I.o[1];
    for (int i = 0; i < n; i++) {
      u64 v = c.w.R(s.kind == 'V' ? s.v[i].slot : s.slot)[l];
      memcpy(buf + i * by, &v, by);
    }
    std::vector<u8> data(buf, buf + by * n);
    Cta* d = &shared_target(c.cta, a, by * n, &c);
    Cta* self = &c.cta;
    Async op = async_operation(c, 1u << l, "st.async");
    enqueue(c.m, self->cluster->tma,
            [=] {
               Actor me = copy_actor(op, *self, bar);
               async_write(op, me, *d, a & OFF_MASK, data.data(), data.size());
               mbar_complete(op, me, *self, bar, data.size());
             },
             I.line, "st.async");
  });
  return NEXT;
}
// ldmatrix and stmatrix, m8n8 b16. i0 number of matrices, i1 transposed
static Status h_ldmatrix(ARGS) {
  CONVERGED_ALL("ldmatrix")
  u16 mat[4][8][8];
  for (int i = 0; i < I.i0; i++)
    for (int r = 0; r < 8; r++) {
      int l = 8 * i + r;
      mem_read(c, 2, to_shared(c, 2, addr_of(c, I.o[1], l, 2)), 16, (u8*)mat[i][r], l);
    }
  for (int i = 0; i < I.i0; i++) {
    u64* d = c.w.R(I.o[0].kind == 'V' ? I.o[0].v[i].slot : I.o[0].slot);
    for (int l = 0; l < 32; l++) {
      int r = l / 4, q = l % 4 * 2;
      d[l] = I.i1 ? (u32)mat[i][q][r] | (u32)mat[i][q + 1][r] << 16
                  : (u32)mat[i][r][q] | (u32)mat[i][r][q + 1] << 16;
    }
  }
  return NEXT;
}
static Status h_stmatrix(ARGS) {
  CONVERGED_ALL("stmatrix")
  for (int i = 0; i < I.i0; i++) {
    u16 mat[8][8];
    u64* s = c.w.R(I.o[1].kind == 'V' ? I.o[1].v[i].slot : I.o[1].slot);
    for (int l = 0; l < 32; l++) {
      int r = l / 4, q = l % 4 * 2;
      u16 lo = (u16)s[l], hi = (u16)(s[l] >> 16);
      if (I.i1) {
        mat[q][r] = lo;
        mat[q + 1][r] = hi;
      } else {
        mat[r][q] = lo;
        mat[r][q + 1] = hi;
      }
    }
    for (int r = 0; r < 8; r++) {
      int l = 8 * i + r;
      mem_write(c, 2, addr_of(c, I.o[0], l, 2), 16, (u8*)mat[r], l);
    }
  }
  return NEXT;
}

// tensormap.replace: i0 field (0 global_address 1 rank 2 box_dim 3 global_dim 4 global_stride),
// operands [addr]{, ordinal}, value
static Status h_tmap_replace(ARGS) {
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    u64 w[8];
    u8 buf[8];
    u64 a = addr_of(c, I.o[0], l, I.i1);
    for (int i = 0; i < 8; i++) {
      mem_read(c, I.i1, a + 8 * i, 8, buf, l);
      memcpy(&w[i], buf, 8);
    }
    u64 v = c.w.R(I.o.back().slot)[l];
    int ord = I.o.size() > 2 ? (int)RS(1)[l] : 0;
    auto put = [&](int word, int pos, int n, u64 x) {
      u64 k = ((n == 64 ? 0 : 1ull << n) - 1) << pos;
      w[word] = (w[word] & ~k) | ((x << pos) & k);
    };
    switch (I.i0) {
      case 0: w[0] = v; break;
      case 1: put(1, 4, 3, (u32)v); break;
      case 2:
        if (ord == 0)
          put(6, 56, 8, (u32)v - 1);
        else
          put(7, 8 * (ord - 1), 8, (u32)v - 1);
        break;
      case 3: put(4 + ord / 2, 32 * (ord % 2), 32, (u32)v - 1); break;
      case 4: {
        u64 q = v >> 4;
        static const int wd[4] = {1, 2, 2, 3}, ps[4] = {32, 0, 32, 0};
        put(wd[ord], ps[ord], 32, q & 0xffffffff);
        put(3, 32 + 4 * ord, 4, q >> 32);
        break;
      }
    }
    for (int i = 0; i < 8; i++) {
      memcpy(buf, &w[i], 8);
      mem_write(c, I.i1, a + 8 * i, 8, buf, l);
    }
  }
  return NEXT;
}
static Status h_tmap_cp(ARGS) {  // tensormap.cp_fenceproxy [global], [shared], 128
  CONVERGED_ALL("tensormap.cp_fenceproxy")
  int l = __builtin_ctz(c.mask);
  u8 buf[16];
  // The second half of a descriptor is unused, and kernels do not always initialise it.
  u32 src = (u32)addr_of(c, I.o[1], l, 2);
  Cta& t = shared_target(c.cta, src, 128, &c);
  smem_check_init(c, t, src & OFF_MASK, 64);
  for (int i = 0; i < 128; i += 16) {
    memcpy(buf, &t.smem[(src & OFF_MASK) + i], 16);
    mem_write(c, 1, addr_of(c, I.o[0], l) + i, 16, buf, l);
  }
  return NEXT;
}
static Status h_vprintf(ARGS) {
  for (u32 mm = c.mask; mm; mm &= mm - 1) {
    int l = __builtin_ctz(mm);
    u64 f, args;
    u8 b[8];
    mem_read(c, 3, addr_of(c, I.o[0], l), 8, b, l);
    memcpy(&f, b, 8);
    mem_read(c, 3, addr_of(c, I.o[1], l), 8, b, l);
    memcpy(&args, b, 8);
    Str out;
    u32 pos = 0;
    auto arg = [&](int n) -> u64 {
      pos = (pos + n - 1) / n * n;
      u64 v = 0;
      mem_read(c, 0, args + pos, n, b, l);
      memcpy(&v, b, n);
      pos += n;
      return v;
    };
    for (const char* p = (const char*)f; *p; p++) {
      if (*p != '%') {
        out += *p;
        continue;
      }
      Str spec = "%";
      int longs = 0;
      p++;
      while (*p && !strchr("diouxXcsfFeEgGp%", *p)) {
        if (*p == 'l' || *p == 'z' || *p == 'j')
          longs++;
        else if (*p != 'h')
          spec += *p;
        p++;
      }
      if (*p == '%') {
        out += '%';
        continue;
      }
      if (strchr("fFeEgG", *p))
        out += fmt((spec + *p).c_str(), bits<double>(arg(8)));
      else if (*p == 's')
        out += fmt("%s", (const char*)arg(8));
      else if (*p == 'p')
        out += fmt("0x%lx", arg(8));
      else if (longs)
        out += fmt((spec + "ll" + *p).c_str(), arg(8));
      else
        out += fmt((spec + *p).c_str(), (int)arg(4));
    }
    fputs(out.c_str(), stdout);
    fflush(stdout);
  }
  return NEXT;
}
