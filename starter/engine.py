"""M3, M6 · The service: submit a prompt, stream its tokens, cancel it. Locks, threads and interrupts around the loop
are here.

    engine.submit -> Request (checked once, at the door) -> core.accept -> the scheduler's queue
    engine.step   -> core.plan, core.compute, core.choose, core.settle           core.py: the loop itself
    engine.stream -> events, each once, as steps bring them

The engine pulls: a step runs when ``step`` or ``run`` is called, or when a stream is read that has no unread event.
After ``start()`` a thread of the engine's own runs the steps instead, and readers wait for events.

Promises, each a property in tests/test_engine*.py and scripts/fuzz.py:
- One last event for every sample of an accepted request; token indices 0, 1, 2, ... once each; nothing after it.
- After ``cancel`` returns, no further token, including tokens that were computed but not read (V3).
- A request that fails ends with finish_reason "error" and the reason; its neighbours' tokens stay the same.
- A call that raises has changed nothing.
- Threads: every method may be called from any thread. Steps are serialized; the lock on the engine's state is not
  held while the decoder computes, so submit, cancel and reading never wait for it.
- Interrupts (Ctrl-C): while the decoder computes, an interrupt is harmless, and the next step plans the same positions
  again. In the microseconds in which a plan or its results are being recorded it stops the engine, which says so.
- Bounded: at most ``max_waiting`` requests wait, and a stream holds at most max_tokens * n unread events.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from threading import Condition, RLock, Thread
from types import TracebackType
from typing import get_args

from .backend import Backend
from .base.fault_kinds import FAULT_SHAPE, Fault
from .base.strict_json import Nullable, describe
from .base.wings import picture, wing
from .core import EngineCore, FaultHooks, ModelRunner
from .errors import BackendError, EngineError, RequestError, SchemaError, UnknownRequestError
from .metrics import Metrics
from .model import AS_IN_SCENARIO, Loaded, load_scenario_model
from .scheduler import ScheduleDecision
from .schema import SEED_SHAPE, EngineSettings, Request, SamplingParams, Scenario, TokenEvent
from .sequences import RequestStatus, RequestStream


class InferenceEngine:
    """Serves many requests on one model. Make one with ``from_scenario`` or ``from_checkpoint``; a context manager."""

    def __init__(self, loaded: Loaded, settings: EngineSettings | None = None,
                 clock: Callable[[], float] | None = None) -> None:
        if clock is not None and not callable(clock):
            raise SchemaError(f"expected a function that returns seconds, not {describe(clock)}", "/clock")
        self._core = core = EngineCore(loaded, settings or EngineSettings(), time.monotonic if clock is None else clock)
        self.settings, self.model, self.tokenizer = core.settings, core.model, core.tokenizer
        self.scheduler, self.kv, self.timeline = core.scheduler, core.kv, core.recorder.timeline
        self._stepping = RLock()  # held while a step runs; never taken by a thread that holds _lock
        self._lock = RLock()  # held while state is read or changed
        self._news = Condition(self._lock)  # notified when there are new events
        self._waiting = 0  # threads that wait for events
        self._submitted = 0
        self._closed = False
        self._thread: Thread | None = None
        self._failure: BaseException | None = None  # the exception that stopped the engine

    @classmethod
    def from_scenario(cls, scenario: Scenario, backend: str | Backend = "cpu", *,
                      quantization: object = AS_IN_SCENARIO, weights_seed: int | None = None,
                      clock: Callable[[], float] | None = None, **overrides: object) -> InferenceEngine:
        """An engine for a scenario's model and settings; its requests are not submitted (``play`` does that).

        ``overrides`` replace fields of EngineSettings; ``weights_seed`` draws other weights; ``quantization`` is
        None, "int8", "int4" or a QuantizationConfig. SchemaError names a setting that is out of range.
        """
        if not isinstance(scenario, Scenario):
            raise SchemaError(f"expected a Scenario, as load_scenario(path) returns it, not {describe(scenario)}")
        Nullable(SEED_SHAPE).parse(weights_seed, "/weights_seed")
        settings = scenario.engine.override(overrides)
        return cls(load_scenario_model(scenario, backend, quantization, weights_seed), settings, clock)

    @classmethod
    def from_checkpoint(cls, path: str | Path, backend: str | Backend = "auto", *, quantization: object = None,
                        clock: Callable[[], float] | None = None, **overrides: object) -> InferenceEngine:
        """An engine for a checkpoint on disk: a GGUF file, a Hugging Face folder, or a llama2.c model file with its
        tokenizer beside it. ``quantization`` as in ``from_scenario``, or "stored": the codes that a GGUF file holds."""
        if not isinstance(path, (str, Path)):
            raise SchemaError(f"expected the path of a model file or of its folder, not {describe(path)}")
        settings = EngineSettings().override(overrides)
        reader = wing("checkpoints.load", "a checkpoint")
        return cls(reader.load_checkpoint_model(path, backend, quantization), settings, clock)

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

    # ------------------------------------------------------------------------------------------ serving

    def submit(self, prompt_tokens: Sequence[int], max_tokens: int, *, request_id: str | None = None,
               sampling: SamplingParams | None = None, priority: int = 0, stop_tokens: Sequence[int] = (),
               cache_salt: str | None = None) -> str:
        """Queue a prompt for at most ``max_tokens`` new tokens and return its id. RequestError, CapacityError,
        DuplicateRequestError or QueueFullError leave the engine as it was. O(prompt)."""
        with self._lock:
            self._require_open()
            request_id = self._fresh_id() if request_id is None else request_id
            try:
                request = Request(request_id, prompt_tokens, max_tokens, self._core.recorder.clock(), priority,
                                  SamplingParams() if sampling is None else sampling, stop_tokens, cache_salt)
                self._core.check(request)
                stream = self._core.make_stream(request)
            except RequestError as error:
                self._core.recorder.event("refuse", request=str(request_id), error=str(error))
                raise
            with _Guard(partial(self._half_submitted, stream, self.timeline.recorded)):
                self._submitted += 1
                self._core.accept(stream)
                if max_tokens == 0:
                    self._core.end_all(stream, "length")
                self._notify()
            return request_id

    def _fresh_id(self) -> str:
        number = self._submitted
        while f"request-{number}" in self._core.streams:
            number += 1
        return f"request-{number}"

    def stream(self, request_id: str) -> Iterator[TokenEvent]:
        """The request's events, each once, from where the last reader stopped; runs engine steps while there is no
        unread event. UnknownRequestError for an id never seen, or whose last event was read."""
        with self._lock:
            self._require_open(sound=False)
            return self._read(self._find(request_id))

    def _read(self, stream: RequestStream) -> Iterator[TokenEvent]:
        while (event := self._next_event(stream)) is not None:
            yield event

    def _next_event(self, stream: RequestStream) -> TokenEvent | None:
        """The next event, after waiting or working for it; None when the stream has ended."""
        while True:
            with self._lock:
                if self._thread:
                    self._wait_for(lambda: stream.events or stream.drained or self._failure)
                if stream.events:
                    return self._take(stream)
                if stream.drained:
                    return None
                self._require_sound()
            if self._stepping.acquire(blocking=False):
                try:
                    self._step_for(stream)
                finally:
                    self._stepping.release()
            else:  # another thread runs a step and will notify; the timeout covers a step that ended just before
                with self._lock:
                    self._wait_for(lambda: stream.events or stream.drained, timeout=0.01)

    def _step_for(self, stream: RequestStream) -> None:
        """A step on behalf of a reader, unless another thread's step has brought events meanwhile."""
        if stream.events or stream.drained:
            return
        try:
            self.step()
        except EngineError:
            if not self._closed:  # closed in between, the stream has its last event
                raise

    def poll(self, request_id: str) -> list[TokenEvent]:
        """The request's unread events, without running a step."""
        with self._lock:
            stream = self._find(request_id)
            return [self._take(stream) for _ in range(len(stream.events))]

    def _find(self, request_id: str) -> RequestStream:
        stream = self._core.streams.get(request_id) if isinstance(request_id, str) else None
        if stream is None:
            raise UnknownRequestError(f"no request {request_id!r}: it was never submitted, or its stream was read to "
                                      f"the end")
        return stream

    def _take(self, stream: RequestStream) -> TokenEvent:
        """The next unread event; with the last one the request is forgotten."""
        event = stream.events.popleft()
        if stream.drained and self._core.streams.get(event.request_id) is stream:  # a newer request may have the id
            del self._core.streams[event.request_id]
        return event

    def cancel(self, request_id: str) -> None:
        """End a request now: its pages are free, and its unread tokens are withheld. Of n samples, those that had
        finished by themselves are still delivered whole. Does nothing to a finished request. UnknownRequestError for
        an unknown id."""
        with self._lock:
            stream = self._find(request_id)
            if stream.finish_reason is None:
                with _Guard(self._stop):
                    stream.withhold()
                    self._core.recorder.event("cancel", request=request_id)
                    self._core.end_all(stream, "cancelled")
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
            raise RequestError(f"expected a list of prompts, each a list of tokens, not {describe(prompts)}")
        request_ids: list[str] = []
        try:
            for prompt in prompts:
                request_ids.append(self.submit(prompt, max_tokens, sampling=sampling))
            return [self._tokens_of(request_id) for request_id in request_ids]
        except BaseException:
            with self._lock:
                for request_id in request_ids:
                    if request_id in self._core.streams:
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
            live = [self._core.samples[sequence_id].stream for sequence_id in self.scheduler.live]
            return tuple(dict.fromkeys(stream.request.request_id for stream in live))

    @property
    def runner(self) -> ModelRunner:
        """Computes the batches. Another one may take its place: a subclass that watches, for instance."""
        return self._core.runner

    @runner.setter
    def runner(self, runner: ModelRunner) -> None:
        runner.faults = self._core.runner.faults
        self._core.runner = runner

    @property
    def steps(self) -> int:
        """Steps completed."""
        return self._core.recorder.steps

    def status(self, request_id: str) -> RequestStatus:
        """State and progress of a live or unread request."""
        with self._lock:
            stream = self._find(request_id)
            running = any(self._core.is_running(sample) for sample in stream.samples)
            state = "finished" if stream.finish_reason else "running" if running else "waiting"
            generated = sum(sample.delivered for sample in stream.samples)
            return RequestStatus(request_id, state, len(stream.request.prompt_tokens), generated, stream.finish_reason)

    def metrics(self) -> Metrics:
        """TTFT, TPOT, utilization and the rest up to now; see ``metrics.py`` for what each means."""
        with self._lock:
            return self._core.metrics.snapshot()

    def record(self, event: str, **fields: object) -> None:
        """Add an event to the timeline that the engine would not record itself (a replay repeats refusals this way)."""
        with self._lock:
            self._core.recorder.event(event, **fields)

    def inject(self, faults: Iterable[Fault]) -> FaultHooks:
        """Let these faults happen from now on, in place of those injected before (see ``workloads/faults.py``)."""
        faults = tuple(faults) if isinstance(faults, Iterable) else (faults,)
        for fault in faults:
            if not isinstance(fault, get_args(Fault)):
                raise RequestError(f"expected a list of faults (see workloads/faults.py), not {describe(fault)}")
        make = wing("workloads.faults", "a fault on purpose").FaultInjector
        with self._lock:
            self.lift_faults()
            self._core.recorder.event("inject", faults=[FAULT_SHAPE.dump(fault) for fault in faults])
            self._core.runner.faults = make(faults, self.kv, self.scheduler.handle, self._core.recorder.event)
            return self._core.runner.faults

    def lift_faults(self) -> None:
        """End lasting faults and give back the pages that they hold."""
        with self._lock:
            self._core.runner.faults.end()

    # --------------------------------------------------------------------------------------------- step

    def step(self, budget_tokens: int | None = None) -> ScheduleDecision:
        """Plan and compute one step of at most ``budget_tokens`` (the settings' budget if None)."""
        core, budget = self._core, self.settings.budget_tokens if budget_tokens is None else budget_tokens
        with self._stepping, _Guard(self._abandon):
            with self._lock, _Guard(self._stop, unless=Exception):
                self._require_open()
                work = core.plan(budget)
            rows = core.compute(work)
            with self._lock:
                chosen = core.choose(work, rows)
                with _Guard(self._stop):
                    core.settle(chosen)
                    self._notify()
        core.recorder.raise_trouble()
        return work.decision

    # -------------------------------------------------------------------------------- interrupts and ends

    def _stop(self, failure: BaseException) -> None:
        """Pages may be without an owner now, or some streams may have their tokens and others not: serve no more."""
        with self._lock:
            self._failure = failure
            self._notify()

    def _half_submitted(self, stream: RequestStream, recorded: int, failure: BaseException) -> None:
        """An interrupt within ``submit``: once the timeline has recorded it, the request is complete."""
        if stream.request.max_tokens and self.timeline.recorded > recorded:
            self._notify()
        else:
            stream.samples[0].started = False  # its end will not be recorded, as its beginning may not have been
            self._core.register(stream)
            self._stop(failure)

    def _abandon(self, failure: BaseException) -> None:
        """Nothing of the step counts: the next one plans the same positions again."""
        with self._lock:
            if self._failure is not failure:
                self._core.abandon()

    def _require_sound(self) -> None:
        if self._failure:
            raise EngineError(f"the engine has stopped: {self._failure!r}; make a new one") from self._failure

    def _require_open(self, sound: bool = True) -> None:
        if self._closed:
            raise EngineError("this engine is closed; make a new one")
        if sound:
            self._require_sound()

    def close(self) -> None:
        """Cancel what is live, give all pages back, and end the engine's own thread and processes. Idempotent."""
        with self._lock:
            for stream in list(self._core.streams.values()):
                if stream.finish_reason is None:
                    self.cancel(stream.request.request_id)
            for sequence_id in self.scheduler.live:  # left over where an interrupted step had delivered the last event
                self.scheduler.cancel(sequence_id)
            self.lift_faults()
            self._closed = True
            self._notify()
            thread, self._thread = self._thread, None
        if thread:
            thread.join()
        if self.settings.workers > 1:
            self.model.close()  # type: ignore[attr-defined]  # a ParallelModel

    # ------------------------------------------------------------------------------------- its own thread

    def start(self) -> None:
        """Run steps in a thread of the engine's own from now on, whenever there is work. Idempotent."""
        with self._lock:
            self._require_open()
            if self._thread is None:
                self._thread = Thread(target=self._serve, name="engine", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                self.step()
        except BaseException as failure:  # kept for the readers: the thread has no caller to raise it to
            self._stop(failure)

    def _wait_for_work(self) -> bool:
        with self._lock:
            self._wait_for(lambda: self._closed or not self.scheduler.idle)
            return not self._closed

    def _wait_for(self, news: Callable[[], object], timeout: float | None = None) -> None:
        """Wait until ``news()`` is true. The caller holds the lock, which is free meanwhile."""
        self._waiting += 1
        try:
            self._news.wait_for(news, timeout)
        finally:
            self._waiting -= 1

    def _notify(self) -> None:
        """Wake the threads that wait for events or work."""
        if self._waiting:
            self._news.notify_all()


class _Guard:
    """What an exception within a ``with`` block means for the engine: ``then(exception)`` is called before it
    propagates, except for exceptions of the class ``unless``."""

    def __init__(self, then: Callable[[BaseException], None], unless: type[BaseException] | tuple[()] = ()) -> None:
        self._then, self._unless = then, unless

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None,
                 trace: TracebackType | None) -> None:
        if failure is not None and not isinstance(failure, self._unless):
            self._then(failure)


# --------------------------------------------------------------------------------------------------- running a scenario


@dataclass
class Played:
    """What a step brought: its decision and the events that became readable."""

    decision: ScheduleDecision
    events: list[TokenEvent]
    refused: dict[str, str] = field(default_factory=dict)  # request id -> why submit refused it


def play(engine: InferenceEngine, scenario: Scenario) -> Iterator[Played]:
    """Run the scenario's requests and events to the end, a step at a time. Arrivals count in the engine's steps from
    now; a request that is refused is reported and the run goes on.

    Idle time takes no step: when no request is live, the next one comes at once, and everything after it is moved
    forward by as much. (With faults, whose steps the engine counts itself, every idle step is run.)
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
            cancels.popleft()  # in idle time: there was nothing to cancel
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
        readable = live.keys() - slow or live.keys()  # slow consumers read when no other stream is left
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
