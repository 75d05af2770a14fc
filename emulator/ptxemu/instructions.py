"""The list of modelled instructions, with their modifiers, types and operands.

A form of an instruction has names, modifiers, types and operands. A modifier is a regular
expression. It may occur once; with `+` it must. The types, at the end of the instruction, are one
regular expression. `operands.py` defines the words for operands. In these words T is the last type,
U the type before it, 2T the type of twice T's width; [m] is an address in the state space of the
modifiers; `u64?L2::cache_hint` is an operand that the modifier L2::cache_hint requires.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .operands import Operand, problem, twice

INT, BITS, FLOAT = "[us](16|32|64)", "b(16|32|64)", "f16|bf16|f32|f64"
HALVES = "f16x2|bf16x2"
ANY = f"{INT}|{BITS}|f32|f64"
MEMORY = f"{ANY}|[bus]8|b128"
CONVERTED = "[us](8|16|32|64)"
FP8, FP4, SCALE = "e4m3x2|e5m2x2", "e2m1x2", "ue8m0x2"
SCOPE = "cta|cluster|gpu|sys"
ORDER = {order: f"weak|relaxed|{order}|volatile mmio {SCOPE}" for order in ("acquire", "release")}
ATOMIC_ORDER = f"relaxed|acquire|release|acq_rel {SCOPE}"
SHARED = "shared(::cta|::cluster)?"
SPACE = f"global|{SHARED}|local|param(::entry)?|const"
VECTOR, VECTORS = "v[248]", f"{ANY}|[bus]8"
HINT = "u64?L2::cache_hint"
CACHE = r"ca|cg|cs|cv|wb|wt|lu nc L1::\w+ L2::evict_\w+ L2::\d+B L2::cache_hint"
OWN_SHARED = "shared(::cta)?"
ARRIVAL, WAIT = f"release|relaxed cta|cluster {SHARED}", f"acquire|relaxed cta|cluster {OWN_SHARED}"
BY_BARRIER, BY_GROUP = "+mbarrier::complete_tx::bytes", "+bulk_group"
TOGETHER, PAIR = "+sync +aligned", "+cta_group::[12]"
REDUCTION = "+(add|min|max|and|or|xor|inc|dec)"
TEST, UNSIGNED_TEST = "+(eq|ne|lt|le|gt|ge)", "+(lo|ls|hi|hs)"
FLOAT_TEST = "+(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)"
BOTH = "+(and|or|xor)"

# --- operands that depend on the modifiers ------------------------------------------------------


def _values(parts: Sequence[str], each: str, element: str) -> str:
    """Return the word for a value, or for a vector of elements if a modifier has a count."""
    count = next((part[1:] for part in parts if re.fullmatch(VECTOR, part)), "")
    written = "=" * (each[0] == "=")
    return f"{written}{{{count}*{element}}}" if count else each


def _load(parts: Sequence[str]) -> str:
    return f"{_values(parts, '=~T', '~T_')} [m] {HINT}"


def _store(parts: Sequence[str]) -> str:
    return f"[m] {_values(parts, '~T', '~T')} {HINT}"


def _store_async(parts: Sequence[str]) -> str:
    return f"[s] {_values(parts, 'T', 'T')} [s]"


def _reduce(parts: Sequence[str]) -> str:
    return f"[m] {_values(parts, 'T', 'T')} {HINT}"


def _atomic(parts: Sequence[str]) -> str:
    return f"{_values(parts, '=T_', 'T_')} {_reduce(parts)}"


def _matrices(parts: Sequence[str]) -> str:
    """Return the registers of ldmatrix and stmatrix, one for each 8x8 matrix."""
    return next(f"{{{part[1:]}*b32}}" for part in parts if re.fullmatch("x[124]", part))


def _cells(parts: Sequence[str]) -> str:
    """Return the registers of tcgen05.ld and st: those of the shape, times the repetition."""
    each = 2 if "16x128b" in parts else 4 if "16x256b" in parts else 1
    times = next(int(part[1:]) for part in parts if re.fullmatch(r"x\d+", part))
    return f"{{{each * times}*b32}}"


def _times(most: int) -> str:
    """Return the repetitions of a shape: powers of two up to `most`."""
    return f"x({'|'.join(str(1 << i) for i in range(most.bit_length()))})"


def _keep_lanes(parts: Sequence[str]) -> str:
    """Return the operands of tcgen05.mma, with an optional mask of lanes that are not written."""
    masks = "{8*b32}" if "cta_group::2" in parts else "{4*b32}"
    return f"[t] u64/[t] u64 u32 pred || [t] u64/[t] u64 u32 {masks} pred"


def _wgmma(parts: Sequence[str]) -> str:
    """Return the operands of wgmma: accumulators; A as a descriptor or as registers; B; predicate;
    signs; for 16-bit types the operands' order."""
    columns = next(int(part[4:].split("k")[0]) for part in parts if part.startswith("m64n"))
    sums = f"={{{columns // (4 if parts[-3] == 'f16' else 2)}*b32}}"
    order = parts[-1] in ("f16", "bf16")
    as_registers = f"{sums} {{4*b32}} u64 pred # #" + " #" * order
    return f"{sums} u64 u64 pred # #{' # #' * order} || {as_registers}"


ROWS_COLUMNS = f"m64n({'|'.join(map(str, range(8, 257, 8)))})"
Form = tuple[str, str, str, str | Callable[[Sequence[str]], str]]
ARITHMETIC: list[Form] = [
    ("add sub", "", INT, "=T T T"),
    ("add sub mul", "rn ftz", "f16|f32|f16x2|f32x2", "=T T T"),
    ("add sub mul", "rn", "bf16|f64|bf16x2", "=T T T"),
    ("add", "rn ftz +sat", "f32|f16", "=T T T"),
    ("add sub", "rn", r"f32\.(f16|bf16)", "=U T U"),
    ("mul", "+(lo|hi)", INT, "=T T T"),
    ("mul", "+wide", "[us](16|32)", "=2T T T"),
    ("mad", "+(lo|hi)", INT, "=T T T T"),
    ("mad", "+wide", "[us](16|32)", "=2T T T 2T"),
    ("mad", "+rn ftz", "f32", "=T T T T"),
    ("mad", "+rn", "f64", "=T T T T"),
    ("fma", "+rn ftz", "f16|f32|f16x2|f32x2", "=T T T T"),
    ("fma", "+rn", "bf16|f64|bf16x2", "=T T T T"),
    ("fma", "+rn ftz +relu", "f16", "=T T T T"),
    ("fma", "+rn +relu", "bf16", "=T T T T"),
    ("fma", "+(rz|rm|rp) ftz", "f32", "=T T T T"),
    ("fma", "+rn", r"f32\.(f16|bf16)", "=U T T U"),
    ("div rem", "", INT, "=T T T"),
    ("div", "+(rn|full|approx) ftz", "f32", "=T T T"),
    ("div", "+rn", "f64", "=T T T"),
    ("min max", "", f"{INT}|f64", "=T T T"),
    ("min max", "+relu", "s32", "=T T T"),
    ("min max", "ftz NaN", "f32", "=T T T || =T T T T"),
    ("min max", "ftz NaN", "f16|f16x2", "=T T T"),
    ("min max", "NaN", "bf16|bf16x2", "=T T T"),
    ("neg abs", "", f"s16|s32|s64|{FLOAT}|{HALVES}", "=T T"),
    ("neg abs", "+ftz", "f32|f16|f16x2", "=T T"),
    ("and or xor", "", f"{BITS}|pred", "=T T T"),
    ("not", "", f"{BITS}|pred", "=T T"),
    ("shl", "", BITS, "=T T u32"),
    ("shr", "", f"{BITS}|{INT}", "=T T u32"),
    ("shf", "+(l|r) +(wrap|clamp)", "b32", "=T T T u32"),
    ("popc clz", "", "b32|b64", "=u32 T"),
    ("brev", "", "b32|b64", "=T T"),
    ("bfind", "shiftamt", "[us](32|64)", "=u32 T"),
    ("bfe", "", "[us](32|64)", "=T T u32 u32"),
    ("bfi", "", "b32|b64", "=T T T u32 u32"),
    ("prmt", "", "b32", "=T T T T"),
    ("lop3", "", "b32", "=T T T T #"),
    ("selp", "", ANY, "=T T T pred"),
    ("copysign", "", "f32", "=T T T"),
    ("setp", TEST, INT, "=pred_|?=pred_ T T"),
    ("setp", f"{TEST} {BOTH}", INT, "=pred_|?=pred_ T T pred"),
    ("setp", UNSIGNED_TEST, "u(16|32|64)", "=pred_|?=pred_ T T"),
    ("setp", f"{UNSIGNED_TEST} {BOTH}", "u(16|32|64)", "=pred_|?=pred_ T T pred"),
    ("setp", "+(eq|ne)", BITS, "=pred_|?=pred_ T T"),
    ("setp", f"+(eq|ne) {BOTH}", BITS, "=pred_|?=pred_ T T pred"),
    ("setp", f"{FLOAT_TEST} ftz", "f32", "=pred_|?=pred_ T T"),
    ("setp", f"{FLOAT_TEST} {BOTH} ftz", "f32", "=pred_|?=pred_ T T pred"),
    ("setp", FLOAT_TEST, "f64", "=pred_|?=pred_ T T"),
    ("setp", f"{FLOAT_TEST} {BOTH}", "f64", "=pred_|?=pred_ T T pred"),
    ("setp", FLOAT_TEST, "f16|bf16", "=pred_ T T"),
    ("setp", f"{FLOAT_TEST} {BOTH}", "f16|bf16", "=pred_ T T pred"),
    ("set", TEST, rf"([us]32|f32)\.{INT}", "=U T T"),
    ("set", UNSIGNED_TEST, r"([us]32|f32)\.u(16|32|64)", "=U T T"),
    ("set", "+(eq|ne)", rf"([us]32|f32)\.{BITS}", "=U T T"),
    ("set", f"{FLOAT_TEST} ftz", r"([us]32|f32)\.f32", "=U T T"),
    ("set", FLOAT_TEST, r"([us]32|f32)\.f64", "=U T T"),
    ("sqrt rcp", "+(rn|approx) ftz", "f32", "=T T"),
    ("sqrt rcp", "+rn", "f64", "=T T"),
    ("rcp", "+approx +ftz", "f64", "=T T"),
    ("rsqrt ex2 lg2 sin cos", "+approx ftz", "f32", "=T T"),
    ("tanh", "+approx", "f32", "=T T"),
    ("mov", "", "pred", "=T T"),
    ("mov", "", f"{INT}|f32|f64", "=T &T"),
    ("mov", "", "b16", "=T &T/{2*b8} || ={2*b8_} T"),
    ("mov", "", "b32", "=T &T/{2*b16}/{4*b8} || ={2*b16_}/={4*b8_} T"),
    ("mov", "", "b64", "=T &T/{2*b32}/{4*b16} || ={2*b32_}/={4*b16_} T"),
    ("mov", "", "b128", "=T T/{2*b64}/{4*b32} || ={2*b64_}/={4*b32_} T"),
]
CONVERSIONS: list[Form] = [
    ("cvt", "sat", rf"{CONVERTED}\.{CONVERTED}", "=~U ~T"),
    ("cvt", "+(rn|rz|rm|rp)", rf"(f32|f64)\.{CONVERTED}", "=U ~T"),
    ("cvt", "+(rn|rz)", rf"(f16|bf16)\.{CONVERTED}", "=U ~T"),
    ("cvt", "+(rni|rzi|rmi|rpi) ftz sat", rf"{CONVERTED}\.f32", "=~U T"),
    ("cvt", "+(rni|rzi|rmi|rpi) sat", rf"{CONVERTED}\.(f16|bf16|f64)", "=~U T"),
    ("cvt", "rni|rzi|rmi|rpi ftz sat", r"f32\.f32", "=U T"),
    ("cvt", "rni|rzi|rmi|rpi", r"f64\.f64|f16\.f16", "=U T"),
    ("cvt", "ftz sat", r"f32\.f16", "=U T"),
    ("cvt", "", r"f32\.bf16", "=U T"),
    ("cvt", "ftz", r"f64\.f32", "=U T"),
    ("cvt", "", r"f64\.(f16|bf16)", "=U T"),
    ("cvt", "+(rn|rz|rm|rp) ftz sat", r"f32\.f64", "=U T"),
    ("cvt", "+(rn|rz) ftz sat|satfinite|relu", r"f16\.f32", "=U T"),
    ("cvt", "+(rn|rz) satfinite|relu", r"bf16\.f32", "=U T"),
    ("cvt", "+(rn|rz)", r"(f16|bf16)\.f64|bf16\.f16|f16\.bf16", "=U T"),
    ("cvt", "+(rn|rz) satfinite relu", rf"({HALVES})\.f32", "=U T T"),
    ("cvt", "+rn +satfinite relu", rf"({FP8})\.f32", "=U T T"),
    ("cvt", "+rn +satfinite relu", rf"({FP8})\.({HALVES})", "=U T"),
    ("cvt", "+rn relu", rf"({HALVES})\.({FP8}|{FP4})", "=U T"),
    ("cvt", "+rn +satfinite", rf"({FP4})\.f32", "=U T T"),
    ("cvt", "+(rz|rp) satfinite", rf"({SCALE})\.f32", "=U T T"),
    ("cvt", "+rn", rf"({HALVES})\.({SCALE})", "=U T"),
    ("cvt", "+(rn|rna|rz)", r"tf32\.f32", "=U T"),
]
MEMORY_ACCESSES: list[Form] = [
    ("ld", f"{ORDER['acquire']} {SPACE} {CACHE}", MEMORY, _load),
    ("ld", f"{ORDER['acquire']} {SPACE} {CACHE} +v[24]", VECTORS, _load),
    ("ld", f"{ORDER['acquire']} {SPACE} {CACHE} +v8", "[busf]32", _load),
    ("ldu", "global", MEMORY, _load),
    ("ldu", "global +v[24]", VECTORS, _load),
    ("st", f"{ORDER['release']} {SPACE} {CACHE}", MEMORY, _store),
    ("st", f"{ORDER['release']} {SPACE} {CACHE} +v[24]", VECTORS, _store),
    ("st", f"{ORDER['release']} {SPACE} {CACHE} +v8", "[busf]32", _store),
    ("st.async", f"weak {SHARED} {BY_BARRIER} {VECTOR}", "[bus](32|64)|f32|f64", _store_async),
    *(
        (name, f"{ATOMIC_ORDER} {SPACE} L2::cache_hint {operation}", types, operands)
        for name, operands in (("atom", _atomic), ("red", _reduce))
        for operation, types in (
            ("+add noftz", f"u32|s32|u64|{FLOAT}|{HALVES}"),
            ("+(min|max) noftz", f"[us](32|64)|f16|bf16|{HALVES}"),
            (f"+(add|min|max) +{VECTOR} noftz", f"f32|f16|bf16|{HALVES}"),
            ("+(and|or|xor)", "b32|b64"),
            ("+(inc|dec)", "u32"),
        )
    ),
    ("atom", f"{ATOMIC_ORDER} {SPACE} L2::cache_hint +exch", "b32|b64", f"=T_ [m] T {HINT}"),
    ("atom", f"{ATOMIC_ORDER} {SPACE} L2::cache_hint +cas", BITS, f"=T_ [m] T T {HINT}"),
    ("cvta", f"to +({SPACE})", "u32|u64", "=T &T"),
    ("isspacep", f"+({SPACE})", "", "=pred b64"),
    ("mapa", "shared::cluster", "u32|u64", "=T &T u32"),
    ("getctarank", "shared::cluster", "u32|u64", "=u32 &T"),
    ("prefetch", r"+(L1|L2|L2::\w+) global|local", "", "[m]"),
    ("prefetch", "+tensormap param|const", "", "[m]"),
    ("prefetchu", "+L1", "", "[g]"),
    ("discard", "global +L2", "", "[g] #"),
    ("applypriority", "global +L2::evict_normal", "", "[g] #"),
    ("createpolicy.fractional", r"+L2::evict_\w+ L2::evict_\w+", "b64", "=u64 || =u64 #f/f32"),
    ("createpolicy.range", r"global +L2::evict_\w+ L2::evict_\w+", "b64", "=u64 [g] u32 u32"),
    ("createpolicy.cvt", "+L2", "b64", "=u64 u64"),
    ("ldmatrix", f"{TOGETHER} +m8n8 +x[124] trans {SHARED}", "b16",
     lambda parts: f"={_matrices(parts)} [m]"),
    ("stmatrix", f"{TOGETHER} +m8n8 +x[124] trans {SHARED}", "b16",
     lambda parts: f"[m] {_matrices(parts)}"),
]  # fmt: skip
CONTROL: list[Form] = [
    ("bra", "uni", "", "label"),
    ("brx.idx", "uni", "", "u32 label"),
    ("call.vprintf", "", "", "[g] [g]"),
    ("ret", "uni", "", ""),
    ("exit trap", "", "", ""),
    ("elect", "+sync", "", "=b32_|=pred u32"),
    ("shfl", "+sync +(up|down|bfly|idx)", "b32", "=T|?=pred T u32 u32 u32"),
    ("vote", "+sync +(all|any|uni)", "pred", "=T pred u32"),
    ("vote", "+sync +ballot", "b32", "=T pred u32"),
    ("match", "+any +sync", "b32|b64", "=u32 T u32"),
    ("redux", "+sync +(add|min|max)", "[us]32", "=T T u32"),
    ("redux", "+sync +(and|or|xor)", "b32", "=T T u32"),
    ("redux", "+sync +(min|max) abs", "f32", "=T T u32"),
    ("activemask", "", "b32", "=T"),
    ("bar barrier", "cta +sync aligned", "", "u32 || u32 u32"),
    ("bar barrier", "cta +arrive aligned", "", "u32 u32"),
    ("bar barrier", "cta +red +popc aligned", "u32", "=T u32 pred || =T u32 u32 pred"),
    ("bar barrier", "cta +red +(and|or) aligned", "pred", "=T u32 pred || =T u32 u32 pred"),
    ("bar.warp", "+sync", "", "u32"),
    ("barrier.cluster", "+arrive release|relaxed aligned", "", ""),
    ("barrier.cluster", "+wait acquire aligned", "", ""),
    ("mbarrier.init", OWN_SHARED, "b64", "[m] u32"),
    ("mbarrier.inval", OWN_SHARED, "b64", "[m]"),
    ("mbarrier.arrive mbarrier.arrive_drop", ARRIVAL, "b64", "=T_ [m] || =T_ [m] u32"),
    ("mbarrier.arrive mbarrier.arrive_drop", f"+expect_tx {ARRIVAL}", "b64", "=T_ [m] u32"),
    ("mbarrier.expect_tx mbarrier.complete_tx", f"relaxed cta|cluster {SHARED}", "b64", "[m] u32"),
    ("mbarrier.test_wait", WAIT, "b64", "=pred [m] b64"),
    ("mbarrier.test_wait", f"+parity {WAIT}", "b64", "=pred [m] u32"),
    ("mbarrier.try_wait", WAIT, "b64", "=pred [m] b64 || =pred [m] b64 u32"),
    ("mbarrier.try_wait", f"+parity {WAIT}", "b64", "=pred [m] u32 || =pred [m] u32 u32"),
    ("fence", rf"sc|acq_rel|acquire|release +({SCOPE}) sync_restrict::\S+", "", ""),
    ("membar", "+(cta|gl|sys)", "", ""),
    ("fence.mbarrier_init", "+release +cluster", "", ""),
    ("fence.proxy.async", f"global|{SHARED}", "", ""),
    ("fence.proxy.async::generic", rf"+(acquire|release) +sync_restrict::\S+ +({SCOPE})", "", ""),
    ("fence.proxy.alias", "", "", ""),
    ("fence.proxy.tensormap::generic", f"+release +({SCOPE})", "", ""),
    ("fence.proxy.tensormap::generic", f"+acquire +({SCOPE})", "", "[g] #"),
    ("griddepcontrol", "+(launch_dependents|wait)", "", ""),
    ("setmaxnreg", f"+(inc|dec) {TOGETHER}", "u32", "#"),
    ("nanosleep", "", "u32", "T"),
    ("pmevent", "mask", "", "#"),
    ("clusterlaunchcontrol.try_cancel",
     f"+async {SHARED} {BY_BARRIER} multicast::cluster::all", "b128", "[s] [s]"),
    ("clusterlaunchcontrol.query_cancel", "+is_canceled", r"pred\.b128", "=U T"),
    ("clusterlaunchcontrol.query_cancel", "+get_first_ctaid +v4", r"b32\.b128", "={4*b32_} T"),
    ("clusterlaunchcontrol.query_cancel", "+get_first_ctaid::[xyz]", r"b32\.b128", "=U T"),
]  # fmt: skip
COPIES: list[Form] = [
    ("cp.async", r"+(ca|cg) +shared(::cta)? +global L2::cache_hint L2::\d+B", "",
     f"[s] [g] # {HINT} || [s] [g] # u32 {HINT}"),
    ("cp.async.commit_group cp.async.wait_all", "", "", ""),
    ("cp.async.wait_group", "", "", "#"),
    ("cp.async.mbarrier.arrive", f"noinc {SHARED}", "b64", "[m]"),
    ("cp.async.bulk.commit_group", "", "", ""),
    ("cp.async.bulk.wait_group", "read", "", "#"),
    ("cp.async.bulk.prefetch", "+L2 +global L2::cache_hint", "", f"[g] u32 {HINT}"),
    ("cp.async.bulk.shared::cluster.global cp.async.bulk.shared::cta.global",
     f"{BY_BARRIER} multicast::cluster L2::cache_hint", "",
     f"[s] [g] u32 [s] u16?multicast::cluster {HINT}"),
    ("cp.async.bulk.global.shared::cta", f"{BY_GROUP} L2::cache_hint", "", f"[g] [s] u32 {HINT}"),
    ("cp.async.bulk.shared::cluster.shared::cta", BY_BARRIER, "", "[s] [s] u32 [s]"),
    ("cp.reduce.async.bulk.global.shared::cta", f"{BY_GROUP} L2::cache_hint +add noftz",
     f"u32|s32|u64|{FLOAT}", f"[g] [s] u32 {HINT}"),
    ("cp.reduce.async.bulk.global.shared::cta", f"{BY_GROUP} L2::cache_hint +(min|max)",
     "[us](32|64)|f16|bf16", f"[g] [s] u32 {HINT}"),
    ("cp.reduce.async.bulk.global.shared::cta", f"{BY_GROUP} L2::cache_hint +(inc|dec)", "u32",
     f"[g] [s] u32 {HINT}"),
    ("cp.reduce.async.bulk.shared::cluster.shared::cta", f"{BY_BARRIER} +(add|min|max)",
     "[us]32", "[s] [s] u32 [s]"),
    ("cp.reduce.async.bulk.shared::cluster.shared::cta", f"{BY_BARRIER} +(inc|dec)", "u32",
     "[s] [s] u32 [s]"),
    ("cp.reduce.async.bulk.shared::cluster.shared::cta", f"{BY_BARRIER} +add", "u64",
     "[s] [s] u32 [s]"),
    ("tensormap.replace", f"+tile +global_address {SPACE} +b1024", "b64", "[m] T"),
    ("tensormap.replace", f"+tile +rank {SPACE} +b1024", "b32", "[m] T"),
    ("tensormap.replace", f"+tile +(box_dim|global_dim) {SPACE} +b1024", "b32", "[m] # T"),
    ("tensormap.replace", f"+tile +global_stride {SPACE} +b1024", "b64", "[m] # T"),
    ("tensormap.cp_fenceproxy",
     f"+global +shared::cta +tensormap::generic +release +({SCOPE}) {TOGETHER}", "", "[g] [s] #"),
]  # fmt: skip
TENSOR_CORES: list[Form] = [
    ("tcgen05.alloc", f"{PAIR} {TOGETHER} {SHARED}", "b32", "[m] u32"),
    ("tcgen05.dealloc", f"{PAIR} {TOGETHER}", "b32", "u32 u32"),
    ("tcgen05.relinquish_alloc_permit", f"{PAIR} {TOGETHER}", "", ""),
    ("tcgen05.wait::ld tcgen05.wait::st", TOGETHER, "", ""),
    ("tcgen05.fence::before_thread_sync tcgen05.fence::after_thread_sync", "", "", ""),
    ("tcgen05.cp", f"{PAIR} +(128x256b|(128|64|32)x128b) warpx4|warpx2::02_13|warpx2::01_23", "",
     "[t] u64"),
    ("tcgen05.commit", f"{PAIR} +mbarrier::arrive::one {SHARED} multicast::cluster", "b64",
     "[m] u16?multicast::cluster"),
    *(
        form
        for shapes, most in (("32x32b|16x64b", 128), ("16x128b", 64), ("16x256b", 32))
        for form in (
            ("tcgen05.ld", f"{TOGETHER} +({shapes}) +{_times(most)} pack::16b", "b32",
             lambda parts: f"={_cells(parts)} [t]"),
            ("tcgen05.st", f"{TOGETHER} +({shapes}) +{_times(most)} unpack::16b", "b32",
             lambda parts: f"[t] {_cells(parts)}"),
        )
    ),
    ("tcgen05.ld", f"{TOGETHER} +16x32bx2 +{_times(128)} pack::16b", "b32",
     lambda parts: f"={_cells(parts)} [t] #"),
    ("tcgen05.st", f"{TOGETHER} +16x32bx2 +{_times(128)} unpack::16b", "b32",
     lambda parts: f"[t] # {_cells(parts)}"),
    ("tcgen05.mma", rf"{PAIR} +kind::(f16|tf32|f8f6f4|i8) collector::a::\w+", "", _keep_lanes),
    ("tcgen05.mma",
     rf"{PAIR} +kind::(mxf8f6f4|mxf4|mxf4nvf4) +block_scale (scale_vec::[124]X|block16|block32)"
     r" collector::a::\w+", "", "[t] u64/[t] u64 u32 [t] [t] pred"),
    ("wgmma.fence wgmma.commit_group", TOGETHER, "", ""),
    ("wgmma.wait_group", TOGETHER, "", "#"),
    ("wgmma.mma_async", f"{TOGETHER} +{ROWS_COLUMNS}k16",
     r"(f32|f16)\.f16\.f16|f32\.bf16\.bf16", _wgmma),
    ("wgmma.mma_async", f"{TOGETHER} +{ROWS_COLUMNS}k8", r"f32\.tf32\.tf32", _wgmma),
    ("wgmma.mma_async", f"{TOGETHER} +{ROWS_COLUMNS}k32",
     r"(f32|f16)\.(e4m3|e5m2)\.(e4m3|e5m2)", _wgmma),
]  # fmt: skip


def _boxes() -> Iterator[Form]:
    """Yield copies of a tensor map's boxes by rank; four rows take a column and four rows."""
    for n in range(1, 6):
        load = f"multicast::cluster cta_group::[12] L2::cache_hint {BY_BARRIER}"
        loaded = f"[s] [map{{}}] [s] u16?multicast::cluster {HINT}"
        copy = f"cp.async.bulk.tensor.{n}d"
        for space in ("shared::cluster", "shared::cta"):
            yield f"{copy}.{space}.global", f"{load} tile", "", loaded.format(n)
            if n == 2:
                yield f"{copy}.{space}.global", f"{load} +tile::gather4", "", loaded.format(5)
        store = f"{BY_GROUP} L2::cache_hint"
        yield f"{copy}.global.shared::cta", f"{store} tile", "", f"[map{n}] [s] {HINT}"
        if n == 2:
            yield f"{copy}.global.shared::cta", f"{store} +tile::scatter4", "", f"[map5] [s] {HINT}"
        reduced = f"cp.reduce.async.bulk.tensor.{n}d.global.shared::cta"
        yield reduced, f"{store} {REDUCTION} tile", "", f"[map{n}] [s] {HINT}"
        prefetched = f"cp.async.bulk.prefetch.tensor.{n}d"
        yield prefetched, "+L2 +global tile L2::cache_hint", "", f"[map{n}] {HINT}"


class _Form(NamedTuple):
    modifiers: list[str]
    types: str
    operands: str | Callable[[Sequence[str]], str]


FORMS: dict[str, list[_Form]] = {}
for _names, _modifiers, _types, _operands in (
    *ARITHMETIC, *CONVERSIONS, *MEMORY_ACCESSES, *CONTROL, *COPIES, *TENSOR_CORES, *_boxes(),
):  # fmt: skip
    for _name in _names.split():
        FORMS.setdefault(_name, []).append(_Form(_modifiers.split(), _types, _operands))


# --- the check ----------------------------------------------------------------------------------


def _types_of(form: _Form, parts: list[str]) -> int | None:
    """Return the number of an instruction's last parts that are its types; None if none fit."""
    if not form.types:
        return 0
    counts = (n for n in (1, 2, 3) if re.fullmatch(form.types, ".".join(parts[-n:])))
    return next(counts, None)


def _is_form(form: _Form, parts: list[str]) -> bool:
    """True if the parts after an instruction's name are modifiers and types of a form."""
    types = _types_of(form, parts)
    if types is None:
        return False
    left = list(form.modifiers)
    for part in parts[: len(parts) - types]:
        known = (m for m in left if re.fullmatch(m.removeprefix("+"), part))
        if not (modifier := next(known, None)):
            return False
        left.remove(modifier)
    return not any(modifier.startswith("+") for modifier in left)


def _operands_of(form: _Form, parts: list[str]) -> str:
    """Return the words for the operands, with modifiers and types substituted."""
    words = form.operands if isinstance(form.operands, str) else form.operands(parts)
    present = []
    for word in words.split():
        word, _, condition = word.partition("?") if "|?" not in word else (word, "", "")
        if not condition or condition in parts:
            present.append(word)
    shared = any(re.fullmatch(SHARED, part) for part in parts)
    text = " ".join(present).replace("[m]", "[s]" if shared else "[g]")
    if "2T" in text:
        text = text.replace("2T", twice(parts[-1]))
    for letter, kind in zip("TU", reversed(parts), strict=False):
        text = text.replace(letter, kind)
    return text


@functools.lru_cache(maxsize=1 << 14)
def fault(op: str, operands: tuple[Operand, ...]) -> str:
    """Return the fault of an instruction, or "".

    Args:
        op: the instruction's name with modifiers and types, as in "add.u32".
        operands: the instruction's operands.
    """
    name = op  # and then its longest beginning that names an instruction
    while name and name not in FORMS:
        name = name.rpartition(".")[0]
    if not name:
        return f"instruction not modelled: {op}"
    parts = op[len(name) :].split(".")[1:]
    forms = [form for form in FORMS[name] if _is_form(form, parts)]
    if not forms:
        return f"modifiers or types not modelled: {op}"
    problems = [problem(operands, _operands_of(form, parts)) for form in forms]
    return "" if "" in problems else f"{op}: {problems[0]}"
