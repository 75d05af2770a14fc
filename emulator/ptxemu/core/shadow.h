// The accesses that memory remembers, and whether a new one is ordered after them.
#pragma once
#include "clocks.h"

struct Access {
  // copied: by cp.async, which is asynchronous and yet of the ordinary proxy
  u64 tick : 40, agent : 20, write : 1, async : 1, copied : 1, strong : 1;
  u32 lanes;
  u16 bytes;  // of the chunk's 16; 0: no access
  u16 pc;     // instruction, 65535 for any above
};

// Who makes an access, and what it knows.
struct Actor {
  u32 agent, lanes = ~0u;
  Tick tick;
  // The last tick at which this warp's lanes were brought together; 0 of asynchronous operations.
  Tick together = 0;
  bool async = false, copied = false, strong = false;
  u16 pc = 0;
  const Knowledge* knowledge;

  bool knows(const Access& a) const {
    if (a.agent == agent && a.tick == tick) return true;
    if (a.agent != agent || async) return knows(a, knowledge->memory);
    if (a.tick <= together || !(a.lanes & ~lanes)) return true;
    // What the warp knows of its own lanes they have told each other, this one among them.
    const Known* k = knowledge->memory.find(agent);
    return k && k->covers(a.tick, a.lanes | lanes);
  }
  bool knows(const Access& a, const Clock& clock) const {
    const Known* k = clock.find(a.agent);
    return k && k->covers(a.tick, a.lanes);
  }
};

// What is remembered of 16 bytes beyond one access.
struct MoreAccesses {
  static const size_t MOST = 28;
  Access few[3];
  std::unique_ptr<std::vector<Access>> many;
};

class Shadow {
  static const int PAGE = 64, LOW = 256;  // chunks of 16 bytes in a page; pages found by number
  // Most chunks have one access: weights that TMA reads once.
  struct Page {
    Access first[PAGE];
    std::unique_ptr<MoreAccesses[]> more;
    Page() { memset((void*)first, 0, sizeof first); }
  };
  std::unique_ptr<Page> low[LOW];  // shared and tensor memory
  std::unordered_map<u64, std::unique_ptr<Page>> high;
  u64 last = ~0ull;
  Page* page = nullptr;

  Page& page_of(u64 address) {
    u64 key = address / (16 * PAGE);
    if (key != last) {
      auto& p = key < LOW ? low[key] : high[key];
      if (!p) p.reset(new Page);
      last = key;
      page = p.get();
    }
    return *page;
  }
  template <class F>
  static void each(Page& p, u32 chunk, F f) {
    if (p.first[chunk].bytes) f(p.first[chunk]);
    if (!p.more) return;
    MoreAccesses& more = p.more[chunk];
    for (auto& a : more.few)
      if (a.bytes) f(a);
    if (more.many)
      for (auto& a : *more.many)
        if (a.bytes) f(a);
  }
  static void add(Page& p, u32 chunk, const Access& a) {
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
    // Of many that only read, some are forgotten: a race may be missed, none is invented.
    if (more.many->size() < more.MOST || a.write)
      more.many->push_back(a);
    else
      (*more.many)[a.tick % more.MOST] = a;
  }

 public:
  // Records an access to n bytes. `before(access)` is called for every remembered access that this
  // one conflicts with: of the same bytes, one of the two a write, not both of them strong.
  template <class F>
  void access(const Actor& me, u64 address, u32 n, bool write, F before) {
    for (u64 end = address + n; address < end;) {
      u32 first = address % 16, count = (u32)std::min<u64>(16 - first, end - address);
      u16 bytes = (u16)(((1u << count) - 1) << first);
      Page& p = page_of(address);
      u32 chunk = address / 16 % PAGE;
      bool recorded = false;
      each(p, chunk, [&](Access& a) {
        if ((a.bytes & bytes) && (write || a.write) && !(a.strong && me.strong)) before(a, address);
        if (write)
          a.bytes &= ~bytes;
        else if (!recorded && !a.write)
          recorded = renew(a, me, bytes);
      });
      if (!recorded) {
        Access a{};
        a.tick = me.tick;
        a.agent = me.agent;
        a.write = write;
        a.async = me.async;
        a.copied = me.copied;
        a.strong = me.strong;
        a.lanes = me.lanes;
        a.bytes = bytes;
        a.pc = me.pc;
        add(p, chunk, a);
      }
      address += count;
    }
  }

 private:
  // Lets the memory of an earlier read of the same agent stand for this one too, where nothing is
  // lost: whoever is ordered after this one is ordered after that one.
  static bool renew(Access& a, const Actor& me, u16 bytes) {
    if (a.agent != me.agent || a.async != me.async || a.strong != me.strong) return false;
    if (a.tick == me.tick) {
      if (a.bytes != bytes && a.lanes != me.lanes) return false;
      a.lanes |= me.lanes;
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
    a.tick = me.tick;
    a.bytes = bytes;
    a.pc = me.pc;
    return true;
  }
};
