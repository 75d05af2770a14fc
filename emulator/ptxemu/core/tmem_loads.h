// Registers that tcgen05.ld fills.
//
// PTX ISA, tcgen05.ld: it is asynchronous, its registers must not be accessed before a
// tcgen05.wait::ld of the warp. Compilers put moves that pair these registers between the two, which
// are no access in ptxas's eyes: what they fill is waited for as well.
#pragma once
#include "ops_wgmma.h"

static void track_tmem_loads(Program& p) {
  auto loads = [](const Instr& I) { return I.fn == h_tc_ldst && !I.i1; };
  bool more = false;
  for (auto& I : p.code)
    if (loads(I)) track(p, I.o[0], more);
  if (!more) return;  // so far only those of WGMMA, which no kernel has beside tcgen05
  while (more) {
    more = false;
    for (auto& I : p.code) {
      std::vector<u32> sources;
      if (I.fn == h_mov) touched_by(p, I.o[1], sources);
      if (!sources.empty()) track(p, I.o[0], more);
    }
  }
  for (auto& I : p.code) {
    bool moves = loads(I) || I.fn == h_mov;
    I.tracked.clear();
    for (size_t i = 0; i < I.o.size(); i++)
      if (!loads(I)) touched_by(p, I.o[i], moves && !i ? I.moved_to : I.tracked);
    if (loads(I)) touched_by(p, I.o[0], I.moved_to);
  }
}
// Of every instruction that names a tracked register, but for the loads.
static void touch_tmem_loads(const Ctx& c, const Instr& I) {
  Warp& w = c.w;
  Tick latest = 0;
  for (u32 i : I.tracked) latest = std::max(latest, w.loaded_from_tmem[i]);
  if (I.fn == h_mov) {
    for (u32 i : I.moved_to) w.loaded_from_tmem[i] = latest;
  } else if (latest > w.tmem_loads_done) {
    c.hazard("tmem-load-not-waited",
             "a register that tcgen05.ld fills is accessed before tcgen05.wait::ld (" + where(c) +
                 ")");
  }
}
