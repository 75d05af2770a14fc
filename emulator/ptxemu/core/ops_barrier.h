// Handlers: named, cluster and mbarrier barriers.
#pragma once
#include "handler.h"
#include "mbarrier.h"
#include "memory.h"

static int cta_expected(Cta& t) {
  int n = 0;
  for (auto& w : t.warps)
    if (w.live) n += 32;
  return n;
}
static void cta_bar_release(Machine& m, Cta& t, NamedBar& b) {
  t.wake();
  b.gen++;
  b.arrived = 0;
  b.expected = 0;
  b.lanes.clear();
  m.effects++;
  b.last_and = b.red_and;
  b.last_or = b.red_or;
  b.last_popc = b.red_popc;
  b.red_and = 1;
  b.red_or = b.red_popc = 0;
  b.released.join(b.arriving);
  b.arriving = Knowledge();
}
// After a warp's exit: barriers over the whole CTA may complete.
static void cta_bar_check(Machine& m, Cta& t) {
  for (auto& b : t.bars)
    if (b.arrived && b.expected == -1 && b.arrived >= cta_expected(t)) cta_bar_release(m, t, b);
}
// i0: 0 sync, 1 arrive, 2 red.and, 3 red.or, 4 red.popc; i1 aligned; i2 index of the barrier
// operand
static Status h_bar(ARGS) {
  if (I.i1 && !converged(c, ~0u, "bar (aligned)", I.i0 != 1)) return BLOCK;
  int lead = __builtin_ctz(c.mask), bi = I.i2, extra = I.i0 >= 2 ? 1 : 0;
  u32 id = (u32)RS(bi)[lead];
  if (id > 15) fail(c, "barrier id above 15");
  NamedBar& b = c.cta.bars[id];
  int want = (int)I.o.size() - bi - extra > 1 ? (int)RS(bi + 1)[lead] : -1;
  auto finish = [&] {
    acquire(c, b.released);
    if (I.i0 >= 2)
      lanes(c.mask, [&](int l) {
        RS(0)[l] = I.i0 == 2 ? b.last_and : I.i0 == 3 ? b.last_or : b.last_popc;
      });
  };
  if (!c.g.arrived) {
    if (b.arrived && b.expected != want && !(want == -1 && b.expected == c.cta.nthreads) &&
        !(b.expected == -1 && want == c.cta.nthreads))
      fail(c, fmt("named barrier %u used with %d threads while another warp (PTX line %d) uses %d",
                  id, want, b.line, b.expected));
    if (want > 0 && want % 32) fail(c, "barrier thread count is not a multiple of the warp size");
    if (b.lanes[c.w.id] & c.mask)
      fail(c, fmt("lanes %08x arrive twice at named barrier %u in one phase",
                  b.lanes[c.w.id] & c.mask, id));
    b.expected = want;
    b.line = I.line;
    // A warp counts as 32 threads if all its live lanes have arrived.
    u32 before = b.lanes[c.w.id], now = before | c.mask;
    b.lanes[c.w.id] = now;
    b.arrived +=
        (now & c.w.live) == c.w.live ? 32 - __builtin_popcount(before) : __builtin_popcount(c.mask);
    if (I.i0 >= 2)
      lanes(c.mask, [&](int l) {
        u32 v = predval(c, I.o.back(), l);
        b.red_and &= v;
        b.red_or |= v;
        b.red_popc += v;
      });
    b.arriving.join(release(c, c.mask));
    c.m.effects++;
    u64 gen = b.gen;
    int need = want == -1 ? cta_expected(c.cta) : want;
    if (b.arrived > need)
      fail(c, fmt("named barrier %u received %d threads, expected %d", id, b.arrived, need));
    if (b.arrived == need) {
      cta_bar_release(c.m, c.cta, b);
      finish();
      return NEXT;
    }
    if (I.i0 == 1) return NEXT;
    c.g.arrived = true;
    c.g.token = gen;
  }
  if (b.gen != c.g.token) {
    c.g.arrived = false;
    finish();
    return NEXT;
  }
  c.g.sleeps = true;
  c.g.why = [id, want, &b, &cta = c.cta] {
    return fmt("barrier %u: %d of %d threads arrived", id, b.arrived,
               want == -1 ? cta_expected(cta) : want);
  };
  return BLOCK;
}
static int live_threads(const Cluster& k) {
  int n = 0;
  for (auto& t : k.ctas)
    for (auto& w : t->warps) n += __builtin_popcount(w.live);
  return n;
}
static void cluster_bar_release(Cluster& k) {
  k.bar_gen++;
  k.bar_arrived = 0;
  k.arrived.join(k.arriving);
  k.arriving = Knowledge();
}
static Status h_cluster_arrive(ARGS) {  // i0: release
  Cluster& k = *c.cta.cluster;
  if (I.i1) { CONVERGED_ALL("barrier.cluster.arrive.aligned") }
  c.w.cluster_token = k.bar_gen;
  c.w.cluster_arrived = true;
  k.bar_arrived += __builtin_popcount(c.mask);
  if (I.i0)
    k.arriving.join(release(c, c.mask));
  else {
    lanes(c.mask, [&](int l) {
      if (const Fence* f = fence_of(c, l)) k.arriving.join(released_by(c, *f, l));
    });
    k.arriving.learn(start_of(c.cta));
    k.arriving.tensor.join(c.w.knowledge.tensor);
    k.arriving.join(c.w.fenced_inits);
  }
  c.m.effects++;
  if (k.bar_arrived >= live_threads(k)) cluster_bar_release(k);
  return NEXT;
}
static Status h_cluster_wait(ARGS) {
  Cluster& k = *c.cta.cluster;
  if (!c.w.cluster_arrived) fail(c, "barrier.cluster.wait without a preceding arrive");
  if (k.bar_gen != c.w.cluster_token) {
    acquire(c, k.arrived);
    return NEXT;
  }
  int need = live_threads(k);
  if (k.bar_arrived >= need) {
    cluster_bar_release(k);
    c.m.effects++;
    acquire(c, k.arrived);
    return NEXT;
  }
  c.g.why = [&k, need] {
    return fmt("barrier.cluster.wait: %d of %d threads arrived", k.bar_arrived, need);
  };
  return BLOCK;
}
// mbarrier ops: i1 space (0 generic, 2 shared)
static Status h_mbar_init(ARGS) {
  Warp& w = c.w;
  if (!w.init_agent) w.init_agent = new_agent(c.m, c.cta, w.id, "mbarrier.init");
  w.knowledge.learn({w.init_agent, ~0u, c.m.tick, c.m.tick});
  lanes(c.mask, [&](int l) {
    u32 a = to_shared(c, I.i1, addr_of(c, I.o[0], l, I.i1));
    Cta* own;
    MBar& b = mbar_at(c.cta, a, &c, I.line, &own);
    if (b.valid && b.pending != b.count)
      c.hazard("mbarrier-reinit", "mbarrier.init on a barrier with arrivals pending");
    s32 n = (s32)RS(1)[l];
    if (n < 1 || n >= 1 << 20) fail(c, fmt("mbarrier.init with count %d", n));
    wake_sleepers(b);
    b = MBar();
    b.valid = true;
    b.count = b.pending = n;
    b.init_line = I.line;
    b.initialised.agent = w.init_agent;
    b.initialised.tick = c.m.tick;
    b.initialised.lanes = 1u << l;
    b.agent = new_agent(c.m, *own, -1, "asynchronous copy");
    memset(&own->init[a & OFF_MASK], 1, 8);
    c.m.effects++;
  });
  return NEXT;
}
// fence.mbarrier_init: order this warp's mbarrier.inits, and nothing else, before a relaxed arrival
// at the cluster's barrier.
static Status h_mbar_init_fence(ARGS) {
  if (c.w.init_agent) c.w.fenced_inits.learn(*c.w.knowledge.memory.find(c.w.init_agent));
  return NEXT;
}
static Status h_mbar_inval(ARGS) {
  lanes(c.mask, [&](int l) {
    MBar& b = mbar_at(c.cta, to_shared(c, I.i1, addr_of(c, I.o[0], l, I.i1)), &c, I.line);
    b.valid = false;
    wake_sleepers(b);
  });
  return NEXT;
}
// arrive: i0 1 = with expect_tx; i2 1 = arrive_drop
static Status h_mbar_arrive(ARGS) {
  lanes(c.mask, [&](int l) {
    u32 a = to_shared(c, I.i1, addr_of(c, I.o[1], l, I.i1));
    s64 tx = 0;
    s32 n = 1;
    if (I.i0)
      tx = (u32)RS(2)[l];
    else if (I.o.size() > 2)
      n = (s32)RS(2)[l];
    if (I.i2) { mbar_in_use(c.cta, a, &c, I.line).count -= n; }
    const Fence* fence = I.sem == RELEASE ? nullptr : fence_of(c, l);
    Knowledge known = I.sem == RELEASE ? release(c, 1u << l)
                      : fence          ? released_by(c, *fence, l)
                                       : Knowledge();
    known.tensor.join(c.w.knowledge.tensor);
    u32 ph = mbar_arrive(c.m, thread_actor(c, l), c.cta, a, n, tx, I.line, &c, known);
    if (I.o[0].slot >= 0) RS(0)[l] = ph;
  });
  return NEXT;
}
static Status h_mbar_tx(ARGS) {  // i0: 0 expect_tx, 1 complete_tx
  lanes(c.mask, [&](int l) {
    u32 a = to_shared(c, I.i1, addr_of(c, I.o[0], l, I.i1));
    mbar_order(c.m, c.launch(), thread_actor(c, l), c.cta, a, I.line);
    mbar_tx(c.m, c.cta, a, I.i0 ? -(s64)(u32)RS(1)[l] : (s64)(u32)RS(1)[l], I.line);
  });
  return NEXT;
}
// wait: i0 1 = parity form, i2 1 = try_wait. The first try_wait of an incomplete phase returns
// false, as hardware may: this finds code without a loop. The next one for the same phase blocks.
// So does the next test_wait, if its warp had no effect in between.
static Status h_mbar_wait(ARGS) {
  u32 done = 0;
  MBar *acquired = nullptr, *waited = nullptr;
  u32 at = 0, asked = 0;  // mbarrier and phase of a waiting lane
  bool same = true;       // all waiting lanes wait for one mbarrier
  for (u32 m = c.mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    u32 a = to_shared(c, I.i1, addr_of(c, I.o[1], l, I.i1));
    MBar& b = mbar_in_use(c.cta, a, &c, I.line);
    u32 st = (u32)RS(2)[l];
    bool ok = I.i0 ? (b.phase & 1) != (st & 1) : b.phase != st;
    if (ok) {
      done |= 1u << l;
      // The check must come before `acquire`, which adds the mbarrier's knowledge.
      if (&b != acquired) mbar_order(c.m, c.launch(), thread_actor(c, l), c.cta, a, I.line);
      if (&b != acquired && I.sem == ACQUIRE) acquire(c, b.arrived);
      if (&b != acquired && I.sem == RELAXED) {
        publish(c.w.observed, {SCOPE_CLUSTER, &c.cta, c.cta.cluster, b.arrived});
        c.w.knowledge.tensor.join(b.arrived.tensor);
      }
      acquired = &b;
    } else {
      same &= !waited || waited == &b;
      waited = &b;
      at = a;
      asked = st;
    }
  }
  if (waited)
    c.g.why = [&I, waited, at, asked] {
      return fmt(
          "try_wait at PTX line %d on mbarrier at shared offset %u (CTA rank %u, init at PTX "
          "line %d): waiting %s %u; now phase %u, %d of %d arrivals pending, tx-count %ld",
          I.line, at & OFF_MASK, at >> RANK_SHIFT, waited->init_line, I.i0 ? "parity" : "state",
          asked, waited->phase, waited->pending, waited->count, (long)waited->tx);
    };
  bool again = waited && c.g.tried == at && c.g.tried_for == asked;
  if (again && (I.i2 || c.g.tried_at == c.own_effects()) && !c.m.force_timeout) {
    if (same && (int)(at >> RANK_SHIFT) == c.cta.rank) {
      c.g.sleeps = true;
      waited->sleepers.push_back(&c.w);
    }
    return BLOCK;
  }
  c.g.tried = waited ? at : ~0u;  // a success ends the series: the same parity comes again
  c.g.tried_for = asked;
  c.g.tried_at = c.own_effects();
  lanes(c.mask, [&](int l) { RS(0)[l] = done >> l & 1; });
  return done == c.mask ? NEXT : YIELD;
}
