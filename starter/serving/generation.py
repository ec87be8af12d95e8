"""What an answer grows from; above all, the engine's requests for one body, one for each prompt: submitted together,
read together, cancelled together.

    with Generation(engine, asks) as generation:       all are accepted, or none
        for events in generation.batches():            [(number of the prompt, event), ...] as steps bring them
            ...

Leaving the block cancels what still runs, so whatever happens to the client, no page is kept. ``cancel`` may be called
from any thread: it is how a client that goes away ends its requests at once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import TIMEOUT_MAX, Event
from typing import Generic, TypeVar

from starter.engine import InferenceEngine
from starter.errors import UnknownRequestError
from starter.sampling import Choice
from starter.schema import SamplingParams, TokenEvent
from starter.serving.problems import ApiError
from starter.streams import TokenStream

Numbered = tuple[int, TokenEvent]


@dataclass(frozen=True)
class Ask:
    """What ``submit`` is given for one prompt."""

    request_id: str
    tokens: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    stop_tokens: Sequence[int] = ()
    cache_salt: str | None = None

    def submit(self, engine: InferenceEngine) -> TokenStream:
        """Queue it. Whatever ``submit`` raises."""
        engine.submit(self.tokens, self.max_tokens, request_id=self.request_id, sampling=self.sampling,
                      priority=self.priority, stop_tokens=self.stop_tokens, cache_salt=self.cache_salt)
        return engine.stream(self.request_id)


Item = TypeVar("Item")


class Source(ABC, Generic[Item]):
    """Brings items as they come to be; a context manager, which ``close`` ends."""

    endless = False  # it ends only when it is cancelled, so nobody waits for it when the server drains
    cancelled = False

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Every item was taken."""

    @abstractmethod
    def take(self) -> list[Item]:
        """The items that are there now, without waiting."""

    @abstractmethod
    def waking(self, wake: Callable[[], None]) -> AbstractContextManager[None]:
        """Within the block, ``wake`` is called whenever there is news: under the engine's lock, so it must be quick."""

    @property
    def seconds_left(self) -> float:
        """How long to wait for more; raises when that is over."""
        return TIMEOUT_MAX

    @abstractmethod
    def cancel(self) -> None:
        """End it; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """It will not be read again."""

    def batches(self) -> Generator[list[Item], None, None]:
        """Items as they come, until the last. The engine's own thread must run (``engine.start()``)."""
        news = Event()
        with self.waking(news.set):
            while True:
                news.clear()  # before looking, so that what comes afterwards is not missed
                if items := self.take():
                    yield items
                elif self.ended:
                    return
                else:
                    news.wait(self.seconds_left)

    def __enter__(self) -> Source[Item]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Generation(Source[Numbered]):
    """The streams of some requests."""

    def __init__(self, engine: InferenceEngine, asks: Sequence[Ask], seconds: float | None = None) -> None:
        """Submit all. An error of ``submit`` leaves none of them in the engine. ``seconds`` is how long they may take
        altogether."""
        self._engine = engine
        self._streams: list[TokenStream] = []
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._seconds = seconds
        with engine.lock:  # no step comes between, so none of them has computed anything when a later one is refused
            try:
                for ask in asks:
                    self._streams.append(ask.submit(engine))
            except BaseException:
                self.close()
                raise

    @property
    def request_ids(self) -> list[str]:
        return [stream.stream.request.request_id for stream in self._streams]

    def prompt_logprobs(self, number: int) -> tuple[Choice | None, ...]:
        """Of a prompt's own tokens, if they were asked for; complete with its first event."""
        return self._streams[number].prompt_logprobs

    @property
    def ended(self) -> bool:
        return all(stream.stream.drained for stream in self._streams)

    def take(self) -> list[Numbered]:
        """EngineError if the engine has stopped."""
        found: list[Numbered] = []
        with self._engine.lock:
            for number, stream in enumerate(self._streams):
                while (event := stream.take()) is not None:
                    found.append((number, event))
            if not found and not self.ended:
                self._engine.require_sound()
        return found

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        readers = self._engine.readers
        with self._engine.lock:
            for stream in self._streams:
                readers.add(stream.stream, wake)
        try:
            yield
        finally:
            with self._engine.lock:
                for stream in self._streams:
                    readers.remove(stream.stream, wake)

    @property
    def seconds_left(self) -> float:
        """ApiError 504 when none are."""
        if self._deadline is None:
            return TIMEOUT_MAX
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ApiError(504, f"the request took longer than the {self._seconds:g} seconds that this server allows",
                           kind="server_error", code="timeout")
        return left

    def cancel(self) -> None:
        """End what runs. Those that read it find the ends of the requests."""
        self.cancelled = True
        with self._engine.lock:
            for request_id in self.request_ids:
                try:
                    self._engine.cancel(request_id)
                except UnknownRequestError:  # it was read to its end, longer ago than the engine remembers
                    continue

    def close(self) -> None:
        """Cancel what runs, and forget what was not read."""
        for stream in self._streams:
            stream.close()
