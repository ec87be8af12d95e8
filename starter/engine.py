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
  An iterator over a stream hands out an event that an interrupt kept from its reader again; ``poll`` may lose it.
- Bounded, whatever callers do: at most ``max_waiting`` requests wait, a stream holds at most max_tokens * n unread
  events, ``max_unread`` finished streams wait to be read, and ``keep_events`` events of the timeline are in memory.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from threading import Condition, RLock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args, overload

from .backend import Backend
from .base.fault_kinds import FAULT_SHAPE, Fault, FaultHooks
from .base.strict_json import Nullable, describe
from .base.wings import picture, wing
from .core import EngineCore, ModelRunner
from .errors import (
    BackendError,
    EngineError,
    RequestError,
    SchemaError,
    UnknownRequestError,
)
from .metrics import Metrics
from .model import AS_IN_SCENARIO, Loaded, load_scenario_model
from .sampling import Sampler, choose_token
from .scheduler import Policy, ScheduleDecision
from .schema import SEED_SHAPE, EngineSettings, Request, SamplingOptions, SamplingParams, Scenario, TokenEvent
from .streams import Readers, RequestStatus, RequestStream, Result, TokenStream
from .timeline import copied

if TYPE_CHECKING:
    from typing_extensions import Unpack


class InferenceEngine:
    """Serves many requests on one model. Make one with ``from_scenario`` or ``from_checkpoint``; a context manager."""

    def __init__(self, loaded: Loaded, settings: EngineSettings | None = None,
                 clock: Callable[[], float] | None = None, *, policy: Policy | None = None,
                 sampler: Sampler = choose_token) -> None:
        """``policy`` and ``sampler`` are the caller's own, in place of the settings' policy and of ``choose_token``."""
        if not isinstance(loaded, Loaded):
            raise RequestError(f"expected a loaded model, not {describe(loaded)}; "
                               f"InferenceEngine.from_scenario(scenario) and .from_checkpoint(path) make engines")
        if clock is not None and not callable(clock):
            raise SchemaError(f"expected a function that returns seconds, not {describe(clock)}", "/clock")
        if not callable(sampler):
            raise SchemaError(f"expected a function that chooses a token, not {describe(sampler)}", "/sampler")
        self._core = core = EngineCore(loaded, settings or EngineSettings(), time.monotonic if clock is None else clock,
                                       policy, sampler)
        self.settings, self.model, self.tokenizer = core.settings, core.model, core.tokenizer
        self.scheduler, self.kv, self.timeline = core.scheduler, core.kv, core.recorder.timeline
        self._make_locks()
        self._submitted = 0
        self.closed = False
        self._thread: Thread | None = None
        self._failure: BaseException | None = None  # the exception that stopped the engine

    def _make_locks(self) -> None:
        # Public for TokenStream, which reads under the same locks:
        self.stepping = RLock()  # held while a step runs; never taken by a thread that holds ``lock``
        self.lock = RLock()  # held while state is read or changed
        self._work = Condition(self.lock)  # notified when the engine's own thread may have work
        self.readers = Readers(self.lock)

    @classmethod
    def from_scenario(cls, scenario: Scenario, backend: str | Backend = "cpu", *,
                      quantization: object = AS_IN_SCENARIO, weights_seed: int | None = None,
                      clock: Callable[[], float] | None = None, policy: str | Policy | None = None,
                      sampler: Sampler = choose_token, **overrides: object) -> InferenceEngine:
        """An engine for a scenario's model and settings; its requests are not submitted (``play`` does that).

        ``overrides`` replace fields of EngineSettings; ``weights_seed`` draws other weights; ``quantization`` is None,
        "int8", "int4", a QuantizationConfig or a function from rows of floats to a QuantizedTensor; ``policy`` is a
        name or an object with a ``rank``. SchemaError names a setting that is out of range.
        """
        if not isinstance(scenario, Scenario):
            raise SchemaError(f"expected a Scenario, as load_scenario(path) returns it, not {describe(scenario)}")
        Nullable(SEED_SHAPE).parse(weights_seed, "/weights_seed")
        named, own = _named_or_own(policy)
        settings = scenario.engine.override(overrides | named)
        return cls(load_scenario_model(scenario, backend, quantization, weights_seed), settings, clock, policy=own,
                   sampler=sampler)

    @classmethod
    def from_checkpoint(cls, path: str | Path, backend: str | Backend = "auto", *, quantization: object = None,
                        clock: Callable[[], float] | None = None, policy: str | Policy | None = None,
                        sampler: Sampler = choose_token, **overrides: object) -> InferenceEngine:
        """An engine for a checkpoint on disk: a GGUF file, a Hugging Face folder, or a llama2.c model file with its
        tokenizer beside it. ``quantization`` as in ``from_scenario``, or "stored": the codes that a GGUF file holds."""
        if not isinstance(path, (str, Path)):
            raise SchemaError(f"expected the path of a model file or of its folder, not {describe(path)}")
        named, own = _named_or_own(policy)
        settings = EngineSettings().override(overrides | named)
        reader = wing("checkpoints.load", "a checkpoint")
        return cls(reader.load_checkpoint_model(path, backend, quantization), settings, clock, policy=own,
                   sampler=sampler)

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (f"<InferenceEngine {self.model.backend.name}: step {self.steps}, {len(self.active)} active requests, "
                f"{self.kv.free_pages} of {self.kv.total_pages} pages free>")

    def _repr_html_(self) -> str | None:
        with self.lock:
            return picture("engine_card", self)

    # ------------------------------------------------------------------------------------------ serving

    def submit(self, prompt_tokens: Sequence[int] | str, max_tokens: int, *, request_id: str | None = None,
               sampling: SamplingParams | None = None, priority: int = 0, stop_tokens: Sequence[int] = (),
               cache_salt: str | None = None, **options: Unpack[SamplingOptions]) -> str:
        """Queue a prompt, tokens or a text, for at most ``max_tokens`` new tokens and return its id. O(prompt).

        The tokenizer puts a beginning-of-sequence token before a text if the model has one. ``options`` are fields of
        SamplingParams, in place of those of ``sampling``: submit("Once", 20, temperature=0.8, stop="."). RequestError,
        CapacityError, DuplicateRequestError or QueueFullError leave the engine as it was."""
        with self.lock:
            self._require_open()
            request_id = self._fresh_id() if request_id is None else request_id
            try:
                if isinstance(prompt_tokens, str):
                    prompt_tokens = self.tokenizer.encode(prompt_tokens, bos=True)
                sampling = _with_options(SamplingParams() if sampling is None else sampling, options)
                request = Request(request_id, prompt_tokens, max_tokens, self._core.recorder.read_clock(), priority,
                                  sampling, stop_tokens, cache_salt)
                self._core.check(request)
                stream = self._core.make_stream(request)
            except RequestError as error:
                self._core.recorder.refused(str(request_id), str(error))
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

    def cancel(self, request_id: str) -> None:
        """End a request now: its pages are free, and its unread tokens are withheld. Of n samples, those that had
        finished by themselves are still delivered whole. Does nothing to a finished request, be it read or not; of
        those that were read, the last ``max_unread`` are remembered. UnknownRequestError for any other id."""
        with self.lock:
            if isinstance(request_id, str) and request_id in self._core.past:
                return
            stream = self._find(request_id)
            if stream.unfinished:
                with _Guard(self._stop):
                    stream.withhold()
                    self._core.recorder.event("cancel", request=request_id)
                    self._core.end_all(stream, "cancelled")
                self._notify()

    def run(self) -> int:
        """Step until no request is live; return the number of steps."""
        before = self.steps
        self.require_sound()
        while not self.scheduler.idle:
            self.step()
        return self.steps - before

    @overload
    def generate(self, prompts: str, max_tokens: int, sampling: SamplingParams | None = None,
                 **options: Unpack[SamplingOptions]) -> Result: ...

    @overload
    def generate(self, prompts: list[str] | tuple[str, ...], max_tokens: int, sampling: SamplingParams | None = None,
                 **options: Unpack[SamplingOptions]) -> list[Result]: ...

    @overload
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: SamplingParams | None = None,
                 **options: Unpack[SamplingOptions]) -> list[list[int]]: ...

    def generate(self, prompts: str | Sequence[str] | Sequence[Sequence[int]], max_tokens: int,
                 sampling: SamplingParams | None = None,
                 **options: Unpack[SamplingOptions]) -> Result | list[Result] | list[list[int]]:
        """Continue prompts together: a text -> its Result; texts -> a Result for each; lists of tokens -> a list of
        tokens for each (n samples of those: ``submit`` and ``result``). All or none: a prompt that is refused, or that
        ends with an error, cancels the others and raises."""
        if isinstance(prompts, str):
            return self._results([prompts], max_tokens, sampling, options)[0]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise RequestError(f"expected a text, a list of texts, or a list of prompts, each a list of tokens, "
                               f"not {describe(prompts)}")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and len(texts) < len(prompts):
            raise RequestError(f"prompts must be all texts or all lists of tokens; here {len(texts)} of {len(prompts)} "
                               f"are texts")
        if texts:
            return self._results(prompts, max_tokens, sampling, options)
        if options.get("n", sampling.n if isinstance(sampling, SamplingParams) else 1) != 1:
            raise RequestError("generate returns one list of tokens for each prompt, so n must be 1; for several "
                               "samples submit each prompt and read engine.result(request_id)")
        return [list(result.tokens) for result in self._results(prompts, max_tokens, sampling, options)]

    def chat(self, messages: str | Sequence[Mapping[str, Any]], max_tokens: int, *,
             tools: Sequence[Mapping[str, Any]] | None = None, sampling: SamplingParams | None = None,
             **options: Unpack[SamplingOptions]) -> Result:
        """Answer a conversation with a checkpoint that can chat: messages with a role ("system", "user", "assistant")
        and a content, or the user's only message as a text. See ``checkpoints/chat.py``, also for the errors."""
        prompt, ends = wing("checkpoints.chat", "a chat").chat_prompt(self.tokenizer, messages, tools)
        return self.result(self.submit(prompt, max_tokens, stop_tokens=ends, sampling=sampling, **options))

    def _results(self, prompts: Sequence[str] | Sequence[Sequence[int]], max_tokens: int,
                 sampling: SamplingParams | None, options: SamplingOptions) -> list[Result]:
        request_ids: list[str] = []
        try:
            for prompt in prompts:
                request_ids.append(self.submit(prompt, max_tokens, sampling=sampling, **options))
            return [self.result(request_id) for request_id in request_ids]
        except BaseException:
            for request_id in request_ids:
                with suppress(UnknownRequestError):  # it was read to its end
                    self.stream(request_id).close()
            raise

    # ------------------------------------------------------------------------------------------ reading

    def stream(self, request_id: str, timeout: float | None = None) -> TokenStream:
        """The request's events, each once, from where the last reader stopped: see ``TokenStream``. UnknownRequestError
        for an id never seen, or whose last event was read."""
        number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout >= 0):
            raise RequestError(f"timeout must be a number of seconds from 0, or None, not {timeout!r}")
        with self.lock:
            self._require_open(sound=False)
            return TokenStream(self, self._find(request_id), timeout)

    def stream_text(self, request_id: str, timeout: float | None = None) -> Iterator[str]:
        """The request's text as it comes, in pieces that are not empty. RequestError if the request has several
        samples. BackendError where it ends with an error."""
        events = self.stream(request_id, timeout)
        if len(events.stream.samples) > 1:
            raise RequestError(f"{request_id} has {len(events.stream.samples)} samples, whose texts would mix; read "
                               f"its events, or its result")
        return (event.text for event in map(_checked, events) if event.text)

    def result(self, request_id: str, timeout: float | None = None) -> Result:
        """Read the request to its end: what each sample has generated, but for events that were read before.
        BackendError if a sample ended with an error. ``timeout`` is the longest wait for one event, in seconds."""
        events = self.stream(request_id, timeout)
        return Result.of(events.stream, map(_checked, events))

    def poll(self, request_id: str) -> list[TokenEvent]:
        """The request's unread events, without running a step."""
        with self.lock:
            stream = self._find(request_id)
            events = list(stream.events)
            stream.events.clear()
            if stream.drained:
                self._core.forget(stream)
            return events

    def astream(self, request_id: str) -> AsyncIterator[TokenEvent]:
        """The request's events for ``async for``. The event loop never waits for the decoder: steps run in the engine's
        own thread (``start``) or, without it, in asyncio's worker threads. However the loop is left early, by a break,
        an exception or the task's cancellation, the request is cancelled when the iterator is closed."""
        return self.stream(request_id).read()

    def _find(self, request_id: str) -> RequestStream:
        stream = self._core.streams.get(request_id) if isinstance(request_id, str) else None
        if stream is None:
            raise UnknownRequestError(f"no request {request_id!r}: it was never submitted, its stream was read to the "
                                      f"end, or it waited to be read for longer than the settings allow")
        return stream

    def _notify(self) -> None:
        """Wake the readers that have news, and the engine's own thread. The caller holds the lock."""
        if self.readers:
            self.readers.wake(all_of_them=self._failure is not None)
        if self._thread:
            self._work.notify_all()

    def forget(self, stream: RequestStream) -> None:
        """For ``TokenStream``: the stream was read to its end, or will not be."""
        self._core.forget(stream)

    def remember(self, stream: RequestStream) -> None:
        """For ``TokenStream``: its last event could not be handed out, so the stream is still to be read."""
        core = self._core
        if core.streams.setdefault(stream.request.request_id, stream) is stream and not stream.unfinished:
            core.unread.setdefault(stream, core.recorder.now)

    @property
    def has_thread(self) -> bool:
        """Does a thread of the engine's own run the steps?"""
        return self._thread is not None

    # ---------------------------------------------------------------------------------------- observing

    @property
    def active(self) -> tuple[str, ...]:
        """Ids of live requests: running first, then waiting."""
        with self.lock:
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
        """State and progress of a live or unread request, and of the last ``max_unread`` that were read."""
        with self.lock:
            if isinstance(request_id, str) and (past := self._core.past.get(request_id)):
                return past
            stream = self._find(request_id)
            running = any(map(self._core.is_running, stream.samples))
            return replace(stream.status, state="running") if running else stream.status

    def metrics(self) -> Metrics:
        """TTFT, TPOT, utilization and the rest up to now, see ``metrics.py``. The lock is held for a copy only."""
        with self.lock:
            frozen = self._core.metrics.frozen()
        return frozen.snapshot()

    def record(self, event: str, **fields: object) -> None:
        """Add an event to the timeline that the engine would not record itself (a replay repeats refusals this way)."""
        with self.lock:
            self._core.recorder.event(event, **copied(fields))

    def inject(self, faults: Iterable[Fault]) -> FaultHooks:
        """Let these faults happen from now on, in place of those injected before (see ``workloads/faults.py``)."""
        faults = tuple(faults) if isinstance(faults, Iterable) else (faults,)
        for fault in faults:
            if not isinstance(fault, get_args(Fault)):
                raise RequestError(f"expected a list of faults (see workloads/faults.py), not {describe(fault)}")
        make = wing("workloads.faults", "a fault on purpose").FaultInjector
        with self.lock:
            self.lift_faults()
            self._core.recorder.event("inject", faults=[FAULT_SHAPE.dump(fault) for fault in faults])
            self._core.runner.faults = make(faults, self.kv, self.scheduler.handle, self._core.recorder.event)
            return self._core.runner.faults

    def lift_faults(self) -> None:
        """End lasting faults and give back the pages that they hold."""
        with self.lock:
            self._core.runner.faults.end()

    # --------------------------------------------------------------------------------------------- step

    def step(self, budget_tokens: int | None = None) -> ScheduleDecision:
        """Plan and compute one step of at most ``budget_tokens`` (the settings' budget if None). An exception of a
        timeline's listener, which is removed, is raised when the step is complete."""
        decision = self._step(self.settings.budget_tokens if budget_tokens is None else budget_tokens)
        self._core.recorder.raise_trouble()
        return decision

    def _step(self, budget: int) -> ScheduleDecision:
        core = self._core
        with self.stepping, _Guard(self._abandon):
            with self.lock, _Guard(self._stop, unless=Exception):
                self._require_open()
                work = core.plan(budget)
            rows = core.compute(work)
            with self.lock:
                chosen = core.choose(work, rows)
                with _Guard(self._stop):
                    core.settle(chosen)
                    self._notify()
        return work.decision

    # -------------------------------------------------------------------------------- interrupts and ends

    def _stop(self, failure: BaseException) -> None:
        """Pages may be without an owner now, or some streams may have their tokens and others not: serve no more."""
        with self.lock:
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
        with self.lock:
            if self._failure is not failure:
                self._core.abandon()

    def require_sound(self) -> None:
        """EngineError if the engine has stopped."""
        if self._failure:
            raise EngineError(f"the engine has stopped: {self._failure!r}; make a new one") from self._failure

    def _require_open(self, sound: bool = True) -> None:
        if self.closed:
            raise EngineError("this engine is closed; make a new one")
        if sound:
            self.require_sound()

    def close(self) -> None:
        """Cancel what is live, give all pages back, and end the engine's own thread and processes. Idempotent."""
        with self.lock:
            for stream in list(self._core.streams.values()):
                if stream.unfinished:
                    self.cancel(stream.request.request_id)
            for sequence_id in self.scheduler.live:  # left over where an interrupted step had delivered the last event
                self.scheduler.cancel(sequence_id)
            self.lift_faults()
            self.closed = True
            self._notify()
            thread, self._thread = self._thread, None
        if thread:
            thread.join()
        if self.settings.workers > 1:
            self.model.close()  # type: ignore[attr-defined]  # a ParallelModel

    # ------------------------------------------------------------------------------------- its own thread

    def start(self) -> None:
        """Run steps in a thread of the engine's own from now on, whenever there is work. Idempotent. The thread ends
        with ``close``, or about a second after the last reference to the engine is gone. It does not survive a fork:
        in the child process the engine has stopped."""
        with self.lock:
            self._require_open()
            if self._thread is None:
                _STARTED.add(self)
                self._thread = Thread(target=_serve, args=(weakref.ref(self),), name="engine", daemon=True)
                self._thread.start()

    def _serve_once(self) -> bool:
        """A step, if there is work now or within a second; False when the thread is to end."""
        try:
            with self.lock:
                if not self.closed and self.scheduler.idle:
                    self._work.wait(1.0)
                if self.closed or self.scheduler.idle:
                    return not self.closed
            self._step(self.settings.budget_tokens)
        except BaseException as failure:  # kept for the readers: the thread has no caller to raise it to
            self._stop(failure)
            return False
        while trouble := self._core.recorder.take_trouble():
            import logging  # only here: it takes longer to import than the engine
            logging.getLogger(__name__).error("a listener of the timeline failed and was removed: %r", trouble)
        return True

    def _forked(self) -> None:
        """In the child process: the locks may be held by threads that exist only in the parent."""
        self._make_locks()
        self._thread = None
        self._failure = EngineError("its thread runs in the parent process, not in this child")


_STARTED: weakref.WeakSet[InferenceEngine] = weakref.WeakSet()  # engines that have a thread, or had one


def _after_fork() -> None:
    for engine in tuple(_STARTED):
        engine._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _serve(reference: weakref.ref[InferenceEngine]) -> None:
    """The engine's thread. Between two steps it holds no reference to the engine, which can then be collected."""
    while (engine := reference()) and engine._serve_once():
        del engine


def _named_or_own(policy: str | Policy | None) -> tuple[dict[str, object], Policy | None]:
    """A policy as an override of the settings, or as an object."""
    if policy is None or isinstance(policy, str):
        return ({} if policy is None else {"policy": policy}), None
    if not callable(getattr(policy, "rank", None)):
        raise SchemaError(f"expected a policy's name, or an object with a method rank, not {describe(policy)}",
                          "/policy")
    return {}, policy


def _with_options(sampling: SamplingParams, options: SamplingOptions) -> SamplingParams:
    if not options:
        return sampling
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling must be a SamplingParams, not {describe(sampling)}")
    if unknown := options.keys() - {field.name for field in fields(sampling)}:
        raise RequestError(f"there is no option {', '.join(sorted(unknown))}; options are the fields of "
                           f"SamplingParams: {', '.join(field.name for field in fields(sampling))}")
    return replace(sampling, **options)


def _checked(event: TokenEvent) -> TokenEvent:
    """BackendError where a sample ended with an error."""
    if event.finish_reason == "error":
        raise BackendError(f"{event.sequence_id} ended with an error: {event.error}")
    return event


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
