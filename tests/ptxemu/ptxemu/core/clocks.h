// What each agent knows of the others' accesses to memory: the order that synchronisation gives.
//
// An agent is whatever accesses memory in an order of its own: a warp, a warp's WGMMAs, its bulk
// stores, what completes on one mbarrier, a CTA's tcgen05 operations. Each access has a tick, the
// number of the instruction among all that were executed. "A knows B up to tick t" means that
// synchronisation orders B's accesses up to t before what A does next (a vector clock). Knowledge
// passes on at barriers, mbarriers, flags that are released and acquired, and launches.
#pragma once
#include "numerics.h"

typedef u64 Tick;

// One agent's accesses: of all lanes up to `all`, of `lanes` up to `some`.
struct Known {
  u32 agent, lanes;
  Tick all, some;
  bool covers(Tick tick, u32 of) const { return tick <= all || (tick <= some && !(of & ~lanes)); }
  bool includes(const Known& o) const {
    return o.all <= all && (o.some <= all || (o.some <= some && !(o.lanes & ~lanes)));
  }
  // Exact unless both sides name different lanes at different ticks; then it claims too much: a
  // race may be missed, none is invented.
  void join(const Known& o) {
    all = std::max(all, o.all);
    if (o.some > all) {
      lanes = some > all ? lanes | o.lanes : o.lanes;
      some = std::max(some, o.some);
    }
    if (lanes == ~0u) all = std::max(all, some);
  }
};

// Shared between all that know the same, copied when one of them learns more.
class Clock {
  std::shared_ptr<std::vector<Known>> agents;  // by agent

  static std::vector<Known>::const_iterator place(const std::vector<Known>& v, u32 agent) {
    return std::lower_bound(v.begin(), v.end(), agent,
                            [](const Known& k, u32 a) { return k.agent < a; });
  }

 public:
  u64 launches = 0;  // bit i: everything that launch i did

  const Known* find(u32 agent) const {
    if (!agents) return nullptr;
    auto i = place(*agents, agent);
    return i != agents->end() && i->agent == agent ? &*i : nullptr;
  }
  void learn(const Known& k) {
    const Known* old = find(k.agent);
    if (old && old->includes(k)) return;
    if (!agents)
      agents = std::make_shared<std::vector<Known>>();
    else if (agents.use_count() > 1)
      agents = std::make_shared<std::vector<Known>>(*agents);
    auto i = agents->begin() + (place(*agents, k.agent) - agents->cbegin());
    if (i != agents->end() && i->agent == k.agent)
      i->join(k);
    else
      agents->insert(i, k);
  }
  void join(const Clock& o) {
    launches |= o.launches;
    if (!o.agents || o.agents == agents) return;
    if (!agents) {
      agents = o.agents;
      return;
    }
    auto a = agents->begin(), b = o.agents->begin();
    bool news = false;
    for (; b != o.agents->end() && !news; ++b) {
      while (a != agents->end() && a->agent < b->agent) ++a;
      news = a == agents->end() || a->agent != b->agent || !a->includes(*b);
    }
    if (!news) return;
    auto merged = std::make_shared<std::vector<Known>>();
    merged->reserve(agents->size() + o.agents->size());
    for (a = agents->begin(), b = o.agents->begin(); a != agents->end() || b != o.agents->end();) {
      if (b == o.agents->end() || (a != agents->end() && a->agent < b->agent))
        merged->push_back(*a++);
      else if (a == agents->end() || b->agent < a->agent)
        merged->push_back(*b++);
      else {
        merged->push_back(*a++);
        merged->back().join(*b++);
      }
    }
    agents = std::move(merged);
  }
};

// `memory`: whose accesses are ordered before what comes next. The proxies: whose ordinary writes to
// shared and to global memory the asynchronous proxy (TMA, WGMMA, tcgen05) sees as well. `tensor`:
// whose tcgen05 operations are ordered before what comes next; relaxed synchronisation orders them.
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
