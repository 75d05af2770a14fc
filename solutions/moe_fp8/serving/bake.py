"""Fill a kernel cache on a machine that needs no GPU: the program `python -m moe_fp8.prepare`.

    python -m moe_fp8.prepare --model qwen3-30b-a3b --gpu h100 --output /kernels
    MOE_FP8_CACHE_DIR=/kernels MOE_FP8_VLLM=1 vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507-FP8

The kernels of a layer follow from its sizes, from the types and layouts of the tensors that an
engine passes, and from the GPU. `calls` makes these tensors from a model's configuration, without
memory. tests/engines compares them with those of the plugins in the engines.
"""

import argparse
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..api import batched_experts, call_of, experts
from ..cache import CACHE_VARIABLE, KernelCache
from ..call import CHUNK_TOKENS
from ..kernels.architectures import GPUS, Architecture
from ..mxfp4 import PackedWeights
from ..shape import BLOCK, GROUP, PACKED_BYTES, MoeShape, shown
from .models import MODELS
from .plugins import (
    BLOCK_SHAPE,
    EXACT,
    MXFP4,
    describe_layers,
    in_words,
    mxfp4_mode,
    without_hint,
)
from .prepare import Geometry, compile_all, list_geometries

CONFIG = "config.json"
NAMES = {
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_topk", "moe_k"),
    "hidden": ("hidden_size",),
    "intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size"),
}
"""The names of each size in configurations."""
WIDTH = "intermediate_size"
"""The name of the experts' width in configurations that have no other width."""
OTHER_WIDTH = re.compile(r"(?!.*shared).*(moe|expert).*(inter|ffn|hidden|width|dim)")
"""Names of a width of experts, most of them unknown to this program."""
LARGEST = 2**20
"""The largest size that is taken for one."""
SHARED = ("n_shared_experts", "num_shared_experts")
ACTIVATION = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
FUNCTIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
"""The names of the activation function."""
UNQUANTISED = ("modules_to_not_convert", "ignored_layers", "ignore")
"""The names of a list of modules that are not quantised."""
ENGINES = ("vllm", "sglang", "transformers")


class Exchange(NamedTuple):
    """The form of tokens that an exchange between ranks delivers: in FP8 with scales, or in
    bfloat16 if weights have a scale for each channel."""

    engine: str
    batched: bool  # sorted by expert, for `batched_experts`
    ids: torch.dtype = torch.int32  # type of `topk_ids`


EXCHANGES = {
    "allgather_reducescatter": Exchange("vllm", False),
    "deepep_high_throughput": Exchange("vllm", False, torch.int64),
    "deepep_v2": Exchange("vllm", False, torch.int64),
    "deepep_low_latency": Exchange("vllm", True),
    "nixl_ep": Exchange("vllm", True),
    "deepep_normal": Exchange("sglang", False, torch.int64),
    "deepep_ll": Exchange("sglang", True),
}
"""The exchanges, by the engine's name."""


class UsageError(Exception):
    """An error that other options avoid: reported as one line, exit status 2."""


class NotServed(Exception):
    """A model that no plugin serves, or that this program does not understand: reported as one
    line, exit status 1."""


@dataclass(frozen=True)
class Model:
    """The expert layers of a model."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    shared: int = 0  # experts of every token, which SGLang may run with the others
    activation: tuple[tuple[str, float], ...] = ()  # options of `experts`
    per_channel: bool = False  # a weight scale for each output channel, not for each block
    scale_fmt: str = "float"  # or "ue8m0": scales are powers of two
    mxfp4: bool = False  # experts in four bits, which the plugins pack
    read: str = field(default="", compare=False)  # what the configuration says, and where


class Call(NamedTuple):
    """A call that a plugin prepares for, with tensors that have no memory."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


# --- models -------------------------------------------------------------------------------------


def find_model(name: str) -> Model:
    """Return a known model, one in a directory or a file, or one of the Hugging Face hub.

    Raises:
        UsageError: there is none.
        NotServed: its experts are not served.
    """
    try:
        config = configuration(name)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--model {name}: expected a directory with a {CONFIG}, such a file, "
            f"a name of the Hugging Face hub or one of {', '.join(MODELS)} ({error})"
        ) from None
    try:
        return read_model(name, config)
    except ValueError as error:
        raise NotServed(f"--model {name}: {error}") from None


def configuration(name: str) -> Any:
    """Return the content of a model's `config.json`. Raises OSError, ValueError, RecursionError,
    UsageError."""
    if known := MODELS.get(name):
        return known
    path = Path(name)
    if path.is_dir():
        path /= CONFIG
    elif not path.exists() and name.count("/") == 1:
        path = download(name)
    if path.exists() and not path.is_file():  # reading a pipe might never end
        raise ValueError(f"{path} is no file")
    return json.loads(path.read_text(encoding="utf-8"))


def download(name: str) -> Path:
    """Return the configuration of a model of the Hugging Face hub.

    Raises:
        UsageError: it cannot be downloaded.
    """
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, CONFIG))
    except Exception as error:  # no package, no network, no such model, no access
        why = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"--model {name}: no such directory, and the download failed: {why}"
        ) from None


def read_model(name: str, config: Any) -> Model:
    """Return the model of a `config.json`.

    Raises:
        ValueError: it has no experts, no plugin serves them, or the configuration says something
            else than this program understands. Nothing is guessed: kernels of another model would
            be of no use.
    """
    outer = as_object("the configuration", config)
    text = outer.get("text_config")
    if isinstance(text, dict) and not any(key in outer for key in NAMES["experts"]):
        config = text  # a model for text and images
    quantisation = as_object(
        "quantization_config",
        outer.get("quantization_config") or config.get("quantization_config") or {},
    )
    if why := why_not(quantisation) or why_no_swiglu(config):
        raise ValueError(why)
    # Like vLLM: DeepSeek-V4's experts are in FP4 unless the configuration has another type.
    usual = "fp4" if config.get("model_type") == "deepseek_v4" else None
    dtype = config.get("expert_dtype") or quantisation.get("expert_dtype") or usual
    mxfp4 = dtype == "fp4" or is_mxfp4(quantisation)
    if config.get("torch_dtype") == "float16" or config.get("dtype") == "float16":
        raise ValueError("tokens of float16: expected bfloat16")
    sources = {size: size_of(config, names) for size, names in NAMES.items()}
    sizes = {size: value for size, (_, value) in sources.items()}
    if sizes["top_k"] > sizes["experts"]:
        raise ValueError(f"{sizes['top_k']} of {sizes['experts']} experts of a token")
    shared = [key for key in SHARED if config.get(key)]
    if shared:
        sources["shared"] = size_of(config, SHARED)
    read = ", ".join(f"{key} {value}" for key, value in sources.values())
    acts = [f"{key} {config[key]}" for key in (*FUNCTIONS, *ACTIVATION) if config.get(key)]
    weights = "weights that the engine quantises in blocks"
    if quantisation:
        weights = "FP8 by channel" if is_per_channel(quantisation) else "FP8 in blocks of 128 x 128"
    if mxfp4:
        weights = f"experts in MXFP4, {MXFP4}={mxfp4_mode()}"
    return Model(
        name, **sizes, shared=sources["shared"][1] if shared else 0,
        activation=tuple((key, config[key]) for key in ACTIVATION if config.get(key)),
        per_channel=is_per_channel(quantisation),
        scale_fmt=quantisation.get("scale_fmt") or "float", mxfp4=mxfp4,
        read="; ".join([read, ", ".join(acts) or "SwiGLU (no activation is named)", weights]),
    )  # fmt: skip


def as_object(name: str, value: Any) -> dict[str, Any]:
    """Return a part of a configuration that has to be an object. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object, got {type(value).__name__}")
    return value


def size_of(config: Mapping[str, Any], names: Sequence[str]) -> tuple[str, int]:
    """Return the name and the value of a size. Raises ValueError."""
    there = [key for key in names if config.get(key) is not None]
    if names == NAMES["intermediate"] and not there and config.get(WIDTH) is not None:
        for other in config:
            if OTHER_WIDTH.match(other) and config[other] is not None:
                raise ValueError(f"{other}: a width of experts that this program does not know")
        there = [WIDTH]
    if not there:
        raise ValueError(f"no {' or '.join(names)}: expected a mixture of experts")
    for key in there:
        value = config[key]
        if type(value) is not int or not 0 < value <= LARGEST:
            expected = f"expected a whole number from 1 to {LARGEST}"
            raise ValueError(f"{key}={shown(value)}: {expected}, the same for all layers")
    if len({config[key] for key in there}) > 1:
        values = ", ".join(f"{key}={config[key]}" for key in there)
        raise ValueError(f"{values}: expected one number")
    return there[0], config[there[0]]


def why_no_swiglu(config: Mapping[str, Any]) -> str:
    """Return why a model's activation is not served, or "" if it is."""
    for key in FUNCTIONS:
        if config.get(key) not in (None, "silu", "swish"):
            return f"{key}={shown(config[key])}: expected silu"
    for key in ACTIVATION:
        value = config.get(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            return f"{key}={shown(value)}: expected a number"
    if "swiglu_limits" in config:
        return "swiglu_limits: expected one swiglu_limit for all layers"
    if config.get("model_type") == "gpt_oss" or config.get("mlp_bias") or config.get("moe_bias"):
        return "experts with a bias"
    return ""


def why_not(quantisation: Mapping[str, Any]) -> str:
    """Return why no plugin serves the weights of a `quantization_config`, or "" if one does. If it
    is empty, an engine may quantise what it loads."""
    if not quantisation:
        return ""
    method, blocks = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    served = method in ("fp8", "compressed-tensors")
    for weights, tokens in () if is_mxfp4(quantisation) else groups_of(quantisation):
        blocks = blocks or weights.get("block_structure") or weights.get("strategy")
        served = served and weights.get("type", "float") == "float"
        served = served and weights.get("num_bits") in (None, 8)
        served = served and tokens.get("dynamic") is not False
    known = blocks == BLOCK_SHAPE or is_per_channel(quantisation) or is_mxfp4(quantisation)
    if not served or not known:
        return (
            f"quantization_config: expected FP8 in blocks of {BLOCK_SHAPE}, or by channel with "
            f"tokens quantised in the call, got {shown(method)} of {shown(blocks)}"
        )
    for key, values in (
        ("activation_scheme", (None, "dynamic")),
        ("fmt", (None, "e4m3")),
        ("scale_fmt", (None, "", "float", "ue8m0")),
    ):
        if quantisation.get(key) not in values:
            return f"{key}={shown(quantisation[key])}: expected {values[-1]}"
    for key in UNQUANTISED:
        modules = quantisation.get(key) or []
        if not isinstance(modules, list):
            return f"{key}={shown(modules)}: expected a list"
        # A single layer's may be of one that no engine serves (multi-token prediction).
        every = [str(module) for module in modules if not re.search(r"layers\W+\d", str(module))]
        if experts := [module for module in every if re.search(r"\bexperts\b", module)]:
            return f"{key}: {shown(experts[0])}: experts that are not quantised"
    return ""


def groups_of(quantisation: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the weights and the tokens of each group of compressed-tensors. Raises ValueError."""
    groups = as_object("config_groups", quantisation.get("config_groups") or {})

    def part(group: Any, name: str) -> dict[str, Any]:
        return as_object(name, as_object("config_groups", group).get(name) or {})

    return [(part(g, "weights"), part(g, "input_activations")) for g in groups.values()]


def is_per_channel(quantisation: Mapping[str, Any]) -> bool:
    """Return True for compressed-tensors' FP8 with a scale for each output channel ("FP8-dynamic"),
    whose tokens are quantised in the call."""
    groups = groups_of(quantisation)
    return bool(groups) and all(
        (
            weights.get("strategy"),
            weights.get("type"),
            weights.get("num_bits"),
            tokens.get("dynamic"),
        )
        == ("channel", "float", 8, True)
        for weights, tokens in groups
    )


def is_mxfp4(quantisation: Mapping[str, Any]) -> bool:
    """Return True for compressed-tensors' MXFP4 with tokens that are quantised in FP8."""
    groups = groups_of(quantisation)
    form = {"strategy": "group", "type": "float", "num_bits": 4, "group_size": GROUP}
    return bool(groups) and all(
        form.items() <= weights.items()
        and (tokens.get("num_bits"), tokens.get("dynamic")) == (8, True)
        for weights, tokens in groups
    )


# --- calls --------------------------------------------------------------------------------------


def calls(
    model: Model,
    engine: str = "vllm",
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
    data_parallel: int = 1,
    exchange: str | None = None,
    accurate: bool = False,
) -> Iterator[Call]:
    """Yield the calls that the ranks of an engine prepare for: one for each number of local
    experts, width, number of fused shared experts and form of the weights. The environment's
    `MOE_FP8_MXFP4` decides the forms of experts in MXFP4.

    Args:
        model: its expert layers.
        engine: one of `ENGINES`.
        tensor_parallel: GPUs that share a layer.
        expert_parallel: the GPUs of all replicas have whole experts.
        data_parallel: replicas, in vLLM.
        exchange: the exchange of tokens between ranks, one of `EXCHANGES`.
        accurate: two FP8 terms between the GEMMs.

    Raises:
        UsageError: the GPUs cannot share the layer like this, or the engine's plugin does not serve
            the model so.
    """
    mode = mxfp4_mode() if model.mxfp4 else ""
    if model.mxfp4 and (not mode or engine == "transformers"):
        expected = f"expected {MXFP4}={EXACT}, both or lossy, as the server has it"
        if mode:
            expected = "expected --engine vllm or sglang"
        raise UsageError(f"--model {model.name}: experts in MXFP4: {expected}")
    ranks = tensor_parallel * data_parallel
    split = ranks if expert_parallel else 1
    counts = {"--tensor-parallel": tensor_parallel, "--data-parallel": data_parallel}
    asked = " ".join(f"{option} {count}" for option, count in counts.items() if count > 1)
    if not expert_parallel and ranks > 1 and model.intermediate % (ranks * BLOCK):
        raise UsageError(
            f"{asked}: a GPU would have {model.intermediate / ranks:g} of an expert's "
            f"{model.intermediate} columns, expected a multiple of {BLOCK}; with --expert-parallel "
            "experts stay whole"
        )
    if split > 1 and engine != "vllm" and model.experts % split:
        raise UsageError(
            f"{asked} --expert-parallel: expected a divisor of {model.experts} experts"
        )
    batched = exchange is not None and EXCHANGES[exchange].batched
    in_blocks = engine == "transformers" or batched or (exchange and engine == "sglang")
    if model.per_channel and in_blocks:
        what = f"--exchange {exchange}" if exchange else f"--engine {engine}"
        raise UsageError(f"{what}: expected weights with a scale for each block, got each channel")
    # vLLM gives the first ranks one expert more if the experts cannot be shared evenly.
    locals_ = {-(-model.experts // split), model.experts // split}
    width = model.intermediate if expert_parallel else model.intermediate // ranks
    # SGLang decides by the model and the GPU whether it runs the shared experts with the others.
    shared_counts = {0, model.shared} if engine == "sglang" and exchange is None else {0}
    for local in sorted(locals_):
        for shared in sorted(shared_counts):
            for packed in {"": [False], EXACT: [True]}.get(mode, [True, False]):
                yield call(
                    model, engine, local, width, shared, split > 1, accurate,
                    EXCHANGES[exchange] if exchange else None, packed,
                )  # fmt: skip


def call(
    model: Model,
    engine: str,
    local: int,
    width: int,
    shared: int,
    has_map: bool,
    accurate: bool,
    exchange: Exchange | None,
    packed: bool = False,
) -> Call:
    """Return the call of a layer with `local` of the model's and `shared` more experts, in packed
    MXFP4 or in FP8."""
    number, local, top_k = model.experts + shared, local + shared, model.top_k + shared
    # If weights have a scale for each channel, an exchange leaves tokens in bfloat16.
    in_fp8 = exchange is not None and not model.per_channel
    x_type = torch.float8_e4m3fn if in_fp8 else torch.bfloat16
    # Only Transformers holds these scales as exponents.
    exponents = engine == "transformers" and model.scale_fmt == "ue8m0"
    scale_type = torch.float8_e8m0fnu if exponents else torch.float32
    weights: tuple[Any, ...] = ()
    for n, k in ((2 * width, model.hidden), (model.hidden, width)):
        blocks = n // BLOCK, k // BLOCK
        scale = tensor(scale_type, local, *((n, 1) if model.per_channel else blocks))
        if packed:
            values = tensor(torch.uint8, local, *blocks, PACKED_BYTES)
            weights += PackedWeights(values, scale, gated=not weights), None
        else:
            weights += tensor(torch.float8_e4m3fn, local, n, k), scale
    options: dict[str, Any] = {"accurate": accurate, **dict(model.activation)}
    if exponents:
        options["ue8m0"] = True
    if engine != "vllm" and "swiglu_alpha" in options:  # these take 1 for it
        options["swiglu_beta"] = 1.0
    if exchange and exchange.batched:
        options["x_scale"] = tensor(torch.float32, local, 1, model.hidden // BLOCK)
        x = tensor(x_type, local, 1, model.hidden)
        return Call(batched_experts, (x, tensor(torch.int32, local), *weights), options)
    ids = torch.int64 if engine == "transformers" else exchange.ids if exchange else torch.int32
    if in_fp8:  # token by token
        options["x_scale"] = tensor(torch.float32, 1, model.hidden // BLOCK).t()
    if engine == "vllm" and has_map:
        options["expert_map"] = tensor(torch.int32, number)
    elif engine != "transformers":
        options["num_experts"] = number
    pairs = tensor(ids, 1, top_k), tensor(torch.float32, 1, top_k)
    return Call(experts, (*pairs, tensor(x_type, 1, model.hidden), *weights), options)


def tensor(dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def geometries_of(
    needed: Sequence[Call], architecture: Architecture, num_sms: int
) -> list[Geometry]:
    """List the kernels of these calls with any number of tokens.

    Raises:
        NotServed: the kernels refuse a layer's sizes or its activation.
    """
    listed: dict[Geometry, None] = {}
    for function, arguments, options in needed:
        try:
            layer, *_ = call_of(function, *arguments, **options)
        except ValueError as error:
            raise NotServed(f"the layer is not served: {without_hint(error)}") from None
        listed |= dict.fromkeys(list_geometries(layer, CHUNK_TOKENS, architecture, num_sms))
    return [*listed]


# --- program ------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    args = parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):  # paths may have letters that the locale lacks
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        return bake(args)
    except (NotServed, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, NotServed) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        prog="python -m moe_fp8.prepare",
        description="Compile the kernels of a model's expert layers into a directory, for every "
        "number of tokens that an engine can schedule. No GPU is needed. An engine that starts "
        "with this directory in MOE_FP8_CACHE_DIR compiles nothing, whichever user it runs as, "
        "if root or that user made it.",
        epilog="exit status: 0 all kernels are there, 1 something failed, 2 usage or environment",
    )
    cli.add_argument(
        "--model", type=text, required=True, metavar="DIR_OR_NAME",
        help=f"a model's directory or its {CONFIG}, a name of the Hugging Face hub (if "
        f"huggingface_hub is installed), or one of {', '.join(MODELS)}",
    )  # fmt: skip
    cli.add_argument("--engine", choices=ENGINES, default="vllm", help="(default: vllm)")
    cli.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N",
        help="GPUs that share a layer (default: 1)",
    )  # fmt: skip
    cli.add_argument(
        "--expert-parallel", action="store_true",
        help="the GPUs have whole experts instead of a part of each",
    )  # fmt: skip
    cli.add_argument(
        "--data-parallel", type=positive, default=1, metavar="N",
        help="replicas that share the layers, in vLLM (default: 1)",
    )  # fmt: skip
    cli.add_argument(
        "--exchange", choices=EXCHANGES,
        help="the exchange of tokens with --expert-parallel: vLLM's all2all backend (default with "
        "--data-parallel: allgather_reducescatter), SGLang's DeepEP mode",
    )  # fmt: skip
    cli.add_argument("--accurate", action="store_true", help="two FP8 terms between the GEMMs")
    cli.add_argument("--gpu", choices=GPUS, required=True, help="the kind of GPU, in its SXM form")
    cli.add_argument(
        "--multiprocessors", type=positive, metavar="N",
        help="multiprocessors of a GPU that has others, such as an H100 PCIe's 114",
    )  # fmt: skip
    cli.add_argument(
        "--output", type=lambda path: Path(text(path)), required=True, metavar="DIR",
        help="the cache directory; kernels that it has are left alone",
    )  # fmt: skip
    return cli


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected at least 1")
    return number


def text(option: str) -> str:
    if not option:
        raise argparse.ArgumentTypeError("expected a name or a path")
    return option


def bake(args: argparse.Namespace) -> int:
    """Compile what the options ask for, and print a table."""
    model, exchange = find_model(args.model), args.exchange
    if args.expert_parallel and args.data_parallel > 1:
        exchange = exchange or "allgather_reducescatter"
    if exchange and (EXCHANGES[exchange].engine != args.engine or not args.expert_parallel):
        engine = EXCHANGES[exchange].engine
        raise UsageError(f"--exchange {exchange}: expected --engine {engine} --expert-parallel")
    if args.data_parallel > 1 and args.engine != "vllm":
        raise UsageError(f"--data-parallel {args.data_parallel}: expected --engine vllm")
    asked = calls(
        model, args.engine, args.tensor_parallel, args.expert_parallel, args.data_parallel,
        exchange, args.accurate,
    )  # fmt: skip
    architecture, num_sms = GPUS[args.gpu]
    needed = geometries_of([*asked], architecture, args.multiprocessors or num_sms)
    try:
        import cutlass

        from ..kernels.compile import description, environment, is_on_disk
        from ..kernels.fused import describe_fused
    except ImportError as error:  # names the package and the needed version
        raise UsageError(str(error)) from None
    directory = args.output.absolute()
    os.environ[CACHE_VARIABLE] = str(directory)
    os.umask(0o022)  # others read the kernels: a server is often another user
    cache = KernelCache(directory)
    try:
        with cache.lock("prepare"):
            pass
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise UsageError(f"--output {args.output}: {why}") from None
    print(f"{'model':9} {model.read}", flush=True)
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # a kernel that cannot be stored
            compiled = compile_all(needed)
    except Exception as error:  # of the compiler, or a full disk
        print(f"error: {in_words(error)}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - start
    described = [describe_fused(*geometry) for geometry in needed]
    if lost := sum(not is_on_disk(*kernel) for kernel in described):
        print(f"error: {directory} lacks {lost} of {len(needed)} kernels", file=sys.stderr)
        return 1
    keys = [description(*kernel) for kernel in described]
    size = sum(entry.size for entry in cache.entries() if entry.description in keys)
    toolkit: Any = getattr(cutlass, "CUDA_VERSION", None)
    machine = [keys[0]["host"], keys[0]["versions"]]
    rows = {
        "kernels": f"{len(needed)}, {compiled} compiled in {seconds:.0f} s",
        "size": f"{size / 2**20:.1f} MiB",
        "layers": "; ".join(dict.fromkeys(layers_of(shape) for shape, *_ in needed)),
        "GPU": f"{args.gpu}, {needed[0][4]}, {needed[0][3]} multiprocessors",
        "versions": ", ".join(machine + [f"CUDA {toolkit.major}.{toolkit.minor}"] * bool(toolkit)),
        **environment(),
        "use it": f"{CACHE_VARIABLE}={directory}",
    }
    for name, value in rows.items():
        print(f"{name:9} {value}")
    return 0


def layers_of(shape: MoeShape) -> str:
    sizes = shape.num_experts, shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    return describe_layers(*sizes, shape.top_k).removeprefix("layers of ")
