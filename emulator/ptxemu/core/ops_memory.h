// Handlers: ld, st, atom, address spaces, fences.
#pragma once
#include "handler.h"
#include "memory.h"
#include "types.h"

// ---- polling
//
// A warp polls if it reads the same words again without an effect in between. It is blocked until
// one of the words changes: earlier reads are useless, and take time from the warps that it waits
// for.

static void remember(Polled& p, Ctx& c, int space, u64 address, u32 n) {
  space = space_at(address, space);
  if (space == 3 || (!p.words.empty() && p.words.back().address == address)) return;
  Polled::Word word{address, (const u8*)address, n, {}};
  if (space == 2)
    word.at = &shared_target(c.cta, (u32)address, n, &c).smem[(u32)address & OFF_MASK];
  memcpy(word.value, word.at, n);
  p.words.push_back(word);
}
// End an instruction that read these words and changed none; other warps run next.
static Status yield_to_others(Ctx& c, Polled& p) {
  if (!p.words.empty()) {
    p.pc = c.g.pc;
    p.own_effects = c.own_effects();
    c.g.polled = std::make_shared<const Polled>(std::move(p));
  }
  return YIELD;
}
static bool asks_in_vain(const Ctx& c, const Opnd& address, int space) {
  const Polled* last = c.g.polled.get();
  if (!last || last->pc != c.g.pc || last->own_effects != c.own_effects() || c.m.ask_again ||
      last->changed())
    return false;
  size_t i = 0;
  for (u32 m = c.mask; m; m &= m - 1) {  // in the order of `remember`
    u64 a = addr_of(c, address, __builtin_ctz(m), space);
    if (a == last->words[i].address) continue;
    if (++i == last->words.size() || a != last->words[i].address) return false;
  }
  return true;
}
static Status block_until_changed(Ctx& c) {
  auto last = c.g.polled;
  c.g.sleeps = true;
  c.cta.polls.push_back({c.w.id, last});
  c.g.why = [last] {
    auto& word = last->words[0];
    u64 value = 0;
    memcpy(&value, word.value, std::min<u32>(8, word.n));
    return fmt("a change of the %u bytes at %#lx, which hold %#lx", word.n, word.address, value);
  };
  return BLOCK;
}

// Return the first lane of `mask` and the lanes directly after it that read the same address and
// need no check of their own. A warp reads a value common to all lanes, or to a row, in this way.
static u32 same_read(Ctx& c, const Instr& I, u64 address, u32 mask) {
  u32 same = mask & -mask;
  int space = space_at(address, I.i1);
  if (I.sem != WEAK || space == 3 || (space == 2 && (u32)address >> RANK_SHIFT != (u32)c.cta.rank))
    return same;
  for (u32 m = mask & (mask - 1); m; m &= m - 1) {
    if (addr_of(c, I.o[1], __builtin_ctz(m), I.i1) != address) break;
    same |= m & -m;
  }
  return same;
}
// i0 type, i1 space, i2 vector width
static Status h_ld(ARGS) {
  int by = ty_bytes(I.i0), n = I.i2;
  bool sg = I.i0 == T_S8 || I.i0 == T_S16 || I.i0 == T_S32;
  const Opnd& d = I.o[0];
  Actor me = thread_actor(c, 0);
  me.strong = I.sem != WEAK;
  Polled polled;
  if (me.strong && asks_in_vain(c, I.o[1], I.i1)) return block_until_changed(c);
  for (u32 m = c.mask; m;) {
    u8 buf[64];
    u64 a = addr_of(c, I.o[1], __builtin_ctz(m), I.i1);
    u32 same = same_read(c, I, a, m);
    m &= ~same;
    me.lanes = same & -same;
    me.others = same & ~me.lanes;
    mem_read(c, me, I.i1, a, by * n, buf);
    if (me.strong) remember(polled, c, I.i1, a, by * n);
    for (int i = 0; i < n; i++) {
      if (I.sem != WEAK) flag_read(c, I.i1, a + i * by);
      int slot = n == 1 && d.kind != 'V' ? d.slot : d.v[i].slot;
      if (slot < 0) continue;
      u64 v = 0, high = 0;
      memcpy(&v, buf + i * by, std::min(by, 8));
      // Extend to 32 bits, or 32 bits to 64. A narrower register is read in its own width.
      if (sg)
        v = by == 1   ? (u64)(u32)(s32)(s8)v
            : by == 2 ? (u64)(u32)(s32)(s16)v
                      : (u64)(s64)(s32)v;
      lanes(same, [&](int l) { c.w.R(slot)[l] = v; });
      if (by < 16) continue;
      memcpy(&high, buf + i * 16 + 8, 8);
      lanes(same, [&](int l) { c.w.R(slot + 1)[l] = high; });
    }
  }
  return me.strong ? yield_to_others(c, polled) : NEXT;
}
static Status h_st(ARGS) {
  int by = ty_bytes(I.i0), n = I.i2;
  const Opnd& s = I.o[1];
  for (u32 m = c.mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    u8 buf[64];
    for (int i = 0; i < n; i++) {
      int slot = s.kind == 'V' ? s.v[i].slot : s.slot;
      u64 v = c.w.R(slot)[l];
      memcpy(buf + i * by, &v, std::min(by, 8));
      if (by == 16) {
        v = c.w.R(slot + 1)[l];
        memcpy(buf + i * 16 + 8, &v, 8);
      }
    }
    u64 a = addr_of(c, I.o[0], l, I.i1);
    mem_write(c, I.i1, a, by * n, buf, l, I.sem != WEAK);
    if (I.i1 != 3)
      for (int i = 0; i < n; i++) flag_write(c, I.i1, a + i * by, l, false);
  }
  return NEXT;
}
// Return an atomic's result for element `e` of a lane's vector; `ai`: index of the address operand.
static u64 atom_result(const Ctx& c, const Instr& I, int ai, int l, int e, u64 old) {
  const Opnd& s = I.o[ai + 1];
  u64 b = c.w.R(s.kind == 'V' ? s.v[e].slot : s.slot)[l],
      x = I.i2 == 7 ? c.w.R(I.o[ai + 2].slot)[l] : 0;
  u64 keep = ty_bytes(I.i0) < 8 ? (1ull << 8 * ty_bytes(I.i0)) - 1 : ~0ull;
  return atom_apply(I.i2, I.i0, old, b & keep, x & keep);
}
// True if an atomic would again change nothing, like a cas on a taken lock or an add of 0.
static bool atom_in_vain(const Ctx& c, const Instr& I, int ai) {
  if (!asks_in_vain(c, I.o[ai], I.i1)) return false;
  int by = ty_bytes(I.i0);
  auto word = c.g.polled->words.begin();
  for (u32 m = c.mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    if (addr_of(c, I.o[ai], l, I.i1) != word->address) ++word;
    for (int e = 0; e < I.i3; e++) {
      u64 old = 0;
      memcpy(&old, word->value + e * by, by);
      if (atom_result(c, I, ai, l, e, old) != old) return false;
    }
  }
  return true;
}
// atom: i0 type, i1 space, i2 op, i3 vector width; red when i4
static Status h_atom(ARGS) {
  int by = ty_bytes(I.i0), ai = I.i4 ? 0 : 1, n = I.i3;
  if (atom_in_vain(c, I, ai)) return block_until_changed(c);
  Polled polled;
  u64 effects = c.m.effects;
  bool changed = false;
  for (u32 m = c.mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    u64 first = addr_of(c, I.o[ai], l, I.i1);
    for (int e = 0; e < n; e++) {
      u64 a = first + e * by, old = 0;
      mem_read(c, I.i1, a, by, (u8*)&old, l, true);
      flag_read(c, I.i1, a);
      u64 r = atom_result(c, I, ai, l, e, old);
      changed |= r != old;
      mem_write(c, I.i1, a, by, (u8*)&r, l, true);
      flag_write(c, I.i1, a, l, true);
      if (!I.i4) {
        const Opnd& d = I.o[0];
        int ds = d.kind == 'V' ? d.v[e].slot : d.slot;
        if (ds >= 0) c.w.R(ds)[l] = old;
      }
    }
    remember(polled, c, I.i1, first, by * n);
  }
  if (changed) return NEXT;
  c.m.effects = effects;  // a poll in vain has no effect
  return yield_to_others(c, polled);
}
// cvta: i0 window (0 none, 2 shared, 3 local), i1 1 = to the space
static Status h_cvta(ARGS) {
  u64 *d = RS(0), *a = RS(1);
  u64 win = I.i0 == 2 ? SHARED_WINDOW : I.i0 == 3 ? LOCAL_WINDOW : 0;
  lanes(c.mask, [&](int l) { d[l] = win == 0 ? a[l] : I.i1 ? (u32)a[l] : win | (u32)a[l]; });
  return NEXT;
}
static Status h_isspacep(ARGS) {
  u64 *d = RS(0), *a = RS(1);
  lanes(c.mask, [&](int l) {
    u8 top = a[l] >> 56;
    int s = top == 0xF0 ? 2 : top == 0xE0 ? 3 : 1;
    d[l] = s == I.i0;
  });
  return NEXT;
}
static Status h_mapa(ARGS) {  // i0: 1 when shared::cluster (32-bit), 0 generic
  u64 *d = RS(0), *a = RS(1), *r = RS(2);
  u64 off = I.o[1].kind == 'A' ? I.o[1].off : 0;
  lanes(c.mask, [&](int l) {
    u64 x = a[l] + off;
    u32 rank = (u32)r[l];
    // A rank outside the cluster is an error only at an access: kernels compute such addresses in
    // lanes that never use them.
    u64 s = ((u32)x & OFF_MASK) | rank << RANK_SHIFT;
    d[l] = I.i0 ? s : SHARED_WINDOW | s;
  });
  return NEXT;
}
static Status h_getctarank(ARGS) {
  u64 *d = RS(0), *a = RS(1);
  lanes(c.mask, [&](int l) { d[l] = (u32)a[l] >> RANK_SHIFT; });
  return NEXT;
}
static Status h_nop(ARGS) { return NEXT; }
static Status h_zero(ARGS) {
  u64* d = RS(0);
  lanes(c.mask, [&](int l) { d[l] = 0; });
  return NEXT;
}
// fence.proxy.async: accesses ordered before it are visible to the asynchronous proxy after it. i0:
// in shared memory, i1: in global memory
static Status h_proxy_fence(ARGS) {
  const Knowledge k = release(c, c.mask);
  if (I.i0) c.w.knowledge.shared_proxy.join(k.memory);
  if (I.i1) c.w.knowledge.global_proxy.join(k.memory);
  return NEXT;
}
static Status h_fence(ARGS) {  // fence.acq_rel, fence.sc, membar
  Warp& w = c.w;
  Publications seen;
  seen.swap(w.observed);
  observe(c, seen, true);
  for (auto& f : w.fences) f.lanes &= ~c.mask;
  w.fences.erase(
      std::remove_if(w.fences.begin(), w.fences.end(), [](const Fence& f) { return !f.lanes; }),
      w.fences.end());
  auto add = [&](u32 lanes) {
    if (!lanes) return;
    w.fences.push_back({lanes, I.scope, w.knowledge, w.released, c.m.tick});
    w.learn_copies(w.fences.back().knowledge, lanes);
  };
  u32 with_copies = c.mask & w.lanes_of_copies;  // each passes on its own
  lanes(with_copies, [&](int l) { add(1u << l); });
  add(c.mask & ~with_copies);
  return NEXT;
}
