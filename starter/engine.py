"""M3, M6 · The service: submit a prompt, stream its tokens, cancel it. Everything else is joined here, in a short loop.

    submit -> Request (checked once, at the door) -> scheduler
    step:     decision = scheduler.step(budget)          which tokens, for whom, why; pages reserved in the same call
              batch    = layout.batch(chunks)            flat tokens, positions, slots
              logits   = model.forward(batch, store)     only the rows that need a next token
              token    = sample(logits, generator)       the sample's own generator
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Condition, RLock, Thread
from typing import get_args

from . import __version__
from .answers import Answers
from .backend import Backend
from .batch import Batch
from .errors import (
    BackendError,
    EngineError,
    QueueFullError,
    RequestError,
    SchemaError,
)
from .executor import Executor, Row
from .faults import Fault, FaultInjector
from .layout import Layout
from .loading import AS_IN_SCENARIO, Loaded, load_checkpoint_model, load_scenario_model
from .logits import Choice
from .metrics import Metrics
from .page_budget import make_cache
from .parallel import ParallelModel
from .recorder import Recorder
from .request_table import RequestTable
from .requests import SEED_SHAPE
from .scheduler import ContinuousBatchScheduler, ScheduleDecision
from .schema import (
    ENGINE_SHAPE,
    FAULT_SHAPE,
    MODEL_SHAPE,
    EngineSettings,
    Request,
    SamplingParams,
    Scenario,
    TokenEvent,
)
from .shapes import Nullable, describe
from .streams import RequestStatus, RequestStream, Sample
from .timeline import Timeline


class InferenceEngine:
    """Serves many requests on one model. Make one with ``from_scenario`` or ``from_checkpoint``; a context manager."""

    def __init__(self, loaded: Loaded, settings: EngineSettings | None = None,
                 clock: Callable[[], float] | None = None) -> None:
        if clock is not None and not callable(clock):
            raise SchemaError(f"a function that returns seconds is wanted, not {describe(clock)}", "/clock")
        self.model, self.tokenizer, self.settings = loaded.model, loaded.tokenizer, settings or EngineSettings()
        self._workers = ParallelModel(loaded.model, self.settings.workers) if self.settings.workers > 1 else None
        self.model = self._workers or loaded.model
        self._recorder = Recorder(time.monotonic if clock is None else clock)
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
        return cls(load_checkpoint_model(path, backend, quantization), settings, clock)

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (f"<InferenceEngine {self.model.backend.name}: step {self.steps}, {len(self.active)} active requests, "
                f"{self.kv.free_pages} of {self.kv.total_pages} pages free>")

    def _repr_html_(self) -> str:
        from .notebook import engine_card
        with self._lock:
            return engine_card(self)

    def inject(self, faults: Iterable[Fault]) -> FaultInjector:
        """Let these faults happen from now on, in place of those injected before (see ``faults.py``)."""
        faults = tuple(faults) if isinstance(faults, Iterable) else (faults,)
        for fault in faults:
            if not isinstance(fault, get_args(Fault)):
                raise RequestError(f"a list of faults is wanted (see faults.py), not {describe(fault)}")
        with self._lock:
            if self._executor.faults:
                self._executor.faults.end()
            self._recorder.event("inject", faults=[FAULT_SHAPE.dump(fault) for fault in faults])
            injector = FaultInjector(faults, self.kv, self.scheduler.handle, self._recorder.event)
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
            return self._recorder.metrics()

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
        gone = [sample_ for sample_ in samples if sample_.finish_reason]
        if gone:
            self.kv.settle_unused(page for sample_, span in zip(samples, batch.spans) if sample_.finish_reason
                                  for page in span.pages)
            rows = {sample_: row for sample_, row in rows.items() if sample_ not in gone}
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
