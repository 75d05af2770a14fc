"""Loads parsed kernels into the core, launches them and reads back the report."""

import contextlib
import ctypes
import functools
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import build, noise, parser
from .memory import Range, ranges, register_tensor

MODES = ("eager", "lazy", "random", "early_loads")
"""Schedules of asynchronous work, in the order of the core's numbers; see README.md."""
DEPENDENTS = ("late", "early", "random")
"""Starts of overlapping launches, in the order of the core's numbers; see `Options`."""
DEFAULT_DEPENDENTS = {"eager": "late", "lazy": "early", "random": "random", "early_loads": "early"}
"""The value of `DEPENDENTS` for each mode, unless the options name one."""
REPORT_BYTES = 1 << 20
MAX_CHAIN = 60
"""The most launches in flight at once; a longer chain runs in parts."""
MAX_THREADS, MAX_CLUSTER, MAX_GRID = 1024, 16, (2**31 - 1, 65535, 65535)
MAX_DYNAMIC_SMEM = 232448


class EmulationError(RuntimeError):
    """The kernel did what hardware would not survive, or what the emulator does not model."""


@dataclass
class Options:
    """Settings of the emulation, shared by all launches.

    Attributes:
        mode: one of `MODES`.
        seed: seed of the mode "random" and of random `dependents`.
        dependents: start of a launch that may overlap its predecessor. "late": after the
            predecessor has ended; "early": as early as allowed, and with priority over the
            predecessor; "random": at a random time, with warps interleaved at random. None: "late"
            in the mode "eager", "random" in "random", else "early".
        max_resident: CTAs that run at the same time.
        clc_resident: clusters that run at the same time, in kernels that take over other clusters'
            work (clusterlaunchcontrol).
        strict: raise an error for an access outside the registered tensors, instead of a hazard.
        check_races: look for unordered accesses and for missing proxy fences.
        poison_races: if TMA loads bytes of a box while other threads write them, load 0xFF instead
            of reporting a race. For boxes that are larger than the part in use: a kernel that uses
            the other bytes gets wrong results.
        hopper_arithmetic: add e4m3 products to float32 sums, and compute ex2.approx.ftz.f32 and
            rcp.approx.ftz.f32, to the bit as a Hopper GPU does (README.md).
        max_instructions: warp instructions after which a launch counts as a livelock.
        hazards_are_errors: raise if a launch reports any hazard.
        verbose: print one line a launch.
    """

    mode: str = os.environ.get("PTXEMU_MODE", "eager")
    seed: int = int(os.environ.get("PTXEMU_SEED", "0"))
    dependents: str | None = None
    max_resident: int = 64
    clc_resident: int = 2
    strict: bool = False
    check_races: bool = True
    poison_races: bool = False
    hopper_arithmetic: bool = False
    max_instructions: int = 4_000_000_000
    hazards_are_errors: bool = False
    verbose: bool = bool(os.environ.get("PTXEMU_VERBOSE"))


options = Options()


@dataclass
class Report:
    """The report of one launch.

    Attributes:
        instructions: executed warp instructions.
        counts: `tma_loaded` and `tma_stored`, bytes of global memory by TMA and bulk copies (a
            multicast counts once); `loaded` and `stored`, bytes of global memory by threads;
            `shared`, bytes of shared memory that threads read and wrote; `mma_flops` of WGMMA and
            tcgen05.mma.
        hazards: dicts with kind, line, count and message.
    """

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    dynamic_smem: int
    seconds: float
    instructions: int
    counts: dict[str, int] = field(default_factory=dict)
    hazards: list[dict] = field(default_factory=list)
    error: str = ""

    def hazard_kinds(self) -> set[str]:
        return {hazard["kind"] for hazard in self.hazards}

    def __str__(self) -> str:
        text = (
            f"{self.kernel[:60]} grid={self.grid} block={self.block} cluster={self.cluster} "
            f"{self.instructions} warp-instructions {self.seconds:.2f}s"
        )
        for h in self.hazards:
            text += f"\n  hazard {h['kind']} x{h['count']} (PTX line {h['line']}): {h['message']}"
        return text


reports: list[Report] = []
"""The reports of all launches, oldest first."""


@functools.cache
def lib() -> ctypes.CDLL:
    """Return the core; the first call may build it."""
    return ctypes.CDLL(str(build.library()))


class _LaunchDesc(ctypes.Structure):
    """LaunchDesc of core/api.h."""

    _fields_ = [
        ("program", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("sm90", ctypes.c_int32),
        ("dyn_smem", ctypes.c_uint64),
        ("param_bytes", ctypes.c_uint64),
        ("params", ctypes.c_void_p),
    ]


class _RunDesc(ctypes.Structure):
    """RunDesc of core/api.h."""

    _fields_ = [
        ("launches", ctypes.c_uint64),
        ("launch", ctypes.POINTER(_LaunchDesc)),
        ("nranges", ctypes.c_uint64),
        ("ranges", ctypes.POINTER(ctypes.c_uint64)),
        ("labels", ctypes.POINTER(ctypes.c_char_p)),
        ("nmaps", ctypes.c_uint64),
        ("maps", ctypes.POINTER(ctypes.c_uint64)),
        ("mode", ctypes.c_int32),
        ("dependents", ctypes.c_int32),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "seed fill max_resident clc_resident strict check_races poison_races "
                "hopper_arithmetic max_instructions"
            ).split()
        ),
    ]


class _Program:
    """A kernel of a PTX text, parsed and decoded."""

    def __init__(self, ptx: str, name: str):
        try:
            module = parser.parse(ptx)
        except parser.PtxError as error:
            raise EmulationError(str(error)) from None
        if name not in module.kernels:
            kernels = ", ".join(module.kernels) or "none"
            raise EmulationError(f"no kernel {name} in the PTX; its kernels: {kernels}")
        self.kernel = module.kernels[name]
        self.is_sm90 = ".target sm_90" in ptx
        self.globals = {
            symbol: ctypes.create_string_buffer(data + b"\0" * 16, len(data) + 16)
            for symbol, data in module.globals.items()
        }
        message = ctypes.create_string_buffer(4096)
        load = lib().ptxemu_load
        load.restype = ctypes.c_void_p
        self.handle = load(self._records().encode(), message, ctypes.c_uint64(len(message)))
        if not self.handle:
            raise EmulationError(message.value.decode())

    def _records(self) -> str:
        """Return the program for `load_program` of core/decoder.h, one record a line."""
        k = self.kernel
        lines = [f"K {k.name} {k.nslots} {k.local_bytes} {k.static_smem}"]
        lines += [f"c {slot} {value}" for value, slot in k.consts.items()]
        lines += [f"s {slot} {index}" for index, slot in k.specials.items()]
        lines += [f"p {slot} {offset}" for offset, slot in k.param_consts.items()]
        lines += [f"m {slot} {offset}" for offset, slot in k.smem_consts.items()]
        for (symbol, offset), slot in k.global_consts.items():
            lines.append(f"c {slot} {ctypes.addressof(self.globals[symbol]) + offset}")
        for i in k.instrs:
            text = i.text.replace("\0", " ")[:400]
            head = f"i {i.line} {i.op} {i.pred} {int(i.neg)} {len(i.operands)}"
            lines.append(" ".join([head, *i.operands, text]))
        return "\n".join(lines)


_program = functools.lru_cache(maxsize=512)(_Program)


def _writable_memory() -> list[int]:
    """Return first and last address of each readable and writable mapping of this process."""
    bounds: list[int] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions = line.split()[:2]
            if "r" in permissions and "w" in permissions:
                first, last = (int(a, 16) for a in addresses.split("-"))
                if bounds and bounds[-1] == first:
                    bounds[-1] = last
                else:
                    bounds += [first, last]
    return bounds


@dataclass
class _Launch:
    """A launch in the stream, with the parameters' values at the time of the call."""

    program: _Program
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    dyn_smem: int
    params: ctypes.Array
    ranges: list[Range]

    def description(self) -> _LaunchDesc:
        return _LaunchDesc(
            self.program.handle,
            tuple(self.grid),
            tuple(self.block),
            tuple(self.cluster),
            self.program.is_sm90,
            self.dyn_smem,
            self.program.kernel.param_bytes,
            ctypes.addressof(self.params),
        )


_chain: list[_Launch] = []
"""The launches in flight: each but the first may start before its predecessor has ended."""
_in_flight_depth = 0


def launch(
    ptx: str,
    name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    cluster: tuple[int, ...],
    dyn_smem: int,
    parameters: Any,
    programmatic: bool,
) -> None:
    """Put a kernel into the stream; `settle` runs it.

    Args:
        ptx: text of the kernel's module.
        name: name of the kernel.
        grid, block, cluster: CTAs of the grid, threads of a CTA, CTAs of a cluster; three numbers
            each.
        dyn_smem: bytes of dynamic shared memory.
        parameters: addresses of the parameters' values: a sequence, or a pointer to the first.
        programmatic: the launch has cudaLaunchAttributeProgrammaticStreamSerialization.

    Raises:
        EmulationError: the launch is not legal, or an earlier launch failed.
    """
    program = _program(ptx, name)
    k = program.kernel
    if k.block and tuple(k.block) != tuple(block):
        raise EmulationError(f"block {block} differs from .reqntid {k.block}")
    legal = math.prod(block) <= MAX_THREADS and math.prod(cluster) <= MAX_CLUSTER
    legal = legal and all(n <= most for n, most in zip(grid, MAX_GRID, strict=True))
    if not legal or 0 in (*grid, *block, *cluster):
        raise EmulationError(f"no launch has grid {grid}, block {block}, cluster {cluster}")
    if dyn_smem > MAX_DYNAMIC_SMEM:
        most = f"at most {MAX_DYNAMIC_SMEM} bytes of dynamic shared memory"
        raise EmulationError(f"expected {most}, found {dyn_smem}")
    params = ctypes.create_string_buffer(k.param_bytes + 16)
    for i, (_, offset, size) in enumerate(k.params):
        ctypes.memmove(ctypes.addressof(params) + offset, parameters[i], size)
    legal_ranges = list(ranges.values())
    for symbol, data in program.globals.items():
        first = ctypes.addressof(data)
        legal_ranges.append(Range(first, first + len(data), symbol, data))
    if not programmatic or len(_chain) == MAX_CHAIN:
        _run_chain()
    _chain.append(_Launch(program, grid, block, cluster, dyn_smem, params, legal_ranges))


def settle() -> None:
    """Complete all launches, except within `in_flight`.

    Raises:
        EmulationError: a kernel did what hardware would not survive, or what is not modelled.
    """
    if not _in_flight_depth:
        _run_chain()


def abandon() -> None:
    """Drop the launches in flight, after an error of the host code."""
    _chain.clear()


@contextlib.contextmanager
def in_flight() -> Iterator[None]:
    """Let the kernels of all calls in this context overlap, like calls on a GPU without a
    synchronisation between them. Results and reports are complete when the context ends."""
    global _in_flight_depth
    _in_flight_depth += 1
    try:
        yield
    finally:
        _in_flight_depth -= 1
        settle()


def _run_chain() -> None:
    if not _chain:
        return
    launches = list(_chain)
    _chain.clear()
    legal = list({(r.first, r.end): r for one in launches for r in one.ranges}.values())
    bounds = [bound for r in legal for bound in (r.first, r.end)]
    maps = _writable_memory()
    o = options
    description = _RunDesc(
        len(launches),
        (_LaunchDesc * len(launches))(*(one.description() for one in launches)),
        len(legal),
        (ctypes.c_uint64 * (len(bounds) + 1))(*bounds),
        (ctypes.c_char_p * (len(legal) + 1))(*(r.label.encode() for r in legal)),
        len(maps) // 2,
        (ctypes.c_uint64 * len(maps))(*maps),
        MODES.index(o.mode),
        DEPENDENTS.index(o.dependents or DEFAULT_DEPENDENTS[o.mode]),
        o.seed,
        noise.next_seed(),
        o.max_resident,
        o.clc_resident,
        o.strict,
        o.check_races,
        o.poison_races,
        o.hopper_arithmetic,
        o.max_instructions,
    )
    out = ctypes.create_string_buffer(REPORT_BYTES)
    start = time.perf_counter()
    failed = lib().ptxemu_run(ctypes.byref(description), out, ctypes.c_uint64(len(out)))
    seconds = time.perf_counter() - start
    result = json.loads(out.value.decode(errors="replace"))
    hazards = []
    for i, (one, counted) in enumerate(zip(launches, result["launches"], strict=True)):
        report = Report(
            one.program.kernel.name, one.grid, one.block, one.cluster, one.dyn_smem,
            seconds / len(launches), counted["instructions"], counted["counts"],
            counted["hazards"], result["error"] if failed and i == result["failed"] else "",
        )  # fmt: skip
        reports.append(report)
        if o.verbose:
            print("ptxemu:", report)
        hazards += [
            f"{h['kind']}: {h['message']} (x{h['count']}, PTX line {h['line']} of {report.kernel})"
            for h in report.hazards
        ]
    if failed:  # an earlier hazard is often the cause
        before = "\nhazards reported before: " + "\n".join(hazards) if hazards else ""
        raise EmulationError(f"{result['error']}{before}\n{noise.how_to_repeat()}")
    if o.hazards_are_errors and hazards:
        text = "hazards reported: " + "\n".join(hazards)
        raise EmulationError(f"{text}\n{noise.how_to_repeat()}")


def _value_of(argument: Any, parameter: str, size: int) -> ctypes.Array:
    """Return the bytes of an argument of `run_ptx`."""
    if isinstance(argument, torch.Tensor):
        raw = argument.data_ptr().to_bytes(8, "little")
    elif isinstance(argument, float):
        raw = bytes((ctypes.c_float if size == 4 else ctypes.c_double)(argument))
    elif isinstance(argument, int) and argument.bit_length() <= 8 * size:
        raw = (argument & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    else:
        raw = bytes(argument) if isinstance(argument, (bytes, ctypes.Array)) else b""
    if len(raw) != size:
        what = f"{type(argument).__name__} {argument!r}"[:80]
        raise EmulationError(f"parameter {parameter}: expected {size} bytes, found {what}")
    return ctypes.create_string_buffer(raw, size)


def run_ptx(
    ptx: str,
    name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence,
    cluster: tuple[int, ...] = (1, 1, 1),
    dyn_smem: int = 0,
    programmatic: bool = False,
) -> Report | None:
    """Run a kernel from PTX text. Return its report, or None within `in_flight`.

    Args:
        args: a CPU tensor for a pointer, else an int, a float or the bytes of the parameter.

    Raises:
        EmulationError: as `launch` and `settle`, or the arguments do not fit the kernel.
    """
    params = _program(ptx, name).kernel.params
    if len(args) != len(params):
        names = ", ".join(parameter for parameter, _, _ in params)
        expected = f"kernel {name}: expected {len(params)} arguments ({names})"
        raise EmulationError(f"{expected}, found {len(args)}")
    tokens = [register_tensor(argument) for argument in args if isinstance(argument, torch.Tensor)]
    try:
        both = zip(args, params, strict=True)
        values = [_value_of(argument, parameter, size) for argument, (parameter, _, size) in both]
        addresses = [ctypes.addressof(value) for value in values]
        launch(ptx, name, grid, block, cluster, dyn_smem, addresses, programmatic)
        settle()
    finally:
        for token in tokens:
            ranges.pop(token, None)
    return None if _in_flight_depth else reports[-1]
