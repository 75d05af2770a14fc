// Accesses to memory: bounds, contents and order.
#pragma once
#include "machine.h"

static Cta& shared_target(Cta& self, u32 addr, u32 size, const Ctx* c) {
  u32 rank = addr >> RANK_SHIFT, off = addr & OFF_MASK;
  Str problem;
  if (rank >= self.cluster->ctas.size())
    problem = fmt("shared address %#x names CTA rank %u, but the cluster has %zu CTAs", addr, rank,
                  self.cluster->ctas.size());
  else if (off + size > self.cluster->ctas[rank]->smem.size())
    problem = fmt("shared memory access out of bounds: offset %u + %u bytes, the CTA has %zu", off,
                  size, self.cluster->ctas[rank]->smem.size());
  if (problem.empty()) {
    Cta& t = *self.cluster->ctas[rank];
    if (&t != &self && t.done())
      self.launch->hazard("exited-cta", c ? c->ins->line : 0,
                          fmt("CTA rank %d reaches shared memory of CTA rank %u, which has exited",
                              self.rank, rank));
    return t;
  }
  if (c) fail(*c, problem);
  throw EmuError{problem};
}
static const Range* range_of(Machine& m, u64 a, u32 n) {
  auto inside = [&](const Range& r) { return a >= r.lo && a + n <= r.hi; };
  if (m.last_range < m.ranges.size() && inside(m.ranges[m.last_range]))
    return &m.ranges[m.last_range];
  for (size_t i = 0; i < m.ranges.size(); i++)
    if (inside(m.ranges[i])) {
      m.last_range = i;
      return &m.ranges[i];
    }
  return nullptr;
}
static void check_global(const Ctx& c, u64 a, u32 n, bool write) {
  Machine& m = c.m;
  if (range_of(m, a, n)) return;
  Str near;
  for (auto& r : m.ranges)
    if (a + n > r.lo - 65536 && a < r.hi + 65536)
      near += fmt(" [%s %#lx..%#lx: offset %ld of %ld]", r.label.c_str(), r.lo, r.hi,
                  (long)(a - r.lo), (long)(r.hi - r.lo));
  bool mapped = false;
  for (auto& r : m.maps) mapped |= a >= r.lo && a + n <= r.hi;
  Str msg = fmt("global %s of %u bytes at %#lx is outside every registered tensor%s",
                write ? "write" : "read", n, a, near.c_str());
  if (!mapped || m.opt.strict) fail(c, msg);
  c.hazard(write ? "global-write-outside-tensors" : "global-read-outside-tensors",
           msg + " (" + where(c) + ")");
}

static inline int space_at(u64 addr, int space) {
  if (space) return space;
  u8 top = addr >> 56;
  return top == 0xF0 ? 2 : top == 0xE0 ? 3 : 1;
}

// ---- order

static Known start_of(const Cta& t) { return {t.agent, ~0u, t.started, t.started}; }
// The warp's accesses: up to `tick` for `lanes`, up to `together` for its other lanes.
static Known own_accesses(const Warp& w, u32 lanes, Tick together, Tick tick) {
  lanes |= ~w.live;
  return {w.agent, lanes, lanes == ~0u ? tick : together, tick};
}
// Return the knowledge that a release by `lanes` passes on: their own accesses so far, the other
// lanes' accesses up to the warp's last synchronisation, and the warp's knowledge. The warp's own
// knowledge does not grow: one lane's later release does not stand for the other lanes.
static Knowledge release(const Ctx& c, u32 lanes) {
  Knowledge k = c.w.knowledge;
  k.learn(own_accesses(c.w, lanes, c.w.released, c.m.tick));
  c.w.learn_copies(k, lanes);
  return k;
}
static const Fence* fence_of(const Ctx& c, int lane) {
  for (auto& f : c.w.fences)
    if (f.lanes >> lane & 1) return &f;
  return nullptr;
}
// Return the knowledge that a lane's relaxed access after the fence passes on.
static Knowledge released_by(const Ctx& c, const Fence& f, int lane) {
  Knowledge k = f.knowledge;
  k.learn(own_accesses(c.w, 1u << lane, f.together, f.tick));
  return k;
}
// One lane's new knowledge counts for its whole warp.
static void acquire(const Ctx& c, const Knowledge& k) { c.w.knowledge.join(k); }

static bool in_scope(Scope scope, const Cta* a, const Cluster* of_a, const Cta& b) {
  return scope == SCOPE_GPU || (scope == SCOPE_CLUSTER ? of_a == b.cluster : a == &b);
}
static void publish(Publications& at, const Published& p) {
  for (auto& old : at)
    if (old.cta == p.cta && old.scope == p.scope) {
      old.knowledge.join(p.knowledge);
      return;
    }
  at.push_back(p);
}
// A load reads a word with publications.
static void observe(const Ctx& c, const Publications& at, bool acquires) {
  for (auto& p : at) {
    if (!in_scope(p.scope, p.cta, p.cluster, c.cta)) continue;
    if (!acquires)
      publish(c.w.observed, p);
    else if (in_scope(c.ins->scope, p.cta, p.cluster, c.cta))
      acquire(c, p.knowledge);
  }
}
static Flags& flags_of(const Ctx& c, int space, u64 address, u64* key) {
  bool shared = space_at(address, space) == 2;
  *key = shared ? address & OFF_MASK : address;
  return shared ? shared_target(c.cta, (u32)address, 1, &c).flags : c.m.flags;
}
static void flag_read(const Ctx& c, int space, u64 address) {
  Sem sem = c.ins->sem;
  if (sem == WEAK) return;
  u64 key;
  Flags& flags = flags_of(c, space, address, &key);
  auto i = flags.find(key);
  if (i != flags.end()) observe(c, i->second, sem == ACQUIRE || sem == ACQ_REL);
}
// `modifies`: an atomic operation adds to the publications at a word; a store replaces them.
static void flag_write(const Ctx& c, int space, u64 address, int lane, bool modifies) {
  Sem sem = c.ins->sem;
  u64 key;
  Flags& flags = flags_of(c, space, address, &key);
  bool releases = sem == RELEASE || sem == ACQ_REL;
  const Fence* fence = releases || sem == WEAK ? nullptr : fence_of(c, lane);
  if (!modifies && (releases || fence || !flags.empty())) flags.erase(key);
  auto add = [&](Scope scope, const Knowledge& k) {
    publish(flags[key], {scope, &c.cta, c.cta.cluster, k});
  };
  if (releases) add(c.ins->scope, release(c, 1u << lane));
  if (fence) add(fence->scope, released_by(c, *fence, lane));
}

static Actor thread_actor(const Ctx& c, int lane) {
  Actor a;
  a.agent = c.w.agent;
  a.lanes = 1u << lane;
  a.tick = c.m.tick;
  a.together = c.w.together;
  a.pc = (u16)std::min<size_t>(c.ins - c.launch().p->code.data(), 65535);
  a.knowledge = &c.w.knowledge;
  a.copies_agent = c.w.cpasync_agent;
  a.copies = &c.w.copies;
  return a;
}
// An asynchronous operation, with the knowledge at its start.
struct Async {
  Machine* m;
  Launch* launch;
  const Instr* ins;
  u32 lanes;
  Tick issued;
  Knowledge knowledge;  // the warp's, without its own accesses
  Known own;
  const char* what;
  Actor actor(u32 agent, Tick tick) const {
    Actor a;
    a.agent = agent;
    a.lanes = lanes;
    a.tick = tick;
    a.async = true;
    a.pc = (u16)std::min<size_t>(ins - launch->p->code.data(), 65535);
    a.knowledge = &knowledge;
    a.own = &own;
    return a;
  }
};
static Async async_operation(const Ctx& c, u32 lanes, const char* what) {
  Known own = own_accesses(c.w, lanes, c.w.together, c.m.tick);
  Async op{&c.m, &c.launch(), c.ins, lanes, c.m.tick, c.w.knowledge, own, what};
  c.w.learn_copies(op.knowledge, lanes);
  return op;
}

static Str describe(const Machine& m, const Agent& a) {
  Str s = m.launches.size() > 1 ? fmt("launch %d, ", a.launch->index) : Str();
  s += fmt("CTA (%u,%u,%u)", a.id[0], a.id[1], a.id[2]);
  if (a.warp >= 0) s += fmt(" warp %d", a.warp);
  return *a.what ? s + ", " + a.what : s;
}
// Report two unordered accesses to the same bytes, one of them a write.
template <class Place>
static void report_race(Machine& m, Launch& l, const Actor& me, const Access& other, bool write,
                        Place place_of, int line, const char* kind) {
  bool in_warp = me.agent == other.agent && !me.async;
  if (in_warp) kind = "missing-warp-sync";
  if (l.again(kind, line)) return;
  const Agent &mine = m.agents[me.agent], &theirs = m.agents[other.agent];
  Str place = place_of();
  auto& code = theirs.launch->p->code;
  Str at = other.pc < code.size() && other.pc < 65535 ? fmt("PTX line %d", code[other.pc].line)
                                                      : Str("an unknown line");
  if (in_warp) {
    l.hazard(
        kind, line,
        fmt("%s: lane mask %08x %s %s, which lane mask %08x of the same warp %s at %s, without "
            "bar.warp.sync in between",
            describe(m, mine).c_str(), me.lanes, write ? "writes" : "reads", place.c_str(),
            other.lanes, other.write ? "wrote" : "read", at.c_str()));
    return;
  }
  Str hint = mine.launch != theirs.launch ? " (griddepcontrol.wait?)" : "";
  l.hazard(
      kind, line,
      fmt("%s %s %s, which %s %s at %s, and nothing orders the one after the other%s",
          describe(m, mine).c_str(), write ? "writes" : "reads", place.c_str(),
          describe(m, theirs).c_str(), other.write ? "wrote" : "read", at.c_str(), hint.c_str()));
}
// True if `other` is ordered before the access of `me`, by itself or with its whole launch. Every
// access calls this: without `inline` the emulator was 13 to 20 % slower.
static inline bool ordered(const Machine& m, const Actor& me, const Access& other) {
  u32 launch = m.agents[other.agent].launch->index;
  return (me.knowledge->memory.launches >> launch & 1) || me.knows(other);
}
static bool fenced(const Machine& m, const Actor& me, const Access& other, const Clock& proxy) {
  u32 launch = m.agents[other.agent].launch->index;
  return (proxy.launches >> launch & 1) || me.knows(other, proxy);
}
// The check that remembered accesses are ordered before a new one. With `read`, the bytes of a
// load, a race is not reported: it overwrites these bytes.
template <class Place>
struct Order {
  Machine& m;
  Launch& l;
  const Actor& me;
  u64 address;
  u32 n;
  bool write, shared;
  int line;
  Place place;
  u8* read = nullptr;
  Access seen{};        // the last one that passed: most chunks have the same access
  bool failed = false;  // there is something to report

  bool passes(const Access& a) {
    if (a.agent == seen.agent && a.tick == seen.tick && a.lanes == seen.lanes) return true;
    if (!ordered(m, me, a) || unfenced(a)) return false;
    seen = a;
    return true;
  }
  bool unfenced(const Access& a) const {
    const Knowledge& k = *me.knowledge;
    return me.async && !me.copied && !write && a.write && (!a.async || a.copied) &&
           !fenced(m, me, a, shared ? k.shared_proxy : k.global_proxy);
  }
  void report(const Access& a, u64 at) {
    failed = true;
    if (me.others) return;
    if (ordered(m, me, a))
      l.hazard(a.copied ? "missing-proxy-fence-after-cp-async" : "missing-proxy-fence", line,
               fmt("%s reads %s, which %s wrote, without fence.proxy.async in between",
                   describe(m, m.agents[me.agent]).c_str(), place(at).c_str(),
                   describe(m, m.agents[a.agent]).c_str()));
    else if (read)
      for (u32 b = 0; b < 16; b++) {
        u64 byte = at / 16 * 16 + b - address;
        if ((a.bytes >> b & 1) && byte < n) read[byte] = 0xff;
      }
    else if (!m.opt.poison_races || shared || !write || a.write || !a.box)
      report_race(m, l, me, a, write, [&] { return place(at); }, line,
                  shared ? "shared-race" : "global-race");
  }
};
// Record an access and report accesses that are not ordered before it. A read of several lanes is
// reported lane by lane.
template <class Place>
static void order(Machine& m, Launch& l, const Actor& me, Shadow& shadow, u64 address, u32 n,
                  bool write, bool shared, int line, Place place, u8* read = nullptr) {
  if (!m.opt.check_races) return;
  Order<Place> check{m, l, me, address, n, write, shared, line, place, read};
  shadow.access(me, address, n, write, check);
  if (!check.failed || !me.others) return;
  Actor one = me;
  one.others = 0;
  for (u32 left = me.lanes | me.others; left; left &= left - 1) {
    one.lanes = left & -left;
    order(m, l, one, shadow, address, n, write, shared, line, place, read);
  }
}
static void order_global(Machine& m, Launch& l, const Actor& me, u64 address, u32 n, bool write,
                         int line, u8* read = nullptr) {
  auto place = [&](u64 at) {
    const Range* r = range_of(m, at, 1);
    return r ? fmt("[%s + %lu]", r->label.c_str(), at - r->lo) : fmt("global %#lx", at);
  };
  order(m, l, me, m.shadow, address, n, write, false, line, place, read);
}
static auto place_in(const Cta& t) {
  return [&](u64 at) { return fmt("shared offset %lu of CTA rank %d", at, t.rank); };
}
// Return the first mbarrier in these bytes of shared memory, or -1.
static int mbar_in(const Cta& t, u32 off, u32 n) {
  for (u32 i = off / 8; i <= (off + n - 1) / 8; i++)
    if (t.mbars[i].valid) return i;
  return -1;
}
static void order_shared(Machine& m, Launch& l, const Actor& me, Cta& t, u32 off, u32 n, bool write,
                         int line) {
  int bar = write ? mbar_in(t, off, n) : -1;
  if (bar >= 0)  // The state of `mbars` stays whole; a GPU's is lost.
    l.hazard("mbarrier-overwritten", line,
             fmt("%s writes to the mbarrier at shared offset %d of CTA rank %d, initialised at PTX "
                 "line %d",
                 describe(m, m.agents[me.agent]).c_str(), 8 * bar, t.rank, t.mbars[bar].init_line));
  order(m, l, me, t.shadow, off, n, write, true, line, place_in(t));
}
// The check of accesses to a quarter of tensor memory, the 32 lanes of a warp. A CTA's tcgen05
// operations are ordered as issued. ld and st are a warp's and not a lane's: they have `lanes` = 0.
// alloc and dealloc are `strong`: they are synchronous, so a barrier orders them without
// tcgen05.fence::after_thread_sync.
struct TmemOrder {
  Machine& m;
  Launch& l;
  const Actor& me;
  bool write;
  int line;
  bool passes(const Access& a) const {
    return a.agent == me.agent || me.knows(a, me.knowledge->tensor) ||
           (me.strong && ordered(m, me, a));
  }
  void report(const Access& a, u64 at) const {
    auto place = [&] {
      return fmt("tensor memory lanes %u-%lu, column %lu", (u32)(at / 2048 * 32),
                 at / 2048 * 32 + 31, at / 4 % 512);
    };
    if (!ordered(m, me, a))
      return report_race(m, l, me, a, write, place, line,
                         me.strong ? "tmem-dealloc-in-flight" : "tmem-race");
    l.hazard("missing-tcgen05-fence", line,
             fmt("%s %s %s, which %s %s; what synchronises them lacks a "
                 "tcgen05.fence::before_thread_sync (or a commit) before or ::after_thread_sync "
                 "after it",
                 describe(m, m.agents[me.agent]).c_str(), write ? "writes" : "reads",
                 place().c_str(), describe(m, m.agents[a.agent]).c_str(),
                 a.strong ? "allocated" : a.write ? "wrote" : "read"));
  }
};
static void order_tmem(Machine& m, Launch& l, const Actor& me, Cta& t, u32 quarter, u32 column,
                       u32 n, bool write, int line) {
  if (!m.opt.check_races) return;
  TmemOrder check{m, l, me, write, line};
  t.tmem_shadow.access(me, 4 * (quarter * 512 + column), 4 * n, write, check);
}
// Check an access to the memory of CTA `t` by another CTA or a copy: it comes after the start of
// `t` and before its exit.
static void visit(Machine& m, Launch& l, const Actor& me, Cta& t, int line) {
  if (!m.opt.check_races || t.cluster->ctas.size() == 1) return;
  const Agent& a = m.agents[me.agent];
  if (a.cta == &t && !me.async) return;
  if (!me.knowledge->memory.find(t.agent))
    l.hazard("cta-not-started", line,
             fmt("%s reaches CTA rank %d, and nothing orders that after the start of the CTA",
                 describe(m, a).c_str(), t.rank));
  if (t.done())
    l.hazard("exited-cta", line,
             fmt("%s reaches CTA rank %d, which has exited", describe(m, a).c_str(), t.rank));
  Access& last = t.visits[{me.agent, me.lanes}];
  last.tick = me.tick;
  last.pc = me.pc;
}
// Check, at the exit of a CTA's last warp, that all visits are ordered before it.
static void check_visits(const Ctx& c) {
  Clock known;
  for (auto& w : c.cta.warps) known.join(w.knowledge.memory);
  for (auto& v : c.cta.visits) {
    const Known* k = known.find(v.first.first);
    if (!k || !k->covers(v.second.tick, v.first.second))
      c.hazard("exited-cta",
               fmt("CTA rank %d exits, and nothing orders that after the access of %s at PTX line "
                   "%d",
                   c.cta.rank, describe(c.m, c.m.agents[v.first.first]).c_str(),
                   c.launch().p->code[v.second.pc].line));
  }
}

// ---- accesses of threads

static bool all_written(const Cta& t, u32 off, u32 n) {
  if (n != 16) return !memchr(&t.init[off], 0, n);
  u64 init[2];  // of a whole chunk, which is how the tensor cores read
  memcpy(init, &t.init[off], 16);
  return (init[0] & init[1]) == 0x0101010101010101ull;
}

static void smem_check_init(Ctx& c, Cta& t, u32 off, u32 n) {
  for (u32 i = 0; i < n; i++)
    if (!t.init[off + i]) {
      c.hazard("uninitialised-shared-read",
               fmt("shared offset %u was never written (%s)", off + i, where(c).c_str()));
      return;
    }
}
// State spaces: 0 generic, 1 global, 2 shared, 3 local, 4 param and const (a host address).
//
// `me`: the lane that reads, with the lanes that read the same bytes. n is a power of two.
static inline void mem_read(Ctx& c, Actor& me, int space, u64 addr, u32 n, u8* dst) {
  if (addr & (n - 1)) fail(c, fmt("misaligned %u-byte read at %#lx", n, addr));
  u32 lane = __builtin_ctz(me.lanes), readers = 1 + __builtin_popcount(me.others);
  space = space_at(addr, space);
  if (space == 2) {
    Cta& t = shared_target(c.cta, (u32)addr, n, &c);
    u32 off = addr & OFF_MASK;
    if (!all_written(t, off, n))
      for (u32 i = 0; i < readers; i++) smem_check_init(c, t, off, n);
    if (&t != &c.cta) visit(c.m, c.launch(), me, t, c.ins->line);
    order_shared(c.m, c.launch(), me, t, off, n, false, c.ins->line);
    c.launch().counts.shared += readers * n;
    memcpy(dst, &t.smem[off], n);
  } else if (space == 3) {
    u32 off = (u32)addr, size = c.launch().p->local_bytes;
    if (off + n > size) fail(c, "local memory access out of bounds");
    memcpy(dst, &c.w.local[(size_t)lane * size + off], n);
  } else {
    if (space != 4) {
      if (!range_of(c.m, addr, n))
        for (u32 i = 0; i < readers; i++) check_global(c, addr, n, false);
      order_global(c.m, c.launch(), me, addr, n, false, c.ins->line);
      c.launch().counts.loaded += readers * n;
    }
    memcpy(dst, (void*)addr, n);
  }
}
static inline void mem_read(Ctx& c, int space, u64 addr, u32 n, u8* dst, int lane,
                            bool strong = false) {
  Actor me = thread_actor(c, lane);
  me.strong = strong;
  mem_read(c, me, space, addr, n, dst);
}
static inline void mem_write(Ctx& c, int space, u64 addr, u32 n, const u8* src, int lane,
                             bool strong = false) {
  if (addr & (n - 1)) fail(c, fmt("misaligned %u-byte write at %#lx", n, addr));
  space = space_at(addr, space);
  if (space == 2) {
    Cta& t = shared_target(c.cta, (u32)addr, n, &c);
    u32 off = addr & OFF_MASK;
    Actor me = thread_actor(c, lane);
    me.strong = strong;
    if (&t != &c.cta) visit(c.m, c.launch(), me, t, c.ins->line);
    order_shared(c.m, c.launch(), me, t, off, n, true, c.ins->line);
    memcpy(&t.smem[off], src, n);
    memset(&t.init[off], 1, n);
    c.launch().counts.shared += n;
    c.m.effects++;
  } else if (space == 3) {
    u32 off = (u32)addr, size = c.launch().p->local_bytes;
    if (off + n > size) fail(c, "local memory access out of bounds");
    memcpy(&c.w.local[(size_t)lane * size + off], src, n);
  } else {
    check_global(c, addr, n, true);
    Actor me = thread_actor(c, lane);
    me.strong = strong;
    order_global(c.m, c.launch(), me, addr, n, true, c.ins->line);
    memcpy((void*)addr, src, n);
    c.launch().counts.stored += n;
    c.m.effects++;
  }
}

// ---- accesses of asynchronous operations

static void in_shared(const Async& op, const Cta& t, u32 off, u32 n) {
  if (off + n > t.smem.size())
    throw EmuError{
        fmt("%s accesses shared memory out of bounds (offset %u + %u, size %zu), PTX "
            "line %d",
            op.what, off, n, t.smem.size(), op.ins->line)};
}
static const u8* async_read(const Async& op, const Actor& me, Cta& t, u32 off, u32 n) {
  in_shared(op, t, off, n);
  if (!all_written(t, off, n))
    op.launch->hazard("uninitialised-shared-read", op.ins->line,
                      fmt("%s reads shared bytes never written, near offset %u of CTA rank %d",
                          op.what, off, t.rank));
  order_shared(*op.m, *op.launch, me, t, off, n, false, op.ins->line);
  return &t.smem[off];
}
static void async_write(const Async& op, const Actor& me, Cta& t, u32 off, const u8* src, u32 n) {
  in_shared(op, t, off, n);
  order_shared(*op.m, *op.launch, me, t, off, n, true, op.ins->line);
  memcpy(&t.smem[off], src, n);
  memset(&t.init[off], 1, n);
}
// Access whole chunks of shared memory, at offsets that are multiples of 16. Return false, without
// a report, if there is something to report: the caller repeats the access chunk by chunk.
static bool clean_chunks(const Async& op, const Actor& me, Cta& t, const std::vector<u32>& at,
                         bool write) {
  for (u32 off : at)
    if (off + 16 > t.smem.size() || (write ? mbar_in(t, off, 16) >= 0 : !all_written(t, off, 16)))
      return false;
  if (!op.m->opt.check_races) return true;
  auto place = place_in(t);
  Order<decltype(place)> check{*op.m, *op.launch, me, 0, 0, write, true, op.ins->line, place};
  for (size_t i = 0; i < at.size();) {
    u32 page = at[i] / Shadow::PAGE_BYTES;
    u64 chunks = 0;
    for (; i < at.size() && at[i] / Shadow::PAGE_BYTES == page; i++)
      chunks |= 1ull << at[i] / 16 % 64;
    if (!t.shadow.access_page(me, page, chunks, write, check)) return false;
  }
  return true;
}
static const u8* async_read_global(const Async& op, const Actor& me, u64 address, u32 n) {
  static std::vector<u8> read;
  const u8* bytes = (const u8*)address;
  bool poison = op.m->opt.poison_races && me.box;
  if (poison) {
    read.assign(bytes, bytes + n);
    bytes = read.data();
  }
  order_global(*op.m, *op.launch, me, address, n, false, op.ins->line,
               poison ? read.data() : nullptr);
  return bytes;
}
static u8* async_write_global(const Async& op, const Actor& me, u64 address, u32 n) {
  order_global(*op.m, *op.launch, me, address, n, true, op.ins->line);
  op.m->effects++;
  return (u8*)address;
}
