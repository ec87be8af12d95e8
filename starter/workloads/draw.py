"""M6 · Streams of requests, drawn from a seed or read from a public trace, for fixtures, benchmarks and tests.

    generate_requests(Workload(seed=7, requests=20, arrivals="bursty"), model)    -> requests, cancel events
    generate_scenario(Workload(seed=7), page_size=4)                              -> a whole Scenario
    requests_from_trace("AzureLLMInferenceTrace_conv.csv", model)                 -> requests
    python3 -m starter draw --seed 7 --requests 20 --arrivals poisson > scenario.json

The three arrival patterns have the same mean rate and differ only in how they spread it over the steps:

    steady   |  |  |  |  |  |  |  |     every 1/rate steps
    poisson  ||    |  | |     |  ||     independent of each other
    bursty   |||         |||    |||     ``burst`` at once; the bursts come like poisson

The same seed gives the same numbers on every platform and Python version: the Mersenne Twister's random() does, and
all that follows it is integers, comparisons or a single IEEE 754 operation. log() and exp() are not used, because their
last bit differs between C libraries. Each aspect has its own generator, so changing arrivals, lengths or cancels leaves
the rest of the stream unchanged, and asking for more requests leaves the first ones unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from starter.base.console import EXIT_OK, Console, guarded, started
from starter.base.strict_json import Integer, ListOf, Nullable, Number, OneOf, Shape
from starter.errors import SchemaError
from starter.schema import (
    MAX_CONTEXT,
    MAX_PAGES,
    SCENARIO_VERSION,
    CharacterVocabulary,
    EngineSettings,
    ModelConfig,
    Request,
    SamplingParams,
    Scenario,
    ScenarioEvent,
    SeededWeights,
)
from starter.workloads.traces import BLOCK, read_trace

DEFAULT_VOCABULARY = CharacterVocabulary("\n !',-.0123456789?abcdefghijklmnopqrstuvwxyz", ("<bos>", "<eos>"))
DEFAULT_MODEL = ModelConfig(vocab_size=46, width=32, layers=2, heads=4, kv_heads=2, ffn_width=64, max_context=256,
                            bos_token=0, eos_tokens=(1,))
ARRIVALS = ("steady", "poisson", "bursty")
LENGTHS = ("short", "long", "mixed", "long-tailed")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
MAX_STEP = 1_000_000_000  # of an arrival, as in scenario files
_SHARE = Number(0.0, 1.0)


@dataclass(frozen=True)
class Workload:
    """What a stream of requests looks like. SchemaError, with the field as its path, for an invalid value.

    arrivals          one of ARRIVALS, or the arrival step of each request
    rate, burst       mean requests a step; requests in a burst (one burst of all: everything at step 0)
    prompt, output    lengths: one of LENGTHS, or (least, most). With L = half the context: short is up to L/16, long
                      from L/2 to L, mixed one long in four; long-tailed is Pareto from L/32 up (a length n times as
                      long is reached 1/n as often), cut at L
    prefix_share      this share of the prompts begins with the same prefix_tokens tokens, put before their own
    cancel_share      this share is cancelled, at a step from arrival + 1 to arrival + 2 max_tokens: before the
                      first token, midway, or after the end
    sample_share      this share is sampled by ``sampling``, each with a seed of its own; the others are greedy
    tokens            (first, last) token that a prompt may hold; None: all. Never the model's bos and eos tokens
    """

    seed: int = 0
    requests: int = 20
    arrivals: str | Sequence[int] = "poisson"
    rate: float = 0.5
    burst: int = 4
    prompt: str | Sequence[int] = "mixed"
    output: str | Sequence[int] = "mixed"
    prefix_share: float = 0.0
    prefix_tokens: int = 16
    cancel_share: float = 0.0
    sample_share: float = 0.0
    sampling: SamplingParams = SAMPLED
    tokens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        def span(low: int) -> Shape:
            return ListOf(Integer(low, MAX_CONTEXT), 2, 2)

        shapes: dict[str, Shape] = {
            "seed": Integer(0, 2**63 - 1), "requests": Integer(0, 100_000),
            "arrivals": _named(self.arrivals, ARRIVALS, ListOf(Integer(0, MAX_STEP))),
            "rate": Number(1e-3, 1e6), "burst": Integer(1, 100_000),
            "prompt": _named(self.prompt, LENGTHS, span(1)), "output": _named(self.output, LENGTHS, span(1)),
            "prefix_share": _SHARE, "prefix_tokens": Integer(0, MAX_CONTEXT),
            "cancel_share": _SHARE, "sample_share": _SHARE, "tokens": Nullable(span(0)),
        }
        for name, shape in shapes.items():
            object.__setattr__(self, name, shape.parse(getattr(self, name), f"/{name}"))
        if not isinstance(self.arrivals, str) and len(self.arrivals) != self.requests:
            raise SchemaError(f"names {len(self.arrivals)} steps for {self.requests} requests", "/arrivals")
        for name in ("prompt", "output", "tokens"):
            value = getattr(self, name)
            if isinstance(value, tuple) and value[0] > value[1]:
                raise SchemaError(f"the first of {value[0]}, {value[1]} must not be the larger", f"/{name}")


def _named(value: object, names: tuple[str, ...], numbers: Shape) -> Shape:
    return OneOf(names) if isinstance(value, str) else numbers


class _Draw:
    """The generator of one aspect. ``uniform()`` is a multiple of 2**-53 in [0, 1)."""

    def __init__(self, seed: int, aspect: str) -> None:
        digest = hashlib.sha256(f"{seed}/{aspect}".encode()).digest()
        self.uniform = random.Random(int.from_bytes(digest, "big")).random

    def below(self, n: int) -> int:
        """0 .. n - 1, equally likely. (The product rounds to less than n.)"""
        return int(self.uniform() * n)

    def chance(self, probability: float) -> bool:
        return self.uniform() < probability

    def exponential(self) -> float:
        """Exponential with mean 1, by comparisons only (von Neumann 1951, "Various techniques used in connection with
        random digits"): a falling run that begins with x has odd length with probability exp(-x)."""
        whole = 0
        while True:
            first = last = self.uniform()
            length = 1
            while (number := self.uniform()) < last:
                last = number
                length += 1
            if length % 2:
                return whole + first
            whole += 1


def generate_requests(workload: Workload, model: ModelConfig) -> tuple[tuple[Request, ...], tuple[ScenarioEvent, ...]]:
    """Requests "r1", "r2", ..., all of which fit the model's context, and cancels ordered by step. O(tokens)."""
    aspects = ("prompt lengths", "output lengths", "prefixes", "samples", "cancels")
    prompts, outputs, prefixes, samples, cancels = (_Draw(workload.seed, aspect) for aspect in aspects)
    allowed = _allowed_tokens(model, workload.tokens)
    prefix = _draw_tokens(workload.seed, "prefix", allowed, workload.prefix_tokens)
    requests, events = [], []
    for i, arrival in enumerate(_arrival_steps(workload), 1):
        shared = prefix if prefixes.chance(workload.prefix_share) else []
        length = len(shared) + _draw_length(prompts, workload.prompt, model.max_context)
        length, max_tokens = _fit(length, _draw_length(outputs, workload.output, model.max_context), model.max_context)
        tokens = (shared + _draw_tokens(workload.seed, f"prompt {i}", allowed, length - len(shared)))[:length]
        sampled, seed = samples.chance(workload.sample_share), samples.below(2**31)
        sampling = replace(workload.sampling, seed=seed) if sampled else SamplingParams()  # greedy
        requests.append(Request(f"r{i}", tokens, max_tokens, float(arrival), sampling=sampling))
        cancelled, after = cancels.chance(workload.cancel_share), cancels.uniform()
        if cancelled:
            events.append(ScenarioEvent(arrival + 1 + int(after * 2 * max_tokens), f"r{i}"))
    return tuple(requests), tuple(sorted(events, key=lambda event: event.step))


def _arrival_steps(workload: Workload) -> list[int]:
    if not isinstance(workload.arrivals, str):
        return list(workload.arrivals)
    if workload.arrivals == "steady":
        return [int(i / workload.rate) for i in range(workload.requests)]
    draw, time, steps = _Draw(workload.seed, "arrivals"), 0.0, []
    burst = workload.burst if workload.arrivals == "bursty" else 1
    for i in range(workload.requests):
        if i and i % burst == 0:
            time += draw.exponential() * burst / workload.rate
        steps.append(int(time))
    return steps


def _draw_length(draw: _Draw, lengths: str | Sequence[int], max_context: int) -> int:
    number, pick = draw.uniform(), draw.uniform()
    half = max(1, max_context // 2)
    if lengths == "long-tailed":
        return min(half, int(max(1, half // 32) / (1.0 - number)))
    if lengths == "mixed":
        lengths = "long" if pick < 0.25 else "short"
    if isinstance(lengths, str):
        low, high = (1, max(1, half // 16)) if lengths == "short" else (max(1, half // 2), half)
    else:
        low, high = lengths
    return low + int(number * (high - low + 1))


def _fit(prompt: int, output: int, max_context: int) -> tuple[int, int]:
    """Lengths cut to the context: the output to half of it or what the prompt leaves, then the prompt to the rest."""
    output = min(output, max(max_context // 2, max_context - prompt))
    return min(prompt, max_context - output), output


def _allowed_tokens(model: ModelConfig, limits: Sequence[int] | None) -> list[int]:
    first, last = limits or (0, model.vocab_size - 1)
    if last >= model.vocab_size:
        raise SchemaError(f"token {last} is outside the vocabulary of {model.vocab_size}", "/tokens")
    specials = {model.bos_token, *model.eos_tokens}
    allowed = [token for token in range(first, last + 1) if token not in specials]
    if not allowed:
        raise SchemaError(f"{first} to {last} holds no token but the model's bos and eos tokens", "/tokens")
    return allowed


def _draw_tokens(seed: int, aspect: str, allowed: Sequence[int], count: int) -> list[int]:
    draw = _Draw(seed, aspect)
    return [allowed[draw.below(len(allowed))] for _ in range(count)]


def generate_scenario(workload: Workload, model: ModelConfig = DEFAULT_MODEL,
                      vocabulary: CharacterVocabulary = DEFAULT_VOCABULARY, **settings: object) -> Scenario:
    """A scenario of these requests. Engine settings that are not given are drawn: pages of 1 to 32 tokens, 4 to 64
    tokens a step, 1 to 8 running, and a pool that holds the longest request one to three times."""
    requests, events = generate_requests(workload, model)
    draw = _Draw(workload.seed, "engine")
    drawn = {"page_size": 2 ** draw.below(6), "budget_tokens": 4 + draw.below(61), "max_running": 1 + draw.below(8)}
    engine = EngineSettings().override({**drawn, **settings})
    if "num_pages" not in settings:
        longest = max((len(request.prompt_tokens) + request.max_tokens for request in requests), default=1)
        pages = -(-longest // engine.page_size)
        engine = replace(engine, num_pages=min(MAX_PAGES, pages + draw.below(2 * pages + 1)))
    return Scenario(SCENARIO_VERSION, f"workload {workload.seed}", model, SeededWeights(workload.seed), vocabulary,
                    requests, description=f"drawn by {workload}"[:1_000], engine=engine, events=events)


def requests_from_trace(path: str | Path, model: ModelConfig, *, divide_lengths: int = 64, step_seconds: float = 0.1,
                        limit: int | None = None, seed: int = 0) -> tuple[Request, ...]:
    """The first ``limit`` requests of a trace, scaled down to this model; say so next to every number you report.

    Lengths are divided (the result is at least 1) and cut to the context; ``step_seconds`` of the trace are one step.
    Traces hold no text: tokens are drawn, equal for equal blocks, so that prompts share prefixes as they did in the
    trace. SchemaError as ``read_trace``, and for arrivals that are too late.
    """
    Integer(1, 1_000_000).parse(divide_lengths, "/divide_lengths")
    Number(1e-6, 1e6).parse(step_seconds, "/step_seconds")
    Nullable(Integer(1)).parse(limit, "/limit")
    rows = read_trace(path, limit)
    allowed = _allowed_tokens(model, None)

    @lru_cache(maxsize=4_096)
    def block(hash_id: int) -> list[int]:
        return _draw_tokens(seed, f"block {hash_id}", allowed, -(-BLOCK // divide_lengths))

    start, step = min(row.timestamp for row in rows), 1000 * Fraction(str(step_seconds))
    requests = []
    for i, row in enumerate(rows, 1):
        prompt, output = max(1, row.input_length // divide_lengths), max(1, row.output_length // divide_lengths)
        length, max_tokens = _fit(prompt, output, model.max_context)
        # Token j is the trace's token j * divide_lengths, and comes from that token's block.
        places = [divmod(j * divide_lengths, BLOCK) for j in range(length)]
        tokens = [block(row.hash_ids[which])[offset // divide_lengths] for which, offset in places]
        requests.append(Request(f"r{i}", tokens, max_tokens, float((row.timestamp - start) // step)))
    if (last := max(request.arrival for request in requests)) > MAX_STEP:
        raise SchemaError(f"a request arrives at step {last:.0f}; at most {MAX_STEP} is allowed; let a step be longer",
                          "/step_seconds")
    return tuple(requests)


# -------------------------------------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _name_or_numbers(text: str) -> str | tuple[int, ...]:
    """"long" -> "long"; "3,8" -> (3, 8)."""
    return tuple(map(int, text.split(","))) if re.fullmatch(r"[0-9]+(,[0-9]+)*", text) else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a scenario. Bad options are one line on standard error and exit code 2."""
    parser = _Parser(prog=started("python3 -m starter draw"), allow_abbrev=False, argument_default=argparse.SUPPRESS,
                     description="Print a scenario with requests drawn from a seed.")
    options: dict[str, tuple[Callable[[str], object], str]] = {
        "seed": (int, "of all draws"), "requests": (int, "how many"),
        "arrivals": (_name_or_numbers, f"{', '.join(ARRIVALS)}, or the step of each: 0,0,3"),
        "rate": (float, "mean requests a step"), "burst": (int, "requests in a burst"),
        "prompt": (_name_or_numbers, f"length: {', '.join(LENGTHS)}, or least and most: 5,20"),
        "output": (_name_or_numbers, "length, likewise"),
        "prefix-share": (float, "share of prompts with a common prefix"), "prefix-tokens": (int, "its length"),
        "cancel-share": (float, "share that is cancelled"), "sample-share": (float, "share that is sampled"),
    }
    settings = {"page-size": "page_size", "num-pages": "num_pages",
                "budget": "budget_tokens", "max-running": "max_running"}
    for name, (kind, text) in options.items():
        parser.add_argument(f"--{name}", type=kind, help=text)
    for name, setting in settings.items():
        parser.add_argument(f"--{name}", type=int, dest=setting, metavar="N", help="engine setting; drawn if not given")
    given = vars(parser.parse_args(arguments))
    engine = {setting: given.pop(setting) for setting in settings.values() if setting in given}

    def work() -> int:
        Console(sys.stdout).write(generate_scenario(Workload(**given), **engine).to_json())
        return EXIT_OK

    return guarded(work)
