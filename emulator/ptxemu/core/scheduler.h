// Runs warps, completes asynchronous work, detects deadlocks.
#pragma once
#include "memory.h"
#include "ops_clc.h"
#include "ops_control.h"
#include "ops_copy.h"
#include "ops_tcgen05.h"
#include "queues.h"
#include "registers.h"

enum {
  SP_TID = 0,
  SP_NTID = 3,
  SP_CTAID = 6,
  SP_NCTAID = 9,
  SP_LANEID = 12,
  SP_WARPID,
  SP_NWARPID,
  SP_SMID,
  SP_NSMID,
  SP_CCTAID = 17,
  SP_CNCTAID = 20,
  SP_CRANK = 23,
  SP_CNRANK,
  SP_CLID = 25,
  SP_NCLID = 28,
  SP_LM = 31,
  SP_CLOCK = 36,
  SP_EXPL = 41,
  SP_DSMEM,
  SP_TSMEM,
  SP_GRIDID
};

static void start_cluster(Machine& m, Launch& launch, std::array<u32, 3> k) {
  std::unique_ptr<Cluster> cl(new Cluster);
  const Program& p = *launch.p;
  const u32 *cdim = launch.cdim, *block = launch.block, *grid = launch.grid;
  u32 n = cdim[0] * cdim[1] * cdim[2], threads = block[0] * block[1] * block[2];
  int smid = launch.smid;
  launch.smid += n;
  for (u32 r = 0; r < n; r++) {
    std::unique_ptr<Cta> t(new Cta);
    t->cluster = cl.get();
    t->launch = &launch;
    t->rank = r;
    t->nthreads = threads;
    u32 in[3] = {r % cdim[0], r / cdim[0] % cdim[1], r / (cdim[0] * cdim[1])};
    for (int i = 0; i < 3; i++) t->id[i] = k[i] * cdim[i] + in[i];
    m.noise.fill(t->smem, launch.smem_size);
    t->init.assign(launch.smem_size, 0);
    t->mbars.resize(launch.smem_size / 8 + 1);
    t->agent = new_agent(m, *t, -1, "");
    t->started = ++m.tick;
    if (!launch.sm90) {
      m.noise.fill(t->tmem, 128 * 512);
      t->tmem_init.assign(128 * 512, 0);
      t->tmem_owner.assign(512, -1);
      t->tc_agent = new_agent(m, *t, -1, "tcgen05");
    }
    u32 nw = (threads + 31) / 32;
    t->warps.resize(nw);
    for (u32 wi = 0; wi < nw; wi++) {
      Warp& w = t->warps[wi];
      w.cta = t.get();
      w.id = wi;
      w.agent = new_agent(m, *t, wi, "");
      w.knowledge.know_launches(launch.known);
      w.knowledge.learn(start_of(*t));
      w.wgmma_registers.resize(p.tracked.size());
      w.loaded_from_tmem.resize(p.tracked.size());
      u32 left = threads - wi * 32;
      w.live = left >= 32 ? ~0u : (1u << left) - 1;
      m.noise.fill(w.regs, (size_t)p.nslots * 32);
      m.noise.fill(w.local, (size_t)32 * p.local_bytes);
      Group g;
      g.mask = w.live;
      w.groups.push_back(g);
      auto fill = [&](int slot, u64 v) {
        u64* r = w.R(slot);
        for (int l = 0; l < 32; l++) r[l] = v;
      };
      for (auto& c : p.consts) fill(c.first, c.second);
      for (auto& c : p.params) fill(c.first, (u64)(launch.params + c.second));
      for (auto& c : p.smem_syms) fill(c.first, c.second | r << RANK_SHIFT);
      for (auto& c : p.specials) {
        u64* R = w.R(c.first);
        int s = c.second;
        for (u32 l = 0; l < 32; l++) {
          u32 tid = wi * 32 + l;
          u64 v = 0;
          u32 tv[3] = {tid % block[0], tid / block[0] % block[1], tid / (block[0] * block[1])};
          if (s < SP_NTID)
            v = tv[s];
          else if (s < SP_CTAID)
            v = block[s - SP_NTID];
          else if (s < SP_NCTAID)
            v = t->id[s - SP_CTAID];
          else if (s < SP_LANEID)
            v = grid[s - SP_NCTAID];
          else if (s == SP_LANEID)
            v = l;
          else if (s == SP_WARPID)
            v = wi;
          else if (s == SP_NWARPID)
            v = nw;
          else if (s == SP_SMID)
            v = smid + r;
          else if (s == SP_NSMID)
            v = 148;
          else if (s < SP_CNCTAID)
            v = in[s - SP_CCTAID];
          else if (s < SP_CRANK)
            v = cdim[s - SP_CNCTAID];
          else if (s == SP_CRANK)
            v = r;
          else if (s == SP_CNRANK)
            v = n;
          else if (s < SP_NCLID)
            v = k[s - SP_CLID];
          else if (s < SP_LM)
            v = grid[s - SP_NCLID] / cdim[s - SP_NCLID];
          else if (s < SP_CLOCK) {
            u32 lm[5] = {1u << l, (2u << l) - 1, (1u << l) - 1, ~((1u << l) - 1), ~((2u << l) - 1)};
            if (l == 31) {
              lm[1] = ~0u;
              lm[4] = 0;
            }
            v = lm[s - SP_LM];
          } else if (s == SP_EXPL)
            v = n > 1;
          else if (s == SP_DSMEM)
            v = launch.smem_size - p.static_smem;
          else if (s == SP_TSMEM)
            v = launch.smem_size;
          R[l] = v;
        }
      }
    }
    t->wake();
    m.queues.push_back(&t->tc);
    for (auto& w : t->warps) {
      m.queues.push_back(&w.wgmma);
      m.queues.push_back(&w.cpasync);
    }
    cl->ctas.push_back(std::move(t));
  }
  m.queues.push_back(&cl->tma);
  launch.clusters.push_back(std::move(cl));
}

// Run the groups of a warp that are not blocked.
static bool run_groups(Machine& m, Cta& cta, Warp& w, int slice) {
  const Program& program = *cta.launch->p;
  bool progress = false;
  while (slice > 0) {
    // drop empty groups, merge groups at the same instruction, then take the lowest runnable pc
    if (w.groups.size() > 1) {
      for (size_t i = 0; i < w.groups.size();) {
        if (!w.groups[i].mask) {
          w.groups[i] = w.groups.back();
          w.groups.pop_back();
        } else
          i++;
      }
      for (size_t i = 0; i < w.groups.size(); i++)
        for (size_t j = i + 1; j < w.groups.size();) {
          Group &a = w.groups[i], &b = w.groups[j];
          if (a.pc == b.pc && !a.arrived && !b.arrived) {
            a.mask |= b.mask;
            a.blocked = a.sleeps = false;
            w.groups[j] = w.groups.back();
            w.groups.pop_back();
          } else
            j++;
        }
    }
    if (!w.live) {
      w.groups.clear();
      return progress;
    }
    int gi = -1;
    for (size_t i = 0; i < w.groups.size(); i++)
      if (!w.groups[i].blocked && w.groups[i].mask && (gi < 0 || w.groups[i].pc < w.groups[gi].pc))
        gi = i;
    if (gi < 0) return progress;
    bool alone = w.groups.size() == 1;
    do {
      Group& g = w.groups[gi];
      const Instr& I = program.code[g.pc];
      u32 mask = g.mask;
      if (I.pred >= 0) {
        u64* p = w.R(I.pred);
        u32 pm = 0;
        for (u32 q = mask; q; q &= q - 1) {
          int l = __builtin_ctz(q);
          if ((p[l] & 1) != (u64)I.neg) pm |= 1u << l;
        }
        mask = pm;
      }
      slice--;
      if (!mask) {
        g.pc++;
        progress = true;
        w.executed++;
        continue;
      }
      m.tick++;
      Ctx c{m, cta, w, g, mask, &I};
      if (!I.tracked.empty() || !I.moved_to.empty())
        c.launch().sm90 ? touch_registers(c, I) : touch_tmem_loads(c, I);
      Status s = I.fn(c, I);
      if (s == NEXT) {
        g.pc++;
        progress = true;
        w.executed++;
      } else if (s == JUMPED) {
        progress = true;
        w.executed++;
        break;
      } else if (s == BLOCK) {
        g.blocked = true;
        break;
      } else {
        g.pc++;
        progress = true;
        w.executed++;
        return progress;
      }  // YIELD
    } while (alone && slice > 0);
  }
  return progress;
}

// Run one warp until every group is blocked, it yields, or the slice ends. Return true if any
// instruction completed.
static bool run_warp(Machine& m, Cta& cta, Warp& w, int slice) {
  cta.awake &= ~(1u << w.id);  // before it runs: it may be woken meanwhile
  auto& polls = cta.polls;
  polls.erase(std::remove_if(polls.begin(), polls.end(), [&](auto& p) { return p.first == w.id; }),
              polls.end());
  for (auto& g : w.groups) g.blocked = g.sleeps = false;
  u64 executed = w.executed;
  w.others_effects += m.effects - w.effects_at_end;
  bool progress = run_groups(m, cta, w, slice);
  w.effects_at_end = m.effects;
  m.executed += w.executed - executed;
  for (auto& g : w.groups)
    if (g.mask && !g.sleeps) wake(w);
  return progress;
}

static void finish_cta_checks(Machine& m, Cta& t) {
  Launch& l = *t.launch;
  Str cta = fmt("CTA (%u,%u,%u)", t.id[0], t.id[1], t.id[2]);
  for (size_t i = 0; i < t.mbars.size(); i++) {
    MBar& b = t.mbars[i];
    if (b.valid && b.tx)
      l.hazard("mbarrier-tx-at-exit", b.init_line,
               fmt("mbarrier at shared offset %zu of %s ends with tx-count %ld: expect_tx does not "
                   "match the bytes delivered",
                   i * 8, cta.c_str(), (long)b.tx));
  }
  for (size_t i = 0; i < t.tmem_owner.size(); i++)
    if (t.tmem_owner[i] >= 0) {
      l.hazard("tmem-not-deallocated", 0,
               fmt("TMEM column %zu is still allocated when %s exits", i, cta.c_str()));
      break;
    }
  for (auto& w : t.warps)
    for (int lane = 0; lane < 32; lane++) {
      auto& b = w.bulk[lane];
      if (!b.open.empty())
        l.hazard("bulk-not-committed", b.open[0].line, "a bulk store was never committed");
      if (!b.committed.empty()) {
        auto& first = b.committed[0].operations;
        l.hazard("exit-before-bulk-read", first.empty() ? 0 : first[0].line,
                 "the CTA exits without waiting for bulk stores to read shared memory "
                 "(cp.async.bulk.wait_group.read)");
      }
      drain_bulk(m, b, 0);
      for (auto& op : b.open) op.run();
    }
}
static Str describe_waits(Machine& m) {
  Str s;
  for (auto& launch : m.launches)
    for (auto& cl : launch->clusters)
      for (auto& t : cl->ctas)
        for (auto& w : t->warps)
          for (auto& g : w.groups)
            if (g.mask && w.live) {
              const Instr& I = launch->p->code[g.pc];
              if (m.launches.size() > 1) s += fmt("\n  launch %d", launch->index);
              s += fmt("\n  CTA (%u,%u,%u) warp %d lanes %08x at PTX line %d: %s\n      waits: %s",
                       t->id[0], t->id[1], t->id[2], w.id, g.mask, I.line,
                       I.text.substr(0, 140).c_str(), (g.why ? g.why() : "(spinning)").c_str());
              if (s.size() > 4000) return s + "\n  ...";
            }
  return s;
}
// Complete one pending asynchronous operation. Return false if there is none.
static bool complete_one(Machine& m) {
  bool any = m.opt.mode == 2;
  std::vector<Queue*> pending;
  for (auto* q : m.queues)
    if (!q->q.empty()) {
      pending.push_back(q);
      if (!any) break;
    }
  if (pending.empty()) return false;
  Queue* q = pending[any ? m.rng() % pending.size() : 0];
  if (q->loads && any) std::swap(q->q[0], q->q[m.rng() % q->q.size()]);
  run_front(m, *q);
  return true;
}
static void run_all(Machine& m, Queue& q) {
  while (!q.q.empty()) run_front(m, q);
}

// ---- launches

static void prepare(Machine& m, Launch& l) {
  if (l.smem_size > MAX_SMEM)
    throw EmuError{fmt("shared memory %u exceeds %u bytes", l.smem_size, MAX_SMEM)};
  u32 cluster = l.cdim[0] * l.cdim[1] * l.cdim[2];
  l.in_all = 1;
  for (int i = 0; i < 3; i++) {
    if (l.grid[i] % l.cdim[i]) throw EmuError{"grid is not a multiple of the cluster shape"};
    l.shape[i] = l.grid[i] / l.cdim[i];
    l.in_all *= l.shape[i];
  }
  l.ctas = (u64)l.grid[0] * l.grid[1] * l.grid[2];
  bool takes_over = false;
  for (auto& I : l.p->code) takes_over |= I.fn == h_clc_try;
  size_t resident = takes_over ? m.opt.clc_resident * cluster : m.opt.max_resident;
  l.room = std::max<size_t>(1, resident / cluster);
}
// Remove the clusters that have ended.
static void retire(Machine& m, Launch& l) {
  l.exits = false;
  for (size_t i = 0; i < l.clusters.size();) {
    Cluster& cl = *l.clusters[i];
    if (!cl.done()) {
      i++;
      continue;
    }
    // The cluster's operations must finish before its memory disappears.
    for (auto& t : cl.ctas) {
      if (tc_busy(*t))
        l.hazard("exit-with-tcgen05-in-flight", t->tc.q.front().line,
                 "a CTA exits while its tcgen05 operations are outstanding");
      run_all(m, t->tc);
      for (auto& w : t->warps) {
        run_all(m, w.wgmma);
        run_all(m, w.cpasync);
      }
    }
    run_all(m, cl.tma);
    std::set<Queue*> gone{&cl.tma};
    for (auto& t : cl.ctas) {
      finish_cta_checks(m, *t);
      gone.insert(&t->tc);
      u64 known = 0;
      for (auto& w : t->warps) {
        l.executed += w.executed;
        known |= w.knowledge.memory.launches;
        gone.insert(&w.wgmma);
        gone.insert(&w.cpasync);
      }
      l.known_at_end |= known;
      trigger(m, *t, known);
    }
    auto& q = m.queues;
    q.erase(std::remove_if(q.begin(), q.end(), [&](Queue* x) { return gone.count(x) > 0; }),
            q.end());
    l.clusters.erase(l.clusters.begin() + i);
  }
}
// A launch may start when every CTA of its predecessor has executed launch_dependents or exited.
static bool may_start(Machine& m, size_t i) {
  if (i == 0) return true;
  Launch& before = *m.launches[i - 1];
  if (!before.started || before.triggered < before.ctas) return false;
  return before.complete || m.opt.dependents == EARLY ||
         (m.opt.dependents == RANDOM && m.rng() % 8 == 0);
}
static void wake_all(Machine& m) {
  for (auto& l : m.launches)
    for (auto& cl : l->clusters)
      for (auto& t : cl->ctas) t->wake();
}
// Start and retire launches and clusters; return the launches with resident clusters, in order.
static std::vector<Launch*> launches_at_work(Machine& m) {
  std::vector<Launch*> working;
  for (size_t i = 0; i < m.launches.size(); i++) {
    Launch& l = *m.launches[i];
    m.current = &l;
    if (!l.started) {
      if (!may_start(m, i)) break;
      l.started = true;
      // The launches that the predecessor knew to be complete at its trigger are complete. Its own
      // writes, even before the trigger, become known only by griddepcontrol.wait.
      if (i) l.known = m.launches[i - 1]->known_at_trigger;
    }
    if (l.complete) continue;
    if (l.exits) retire(m, l);
    while (l.clusters.size() < l.room && l.waits()) start_cluster(m, l, l.take());
    l.complete = l.clusters.empty();
    if (l.complete)
      wake_all(m);
    else
      working.push_back(&l);
  }
  return working;
}
typedef std::vector<std::pair<Cta*, Warp*>> Warps;
static void add_warps(Launch& l, Warps& warps) {
  for (auto& cl : l.clusters)
    for (auto& t : cl->ctas) {
      for (auto& poll : t->polls)
        if (poll.second->changed()) wake(t->warps[poll.first]);
      for (u32 awake = t->awake; awake; awake &= awake - 1)
        warps.push_back({t.get(), &t->warps[__builtin_ctz(awake)]});
    }
}
static bool run_warps(Machine& m, const Warps& warps, bool in_turns) {
  bool progress = false;
  for (auto& o : warps) {
    if (m.new_turn) break;
    m.current = o.first->launch;
    progress |= run_warp(m, *o.first, *o.second, in_turns ? 1 + (int)(m.rng() % 400) : 20000);
    if (m.opt.mode == 2 && (m.rng() & 3) == 0) complete_one(m);
  }
  return progress;
}
// Give every warp a turn. Overlapping launches run in one random order; or the latest runs first,
// and an earlier one only if the later ones had no effect.
static bool turn(Machine& m, const std::vector<Launch*>& working) {
  bool progress = false, together = m.opt.dependents == RANDOM;
  Warps warps;
  m.new_turn = false;
  u64 effects = m.effects;
  for (size_t i = working.size(); i-- && m.effects == effects;) {
    add_warps(*working[i], warps);
    if (together && i) continue;
    if (m.opt.mode == 2 || (together && working.size() > 1))
      std::shuffle(warps.begin(), warps.end(), m.rng);
    progress |= run_warps(m, warps, m.opt.mode == 2 || (together && working.size() > 1));
    warps.clear();
  }
  return progress;
}
static void run_machine(Machine& m) {
  for (auto& l : m.launches) {
    m.current = l.get();
    prepare(m, *l);
  }
  const u64 MOST_TURNS = 2000;  // without an effect, though warps run
  u64 last_effects = 0, idle_spins = 0, asked = 0;
  int stuck = 0;
  for (;;) {
    std::vector<Launch*> working = launches_at_work(m);
    if (working.empty()) {
      if (m.launches.back()->complete) return;
      continue;
    }
    bool progress = turn(m, working);
    if (m.executed > m.opt.max_instr)
      throw EmuError{"instruction limit reached (livelock?)" + describe_waits(m)};
    bool asking = m.ask_again, timed_out = m.force_timeout;
    m.ask_again = m.force_timeout = false;
    bool effects = m.effects != last_effects;
    last_effects = m.effects;
    if (effects) {
      stuck = 0;
      idle_spins = asked = 0;
      continue;
    }
    if (progress && !asking && ++idle_spins < MOST_TURNS) {
      if (idle_spins % 8 == 0) complete_one(m);
      continue;
    }
    if (complete_one(m)) {
      stuck = 0;
      continue;
    }
    if (progress && !asking)
      throw EmuError{"no forward progress: warps spin without effect" + describe_waits(m)};
    // A warp that polls several words in turn may see a change, or give up after some time.
    m.ask_again = true;
    wake_all(m);
    if (!timed_out && (!asking || progress) && ++asked < MOST_TURNS) continue;
    if (++stuck > 40)
      throw EmuError{"DEADLOCK: every warp is blocked and nothing is in flight" +
                     describe_waits(m)};
    m.force_timeout = true;  // let try_wait time out, as the hardware may
  }
}
