"""M3, M6 · The loop: plan, compute, choose, settle. One step of it, as data sees it:

    plan      decision = scheduler.step(budget)        which tokens, for which requests, why; their pages are reserved
              batch    = Batch.of(pieces)              tokens, positions and slots, flat
    compute   rows     = model.forward(batch, store)   logits, only of the rows that need a next token
    choose    token    = choose_token(row, draws)      with the sample's own random numbers
    settle    events  -> streams, timeline, metrics    finished requests give their pages back

``EngineCore`` knows nothing of threads and interrupts: ``engine.py`` protects it from them. The core owns
the streams; the scheduler owns the lifecycles, the page manager the block tables, the backend's store the numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, Union

from .backend import Batch, Piece
from .base.fault_kinds import FaultHooks
from .base.version import __version__
from .base.wings import wing
from .errors import (
    BackendError,
    CapacityError,
    DuplicateRequestError,
    EngineError,
    QueueFullError,
    RequestError,
)
from .kv_cache import KVCacheManager, KVHandle, KVStore
from .metrics import MetricsCollector
from .model import Loaded, Model
from .sampling import Choice, Draws, Logits, Sampler, choose_token
from .scheduler import ContinuousBatchScheduler, Policy, ScheduledChunk, ScheduleDecision, require_budget
from .schema import ENGINE_SHAPE, MODEL_SHAPE, EngineSettings, Request, sample_id
from .streams import RequestStatus, RequestStream, Sample
from .timeline import Recorder

Outcome = Union[Sequence[Sequence[float]], Exception]  # rows of logits, as many as were wanted, or why there are none


@dataclass
class Work:
    """What a step computes: ``batch`` holds one piece for each of the samples."""

    decision: ScheduleDecision
    samples: list[Sample]
    batch: Batch


@dataclass
class Chosen:
    """What came of it: the next token of each sample that was due one, the samples that failed, and of prompts whose
    logprobs are asked for, those of some more tokens."""

    tokens: dict[Sample, Choice]
    failures: dict[Sample, Exception]
    prompts: dict[Sample, list[Choice]] = field(default_factory=dict)


class EngineCore:
    """The live requests of one model, and the steps that serve them."""

    def __init__(self, loaded: Loaded, settings: EngineSettings, clock: Callable[[], float],
                 policy: Policy | None = None, sampler: Sampler = choose_token) -> None:
        self.settings, self.tokenizer, self.sampler = settings, loaded.tokenizer, sampler
        self.model = self._with_workers(loaded.model)
        self.metrics = MetricsCollector()
        self.recorder = Recorder(clock, self.metrics, settings.keep_events)
        self.streams: dict[str, RequestStream] = {}  # by request id: live, or with unread events
        self.samples: dict[str, Sample] = {}  # by sequence id: live ones
        self.unread: OrderedDict[RequestStream, float] = OrderedDict()  # finished, with unread events; and since when
        self.past: OrderedDict[str, RequestStatus] = OrderedDict()  # the last requests whose streams were forgotten
        self.kv = make_cache(self.model, settings, self._on_pages)
        self.scheduler = ContinuousBatchScheduler(settings.max_running, policy or settings.policy,
                                                  self.kv if settings.use_cache else None,
                                                  settings.batching, settings.preemption)
        self.runner = ModelRunner(self.model, self.kv.store if settings.use_cache else None)
        self._record_header(loaded, policy)

    def _record_header(self, loaded: Loaded, policy: Policy | None) -> None:
        settings = ENGINE_SHAPE.dump(self.settings)
        assert isinstance(settings, dict)
        if policy:  # a timeline can name the caller's own class, not hold it
            settings["policy"] = type(policy).__name__
        self.recorder.header(engine=__version__, backend=self.model.backend.name, settings=settings,
                             model=MODEL_SHAPE.dump(self.model.config), page_bytes=self.kv.store.page_bytes,
                             num_pages=self.kv.total_pages, weight_bytes=self.model.weight_bytes, **loaded.about)

    def _with_workers(self, model: Model) -> Model:
        """The model, computed by several processes where the settings ask for them."""
        if self.settings.workers == 1:
            return model
        workers = wing("backends.workers.parallel", "workers above 1")
        parallel: Model = workers.ParallelModel(model, self.settings.workers)
        return parallel

    # ---------------------------------------------------------------------------------------- beginning

    def check(self, request: Request) -> None:
        """Refuse what the model or the pool cannot serve, an id that is taken, and requests beyond max_waiting."""
        request.check_against(self.model.config)
        self._check_id(request)
        if self.scheduler.waiting_count >= self.settings.max_waiting:
            raise QueueFullError(f"{self.scheduler.waiting_count} requests wait, and max_waiting is "
                                 f"{self.settings.max_waiting}; try again when some have been served")
        self.scheduler.check(request)

    def _check_id(self, request: Request) -> None:
        """DuplicateRequestError if the id, or that of one of the samples, belongs to a live or an unread request."""
        request_id = request.request_id
        for sequence_id in (sample_id(request_id, number) for number in range(request.sampling.n)):
            whole, _, last = sequence_id.rpartition("#")
            for owner, what in ((sequence_id, "live"), (whole, f"sample {last} of the live request {whole!r}")):
                stream = self.streams.get(owner)
                if stream and stream.unfinished and sequence_id in [sample.id for sample in stream.samples]:
                    raise DuplicateRequestError(f"request {sequence_id!r} is {what}; choose another id or cancel it "
                                                f"first")
        unread = self.streams.get(request_id)
        if unread and unread.finish_reason != "cancelled":
            raise DuplicateRequestError(f"the stream of the finished request {request_id!r} was not read to its end; "
                                        f"read it, or choose another id")

    def make_stream(self, request: Request) -> RequestStream:
        """A stream with its samples, not yet registered."""
        eos_tokens = () if request.sampling.ignore_eos else self.model.config.eos_tokens
        stream = RequestStream(request, (*eos_tokens, *request.stop_tokens))
        for number in range(request.sampling.n):
            draws = Draws(request.sampling, request.request_id, number, self.settings.seed)
            stream.samples.append(Sample(stream, number, draws, self.tokenizer.stream()))
        stream.samples[0].others = stream.samples[1:]
        return stream

    def accept(self, stream: RequestStream) -> None:
        """Queue the stream of a request that ``check`` has passed; ``end_all`` ends one with max_tokens 0."""
        first = stream.samples[0]
        self.register(stream)
        self.scheduler.add(first)
        first.started = True
        self.recorder.submitted(stream.request)

    def register(self, stream: RequestStream) -> None:
        """From now on the stream and its samples are found by their ids."""
        request_id = stream.request.request_id
        if request_id in self.streams:  # cancelled, and not read since
            self.forget(self.streams[request_id])
        self.past.pop(request_id, None)
        self.samples.update({sample.id: sample for sample in stream.samples})
        self.streams[request_id] = stream

    def is_running(self, sample: Sample) -> bool:
        """Is this very sample running? Once it is finished, its id may belong to another request."""
        return self.samples.get(sample.id) is sample and self.scheduler.is_running(sample.id)

    # --------------------------------------------------------------------------------------------- step

    def plan(self, budget: int) -> Work:
        """The scheduler's decision, and the batch that follows from it."""
        require_budget(budget)
        self.runner.faults.before_step()
        with self.recorder.holding_back():
            decision = self.scheduler.step(budget)
            samples: list[Sample] = []
            pieces: list[Piece] = []
            for chunk in decision.chunks:
                sample = self.samples[chunk.request_id]
                if piece := self._piece(sample, chunk):
                    samples.append(sample)
                    pieces.append(piece)
            batch = Batch.of(pieces, self.kv.page_size)
            computed = len(batch.tokens) if self.settings.use_cache else sum(
                len(piece.tokens) for piece in pieces if piece.wants_logits)
            self.recorder.planned(decision, computed, self.kv)
        self._end_failures()
        return Work(decision, samples, batch)

    def compute(self, work: Work) -> dict[Sample, Outcome]:
        """The logits that each piece wants, by sample. Changes nothing but the numbers in the step's own slots."""
        return self.runner.run(work.samples, work.batch)

    def _piece(self, sample: Sample, chunk: ScheduledChunk) -> Piece | None:
        """What a chunk asks of the decoder. The tokens are copied, since the engine's lock is not held while they are
        computed. Without a cache a piece is all tokens, to be computed only when the next one is due. None, and the end
        of the request, if its pages do not hold the chunk: they were taken away from outside, or never reserved."""
        end = chunk.start + chunk.count
        wants_logits = int(end == len(sample.tokens))
        if not self.settings.use_cache:
            return Piece(sample.tokens[:], 0, (), wants_logits and 1 + sample.unscored)
        handle = sample.handle
        assert handle is not None  # a chunk is for a running sequence, which has a block table
        if end > len(handle.pages) * self.kv.page_size:
            self.scheduler.fail(sample.id, self._no_room(handle, end))
            return None
        if sample.unscored:  # a row scores the token after it
            wants_logits = max(end - max(chunk.start, sample.prompt_length - 1 - sample.unscored), 0)
        return Piece(sample.tokens[chunk.start:end], chunk.start, handle.pages, wants_logits)

    def _no_room(self, handle: KVHandle, end: int) -> EngineError:
        """Why a request's pages do not hold the positions before ``end``."""
        try:
            pages = self.kv.resident_pages(handle)
        except EngineError as error:  # released or swapped out from outside
            return error
        return EngineError(f"{handle.request_id} is to compute position {end - 1}, and its {len(pages)} pages of "
                           f"{self.kv.page_size} end before it: they were not reserved, or are not its own any more")

    def choose(self, work: Work, rows: Mapping[Sample, Outcome]) -> Chosen:
        """The next tokens. A row after a prompt serves all samples of its request. Whatever is wrong with a row
        concerns its request alone. No request changes here: random numbers count only when their token is accepted, so
        an interrupted step can be planned and chosen again."""
        chosen = Chosen({}, {})
        for sample, outcome in rows.items():
            if sample.finish_reason:  # cancelled while the decoder computed
                continue
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                if sample.unscored:
                    chosen.prompts[sample] = sample.scores(outcome)
                for row in outcome[sample.unscored:]:  # of the last token, if the next one is due
                    chosen.tokens[sample] = self._choice(sample, row)
                    for other in sample.others:
                        chosen.tokens[other] = self._choice(other, row)
            except Exception as error:
                chosen.failures[sample] = error
        self.kv.drop_unused_tails(page for sample, span in zip(work.samples, work.batch.spans) if sample.finish_reason
                              for page in span.pages)
        return chosen

    def _choice(self, sample: Sample, row: Sequence[float]) -> Choice:
        vocab_size = self.model.config.vocab_size
        own = self.sampler is not choose_token  # the caller's
        if sample.plain and not own and isinstance(row, Logits) and row.greedy.token < vocab_size:
            return row.greedy
        if len(row) != vocab_size:
            raise BackendError(f"the decoder returned a row of {len(row)} logits; the vocabulary has "
                               f"{vocab_size} tokens")
        choice = self.sampler(row, sample.request.sampling, sample.draws, sample.request.prompt_tokens,
                              sample.tokens[sample.prompt_length:], sample.stream.end_tokens)
        if not own:
            return choice
        token, logprob, top_logprobs = choice
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(f"the sampler chose {token!r}; the vocabulary has the tokens 0 to {vocab_size - 1}")
        return Choice(token, logprob, top_logprobs)

    def settle(self, chosen: Chosen) -> None:
        """Record the step's results: failed requests end, the others get their tokens, finished ones give back
        their pages. A sample whose sequence is no longer running gets its last token here."""
        recorder, scheduler = self.recorder, self.scheduler
        recorder.step_completed()
        for sample, failure in chosen.failures.items():
            self.end_all(sample.stream, "error", f"{type(failure).__name__}: {failure}")
        scheduler.complete_step()
        self._end_failures()
        for sample, scores in chosen.prompts.items():
            sample.stream.prompt_logprobs += scores
        for sample, choice in chosen.tokens.items():
            if sample.finish_reason:  # it failed, or a listener cancelled it just now
                continue
            if sample.others:
                self._start_others(sample)
            event = sample.add(choice, not scheduler.is_running(sample.id), recorder.steps - 1, recorder.now)
            recorder.token(sample.id, event)  # a listener may cancel this very request
            if event.finish_reason:
                if scheduler.is_running(sample.id):
                    scheduler.finish(sample.id, event.finish_reason)
                self._forget(sample)
        recorder.write_tokens()

    def abandon(self) -> None:
        """The step was interrupted: the next one plans the same positions again."""
        self.scheduler.abandon_step()
        self.recorder.abandoned()

    # ---------------------------------------------------------------------------------- beginnings and ends

    def _start_others(self, first: Sample) -> None:
        """The prompt is computed: the other samples start from the same pages."""
        others, first.others = first.others, []
        for sample in others:
            self.recorder.event("fork", request=sample.id, parent=first.id)
            sample.started = True
            if self.scheduler.is_running(first.id):  # else the token of this step is the only one
                self.scheduler.fork(first.id, sample)

    def end_all(self, stream: RequestStream, reason: str, error: str | None = None) -> None:
        """End all unfinished samples of a request without a token: "cancelled", "error", or "length" where max_tokens
        is 0."""
        for sample in stream.samples:
            if self.samples.get(sample.id) is sample and self.scheduler.is_live(sample.id):
                self.scheduler.finish(sample.id, reason)
            if sample.finish_reason is None:
                self._end(sample, reason, error)

    def _end_failures(self) -> None:
        """End the samples whose pages could not be provided, and, if that is the first sample, those it has not
        started yet."""
        for sequence_id, reason in self.scheduler.take_failures().items():
            failed = self.samples[sequence_id]
            for sample in failed.stream.samples:
                if sample is failed or not sample.started:
                    self._end(sample, "error", reason)

    def _end(self, sample: Sample, reason: str, error: str | None) -> None:
        sample.end(reason, error, self.recorder.steps, self.recorder.read_clock())
        self._forget(sample, **({"error": error} if error else {}))

    def _forget(self, sample: Sample, **fields: object) -> None:
        """A finished sample is no longer a sequence; only its events remain, until they are read."""
        del self.samples[sample.id]
        if sample.started:
            self.recorder.event("finish", request=sample.id, reason=sample.finish_reason, tokens=sample.delivered,
                                 **fields)
        if not sample.stream.unfinished:
            self._keep_unread(sample.stream)

    def _keep_unread(self, stream: RequestStream) -> None:
        """The stream has ended and waits to be read. The oldest such streams are given up where the settings allow no
        more of them, or none so old."""
        settings, now = self.settings, self.recorder.now
        self.unread[stream] = now
        while self.unread:
            oldest, since = next(iter(self.unread.items()))
            if len(self.unread) <= settings.max_unread and (
                    settings.unread_seconds is None or now - since <= settings.unread_seconds):
                break
            self.forget(oldest)

    def forget(self, stream: RequestStream) -> None:
        """The stream was read to its end, or will not be: its id is free. Its status is remembered for a while."""
        self.unread.pop(stream, None)
        request_id = stream.request.request_id
        if self.streams.get(request_id) is stream:  # a newer request may have the id
            del self.streams[request_id]
            self.past[request_id] = stream.status
            if len(self.past) > self.settings.max_unread:
                self.past.popitem(last=False)

    def _on_pages(self, change: str, request_id: str, pages: tuple[int, ...]) -> None:
        """The page manager's observer."""
        self.recorder.event("pages", change=change, request=request_id, pages=list(pages),
                            used_pages=self.kv.used_pages)


# ---------------------------------------------------------------------------------------------- computing a batch


class HasId(Protocol):
    """What the runner needs to know of a sequence."""

    id: str


S = TypeVar("S", bound=HasId)


class NoFaults:
    """Nothing goes wrong on purpose."""

    slow: frozenset[str] = frozenset()

    def before_step(self) -> None: ...

    def before_forward(self, request_ids: Collection[str]) -> None: ...

    def after_forward(self, request_ids: Sequence[str], rows: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        return rows

    def end(self) -> None: ...


class ModelRunner:
    """Runs the decoder for one step against the pages in ``store``; without a store, each piece whole by itself."""

    def __init__(self, model: Model, store: KVStore | None) -> None:
        self._model, self._store = model, store
        self.faults: FaultHooks = NoFaults()

    def run(self, samples: Sequence[S], batch: Batch) -> dict[S, Outcome]:
        """The logits that each sample's piece wants, if any; an exception for each sample that failed. ``batch`` holds
        one piece for each of the samples.

        When the batch fails, each sample is tried alone (its slots are simply written again, with the same numbers),
        so that only the one at fault ends. This relies on batch-equals-solo, and on stores that keep everything a
        retry needs until the page manager has committed the step.
        """
        try:
            return self._forward(samples, batch)
        except Exception:
            alone = batch.pieces()  # retried outside this block, whose traceback would keep the batch's device memory
        rows: dict[S, Outcome] = {}
        for sample, piece in zip(samples, alone):
            try:
                rows.update(self._forward([sample], Batch.of([piece], batch.page_size)))
            except Exception as error:
                rows[sample] = error.with_traceback(None)  # frees this one's memory, too
        return rows

    def _forward(self, samples: Sequence[S], batch: Batch) -> dict[S, Outcome]:
        if not samples:
            return {}
        self.faults.before_forward({sample.id for sample in samples})
        rows: Sequence[Sequence[float]]
        if self._store is None:
            rows = [self._model.forward_uncached(piece.tokens[:end]) for piece in batch.pieces()
                    for end in range(len(piece.tokens) - piece.wants_logits + 1, len(piece.tokens) + 1)]
        else:
            rows = self._model.forward(batch, self._store)
        owners = [sample for sample, wanted in zip(samples, batch.wanted) for _ in range(wanted)]
        if len(rows) != len(owners):
            raise BackendError(f"the decoder returned {len(rows)} rows of logits; {len(owners)} were asked for")
        outcomes: dict[S, list[Sequence[float]]] = {}
        for owner, row in zip(owners, self.faults.after_forward([owner.id for owner in owners], rows)):
            outcomes.setdefault(owner, []).append(row)
        return {**outcomes}


# ---------------------------------------------------------------------------------------------- the page pool's size


def make_cache(model: Model, settings: EngineSettings,
               observer: Callable[[str, str, tuple[int, ...]], None]) -> KVCacheManager:
    """The pages for a model's keys and values and, for preemption by swap, the host's. CapacityError as in
    ``pages_within``."""
    num_pages = settings.num_pages if settings.kv_budget_bytes is None else pages_within(
        settings.kv_budget_bytes, model, settings)
    host_pages = settings.host_pages if settings.preemption == "swap" else 0
    store, host_store = (model.new_store(pages, settings.page_size, settings.kv_quantization, host)
                         for pages, host in ((num_pages, False), (host_pages, True)))
    store.reserve_tails(min(num_pages, most_tails(settings)))
    return KVCacheManager(num_pages, settings.page_size, model.config.layers * model.config.kv_width,
                          settings.prefix_sharing, store, host_pages, host_store, observer)


def pages_within(budget: int, model: Model, settings: EngineSettings) -> int:
    """As many pages as fit in ``budget`` bytes. CapacityError if not one does.

    Int8 pages also have *tails* while they are being filled (``backends/int8_pages.py``): ``most_tails`` of them, or
    one for each page, if that is less.
    """
    page = model.new_store(1, settings.page_size, settings.kv_quantization)
    num_pages = max(budget // (page.page_bytes + page.tail_bytes),
                    (budget - most_tails(settings) * page.tail_bytes) // page.page_bytes)
    if num_pages < 1:
        raise CapacityError(f"kv_budget_bytes {budget} is less than one page of {settings.page_size} tokens "
                            f"({page.page_bytes + page.tail_bytes} bytes); give a larger budget")
    return num_pages


def most_tails(settings: EngineSettings) -> int:
    """The most tails of int8 pages at a time: one for each running request, and one for each page that a step can
    begin. Two tokens of a request are enough to begin a page, the last slot of one and the first of the next; each
    further page of the same request takes page_size tokens. Samples that fork beyond max_running can have more."""
    crossing = min(settings.max_running, settings.budget_tokens // 2)
    return settings.max_running + crossing + (settings.budget_tokens - 2 * crossing) // settings.page_size
