"""What each idea of an inference engine is worth: the same requests again and again, one thing changed at a time.

Every rung keeps what the rungs above it have, in a pool of the same bytes. Time to first token and time per output
token are medians over the requests; positions are those that went through the decoder, prompts included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

from scripts.benches.engines import SHAPES, characters, with_characters
from scripts.benches.rounds import measure
from scripts.benches.tables import Table
from starter.backend import Backend
from starter.base.weights import seeded_weights
from starter.command.play import play, tokens_of
from starter.engine import InferenceEngine
from starter.metrics import Metrics
from starter.model import Loaded, Model
from starter.schema import EngineSettings, QuantizationConfig, SamplingParams, Scenario
from starter.workloads.draw import Workload, generate_scenario

SHAPE = SHAPES["260K"]
WORKLOAD = Workload(seed=6, requests=12, arrivals="poisson", rate=1.0, prompt=(8, 24), output=(8, 24),
                    prefix_share=1.0, prefix_tokens=32)
PIECE = 128  # slots: room for the longest request that would be allowed, which none of these is
PATIENCE = 20.0  # seconds: without a cache a backend in plain Python takes longer, and runs once


@dataclass(frozen=True)
class Rung:
    """``settings`` are those that change; ``about`` says what that means."""

    name: str
    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    quantization: QuantizationConfig | None = None


RUNGS = (
    Rung("no cache", "one request at a time; every token computes its whole context again",
         {"use_cache": False, "batching": "none", "page_size": PIECE, "num_pages": 4, "max_running": 12,
          "budget_tokens": 64}),
    Rung("cache", "keys and values are kept: a token computes one position", {"use_cache": True}),
    Rung("static batch", "requests that have come share their steps; the next ones wait until all of these have ended",
         {"batching": "static"}),
    Rung("continuous batch", "whoever ends makes room for the next at once", {"batching": "continuous"}),
    Rung("paged", f"the pool is {PIECE * 4 // 8} pages of 8 slots, not 4 pieces of {PIECE}: more requests fit",
         {"page_size": 8, "num_pages": PIECE * 4 // 8}),
    Rung("prefix sharing", "the 32 tokens with which all prompts begin are computed and kept once",
         {"prefix_sharing": True}),
    Rung("int8", "weights in 8 bits, a scale a row", quantization=QuantizationConfig(bits=8, group_size=None)),
    Rung("int4", "weights in 4 bits, a scale for 32 of them", quantization=QuantizationConfig(bits=4, group_size=32)),
)


class Climber:
    """A rung on a backend: a round is the whole stream, on an engine of its own."""

    def __init__(self, loaded: Loaded, settings: EngineSettings, scenario: Scenario) -> None:
        self._loaded, self._settings, self._scenario = loaded, settings, scenario
        self.weight_bytes = loaded.model.weight_bytes
        self.tokens: dict[str, list[int]] = {}  # of the last round
        self.metrics: list[Metrics] = []  # of every round

    def __call__(self) -> float:
        with InferenceEngine(self._loaded, self._settings) as engine:
            start = perf_counter()
            events = [event for played in play(engine, self._scenario) for event in played.events]
            seconds = perf_counter() - start
            self.tokens = tokens_of(events)
            self.metrics.append(engine.metrics())
        return self.metrics[-1].output_tokens / seconds

    def cells(self) -> dict[str, float]:
        """The table's further columns."""
        last = self.metrics[-1]
        return {"TTFT ms": median(each.ttft.p50 or 0.0 for each in self.metrics) * 1e3,
                "TPOT ms": median(each.tpot.p50 or 0.0 for each in self.metrics) * 1e3,
                "steps": last.steps, "positions": last.computed_tokens, "KV peak B": last.kv_peak_bytes,
                "weights B": self.weight_bytes}


def run(backends: Mapping[str, Backend], rounds: int) -> list[Table]:
    """A table for each backend; all rungs of all backends take turns."""
    weights = seeded_weights(SHAPE, 1)
    stream = scenario()
    climbers: dict[tuple[str, str], Climber] = {}
    for backend, computing in backends.items():
        models: dict[QuantizationConfig | None, Loaded] = {}
        settings = EngineSettings()
        for rung in RUNGS:
            if rung.quantization not in models:
                models[rung.quantization] = with_characters(
                    Model(SHAPE, weights, computing, rung.quantization))
            loaded, settings = models[rung.quantization], settings.override(rung.settings)
            climbers[backend, rung.name] = Climber(loaded, settings, stream)
    results = measure({f"{name}, {backend}": climber for (backend, name), climber in climbers.items()}, rounds,
                      PATIENCE)
    return [table(backend, {rung.name: climbers[backend, rung.name] for rung in RUNGS},
                  {rung.name: results[f"{rung.name}, {backend}"] for rung in RUNGS}) for backend in backends]


def scenario() -> Scenario:
    """The stream, in which an end-of-sequence token is like any other, so that every rung gives as many tokens."""
    drawn = generate_scenario(WORKLOAD, SHAPE, characters(SHAPE.vocab_size))
    return replace(drawn, requests=tuple(replace(request, sampling=SamplingParams(ignore_eos=True))
                                         for request in drawn.requests))


def table(backend: str, climbers: Mapping[str, Climber], results: Mapping[str, Sequence[float]]) -> Table:
    """A backend's rungs, each beside the one above it."""
    made = Table(f"ladder, {backend}", against="previous", columns={
        "TTFT ms": ",.1f", "TPOT ms": ",.2f", "steps": ",.0f", "positions": ",.0f", "KV peak B": ",.0f",
        "weights B": ",.0f"})
    above = None
    for name, climber in climbers.items():
        made.add(name, results[name], above, **climber.cells())
        above = results[name]
    made.notes.append(same_tokens({rung.name: climbers[rung.name].tokens for rung in RUNGS
                                   if rung.quantization is None}))
    return made


def same_tokens(tokens: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Do all rungs with float weights answer alike?"""
    (first, wanted), *others = tokens.items()
    different = [name for name, found in others if found != wanted]
    count = sum(map(len, wanted.values()))
    return (f"All {len(tokens)} rungs with float weights give the same {count} greedy tokens." if not different else
            f"Greedy tokens differ from those of {first}: {', '.join(different)}.")


def legend() -> list[str]:
    """What each rung changes."""
    width = max(len(rung.name) for rung in RUNGS)
    return [f"{WORKLOAD.requests} requests drawn from seed {WORKLOAD.seed}, about one a step: prompts of 40 to 56 "
            "tokens, 8 to 24 new ones, greedy; 260K shape",
            *(f"{rung.name:{width}}   {rung.about}" for rung in RUNGS)]
