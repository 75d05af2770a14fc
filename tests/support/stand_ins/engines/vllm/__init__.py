"""The part of vLLM that `run.py serve` uses: one layer of experts on CPU tensors. Its tokens follow
from the prompts. Ours compiles two kernels at its start, one for the prefill of `LATE` tokens, one
if log-probabilities are asked for. The variable `STAND_IN` names the fault that a test wants."""

import importlib.metadata
import os
import pkgutil
import subprocess
import zlib
from types import SimpleNamespace

import torch

__version__ = "0.0.stand-in"
EXPERTS, HIDDEN, WIDTH, TOP_K = 4, 256, 128, 2
LATE = 8


class SamplingParams(SimpleNamespace):
    pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        fp8, scales = torch.float8_e4m3fn, {"w13_weight": (2, 2), "w2_weight": (2, 1)}
        for name, shape in {
            "w13_weight": (2 * WIDTH, HIDDEN),
            "w2_weight": (HIDDEN, WIDTH),
        }.items():
            for leaf, size, dtype in (
                (name, shape, fp8),
                (f"{name}_scale_inv", scales[name], torch.float32),
            ):
                value = torch.zeros(EXPERTS, *size, dtype=dtype)
                self.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))


def compiled(number: int):
    """A kernel as far as the compiler, kept nowhere."""
    from moe_fp8.kernels import compile as compiling
    from moe_fp8.serving import prepare

    prepare.compile_all([])  # as `prepare` does
    os.environ["MOE_FP8_CACHE_DIR"] = ""
    compiling.cute.compile = lambda kernel, *arguments, **options: kernel
    return compiling.compiled(Kernel, (number,), (), "sm_90a")


class Kernel(SimpleNamespace):
    def __init__(self, number: int):
        super().__init__(number=number)


class LLM:
    def __init__(self, **options):
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        self.options, self.wrong = options, os.environ.get("STAND_IN", "")
        print("worker", subprocess.Popen(["sleep", "600"]).pid, flush=True)
        if self.wrong == "does not start":
            raise RuntimeError("no room for the model")
        for entry in importlib.metadata.entry_points(group="vllm.general_plugins"):
            if not entry.value.startswith("moe_fp8."):  # it needs the real vLLM
                entry.load()()
        self.worker = pkgutil.resolve_name(options["worker_extension_cls"])()
        self.model = Model()
        if options["load_format"] == "dummy":
            DummyModelLoader().load_weights(self.model, None)
        self.ours = os.environ["MOE_FP8_VLLM"] != "0"
        if self.ours and self.wrong != "serves nothing":
            print("INFO moe_fp8 serves layers of 4 of 4 experts, top 2, 256 x 128", flush=True)
            self.compiled = [compiled(n) for n in range(2)]

    def collective_rpc(self, method, args=()):
        return [getattr(self.worker, method)(*args)]

    def generate(self, prompts, sampling, use_tqdm):
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        if self.ours and len(tokens) == 1:
            self.layer(len(tokens[0]))
            if len(tokens[0]) == LATE and len(self.compiled) == 2:
                self.compiled.append(compiled(2))
        if self.wrong == "dies":
            os._exit(3)
        if self.ours and getattr(sampling, "logprobs", None) == 0:
            self.compiled.append(compiled(3))
        return [
            SimpleNamespace(
                outputs=[self.output(prompt, sampling)], prompt_logprobs=self.read(prompt)
            )
            for prompt in tokens
        ]

    def read(self, prompt):
        """Predict every token but 1 with certainty, of 1 half: ours something less."""
        half = -0.7 - 0.1 * self.ours
        certain = {0: SimpleNamespace(logprob=-9.0)}
        return [None, *(
            {1: SimpleNamespace(logprob=half), 2: SimpleNamespace(logprob=-0.75)} if t == 1
            else certain | {t: SimpleNamespace(logprob=0.0)}
            for t in prompt[1:]
        )]  # fmt: skip

    def output(self, prompt, sampling):
        seed = zlib.crc32(bytes(str(prompt), "ascii"))
        token_ids = [(seed + 7 * n) % 100 for n in range(sampling.max_tokens)]
        logprobs = [{t: SimpleNamespace(logprob=-t / 100)} for t in token_ids]
        return SimpleNamespace(
            token_ids=token_ids,
            logprobs=logprobs if getattr(sampling, "logprobs", None) == 0 else None,
        )

    def layer(self, tokens: int):
        from moe_fp8.api import experts

        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        ids = torch.randint(EXPERTS, (tokens, TOP_K), generator=generator, dtype=torch.int32)
        model, weights = self.model, torch.rand(tokens, TOP_K, generator=generator)
        experts(
            ids, weights, x, model.w13_weight, model.w13_weight_scale_inv, model.w2_weight,
            model.w2_weight_scale_inv, accurate=os.environ["MOE_FP8_VLLM"] == "accurate",
        )  # fmt: skip
