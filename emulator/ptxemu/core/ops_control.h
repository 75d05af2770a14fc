// Handlers: branches, exit, programmatic dependent launch.
#pragma once
#include "handler.h"
#include "memory.h"
#include "ops_barrier.h"

static Status h_trap(ARGS) { fail(c, "trap executed"); }

static Status h_bra(ARGS) {
  u32 target = (u32)I.o[0].off;
  if (c.mask == c.g.mask) {
    c.g.pc = target;
    return JUMPED;
  }
  if (!c.mask) return NEXT;
  Group taken = c.g;
  taken.mask = c.mask;
  taken.pc = target;
  taken.arrived = false;
  c.g.mask &= ~c.mask;
  c.g.pc++;
  c.w.groups.push_back(taken);  // invalidates c.g: caller must not use it after JUMPED
  return JUMPED;
}
static Status h_brx(ARGS) {
  u64* idx = RS(0);
  auto& tab = I.o[1].v;
  std::map<u32, u32> dest;
  for (u32 m = c.mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    u32 i = (u32)idx[l];
    if (i >= tab.size()) fail(c, "brx.idx out of range");
    dest[(u32)tab[i].off] |= 1u << l;
  }
  if (c.mask != c.g.mask) fail(c, "predicated brx.idx is not modelled");
  Group base = c.g;
  bool first = true;
  std::vector<Group> extra;
  for (auto& kv : dest) {
    Group g = base;
    g.pc = kv.first;
    g.mask = kv.second;
    if (first) {
      c.g = g;
      first = false;
    } else
      extra.push_back(g);
  }
  for (auto& g : extra) c.w.groups.push_back(g);
  return JUMPED;
}
static Status h_exit(ARGS) {
  c.w.live &= ~c.mask;
  c.g.mask &= ~c.mask;
  c.m.effects++;
  if (!c.w.live) cta_bar_check(c.m, c.cta);
  if (c.cta.done()) {
    check_visits(c);
    c.launch().exits = true;
  }
  if (!c.g.mask) return JUMPED;
  c.g.pc++;
  return JUMPED;
}

// ---- programmatic dependent launch

// PTX ISA, griddepcontrol.launch_dependents: a CTA's first one counts, or its exit.
static void trigger(Machine& m, Cta& t, u64 known) {
  if (t.triggered) return;
  Launch& l = *t.launch;
  t.triggered = true;
  l.known_at_trigger |= known;
  l.triggered++;
  m.effects++;
  m.new_turn = l.triggered == l.ctas;
}
static Status h_trigger(ARGS) {
  trigger(c.m, c.cta, c.w.knowledge.memory.launches);
  // Other warps trigger first, so that the next launch starts as early as allowed.
  bool last = c.launch().index + 1 == (int)c.m.launches.size();
  return last ? NEXT : YIELD;
}
// griddepcontrol.wait: wait until the preceding launch has completed; its writes are then visible.
// The launches that it waited for are complete, too. If none of its threads waited, earlier
// launches may still run.
static Status h_wait_for_launch(ARGS) {
  int i = c.launch().index;
  if (!i) return NEXT;
  const Launch& before = *c.m.launches[i - 1];
  if (!before.complete) {
    c.g.sleeps = true;
    c.g.why = [i] { return fmt("griddepcontrol.wait: launch %d has not completed", i - 1); };
    return BLOCK;
  }
  c.w.knowledge.know_launches(before.known_at_end | 1ull << before.index);
  return NEXT;
}
