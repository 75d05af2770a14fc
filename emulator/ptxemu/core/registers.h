// Registers in flight: used by WGMMA, or filled by tcgen05.ld. The program numbers ("tracks") them.
#pragma once
#include "ops_arithmetic.h"
#include "ops_tcgen05.h"
#include "ops_wgmma.h"

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

// ---- registers that WGMMA uses
//
// PTX ISA, wgmma.fence: it must stand before the first WGMMA, and between an access to a register
// and a WGMMA that uses the register as accumulator or fragment of A, except between WGMMAs of one
// shape on one accumulator. The register must not be accessed before a wgmma.wait_group for the
// WGMMA.
//
// Between the fence and the WGMMA, compilers move accumulators to other virtual registers, and
// constants into unused registers. ptxas does not count these moves as accesses: a move between
// registers passes on the state of its source, a move of a constant changes nothing.

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
// Check every other instruction that names a tracked register.
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

// ---- registers that tcgen05.ld fills
//
// PTX ISA, tcgen05.ld: it is asynchronous, its registers must not be accessed before a
// tcgen05.wait::ld of the warp. Between the two, compilers put moves that pair these registers.
// ptxas does not count the moves as accesses: their destinations must wait, too.

static void track_tmem_loads(Program& p) {
  auto loads = [](const Instr& I) { return I.fn == h_tc_ldst && !I.i1; };
  bool more = false;
  for (auto& I : p.code)
    if (loads(I)) track(p, I.o[0], more);
  if (!more) return;  // no tcgen05.ld: keep the tracked registers of WGMMA
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
// Check every instruction that names a tracked register, except the loads.
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
