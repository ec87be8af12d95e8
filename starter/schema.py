"""M1 · A scenario, and how it is written in JSON: all that decides a run, and what must come out.

    fixtures/tiny_model.json --load_scenario()--> Scenario
                                                  +-- model: ModelConfig            sizes of the decoder
                                                  +-- weights: SeededWeights | SafetensorsWeights
                                                  +-- tokenizer: CharacterVocabulary
                                                  +-- engine: EngineSettings        pages, budget, policy
                                                  +-- quantization: QuantizationConfig or null
                                                  +-- requests: (Request, ...)      arrival counted in steps
                                                  +-- events: (ScenarioEvent, ...)  cancels
                                                  +-- faults: (Fault, ...)          what goes wrong on purpose
                                                  +-- golden: Golden or null        what must come out

Each noun is a frozen dataclass whose ``__post_init__`` checks the rules that join several fields; each has a
shape (``base/strict_json.py``) that parses it strictly and prints its JSON Schema. ``python3 -m starter.schema`` prints
the schema of a whole scenario (draft 2020-12), which is kept in ``fixtures/scenario.schema.json``. Model and requests
have files of their own, ``base/model_config.py`` and ``schema.py``; their names can be imported from here, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Union

from .base.console import EXIT_OK, Console, guarded, run_program
from .base.fault_kinds import FAULT_SHAPE, ID_SHAPE, Fault
from .base.model_config import (
    MAX_CONTEXT,
    MAX_VOCABULARY,
    MODEL_SHAPE,
    QUANTIZATION_SHAPE,
    TOKEN_SHAPE,
    ModelConfig,
    QuantizationConfig,
)
from .base.strict_json import (
    Boolean,
    Choice,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    Number,
    Pair,
    Record,
    Tagged,
    Text,
    parse_json,
    pointer,
    read_json,
)
from .base.tokenizer import CharacterVocabulary
from .errors import CapacityError, RequestError, SchemaError

# ---------------------------------------------------------------------------------- what is asked, and what is answered

#: M1 · What is asked of an engine and what it answers: a request, how it samples, and the events of its tokens.
#:
#: A request is checked when it is made, from code or from JSON: RequestError says in one sentence what was given and what
#: is allowed. ``check_against`` asks what only the model knows; what only an engine knows is asked by its ``submit``.


MAX_SAMPLES = 64


def _require_integer(name: str, value: object, low: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        raise RequestError(f"{name} must be an integer{'' if low is None else f' from {low}'}, not {value!r}")


def _require_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a string that is not empty, not {value!r}")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise RequestError(f"{name} {value!r} holds half of a surrogate pair, which is no character")


def _repr(record: Any) -> str:
    """What a dataclass would print of itself, without the fields that have their defaults."""
    return _without_defaults(record, {field.name: field.default for field in fields(record)})


def _without_defaults(record: Any, defaults: Mapping[str, object]) -> str:
    shown = [f"{name}={value!r}" for name in record.__match_args__
             if (value := getattr(record, name)) != defaults.get(name, MISSING)]
    return f"{type(record).__name__}({', '.join(shown)})"


@dataclass(frozen=True)
class SamplingParams:
    """How a request picks its next token from the logits.

    temperature  0 is greedy (the first of equal maxima); larger flattens the distribution
    top_k        keep the k likeliest tokens; 0 keeps all
    top_p        keep the fewest likeliest tokens whose probabilities reach p (Holtzman et al. 2020); 1 keeps all
    min_p        drop tokens less likely than min_p times the likeliest; 0 drops none
    seed         of this request's own generator; None derives it from the engine's seed and the request id
    logit_bias   (token, number) pairs added to the logits; a mapping is accepted
    repetition_penalty, presence_penalty, frequency_penalty    see ``sampling.adjust``
    min_tokens   no end, stop token or stop string before so many tokens
    ignore_eos   end-of-sequence tokens are tokens like any other
    stop         strings that end the text; they are not part of it
    logprobs     how many of the likeliest tokens each event lists; None lists none
    n            samples of one prompt; they share its pages
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # kept as sorted pairs
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()  # kept as a tuple
    logprobs: int | None = None
    n: int = 1
    __repr__ = _repr

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, 1e6)
        _require_integer("top_k", self.top_k, 0)
        _require_number("top_p", self.top_p, 0.0, 1.0)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _require_integer("seed", self.seed, 0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _require_number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _require_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _require_integer("min_tokens", self.min_tokens, 0)
        _require_integer("n", self.n, 1)
        if self.n > MAX_SAMPLES:
            raise RequestError(f"n must be at most {MAX_SAMPLES}, not {self.n}")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if self.logprobs is not None:
            _require_integer("logprobs", self.logprobs, 0)
        bias = self.logit_bias
        if isinstance(bias, (str, bytes)) or not isinstance(bias, (Mapping, Sequence)) or not all(
                isinstance(pair, Sequence) and len(pair) == 2 for pair in self.bias):
            raise RequestError(f"logit_bias must be a mapping from token to number, or (token, number) pairs, not "
                               f"{bias!r}")
        for token, value in self.bias:
            _require_integer("a logit_bias token", token, 0)
            _require_number("a logit_bias value", value, -1e6, 1e6)
        object.__setattr__(self, "logit_bias", tuple(sorted((token, float(value)) for token, value in self.bias)))
        stops = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stops, Sequence) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"stop must be strings that are not empty, not {self.stop!r}; no stop string is []")
        object.__setattr__(self, "stop", tuple(stops))

    @cached_property
    def plain(self) -> bool:
        """Greedy, and nothing but the likeliest token matters."""
        return not (self.temperature or self.min_tokens or self.logit_bias or self.presence_penalty
                    or self.frequency_penalty) and self.repetition_penalty == 1.0 and self.logprobs is None

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as it is kept."""
        return tuple(self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias)


@dataclass(frozen=True)
class Request:
    """One prompt and how far to continue it.

    ``arrival`` is on the clock of whoever drives the engine; scenarios count it in steps. ``stop_tokens`` end
    the request like the model's own end-of-sequence tokens. ``priority`` and ``cache_salt`` are carried for
    policies and prefix sharing.
    """

    request_id: str
    prompt_tokens: Sequence[int]  # kept as a tuple
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    sampling: SamplingParams = SamplingParams()
    stop_tokens: Sequence[int] = ()  # kept as a tuple
    cache_salt: str | None = None
    __repr__ = _repr

    def __post_init__(self) -> None:
        _require_text("request_id", self.request_id)
        if self.cache_salt is not None:
            _require_text("cache_salt", self.cache_salt)
        if isinstance(self.stop_tokens, (str, bytes)) or not isinstance(self.stop_tokens, Sequence):
            raise RequestError(f"stop_tokens must be a sequence of token numbers, not {self.stop_tokens!r}")
        if isinstance(self.prompt_tokens, (str, bytes)) or not isinstance(self.prompt_tokens, Sequence):
            kind = type(self.prompt_tokens).__name__
            raise RequestError(f"prompt_tokens must be a sequence of token numbers, not a {kind}; encode text first")
        object.__setattr__(self, "prompt_tokens", tuple(self.prompt_tokens))
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        if not self.prompt_tokens:
            raise RequestError("the prompt is empty; give at least one token, for instance the model's bos_token")
        for token in self.prompt_tokens:
            _require_integer("a prompt token", token, 0)
        for token in self.stop_tokens:
            _require_integer("a stop token", token, 0)
        _require_integer("max_tokens", self.max_tokens, 0)
        _require_integer("priority", self.priority, None)
        _require_number("arrival", self.arrival, 0.0, float("inf"))
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(f"sampling must be a SamplingParams, not {self.sampling!r}")

    def check_against(self, model: ModelConfig) -> None:
        """Raise RequestError or CapacityError where this model cannot serve the request. O(prompt)."""
        for token in (*self.prompt_tokens, *self.stop_tokens):
            if token >= model.vocab_size:
                raise RequestError(f"token {token} is outside the vocabulary; allowed: 0 to {model.vocab_size - 1}")
        for token, _ in self.sampling.bias:
            if token >= model.vocab_size:
                raise RequestError(f"logit_bias names token {token}; allowed: 0 to {model.vocab_size - 1}")
        if (self.sampling.logprobs or 0) > model.vocab_size:
            raise RequestError(f"logprobs {self.sampling.logprobs} is more than the vocabulary of {model.vocab_size}")
        total = len(self.prompt_tokens) + self.max_tokens
        if total > model.max_context:
            raise CapacityError(
                f"prompt {len(self.prompt_tokens)} + max_tokens {self.max_tokens} = {total} tokens exceed the context "
                f"of {model.max_context}; shorten the prompt or ask for at most "
                f"{max(0, model.max_context - len(self.prompt_tokens))} tokens")


class TokenEvent(NamedTuple):
    """One token of one request, or (token None) the end of a request that ended without one.

    ``index`` counts a request's tokens from 0 without gaps. ``text`` is what this token adds to the decoded text.
    ``step`` and ``time`` say when (the engine's step count; its clock, seconds). ``logprob`` is the natural
    logarithm of the token's probability at temperature 1. ``finish_reason`` is None except on the last event:
    "stop", "length", "cancelled" or "error", the last with the reason in ``error``. With n > 1 samples each has its own
    indices and its own last event. ``top_logprobs`` lists (token, logprob) of the likeliest, if asked for.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    token: int | None
    text: str
    step: int
    time: float
    logprob: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    sample: int = 0
    top_logprobs: tuple[tuple[int, float], ...] = ()

    def __repr__(self) -> str:
        return _without_defaults(self, self._field_defaults)

    @property
    def sequence_id(self) -> str:
        """Of the sample, as the scheduler and the timeline know it."""
        return sample_id(self.request_id, self.sample) if self.sample else self.request_id


TokenFields = tuple[str, int, Union[int, None], str, int, float, Union[float, None], Union[str, None], Union[str, None],
                    int, tuple[tuple[int, float], ...]]
"""A TokenEvent, or the same without the names, as a step makes it of every token and keeps it until somebody reads it:
that is made faster, and Python's garbage collector looks at a plain tuple of numbers and texts only once."""


def sample_id(request_id: str, number: int) -> str:
    """Id of the sequence that is a request's sample of this number."""
    return request_id if number == 0 else f"{request_id}#{number}"


# -------------------------------------------------------------------------------------------------- shapes

TOKENS_SHAPE = ListOf(TOKEN_SHAPE, longest=MAX_CONTEXT)
SEED_SHAPE = Integer(0, 2**63 - 1)

SAMPLING_SHAPE = Record(SamplingParams, {
    "temperature": Number(0.0, 1e6),
    "top_k": Integer(0),
    "top_p": Number(0.0, 1.0),
    "min_p": Number(0.0, 1.0),
    "seed": Nullable(SEED_SHAPE),
    "logit_bias": ListOf(Pair(TOKEN_SHAPE, Number(-1e6, 1e6)), longest=MAX_VOCABULARY),
    "repetition_penalty": Number(0.01, 100.0),
    "presence_penalty": Number(-100.0, 100.0),
    "frequency_penalty": Number(-100.0, 100.0),
    "min_tokens": Integer(0, MAX_CONTEXT),
    "ignore_eos": Boolean(),
    "stop": ListOf(Text(1, 1_000), longest=64),
    "logprobs": Nullable(Integer(0, MAX_VOCABULARY)),
    "n": Integer(1, MAX_SAMPLES),
}, sparse=True)

REQUEST_SHAPE = Record(Request, {
    "request_id": ID_SHAPE,
    "prompt_tokens": ListOf(TOKEN_SHAPE, 1, MAX_CONTEXT),
    "max_tokens": Integer(0, MAX_CONTEXT),
    "arrival": Number(0.0, 1e9),
    "priority": Integer(-1_000_000, 1_000_000),
    "sampling": SAMPLING_SHAPE,
    "stop_tokens": ListOf(TOKEN_SHAPE, longest=64),
    "cache_salt": Nullable(Text(1, 200)),
}, sparse=True)

TOKEN_EVENT_SHAPE = Record(TokenEvent, {
    "request_id": ID_SHAPE,
    "index": Integer(),
    "token": Nullable(TOKEN_SHAPE),
    "text": Text(),
    "step": Integer(),
    "time": Number(0.0, 1e15),
    "logprob": Nullable(Number(-1e300, 0.0)),
    "finish_reason": Nullable(Choice(("stop", "length", "cancelled", "error"))),
    "error": Nullable(Text()),
    "sample": Integer(),
    "top_logprobs": ListOf(Pair(TOKEN_SHAPE, Number(-1e300, 0.0)), longest=MAX_VOCABULARY),
})


# ----------------------------------------------------------------------------------------------------------- a scenario

SCENARIO_VERSION = 1
MAX_PAGES = 1_048_576
POLICY_NAMES = ("fcfs", "priority", "shortest", "prefill-first")

__all__ = [  # with what belongs to a scenario and has its own home
    "ENGINE_SHAPE", "FAULT_SHAPE", "MAX_CONTEXT", "MAX_PAGES", "MODEL_SHAPE", "POLICY_NAMES", "QUANTIZATION_SHAPE",
    "REQUEST_SHAPE", "SAMPLING_SHAPE", "SCENARIO_VERSION", "TOKENIZER_SHAPE", "TOKEN_EVENT_SHAPE", "WEIGHTS_SHAPE",
    "CharacterVocabulary", "EngineSettings", "Golden", "ModelConfig", "QuantizationConfig", "Request",
    "SafetensorsWeights", "SamplingParams", "Scenario", "ScenarioEvent", "SeededWeights", "TokenEvent", "compact_json",
    "load_scenario", "parse_scenario", "scenario_json_schema",
]


@dataclass(frozen=True)
class ScenarioEvent:
    """Something done to the engine just before step ``step``: for now, cancel a request."""

    step: int
    cancel: str


@dataclass(frozen=True)
class SeededWeights:
    """Weights drawn from ``seed`` by ``weights.seeded_weights``; ``sha256`` of their bytes guards against drift."""

    seed: int
    sha256: str | None = None


@dataclass(frozen=True)
class SafetensorsWeights:
    """Weights in a safetensors file; ``path`` is relative to the scenario file."""

    path: str
    sha256: str | None = None


@dataclass(frozen=True)
class EngineSettings:
    """Everything about serving that is not the model.

    page_size         tokens in a KV page                  num_pages        pages in the pool
    kv_budget_bytes   instead of num_pages: as many pages as fit in so many bytes; in int8, also what max_running pages
                      need while they are filled
    budget_tokens     tokens computed in a step, at most   max_running      requests admitted at a time
    batching          "continuous": requests join and leave in every step; "static": a batch is admitted when the
                      last one has ended; "none": one request at a time
    max_waiting       requests that may wait; more are refused with QueueFullError
    policy            who goes first: "fcfs", "priority", "shortest", "prefill-first" (see ``scheduler.py``)
    preemption        when pages run out: "recompute" the victim's tokens later, or "swap" them to host_pages pages
    prefix_sharing    requests that begin alike share the pages of what they have in common
    kv_quantization   "int8": KV pages of 8-bit codes (see ``backends/int8_pages.py``); null: of floats
    use_cache         False recomputes the whole context for every token (for comparison)
    workers           processes that compute, this one included (see ``backends/workers/parallel.py``)
    seed              of the sampling generators of requests that bring no seed of their own
    """

    page_size: int = 16
    num_pages: int = 64
    kv_budget_bytes: int | None = None
    budget_tokens: int = 32
    max_running: int = 8
    batching: str = "continuous"
    max_waiting: int = 100_000
    policy: str = "fcfs"
    preemption: str = "recompute"
    host_pages: int = 64
    prefix_sharing: bool = False
    use_cache: bool = True
    kv_quantization: str | None = None
    workers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kv_quantization is not None and not self.use_cache:
            raise SchemaError("without a cache (use_cache false) there are no KV pages to quantize; use null",
                              "/kv_quantization")
        if self.workers > 1 and not self.use_cache:
            raise SchemaError("without a cache (use_cache false) one process computes everything; use 1 worker",
                              "/workers")

    def override(self, changes: Mapping[str, object]) -> EngineSettings:
        """A copy with some settings replaced, checked like the file they usually come from."""
        settings: EngineSettings = ENGINE_SHAPE.parse({**dataclasses.asdict(self), **changes}, "/engine")
        return settings


@dataclass(frozen=True)
class Golden:
    """What the scenario must produce: greedy tokens by request id (a cancelled request may deliver fewer).

    ``smallest_margin`` is the least distance between the best and the second-best logit over all steps: as long
    as two implementations differ by less than half of it, they must agree on every token.
    """

    tokens: Mapping[str, tuple[int, ...]]
    smallest_margin: float
    made_by: str = ""


@dataclass(frozen=True)
class Scenario:
    """A reproducible run: a model, how to serve it, what arrives when, and what must come out."""

    version: int
    name: str
    model: ModelConfig
    weights: Union[SeededWeights, SafetensorsWeights]
    tokenizer: CharacterVocabulary
    requests: tuple[Request, ...]
    description: str = ""
    engine: EngineSettings = EngineSettings()
    quantization: QuantizationConfig | None = None
    events: tuple[ScenarioEvent, ...] = ()
    faults: tuple[Fault, ...] = ()
    golden: Golden | None = None
    folder: Path = field(default=Path(), compare=False)  # where relative paths start; not part of the JSON

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for i, request in enumerate(self.requests):
            path = f"/requests/{i}"
            if request.request_id in seen:
                raise SchemaError(f"the id {request.request_id!r} stands twice", f"{path}/request_id")
            seen.add(request.request_id)
            try:
                request.check_against(self.model)
            except RequestError as error:
                raise SchemaError(str(error), path) from None
        for i, event in enumerate(self.events):
            if event.cancel not in seen:
                raise SchemaError(f"no request has the id {event.cancel!r}", f"/events/{i}/cancel")
        for i, fault in enumerate(self.faults):
            if getattr(fault, "request_id", None) not in (None, *seen):
                raise SchemaError(f"no request has the id {getattr(fault, 'request_id', None)!r}",
                                  f"/faults/{i}/request_id")
        for request_id, tokens in (self.golden.tokens if self.golden else {}).items():
            if request_id not in seen:
                raise SchemaError("no request has this id", pointer("/golden/tokens", request_id))
            if any(token >= self.model.vocab_size for token in tokens):
                raise SchemaError("holds a token outside the vocabulary", pointer("/golden/tokens", request_id))
        size = len(self.tokenizer.specials) + len(self.tokenizer.characters)
        if size != self.model.vocab_size:
            raise SchemaError(f"names {size} tokens, the model has vocab_size {self.model.vocab_size}", "/tokenizer")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; ``parse_scenario(json.dumps(s.to_dict())) == s``."""
        document = SCENARIO_SHAPE.dump(self)
        assert isinstance(document, dict)
        return document

    def to_json(self) -> str:
        """``to_dict`` as text: a line a request, event and golden sequence, so that a change reads well in a diff."""
        return compact_json(self.to_dict())


# -------------------------------------------------------------------------------------------------- shapes

_SHA256 = Nullable(Text(64, 64))

SCENARIO_EVENT_SHAPE = Record(ScenarioEvent, {"step": Integer(), "cancel": ID_SHAPE})

WEIGHTS_SHAPE = Tagged("source", {
    "seeded": Record(SeededWeights, {"seed": SEED_SHAPE, "sha256": _SHA256}),
    "safetensors": Record(SafetensorsWeights, {"path": Text(1, 4_096), "sha256": _SHA256}),
})

TOKENIZER_SHAPE = Record(CharacterVocabulary, {
    "characters": Text(1, MAX_VOCABULARY),
    "specials": ListOf(Text(1, 100), longest=1_000),
})

ENGINE_SHAPE = Record(EngineSettings, {
    "page_size": Integer(1, 65_536),
    "num_pages": Integer(1, MAX_PAGES),
    "kv_budget_bytes": Nullable(Integer(1, 2**50)),
    "budget_tokens": Integer(1, MAX_CONTEXT),
    "max_running": Integer(1, 65_536),
    "batching": Choice(("continuous", "static", "none")),
    "max_waiting": Integer(1),
    "policy": Choice(tuple(POLICY_NAMES)),
    "preemption": Choice(("recompute", "swap")),
    "host_pages": Integer(0, MAX_PAGES),
    "prefix_sharing": Boolean(),
    "use_cache": Boolean(),
    "kv_quantization": Nullable(Choice(("int8",))),
    "workers": Integer(1, 64),
    "seed": SEED_SHAPE,
})


GOLDEN_SHAPE = Record(Golden, {
    "tokens": MapOf(TOKENS_SHAPE),
    "smallest_margin": Number(0.0, 1e9),
    "made_by": Text(),
})

SCENARIO_SHAPE = Record(Scenario, {
    "version": Integer(SCENARIO_VERSION, SCENARIO_VERSION),
    "name": Text(1, 200),
    "description": Text(),
    "model": MODEL_SHAPE,
    "weights": WEIGHTS_SHAPE,
    "tokenizer": TOKENIZER_SHAPE,
    "engine": ENGINE_SHAPE,
    "quantization": Nullable(QUANTIZATION_SHAPE),
    "requests": ListOf(REQUEST_SHAPE, longest=100_000),
    "events": ListOf(SCENARIO_EVENT_SHAPE, longest=100_000),
    "faults": ListOf(FAULT_SHAPE, longest=10_000),
    "golden": Nullable(GOLDEN_SHAPE),
})


# ------------------------------------------------------------------------------------- reading and writing


def parse_scenario(text: str, folder: Path = Path()) -> Scenario:
    """JSON text -> Scenario, or SchemaError with a JSON pointer."""
    scenario: Scenario = SCENARIO_SHAPE.parse(parse_json(text), "")
    return dataclasses.replace(scenario, folder=folder)


def load_scenario(path: str | Path) -> Scenario:
    """Scenario file -> Scenario. SchemaError on anything malformed or unreadable; no other exception escapes."""
    if not isinstance(path, (str, Path)):
        raise SchemaError(f"a path is wanted, not {path!r}")
    scenario: Scenario = SCENARIO_SHAPE.parse(read_json(path), "")
    return dataclasses.replace(scenario, folder=Path(path).parent)


def compact_json(document: Mapping[str, object]) -> str:
    """Indented JSON whose second level stays on one line: ``{"a": {<newline> "b": [1, 2, 3]}}``."""
    def block(value: object, opening: str, closing: str, lines: Sequence[str]) -> str:
        return opening + "\n    " + ",\n    ".join(lines) + "\n  " + closing if lines else opening + closing

    parts = []
    for key, value in document.items():
        if isinstance(value, Mapping):
            lines = [f"{_flat(k)}: {_flat(v)}" for k, v in value.items()]
            parts.append(f"{_flat(key)}: {block(value, '{', '}', lines)}")
        elif isinstance(value, list):
            parts.append(f"{_flat(key)}: {block(value, '[', ']', [_flat(v) for v in value])}")
        else:
            parts.append(f"{_flat(key)}: {_flat(value)}")
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"


def _flat(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def scenario_json_schema() -> dict[str, object]:
    """JSON Schema, draft 2020-12, of a scenario file; it says what the shapes say, less the rules that join fields."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Scenario of the mini inference engine",
        **SCENARIO_SHAPE.json_schema(),
        "$defs": {"token_event": TOKEN_EVENT_SHAPE.json_schema()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the JSON Schema of a scenario."""
    argparse.ArgumentParser(prog="python3 -m starter.schema", description=main.__doc__).parse_args(arguments)

    def work() -> int:
        Console(sys.stdout).line(json.dumps(scenario_json_schema(), indent=1))
        return EXIT_OK

    return guarded(work)


if __name__ == "__main__":
    run_program(main)
