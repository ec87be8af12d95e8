"""M3, M6 · The service: submit a prompt, stream its tokens, cancel it. Everything else is joined here, in a short loop.

    submit -> Request (checked once, at the door) -> scheduler
    step:     decision = scheduler.step(budget)          which tokens, for whom, why; pages reserved in the same call
              batch    = layout.batch(chunks)            flat tokens, positions, slots
              logits   = model.forward(batch, store)     only the rows that need a next token
              token    = choose_token(logits, generator)       the sample's own generator
              events  -> streams, timeline, metrics      finished requests have given their pages back

The engine pulls: a step runs when somebody asks for one (``step``, ``run``) or reads a stream that has no news. After
``start()`` a thread of its own runs the steps instead, and readers wait for news.

Promises, each a property in tests/test_engine*.py and scripts/fuzz.py:
- One last event for every sample of an accepted request; token indices 0, 1, 2, ... once each; nothing after it.
- After ``cancel`` returns, no further token, tokens that were computed but not yet read included (V3).
- A request that fails ends with finish_reason "error" and the reason; its neighbours' tokens stay the same.
- A call that raises has changed nothing.
- Threads: every method may be called from any thread. Steps are serialized; the lock on the engine's state is not
  held while the decoder computes, so submit, cancel and reading never wait for it.
- Bounded: at most ``max_waiting`` requests wait, and a stream holds at most max_tokens * n unread events.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from threading import Condition, RLock, Thread
from typing import Any, Protocol, Union, get_args

from starter import __version__

from .backend import Backend, Batch, PlainPiece, load_backend
from .base.fault_kinds import Fault
from .base.model_config import ModelConfig
from .base.strict_json import Nullable, describe
from .base.tokenizer import CharacterTokenizer, TextStream, Tokenizer
from .base.weights import StoredWeights, Weights, check_digest, seeded_weights, weights_digest
from .base.wings import picture, wing
from .errors import (
    BackendError,
    CapacityError,
    DuplicateRequestError,
    EngineError,
    QueueFullError,
    RequestError,
    SchemaError,
    UnknownRequestError,
)
from .kv_cache import KVCacheManager, KVHandle, KVStore
from .metrics import Metrics, MetricsCollector
from .model import Model
from .sampling import Choice, Draws, Logits, StopStrings, choose_token, greedy
from .scheduler import Chunks, ContinuousBatchScheduler, ScheduleDecision
from .schema import (
    ENGINE_SHAPE,
    FAULT_SHAPE,
    MODEL_SHAPE,
    SEED_SHAPE,
    TOKENIZER_SHAPE,
    WEIGHTS_SHAPE,
    EngineSettings,
    QuantizationConfig,
    Request,
    SafetensorsWeights,
    SamplingParams,
    Scenario,
    SeededWeights,
    TokenEvent,
    TokenFields,
    sample_id,
)
from .timeline import Recorder, Timeline

# ------------------------------------------------------------------------------ a request until its last event was read

#: M3 · A request from submit until its last event was read: its samples, their tokens and text, the unread events.
#:
#: A request has one sample, or n of them (``SamplingParams.n``). A sample is what the scheduler calls a sequence: the
#: first has the request's id, the i-th the id "<request>#<i>". All share one queue of events.


@dataclass(frozen=True)
class RequestStatus:
    """Where a request stands: "waiting", "running" or "finished", and how far it is (all samples together)."""

    request_id: str
    state: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str | None = None


@dataclass(eq=False, slots=True)
class Sample:
    """One continuation of a request's prompt."""

    stream: RequestStream
    number: int
    draws: Draws
    decoder: TextStream
    stops: StopStrings | None  # None: there are none to watch for
    tokens: list[int]  # the prompt and what was generated
    started: bool = False  # the first runs from submit on, the others when the prompt is computed
    others: Sequence[Sample] = ()  # of the first one: those that start with it, once the prompt is computed
    withheld: int = 0  # tokens generated, but not read before a cancel
    finish_reason: str | None = None
    id: str = field(init=False)  # the sequence's
    request_id: str = field(init=False)  # this and the next are the stream's, kept here for every token to ask
    prompt_length: int = field(init=False)
    max_tokens: int = field(init=False)
    plain: bool = field(init=False)
    end_tokens: tuple[int, ...] = field(init=False)
    events: deque[TokenFields] = field(init=False)

    def __post_init__(self) -> None:
        request = self.stream.request
        self.request_id, self.id = request.request_id, sample_id(request.request_id, self.number)
        self.prompt_length, self.max_tokens = len(request.prompt_tokens), request.max_tokens
        self.plain = request.sampling.plain
        self.end_tokens, self.events = self.stream.end_tokens, self.stream.events

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    def add(self, choice: Choice, step: int, time: float) -> TokenFields:
        """Append a generated token, and decide whether the sample is finished."""
        token, logprob, top_logprobs = choice
        index, stopped = len(self.tokens) - self.prompt_length, False
        self.tokens.append(token)
        text = self.decoder.push(token)
        if not self.plain:
            self.draws.accept()
        if self.stops and index >= self.stream.request.sampling.min_tokens:
            text, stopped = self.stops.push(text)
        reason = ("stop" if stopped or token in self.end_tokens else
                  "length" if index + 1 == self.max_tokens else None)
        if reason and not stopped:
            text += self._rest()
        event = (self.request_id, index, token, text, step, time, logprob, reason, None, self.number, top_logprobs)
        self.events.append(event)
        self.finish_reason = reason
        return event

    def end(self, reason: str, error: str | None, step: int, time: float) -> TokenEvent:
        """Append the end of a sample that ends without a token; its index is the next one its reader expects."""
        text = "" if reason == "cancelled" else self._rest()
        event = TokenEvent(self.request_id, self.generated - self.withheld, None, text, step, time, None,
                           reason, error, self.number)
        self.events.append(event)
        self.finish_reason = reason
        return event

    def _rest(self) -> str:
        """Text held back: an incomplete character, or what might have become a stop string."""
        rest = self.decoder.finish()
        if not self.stops:
            return rest
        text, stopped = self.stops.push(rest)
        return text if stopped else text + self.stops.finish()


@dataclass(eq=False, slots=True)
class RequestStream:
    """Events go in at the end and are read, each once, from the front. The stream ends with its last sample."""

    request: Request
    end_tokens: tuple[int, ...] = ()  # which end a sample
    samples: list[Sample] = field(default_factory=list)
    events: deque[TokenFields] = field(default_factory=deque)  # not yet read

    @property
    def finish_reason(self) -> str | None:
        """Once all samples are finished: "cancelled" or "error" if one of them ended so, else that of the last."""
        reasons = [sample.finish_reason for sample in self.samples]
        if None in reasons:
            return None
        return next((reason for reason in ("cancelled", "error") if reason in reasons), reasons[-1])

    @property
    def drained(self) -> bool:
        """The last event was read."""
        return not self.events and self.finish_reason is not None

    @property
    def unread(self) -> list[TokenEvent]:
        """The events, by their names. O(events)."""
        return list(map(TokenEvent._make, self.events))

    def withhold(self) -> None:
        """Forget unread tokens: after a cancel nobody sees them. Ends of samples that were finished before stay."""
        kept: list[TokenEvent] = []
        for event in self.unread:
            sample = self.samples[event.sample]
            if sample.finish_reason is None:
                sample.withheld += 1
            else:
                kept.append(event)
        self.events.clear()
        self.events.extend(kept)


# ---------------------------------------------------------------------------------------------------------- all of them

#: M3 · The requests that an engine knows: those that are live, and those whose events were not all read.
#:
#:     streams    by request id: every one of them
#:     samples    by sequence id: the live ones only, as the scheduler knows them (n samples of a request are n sequences)
#:
#: An id is taken while its request is live or has unread events; after that it may be used again. The table holds no lock:
#: the engine holds its own around every call.


class RequestTable:
    """Streams and samples, found by their ids."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, seed: int) -> None:
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        self.streams: dict[str, RequestStream] = {}
        self.samples: dict[str, Sample] = {}
        self._added = 0

    def fresh_id(self) -> str:
        """An id that no known request has."""
        number = self._added
        while f"request-{number}" in self.streams:
            number += 1
        return f"request-{number}"

    def check(self, request: Request) -> None:
        """RequestError for what the model cannot serve, DuplicateRequestError for an id that is taken."""
        request.check_against(self._config)
        taken = self.streams.get(request.request_id)
        if taken and taken.finish_reason not in (None, "cancelled"):
            raise DuplicateRequestError(f"the stream of the finished request {request.request_id!r} was not read to "
                                        f"its end; read it, or choose another id")
        for number in range(request.sampling.n):
            if (sequence_id := sample_id(request.request_id, number)) in self.samples:
                raise DuplicateRequestError(f"request {sequence_id!r} is live; choose another id or cancel it first")

    def make_stream(self, request: Request) -> RequestStream:
        """A stream with its samples, not yet in the table."""
        eos_tokens = () if request.sampling.ignore_eos else self._config.eos_tokens
        stream = RequestStream(request, end_tokens=(*eos_tokens, *request.stop_tokens))
        for number in range(request.sampling.n):
            decoder = self._tokenizer.stream()
            for token in request.prompt_tokens:  # the text goes on from the prompt's, which its reader knows
                decoder.push(token)
            draws = Draws(request.sampling, request.request_id, number, self._seed)
            stops = StopStrings(request.sampling.stop) if request.sampling.stop else None
            stream.samples.append(Sample(stream, number, draws, decoder, stops, list(request.prompt_tokens),
                                         started=number == 0))
        stream.samples[0].others = stream.samples[1:]
        return stream

    def add(self, stream: RequestStream) -> None:
        """The request was accepted."""
        self._added += 1
        self.streams[stream.request.request_id] = stream
        self.samples.update({sample.id: sample for sample in stream.samples})

    def find(self, request_id: str) -> RequestStream:
        """A known request's stream, or UnknownRequestError."""
        stream = self.streams.get(request_id) if isinstance(request_id, str) else None
        if stream is None:
            raise UnknownRequestError(f"no request {request_id!r}: it was never submitted, or its stream was read to "
                                      f"the end")
        return stream

    def take(self, stream: RequestStream) -> TokenEvent:
        """The next unread event; with the last one the request is forgotten."""
        event = TokenEvent._make(stream.events.popleft())
        if stream.drained and self.streams.get(event.request_id) is stream:  # a newer request may have the id
            del self.streams[event.request_id]
        return event


# ------------------------------------------------------------------------------------------------------- how many pages

#: M4, M6 · From an engine's settings to its page pool: how many pages there are, and the stores behind them.


def make_cache(model: Model, settings: EngineSettings,
               observer: Callable[[str, str, tuple[int, ...]], None]) -> KVCacheManager:
    """The pages for a model's keys and values and, for preemption by swap, the host's. CapacityError as below."""
    num_pages = settings.num_pages if settings.kv_budget_bytes is None else pages_within(
        settings.kv_budget_bytes, model, settings)
    host_pages = settings.host_pages if settings.preemption == "swap" else 0
    store, host_store = (model.new_store(pages, settings.page_size, settings.kv_quantization, host)
                         for pages, host in ((num_pages, False), (host_pages, True)))
    store.reserve_tails(min(num_pages, most_tails(settings)))
    return KVCacheManager(num_pages, settings.page_size, model.config.layers * model.config.kv_width,
                          settings.prefix_sharing, store, host_pages, host_store, observer)


def pages_within(budget: int, model: Model, settings: EngineSettings) -> int:
    """As many pages as fit in so many bytes. CapacityError if not one does.

    Int8 pages also have *tails* while they are being filled (``backends/int8_pages.py``): ``most_tails``, or one for each page
    there is, if that is less.
    """
    page = model.new_store(1, settings.page_size, settings.kv_quantization)
    num_pages = max(budget // (page.page_bytes + page.tail_bytes),
                    (budget - most_tails(settings) * page.tail_bytes) // page.page_bytes)
    if num_pages < 1:
        raise CapacityError(f"kv_budget_bytes {budget} is less than one page of {settings.page_size} tokens "
                            f"({page.page_bytes + page.tail_bytes} bytes); give a larger budget")
    return num_pages


def most_tails(settings: EngineSettings) -> int:
    """Of int8 pages at a time: one for each running request, and one for each page that a step can begin besides. Two
    tokens of a request are enough for that, the last of one page and the first of the next; each further page of the
    same request takes page_size. What a budget pays for; samples that fork beyond max_running can have more."""
    crossing = min(settings.max_running, settings.budget_tokens // 2)
    return settings.max_running + crossing + (settings.budget_tokens - 2 * crossing) // settings.page_size


# ------------------------------------------------------------------------------------------- from a decision to a batch

#: M3 · From a decision to the decoder's batch: which sample computes which tokens, and where its pages are.
#:
#:     decision.planned ──chunks──▶ samples, batch        a piece for each chunk, in their order
#:
#: A request whose pages do not reach as far as its chunk fails here, alone: somebody outside has taken them, or they were
#: never reserved. Without a cache there are no pages, and all tokens are computed each time one is due.


class Layout:
    """Lays the chunks of a step flat. The engine holds its lock around every call, but not while the batch is computed:
    so tokens are copied."""

    def __init__(self, requests: RequestTable, scheduler: ContinuousBatchScheduler, kv: KVCacheManager,
                 use_cache: bool) -> None:
        self._requests, self._scheduler, self._kv, self._use_cache = requests, scheduler, kv, use_cache

    def batch(self, chunks: Chunks) -> tuple[list[Sample], Batch]:
        """The samples that compute something, and what they compute: a piece for each of them. O(tokens)."""
        samples: list[Sample] = []
        pieces = self._pieces(chunks, samples) if self._use_cache else self._whole_pieces(chunks, samples)
        return samples, Batch.of(pieces, self._kv.page_size)

    def _pieces(self, chunks: Chunks, found: list[Sample]) -> Iterator[PlainPiece]:
        """A piece for each chunk, its sample noted in ``found``."""
        samples, page_size = self._requests.samples, self._kv.page_size
        for sequence_ids, starts, count, _ in chunks.runs:
            for sequence_id, start, handle in zip(sequence_ids, starts, self._scheduler.handles(sequence_ids)):
                end, pages = start + count, handle.pages
                if end > len(pages) * page_size:
                    self._scheduler.fail(sequence_id, self._no_room(handle, end))
                    continue
                sample = samples[sequence_id]
                tokens = sample.tokens
                found.append(sample)
                yield tokens[start:end], start, pages, end == len(tokens)

    def _no_room(self, handle: KVHandle, end: int) -> EngineError:
        """Why a request's pages do not hold the positions before ``end``."""
        try:
            pages = self._kv.resident_pages(handle)
        except EngineError as error:  # released or swapped out from outside
            return error
        return EngineError(f"{handle.request_id} is to compute position {end - 1}, and its {len(pages)} pages of "
                           f"{self._kv.page_size} end before it: they were not reserved, or are not its own any more")

    def _whole_pieces(self, chunks: Chunks, found: list[Sample]) -> Iterator[PlainPiece]:
        """Without a cache: all tokens, to be computed only when the next one is due."""
        for sequence_id, start, count, _ in chunks:
            sample = self._requests.samples[sequence_id]
            found.append(sample)
            yield sample.tokens[:], 0, (), start + count == len(sample.tokens)

    def positions(self, batch: Batch) -> int:
        """How many positions a step sends through the decoder."""
        if self._use_cache:
            return len(batch.tokens)
        return sum(len(piece.tokens) for piece in batch.pieces() if piece.wants_logits)


# -------------------------------------------------------------------------------------------- the decoder, for one step

#: M3 · Runs the decoder for one step, and keeps a failure with the request that caused it.


Row = Union[Sequence[float], Exception]  # of logits


class FaultHooks(Protocol):
    """What the engine asks where a fault may strike; ``workloads/faults.py`` answers."""

    slow: frozenset[str]  # requests whose streams nobody reads until the end

    def before_step(self) -> None: ...

    def before_forward(self, request_ids: Collection[str]) -> None: ...

    def after_forward(self, request_ids: Sequence[str], rows: Sequence[Sequence[float]]) -> list[Sequence[float]]: ...

    def end(self) -> None: ...


class Executor:
    """Computes batches (``backend.py``) against the pages in ``store``; without a store, each piece whole by itself."""

    def __init__(self, model: Model, store: KVStore | None) -> None:
        self._model, self._store = model, store
        self.faults: FaultHooks | None = None

    def run(self, samples: Sequence[Sample], batch: Batch) -> dict[Sample, Row]:
        """Logits for each sample whose next token is due; an exception for each one that failed. ``batch`` holds one
        piece for each of the samples.

        When the batch fails, each sample is tried alone (its slots are simply written again, with the same
        numbers), so that only those at fault end. This relies on batch-equals-solo, and on stores that keep whatever
        a second time needs until the page manager drops a page's tail.
        """
        try:
            return self._forward(samples, batch)
        except Exception:
            alone = batch.pieces()  # tried below, where no traceback holds what the whole batch took of a device
        rows: dict[Sample, Row] = {}
        for sample, piece in zip(samples, alone):
            try:
                rows.update(self._forward([sample], Batch.of([piece], batch.page_size)))
            except Exception as error:
                rows[sample] = error.with_traceback(None)  # nor what this one took
        return rows

    def _forward(self, samples: Sequence[Sample], batch: Batch) -> dict[Sample, Row]:
        if not samples:
            return {}
        if self.faults:
            self.faults.before_forward({sample.id for sample in samples})
        rows: Sequence[Sequence[float]]
        if self._store is None:
            rows = [self._model.forward_uncached(piece.tokens) for piece in batch.pieces() if piece.wants_logits]
        else:
            rows = self._model.forward(batch, self._store)
        wanted = samples
        if len(batch.logit_rows) < len(samples):  # some prompts are not at their end yet
            wanted = [sample for sample, piece in zip(samples, batch.pieces()) if piece.wants_logits]
        if self.faults:
            rows = self.faults.after_forward([sample.id for sample in wanted], rows)
        return dict(zip(wanted, rows))


# --------------------------------------------------------------------------------- what was computed, and what it means

#: M3 · What a step's computation means for its requests: tokens for their streams, ends, and failures.
#:
#:     row of logits --choose--> a token (after a prompt, one for each sample) --settle--> stream, scheduler, timeline
#:     an exception  ----------------------------------------------------------settle--> a last event with the reason
#:
#: Choosing changes nothing but a sample's random numbers, and those count only when their token is accepted; so a step
#: that is interrupted before ``settle`` can be planned and chosen again. The engine holds its lock around every call.


class Answers:
    """Passes on what was computed, and ends what has ended."""

    def __init__(self, requests: RequestTable, scheduler: ContinuousBatchScheduler, recorder: Recorder) -> None:
        self._requests, self._scheduler, self._recorder = requests, scheduler, recorder

    def settle(self, choices: Mapping[Sample, Choice], failures: Mapping[Sample, Exception]) -> None:
        """The step's tokens are chosen: end what has failed, start further samples, tell everybody."""
        self._recorder.step_completed()
        for sample, failure in failures.items():
            self.end_all(sample.stream, "error", f"{type(failure).__name__}: {failure}")
        self._scheduler.complete_step()
        self.end_failures()
        self._add_tokens(choices)

    def choose(self, rows: Mapping[Sample, Row]) -> tuple[dict[Sample, Choice], dict[Sample, Exception]]:
        """Sample the next tokens; a row after a prompt is for all samples of its request, the first before the others.
        Whatever is wrong with a row concerns its request alone."""
        choices: dict[Sample, Choice] = {}
        failures: dict[Sample, Exception] = {}
        for sample, row in rows.items():
            if isinstance(row, Logits) and sample.plain and not sample.others:  # nearly all, on a backend of arrays
                choices[sample] = row.greedy
                continue
            if isinstance(row, Exception):
                failures[sample] = row
                continue
            try:
                choices[sample] = self._choice(sample, row)
                for other in sample.others:
                    choices[other] = self._choice(other, row)
            except Exception as error:
                failures[sample] = error
        return choices, failures

    def _choice(self, sample: Sample, row: Sequence[float]) -> Choice:
        if sample.plain:  # as nearly always
            return greedy(row)
        stream = sample.stream
        return choose_token(row, stream.request.sampling, sample.draws, stream.request.prompt_tokens,
                      sample.tokens[sample.prompt_length:], stream.end_tokens)

    def _start_others(self, first: Sample) -> None:
        """After the prompt, the other samples start from the same pages."""
        others, first.others = first.others, ()
        for sample in others:
            sample.started = True
            self._recorder.event("fork", request=sample.id, parent=first.id)
            if self._scheduler.is_running(first.id):  # else it has all its tokens with this one
                self._scheduler.fork(first.id, replace(first.stream.request, request_id=sample.id))

    def _add_tokens(self, choices: Mapping[Sample, Choice]) -> None:
        """A new token goes into its stream; a sample ends here if it is its last."""
        recorder, listeners = self._recorder, self._recorder.timeline.listeners
        for sample, choice in choices.items():
            if sample.finish_reason:  # it has failed, or who listens cancelled it just now
                continue
            if sample.others:
                self._start_others(sample)
            event = sample.add(choice, recorder.steps - 1, recorder.now)
            reason = sample.finish_reason
            recorder.tokens[sample.id] = event if sample.plain else (*event[:-1], ())  # without top_logprobs
            if listeners:  # they hear of it before there is another, which they might cancel
                recorder.write_tokens()
            if reason:
                self._finish(sample, reason)
        recorder.write_tokens()

    def _finish(self, sample: Sample, reason: str) -> None:
        """The sample has its last token."""
        if self._scheduler.is_running(sample.id):  # at max_tokens it has ended by itself
            self._scheduler.finish(sample.id, reason)
        self._forget(sample)

    def end_all(self, stream: RequestStream, reason: str, error: str | None = None) -> None:
        """End all unfinished samples of a request without a token."""
        for sample in stream.samples:
            if self._scheduler.is_live(sample.id):
                self._scheduler.finish(sample.id, reason)
            if sample.finish_reason is None:
                self._end(sample, reason, error)

    def _end(self, sample: Sample, reason: str, error: str | None) -> None:
        sample.end(reason, error, self._recorder.steps, self._recorder.clock())
        self._forget(sample, **({"error": error} if error else {}))

    def _forget(self, sample: Sample, **fields: object) -> None:
        """A finished sample is no longer a sequence; only its events remain, until they are read."""
        del self._requests.samples[sample.id]
        if sample.started:
            self._recorder.event("finish", request=sample.id, reason=sample.finish_reason, tokens=sample.generated,
                                 **fields)

    def end_failures(self) -> None:
        """Sequences whose pages could not be provided end, and with a first one those it has not started yet."""
        for sequence_id, reason in self._scheduler.take_failures().items():
            failed = self._requests.samples[sequence_id]
            for sample in failed.stream.samples:
                if sample is failed or not sample.started:
                    self._end(sample, "error", reason)


# --------------------------------------------------------------------------------------------------------------- models

#: M1 · From a scenario or a checkpoint on disk to a model that can compute, and its tokenizer.


AS_IN_SCENARIO = "as in the scenario"


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and what a timeline's header should say about them."""

    model: Model
    tokenizer: Tokenizer
    about: dict[str, object]


def load_scenario_model(scenario: Scenario, backend: str | Backend, quantization: object = AS_IN_SCENARIO,
                        weights_seed: int | None = None) -> Loaded:
    """The model of a scenario; ``weights_seed`` draws other weights than the scenario names."""
    source = scenario.weights if weights_seed is None else SeededWeights(weights_seed)
    weights = scenario_weights(scenario, source)
    config = scenario.quantization if quantization == AS_IN_SCENARIO else quantization_config(quantization)
    model = Model(scenario.model, weights, load_backend(backend), config)
    tokenizer = CharacterTokenizer(scenario.tokenizer, scenario.model.bos_token, scenario.model.eos_tokens)
    return Loaded(model, tokenizer, {
        "scenario": scenario.name, "weights": WEIGHTS_SHAPE.dump(source),
        "tokenizer": TOKENIZER_SHAPE.dump(scenario.tokenizer), **about_weights(weights, config)})


def about_weights(weights: StoredWeights, quantization: QuantizationConfig | None) -> dict[str, object]:
    return {"weights_sha256": weights_digest(weights), "quantization": asdict(quantization) if quantization else None}


def quantization_config(quantization: object) -> QuantizationConfig | None:
    """None, "int8", "int4", "int4-search" or a ready config -> config; "stored" is for checkpoints."""
    if quantization is None or isinstance(quantization, QuantizationConfig):
        return quantization
    named = {"int8": QuantizationConfig(bits=8), "int4": QuantizationConfig(bits=4),
             "int4-search": QuantizationConfig(bits=4, symmetric=False, method="search")}
    if not isinstance(quantization, str) or quantization not in named:
        raise RequestError(f"quantization must be None, {', '.join(map(repr, named))} or a QuantizationConfig, "
                           f"not {quantization!r}")
    return named[quantization]


def scenario_weights(scenario: Scenario, source: SeededWeights | SafetensorsWeights) -> Weights:
    """The weights a scenario names, checked against the sha256 it records."""
    if isinstance(source, SeededWeights):
        weights: Weights = seeded_weights(scenario.model, source.seed)
    else:
        files = wing("checkpoints.safetensors", f"the weights file {source.path}")
        weights = files.read_safetensors(scenario.folder / source.path)
    check_digest(weights, source.sha256)
    return weights


# --------------------------------------------------------------------------------------------------- running a scenario

#: M6 · Play a scenario on an engine: requests are submitted at their arrival step, cancels happen at theirs.
#:
#: The driver, the fixture's maker, the tests and the benchmarks all run scenarios through this one function.


@dataclass
class Played:
    """What a step brought: its decision and the events that became readable, those of refused requests aside."""

    decision: ScheduleDecision
    events: list[TokenEvent]
    refused: dict[str, str] = field(default_factory=dict)  # request id -> why submit refused it


def play(engine: InferenceEngine, scenario: Scenario) -> Iterator[Played]:
    """Run the scenario's requests and events to the end, a step at a time. Arrivals count in the engine's steps from
    now; a request that is refused is reported and the run goes on.

    Idle time takes no step: when nobody is there, the next request comes at once, and everything after it so much
    earlier. (With faults, whose steps the engine counts itself, every idle step is run.)
    """
    start = engine.steps
    left_out = 0  # steps of idle time
    arrivals = deque(sorted(scenario.requests, key=lambda request: request.arrival))  # a stable sort
    cancels = deque(sorted(scenario.events, key=lambda event: event.step))
    slow = engine.inject(scenario.faults).slow if scenario.faults else frozenset()
    live: Counter[str] = Counter()  # request id -> samples that have not ended
    while arrivals or live:
        if arrivals and engine.scheduler.idle and not scenario.faults:
            left_out = max(left_out, ceil(arrivals[0].arrival) - (engine.steps - start))
        now = engine.steps - start + left_out
        while cancels and cancels[0].step < now:
            cancels.popleft()  # in idle time: there was nobody to cancel
        refused = {}
        while arrivals and arrivals[0].arrival <= now:
            request = arrivals.popleft()
            try:
                live[_submit(engine, request)] = request.sampling.n
            except RequestError as error:
                refused[request.request_id] = str(error)
        while cancels and cancels[0].step <= now:
            request_id = cancels.popleft().cancel
            if request_id in live:
                engine.cancel(request_id)
        decision = engine.step()
        readable = live.keys() - slow or live.keys()  # slow consumers read when nobody else is left
        events = [event for request_id in sorted(readable) for event in engine.poll(request_id)]
        live -= Counter(event.request_id for event in events if event.finish_reason)
        yield Played(decision, events, refused)


def _submit(engine: InferenceEngine, request: Request) -> str:
    return engine.submit(request.prompt_tokens, request.max_tokens, request_id=request.request_id,
                         sampling=request.sampling, priority=request.priority, stop_tokens=request.stop_tokens,
                         cache_salt=request.cache_salt)


def tokens_of(events: list[TokenEvent]) -> dict[str, list[int]]:
    """Tokens by request id, in order; a request that ended without any has an empty list. Of a request with several
    samples, the first has its id, the others "<id>#1", "<id>#2", ..."""
    tokens: dict[str, list[int]] = {}
    for event in events:
        mine = tokens.setdefault(event.sequence_id, [])
        if event.token is not None:
            mine.append(event.token)
    return tokens


# ---------------------------------------------------------------------------------------------------------- the service

class InferenceEngine:
    """Serves many requests on one model. Make one with ``from_scenario`` or ``from_checkpoint``; a context manager."""

    def __init__(self, loaded: Loaded, settings: EngineSettings | None = None,
                 clock: Callable[[], float] | None = None) -> None:
        if clock is not None and not callable(clock):
            raise SchemaError(f"a function that returns seconds is wanted, not {describe(clock)}", "/clock")
        self.model, self.tokenizer, self.settings = loaded.model, loaded.tokenizer, settings or EngineSettings()
        self._workers = self._start_workers(loaded.model)
        self.model = self._workers or loaded.model
        self._metrics = MetricsCollector()
        self._recorder = Recorder(time.monotonic if clock is None else clock, self._metrics)
        self._stepping = RLock()  # held by whoever runs a step; never taken by a thread that holds _lock
        self._lock = RLock()  # held while state is read or changed
        self._news = Condition(self._lock)  # notified when there are new events
        self._waiting = 0  # threads that wait for news
        self._requests = RequestTable(self.model.config, self.tokenizer, self.settings.seed)
        self._closed = False
        self._thread: Thread | None = None
        self._failure: BaseException | None = None  # what stopped the engine's own thread, or a step half-way
        self.kv = make_cache(self.model, self.settings, self._on_pages)
        self.scheduler = ContinuousBatchScheduler(
            self.settings.max_running, self.settings.policy, self.kv if self.settings.use_cache else None,
            self.settings.batching, self.settings.preemption,
            lambda sequence_id: self._requests.samples[sequence_id].tokens)
        self._answers = Answers(self._requests, self.scheduler, self._recorder)
        self._layout = Layout(self._requests, self.scheduler, self.kv, self.settings.use_cache)
        self._executor = Executor(self.model, self.kv.store if self.settings.use_cache else None)
        self._recorder.header(engine=__version__, backend=self.model.backend.name,
                              settings=ENGINE_SHAPE.dump(self.settings), model=MODEL_SHAPE.dump(self.model.config),
                              page_bytes=self.kv.store.page_bytes, num_pages=self.kv.total_pages,
                              weight_bytes=self.model.weight_bytes, **loaded.about)

    # ------------------------------------------------------------------------------------------- making

    @classmethod
    def from_scenario(cls, scenario: Scenario, backend: str | Backend = "cpu", *,
                      quantization: object = AS_IN_SCENARIO, weights_seed: int | None = None,
                      clock: Callable[[], float] | None = None, **overrides: object) -> InferenceEngine:
        """An engine for a scenario's model and settings; its requests are not submitted (``play.play`` does that).

        ``overrides`` replace fields of EngineSettings; ``weights_seed`` draws other weights; ``quantization`` is
        None, "int8", "int4" or a QuantizationConfig. SchemaError names a setting that is out of range.
        """
        if not isinstance(scenario, Scenario):
            raise SchemaError(f"a Scenario is wanted, as load_scenario(path) returns it, not {describe(scenario)}")
        Nullable(SEED_SHAPE).parse(weights_seed, "/weights_seed")
        settings = scenario.engine.override(overrides)
        return cls(load_scenario_model(scenario, backend, quantization, weights_seed), settings, clock)

    @classmethod
    def from_checkpoint(cls, path: str | Path, backend: str | Backend = "auto", *, quantization: object = None,
                        clock: Callable[[], float] | None = None, **overrides: object) -> InferenceEngine:
        """An engine for a checkpoint on disk: a GGUF file, a Hugging Face folder, or a llama2.c model file with its
        tokenizer beside it. ``quantization`` as in ``from_scenario``, or "stored": the codes that a GGUF file holds."""
        if not isinstance(path, (str, Path)):
            raise SchemaError(f"the path of a model file or of its folder is wanted, not {describe(path)}")
        settings = EngineSettings().override(overrides)
        reader = wing("checkpoints.load", "a checkpoint")
        return cls(reader.load_checkpoint_model(path, backend, quantization), settings, clock)

    def _start_workers(self, model: Model) -> Any:
        """The model computed by several processes, where the settings ask for them."""
        if self.settings.workers == 1:
            return None
        return wing("backends.workers.parallel", "workers above 1").ParallelModel(model, self.settings.workers)

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (f"<InferenceEngine {self.model.backend.name}: step {self.steps}, {len(self.active)} active requests, "
                f"{self.kv.free_pages} of {self.kv.total_pages} pages free>")

    def _repr_html_(self) -> str | None:
        with self._lock:
            return picture("engine_card", self)

    def inject(self, faults: Iterable[Fault]) -> FaultHooks:
        """Let these faults happen from now on, in place of those injected before (see ``workloads/faults.py``)."""
        faults = tuple(faults) if isinstance(faults, Iterable) else (faults,)
        for fault in faults:
            if not isinstance(fault, get_args(Fault)):
                raise RequestError(f"a list of faults is wanted (see faults.py), not {describe(fault)}")
        with self._lock:
            if self._executor.faults:
                self._executor.faults.end()
            self._recorder.event("inject", faults=[FAULT_SHAPE.dump(fault) for fault in faults])
            injector: FaultHooks = wing("workloads.faults", "a fault on purpose").FaultInjector(
                faults, self.kv, self.scheduler.handle, self._recorder.event)
            self._executor.faults = injector
            return injector

    def start(self) -> None:
        """Run steps in a thread of the engine's own from now on, whenever there is work. Idempotent."""
        with self._lock:
            self._require_open()
            self._require_sound()
            if self._thread is None:
                self._thread = Thread(target=self._serve, name="engine", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                self.step()
        except BaseException as failure:  # told to whoever waits for news; there is nobody else to raise it to
            with self._lock:
                self._failure = failure
                self._notify()

    def _wait_for_work(self) -> bool:
        with self._lock:
            self._wait_for(lambda: self._closed or not self.scheduler.idle)
            return not self._closed

    def close(self) -> None:
        """Cancel what is live, give all pages back, and end the engine's own thread and processes. Idempotent."""
        with self._lock:
            for stream in list(self._requests.streams.values()):
                if stream.finish_reason is None:
                    self.cancel(stream.request.request_id)
            for sequence_id in self.scheduler.live:  # of a stream that was told its end, when a step was interrupted
                self.scheduler.cancel(sequence_id)
            if self._executor.faults:
                self._executor.faults.end()
            self._closed = True
            self._notify()
            thread, self._thread = self._thread, None
        if thread:
            thread.join()
        if self._workers:
            self._workers.close()

    # ------------------------------------------------------------------------------------------ serving

    def submit(self, prompt_tokens: Sequence[int], max_tokens: int, *, request_id: str | None = None,
               sampling: SamplingParams | None = None, priority: int = 0, stop_tokens: Sequence[int] = (),
               cache_salt: str | None = None) -> str:
        """Queue a prompt for at most ``max_tokens`` new tokens and return its id. RequestError, CapacityError,
        DuplicateRequestError or QueueFullError leave the engine as it was. O(prompt)."""
        with self._lock:
            self._require_open()
            self._require_sound()
            request_id = self._requests.fresh_id() if request_id is None else request_id
            handed_over, told = False, self.timeline.recorded
            try:
                request = Request(request_id, prompt_tokens, max_tokens, self._recorder.clock(), priority,
                                  SamplingParams() if sampling is None else sampling, stop_tokens, cache_salt)
                self._requests.check(request)
                self._require_room()
                stream = self._requests.make_stream(request)
                handed_over = True
                self.scheduler.submit(request)
                self._requests.add(stream)
                self._recorder.submitted(request)
                if max_tokens == 0:
                    self._answers.end_all(stream, "length")
                self._notify()
            except RequestError as error:
                self._recorder.event("refuse", request=str(request_id), error=str(error))
                raise
            except BaseException as failure:  # Ctrl-C, say
                if handed_over and not (max_tokens and self.timeline.recorded > told):  # else everybody knows of it
                    self._half_submitted(stream, failure)
                self._notify()
                raise
            return request_id

    def _half_submitted(self, stream: RequestStream, failure: BaseException) -> None:
        stream.samples[0].started = False  # its end will not be told, as its beginning may not have been
        self._requests.add(stream)
        self._interrupted(failure, halfway=True)

    def _require_room(self) -> None:
        if self.scheduler.waiting_count >= self.settings.max_waiting:
            raise QueueFullError(f"{self.scheduler.waiting_count} requests wait, and max_waiting is "
                                 f"{self.settings.max_waiting}; try again when some have been served")

    def stream(self, request_id: str) -> Iterator[TokenEvent]:
        """The request's events, each once, from where the last reader stopped; runs engine steps while there is no
        news. UnknownRequestError for an id never seen, or whose last event was read."""
        with self._lock:
            self._require_open()
            return self._read(self._requests.find(request_id))

    def _read(self, stream: RequestStream) -> Iterator[TokenEvent]:
        while (event := self._next_event(stream)) is not None:
            yield event

    def _next_event(self, stream: RequestStream) -> TokenEvent | None:
        """The next event, waited or worked for; None when the stream has ended."""
        while True:
            with self._lock:
                if self._thread:
                    self._wait_for(lambda: stream.events or stream.drained or self._failure)
                if stream.events:
                    return self._requests.take(stream)
                if stream.drained:
                    return None
                self._require_sound()
            if self._stepping.acquire(blocking=False):
                try:
                    self._step_for(stream)
                finally:
                    self._stepping.release()
            else:  # another thread runs a step, whose end will be told; the timeout is for an end just missed
                with self._lock:
                    self._wait_for(lambda: stream.events or stream.drained, timeout=0.01)

    def _step_for(self, stream: RequestStream) -> None:
        """A step on behalf of a reader, unless another thread's step has brought news meanwhile."""
        if stream.events or stream.drained:
            return
        try:
            self.step()
        except EngineError:
            if not self._closed:  # else it was closed in between, and the stream has its last event
                raise

    def poll(self, request_id: str) -> list[TokenEvent]:
        """The request's unread events, without running a step."""
        with self._lock:
            stream = self._requests.find(request_id)
            return [self._requests.take(stream) for _ in range(len(stream.events))]

    def cancel(self, request_id: str) -> None:
        """End a request now: its pages are free, and its unread tokens are withheld. Of n samples, those that had
        finished by themselves are still delivered whole. Does nothing to a finished request. UnknownRequestError for
        an unknown id."""
        with self._lock:
            stream = self._requests.find(request_id)
            if stream.finish_reason is None:
                try:
                    stream.withhold()
                    self._recorder.event("cancel", request=request_id)
                    self._answers.end_all(stream, "cancelled")
                except BaseException as failure:  # half cancelled
                    self._interrupted(failure, halfway=True)
                    raise
                self._notify()

    def run(self) -> int:
        """Step until no request is live; return the number of steps."""
        before = self.steps
        self._require_sound()
        while not self.scheduler.idle:
            self.step()
        return self.steps - before

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int,
                 sampling: SamplingParams | None = None) -> list[list[int]]:
        """Continue several prompts together; the tokens of each (of n samples, the first). All or none: a prompt that
        is refused, or that ends with an error, cancels the others and raises."""
        if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)):
            raise RequestError(f"a list of prompts is wanted, each a list of tokens, not {describe(prompts)}")
        request_ids: list[str] = []
        try:
            for prompt in prompts:
                request_ids.append(self.submit(prompt, max_tokens, sampling=sampling))
            return [self._tokens_of(request_id) for request_id in request_ids]
        except BaseException:
            with self._lock:
                for request_id in request_ids:
                    if request_id in self._requests.streams:
                        self.cancel(request_id)
                        self.poll(request_id)
            raise

    def _tokens_of(self, request_id: str) -> list[int]:
        tokens = []
        for event in self.stream(request_id):
            if event.finish_reason == "error":
                raise BackendError(f"{request_id} ended with an error: {event.error}")
            if event.token is not None and event.sample == 0:
                tokens.append(event.token)
        return tokens

    # ---------------------------------------------------------------------------------------- observing

    @property
    def active(self) -> tuple[str, ...]:
        """Ids of live requests: running first, then waiting."""
        with self._lock:
            live = [self._requests.samples[sequence_id].stream for sequence_id in self.scheduler.live]
            return tuple(dict.fromkeys(stream.request.request_id for stream in live))

    @property
    def steps(self) -> int:
        """Steps completed."""
        return self._recorder.steps

    @property
    def timeline(self) -> Timeline:
        """Everything that happened, as events."""
        return self._recorder.timeline

    def status(self, request_id: str) -> RequestStatus:
        """Where a live or unread request stands."""
        with self._lock:
            stream = self._requests.find(request_id)
            running = any(self.scheduler.is_running(sample.id) for sample in stream.samples)
            state = "finished" if stream.finish_reason else "running" if running else "waiting"
            generated = sum(sample.generated for sample in stream.samples)
            return RequestStatus(request_id, state, len(stream.request.prompt_tokens), generated, stream.finish_reason)

    def metrics(self) -> Metrics:
        """TTFT, TPOT, utilization and the rest up to now; see ``metrics.py`` for what each means."""
        with self._lock:
            return self._metrics.snapshot()

    # --------------------------------------------------------------------------------------------- step

    def step(self, budget_tokens: int | None = None) -> ScheduleDecision:
        """Plan and compute one step of at most ``budget_tokens`` (the settings' budget if None)."""
        with self._stepping:
            planning = told = False
            try:
                with self._lock:
                    planning = True
                    decision, samples, batch = self._plan(
                        self.settings.budget_tokens if budget_tokens is None else budget_tokens)
                    planning = False
                rows = self._executor.run(samples, batch)
                with self._lock:
                    choices, failures = self._choose(samples, batch, rows)
                    told = True
                    self._answers.settle(choices, failures)
                    self._notify()
            except BaseException as failure:  # Ctrl-C, say
                self._interrupted(failure, told or (planning and not isinstance(failure, Exception)))
                raise
            self._recorder.raise_trouble()
            return decision

    def _choose(self, samples: Sequence[Sample], batch: Batch,
                rows: Mapping[Sample, Row]) -> tuple[dict[Sample, Choice], dict[Sample, Exception]]:
        """The tokens of a step, but for those whose sample was cancelled while the decoder computed."""
        gone = [sample for sample in samples if sample.finish_reason]
        if gone:
            self.kv.settle_unused(page for sample, span in zip(samples, batch.spans) if sample.finish_reason
                                  for page in span.pages)
            rows = {sample: row for sample, row in rows.items() if sample not in gone}
        return self._answers.choose(rows)

    def _interrupted(self, failure: BaseException, halfway: bool) -> None:
        """A step that is interrupted while the decoder computes counts for nothing: the next one plans it again. Not so
        ``halfway`` through planning, where pages may be in nobody's hands, or through telling, where some streams have
        their tokens and others do not: then the engine can only be closed."""
        with self._lock:
            if halfway:
                self._failure = failure
                self._notify()
            else:
                self.scheduler.abandon_step()
                self._recorder.abandoned()

    def _plan(self, budget_tokens: int) -> tuple[ScheduleDecision, list[Sample], Batch]:
        self._require_open()
        self._require_sound()
        if self._executor.faults:
            self._executor.faults.before_step()
        self._recorder.hold_back()
        try:
            decision = self.scheduler.step(budget_tokens)
            samples, batch = self._layout.batch(decision.planned)
            self._recorder.planned(decision, self._layout.positions(batch), self.kv)
        finally:
            self._recorder.write_held_back()
        self._answers.end_failures()
        return decision, samples, batch

    # ------------------------------------------------------------------------------------------- events

    def _wait_for(self, news: Callable[[], object], timeout: float | None = None) -> None:
        """Called with the lock held, which others can take meanwhile."""
        self._waiting += 1
        try:
            self._news.wait_for(news, timeout)
        finally:
            self._waiting -= 1

    def _notify(self) -> None:
        """There are news, for whoever waits: mostly nobody, which is quickly seen."""
        if self._waiting:
            self._news.notify_all()

    def _on_pages(self, change: str, request_id: str, pages: tuple[int, ...]) -> None:
        """The page manager's observer."""
        self._recorder.page_change(change, request_id, pages, self.kv.used_pages)

    def _require_sound(self) -> None:
        if self._failure:
            raise EngineError(f"the engine has stopped: {self._failure!r}; make a new one") from self._failure

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("this engine is closed; make a new one")
