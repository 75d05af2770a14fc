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

struct Chunk {  // 16 bytes
  static const size_t MOST = 28;
  Access few[4];
  std::unique_ptr<std::vector<Access>> more;
  template <class F>
  void each(F f) {
    for (auto& a : few)
      if (a.bytes) f(a);
    if (more)
      for (auto& a : *more)
        if (a.bytes) f(a);
  }
  void add(const Access& a) {
    for (auto& slot : few)
      if (!slot.bytes) {
        slot = a;
        return;
      }
    if (!more) more.reset(new std::vector<Access>);
    for (auto& slot : *more)
      if (!slot.bytes) {
        slot = a;
        return;
      }
    // Of many that only read, some are forgotten: a race may be missed, none is invented.
    if (more->size() < MOST || a.write)
      more->push_back(a);
    else
      (*more)[a.tick % MOST] = a;
  }
};

class Shadow {
  static const int PAGE = 64;  // chunks
  struct Page {
    Chunk chunks[PAGE];
    Page() { memset((void*)chunks, 0, sizeof chunks); }
  };
  std::unordered_map<u64, std::unique_ptr<Page>> pages;
  u64 last = ~0ull;
  Page* page = nullptr;

  Chunk& chunk(u64 address) {
    u64 key = address / (16 * PAGE);
    if (key != last) {
      auto& p = pages[key];
      if (!p) p.reset(new Page);
      last = key;
      page = p.get();
    }
    return page->chunks[address / 16 % PAGE];
  }

 public:
  // Records an access to n bytes. `before(access)` is called for every remembered access that this
  // one conflicts with: of the same bytes, one of the two a write, not both of them strong.
  template <class F>
  void access(const Actor& me, u64 address, u32 n, bool write, F before) {
    for (u64 end = address + n; address < end;) {
      u32 first = address % 16, count = (u32)std::min<u64>(16 - first, end - address);
      u16 bytes = (u16)(((1u << count) - 1) << first);
      Chunk& c = chunk(address);
      bool recorded = false;
      c.each([&](Access& a) {
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
        c.add(a);
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
