"""M1 · The nouns: what a scenario, a request and its tokens are, and how they are written in JSON.

    fixtures/tiny_model.json --load_scenario()--> Scenario
        model: ModelConfig                            sizes of the decoder ..
        weights: SeededWeights | SafetensorsWeights   .. and where its numbers come from (base/model_config.py)
        tokenizer: CharacterVocabulary                (base/tokenizer.py)
        engine: EngineSettings                        pages, budget, policy
        quantization: QuantizationConfig or null      of the weights
        requests: (Request, ...)                      each with its SamplingParams
        events: (ScenarioEvent, ...)                  cancels
        faults: (Fault, ...)                          what goes wrong on purpose (base/fault_kinds.py)
        golden: Golden or null                        the output that must come out

A field declares its range once, as a shape (``base/strict_json.py``) in its annotation. From these, ``Record.of(Noun)``
reads a noun from JSON (SchemaError with a JSON pointer), writes it, and prints its JSON Schema. Requests and sampling
parameters are also made in code: ``check_fields`` applies the same declarations there and raises RequestError. Rules
that join several fields are in ``__post_init__``, those that need the model in ``Request.check_against``.

``python3 -m starter.schema`` prints the JSON Schema of a scenario, which is kept in ``fixtures/scenario.schema.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

from .base.console import EXIT_OK, Console, guarded, run_program
from .base.fault_kinds import FAULT_SHAPE, ID_SHAPE, Fault
from .base.model_config import (
    MAX_CONTEXT,
    MAX_VOCABULARY,
    MODEL_SHAPE,
    QUANTIZATION_SHAPE,
    SEED_SHAPE,
    TOKEN_SHAPE,
    WEIGHTS_SHAPE,
    ModelConfig,
    QuantizationConfig,
    SafetensorsWeights,
    SeededWeights,
)
from .base.strict_json import (
    Boolean,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    Number,
    OneOf,
    Pair,
    Record,
    Text,
    check_fields,
    compact_json,
    defaults_of,
    parse_json,
    pointer,
    read_json,
)
from .base.tokenizer import TOKENIZER_SHAPE, CharacterVocabulary
from .errors import CapacityError, RequestError, SchemaError

__all__ = [  # with the nouns that have a file of their own
    "ENGINE_SHAPE", "FAULT_SHAPE", "MAX_CONTEXT", "MAX_PAGES", "MODEL_SHAPE", "POLICY_NAMES", "QUANTIZATION_SHAPE",
    "REQUEST_SHAPE", "SAMPLING_SHAPE", "SCENARIO_VERSION", "SEED_SHAPE", "TOKENIZER_SHAPE", "TOKEN_EVENT_SHAPE",
    "WEIGHTS_SHAPE", "CharacterVocabulary", "EngineSettings", "Golden", "ModelConfig", "QuantizationConfig", "Request",
    "SafetensorsWeights", "SamplingParams", "Scenario", "ScenarioEvent", "SeededWeights", "TokenEvent", "compact_json",
    "load_scenario", "parse_scenario", "scenario_json_schema",
]

SCENARIO_VERSION = 1
MAX_PAGES = 1_048_576
MAX_SAMPLES = 64
POLICY_NAMES = ("fcfs", "priority", "shortest", "prefill-first")

_BIAS = Number(-1e6, 1e6)
_LOGPROB = Number(-1e300, 0.0)


def _repr(record: Any) -> str:
    """What a dataclass would print of itself, without the fields that have their defaults."""
    defaults = defaults_of(record.__class__)
    shown = [f"{name}={value!r}" for name in record.__match_args__
             if (value := getattr(record, name)) != defaults.get(name, ...)]
    return f"{record.__class__.__name__}({', '.join(shown)})"


# ------------------------------------------------------------------------------------- requests and tokens


@dataclass(frozen=True)
class SamplingParams:
    """How a request picks its next token from the logits.

    temperature  0 is greedy (the first of equal maxima); larger flattens the distribution
    top_k        keep the k likeliest tokens; 0 keeps all
    top_p        keep the fewest likeliest tokens whose probabilities reach p (Holtzman et al. 2020); 1 keeps all
    min_p        drop tokens less likely than min_p times the likeliest; 0 drops none
    seed         of this request's own generator; None derives it from the engine's seed and the request id
    logit_bias   (token, number) pairs added to the logits, kept sorted; a mapping is accepted
    repetition_penalty, presence_penalty, frequency_penalty    see ``sampling.adjust``
    min_tokens   no end-of-sequence token, stop token or stop string ends the text before this many tokens; a stop
                 string that a later token completes ends it, and is not shown, wherever it began (as in vLLM)
    ignore_eos   end-of-sequence tokens are tokens like any other
    stop         strings that end the text and are not part of it, kept as a tuple
    logprobs     how many of the likeliest tokens each event lists; None lists none
    prompt_logprobs    how many of the likeliest tokens are listed at each position of the prompt, beside its own token
                 (``Result.prompt_logprobs``); such a prompt is computed whole, without shared pages. None: nothing
    n            samples of one prompt; they share its pages

    Order: bias, penalties, min_tokens, temperature, then top_k, top_p, min_p, each on what the one before has left. Of
    equally likely tokens at the edge of top_k or top_p those with the lowest numbers stay. At the borders of top_p and
    min_p a relative 1e-9 counts as nothing: probabilities of .5 and .3 reach a top_p of .8, though rounded to less.
    """

    temperature: Annotated[float, Number(0.0, 1e6)] = 0.0
    top_k: Annotated[int, Integer()] = 0
    top_p: Annotated[float, Number(0.0, 1.0)] = 1.0
    min_p: Annotated[float, Number(0.0, 1.0)] = 0.0
    seed: Annotated[int | None, Nullable(SEED_SHAPE)] = None
    logit_bias: Annotated[Mapping[int, float] | Sequence[tuple[int, float]],
                          ListOf(Pair(TOKEN_SHAPE, _BIAS), longest=MAX_VOCABULARY)] = ()
    repetition_penalty: Annotated[float, Number(0.01, 100.0)] = 1.0
    presence_penalty: Annotated[float, Number(-100.0, 100.0)] = 0.0
    frequency_penalty: Annotated[float, Number(-100.0, 100.0)] = 0.0
    min_tokens: Annotated[int, Integer(in_file=MAX_CONTEXT)] = 0
    ignore_eos: Annotated[bool, Boolean()] = False
    stop: Annotated[Sequence[str], ListOf(Text(1, 1_000), longest=64)] = ()
    logprobs: Annotated[int | None, Nullable(Integer(in_file=MAX_VOCABULARY))] = None
    prompt_logprobs: Annotated[int | None, Nullable(Integer(in_file=MAX_VOCABULARY))] = None
    n: Annotated[int, Integer(1, MAX_SAMPLES)] = 1
    __repr__ = _repr

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop must be strings that are not empty, not {self.stop!r}; no stop string is []")
        object.__setattr__(self, "stop", tuple(stop))

    @cached_property
    def plain(self) -> bool:
        """Greedy, and nothing but the likeliest token matters."""
        return not (self.temperature or self.min_tokens or self.logit_bias or self.presence_penalty
                    or self.frequency_penalty) and self.repetition_penalty == 1.0 and self.logprobs is None

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as it is kept."""
        return self.logit_bias  # type: ignore[return-value]


class SamplingOptions(TypedDict, total=False):
    """Fields of SamplingParams as keyword arguments of ``engine.submit``."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    ignore_eos: bool
    stop: Sequence[str]
    logprobs: int | None
    prompt_logprobs: int | None
    n: int


SAMPLING_SHAPE = Record.of(SamplingParams, sparse=True)


def _bias_pairs(given: object) -> tuple[tuple[int, float], ...]:
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Sequence) or not all(
            isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise RequestError("logit_bias must be a mapping from token to number, or (token, number) pairs, "
                           f"not {given!r}")
    for token, value in pairs:
        if problem := TOKEN_SHAPE.problem(token):
            raise RequestError(f"a logit_bias token {problem}")
        if problem := _BIAS.problem(value):
            raise RequestError(f"a logit_bias value {problem}")
    return tuple(sorted((token, float(value)) for token, value in pairs))


@dataclass(frozen=True)
class Request:
    """One prompt and how far to continue it.

    ``prompt_tokens`` and ``stop_tokens`` are kept as tuples. ``arrival`` is on the clock of the program that drives the
    engine; scenarios count it in steps. ``stop_tokens`` end the request like the model's own end-of-sequence tokens.
    ``priority`` serves the policies; only requests with the same ``cache_salt`` share the pages of a prefix.
    """

    request_id: Annotated[str, ID_SHAPE]
    prompt_tokens: Annotated[Sequence[int], ListOf(TOKEN_SHAPE, 1, MAX_CONTEXT)]
    max_tokens: Annotated[int, Integer(in_file=MAX_CONTEXT)]
    arrival: Annotated[float, Number(0.0, None, in_file=1e9)] = 0.0
    priority: Annotated[int, Integer(None, in_file=1_000_000)] = 0
    sampling: Annotated[SamplingParams, SAMPLING_SHAPE] = SamplingParams()
    stop_tokens: Annotated[Sequence[int], ListOf(TOKEN_SHAPE, longest=64)] = ()
    cache_salt: Annotated[str | None, Nullable(Text(1, 200))] = None
    __repr__ = _repr

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        object.__setattr__(self, "prompt_tokens", _tokens("prompt", self.prompt_tokens))
        object.__setattr__(self, "stop_tokens", _tokens("stop", self.stop_tokens))
        if not self.prompt_tokens:
            raise RequestError("the prompt is empty; give at least one token, for instance the model's bos_token")
        if self.max_tokens == 0 and self.sampling.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs are computed with the prompt, which max_tokens 0 leaves out; ask for 1 "
                               "or more")

    def check_against(self, model: ModelConfig) -> None:
        """Raise RequestError or CapacityError where this model cannot serve the request. O(prompt)."""
        for token in (*self.prompt_tokens, *self.stop_tokens):
            if token >= model.vocab_size:
                raise RequestError(f"token {token} is outside the vocabulary; allowed: 0 to {model.vocab_size - 1}")
        for token, _ in self.sampling.bias:
            if token >= model.vocab_size:
                raise RequestError(f"logit_bias names token {token}; allowed: 0 to {model.vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (number := getattr(self.sampling, name) or 0) > model.vocab_size:
                raise RequestError(f"{name} {number} is more than the vocabulary of {model.vocab_size}")
        total = len(self.prompt_tokens) + self.max_tokens
        if total > model.max_context:
            raise CapacityError(
                f"prompt {len(self.prompt_tokens)} + max_tokens {self.max_tokens} = {total} tokens exceed the context "
                f"of {model.max_context}; shorten the prompt or ask for at most "
                f"{max(0, model.max_context - len(self.prompt_tokens))} tokens")


REQUEST_SHAPE = Record.of(Request, sparse=True)


def _tokens(kind: str, given: object) -> tuple[int, ...]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise RequestError(f"{kind}_tokens must be a sequence of token numbers, not a {type(given).__name__}; encode "
                           "text first")
    for token in given:
        if problem := TOKEN_SHAPE.problem(token):
            raise RequestError(f"a {kind} token {problem}")
    return tuple(given)


class TokenEvent(NamedTuple):
    """One token of one request, or (token None) the end of a request that ended without one.

    ``index`` counts a request's tokens from 0 without gaps. ``text`` is what this token adds to the decoded text.
    ``step`` and ``time`` say when (the engine's step count; its clock, seconds). ``logprob`` is the natural
    logarithm of the token's probability at temperature 1. ``finish_reason`` is None except on the last event:
    "stop", "length", "cancelled" or "error", the last with the reason in ``error``. With n > 1 samples each has its own
    indices and its own last event. ``top_logprobs`` lists (token, logprob) of the likeliest, if asked for
    (``tokenizer.bytes_of`` has the text of each, also of one that is half a character).
    """

    request_id: Annotated[str, ID_SHAPE]
    index: Annotated[int, Integer()]  # type: ignore[assignment]  # hides tuple.index, which has no use here
    token: Annotated[int | None, Nullable(TOKEN_SHAPE)]
    text: Annotated[str, Text()]
    step: Annotated[int, Integer()]
    time: Annotated[float, Number(0.0, 1e15)]
    logprob: Annotated[float | None, Nullable(_LOGPROB)] = None
    finish_reason: Annotated[str | None, Nullable(OneOf(("stop", "length", "cancelled", "error")))] = None
    error: Annotated[str | None, Nullable(Text())] = None
    sample: Annotated[int, Integer()] = 0
    top_logprobs: Annotated[tuple[tuple[int, float], ...],
                            ListOf(Pair(TOKEN_SHAPE, _LOGPROB), longest=MAX_VOCABULARY)] = ()

    def __repr__(self) -> str:
        return _repr(self)

    @property
    def sequence_id(self) -> str:
        """Of the sample, as the scheduler and the timeline know it."""
        return sample_id(self.request_id, self.sample) if self.sample else self.request_id


TOKEN_EVENT_SHAPE = Record.of(TokenEvent)


def sample_id(request_id: str, number: int) -> str:
    """Id of the sequence that is a request's sample of this number."""
    return request_id if number == 0 else f"{request_id}#{number}"


# ---------------------------------------------------------------------------------------------- a scenario


@dataclass(frozen=True)
class EngineSettings:
    """Everything about serving that is not the model.

    page_size         tokens in a KV page                  num_pages        pages in the pool
    kv_budget_bytes   instead of num_pages: as many pages as fit in this many bytes; for int8 pages, the budget also
                      covers the max_running float pages in which pages are filled
    budget_tokens     most tokens computed in a step       max_running      most requests running at once
    batching          "continuous": requests join and leave in every step; "static": a batch is admitted when the
                      last one has ended; "none": one request at a time
    max_waiting       requests that may wait; more are refused with QueueFullError
    policy            who goes first: "fcfs", "priority", "shortest", "prefill-first" (see ``scheduler.py``)
    preemption        when pages run out: "recompute" the victim's tokens later, or "swap" them to host_pages pages
    prefix_sharing    requests whose prompts begin alike share the pages of the common part
    kv_quantization   "int8": KV pages of 8-bit codes (see ``backends/int8_pages.py``); null: of floats
    use_cache         False recomputes the whole context for every token (for comparison)
    workers           processes that compute, this one included (see ``backends/workers/parallel.py``)
    seed              seeds the sampling of requests without a seed of their own
    keep_events       events of the timeline that are kept in memory; 0 keeps none. Listeners and files get all of them
    max_unread        finished requests whose events were not read to the end: the engine keeps at most this many, and
                      forgets the oldest first. It remembers the status of as many that were read or forgotten
    unread_seconds    and keeps each at most this long, by the engine's clock; null: as long as max_unread allows
    """

    page_size: Annotated[int, Integer(1, 65_536)] = 16
    num_pages: Annotated[int, Integer(1, MAX_PAGES)] = 64
    kv_budget_bytes: Annotated[int | None, Nullable(Integer(1, 2**50))] = None
    budget_tokens: Annotated[int, Integer(1, MAX_CONTEXT)] = 32
    max_running: Annotated[int, Integer(1, 65_536)] = 8
    batching: Annotated[str, OneOf(("continuous", "static", "none"))] = "continuous"
    max_waiting: Annotated[int, Integer(1)] = 100_000
    policy: Annotated[str, OneOf(POLICY_NAMES)] = "fcfs"
    preemption: Annotated[str, OneOf(("recompute", "swap"))] = "recompute"
    host_pages: Annotated[int, Integer(0, MAX_PAGES)] = 64
    prefix_sharing: Annotated[bool, Boolean()] = False
    use_cache: Annotated[bool, Boolean()] = True
    kv_quantization: Annotated[str | None, Nullable(OneOf(("int8",)))] = None
    workers: Annotated[int, Integer(1, 64)] = 1
    seed: Annotated[int, SEED_SHAPE] = 0
    keep_events: Annotated[int, Integer(0, 10**9)] = 100_000
    max_unread: Annotated[int, Integer(0, 10**9)] = 10_000
    unread_seconds: Annotated[float | None, Nullable(Number(0.0, 1e9))] = None

    def __post_init__(self) -> None:
        if self.kv_quantization is not None and not self.use_cache:
            raise SchemaError("without a cache (use_cache false) there are no KV pages to quantize; use null",
                              "/kv_quantization")
        if self.workers > 1 and not self.use_cache:
            raise SchemaError("without a cache (use_cache false) one process computes everything; use 1 worker",
                              "/workers")

    def override(self, changes: Mapping[str, object]) -> EngineSettings:
        """A copy with some settings replaced, checked like the file they usually come from."""
        settings: EngineSettings = ENGINE_SHAPE.parse({**asdict(self), **changes}, "/engine")
        return settings


@dataclass(frozen=True)
class ScenarioEvent:
    """Something done to the engine just before step ``step``: for now, cancel a request."""

    step: Annotated[int, Integer()]
    cancel: Annotated[str, ID_SHAPE]


@dataclass(frozen=True)
class Golden:
    """What the scenario must produce: greedy tokens by request id (a cancelled request may deliver fewer).

    ``smallest_margin`` is the least distance between the best and the second-best logit over all steps: as long as two
    implementations differ by less than half of it, they must agree on every token.
    """

    tokens: Annotated[Mapping[str, tuple[int, ...]], MapOf(ListOf(TOKEN_SHAPE, longest=MAX_CONTEXT))]
    smallest_margin: Annotated[float, Number(0.0, 1e9)]
    made_by: Annotated[str, Text()] = ""


# What only bounds memory is left out while it has its default: it changes no decision and no token.
ENGINE_SHAPE = Record.of(EngineSettings, sparse=("keep_events", "max_unread", "unread_seconds"))


@dataclass(frozen=True)
class Scenario:
    """A reproducible run: a model, how to serve it, what arrives when, and what must come out. Fields come in the order
    of the JSON; ``folder`` is where relative paths start, and not part of the JSON."""

    version: Annotated[int, Integer(SCENARIO_VERSION, SCENARIO_VERSION)]
    name: Annotated[str, Text(1, 200)]
    description: Annotated[str, Text()] = field(default="", kw_only=True)
    model: Annotated[ModelConfig, MODEL_SHAPE]
    weights: Annotated[SeededWeights | SafetensorsWeights, WEIGHTS_SHAPE]
    tokenizer: Annotated[CharacterVocabulary, TOKENIZER_SHAPE]
    engine: Annotated[EngineSettings, ENGINE_SHAPE] = field(default=EngineSettings(), kw_only=True)
    quantization: Annotated[QuantizationConfig | None, Nullable(QUANTIZATION_SHAPE)] = field(default=None, kw_only=True)
    requests: Annotated[tuple[Request, ...], ListOf(REQUEST_SHAPE, longest=100_000)]
    events: Annotated[tuple[ScenarioEvent, ...], ListOf(Record.of(ScenarioEvent), longest=100_000)] = ()
    faults: Annotated[tuple[Fault, ...], ListOf(FAULT_SHAPE, longest=10_000)] = ()
    golden: Annotated[Golden | None, Nullable(Record.of(Golden))] = None
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        ids = self._request_ids()
        for i, event in enumerate(self.events):
            if event.cancel not in ids:
                raise SchemaError(f"no request has the id {event.cancel!r}", f"/events/{i}/cancel")
        for i, fault in enumerate(self.faults):
            if (request_id := getattr(fault, "request_id", None)) not in (None, *ids):
                raise SchemaError(f"no request has the id {request_id!r}", f"/faults/{i}/request_id")
        for key, tokens in (self.golden.tokens if self.golden else {}).items():
            if key not in ids:
                raise SchemaError("no request has this id", pointer("/golden/tokens", key))
            if any(token >= self.model.vocab_size for token in tokens):
                raise SchemaError("holds a token outside the vocabulary", pointer("/golden/tokens", key))
        size = len(self.tokenizer.specials) + len(self.tokenizer.characters)
        if size != self.model.vocab_size:
            raise SchemaError(f"names {size} tokens, the model has vocab_size {self.model.vocab_size}", "/tokenizer")

    def _request_ids(self) -> set[str]:
        """The ids of the requests, all different; the model can serve every request."""
        ids: set[str] = set()
        samples: dict[str, str] = {}  # the ids of further samples, and whose they are
        for i, request in enumerate(self.requests):
            if request.request_id in ids:
                raise SchemaError(f"two requests have the id {request.request_id!r}", f"/requests/{i}/request_id")
            ids.add(request.request_id)
            samples |= {sample_id(request.request_id, number): request.request_id
                        for number in range(1, request.sampling.n)}
            try:
                request.check_against(self.model)
            except RequestError as error:
                raise SchemaError(str(error), f"/requests/{i}") from None
        for i, request in enumerate(self.requests):
            if request.request_id in samples:
                raise SchemaError(f"{request.request_id!r} is the id of a sample of {samples[request.request_id]!r}; "
                                  f"choose another", f"/requests/{i}/request_id")
        return ids

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; ``parse_scenario(json.dumps(s.to_dict())) == s``."""
        return SCENARIO_SHAPE.dump(self)

    def to_json(self) -> str:
        """``to_dict`` as text: a line a request, event and golden sequence, so that a change reads well in a diff."""
        return compact_json(self.to_dict())


SCENARIO_SHAPE = Record.of(Scenario)


def parse_scenario(text: str, folder: Path = Path()) -> Scenario:
    """JSON text -> Scenario, or SchemaError with a JSON pointer."""
    scenario: Scenario = SCENARIO_SHAPE.parse(parse_json(text), "")
    return replace(scenario, folder=folder)


def load_scenario(path: str | Path) -> Scenario:
    """Scenario file -> Scenario. SchemaError on anything malformed or unreadable; no other exception escapes."""
    if not isinstance(path, (str, Path)):
        raise SchemaError(f"the path of a scenario must be a string or a Path, not {path!r}")
    scenario: Scenario = SCENARIO_SHAPE.parse(read_json(path), "")
    return replace(scenario, folder=Path(path).parent)


def scenario_json_schema() -> dict[str, object]:
    """JSON Schema, draft 2020-12, of a scenario file: the shapes, without the rules that join fields."""
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
