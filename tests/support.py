"""A tiny model, engines over it, backends that fail on command, requests to try, programs run in this process."""

from __future__ import annotations

import io
import json
import random
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from starter.backend import ReferenceBackend
from starter.base.tokenizer import CharacterTokenizer
from starter.base.weights import seeded_weights
from starter.engine import InferenceEngine
from starter.model import Loaded, Model
from starter.reference import reference_generate
from starter.scheduler import POLICIES
from starter.schema import CharacterVocabulary, EngineSettings, ModelConfig, SamplingParams, TokenEvent
from starter.timeline import VirtualClock


class Run(NamedTuple):
    """What a program came to."""

    code: int
    out: str
    err: str


def run_main(main: Callable[[list[str]], int], *arguments: object) -> Run:
    """A program in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    return Run(code, out.getvalue(), err.getvalue())


def json_lines(path: Path) -> list[Any]:
    """What each line of a file holds, as strict JSON: NaN and Infinity are errors."""
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")
    return [json.loads(line, parse_constant=refuse)
            for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]


VOCABULARY = 20
CONTEXT = 128
CONFIG = ModelConfig(vocab_size=VOCABULARY, width=8, layers=2, heads=4, kv_heads=2, ffn_width=12, max_context=CONTEXT,
                     tied_output=False)
WEIGHTS = seeded_weights(CONFIG, 71)  # a seed whose greedy output is varied
TOKENIZER = CharacterTokenizer(CharacterVocabulary("abcdefghijklmnopqrst"))

GREEDY = SamplingParams()
Outcome = tuple[tuple[int, float], ...]  # (token, logprob) of each token


class FaultyBackend(ReferenceBackend):
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


def failing_on(token: int) -> FaultyBackend:
    """A backend that raises when a token is in the batch."""
    def fault(moment: str, tokens: Sequence[int]) -> None:
        if moment == "middle" and token in tokens:
            raise OSError(f"no luck with token {token}")

    return FaultyBackend(fault)


def failing_at(call: int, moment: str, error: BaseException) -> FaultyBackend:
    """A backend that raises once, at the call-th of the moments."""
    numbers = count()

    def fault(now: str, tokens: Sequence[int]) -> None:
        if now == moment and next(numbers) == call:
            raise error

    return FaultyBackend(fault)


HEALTHY = Loaded(Model(CONFIG, WEIGHTS, ReferenceBackend()), TOKENIZER, {})


def make_engine(backend: ReferenceBackend | None = None, **settings: object) -> InferenceEngine:
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
    sampling: SamplingParams = GREEDY
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


def prompt_of(dice: random.Random, length: int) -> tuple[int, ...]:
    """A random prompt."""
    return tuple(dice.randrange(VOCABULARY) for _ in range(length))


FIVE = {"a": Ask((3, 1, 4), 6), "b": Ask((1,), 9), "c": Ask((2, 7, 1, 8, 2, 8, 1, 8), 5), "d": Ask((5, 5), 1),
        "e": Ask((9, 9, 9, 9), 7)}
TIGHT = {"page_size": 2, "num_pages": 9, "budget_tokens": 6, "max_running": 4}  # five in here need preemption
ROOMY = {"page_size": 4, "num_pages": 64, "budget_tokens": 8, "max_running": 8}
SERVINGS: Sequence[dict[str, object]] = (
    {}, {"prefix_sharing": True}, {"preemption": "swap"}, {"preemption": "swap", "prefix_sharing": True},
    {"preemption": "swap", "host_pages": 3}, *({"policy": policy} for policy in POLICIES if policy != "fcfs"))
POISON = 19  # no prompt above holds this token
HEALTHY_FIVE = {name: ask for name, ask in FIVE.items() if POISON not in oracle(ask.prompt, ask.max_tokens)}


class EngineCase(unittest.TestCase):
    """What must hold of any engine at any time."""

    def submit(self, engine: InferenceEngine, asks: Mapping[str, Ask]) -> None:
        for name, ask in asks.items():
            ask.submit(engine, name)

    def check_events(self, events: Sequence[TokenEvent], reasons: Iterable[str], number: int = 0) -> None:
        """Of a sample: indices 0, 1, 2, ... once each; one last event with a reason, and nothing after it."""
        events = [event for event in events if event.sample == number]
        self.assertIn(events[-1].finish_reason, reasons)
        self.assertTrue(all(event.finish_reason is None and event.token is not None for event in events[:-1]))
        self.assertEqual([event.index for event in events], list(range(len(events))))
        self.assertEqual(events[-1].error is not None, events[-1].finish_reason == "error")

    def check_outcomes(self, engine: InferenceEngine, asks: Mapping[str, Ask], failed: Iterable[str] = ()) -> None:
        """Run to the end: tokens equal solo bit by bit, those of the failed a beginning of it; all is given back."""
        engine.run()
        for name, ask in asks.items():
            self.check_ask(engine.poll(name), name, ask, name in failed)
        self.check_empty(engine)

    def check_ask(self, events: Sequence[TokenEvent], name: str, ask: Ask, failed: bool = False) -> None:
        for number, expected in enumerate(solo(ask, name)):
            got = outcome(events, number)
            self.check_events(events, ("cancelled", "error") if failed else ("length", "stop"), number)
            self.assertEqual(got, expected[:len(got)] if failed else expected, f"{name}, sample {number}")

    def check_empty(self, engine: InferenceEngine) -> None:
        engine.kv.check()
        self.assertEqual((engine.kv.free_pages, engine.active), (engine.kv.total_pages, ()))
        self.assertEqual(engine.kv.free_host_pages, engine.kv.total_host_pages)
        self.assertFalse(engine._core.streams or engine._core.samples)  # nothing is remembered: K001, K003

    def picture(self, engine: InferenceEngine) -> object:
        """All that can be observed, the count of refusals aside."""
        streams = {name: engine.status(name) for name in engine._core.streams}
        return engine.active, engine.steps, engine.kv.stats(), streams, replace(engine.metrics(), refused=0)
