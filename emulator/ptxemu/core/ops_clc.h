// Handlers: cluster launch control. A cluster takes over the work of one that has not started.
#pragma once
#include "handler.h"
#include "mbarrier.h"
#include "memory.h"
#include "queues.h"

static Status h_clc_try(ARGS) {  // i0 multicast
  lanes(c.mask, [&](int l) {
    u32 dst = (u32)addr_of(c, I.o[0], l), bar = (u32)addr_of(c, I.o[1], l);
    std::array<u32, 4> resp = {0, 0, 0, 0};
    Launch& launch = c.launch();
    if (launch.waits()) {
      auto k = launch.take();
      resp = {k[0] * launch.cdim[0], k[1] * launch.cdim[1], k[2] * launch.cdim[2], 1};
    }
    bool mc = I.i0;
    Cta* self = &c.cta;
    Async op = async_operation(c, 1u << l, "clusterlaunchcontrol.try_cancel");
    enqueue(c.m, self->cluster->tma,
            [=] {
               for (auto& t : self->cluster->ctas) {
                 if (!mc && t.get() != self) continue;
                 u32 target = mc ? (bar & OFF_MASK) | (u32)t->rank << RANK_SHIFT : bar;
                 Actor me = copy_actor(op, *self, target);
                 async_write(op, me, *t, dst & OFF_MASK, (u8*)resp.data(), 16);
                 mbar_complete(op, me, *self, target, 16);
               }
             },
             I.line, "clusterlaunchcontrol.try_cancel");
  });
  return NEXT;
}
static Status h_clc_query(ARGS) {  // i0: 0 is_canceled, 1..3 ctaid x y z, 4 v4
  int s = I.o[1].slot;
  u64 *lo = c.w.R(s), *hi = c.w.R(s + 1);
  lanes(c.mask, [&](int l) {
    u32 x[4] = {(u32)lo[l], (u32)(lo[l] >> 32), (u32)hi[l], (u32)(hi[l] >> 32)};
    if (I.i0 == 4) {
      for (int i = 0; i < 3; i++)
        if (I.o[0].v[i].slot >= 0) c.w.R(I.o[0].v[i].slot)[l] = x[i];
    } else
      RS(0)[l] = I.i0 == 0 ? x[3] : x[I.i0 - 1];
  });
  return NEXT;
}
