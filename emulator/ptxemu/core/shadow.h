// Shadow memory: the last accesses to every byte, to check the order of new accesses.
#pragma once
#include "clocks.h"

struct Access {
  // copied: by cp.async, asynchronous but of the ordinary proxy; box: of a box, by TMA
  u64 tick : 39, agent : 20, write : 1, async : 1, copied : 1, strong : 1, box : 1;
  u32 lanes;
  u16 bytes;  // a bit for each of the chunk's 16 bytes; 0: no access
  u16 pc;     // index of the instruction; 65535 for all above
};

// The agent of a new access, with its knowledge.
struct Actor {
  u32 agent, lanes = ~0u;
  u32 others = 0;  // lanes of the warp that make the same read after this one
  Tick tick;
  // The last tick at which all lanes of the warp were synchronised; 0 for asynchronous operations.
  Tick together = 0;
  bool async = false, copied = false, strong = false, box = false;
  u16 pc = 0;
  const Knowledge* knowledge;
  const Known* own = nullptr;  // more knowledge: of the warp that started an asynchronous operation
  // Each lane has waited for its own copies by the agent, up to a tick.
  u32 copies_agent = 0;
  const std::array<Tick, 32>* copies = nullptr;

  bool knows(const Access& a) const {
    if (a.agent == agent && a.tick == tick) return true;
    if (own && a.agent == own->agent) {
      const Known* more = knowledge->memory.find(a.agent);
      Known k = more ? *more : *own;
      k.join(*own);
      return k.covers(a.tick, a.lanes);
    }
    if (copies && a.agent == copies_agent && !((lanes | others) & ~a.lanes) &&
        a.tick <= (*copies)[__builtin_ctz(lanes)])
      return true;
    if (a.agent != agent || async) return knows(a, knowledge->memory);
    if (a.tick <= together || (!others && !(a.lanes & ~lanes))) return true;
    // Knowledge of the warp's own lanes counts only if it covers this lane, too.
    const Known* k = knowledge->memory.find(agent);
    return k && k->covers(a.tick, a.lanes | lanes | others);
  }
  bool knows(const Access& a, const Clock& clock) const {
    const Known* k = clock.find(a.agent);
    return k && k->covers(a.tick, a.lanes);
  }
};

// The accesses to one chunk of 16 bytes beyond the first.
struct MoreAccesses {
  static const size_t MOST = 28;
  Access few[3];
  std::unique_ptr<std::vector<Access>> many;
};

// Memory in pages of 64 chunks of 16 bytes. A page keeps runs: one access and all its chunks. A
// copy or an MMA is then one step a page, not one a chunk. After an access to a part of a chunk, or
// with too many runs, the page keeps the accesses of each chunk instead. Both forms keep a chunk's
// accesses in the same order, so reports do not depend on the form.
class Shadow {
  static const int PAGE = 64;  // chunks
  static const int LOW = 256, REGION = 1024;  // pages in an array; pages of an entry of the map
  static const size_t MOST_RUNS = 96;
  struct Run {
    Access access;
    u64 chunks;
  };
  struct Chunks {
    Access first[PAGE];
    std::unique_ptr<MoreAccesses[]> more;
    Chunks() { memset((void*)first, 0, sizeof first); }
  };
  struct Page {
    std::vector<Run> runs;
    std::unique_ptr<Chunks> chunks;  // replaces the runs if present
  };
  Page low[LOW];  // shared and tensor memory
  std::unordered_map<u64, std::unique_ptr<Page[]>> high;
  u64 last = ~0ull;
  Page* region = nullptr;

  Page& page_of(u64 number) {
    if (number < LOW) return low[number];
    if (number / REGION != last) {
      auto& r = high[number / REGION];
      if (!r) r.reset(new Page[REGION]);
      last = number / REGION;
      region = r.get();
    }
    return region[number % REGION];
  }
  static Access access_of(const Actor& me, bool write, u16 bytes) {
    Access a{};
    a.tick = me.tick;
    a.agent = me.agent;
    a.write = write;
    a.async = me.async;
    a.copied = me.copied;
    a.strong = me.strong;
    a.box = me.box;
    a.lanes = me.lanes | me.others;
    a.bytes = bytes;
    a.pc = me.pc;
    return a;
  }
  static bool conflict(const Access& a, const Actor& me, bool write) {
    return (write || a.write) && !(a.strong && me.strong);
  }

  template <class F>
  static void each(Chunks& p, u32 chunk, F f) {
    if (p.first[chunk].bytes) f(p.first[chunk]);
    if (!p.more) return;
    MoreAccesses& more = p.more[chunk];
    for (auto& a : more.few)
      if (a.bytes) f(a);
    if (more.many)
      for (auto& a : *more.many)
        if (a.bytes) f(a);
  }
  static void add(Chunks& p, u32 chunk, const Access& a) {
    if (!p.first[chunk].bytes) {
      p.first[chunk] = a;
      return;
    }
    if (!p.more) p.more.reset(new MoreAccesses[PAGE]());
    MoreAccesses& more = p.more[chunk];
    for (auto& slot : more.few)
      if (!slot.bytes) {
        slot = a;
        return;
      }
    if (!more.many) more.many.reset(new std::vector<Access>);
    for (auto& slot : *more.many)
      if (!slot.bytes) {
        slot = a;
        return;
      }
    // With too many reads, forget some: a race may be missed, none is invented.
    if (more.many->size() < more.MOST || a.write)
      more.many->push_back(a);
    else
      (*more.many)[a.tick % more.MOST] = a;
  }
  template <class F>
  static void access_chunk(Chunks& p, u32 chunk, const Actor& me, u16 bytes, bool write, F before) {
    bool recorded = false;
    each(p, chunk, [&](Access& a) {
      if ((a.bytes & bytes) && conflict(a, me, write)) before(a);
      if (write)
        a.bytes &= ~bytes;
      else if (!recorded && !a.write && a.agent == me.agent)
        recorded = renew(a, me, bytes);
    });
    if (!recorded) add(p, chunk, access_of(me, write, bytes));
  }
  static Chunks& by_chunks(Page& p) {
    if (!p.chunks) {
      p.chunks.reset(new Chunks);
      for (auto& r : p.runs)
        for (u64 m = r.chunks; m; m &= m - 1) add(*p.chunks, __builtin_ctzll(m), r.access);
      p.runs = {};
    }
    return *p.chunks;
  }
  // Record a run. Return false, without a change, if a chunk would have too many accesses.
  static bool record_run(Page& p, u64 chunks, const Actor& me, bool write) {
    auto& runs = p.runs;
    if (write) {
      for (auto& r : runs) r.chunks &= ~chunks;
      runs.erase(std::remove_if(runs.begin(), runs.end(), [](const Run& r) { return !r.chunks; }),
                 runs.end());
    } else {
      size_t overlap = 0;
      for (auto& r : runs) overlap += (r.chunks & chunks) != 0;
      if (overlap >= MoreAccesses::MOST) return false;
      for (size_t i = 0; chunks && i < runs.size(); i++) {
        u64 both = runs[i].chunks & chunks;
        Access renewed = runs[i].access;
        if (!both || renewed.write || !renew(renewed, me, 0xffff)) continue;
        chunks &= ~both;
        if (both != runs[i].chunks) {
          runs[i].chunks &= ~both;
          runs.insert(runs.begin() + ++i, {renewed, both});
        } else
          runs[i].access = renewed;
      }
    }
    if (!runs.capacity()) runs.reserve(8);  // 1 KB of a row is read in some eight tiles
    if (chunks) runs.push_back({access_of(me, write, 0xffff), chunks});
    return true;
  }

 public:
  static const u32 PAGE_BYTES = 16 * PAGE;

  // Record an access to whole chunks (bits) of a page if `check.passes` all conflicting accesses.
  // Return false, without a change, if not.
  template <class Check>
  bool access_page(const Actor& me, u64 number, u64 chunks, bool write, Check& check) {
    Page& p = page_of(number);
    if (!p.chunks) {
      for (auto& r : p.runs)
        if ((r.chunks & chunks) && conflict(r.access, me, write) && !check.passes(r.access))
          return false;
      if (p.runs.size() < MOST_RUNS && record_run(p, chunks, me, write)) return true;
    }
    Chunks& by = by_chunks(p);
    bool passes = true;
    for (u64 m = chunks; m; m &= m - 1)
      each(by, __builtin_ctzll(m), [&](const Access& a) {
        if (passes && conflict(a, me, write)) passes = check.passes(a);
      });
    if (!passes) return false;
    if (write && chunks == ~0ull) {  // replaces all earlier accesses
      p.chunks.reset();
      p.runs.push_back({access_of(me, write, 0xffff), chunks});
    } else
      for (u64 m = chunks; m; m &= m - 1)
        access_chunk(by, __builtin_ctzll(m), me, 0xffff, write, [](const Access&) {});
    return true;
  }
  // Record an access to n bytes. Call `check.report(access, address)` for every conflicting access
  // unless `check.passes` it. Two accesses conflict if they share bytes, one of them is a write,
  // and not both are strong.
  template <class Check>
  void access(const Actor& me, u64 address, u32 n, bool write, Check& check) {
    for (u64 end = address + n; address < end;) {
      u64 next = std::min(end, (address / PAGE_BYTES + 1) * PAGE_BYTES);
      if (address % 16 || next % 16 || page_of(address / PAGE_BYTES).chunks ||
          !access_page(me, address / PAGE_BYTES, chunks_of(address, next), write, check))
        access_bytes(me, address, next, write, check);
      address = next;
    }
  }

 private:
  static u64 chunks_of(u64 first, u64 end) {
    u64 n = (end - first) / 16;
    return (n == PAGE ? ~0ull : (1ull << n) - 1) << first / 16 % PAGE;
  }
  // Record an access within one page.
  template <class Check>
  void access_bytes(const Actor& me, u64 address, u64 end, bool write, Check& check) {
    Chunks& p = by_chunks(page_of(address / PAGE_BYTES));
    while (address < end) {
      u32 first = address % 16, count = (u32)std::min<u64>(16 - first, end - address);
      access_chunk(p, address / 16 % PAGE, me, (u16)(((1u << count) - 1) << first), write,
                   [&](const Access& a) {
                     if (!check.passes(a)) check.report(a, address);
                   });
      address += count;
    }
  }
  // Merge this read into an earlier read of the same agent if nothing is lost: an access ordered
  // after this read is ordered after the earlier one.
  static bool renew(Access& a, const Actor& me, u16 bytes) {
    if (a.agent != me.agent || a.async != me.async || a.strong != me.strong) return false;
    if (a.tick == me.tick) {
      if (a.bytes != bytes && a.lanes != me.lanes) return false;
      a.lanes |= me.lanes | me.others;
      a.bytes |= bytes;
      return true;
    }
    if (a.bytes & ~bytes) return false;
    if (me.async || a.tick <= me.together || !(a.lanes & ~me.lanes))
      a.lanes = me.lanes;
    else if (a.bytes == bytes)
      a.lanes |= me.lanes;
    else
      return false;
    a.lanes |= me.others;
    a.tick = me.tick;
    a.bytes = bytes;
    a.pc = me.pc;
    return true;
  }
};
