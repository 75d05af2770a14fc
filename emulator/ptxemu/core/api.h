// The interface to Python.
#pragma once
#include "decoder.h"
#include "scheduler.h"

struct LaunchDesc {
  void* program;
  u32 grid[3], block[3], cluster[3];
  s32 sm90;
  u64 dyn_smem, param_bytes;
  const u8* params;
};
struct RunDesc {
  u64 launches;  // a chain: see Launch
  const LaunchDesc* launch;
  u64 nranges;
  const u64* ranges;
  const char* const* labels;
  u64 nmaps;
  const u64* maps;
  s32 mode, dependents;
  u64 seed, fill, max_resident, clc_resident, strict, check_races, poison_races, hopper_arithmetic,
      max_instr;
};
static Str json_escape(const Str& s) {
  Str o;
  for (char ch : s) {
    if (ch == '"' || ch == '\\') {
      o += '\\';
      o += ch;
    } else if (ch == '\n')
      o += "\\n";
    else if ((u8)ch < 32)
      o += ' ';
    else
      o += ch;
  }
  return o;
}
API void* ptxemu_load(const char* text, char* err, u64 n) {
  try {
    return load_program(text).release();
  } catch (EmuError& e) {
    snprintf(err, n, "%s", e.msg.c_str());
  } catch (std::exception& e) {
    snprintf(err, n, "the emulator failed: %s", e.what());
  }
  return nullptr;
}
static std::unique_ptr<Launch> new_launch(const LaunchDesc& d, int index) {
  std::unique_ptr<Launch> l(new Launch);
  l->index = index;
  l->p = (Program*)d.program;
  std::copy(d.grid, d.grid + 3, l->grid);
  std::copy(d.block, d.block + 3, l->block);
  std::copy(d.cluster, d.cluster + 3, l->cdim);
  l->sm90 = d.sm90;
  l->smem_size = (l->p->static_smem + (u32)d.dyn_smem + 15) / 16 * 16;
  l->param_buf.assign(d.param_bytes + 128 + 256, 0);
  l->params = (u8*)(((u64)l->param_buf.data() + 127) & ~127ull);
  memcpy(l->params, d.params, d.param_bytes);
  return l;
}
static Str json(const Machine& m, const Str& error) {
  Str s = fmt("{\"failed\": %d, \"error\": \"", m.current ? m.current->index : 0) +
          json_escape(error) + "\", \"launches\": [";
  for (auto& l : m.launches) {
    const Counts& n = l->counts;
    s += fmt("%s{\"instructions\": %lu, \"counts\": {\"tma_loaded\": %lu, \"tma_stored\": %lu, "
             "\"loaded\": %lu, \"stored\": %lu, \"shared\": %lu, \"mma_flops\": %lu}, "
             "\"hazards\": [",
             l->index ? ", " : "", l->executed, n.tma_loaded, n.tma_stored, n.loaded, n.stored,
             n.shared, n.mma_flops);
    for (size_t i = 0; i < l->hazards.size(); i++) {
      auto& h = l->hazards[i];
      s += fmt("%s{\"kind\": \"%s\", \"line\": %d, \"count\": %lu, \"message\": \"", i ? ", " : "",
               h.kind.c_str(), h.line, h.count) +
           json_escape(h.msg) + "\"}";
    }
    s += "]}";
  }
  return s + "]}";
}
API int ptxemu_run(const RunDesc* d, char* out, u64 n) {
  Machine m;
  m.opt.mode = d->mode;
  m.opt.dependents = d->dependents;
  m.opt.max_resident = d->max_resident;
  m.opt.clc_resident = d->clc_resident;
  m.opt.strict = d->strict;
  m.opt.check_races = d->check_races;
  m.opt.poison_races = d->poison_races;
  m.opt.hopper_arithmetic = d->hopper_arithmetic;
  m.opt.max_instr = d->max_instr;
  m.rng.seed(d->seed);
  m.noise.begin(d->fill);
  for (u64 i = 0; i < d->nranges; i++)
    m.ranges.push_back({d->ranges[2 * i], d->ranges[2 * i + 1], d->labels[i]});
  for (u64 i = 0; i < d->nmaps; i++) m.maps.push_back({d->maps[2 * i], d->maps[2 * i + 1], ""});
  for (u64 i = 0; i < d->launches; i++) {
    m.launches.push_back(new_launch(d->launch[i], (int)i));
    u64 params = (u64)m.launches[i]->params;
    m.ranges.push_back({params, params + d->launch[i].param_bytes + 16, "kernel parameters"});
  }
  Str error;
  try {
    run_machine(m);
  } catch (EmuError& e) {
    error = e.msg;
  } catch (std::exception& e) {  // no memory is left
    error = Str("the emulator failed: ") + e.what();
  }
  if (!error.empty())
    for (auto& l : m.launches)
      for (auto& cl : l->clusters)
        for (auto& t : cl->ctas)
          for (auto& w : t->warps) l->executed += w.executed;
  snprintf(out, n, "%s", json(m, error).c_str());
  return !error.empty();
}
