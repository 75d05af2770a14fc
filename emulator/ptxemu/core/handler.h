// Registers and addresses of an instruction's operands, for all handlers.
#pragma once
#include "machine.h"

#define ARGS Ctx &c, const Instr &I
#define RS(i) c.w.R(I.o[i].slot)
static inline bool predval(Ctx& c, const Opnd& o, int l) {
  bool v = c.w.R(o.slot)[l] & 1;
  return o.kind == 'N' ? !v : v;
}

static inline u64 addr_of(const Ctx& c, const Opnd& o, int l) {
  return c.w.R(o.slot)[l] + (u64)o.off;
}
static inline u64 addr_of(const Ctx& c, const Opnd& o, int l, int space) {
  u64 a = c.w.R(o.slot)[l] + (u64)o.off;
  return space == 2 || space == 3 ? (u32)a : a;
}

static u32 to_shared(const Ctx& c, int space, u64 a) {
  if (space == 0 && a >> 56 != 0xF0)
    fail(c, fmt("generic address %#lx is not in shared memory", a));
  return (u32)a;
}
// True if the lanes of `want` are together. `orders`: order the lanes' earlier accesses before
// their later ones. PTX ISA: bar.warp.sync does; a vote or a shuffle only waits for the lanes.
static bool converged(Ctx& c, u32 want, const char* what, bool orders) {
  want &= c.w.live;
  if ((c.g.mask & want) == want) {
    if (orders) c.w.synchronise(want, c.m.tick - 1);  // its own accesses come later
    return true;
  }
  c.g.why = [what, want, mask = c.g.mask] {
    return fmt("%s needs lanes %08x together, but this group has only %08x", what, want, mask);
  };
  return false;
}
#define CONVERGED_ALL(what) \
  if (!converged(c, ~0u, what, false)) return BLOCK;
