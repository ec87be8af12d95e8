"""Our engine as a contestant: the whole of it, scheduler, pages, sampling and events included."""

from __future__ import annotations

import random
from copy import copy
from statistics import median
from time import perf_counter
from typing import Any

from starter.base.tokenizer import CharacterTokenizer
from starter.engine import InferenceEngine
from starter.model import Loaded, Model
from starter.schema import CharacterVocabulary, EngineSettings, ModelConfig, SamplingParams

FIXED: dict[str, Any] = {  # what llama2.c fixes; UNSAID in starter/checkpoints, which may be missing
    "rope_theta": 10_000.0, "norm_eps": 1e-5, "bos_token": 1, "eos_tokens": (1, 2), "head_dim": None,
    "attention_bias": False, "qk_norm": False, "rope_scaling": None}
SHAPES = {  # llama2.c's
    "260K": ModelConfig(vocab_size=512, width=64, layers=5, heads=8, kv_heads=4, ffn_width=172, max_context=512,
                        tied_output=True, **FIXED),
    "15M": ModelConfig(vocab_size=32_000, width=288, layers=6, heads=6, kv_heads=6, ffn_width=768, max_context=256,
                       tied_output=True, **FIXED),
}
PROMPT = 112  # tokens before the measured ones
PAGE_SIZE = 64


def characters(count: int) -> CharacterVocabulary:
    """One for each token of a model that has learned no text."""
    return CharacterVocabulary("".join(map(chr, range(0x4E00, 0x4E00 + count))))


def with_characters(model: Model) -> Loaded:
    """A model of random weights, ready to serve."""
    return Loaded(model, CharacterTokenizer(characters(model.config.vocab_size)), {})


def random_prompts(count: int, length: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    """The same for every contestant."""
    dice = random.Random(seed)
    return [[dice.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]


class Ours:
    """Our engine with ``batch`` equal requests in the middle of decoding: a round is ``tokens`` steps."""

    def __init__(self, loaded: Loaded, batch: int, tokens: int, workers: int = 1, prompt: int = PROMPT) -> None:
        self.tokens = tokens
        self.prompts = random_prompts(batch, prompt, loaded.model.config.vocab_size)
        self.max_tokens = 3 + tokens  # one with the prompt, one while the first steps are made, and nobody ends
        pages = -(-(prompt + self.max_tokens) // PAGE_SIZE)
        settings = EngineSettings(page_size=PAGE_SIZE, num_pages=batch * pages, max_running=batch, workers=workers,
                                  budget_tokens=batch * prompt)  # all prompts in one step
        metered = Loaded(copy(loaded.model), loaded.tokenizer, loaded.about)  # weights are shared, ``forward`` is not
        self.engine = InferenceEngine(metered, settings)
        self._forward_seconds = 0.0
        self._shares: list[float] = []
        self._meter()

    def _meter(self) -> None:
        """Time the decoder inside the engine's steps: what is left is the engine's own."""
        forward = self.engine.model.forward

        def timed(batch: Any, store: Any) -> Any:
            start = perf_counter()
            logits = forward(batch, store)
            self._forward_seconds += perf_counter() - start
            return logits

        self.engine.model.forward = timed  # type: ignore[method-assign]

    def __call__(self) -> float:
        """Tokens per second of all requests together, over steps that only decode."""
        ids = [self.engine.submit(prompt, self.max_tokens, sampling=SamplingParams(ignore_eos=True))
               for prompt in self.prompts]
        while any(chunk.phase == "prefill" for chunk in self.engine.step().chunks):
            pass
        self._forward_seconds = 0.0
        start = perf_counter()
        decisions = [self.engine.step() for _ in range(self.tokens)]
        seconds = perf_counter() - start
        served = sum(len(decision.chunks) for decision in decisions)
        self._shares.append(1.0 - self._forward_seconds / seconds)
        for request_id in ids:
            self.engine.cancel(request_id)
            for _ in self.engine.stream(request_id):
                pass
        return served / seconds

    @property
    def overhead(self) -> float:
        """Share of the steps that was not the decoder, median of the rounds."""
        return median(self._shares)


class Prompt:
    """Our engine computing one prompt: a round is from ``submit`` to the first token."""

    def __init__(self, loaded: Loaded, length: int) -> None:
        self.prompt = random_prompts(1, length, loaded.model.config.vocab_size)[0]
        self.engine = InferenceEngine(loaded, EngineSettings(page_size=PAGE_SIZE, num_pages=-(-length // PAGE_SIZE),
                                                             budget_tokens=length))

    def __call__(self) -> float:
        """Tokens of the prompt per second."""
        start = perf_counter()
        list(self.engine.stream(self.engine.submit(self.prompt, 1)))
        return len(self.prompt) / (perf_counter() - start)
