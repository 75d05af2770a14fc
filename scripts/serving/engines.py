"""vLLM and SGLang by one interface: prompts of token ids in, greedily decoded tokens out; and the
models that `serve` knows by name, for random weights.
"""

import atexit
import functools
import json
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from moe_fp8.serving.models import MODELS

from scripts.common.program import UsageError, error_line, write_json

ENGINES = ("vllm", "sglang")
SWITCH = {"vllm": "MOE_FP8_VLLM", "sglang": "MOE_FP8_SGLANG"}
AS_IT_COMES = ("engine", "bf16")
OWN = ("ours", "accurate", "both")
MXFP4 = "MOE_FP8_MXFP4"
CACHE_BYTES = 5 * 2**30
"""Bytes of the cache for keys and values."""
PROMPT_ROOM = 256
"""Tokens that a request may have in addition to the longest prompt."""
DIRECTORY = "MOE_FP8_SERVE_DIRECTORY"
"""The variable with the directory of the processes' reports, set by `serve` only."""
RANDOM = "MOE_FP8_SERVE_RANDOM"
GRAPH_TOKENS = 8192
"""The longest prompt that SGLang captures, as with its own chunks on an H100."""
CHECK_TOKENS = {"vllm": 2999, "sglang": 8999}
"""Tokens of the prompt whose calls are checked, in one step: more than any CUDA graph has."""
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
MIXED_REQUESTS, MIXED_PROMPT, MIXED_TOKENS = 128, 512, 64
"""The mixed load: requests, limited by the largest batch, and the tokens that a request reads and
writes."""


# --- models ---------------------------------------------------------------------------------------

LAYERS = {
    "deepseek-v3": 4,
    "deepseek-v3-tp8": 11,
    "glm-5": 5,
    "kimi-k2": 3,
    "minimax-m2": 12,
    "qwen3-235b-a22b": 16,
    "qwen3-30b-a3b": 48,
    "qwen3-30b-a3b-mxfp4": 48,
}
"""Layers of the known models that fit 80 GB with a cache for keys and values."""


@dataclass(frozen=True)
class Model:
    name: str
    directory: Path
    config: dict[str, Any]
    layers: int
    """The number of layers that are served."""

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def overrides(self) -> dict[str, int]:
        """The served values that differ from the configuration's."""
        return {} if self.layers == self.published else {"num_hidden_layers": self.layers}

    @property
    def published(self) -> int:
        return int(self.config["num_hidden_layers"])


@functools.cache
def directory_of(name: str) -> Path:
    """Return a directory with a known model's configuration, which goes when this process ends."""
    place = Path(tempfile.mkdtemp(prefix="moe_fp8_models-"))
    atexit.register(shutil.rmtree, place)
    write_json(place / name / "config.json", MODELS[name])
    return place / name


def find_model(name: str, layers: int | None, random_weights: bool) -> Model:
    """Return a known model, or one in a directory of weights. Raises UsageError."""
    known = name in MODELS
    directory = directory_of(name) if known else Path(name)
    if not (directory / "config.json").is_file():
        raise UsageError(f"--model {name}: expected a directory, or one of {', '.join(MODELS)}")
    if known and not random_weights:
        raise UsageError(f"--model {name} has no weights: give --random-weights, or a directory")
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        most, _ = (int(config[name]) for name in ("num_hidden_layers", "vocab_size"))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{directory / 'config.json'}: {error_line(error)}") from None
    wanted = layers or LAYERS.get(name, most)
    if wanted > most:
        raise UsageError(f"--layers {wanted}: {name} has {most}")
    if wanted < most and not random_weights:
        raise UsageError("--layers: a part of trained weights says nothing; give --random-weights")
    return Model(name if known else directory.resolve().name, directory, config, wanted)


# --- engines --------------------------------------------------------------------------------------


class Generated(NamedTuple):
    tokens: list[int]
    logprobs: list[float]  # of these tokens; empty if not asked for


class Read(NamedTuple):
    """An engine's prediction of each token of a prompt but the first."""

    logprobs: list[float]  # of the prompt's tokens
    likeliest: list[int]  # the likeliest tokens in their places


class Engine(Protocol):
    version: str

    def graph_times(self, prompts: list[list[int]], tokens: int) -> list[float]:
        """Return the ms of the CUDA graph of each decode step, on the GPU; empty if not known."""

    def generate(
        self, prompts: list[list[int]], tokens: int, logprobs: bool = False
    ) -> list[Generated]: ...

    def read(self, prompts: list[list[int]]) -> list[Read]: ...


def prompts(vocabulary: int, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    """Draw random tokens, without the first and last few of a vocabulary, which are special."""
    draw = random.Random(seed)
    return [[draw.randrange(10, vocabulary - 10) for _ in range(n)] for n in lengths]


def reported(directory: Path, what: str) -> list[list[str]]:
    """Return the lines of `worker.report`, a list a process."""
    return [file.read_text().split() for file in sorted(directory.glob(f"{what}-*.txt"))]


@dataclass(frozen=True)
class Setup:
    """The settings of an engine. `backend` is `engine`, `bf16` (the same with BF16 weights),
    `tuned`, `ours`, `accurate`, `both` (with FP8 copies of MXFP4 experts), or the engine's name for
    one of its kernels."""

    engine: str
    backend: str
    model: Model
    random_weights: bool = False
    most_tokens: int = 16384  # of a step, and of a prompt
    batches: tuple[int, ...] = (1,)  # that CUDA graphs are captured for
    tensor_parallel: int = 1
    expert_parallel: bool = False
    share: float = 0.9  # of the GPU's memory
    batch_invariant: bool = False

    @property
    def dense(self) -> str | None:
        """The kernel of dense layers, if vLLM's variable asks for another one than the default."""
        asked = self.engine == "vllm" and os.environ.get("VLLM_USE_DEEP_GEMM") == "1"
        return "DeepGEMM" if asked else None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the engine's processes."""
        own = {"ours": "1", "accurate": "accurate", "both": "1"}
        variables = {SWITCH[self.engine]: own.get(self.backend, "0")}
        if self.backend in OWN:
            asked = os.environ.get(MXFP4, "exact")
            variables[MXFP4] = "both" if self.backend == "both" else asked
        if self.engine == "vllm":
            if self.tensor_parallel == 1:  # so that times exclude traffic between processes
                variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            if self.dense and self.backend in OWN:  # which otherwise asks for DeepGEMM's experts
                variables["VLLM_MOE_USE_DEEP_GEMM"] = "0"
            if self.batch_invariant:
                variables["VLLM_BATCH_INVARIANT"] = "1"
        return variables


def start(setup: Setup) -> Engine:
    """Start an engine in this process, whose environment must have `setup.variables`."""
    return Vllm(setup) if setup.engine == "vllm" else Sglang(setup)


def engine_options(setup: Setup) -> dict[str, Any]:
    """Return the options of the engine, offline or as a server, but for the model's place."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy" if setup.random_weights else "auto",
        "dtype": "bfloat16",
    }
    length, most = setup.most_tokens + PROMPT_ROOM, max(setup.batches)
    asked = setup.backend not in (*AS_IT_COMES, "tuned", *OWN)
    if setup.engine == "vllm":
        return options | {
            "seed": 0,
            "hf_overrides": setup.model.overrides,
            "max_model_len": length,
            "max_num_batched_tokens": setup.most_tokens,
            "max_num_seqs": most,
            "gpu_memory_utilization": setup.share,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "tensor_parallel_size": setup.tensor_parallel,
            "worker_extension_cls": "scripts.serving.worker.TimesGraphs",
            "enable_expert_parallel": setup.expert_parallel,
            "compilation_config": {"cudagraph_capture_sizes": list(setup.batches)},
            **({"kernel_config": {"moe_backend": setup.backend}} if asked else {}),
        }
    return options | {
        "random_seed": 0,
        "json_model_override_args": json.dumps(setup.model.overrides),
        "context_length": length,
        "chunked_prefill_size": setup.most_tokens,
        "max_prefill_tokens": setup.most_tokens,
        "max_running_requests": most,
        "mem_fraction_static": setup.share,
        # Without a limit the cache takes what long prompts need for their activations.
        "max_total_tokens": max(length, most * (MIXED_PROMPT + MIXED_TOKENS)),
        "disable_radix_cache": True,
        "cuda_graph_bs_decode": list(setup.batches),
        "cuda_graph_max_bs_prefill": min(GRAPH_TOKENS, setup.most_tokens),
        "tp_size": setup.tensor_parallel,
        "ep_size": setup.tensor_parallel if setup.expert_parallel else 1,
        "log_level": "info",
        **({"moe_runner_backend": setup.backend} if asked else {}),
    }


class Vllm:
    def __init__(self, setup: Setup):
        import vllm

        if setup.backend == "tuned":
            use_tuned_files(Path(vllm.__file__).parent)
        self.version = vllm.__version__
        self.sampling = vllm.SamplingParams
        self.llm = vllm.LLM(model=str(setup.model.directory), **engine_options(setup))

    def generate(
        self, prompts: list[list[int]], tokens: int, logprobs: bool = False
    ) -> list[Generated]:
        sampling = self.sampling(
            temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=tokens,
            logprobs=0 if logprobs else None,
        )  # fmt: skip
        requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        return [
            Generated(
                list(output.token_ids),
                [
                    p[t].logprob
                    for p, t in zip(output.logprobs or (), output.token_ids, strict=False)
                ],
            )
            for output in (request.outputs[0] for request in outputs)
        ]

    def read(self, prompts: list[list[int]]) -> list[Read]:
        sampling = self.sampling(max_tokens=1, prompt_logprobs=1, detokenize=False)
        requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        return [
            Read(
                [p[t].logprob for p, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)],
                [max(p, key=lambda t: p[t].logprob) for p in output.prompt_logprobs[1:]],
            )
            for output, prompt in zip(outputs, prompts, strict=True)
        ]

    def graph_times(self, prompts: list[list[int]], tokens: int) -> list[float]:
        self.llm.collective_rpc("time_graphs", args=(tokens // 2,))
        self.generate(prompts, tokens)
        return last_rank(self.llm.collective_rpc("graph_times"))


def last_rank(times: list[list[float]]) -> list[float]:
    """Return the times of each step's graph on the rank that begins last: a rank that begins early
    waits for the others in the graph."""
    return list(map(min, zip(*times, strict=True)))


def use_tuned_files(vllm: Path) -> None:
    """Use vLLM's tuned configs for an H200 if it has none for this GPU; an H100 has fewer."""
    import torch

    name = torch.cuda.get_device_name().replace(" ", "_")
    folder = Path(os.environ[DIRECTORY]) / "tuned"
    folder.mkdir()
    configs = vllm / "model_executor/layers/fused_moe/configs"
    for file in configs.glob("*device_name=NVIDIA_H200,dtype=fp8_w8a8*"):
        target = file.name.replace("NVIDIA_H200", name)
        source = configs / target if (configs / target).is_file() else file
        (folder / target).write_bytes(source.read_bytes())
    os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(folder)


class Sglang:
    def __init__(self, setup: Setup):
        import sglang

        self.version = sglang.__version__
        self.engine = sglang.Engine(model_path=str(setup.model.directory), **engine_options(setup))

    def generate(
        self, prompts: list[list[int]], tokens: int, logprobs: bool = False
    ) -> list[Generated]:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
        outputs = self.engine.generate(
            input_ids=prompts, sampling_params=sampling, return_logprob=logprobs
        )
        return [
            Generated(
                list(output["output_ids"]),
                [entry[0] for entry in output["meta_info"].get("output_token_logprobs", ())],
            )
            for output in outputs
        ]

    def read(self, prompts: list[list[int]]) -> list[Read]:
        outputs = self.engine.generate(
            input_ids=prompts, sampling_params={"max_new_tokens": 1}, return_logprob=True,
            logprob_start_len=0, top_logprobs_num=1,
        )  # fmt: skip
        return [
            Read(
                [entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]],
                [best[0][1] for best in output["meta_info"]["input_top_logprobs"][1:]],
            )
            for output in outputs
        ]

    def graph_times(self, prompts: list[list[int]], tokens: int) -> list[float]:
        directory = Path(os.environ[DIRECTORY])
        for file in directory.glob("graphs-*.txt"):
            file.unlink()
        self.engine.collective_rpc("time_graphs", steps=tokens // 2)
        self.generate(prompts, tokens)
        self.engine.collective_rpc("report_graph_times")
        return last_rank([[*map(float, times)] for times in reported(directory, "graphs")])
