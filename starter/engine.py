"""M3, M6 · The service: submit a prompt, stream its tokens, cancel it. Everything else is joined here, in a short loop.

    submit -> Request (checked once, at the door) -> scheduler
    step:     decision = scheduler.step(budget)          which tokens, for whom, why; pages reserved in the same call
              batch    = Batch.of(pieces)                flat tokens, positions, slots
              logits   = model.forward(batch, store)     only the rows that need a next token
              token    = sample(logits, generator)       the request's own generator
              events  -> streams, timeline, metrics      finished requests have given their pages back

The engine pulls: a step runs when somebody asks for one (``step``, ``run``) or reads a stream that has no news.

Promises, each a property in tests/test_engine.py and scripts/fuzz.py:
- One terminal event for every accepted request; token indices 0, 1, 2, ... once each; nothing after the terminal event.
- After ``cancel`` returns, no further token, tokens that were computed but not yet read included (V3).
- A request that fails ends with finish_reason "error" and the reason; its neighbours' tokens stay the same.
- A call that raises has changed nothing.
- Threads: every method may be called from any thread; one lock serializes them, a step included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import RLock

from . import __version__
from .backend import Backend
from .batch import Batch, Piece
from .errors import BackendError, CapacityError, DuplicateRequestError, EngineError, RequestError, UnknownRequestError
from .kv_cache import KVCacheManager
from .loading import AS_IN_SCENARIO, Loaded, load_checkpoint_model, load_scenario_model
from .metrics import Metrics
from .recorder import Recorder
from .sampling import request_generator, sample
from .scheduler import ContinuousBatchScheduler, ScheduledChunk, ScheduleDecision
from .schema import EngineSettings, Request, SamplingParams, Scenario, TokenEvent
from .streams import RequestStatus, RequestStream
from .timeline import Timeline


class InferenceEngine:
    """Serves many requests on one model. Make one with ``from_scenario`` or ``from_checkpoint``; a context manager."""

    def __init__(self, loaded: Loaded, settings: EngineSettings | None = None,
                 clock: Callable[[], float] | None = None) -> None:
        self.model, self.tokenizer, self.settings = loaded.model, loaded.tokenizer, settings or EngineSettings()
        self._recorder = Recorder(clock or time.monotonic)
        self._lock = RLock()
        self._streams: dict[str, RequestStream] = {}
        self._submitted = 0
        self._closed = False
        self.kv = self._make_cache()
        self.scheduler = ContinuousBatchScheduler(
            self.settings.max_running, self.settings.policy, self.kv if self.settings.use_cache else None,
            self.settings.batching)
        self._recorder.header(engine=__version__, backend=self.model.backend.name, settings=asdict(self.settings),
                              model=asdict(self.model.config), page_bytes=self.kv.store.page_bytes,
                              num_pages=self.kv.total_pages, weight_bytes=self.model.weight_bytes, **loaded.about)

    # ------------------------------------------------------------------------------------------- making

    @classmethod
    def from_scenario(cls, scenario: Scenario, backend: str | Backend = "cpu", *,
                      quantization: object = AS_IN_SCENARIO, weights_seed: int | None = None,
                      clock: Callable[[], float] | None = None, **overrides: object) -> InferenceEngine:
        """An engine for a scenario's model and settings; its requests are not submitted (``play.play`` does that).

        ``overrides`` replace fields of EngineSettings; ``weights_seed`` draws other weights; ``quantization`` is
        None, "int8", "int4" or a QuantizationConfig. SchemaError names a setting that is out of range.
        """
        settings = scenario.engine.override(overrides)
        return cls(load_scenario_model(scenario, backend, quantization, weights_seed), settings, clock)

    @classmethod
    def from_checkpoint(cls, path: str | Path, backend: str | Backend = "auto", *, quantization: object = None,
                        clock: Callable[[], float] | None = None, **overrides: object) -> InferenceEngine:
        """An engine for a checkpoint on disk: a llama2.c model file with its tokenizer, or the folder of both."""
        settings = EngineSettings().override(overrides)
        return cls(load_checkpoint_model(path, backend, quantization), settings, clock)

    def _make_cache(self) -> KVCacheManager:
        settings, config = self.settings, self.model.config
        page_bytes = self.model.new_store(1, settings.page_size).page_bytes
        num_pages = settings.num_pages
        if settings.kv_budget_bytes is not None:
            num_pages = settings.kv_budget_bytes // page_bytes
            if num_pages == 0:
                raise CapacityError(f"kv_budget_bytes {settings.kv_budget_bytes} is less than one page of "
                                    f"{settings.page_size} tokens ({page_bytes} bytes); give a larger budget")
        return KVCacheManager(num_pages, settings.page_size, config.layers * config.kv_width,
                              store=self.model.new_store(num_pages, settings.page_size), observer=self._on_pages)

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (f"<InferenceEngine {self.model.backend.name}: step {self.steps}, {len(self.active)} active requests, "
                f"{self.kv.free_pages} of {self.kv.total_pages} pages free>")

    def close(self) -> None:
        """Cancel what is live and give all pages back. Idempotent."""
        with self._lock:
            for request_id in self.scheduler.live:
                self.cancel(request_id)
            self._closed = True

    # ------------------------------------------------------------------------------------------ serving

    def submit(self, prompt_tokens: Sequence[int], max_tokens: int, *, request_id: str | None = None,
               sampling: SamplingParams | None = None, priority: int = 0, stop_tokens: Sequence[int] = (),
               cache_salt: str | None = None) -> str:
        """Queue a prompt for at most ``max_tokens`` new tokens and return its id. RequestError, CapacityError or
        DuplicateRequestError leave the engine as it was. O(prompt)."""
        with self._lock:
            self._require_open()
            if request_id is None:
                request_id = self._fresh_id()
            try:
                request = self._check(prompt_tokens, max_tokens, request_id, sampling or SamplingParams(), priority,
                                      stop_tokens, cache_salt)
                stream = self._make_stream(request)
                self.scheduler.submit(request)
            except RequestError as error:
                self._recorder.event("refuse", request=str(request_id), error=str(error))
                raise
            self._submitted += 1
            self._streams[request_id] = stream
            self._recorder.event("submit", request=request_id, prompt_tokens=list(request.prompt_tokens),
                                 max_tokens=max_tokens)
            if max_tokens == 0:
                self._end(stream, "length")
            return request_id

    def _check(self, prompt_tokens: Sequence[int], max_tokens: int, request_id: str, sampling: SamplingParams,
               priority: int, stop_tokens: Sequence[int], cache_salt: str | None) -> Request:
        arrival = self._recorder.clock()
        request = Request(request_id, prompt_tokens, max_tokens, arrival, priority, sampling, stop_tokens, cache_salt)
        request.check_against(self.model.config)
        taken = self._streams.get(request_id)
        if taken and taken.finish_reason is None:
            raise DuplicateRequestError(f"request {request_id!r} is live; choose another id or cancel it first")
        if taken and taken.finish_reason != "cancelled":
            raise DuplicateRequestError(f"the stream of the finished request {request_id!r} was not read to its end; "
                                        f"read it, or choose another id")
        return request

    def _make_stream(self, request: Request) -> RequestStream:
        text = self.tokenizer.stream()
        for token in request.prompt_tokens:  # the text goes on from the prompt's, which its reader knows
            text.push(token)
        return RequestStream(request, request_generator(request, self.settings.seed), text, list(request.prompt_tokens))

    def _fresh_id(self) -> str:
        number = self._submitted
        while f"request-{number}" in self._streams:
            number += 1
        return f"request-{number}"

    def stream(self, request_id: str) -> Iterator[TokenEvent]:
        """The request's events, each once, from where the last reader stopped; runs engine steps while there is no
        news. UnknownRequestError for an id never seen, or whose terminal event was read."""
        with self._lock:
            self._require_open()
            return self._read(self._find(request_id))

    def _read(self, stream: RequestStream) -> Iterator[TokenEvent]:
        while True:
            with self._lock:
                while not (stream.events or stream.drained):
                    self.step()
                if stream.drained:  # by another reader of the same stream
                    return
                event = self._take(stream)
            yield event
            if event.finish_reason:
                return

    def poll(self, request_id: str) -> list[TokenEvent]:
        """The request's unread events, without running a step."""
        with self._lock:
            stream = self._find(request_id)
            return [self._take(stream) for _ in range(len(stream.events))]

    def cancel(self, request_id: str) -> None:
        """End a request now: its pages are free and its stream holds nothing but the terminal event. Does nothing
        to a finished request. UnknownRequestError for an unknown id."""
        with self._lock:
            stream = self._find(request_id)
            if stream.finish_reason:
                return
            stream.withhold()
            self._recorder.event("cancel", request=request_id)
            self.scheduler.cancel(request_id)
            self._end(stream, "cancelled")

    def run(self) -> int:
        """Step until no request is live; return the number of steps."""
        with self._lock:
            before = self.steps
            while not self.scheduler.idle:
                self.step()
            return self.steps - before

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int,
                 sampling: SamplingParams | None = None) -> list[list[int]]:
        """Continue several prompts together; the tokens of each. All or none: a prompt that is refused, or that ends
        with an error, cancels the others and raises."""
        request_ids: list[str] = []
        try:
            for prompt in prompts:
                request_ids.append(self.submit(prompt, max_tokens, sampling=sampling))
            return [self._tokens_of(request_id) for request_id in request_ids]
        except EngineError:
            for request_id in request_ids:
                if request_id in self._streams:
                    self.cancel(request_id)
                    self.poll(request_id)
            raise

    def _tokens_of(self, request_id: str) -> list[int]:
        tokens = []
        for event in self.stream(request_id):
            if event.finish_reason == "error":
                raise BackendError(f"{request_id} ended with an error: {event.error}")
            if event.token is not None:
                tokens.append(event.token)
        return tokens

    # ---------------------------------------------------------------------------------------- observing

    @property
    def active(self) -> tuple[str, ...]:
        """Ids of live requests: running first, then waiting."""
        return self.scheduler.live

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
            stream = self._find(request_id)
            running = self.scheduler.is_running(request_id)
            state = "finished" if stream.finish_reason else "running" if running else "waiting"
            return RequestStatus(request_id, state, len(stream.request.prompt_tokens), stream.generated,
                                 stream.finish_reason)

    def metrics(self) -> Metrics:
        """TTFT, TPOT, utilization and the rest up to now; see ``metrics.py`` for what each means."""
        with self._lock:
            return self._recorder.metrics()

    # --------------------------------------------------------------------------------------------- step

    def step(self, budget_tokens: int | None = None) -> ScheduleDecision:
        """Plan and compute one step of at most ``budget_tokens`` (the settings' budget if None)."""
        with self._lock:
            self._require_open()
            decision = self.scheduler.step(self.settings.budget_tokens if budget_tokens is None else budget_tokens)
            self._recorder.planned(decision, self._positions(decision), self.kv)
            self._end_failures()
            try:
                results = self._compute(decision.chunks)
            except BaseException:  # an interrupt: nothing of this step counts, the next one plans it again
                self.scheduler.abandon_step()
                raise
            self._recorder.step_completed()
            for request_id, result in results.items():
                if isinstance(result, Exception):
                    self.scheduler.finish(request_id, "error")
                    self._end(self._streams[request_id], "error", f"{type(result).__name__}: {result}")
            self.scheduler.complete_step()
            for request_id, result in results.items():
                if not isinstance(result, Exception):
                    self._emit(self._streams[request_id], *result)
            self._end_failures()
            return decision

    def _compute(self, chunks: Sequence[ScheduledChunk]) -> dict[str, tuple[int, float] | Exception]:
        """The next token and its logprob for each chunk that yields one; an exception for each request that failed.

        When the batch fails, each request is tried alone (its slots are simply written again, with the same
        numbers), so that only those at fault end. This relies on batch-equals-solo.
        """
        try:
            rows = self._forward(chunks)
        except Exception:
            rows = {}
            for chunk in chunks:
                try:
                    rows.update(self._forward([chunk]))
                except Exception as error:
                    rows[chunk.request_id] = error
        return {request_id: self._sample(request_id, row) for request_id, row in rows.items()}

    def _forward(self, chunks: Sequence[ScheduledChunk]) -> dict[str, Sequence[float] | Exception]:
        """Logits by request id, for the chunks that reach the end of their request's known tokens."""
        pieces = {chunk.request_id: self._piece(chunk) for chunk in chunks}
        wanted = [request_id for request_id, piece in pieces.items() if piece.wants_logits]
        if not self.settings.use_cache:
            return {request_id: self.model.forward_uncached(self._streams[request_id].tokens) for request_id in wanted}
        if not pieces:
            return {}
        batch = Batch.of(pieces.values(), self.kv.page_size)
        return dict(zip(wanted, self.model.forward(batch, self.kv.store)))

    def _piece(self, chunk: ScheduledChunk) -> Piece:
        tokens = self._streams[chunk.request_id].tokens
        end = chunk.start + chunk.count
        pages = self.kv.pages(self.scheduler.handle(chunk.request_id)) if self.settings.use_cache else ()
        return Piece(tokens[chunk.start:end], chunk.start, pages, wants_logits=end == len(tokens))

    def _sample(self, request_id: str, row: Sequence[float] | Exception) -> tuple[int, float] | Exception:
        if isinstance(row, Exception):
            return row
        stream = self._streams[request_id]
        try:
            return sample(row, stream.request.sampling, stream.generator)
        except BackendError as error:
            return error

    # ------------------------------------------------------------------------------------------- events

    def _emit(self, stream: RequestStream, token: int, logprob: float) -> None:
        """A new token goes into its stream; the request ends here if it is its last."""
        request = stream.request
        reason = None
        if token in self.model.config.eos_tokens or token in request.stop_tokens:
            reason = "stop"
        elif stream.generated + 1 == request.max_tokens:
            reason = "length"
        if reason and self.scheduler.is_running(request.request_id):  # at max_tokens it has ended by itself
            self.scheduler.finish(request.request_id, reason)
        event = stream.token(token, logprob, reason, self.steps - 1, self._recorder.clock())
        self._recorder.event("token", request=request.request_id, index=event.index, token=token, text=event.text)
        if reason:
            self._record_finish(stream)

    def _end(self, stream: RequestStream, reason: str, error: str | None = None) -> None:
        """End a request without a token."""
        stream.end(reason, error, self.steps, self._recorder.clock())
        self._record_finish(stream, **({"error": error} if error else {}))

    def _record_finish(self, stream: RequestStream, **fields: object) -> None:
        self._recorder.event("finish", request=stream.request.request_id, reason=stream.finish_reason,
                             tokens=stream.generated, **fields)

    def _end_failures(self) -> None:
        for request_id, reason in self.scheduler.take_failures().items():
            if self._streams[request_id].finish_reason is None:  # its last token may have ended it in this step
                self._end(self._streams[request_id], "error", reason)

    def _positions(self, decision: ScheduleDecision) -> int:
        """How many positions a planned step sends through the decoder; without a cache, every new token its whole
        context."""
        if self.settings.use_cache:
            return decision.scheduled_tokens
        pieces = map(self._piece, decision.chunks)
        return sum(piece.start + len(piece.tokens) for piece in pieces if piece.wants_logits)

    def _on_pages(self, change: str, request_id: str, pages: tuple[int, ...]) -> None:
        """The page manager's observer."""
        self._recorder.page_change(change, request_id, pages, self.kv.total_pages - self.kv.free_pages)

    # ------------------------------------------------------------------------------------------- inside

    def _take(self, stream: RequestStream) -> TokenEvent:
        event = stream.take()
        if stream.drained and self._streams.get(event.request_id) is stream:  # a newer request may have the id
            del self._streams[event.request_id]
        return event

    def _find(self, request_id: str) -> RequestStream:
        stream = self._streams.get(request_id) if isinstance(request_id, str) else None
        if stream is None:
            raise UnknownRequestError(f"no request {request_id!r}: it was never submitted, or its stream was read to "
                                      f"the end")
        return stream

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("this engine is closed; make a new one")
