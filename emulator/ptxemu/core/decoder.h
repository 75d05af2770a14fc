// Finds the handler of each instruction. instructions.py has refused all that are not modelled.
#pragma once
#include "numerics.h"
#include "ops_arithmetic.h"
#include "ops_barrier.h"
#include "ops_clc.h"
#include "ops_control.h"
#include "ops_copy.h"
#include "ops_memory.h"
#include "ops_tcgen05.h"
#include "ops_warp.h"
#include "ops_wgmma.h"
#include "registers.h"
#include "types.h"

static std::vector<Str> split(const Str& s, char d) {
  std::vector<Str> v;
  size_t p = 0;
  for (;;) {
    size_t q = s.find(d, p);
    v.push_back(s.substr(p, q - p));
    if (q == Str::npos) return v;
    p = q + 1;
  }
}
static int space_of(const Instr& I) {
  for (auto& p : I.parts) {
    if (p == "global") return 1;
    if (p == "shared" || p == "shared::cta" || p == "shared::cluster") return 2;
    if (p == "local") return 3;
    if (p == "param" || p == "const" || p == "param::entry") return 4;
  }
  return 0;
}
static int vec_of(const Instr& I) {
  return I.has("v2") ? 2 : I.has("v4") ? 4 : I.has("v8") ? 8 : 1;
}
static int cta_group_of(const Instr& I) {
  return I.has("cta_group::2") ? 2 : I.has("cta_group::1") ? 1 : 0;
}
static int atom_op_of(const Instr& I) {
  static const char* n[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
  for (auto& p : I.parts)
    for (int i = 0; i < 10; i++)
      if (p == n[i]) return i;
  return -1;
}
static int rounding_of(const Instr& I) {
  static const char* n[] = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna"};
  for (auto& p : I.parts)
    for (int i = 0; i < 9; i++)
      if (p == n[i]) return i;
  return -1;
}
static Sem sem_of(const Instr& I) {
  return I.has("acq_rel")                                         ? ACQ_REL
         : I.has("acquire")                                       ? ACQUIRE
         : I.has("release")                                       ? RELEASE
         : I.has("relaxed") || I.has("volatile") || I.has("mmio") ? RELAXED
                                                                  : WEAK;
}
static Scope scope_of(const Instr& I) {
  return I.has("cta") ? SCOPE_CTA : I.has("cluster") ? SCOPE_CLUSTER : SCOPE_GPU;
}
static Handler decode(Instr& I) {
  auto& P = I.parts;
  const Str& b = P[0];
  Ty t = parse_type(P.back());
  I.i0 = t;
  if (b == "add" || b == "sub" || b == "mul" || b == "mad" || b == "fma" || b == "div" ||
      b == "min" || b == "max") {
    if (b == "fma" && t == T_F32 && (I.has("rm") || I.has("rp") || I.has("rz"))) {
      I.i1 = I.has("rm") ? FE_DOWNWARD : I.has("rp") ? FE_UPWARD : FE_TOWARDZERO;
      return h_fma_directed;
    }
    if ((t == T_F16 || t == T_BF16) && I.has("f32")) {  // sm_100: some operands are narrower
      I.i1 = b == "sub" ? -1 : 1;
      return b == "fma" ? h_fma_mixed : h_add_mixed;
    }
    I.i1 = b == "add"                 ? I.has("sat")
           : b == "fma"               ? I.has("relu")
           : b == "min" || b == "max" ? I.has("NaN") | I.has("relu") << 1
           : I.has("hi")              ? 1
           : I.has("wide")            ? 2
                                      : 0;
    if (b == "mad" && t >= T_F32) return h_fma;
    return b == "add"   ? h_add
           : b == "sub" ? h_sub
           : b == "mul" ? h_mul
           : b == "mad" ? h_mad
           : b == "fma" ? h_fma
           : b == "div" ? h_div
           : b == "min" ? h_min
                        : h_max;
  }
  if (b == "rem") return h_rem;
  if (b == "neg") return h_neg;
  if (b == "abs") return h_abs;
  if (b == "and" || b == "or" || b == "xor" || b == "not") {
    I.i0 = b == "and" ? 0 : b == "or" ? 1 : b == "xor" ? 2 : 3;
    I.i1 = t == T_PRED ? 0 : ty_bytes(t);
    return h_logic;
  }
  if (b == "shl" || b == "shr") {
    I.i1 = b == "shr";
    return h_shift;
  }
  if (b == "shf") {
    I.i0 = I.has("r");
    I.i1 = I.has("wrap");
    return h_shf;
  }
  if (b == "popc" || b == "clz" || b == "brev" || b == "bfind") {
    I.i1 = b == "popc" ? 0 : b == "clz" ? 1 : b == "brev" ? 2 : 3;
    I.i2 = I.has("shiftamt");
    return h_bits;
  }
  if (b == "bfe") return h_bfe;
  if (b == "bfi") return h_bfi;
  if (b == "prmt") return h_prmt;
  if (b == "lop3") return h_lop3;
  if (b == "selp") return h_selp;
  if (b == "copysign") return h_copysign;
  if (b == "setp" || b == "set") {
    static const char* n[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                              "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
    static const char* u[] = {"lo", "ls", "hi", "hs"};
    static const int um[] = {2, 3, 4, 5};
    I.i1 = -1;
    for (auto& p : P) {
      for (int i = 0; i < 14; i++)
        if (p == n[i]) I.i1 = i;
      for (int i = 0; i < 4; i++)
        if (p == u[i]) I.i1 = um[i];
      if (p == "and") I.i2 = 1;
      if (p == "or") I.i2 = 2;
      if (p == "xor") I.i2 = 3;
    }
    I.i3 = (int)I.o.size() - 2 - (I.i2 ? 1 : 0);
    if (b == "set") I.i4 = parse_type(P[P.size() - 2]) + 1;
    return h_setp;
  }
  if (b == "sqrt" || b == "rcp" || b == "rsqrt" || b == "ex2" || b == "lg2" || b == "sin" ||
      b == "cos" || b == "tanh") {
    static const char* n[] = {"sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"};
    for (int i = 0; i < 8; i++)
      if (b == n[i]) I.i1 = i;
    I.i2 = I.has("approx") && I.has("ftz");
    return t == T_F32 ? h_math : h_math64;
  }
  if (b == "mov") {
    const Str& s = I.text;
    if (s.find("%clock") != Str::npos || s.find("%globaltimer") != Str::npos) return h_mov_clock;
    I.i0 = t == T_PRED ? 0 : ty_bytes(t);
    return h_mov;
  }
  if (b == "cvt") {
    auto ty = [](const Str& s) -> int {
      if (s == "e4m3x2") return X_E4M3X2;
      if (s == "e5m2x2") return X_E5M2X2;
      if (s == "ue8m0x2") return X_UE8M0X2;
      if (s == "tf32") return X_TF32;
      if (s == "e2m1x2") return X_E2M1X2;
      return parse_type(s);
    };
    I.i0 = ty(P[P.size() - 2]);
    I.i1 = ty(P.back());
    int r = rounding_of(I);
    I.i2 = r < 0 ? (is_float(I.i1) && !is_float(I.i0) && I.i0 < 50 ? 1 : 0) : r;
    I.i3 = (I.has("sat") ? 1 : 0) | (I.has("relu") ? 2 : 0) | (I.has("satfinite") ? 4 : 0);
    return h_cvt;
  }
  if (b == "ld" || b == "ldu" || b == "st") {
    I.i1 = space_of(I);
    I.i2 = vec_of(I);
    I.sem = sem_of(I);
    I.scope = scope_of(I);
    return b != "st" ? h_ld : P[1] == "async" ? h_st_async : h_st;
  }
  if (b == "atom" || b == "red") {
    I.i1 = space_of(I);
    I.i2 = atom_op_of(I);
    I.i3 = vec_of(I);
    I.i4 = b == "red";
    I.sem = std::max(sem_of(I), RELAXED);
    I.scope = scope_of(I);
    return h_atom;
  }
  if (b == "cvta") {
    int s = space_of(I);
    I.i0 = s == 2 ? 2 : s == 3 ? 3 : 0;
    I.i1 = I.has("to");
    return h_cvta;
  }
  if (b == "isspacep") {
    I.i0 = space_of(I);
    return h_isspacep;
  }
  if (b == "mapa") {
    I.i0 = I.has("shared::cluster");
    return h_mapa;
  }
  if (b == "getctarank") return h_getctarank;
  if (b == "bra") return h_bra;
  if (b == "brx") return h_brx;
  if (b == "ret" || b == "exit") return h_exit;
  if (b == "trap") return h_trap;
  if (b == "elect") return h_elect;
  if (b == "shfl") {
    I.i0 = I.has("idx") ? 0 : I.has("up") ? 1 : I.has("down") ? 2 : 3;
    I.i1 = (int)I.o.size() - 4;
    return h_shfl;
  }
  if (b == "vote") {
    I.i0 = I.has("all") ? 0 : I.has("any") ? 1 : I.has("uni") ? 2 : 3;
    return h_vote;
  }
  if (b == "match") return h_match;
  if (b == "redux") {
    I.i2 = atom_op_of(I);
    I.i1 = I.has("abs");
    return h_redux;
  }
  if (b == "activemask") return h_activemask;
  if (b == "bar" || b == "barrier") {
    if (P[1] == "warp") return h_warpsync;
    if (P[1] == "cluster") {
      I.i1 = I.has("aligned");
      I.i0 = !I.has("relaxed");
      return I.has("arrive") ? h_cluster_arrive : h_cluster_wait;
    }
    I.i0 = I.has("arrive");
    I.i1 = b == "bar" || I.has("aligned");
    I.i2 = I.has("red");
    if (I.has("red")) I.i0 = I.has("and") ? 2 : I.has("or") ? 3 : 4;
    return h_bar;
  }
  if (b == "mbarrier") {
    I.i1 = space_of(I);
    const Str& k = P[1];
    if (k == "init") return h_mbar_init;
    if (k == "inval") return h_mbar_inval;
    if (k == "arrive" || k == "arrive_drop") {
      I.i0 = I.has("expect_tx");
      I.i2 = k == "arrive_drop";
      I.sem = I.has("relaxed") ? RELAXED : RELEASE;
      return h_mbar_arrive;
    }
    if (k == "expect_tx" || k == "complete_tx") {
      I.i0 = k == "complete_tx";
      return h_mbar_tx;
    }
    I.i0 = I.has("parity");
    I.i2 = k == "try_wait";
    I.sem = I.has("relaxed") ? RELAXED : ACQUIRE;
    return h_mbar_wait;
  }
  if (b == "fence" && P.size() > 2 && P[1] == "proxy") {
    if (P[2].compare(0, 5, "async")) return h_nop;  // tensormap, alias
    bool shared = I.has("shared::cta") || I.has("shared::cluster") || P[2] != "async";
    I.i0 = shared || !I.has("global");
    I.i1 = !shared;
    return h_proxy_fence;
  }
  if (b == "fence" && P[1] == "mbarrier_init") return h_mbar_init_fence;
  if (b == "fence" || b == "membar") {
    I.scope = scope_of(I);
    return h_fence;
  }
  if (b == "griddepcontrol") return P[1] == "wait" ? h_wait_for_launch : h_trigger;
  if (b == "prefetch" || b == "prefetchu" || b == "nanosleep" || b == "discard" ||
      b == "applypriority" || b == "pmevent")
    return h_nop;
  if (b == "setmaxnreg") return h_setmaxnreg;
  if (b == "createpolicy") return h_zero;
  if (b == "cp" && I.starts("cp.async")) {
    if (I.starts("cp.async.bulk.commit_group")) return h_bulk_commit;
    if (I.starts("cp.async.bulk.wait_group")) {
      I.i0 = I.has("read");
      return h_bulk_wait;
    }
    if (I.starts("cp.async.bulk.prefetch")) return h_nop;
    if (I.starts("cp.async.bulk.tensor")) {
      bool load = I.op.find(".shared") < I.op.find(".global");
      I.i0 = load ? cta_group_of(I) : 0;
      I.i1 = I.has("multicast::cluster");
      I.i2 = I.has("tile::gather4") || I.has("tile::scatter4");
      return load ? h_tma_load : h_tma_store;
    }
    if (I.starts("cp.async.bulk")) {
      size_t g = I.op.find(".global"), s = I.op.find(".shared");
      I.i0 = g == Str::npos ? 2 : s < g ? 0 : 1;
      I.i1 = I.has("multicast::cluster");
      return h_bulk_copy;
    }
    if (I.starts("cp.async.mbarrier.arrive")) {
      I.i0 = I.has("noinc");
      I.i1 = space_of(I);
      return h_cpasync_mbar;
    }
    if (I.starts("cp.async.commit_group")) return h_cpasync_commit;
    if (I.starts("cp.async.wait_group") || I.starts("cp.async.wait_all")) {
      I.i0 = I.starts("cp.async.wait_all");
      return h_cpasync_wait;
    }
    I.i0 = I.has("L2::cache_hint") && I.o.size() == 4;
    return h_cp_async;
  }
  if (b == "cp" && I.starts("cp.reduce.async.bulk")) {
    int op = atom_op_of(I);
    if (I.starts("cp.reduce.async.bulk.tensor")) {
      I.i0 = op + 1;
      return h_tma_store;
    }
    I.i0 = I.op.find(".global") == Str::npos ? 2 : 1;
    I.i2 = op + 1;
    I.i3 = t;
    return h_bulk_copy;
  }
  if (b == "ldmatrix" || b == "stmatrix") {
    I.i0 = I.has("x4") ? 4 : I.has("x2") ? 2 : 1;
    I.i1 = I.has("trans");
    return b == "ldmatrix" ? h_ldmatrix : h_stmatrix;
  }
  if (b == "tcgen05") {
    const Str& k = P[1];
    I.i0 = cta_group_of(I);
    I.i1 = space_of(I);
    if (k == "alloc") return h_tc_alloc;
    if (k == "dealloc") return h_tc_dealloc;
    if (k == "relinquish_alloc_permit") return h_tc_relinquish;
    if (k == "wait::st") return h_tc_wait_st;
    if (k == "wait::ld") return h_tc_wait_ld;
    if (!k.compare(0, 7, "fence::")) {
      I.i0 = k == "fence::before_thread_sync";
      return h_tc_fence;
    }
    if (k == "cp") {
      int bits;
      for (auto& p : P)
        if (sscanf(p.c_str(), "%dx%db", &I.i1, &bits) == 2) I.i2 = bits / 32;
      I.i3 = I.has("warpx4") ? 1 : I.has("warpx2::02_13") ? 2 : I.has("warpx2::01_23") ? 3 : 0;
      return h_tc_cp;
    }
    if (k == "commit") {
      I.i2 = I.has("multicast::cluster");
      return h_tc_commit;
    }
    if (k == "ld" || k == "st") {
      static const char* n[] = {"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"};
      for (int i = 0; i < 5; i++)
        if (I.has(n[i])) I.i0 = i;
      I.i1 = k == "st";
      I.i2 = I.has("pack::16b") || I.has("unpack::16b");
      return h_tc_ldst;
    }
    if (k == "mma") {
      I.i1 = I.has("kind::f16")      ? 0
             : I.has("kind::tf32")   ? 1
             : I.has("kind::f8f6f4") ? 2
                                     : 3;
      if (I.has("block_scale")) {  // kind 4: packed 4-bit operands; i2: elements per scale factor
        bool f4 = I.has("kind::mxf4") || I.has("kind::mxf4nvf4");
        I.i1 = f4 ? 4 : 2;
        int K = f4 ? 64 : 32;
        I.i2 = I.has("block16")         ? 16
               : I.has("block32")       ? 32
               : I.has("scale_vec::4X") ? K / 4
               : I.has("scale_vec::2X") ? K / 2
               : I.has("scale_vec::1X") ? K
                                        : 32;
      }
      return h_tc_mma;
    }
  }
  if (b == "tensormap") {
    if (P[1] == "cp_fenceproxy") return h_tmap_cp;
    static const char* n[] = {"global_address", "rank", "box_dim", "global_dim", "global_stride"};
    I.i1 = space_of(I);
    for (int i = 0; i < 5; i++)
      if (I.has(n[i])) I.i0 = i;
    return h_tmap_replace;
  }
  if (b == "call") return h_vprintf;
  if (b == "wgmma") {
    if (P[1] == "fence") return h_wgmma_fence;
    if (P[1] == "commit_group") return h_wgmma_commit;
    if (P[1] == "wait_group") return h_wgmma_wait;
    auto f = [](const Str& s) -> int {
      return s == "f16"    ? F_F16
             : s == "bf16" ? F_BF16
             : s == "tf32" ? F_TF32
             : s == "e4m3" ? F_E4M3
                           : F_E5M2;
    };
    I.i1 = f(P[P.size() - 2]);
    I.i3 = f(P.back());
    I.i2 = P[P.size() - 3] == "f16";
    for (auto& p : P) sscanf(p.c_str(), "m64n%dk", &I.i0);
    return h_wgmma;
  }
  if (b == "clusterlaunchcontrol") {
    if (P[1] == "try_cancel") {
      I.i0 = I.has("multicast::cluster::all");
      return h_clc_try;
    }
    I.i0 = I.has("is_canceled")          ? 0
           : I.has("get_first_ctaid::x") ? 1
           : I.has("get_first_ctaid::y") ? 2
           : I.has("get_first_ctaid::z") ? 3
                                         : 4;
    return h_clc_query;
  }
  return nullptr;
}

static Opnd parse_opnd(std::vector<Str>& tok, size_t& i) {
  Str t = tok[i++];
  Opnd o;
  o.kind = t[0];
  switch (t[0]) {
    case 'R':
    case 'N': o.slot = atoi(t.c_str() + 1); break;
    case 'A': {
      char* e;
      o.slot = strtol(t.c_str() + 1, &e, 10);
      o.off = strtoll(e + 1, nullptr, 10);
      break;
    }
    case 'L': o.off = atoll(t.c_str() + 1); break;
    case 'V': {
      int n = atoi(t.c_str() + 1);
      for (int k = 0; k < n; k++) o.v.push_back(parse_opnd(tok, i));
      break;
    }
    case 'S': break;
    default: throw EmuError{"bad operand token " + t};
  }
  return o;
}
// PTX ISA, tcgen05: all instructions of a kernel with a cta_group have the same one.
static void check_cta_groups(const Program& p) {
  int group = 0;
  for (auto& I : p.code) {
    int own = I.parts[0] == "tcgen05" ? cta_group_of(I) : 0;
    if (own && group && own != group)
      throw EmuError{fmt("cta_group::1 and cta_group::2 in one kernel: %s (PTX line %d)",
                         I.op.c_str(), I.line)};
    if (own) group = own;
  }
}
// Read a program in the text form of engine.py, one record a line.
static std::unique_ptr<Program> load_program(const char* text) {
  std::unique_ptr<Program> p(new Program);
  std::istringstream in(text);
  Str ln;
  while (std::getline(in, ln)) {
    if (ln.empty()) continue;
    std::istringstream s(ln);
    char k;
    s >> k;
    if (k == 'K')
      s >> p->name >> p->nslots >> p->local_bytes >> p->static_smem;
    else if (k == 'c') {
      int a;
      u64 v;
      s >> a >> v;
      p->consts.push_back({a, v});
    } else if (k == 's') {
      int a, v;
      s >> a >> v;
      p->specials.push_back({a, v});
    } else if (k == 'p') {
      int a, v;
      s >> a >> v;
      p->params.push_back({a, v});
    } else if (k == 'm') {
      int a;
      u32 v;
      s >> a >> v;
      p->smem_syms.push_back({a, v});
    } else if (k == 'i') {
      Instr I;
      int neg, n;
      s >> I.line >> I.op >> I.pred >> neg >> n;
      I.neg = neg;
      std::vector<Str> tok(n);
      for (auto& t : tok) s >> t;
      std::getline(s, I.text);
      for (size_t i = 0; i < tok.size();) I.o.push_back(parse_opnd(tok, i));
      I.parts = split(I.op, '.');
      I.fn = decode(I);
      if (!I.fn)
        throw EmuError{fmt("instruction not modelled: %s (PTX line %d:%s)", I.op.c_str(), I.line,
                           I.text.substr(0, 200).c_str())};
      p->code.push_back(std::move(I));
    }
  }
  check_cta_groups(*p);
  track_registers(*p);
  track_tmem_loads(*p);
  return p;
}
