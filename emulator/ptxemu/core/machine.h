// The state of the machine: launches in flight, their CTAs, warps and barriers, reported hazards.
#pragma once
#include "shadow.h"

static const u64 SHARED_WINDOW = 0xF0ull << 56, LOCAL_WINDOW = 0xE0ull << 56;
static const u32 MAX_SMEM = 233472;  // bytes of a CTA, with the system's part
static const u32 RANK_SHIFT = 24, OFF_MASK = 0xFFFFFF;

struct EmuError {
  Str msg;
};
struct Ctx;
struct Instr;
struct Warp;
struct Cta;
struct Cluster;
struct Machine;
struct Launch;
enum Status { NEXT, JUMPED, BLOCK, YIELD };
typedef Status (*Handler)(Ctx&, const Instr&);

struct Opnd {
  char kind = 'S';  // R register, N negated predicate, A address, V vector, S sink, L label
  int slot = -1;
  s64 off = 0;
  u32 tracked = 0;  // in a WGMMA's vector: number of the tracked register
  std::vector<Opnd> v;
};
// The memory semantics and the scope of an access.
enum Sem : u8 { WEAK, RELAXED, ACQUIRE, RELEASE, ACQ_REL };
enum Scope : u8 { SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU };
struct Instr {
  Handler fn = nullptr;
  Str op, text;
  int line = 0;
  std::vector<Str> parts;
  int pred = -1;
  bool neg = false;
  std::vector<Opnd> o;
  int i0 = 0, i1 = 0, i2 = 0, i3 = 0, i4 = 0;  // decoded modifiers, per handler
  Sem sem = WEAK;
  Scope scope = SCOPE_GPU;
  std::vector<u32> tracked;   // tracked registers that it accesses: see registers.h
  std::vector<u32> moved_to;  // tracked registers that a move or a tcgen05.ld fills
  bool copies = false;        // a move: the destination gets its source's state
  bool has(const char* p) const {
    for (auto& x : parts)
      if (x == p) return true;
    return false;
  }
  bool starts(const char* p) const { return op.compare(0, strlen(p), p) == 0; }
};

struct Program {
  Str name;
  int nslots = 0, local_bytes = 0, static_smem = 0;
  std::vector<Instr> code;
  std::vector<std::pair<int, u64>> consts;
  std::vector<std::pair<int, int>> specials, params;
  std::vector<std::pair<int, u32>> smem_syms;
  std::unordered_map<int, u32> tracked;  // slot -> number of a tracked register
};

struct MBar {
  bool valid = false;
  u32 phase = 0;
  s32 count = 0, pending = 0;
  s64 tx = 0;
  int init_line = 0;
  Access initialised{};
  std::vector<Warp*> sleepers;  // warps of its own CTA that wait for the phase
  u32 agent = 0;                // agent of the asynchronous copies that complete here
  Knowledge arriving, arrived;  // of this phase's arrivals; of all earlier phases' arrivals
};

struct AsyncOp {
  std::function<void()> run;
  int line;
  const char* what;
};
struct Queue {
  std::deque<AsyncOp> q;
  bool loads = false;  // copies to shared memory: complete in any order, and early in early_loads
};
// Groups of committed operations, each with the tick of its commit.
template <class T>
struct Groups {
  struct Group {
    T operations;
    Tick tick;
  };
  std::deque<Group> committed;
  T open{};
  void commit(Tick tick) {
    committed.push_back({std::move(open), tick});
    open = T{};
  }
};

struct BulkGroups : Groups<std::vector<AsyncOp>> {
  std::deque<Tick> writing;  // commits of the groups that no wait has seen complete
};

// The words that a load or an atomic read, to recognise polling, and its warp's number of effects
// at that time.
struct Polled {
  struct Word {
    u64 address;
    const u8* at;
    u32 n;
    u8 value[64];
  };
  u32 pc;
  u64 own_effects;
  std::vector<Word> words;
  bool changed() const {
    for (auto& w : words)
      if (memcmp(w.at, w.value, w.n)) return true;
    return false;
  }
};

struct Group {
  u32 pc = 0, mask = 0;
  bool arrived = false;
  u64 token = 0;  // of the arrival, while it waits at a two-step barrier
  bool blocked = false;
  u32 tried = ~0u, tried_for = 0;  // mbarrier and phase of the last wait that failed
  u64 tried_at = 0;                // its warp's number of effects at that time
  std::shared_ptr<const Polled> polled;
  bool sleeps = false;       // blocked until its warp is woken
  std::function<Str()> why;  // describes the reason of the block; called only for a report
};

// The knowledge that a release store, or a fence before a store, publishes at a word. Readers in
// scope can acquire it. CTA and cluster may be gone: they are only compared.
struct Published {
  Scope scope;
  const Cta* cta;
  const Cluster* cluster;
  Knowledge knowledge;
};
typedef std::vector<Published> Publications;
typedef std::unordered_map<u64, Publications> Flags;  // by address
// A fence of some lanes: the knowledge that a relaxed access after it publishes.
struct Fence {
  u32 lanes;
  Scope scope;
  Knowledge knowledge;  // without the lanes' own accesses
  Tick together, tick;  // Warp::released; tick of the fence
};

struct Warp {
  Cta* cta = nullptr;
  int id = 0;
  u32 live = 0;
  std::vector<Group> groups;
  std::vector<u64> regs;
  std::vector<u8> local;
  BulkGroups bulk[32];
  Queue wgmma;
  Groups<int> wgmma_groups;  // numbers of operations
  struct WgmmaRegister {
    u64 touched = 0;   // number of fences before its last access by an ordinary instruction
    u64 used = 0;      // number of fences before its last WGMMA
    Tick started = 0;  // tick of its last WGMMA
    int shape = 0;     // columns of its last WGMMA
  };
  std::vector<WgmmaRegister> wgmma_registers;
  u64 wgmma_fences = 0;
  Tick wgmma_done = 0;  // WGMMAs up to this tick have been waited for
  std::vector<Tick> loaded_from_tmem;  // by tracked register: tick of its tcgen05.ld
  Tick tmem_loads_done = 0;            // tcgen05.lds up to this tick have been waited for
  struct TmemLoad {
    u32 column, columns;
    int line;
    Knowledge knowledge;
  };
  std::vector<TmemLoad> tmem_loads;  // not yet waited for
  Queue cpasync;
  Groups<int> cpasync_groups;
  Tick cpasync_done = 0;          // commit of the last group that was waited for
  std::array<Tick, 32> copies{};  // by lane: the last of its cp.async that it has waited for
  u32 lanes_of_copies = 0;        // lanes that have waited since their last synchronisation
  std::vector<u32> tmem_stores;  // TMEM cells written by tcgen05.st since the last tcgen05.wait::st
  u64 cluster_token = 0;
  bool cluster_arrived = false;
  u64 executed = 0;
  // Other warps' effects; all effects at the end of its last turn.
  u64 others_effects = 0, effects_at_end = 0;

  u32 agent = 0;
  // Agents of the asynchronous operations: WGMMA, cp.async, the reads and the writes of bulk
  // stores.
  u32 wgmma_agent = 0, cpasync_agent = 0, bulk_read_agent = 0, bulk_write_agent = 0;
  u32 init_agent = 0;  // agent of mbarrier.init: fence.mbarrier_init releases nothing else
  Knowledge knowledge;
  Clock tensor;            // of its tcgen05 operations, by the last fence::after_thread_sync
  Knowledge fenced_inits;  // mbarrier.inits that a relaxed barrier.cluster.arrive releases
  Tick together = 0;       // the last tick at which all its lanes were synchronised
  Tick released = 0;       // up to it, one lane's release stands for all lanes
  std::vector<Fence> fences;  // the last one of each lane
  Publications observed;      // by relaxed loads; the next fence acquires them
  // Copies by cp.async that the lanes have waited for, but the warp may not know yet.
  void learn_copies(Knowledge& k, u32 of_lanes) const {
    for (u32 m = of_lanes & lanes_of_copies; m; m &= m - 1) {
      int l = __builtin_ctz(m);
      k.learn({cpasync_agent, 1u << l, 0, copies[l]});
    }
  }
  // Order the lanes' accesses up to `tick` before all lanes' later ones.
  void synchronise(u32 lanes, Tick tick) {
    together = released = tick;
    learn_copies(knowledge, lanes | ~live);
    lanes_of_copies &= ~lanes & live;
  }
  u64* R(int slot) { return &regs[(size_t)slot * 32]; }
};

struct NamedBar {
  int arrived = 0, expected = 0;
  u64 gen = 0;
  int line = 0;
  std::map<int, u32> lanes;  // by warp: lanes that have arrived in this phase
  u32 red_and = 1, red_or = 0, red_popc = 0, last_and = 1, last_or = 0, last_popc = 0;
  Knowledge arriving, released;
};

struct Cta {
  Cluster* cluster = nullptr;
  Launch* launch = nullptr;
  int rank = 0;
  u32 id[3] = {0, 0, 0};
  std::vector<u8> smem, init;  // init: 1 for each byte that was ever written
  Shadow shadow, tmem_shadow;
  Flags flags;
  std::vector<MBar> mbars;
  std::vector<u32> tmem;
  std::vector<u8> tmem_init;
  std::vector<s8> tmem_owner;  // owner per column
  bool tmem_permit = true;
  std::vector<Str> pair_calls;  // its warps' instructions that need both CTAs of the pair
  std::vector<Warp> warps;
  NamedBar bars[16];
  Queue tc;  // tcgen05 asynchronous operations, in order
  u32 tc_agent = 0;
  // Agent of the CTA's start and of its allocations of tensor memory.
  u32 agent = 0;
  Tick started = 0;
  // The last access to this CTA's memory of each other CTA's agent and of each copy.
  std::map<std::pair<u32, u32>, Access> visits;  // by agent and lanes
  int nthreads = 0;
  u32 awake = 0;  // bit w: warp w may be able to run
  std::vector<std::pair<int, std::shared_ptr<const Polled>>> polls;  // by sleeping warp
  bool triggered = false;  // has executed griddepcontrol.launch_dependents
  void wake() {
    for (auto& w : warps) awake |= (u32)(w.live != 0) << w.id;
  }
  bool done() const {
    for (auto& w : warps)
      if (w.live) return false;
    return true;
  }
};
static void wake(Warp& w) { w.cta->awake |= 1u << w.id; }
struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  u64 bar_gen = 0;
  int bar_arrived = 0;
  Knowledge arriving, arrived;
  Queue tma;
  Cluster() { tma.loads = true; }
  bool done() const {
    for (auto& c : ctas)
      if (!c->done()) return false;
    return true;
  }
};

struct Range {
  u64 lo, hi;
  Str label;
};
struct Hazard {
  Str kind, msg;
  int line;
  u64 count;
};

// Counts of a launch, for the report. The bytes of a multicast count once.
struct Counts {
  u64 tma_loaded = 0, tma_stored = 0;  // bytes of global memory, by TMA and bulk copies
  u64 loaded = 0, stored = 0;          // by threads: ld, st, atom, cp.async
  u64 shared = 0;                      // bytes of shared memory, by threads
  u64 mma_flops = 0;                   // of WGMMA and tcgen05.mma
};

// One kernel launch. The launches in flight form a chain: each but the first may start before its
// predecessor has ended.
struct Launch {
  int index = 0;
  const Program* p = nullptr;
  u32 grid[3], block[3], cdim[3];
  u32 smem_size = 0;
  bool sm90 = false;
  std::vector<u8> param_buf;
  u8* params = nullptr;
  std::vector<std::unique_ptr<Cluster>> clusters;  // resident
  u32 shape[3];                  // of the grid, in clusters
  u64 taken = 0, in_all = 0;     // clusters that were started or taken over; all clusters
  size_t room = 1;               // the most resident clusters
  int smid = 0;
  bool started = false, complete = false;
  bool exits = false;           // a CTA has exited whose cluster may still be resident
  u64 ctas = 0, triggered = 0;  // all CTAs; CTAs that have triggered or exited
  // Bit i: this launch knows that launch i is complete. At its start; at the trigger or exit of any
  // of its CTAs; at its end.
  u64 known = 0, known_at_trigger = 0, known_at_end = 0;
  u64 executed = 0;
  Counts counts;
  std::vector<Hazard> hazards;
  bool waits() const { return taken < in_all; }
  // Take the next cluster that has not been started; return its coordinates.
  std::array<u32, 3> take() {
    u64 i = taken++;
    return {(u32)(i % shape[0]), (u32)(i / shape[0] % shape[1]), (u32)(i / shape[0] / shape[1])};
  }
  // Count a hazard that was reported before. Return false if it is new and needs a message.
  bool again(const char* kind, int line) {
    for (auto& h : hazards)
      if (h.line == line && h.kind == kind) return ++h.count;
    return false;
  }
  void hazard(const char* kind, int line, const Str& msg) {
    if (!again(kind, line)) hazards.push_back({kind, msg, line, 1});
  }
};

struct Agent {
  const Launch* launch;
  const Cta* cta;  // may be gone: it is only compared
  u32 id[3];
  int warp;  // -1: none
  const char* what;
};

// The start of a launch that may overlap its predecessor.
enum Dependents { LATE, EARLY, RANDOM };
struct Options {
  int mode = 0;
  int dependents = LATE;
  int max_resident = 64;
  int strict = 0;
  u64 max_instr = 4000000000ull;
  int check_races = 1;
  int poison_races = 0;
  int hopper_arithmetic = 0;
  int clc_resident = 0;
};

// The first contents of memory: random bytes. They are drawn once; memory gets them from a random
// place on.
class Noise {
  static const size_t BYTES = 1 << 20;
  std::vector<u64> bytes;
  std::mt19937_64 rng;

 public:
  void begin(u64 seed) {
    rng.seed(seed);
    bytes.resize(BYTES / 8);
    for (auto& b : bytes) b = rng();
  }
  template <class T>
  void fill(std::vector<T>& memory, size_t count) {
    memory.resize(count);
    u8* to = (u8*)memory.data();
    for (size_t left = count * sizeof(T), n; left; left -= n, to += n) {
      size_t place = rng() % (BYTES / 2) / 8 * 8;
      n = std::min(left, BYTES - place);
      memcpy(to, (u8*)bytes.data() + place, n);
    }
  }
};

struct Machine {
  Options opt;
  Noise noise;
  std::vector<std::unique_ptr<Launch>> launches;
  std::vector<Queue*> queues;  // of all resident clusters
  std::vector<Range> ranges, maps;
  size_t last_range = 0;
  Shadow shadow;  // of global memory
  Flags flags;
  std::vector<Agent> agents;
  Launch* current = nullptr;  // the launch that runs
  u64 effects = 0, clock = 0, executed = 0;
  Tick tick = 0;
  bool force_timeout = false;
  bool ask_again = false;  // warps poll once more, though nothing has changed
  bool new_turn = false;   // a launch may start now
  std::mt19937_64 rng;
};

static u32 new_agent(Machine& m, const Cta& t, int warp, const char* what) {
  if (m.agents.size() >> 20) throw EmuError{"too many CTAs in flight for the check of races"};
  m.agents.push_back({t.launch, &t, {t.id[0], t.id[1], t.id[2]}, warp, what});
  return (u32)m.agents.size() - 1;
}

struct Ctx {
  Machine& m;
  Cta& cta;
  Warp& w;
  Group& g;
  u32 mask;  // lanes executing this instruction (after the predicate)
  const Instr* ins;
  Launch& launch() const { return *cta.launch; }
  u64 own_effects() const { return m.effects - w.others_effects; }
  void hazard(const char* kind, const Str& msg) const { launch().hazard(kind, ins->line, msg); }
};

[[noreturn]] static void fail(const Ctx& c, const Str& msg) {
  throw EmuError{fmt("%s\n  at CTA (%u,%u,%u) warp %d lanes %08x, PTX line %d: %s", msg.c_str(),
                     c.cta.id[0], c.cta.id[1], c.cta.id[2], c.w.id, c.mask, c.ins->line,
                     c.ins->text.substr(0, 200).c_str())};
}
static Str where(const Ctx& c) {
  return fmt("CTA (%u,%u,%u) warp %d", c.cta.id[0], c.cta.id[1], c.cta.id[2], c.w.id);
}

template <class F>
static inline void lanes(u32 m, F f) {
  if (m == 0xffffffffu) {
    for (int l = 0; l < 32; l++) f(l);
  } else
    for (; m; m &= m - 1) f(__builtin_ctz(m));
}
