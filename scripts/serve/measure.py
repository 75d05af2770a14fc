"""What is measured of a running engine: one repeat a call, so that backends can take turns."""

import random
import time

from scripts.serve.engines import Engine, Generated
from scripts.serve.inside import CHECK_TOKENS

DECODE_PROMPT, DECODE_STEPS = 96, 32
MIXED_REQUESTS, MIXED_PROMPT, MIXED_TOKENS = 128, 512, 64
COMPARED_PROMPTS, COMPARED_TOKENS = (5, 64, 333, 1500), 32
OTHERS = 64
"""Requests among which one is to have the tokens that it has alone."""


def prompts(vocabulary: int, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    """Random tokens, but for the first and last few of a vocabulary, which mean something."""
    draw = random.Random(seed)
    return [[draw.randrange(10, vocabulary - 10) for _ in range(n)] for n in lengths]


class Measuring:
    """Of one engine, whose model has so many words."""

    def __init__(self, engine: Engine, vocabulary: int):
        self.engine, self.vocabulary = engine, vocabulary

    def seconds(self, lengths: tuple[int, ...], tokens: int, seed: int) -> float:
        """The engine's offline call returns when the last token is on the host."""
        given = prompts(self.vocabulary, lengths, seed)
        start = time.perf_counter()
        self.engine.generate(given, tokens)
        return time.perf_counter() - start

    def decode(self, batch: int, repeat: int) -> float:
        """ms of a step: what more tokens take than the first one."""
        lengths, seed = batch * (DECODE_PROMPT,), 1000 * batch + repeat
        first = self.seconds(lengths, 1, seed)
        return 1e3 * (self.seconds(lengths, 1 + DECODE_STEPS, seed) - first) / DECODE_STEPS

    def prefill(self, tokens: int, repeat: int) -> float:
        """ms of one prompt."""
        return 1e3 * self.seconds((tokens,), 1, 1000 * tokens + repeat)

    def mixed(self, requests: int, repeat: int) -> float:
        """Tokens, read and written, in a second, of requests that come at once."""
        lengths = requests * (MIXED_PROMPT,)
        taken = self.seconds(lengths, MIXED_TOKENS, repeat)
        return requests * (MIXED_PROMPT + MIXED_TOKENS) / taken

    def check(self) -> None:
        """The prompt whose calls `inside` compares."""
        self.engine.generate(prompts(self.vocabulary, (CHECK_TOKENS,), 2), 1)

    def compared(self) -> list[Generated]:
        """Tokens and their log-probabilities, to be compared with another backend's."""
        given = prompts(self.vocabulary, COMPARED_PROMPTS, 1)
        return self.engine.generate(given, COMPARED_TOKENS, logprobs=True)

    def alone(self) -> bool:
        """Whether a request has the same tokens alone and among others."""
        first, *others = prompts(self.vocabulary, (200, *range(1, OTHERS + 1)), 3)
        (single,) = self.engine.generate([first], COMPARED_TOKENS)
        return self.engine.generate([first, *others], COMPARED_TOKENS)[0].tokens == single.tokens
