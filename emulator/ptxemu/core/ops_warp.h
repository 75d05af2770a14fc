// Handlers: instructions of several lanes together (shfl, vote, elect, ...).
#pragma once
#include "handler.h"
#include "numerics.h"
#include "types.h"

static u32 member(Ctx& c, const Opnd& o) { return (u32)c.w.R(o.slot)[__builtin_ctz(c.mask)]; }

static Status h_elect(ARGS) {
  u32 mm = member(c, I.o[2]);
  if (!converged(c, mm, "elect.sync", false)) return BLOCK;
  u32 part = c.g.mask & mm;
  int leader = __builtin_ctz(part);
  for (u32 m = c.mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    if (I.o[0].slot >= 0) RS(0)[l] = leader;
    RS(1)[l] = l == leader;
  }
  return NEXT;
}
static Status h_shfl(ARGS) {  // i0: 0 idx 1 up 2 down 3 bfly; i1 number of destinations
  int nd = I.i1;
  u32 mm = member(c, I.o[nd + 3]);
  if (!converged(c, mm, "shfl.sync", false)) return BLOCK;
  u64 src[32];
  memcpy(src, RS(nd), sizeof src);
  u64 *b = RS(nd + 1), *cc = RS(nd + 2);
  lanes(c.mask, [&](int l) {
    u32 cl = cc[l] & 31, seg = cc[l] >> 8 & 31, bv = b[l] & 31;
    int maxl = (l & seg) | (cl & ~seg), minl = l & seg, j;
    bool p;
    switch (I.i0) {
      case 1:
        j = l - bv;
        p = j >= maxl;
        break;
      case 2:
        j = l + bv;
        p = j <= maxl;
        break;
      case 3:
        j = l ^ bv;
        p = j <= maxl;
        break;
      default: j = minl | (bv & ~seg); p = j <= maxl;
    }
    if (!p) j = l;
    if (!(c.mask >> j & 1))
      c.hazard("shfl-inactive-lane", fmt("shfl.sync reads lane %d, which does not take part", j));
    RS(0)[l] = (u32)src[j];
    if (nd == 2 && I.o[1].slot >= 0) RS(1)[l] = p;
  });
  return NEXT;
}
static Status h_vote(ARGS) {  // i0: 0 all 1 any 2 uni 3 ballot
  u32 mm = member(c, I.o[2]);
  if (!converged(c, mm, "vote.sync", false)) return BLOCK;
  u32 ball = 0, part = c.mask & mm;
  for (u32 m = part; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    if (predval(c, I.o[1], l)) ball |= 1u << l;
  }
  u64 r = I.i0 == 0   ? ball == part
          : I.i0 == 1 ? ball != 0
          : I.i0 == 2 ? ball == 0 || ball == part
                      : ball;
  u64* d = RS(0);
  lanes(c.mask, [&](int l) { d[l] = r; });
  return NEXT;
}
static Status h_match(ARGS) {
  u32 mm = member(c, I.o[2]);
  if (!converged(c, mm, "match.sync", false)) return BLOCK;
  u64 v[32];
  memcpy(v, RS(1), sizeof v);
  lanes(c.mask, [&](int l) {
    u32 r = 0;
    for (u32 m = c.mask & mm; m; m &= m - 1) {
      int q = __builtin_ctz(m);
      if (v[q] == v[l]) r |= 1u << q;
    }
    RS(0)[l] = r;
  });
  return NEXT;
}
static Status h_redux(ARGS) {  // i0 type, i2 op as atom
  u32 mm = member(c, I.o[2]);
  if (!converged(c, mm, "redux.sync", false)) return BLOCK;
  u64 *a = RS(1), r = 0;
  bool first = true;
  for (u32 m = c.mask & mm; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    u64 v = I.i1 ? bits<u32>(std::fabs(bits<float>((u32)a[l]))) : a[l];
    r = first ? (u32)v : atom_apply(I.i2, I.i0, r, v, 0);
    first = false;
  }
  u64* d = RS(0);
  lanes(c.mask, [&](int l) { d[l] = (u32)r; });
  return NEXT;
}
static Status h_activemask(ARGS) {
  u64* d = RS(0);
  lanes(c.mask, [&](int l) { d[l] = c.g.mask; });
  return NEXT;
}
static Status h_warpsync(ARGS) {
  u32 mm = member(c, I.o[0]);
  return converged(c, mm, "bar.warp.sync", true) ? NEXT : BLOCK;
}
static Status h_setmaxnreg(ARGS) {  // PTX ISA, setmaxnreg: 24 to 256, a multiple of 8
  CONVERGED_ALL("setmaxnreg")
  u64 n = RS(0)[__builtin_ctz(c.mask)];
  if (n < 24 || n > 256 || n % 8) fail(c, fmt("setmaxnreg of %lu registers", n));
  return NEXT;
}
