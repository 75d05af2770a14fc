// mbarrier objects: arrivals, transaction bytes, phases.
#pragma once
#include "memory.h"

static MBar& mbar_at(Cta& self, u32 addr, const Ctx* c, int line, Cta** owner = nullptr) {
  Cta& t = shared_target(self, addr, 8, c);
  if (addr & 7) throw EmuError{fmt("misaligned mbarrier %#x, PTX line %d", addr, line)};
  if (owner) *owner = &t;
  return t.mbars[(addr & OFF_MASK) >> 3];
}
static MBar& mbar_in_use(Cta& self, u32 addr, const Ctx* c, int line) {
  MBar& b = mbar_at(self, addr, c, line);
  if (!b.valid)
    throw EmuError{
        fmt("mbarrier at shared offset %u (CTA rank %u) used before mbarrier.init, PTX line %d",
            addr & OFF_MASK, addr >> RANK_SHIFT, line)};
  return b;
}
// Check that mbarrier.init is ordered before this use; then its CTA's start is, too.
static void mbar_order(Machine& m, Launch& l, const Actor& me, Cta& self, u32 addr, int line) {
  Cta* owner;
  const MBar& b = mbar_at(self, addr, nullptr, line, &owner);
  if (!m.opt.check_races || !b.valid) return;
  if (ordered(m, me, b.initialised)) return visit(m, l, me, *owner, line);
  const Agent &mine = m.agents[me.agent], &theirs = m.agents[b.initialised.agent];
  l.hazard("mbarrier-init-race", line,
           fmt("%s uses the mbarrier at shared offset %u of CTA rank %d, which CTA (%u,%u,%u) warp "
               "%d initialised at PTX line %d, and nothing orders the one after the other%s",
               describe(m, mine).c_str(), addr & OFF_MASK, owner->rank, theirs.id[0], theirs.id[1],
               theirs.id[2], theirs.warp, b.init_line,
               owner == &self ? "" : " (fence.mbarrier_init and a barrier of the cluster?)"));
}
static void wake_sleepers(MBar& b) {
  for (Warp* w : b.sleepers) wake(*w);
  b.sleepers.clear();
}
static void mbar_settle(Machine& m, MBar& b) {
  m.effects++;
  if (b.pending == 0 && b.tx == 0) {
    b.phase++;
    wake_sleepers(b);
    b.pending = b.count;
    b.arrived.join(b.arriving);
    b.arriving = Knowledge();
  }
}
// `known`: the knowledge that the arrival passes on to waiters.
static u32 mbar_arrive(Machine& m, const Actor& me, Cta& self, u32 addr, s32 n, s64 expect,
                       int line, const Ctx* c, const Knowledge& known) {
  MBar& b = mbar_in_use(self, addr, c, line);
  mbar_order(m, *self.launch, me, self, addr, line);
  u32 phase = b.phase;
  b.tx += expect;
  b.pending -= n;
  if (b.pending < 0)
    throw EmuError{
        fmt("mbarrier at shared offset %u (CTA rank %u, count %d) received more arrivals than its "
            "phase expects, PTX line %d",
            addr & OFF_MASK, addr >> RANK_SHIFT, b.count, line)};
  b.arriving.join(known);
  mbar_settle(m, b);
  return phase;
}
static void mbar_tx(Machine& m, Cta& self, u32 addr, s64 delta, int line) {
  MBar& b = mbar_in_use(self, addr, nullptr, line);
  b.tx += delta;
  if (b.tx < -(1 << 20) || b.tx > (1 << 20) - 1)
    throw EmuError{fmt("mbarrier at shared offset %u: tx-count %ld out of range, PTX line %d",
                       addr & OFF_MASK, (long)b.tx, line)};
  mbar_settle(m, b);
}
// Return the actor of an asynchronous copy that completes on an mbarrier, for accesses made now.
static Actor copy_actor(const Async& op, Cta& self, u32 bar) {
  Actor me = op.actor(mbar_in_use(self, bar, nullptr, op.ins->line).agent, ++op.m->tick);
  mbar_order(*op.m, *op.launch, me, self, bar, op.ins->line);
  return me;
}
static void mbar_complete(const Async& op, const Actor& me, Cta& self, u32 bar, u32 bytes) {
  mbar_in_use(self, bar, nullptr, op.ins->line).arriving.learn({me.agent, ~0u, me.tick, me.tick});
  mbar_tx(*op.m, self, bar, -(s64)bytes, op.ins->line);
}
