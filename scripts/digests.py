"""Compile every kernel that ships and compare its machine code with the stored digests.

    python3 run.py digests                  the main definition's kernels at its workloads
    python3 run.py digests --all            every definition, number of tokens and form
    python3 run.py digests --write DIR      store the digests of every kernel in a record

`results/kernels.json` has the digests of the present sources. A record has those of the measured
sources. If both are equal, pages do not say that sources have changed, so files may move. After a
change of machine code store both anew, the record's from the commit that was measured. Needs no
GPU. `--all` takes an hour on two cores.
"""

import functools
import importlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scripts.common import hashes, machine_code
from scripts.common.definitions import DEFAULT, MOE, SHARED, MoeDefinition
from scripts.common.program import (
    EXIT_FAILED,
    EXIT_OK,
    PREFIX,
    RESULTS_DIR,
    UsageError,
    output_path,
    parser,
    run_main,
)

TARGETS = {"sm_90a": 132, "sm_100a": 148}
"""Multiprocessors of a GPU, by the compiler's target: some grids are compile-time constants."""
DUMP, KEEP = "CUTE_DSL_DUMP_DIR", "CUTE_DSL_KEEP"
"""Variables that the DSL reads when it is imported."""


class Unit(NamedTuple):
    """A compiled host function that ships, and the solution that calls it."""

    name: str  # target, definition, kernel and configs
    solution: str  # empty for the forms that engines use
    compile: str  # `compile_<name>` of a module of `moe_fp8.kernels`
    arguments: tuple[Any, ...]


def units(every: bool) -> list[Unit]:
    """List the main definition's functions at its workloads. With `every`, list those of all
    definitions at all numbers of tokens, and the forms that engines call."""
    shipped: list[Unit] = []
    for target in TARGETS:
        for definition in (*MOE, SHARED) if every else (DEFAULT,):
            shipped += layer_units(definition, target, every)
        if every:
            shipped += form_units(target)
    return list({(unit.solution, unit.name): unit for unit in shipped}.values())


def layer_units(definition: MoeDefinition, target: str, every: bool) -> Iterator[Unit]:
    import torch
    from moe_fp8.call import CHUNK_TOKENS
    from moe_fp8.kernels.architectures import of_target
    from moe_fp8.ladder import v1_loop_padding as v1
    from moe_fp8.ladder import v2_vectorised as v2
    from moe_fp8.ladder.v3_clustered import counted_config
    from moe_fp8.ladder.v4_flat import flat_config
    from moe_fp8.serving.prepare import all_configs
    from moe_fp8.shape import Form, MoeShape

    from scripts.data import load_specs, routing_bias
    from scripts.measuring.cases import counted

    arch, shape = of_target(target), MoeShape(**definition.shape)
    of_definition = f"{target} {definition.short or 'main'}"
    specs = load_specs(definition) if definition in MOE else []
    tokens = sorted({spec.seq_len for spec in specs} or set(definition.tokens))

    def pairs(choose: Callable[[int], Any]) -> list[Any]:
        return all_configs(choose, CHUNK_TOKENS) if every else [*map(choose, tokens)]

    if definition.mxfp4:
        form = Form(torch.int32, torch.float32, torch.bfloat16, gate_first=True)
        forms = {"reencoded": form}
        if arch.packed_layer:
            forms["packed"] = replace(form, packed=True)
        for solution, form in forms.items():
            choose = functools.partial(arch.choose_layer, shape=shape, packed=form.packed)
            for configs in pairs(choose):
                yield Unit(
                    f"{of_definition} {solution} {configs[0]} / {configs[1]}",
                    definition.packed_name(PREFIX + solution),
                    "fused",
                    (shape, *configs, TARGETS[target], target, form),
                )
        return
    for terms, solution in ((1, "fused"), (2, "fused_hifi")):
        for configs in pairs(functools.partial(arch.choose_layer, shape=shape, terms=terms)):
            yield Unit(
                f"{of_definition} {solution} {configs[0]} / {configs[1]}",
                definition.packed_name(PREFIX + solution),
                "fused",
                (shape, *configs, TARGETS[target], target),
            )
    configs_of = {"flat": pairs(functools.partial(flat_config, shape=shape, choose=arch.choose))}
    if definition is DEFAULT:  # only it has v1 to v3
        configs_of |= {n: [m.CONFIGS[target]] for n, m in (("v1", v1), ("v2", v2))}
        bias, factor = torch.from_numpy(routing_bias(definition)), definition.routed_scaling_factor
        configs_of["v3"] = []  # it knows the rows of every workload
        for spec in specs:
            logits, offset = torch.from_numpy(spec.draw().logits), spec.local_expert_offset
            rows = counted("", logits, bias, offset, factor, definition).rows
            if any(rows):
                configs_of["v3"].append(counted_config(list(rows), arch.choose))
    for solution, chosen in configs_of.items():
        packed = definition.packed_name(PREFIX + solution)
        names_tokens = solution in ("v1", "v2")
        sizes = definition.hidden_size, definition.top_k, target
        swiglu = definition.intermediate_size, target, shape.swiglu, shape.ue8m0
        stages: list[tuple[str, str, tuple[Any, ...]]] = [
            ("route" + ", names tokens" * names_tokens, "route", (shape, names_tokens, target)),
            ("swiglu_quant", "swiglu_quant", swiglu),
            ("combine", "combine", sizes),
        ]
        if not names_tokens:
            stages.append(("permute", "permute", sizes))
        for config, (n, k) in itertools.product(dict.fromkeys(chosen), definition.gemms):
            problem = config, n, k, definition.num_local_experts, target
            stages.append((f"gemm {n}x{k} {config}", "grouped_gemm", problem))
        for name, compiles, arguments in sorted(stages, key=lambda stage: stage[0]):
            yield Unit(f"{of_definition} {name}", packed, compiles, arguments)


def form_units(target: str) -> Iterator[Unit]:
    """Yield forms of the layer that no definition has: bfloat16 tokens, given experts, batched
    experts, exponents or channels as scales, packed weights, a clamped SwiGLU; at few and at many
    tokens."""
    import torch
    from moe_fp8.kernels.architectures import of_target
    from moe_fp8.shape import Form, MoeShape, Swiglu

    arch, bf16, f32, i32 = of_target(target), torch.bfloat16, torch.float32, torch.int32
    usual = Form(i32, f32, bf16, gate_first=True)
    e8m0 = Form(i32, f32, bf16, gate_first=True, weight_scale=torch.float8_e8m0fnu)
    channels = Form(i32, f32, bf16, gate_first=True, per_channel=True)
    batched = Form(i32, None, gate_first=True, batched=True)
    batched_bf16 = Form(i32, None, bf16, gate_first=True, batched=True)
    packed = Form(i32, f32, gate_first=True, has_map=True, packed=True)
    batched_packed = replace(batched_bf16, packed=True)
    clamped = Swiglu(10.0, 1.702, 1.0)

    def shape_of(experts: int, local: int, h: int, i: int, top_k: int, *more: Any) -> MoeShape:
        return MoeShape(experts, local, h, i, 1, 1, top_k, "given", *more)

    main, by_expert = shape_of(256, 32, 7168, 2048, 8), shape_of(32, 32, 7168, 2048, 1)
    strided = Form(torch.int64, f32, strided_scales=True, gate_first=True)
    forms: dict[str, tuple[MoeShape, Form, int]] = {
        "experts bf16": (main, usual, 1),
        "experts bf16 accurate": (main, usual, 2),
        "experts bf16 tp8": (shape_of(256, 256, 7168, 256, 8), usual, 1),
        "experts bf16 qwen3": (shape_of(128, 128, 2048, 768, 8), usual, 1),
        "experts bf16 map": (main, Form(i32, f32, bf16, gate_first=True, has_map=True), 1),
        "experts fp8 i64 strided": (main, strided, 1),
        "experts bf16 e8m0 clamped": (shape_of(256, 32, 7168, 2048, 8, clamped, True), e8m0, 1),
        "experts bf16 per channel": (main, channels, 1),
        "experts bf16 per channel accurate": (main, channels, 2),
        "fused_moe bf16": (MoeShape(), Form(x=bf16), 1),
        "fused_moe bf16 bf16 logits no bias": (
            MoeShape(),
            Form(bf16, None, bf16, gate_first=True),
            1,
        ),
        "fused_moe bf16 accurate": (MoeShape(), Form(x=bf16), 2),
        "batched fp8": (by_expert, batched, 1),
        "batched bf16": (by_expert, batched_bf16, 1),
        "batched bf16 accurate": (by_expert, batched_bf16, 2),
    }
    if arch.packed_layer:
        forms["experts fp8 map packed"] = main, packed, 1
        forms["batched bf16 packed accurate"] = by_expert, batched_packed, 2
    for name, (shape, form, terms) in forms.items():
        for tokens in (1, 64, 1024, 8192):
            rules = arch.layer._replace(gathered=(0, 0)) if form.batched else arch.layer
            configs = rules.configs(tokens, shape, terms, arch.choose)
            if form.packed and arch.packed_layer:
                configs = arch.packed_layer(tokens, shape, terms)
            yield Unit(
                f"{target} {name} {configs[0]} / {configs[1]}",
                "",
                "fused",
                (shape, *configs, TARGETS[target], target, form),
            )


# --- digests ------------------------------------------------------------------------------------


def start_worker(directory: str) -> None:
    """Give a process a dump directory of its own. The names of dumped files do not tell configs
    apart, so two processes with one directory would read each other's text."""
    os.environ[DUMP] = tempfile.mkdtemp(dir=directory)
    os.environ[KEEP] = "ir,ptx"
    os.environ["MOE_FP8_CACHE_DIR"] = ""  # a function that is loaded from a cache has no text


def function(unit: Unit) -> Any:
    """Return the `compile_<name>` of a unit."""
    module = {"swiglu_quant": "swiglu"}.get(unit.compile, unit.compile)
    kernels = importlib.import_module(f"moe_fp8.kernels.{module}")
    return getattr(kernels, f"compile_{unit.compile}")


def digest(unit: Unit) -> str:
    """Compile a unit in a worker and return its digest."""
    ptx = function(unit).make(*unit.arguments).__ptx__
    dumped = [*Path(os.environ[DUMP]).iterdir()]
    (mlir,) = (path.read_text("utf-8") for path in dumped if path.name.endswith("_clean.mlir"))
    for path in dumped:
        path.unlink()
    return machine_code.digest(ptx, mlir)


def compute(listed: list[Unit], workers: int) -> dict[str, str]:
    """Return the digest of every unit by its name, compiled in processes of their own."""
    from scripts.measuring.processes import Tasks, process_pool

    by_name = {unit.name: unit for unit in listed}
    with (
        tempfile.TemporaryDirectory(prefix="moe_fp8_digests_") as directory,
        process_pool(workers, "spawn", start_worker, directory) as pool,
        Tasks("kernels", len(by_name), workers) as tasks,
    ):
        futures = {n: tasks.add(pool.submit(digest, unit), n) for n, unit in by_name.items()}
        return {name: futures[name].result() for name in sorted(futures)}


def describe(listed: list[Unit], digests: dict[str, str]) -> dict[str, Any]:
    """Return the content of a file of digests: versions, digests, the names of each solution's
    kernels, or a digest of its Triton kernels, and the hash of its sources."""
    kernels: dict[str, list[str]] = {}
    for unit in listed:
        if unit.solution:
            kernels.setdefault(unit.solution, []).append(unit.name)
    packed = {name: s for definition in MOE for name, s in hashes.packed(definition).items()}
    triton = {
        name: machine_code.triton_digest(source.content for source in solution.sources)
        for name, solution in packed.items()
        if name not in kernels
    }
    return {
        "versions": machine_code.compiler_versions(),
        "digests": digests,
        "kernels": kernels,
        "triton": triton,
        "hashes": {name: solution.hash() for name, solution in packed.items()},
    }


def main() -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    text = "every definition, number of tokens and form (default: the main definition's workloads)"
    add("--all", action="store_true", help=text)
    text = "store every digest in a record's directory"
    add("--write", type=output_path, metavar="DIR", help=text)
    args = arguments.parse_args()

    listed = units(args.all or args.write is not None)
    stored = {} if args.write else machine_code.read_digests(RESULTS_DIR / machine_code.DIGESTS)
    versions = machine_code.compiler_versions()
    if stored and stored["versions"] != versions:
        raise UsageError(f"stored with {stored['versions']}, here is {versions}")
    computed = compute(listed, os.cpu_count() or 1)
    if args.write:
        machine_code.write_digests(args.write / machine_code.DIGESTS, describe(listed, computed))
        return EXIT_OK
    changed = [name for name, now in computed.items() if stored["digests"].get(name) != now]
    for name in changed:
        print(f"{name}: {computed[name]}, stored: {stored['digests'].get(name, 'none')}")
    print(f"{len(computed)} kernels, {len(changed)} with other machine code than stored")
    return EXIT_FAILED if changed else EXIT_OK


if __name__ == "__main__":
    run_main(main)
