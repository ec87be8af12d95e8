"""A tiny model, engines over it, and a backend that fails on command: shared by the tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import nan

from starter.cpu_backend import CpuBackend
from starter.engine import InferenceEngine
from starter.loading import Loaded
from starter.model import Model, reference_generate
from starter.schema import CharacterVocabulary, EngineSettings, ModelConfig, SamplingParams, TokenEvent
from starter.timeline import VirtualClock
from starter.tokenizer import CharacterTokenizer
from starter.weights import seeded_weights

VOCABULARY = 20
CONTEXT = 128
CONFIG = ModelConfig(vocab_size=VOCABULARY, width=8, layers=2, heads=4, kv_heads=2, ffn_width=12, max_context=CONTEXT,
                     tied_output=False)
WEIGHTS = seeded_weights(CONFIG, 71)  # a seed whose greedy output is varied
TOKENIZER = CharacterTokenizer(CharacterVocabulary("abcdefghijklmnopqrst"))

Outcome = tuple[tuple[int, float], ...]  # (token, logprob) of each token


class FaultyBackend(CpuBackend):
    """The CPU backend, and a switch for every way to go wrong.

    ``fault(moment, tokens)`` is called with the tokens of the batch at the "start" of a forward pass and in its
    "middle", when keys and values of the first layer are already stored; it may raise. Rows whose input token is in
    ``spoiled`` get NaN logits.
    """

    def __init__(self, fault: Callable[[str, Sequence[int]], None] | None = None, spoiled: Iterable[int] = ()) -> None:
        self.fault = fault or (lambda moment, tokens: None)
        self.spoiled = frozenset(spoiled)
        self.batch: Sequence[int] = ()
        self.picked: Sequence[int] = ()

    def embed(self, table, tokens):
        self.batch = tuple(tokens)
        self.fault("start", self.batch)
        return super().embed(table, tokens)

    def swiglu(self, gate, up):
        self.fault("middle", self.batch)
        return super().swiglu(gate, up)

    def pick(self, x, rows):
        self.picked = [self.batch[row] for row in rows]
        return super().pick(x, rows)

    def to_lists(self, x):
        return [[nan] * len(row) if token in self.spoiled else row for token, row in zip(self.picked, x)]


HEALTHY = Loaded(Model(CONFIG, WEIGHTS, CpuBackend()), TOKENIZER, {})


def make_engine(backend: CpuBackend | None = None, **settings: object) -> InferenceEngine:
    """An engine over the tiny model; its clock counts steps."""
    loaded = Loaded(Model(CONFIG, WEIGHTS, backend), TOKENIZER, {}) if backend else HEALTHY
    return InferenceEngine(loaded, EngineSettings().override(settings), VirtualClock())


@cache
def oracle(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Greedy tokens without a cache, a batch or a page."""
    return reference_generate(HEALTHY.model, prompt, max_tokens)


@dataclass(frozen=True)
class Ask:
    """A request to be: what ``submit`` is given."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_tokens: tuple[int, ...] = ()
    priority: int = 0

    def submit(self, engine: InferenceEngine, request_id: str) -> None:
        """Submit it."""
        engine.submit(self.prompt, self.max_tokens, request_id=request_id, sampling=self.sampling,
                      priority=self.priority, stop_tokens=self.stop_tokens)


@cache
def solo(ask: Ask, request_id: str = "solo") -> tuple[Outcome, ...]:
    """What each sample of a request yields alone, the prompt computed in one piece, with room for everything."""
    engine = make_engine(page_size=CONTEXT, num_pages=ask.sampling.n, budget_tokens=CONTEXT)
    ask.submit(engine, request_id)
    events = list(engine.stream(request_id))
    return tuple(outcome(events, number) for number in range(ask.sampling.n))


def outcome(events: Iterable[TokenEvent], number: int = 0) -> Outcome:
    """The tokens and logprobs of a sample's events, to be compared bit by bit."""
    return tuple((event.token, event.logprob) for event in events
                 if event.token is not None and event.sample == number)


def prompt_of(generator, length: int) -> tuple[int, ...]:
    """A random prompt."""
    return tuple(generator.randrange(VOCABULARY) for _ in range(length))
