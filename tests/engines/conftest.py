"""The engines' own kernel objects on CPU tensors, and who takes what is exported: `run.py test
--engines`.

vLLM and SGLang are either installed, or wheels unpacked below `$MOE_FP8_ENGINES` into `vllm/` and
`sglang/`, with what they import beside themselves in `deps/`. The tests of one that cannot be
imported are skipped. Each has a process of its own: they need not agree on what they import.

Sources of flashinfer-bench lie there in `flashinfer-bench/`.
"""
