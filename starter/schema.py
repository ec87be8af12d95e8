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
shape (``shapes.py``) that parses it strictly and prints its JSON Schema. ``python3 -m starter.schema`` prints
the schema of a whole scenario (draft 2020-12), which is kept in ``fixtures/scenario.schema.json``. Model and requests
have files of their own, ``model_config.py`` and ``requests.py``; their names can be imported from here, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from .console import EXIT_OK, Console, guarded, run_program
from .errors import RequestError, SchemaError
from .faults import AbnormalRelease, BackendFault, Fault, MemoryCut, NanLogits, RefusedPages, SlowConsumer
from .model_config import (
    MAX_CONTEXT,
    MAX_VOCABULARY,
    MODEL_SHAPE,
    QUANTIZATION_SHAPE,
    ModelConfig,
    QuantizationConfig,
)
from .requests import (
    ID_SHAPE,
    REQUEST_SHAPE,
    SAMPLING_SHAPE,
    SEED_SHAPE,
    TOKEN_EVENT_SHAPE,
    TOKENS_SHAPE,
    Request,
    SamplingParams,
    TokenEvent,
)
from .shapes import (
    Boolean,
    Choice,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    Number,
    Record,
    Tagged,
    Text,
    parse_json,
    pointer,
    read_json,
)

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
class CharacterVocabulary:
    """``specials`` take the ids 0, 1, ...; the characters follow in order, one id each."""

    characters: str
    specials: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.characters)) != len(self.characters):
            twice = next(c for c in self.characters if self.characters.count(c) > 1)
            raise SchemaError(f"the character {twice!r} stands twice", "/characters")
        if len(set(self.specials)) != len(self.specials):
            raise SchemaError("a special token stands twice", "/specials")


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
    policy            who goes first: "fcfs", "priority", "shortest", "prefill-first" (see ``policies.py``)
    preemption        when pages run out: "recompute" the victim's tokens later, or "swap" them to host_pages pages
    prefix_sharing    requests that begin alike share the pages of what they have in common
    kv_quantization   "int8": KV pages of 8-bit codes (see ``int8_pages.py``); null: of floats
    use_cache         False recomputes the whole context for every token (for comparison)
    workers           processes that compute, this one included (see ``parallel.py``)
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

FAULT_SHAPE = Tagged("kind", {
    "backend": Record(BackendFault, {"call": Integer(), "request_id": Nullable(ID_SHAPE)}),
    "nan_logits": Record(NanLogits, {"call": Integer(), "request_id": Nullable(ID_SHAPE)}),
    "refused_pages": Record(RefusedPages, {"ask": Integer()}),
    "abnormal_release": Record(AbnormalRelease, {"step": Integer(), "request_id": ID_SHAPE}),
    "memory_cut": Record(MemoryCut, {"step": Integer(), "pages": Integer(1), "until": Integer(1)}),
    "slow_consumer": Record(SlowConsumer, {"request_id": ID_SHAPE}),
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
