// Asynchronous operations in flight, and their completion in each scheduling mode.
#pragma once
#include "machine.h"

// Mode 0, eager: run at issue. 1, lazy: run as late as possible. 2, random: toss a coin at issue
// and at each step. 3, early_loads: run loads at issue, all other operations as late as possible
// (the worst case for the reuse of a buffer).
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
