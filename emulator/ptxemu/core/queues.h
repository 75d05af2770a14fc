// Asynchronous operations in flight, and when each scheduling mode completes them.
#pragma once
#include "machine.h"

// mode 0 eager: run at issue; 1 lazy: run as late as possible; 2 random: coin toss at issue and at
// each step; mode 3 early_loads: loads complete at issue, everything else as late as possible
// (worst case for reusing a buffer)
template <class Run>
static void enqueue(Machine& m, Queue& q, Run run, int line, const char* what) {
  m.effects++;
  if (m.opt.mode == 0 || (m.opt.mode == 3 && q.loads) ||
      (m.opt.mode == 2 && q.q.empty() && (m.rng() & 1)))
    return run();
  q.q.push_back({std::move(run), line, what});
}
static void run_front(Machine& m, Queue& q) {
  AsyncOp op = std::move(q.q.front());
  q.q.pop_front();
  op.run();
  m.effects++;
}
