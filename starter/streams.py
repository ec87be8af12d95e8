"""M3 · What a request has generated, and how its events reach a reader.

    Request ──submit──▶ RequestStream     one for each request: its samples, and the queue of its unread events
                          └─ Sample ...   one for each continuation of the prompt (``SamplingParams.n``): its text
                               is a SequenceState, which is all that the scheduler knows of it

    TokenStream      iterates over the events of a RequestStream: takes one, or waits, or runs a step
    Readers          the streams whose readers wait, so that each is woken for its own news
    Result           a request that was read to its end, with a Completion for each sample

The scheduler decides when a sequence has all its tokens; everything else that ends a sample is decided here: a stop
token, a stop string, a cancel, an error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from threading import TIMEOUT_MAX, Condition, RLock
from typing import Protocol

from .base.tokenizer import StopStrings, TextStream
from .errors import EngineError, StreamTimeoutError
from .sampling import Choice, Draws, score
from .schema import Request, TokenEvent, sample_id
from .sequences import SequenceState


class Sample(SequenceState):
    """One continuation of a request's prompt: a sequence with its text, its random numbers and its end."""

    __slots__ = ("_stops", "_text", "draws", "finish_reason", "number", "others", "plain", "started", "stream",
                 "withheld")

    def __init__(self, stream: RequestStream, number: int, draws: Draws, text: TextStream) -> None:
        request, name = stream.request, sample_id(stream.request.request_id, number)
        super().__init__(replace(request, request_id=name) if number else request)
        self.stream, self.number, self.draws = stream, number, draws
        stream.unfinished += 1
        self.others: list[Sample] = []  # first sample only: those to fork once its prompt is computed
        self.started = False  # its beginning is in the timeline: at submit, or when it was forked
        self.withheld = 0  # tokens that a cancel withdrew before they were read
        self.finish_reason: str | None = None
        self.plain = request.sampling.plain  # greedy, and only the likeliest token matters
        self._text, self._stops = text, StopStrings(request.sampling.stop)
        for token in request.prompt_tokens:  # decoding continues from the prompt, whose text is not repeated
            text.push(token)

    @property
    def delivered(self) -> int:
        """Tokens in the stream so far, which is the index of the next one."""
        return len(self.tokens) - self.prompt_length

    @property
    def unscored(self) -> int:
        """Tokens of the prompt whose logprobs are asked for and not known yet."""
        scores = self.stream.prompt_logprobs
        return self.prompt_length - len(scores) if scores else 0

    def scores(self, rows: Sequence[Sequence[float]]) -> list[Choice]:
        """The logprobs of the next tokens of the prompt, from the rows before each of them. Changes nothing."""
        tokens = self.tokens[self.prompt_length - self.unscored:self.prompt_length]
        return [score(row, token, self.request.sampling.prompt_logprobs or 0) for row, token in zip(rows, tokens)]

    def add(self, choice: Choice, complete: bool, step: int, time: float) -> TokenEvent:
        """Append a generated token to tokens, text and stream. The sample ends with it if it is ``complete`` (it has
        max_tokens tokens), if the token is an end-of-sequence or stop token, or if the text holds a stop string."""
        token, logprob, top_logprobs = choice
        index, sampling, stopped = self.delivered, self.request.sampling, False
        self.tokens.append(token)
        self.draws.accept()
        text = self._text.push(token)
        if sampling.stop:
            text, stopped = self._stops.push(text, may_stop=index >= sampling.min_tokens)
        if stopped or token in self.stream.end_tokens:
            self.finish_reason = "stop"
        elif complete:
            self.finish_reason = "length"
        if self.finish_reason and not stopped:
            text += self._rest()
        return self._append(index, token, text, step, time, logprob, None, top_logprobs)

    def end(self, reason: str, error: str | None, step: int, time: float) -> TokenEvent:
        """End the sample without a token; the event's index is the next one that its reader expects."""
        self.finish_reason = reason
        text = "" if reason == "cancelled" else self._rest()
        return self._append(self.delivered - self.withheld, None, text, step, time, None, error, ())

    def _append(self, index: int, token: int | None, text: str, step: int, time: float, logprob: float | None,
                error: str | None, top_logprobs: tuple[tuple[int, float], ...]) -> TokenEvent:
        event = TokenEvent(self.stream.request.request_id, index, token, text, step, time, logprob, self.finish_reason,
                           error, self.number, top_logprobs)
        self.stream.events.append(event)
        self.stream.unfinished -= event.finish_reason is not None
        return event

    def _rest(self) -> str:
        """Text that was held back: an incomplete character, or what might have become a stop string."""
        text, stopped = self._stops.push(self._text.finish(), self.delivered > self.request.sampling.min_tokens)
        return text if stopped else text + self._stops.finish()


@dataclass(eq=False, slots=True)
class RequestStream:
    """The events of a request: appended at the end, and read from the front, each once. It ends with its last
    sample."""

    request: Request
    end_tokens: tuple[int, ...] = ()  # end a sample
    samples: list[Sample] = field(default_factory=list)
    unfinished: int = 0  # samples
    events: deque[TokenEvent] = field(default_factory=deque)  # not read yet
    wake: list[Callable[[], None]] = field(default_factory=list)  # for each reader that waits, what lets it go on
    prompt_logprobs: list[Choice | None] = field(default_factory=list)  # if asked for: of the prompt's tokens so far

    def __post_init__(self) -> None:
        if self.request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)  # nothing comes before the first token

    @property
    def finish_reason(self) -> str | None:
        """Once all samples are finished: "cancelled" or "error" if one of them ended so, else that of the last."""
        if self.unfinished:
            return None
        reasons = [sample.finish_reason for sample in self.samples]
        return next((reason for reason in ("cancelled", "error") if reason in reasons), reasons[-1])

    @property
    def drained(self) -> bool:
        """The last event was read."""
        return not (self.events or self.unfinished)

    @property
    def status(self) -> RequestStatus:
        """State and progress; the engine knows which requests run, and says "running" instead of "waiting"."""
        return RequestStatus(self.request.request_id, "waiting" if self.unfinished else "finished",
                             len(self.request.prompt_tokens), sum(sample.delivered for sample in self.samples),
                             self.finish_reason)

    def withhold(self) -> None:
        """Forget unread tokens, which must not be seen after a cancel. Those of samples that were finished before
        stay."""
        unread, self.events = self.events, deque()
        for event in unread:
            sample = self.samples[event.sample]
            if sample.finish_reason is None:
                sample.withheld += 1
            else:
                self.events.append(event)


@dataclass(frozen=True)
class RequestStatus:
    """State of a request, "waiting", "running" or "finished", and its progress (all samples together)."""

    request_id: str
    state: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str | None = None


# ------------------------------------------------------------------------------------------------------------- reading


class Readers:
    """Streams whose readers wait. All methods are called under the engine's ``lock``."""

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self._waiting: dict[RequestStream, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, stream: RequestStream, wake: Callable[[], None]) -> None:
        """``wake`` is called whenever the stream has news."""
        stream.wake.append(wake)
        self._waiting[stream] = None

    def remove(self, stream: RequestStream, wake: Callable[[], None]) -> None:
        """The opposite of ``add``."""
        stream.wake.remove(wake)
        if not stream.wake:
            del self._waiting[stream]

    def wait_for(self, stream: RequestStream, seconds: float) -> None:
        """Wait until the stream has news. The lock is free meanwhile."""
        news = Condition(self._lock)
        self.add(stream, news.notify)
        try:
            news.wait(min(seconds, TIMEOUT_MAX))
        finally:
            self.remove(stream, news.notify)

    def wake(self, all_of_them: bool) -> None:
        """Let those go on whose streams have news. O(streams that are waited for)."""
        for stream in tuple(self._waiting):
            if all_of_them or stream.events or not stream.unfinished:
                for wake in tuple(stream.wake):
                    wake()

    def wake_one(self) -> None:
        """Let one go on in any case: a reader that ran the steps so far may leave now."""
        for stream in self._waiting:
            stream.wake[0]()
            break


class Service(Protocol):
    """What reading needs of an engine; ``engine.InferenceEngine`` says more."""

    lock: RLock
    stepping: RLock
    readers: Readers
    closed: bool

    @property
    def has_thread(self) -> bool:
        """Does a thread of the engine's own run the steps?"""

    def require_sound(self) -> None:
        """EngineError if the engine has stopped."""

    def step(self) -> object:
        """Run a step."""

    def cancel(self, request_id: str) -> None:
        """End a request."""

    def forget(self, stream: RequestStream) -> None:
        """The stream will not be read again."""

    def remember(self, stream: RequestStream) -> None:
        """It will, after all."""


class TokenStream(Iterator[TokenEvent]):
    """A request's events, each once, from where its last reader stopped.

    ``next`` waits for an event or, if the engine has no thread of its own, runs steps until there is one; after
    ``timeout`` seconds it raises StreamTimeoutError, and nothing is lost. An interrupt (Ctrl-C) loses nothing either:
    an event that was taken and not handed out will be read again.

    If a reader stops early, the request goes on, and its events can be read later. A ``with`` block, or ``close``, ends
    it instead:

        with engine.stream(request_id) as events:
            for event in events:
                if "." in event.text:
                    break                       # cancelled at the end of the block: its pages are free
    """

    def __init__(self, engine: Service, stream: RequestStream, timeout: float | None = None) -> None:
        self.stream = stream
        self._engine, self._timeout = engine, timeout

    @property
    def prompt_logprobs(self) -> tuple[Choice | None, ...]:
        """As in ``Result``; complete once there is an event."""
        return tuple(self.stream.prompt_logprobs)

    def __next__(self) -> TokenEvent:
        while self._until_readable():
            if (event := self.take()) is not None:  # None: another reader was faster
                return event
        raise StopIteration

    def take(self) -> TokenEvent | None:
        """The next event if there is one now; with the last one the request is forgotten."""
        stream, engine, event = self.stream, self._engine, None
        try:
            with engine.lock:
                if stream.events:
                    event = stream.events[0]
                    stream.events.popleft()
                    if stream.drained:
                        engine.forget(stream)
            return event
        except BaseException:  # outside the lock's block, as an interrupt can come where that ends
            if event is not None and event not in stream.events:
                stream.events.appendleft(event)
                engine.remember(stream)
            raise

    def _until_readable(self) -> bool:
        """Wait or work until the stream has an unread event; False when it has ended."""
        engine, stream = self._engine, self.stream
        deadline = inf if self._timeout is None else time.monotonic() + self._timeout
        while True:
            with engine.lock:
                if stream.events or stream.drained:
                    return bool(stream.events)
                engine.require_sound()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StreamTimeoutError(f"{stream.request.request_id} brought no event within {self._timeout} "
                                             f"seconds; read on later, or cancel it")
                if engine.has_thread:
                    engine.readers.wait_for(stream, left)
                    continue
            if engine.stepping.acquire(blocking=False):
                try:
                    self.step()
                finally:
                    engine.stepping.release()
                    with engine.lock:
                        engine.readers.wake_one()
            else:  # another thread runs a step and will wake this one; 10 ms cover a step that ended just before
                with engine.lock:
                    if not (stream.events or stream.drained):
                        engine.readers.wait_for(stream, min(left, 0.01))

    def step(self) -> None:
        """A step, unless another thread's step has brought events meanwhile."""
        engine, stream = self._engine, self.stream
        with engine.stepping:
            if stream.events or stream.drained:
                return
            try:
                engine.step()
            except EngineError:
                if not engine.closed:  # closed in between, the stream has its last event
                    raise

    async def read(self) -> AsyncIterator[TokenEvent]:
        """The events for ``async for``, see ``InferenceEngine.astream``."""
        import asyncio  # only here: it takes longer to import than the engine
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        engine, stream = self._engine, self.stream

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed, so its task has ended
                loop.call_soon_threadsafe(news.set)

        with engine.lock:
            engine.readers.add(stream, wake)
        try:
            while True:
                news.clear()
                if (event := self.take()) is not None:
                    yield event
                elif stream.drained:
                    return
                elif engine.has_thread:
                    engine.require_sound()
                    await news.wait()
                else:
                    await asyncio.to_thread(self.step)
        finally:
            with engine.lock:
                engine.readers.remove(stream, wake)
            self.close()

    def close(self) -> None:
        """Cancel the request if it is live, and drop what is unread: its id is free."""
        engine, stream = self._engine, self.stream
        with engine.lock:
            if stream.unfinished:
                engine.cancel(stream.request.request_id)
            if stream.events:
                stream.events.clear()
                engine.forget(stream)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TokenStream of {self.stream.request.request_id!r}: {len(self.stream.events)} unread events>"


# ------------------------------------------------------------------------------------------- read to the end


@dataclass(frozen=True)
class Completion:
    """What one sample of a request has generated. ``logprobs`` holds one number for each token, ``top_logprobs`` the
    likeliest tokens beside it, where the request asked for them."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    finish_reason: str


@dataclass(frozen=True)
class Result:
    """A request that was read to its end: its prompt, and a Completion for each of its n samples. ``text``, ``tokens``,
    ``logprobs`` and ``finish_reason`` are those of the first. ``prompt_logprobs``, if asked for, has one entry for each
    token of the prompt, the first of which has none."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    samples: tuple[Completion, ...]
    prompt_logprobs: tuple[Choice | None, ...] = ()

    @classmethod
    def of(cls, stream: RequestStream, events: Iterable[TokenEvent]) -> Result:
        """Gather the events of a stream, up to its end."""
        of_sample: list[list[TokenEvent]] = [[] for _ in stream.samples]
        for event in events:
            of_sample[event.sample].append(event)
        return cls(stream.request.request_id, tuple(stream.request.prompt_tokens),
                   tuple(map(_completion, stream.samples, of_sample)), tuple(stream.prompt_logprobs))

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.samples[0].tokens

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason


def _completion(sample: Sample, events: Sequence[TokenEvent]) -> Completion:
    return Completion("".join(event.text for event in events),
                      tuple(event.token for event in events if event.token is not None),
                      tuple(event.logprob for event in events if event.logprob is not None),
                      tuple(event.top_logprobs for event in events if event.top_logprobs),
                      sample.finish_reason or "")  # every sample has ended
