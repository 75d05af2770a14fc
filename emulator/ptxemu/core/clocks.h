// Vector clocks: each agent's knowledge of the other agents' accesses to memory.
//
// An agent makes accesses in an order of its own: a warp, a warp's WGMMAs, its bulk stores, the
// copies that complete on one mbarrier, a CTA's tcgen05 operations. The tick of an access is the
// number of its instruction among all executed instructions. "A knows B up to tick t" means that
// synchronisation orders B's accesses up to t before A's next access. Knowledge passes on at
// barriers, mbarriers, released and acquired flags, and launches.
#pragma once
#include "base.h"

typedef u64 Tick;

// Accesses of one agent: up to the tick `all` for every lane, up to `some` for `lanes`.
struct Known {
  u32 agent, lanes;
  Tick all, some;
  bool covers(Tick tick, u32 mask) const {
    return tick <= all || (tick <= some && !(mask & ~lanes));
  }
  bool includes(const Known& o) const {
    return o.all <= all && (o.some <= all || (o.some <= some && !(o.lanes & ~lanes)));
  }
  // Exact, unless both sides name different lanes at different ticks. Then the result claims too
  // much knowledge: a race may be missed, none is invented.
  void join(const Known& o) {
    all = std::max(all, o.all);
    if (o.some > all) {
      lanes = some > all ? lanes | o.lanes : o.lanes;
      some = std::max(some, o.some);
    }
    if (lanes == ~0u) all = std::max(all, some);
  }
};

// A pointer with a count of owners. The core has one thread: the atomic count of std::shared_ptr
// would cost more than the joins.
template <class T>
class Shared {
  struct Counted {
    T value;
    size_t owners;
    // A free list, because most allocations of the core are of this type.
    union Free {
      Free* next;
      char bytes[sizeof(T) + sizeof(size_t)];
    };
    static inline Free* free_ones = nullptr;
    static void* operator new(size_t n) {
      if (!free_ones) return ::operator new(std::max(n, sizeof(Free)));
      return std::exchange(free_ones, free_ones->next);
    }
    static void operator delete(void* p) {
      ((Free*)p)->next = free_ones;
      free_ones = (Free*)p;
    }
  };
  Counted* at = nullptr;

 public:
  Shared() = default;
  Shared(const Shared& o) : at(o.at) {
    if (at) at->owners++;
  }
  Shared(Shared&& o) noexcept : at(std::exchange(o.at, nullptr)) {}
  Shared& operator=(Shared o) noexcept {
    std::swap(at, o.at);
    return *this;
  }
  ~Shared() {
    if (at && !--at->owners) delete at;
  }
  explicit operator bool() const { return at != nullptr; }
  bool operator==(const Shared& o) const { return at == o.at; }
  const T* operator->() const { return &at->value; }
  const T& operator*() const { return at->value; }
  // Return a value to change: a copy if the pointer has other owners.
  T& own() {
    if (!at)
      at = new Counted{T(), 1};
    else if (at->owners > 1) {
      at->owners--;
      at = new Counted{at->value, 1};
    }
    return at->value;
  }
};

// Knowledge by agent. Clocks share equal parts: a block of agents, a group of blocks, or the whole.
// A clock that learns copies the parts that lead to the changed block.
class Clock {
  // True if `mine` learns from `theirs`: a block, a group or the whole.
  template <class Part>
  static bool gains(const Shared<Part>& mine, const Shared<Part>& theirs) {
    return theirs && !(mine == theirs) && !(mine && mine->includes(*theirs));
  }
  template <class Part>
  static void take(Shared<Part>& mine, const Shared<Part>& theirs) {
    if (!mine || theirs->includes(*mine))
      mine = theirs;
    else
      mine.own().join(*theirs);
  }
  static const u32 BLOCKS = 16;  // of a group
  struct Block {
    static const u32 SIZE = 32;
    Known known[SIZE];
    u32 here = 0;  // bit i: something is known of agent i of the block
    bool includes(const Block& o) const {
      if (o.here & ~here) return false;
      for (u32 m = o.here; m; m &= m - 1) {
        int i = __builtin_ctz(m);
        if (!known[i].includes(o.known[i])) return false;
      }
      return true;
    }
    void learn(const Known& k) {
      u32 i = k.agent % SIZE;
      if (here >> i & 1)
        known[i].join(k);
      else
        known[i] = k;
      here |= 1u << i;
    }
    void join(const Block& o) {
      for (u32 m = o.here; m; m &= m - 1) learn(o.known[__builtin_ctz(m)]);
    }
  };
  static void widen(std::array<Shared<Block>, BLOCKS>&, size_t) {}
  template <class Part>
  static void widen(std::vector<Part>& v, size_t n) {
    if (v.size() < n) v.resize(n);
  }
  template <class List>
  struct Parts {
    List parts{};
    bool includes(const Parts& o) const {
      for (size_t i = 0; i < o.parts.size(); i++)
        if (i < parts.size() ? gains(parts[i], o.parts[i]) : (bool)o.parts[i]) return false;
      return true;
    }
    void join(const Parts& o) {
      widen(parts, o.parts.size());
      for (size_t i = 0; i < o.parts.size(); i++)
        if (gains(parts[i], o.parts[i])) take(parts[i], o.parts[i]);
    }
  };
  typedef Parts<std::array<Shared<Block>, BLOCKS>> Group;
  typedef Parts<std::vector<Shared<Group>>> Whole;
  static const u32 GROUP = BLOCKS * Block::SIZE;  // agents
  Shared<Whole> whole;

 public:
  u64 launches = 0;  // bit i: all accesses of launch i

  const Known* find(u32 agent) const {
    if (!whole || agent / GROUP >= whole->parts.size()) return nullptr;
    auto& group = whole->parts[agent / GROUP];
    if (!group) return nullptr;
    auto& block = group->parts[agent % GROUP / Block::SIZE];
    return block && (block->here >> agent % Block::SIZE & 1) ? &block->known[agent % Block::SIZE]
                                                             : nullptr;
  }
  void learn(const Known& k) {
    const Known* old = find(k.agent);
    if (old && old->includes(k)) return;
    auto& groups = whole.own().parts;
    widen(groups, k.agent / GROUP + 1);
    groups[k.agent / GROUP].own().parts[k.agent % GROUP / Block::SIZE].own().learn(k);
  }
  void join(const Clock& o) {
    launches |= o.launches;
    if (gains(whole, o.whole)) take(whole, o.whole);
  }
};

// memory: accesses ordered before the next access.
// shared_proxy, global_proxy: ordinary writes to shared and to global memory that the asynchronous
//   proxy (TMA, WGMMA, tcgen05) sees, too.
// tensor: tcgen05 operations ordered before the next one. Relaxed synchronisation orders them, too.
struct Knowledge {
  Clock memory, shared_proxy, global_proxy, tensor;
  void join(const Knowledge& o) {
    memory.join(o.memory);
    shared_proxy.join(o.shared_proxy);
    global_proxy.join(o.global_proxy);
    tensor.join(o.tensor);
  }
  void learn(const Known& k) { memory.learn(k); }
  void know_launches(u64 launches) {
    for (Clock* c : {&memory, &shared_proxy, &global_proxy}) c->launches |= launches;
  }
};
