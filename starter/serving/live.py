"""GET /live: what the engine does, as it does it, for the page at GET /. Server-sent events, each an event of the
timeline (``timeline.py`` says what they hold), after a first one of the kind "now".

Prompts and texts are left out unless the server logs them, too: a viewer may see that the engine is busy without
seeing with what. A viewer that is too slow loses events, and hears how many; the engine never waits for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from starter.engine import InferenceEngine
from starter.serving.answers import Answer, Work
from starter.serving.completions import sse
from starter.serving.generation import Source
from starter.timeline import Event

PAGE = Path(__file__).with_name("live.html")
MOST = 10_000  # events that a viewer has not taken yet
PRIVATE = ("prompt_tokens", "sampling", "stop_tokens", "cache_salt", "token", "text")  # and why a request was refused


def page() -> Answer:
    """The page itself, which holds nothing of what it will show. It may load nothing from elsewhere."""
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    return Answer(200, PAGE.read_bytes(), {"Content-Security-Policy": policy}, "text/html; charset=utf-8")


def shown(event: Event, texts: bool) -> Event:
    """The event as a viewer gets it."""
    if texts:
        return event
    kept = {key: value for key, value in event.items() if key not in PRIVATE}
    if "prompt_tokens" in event:
        kept["prompt_length"] = len(event["prompt_tokens"])
    if event["event"] == "refuse":
        del kept["error"]
    return kept


class Feed(Source[bytes]):
    """The timeline from now on, as server-sent events. It listens while it is open."""

    endless = True

    def __init__(self, engine: InferenceEngine, texts: bool) -> None:
        self._engine, self._texts = engine, texts
        self._events: deque[Event] = deque()
        self._lost = 0
        self._wake: Callable[[], None] = lambda: None

    def __enter__(self) -> Feed:
        engine = self._engine
        with engine.lock:  # nothing happens between this event and those that are heard
            self._events.append({"event": "now", "step": engine.steps, "num_pages": engine.kv.total_pages,
                                 "page_size": engine.settings.page_size, "used_pages": engine.kv.used_pages,
                                 "requests": list(engine.active)})
            engine.timeline.listen(self._hear)
        return self

    def _hear(self, event: Event) -> None:
        """In the middle of what happens: only keep it."""
        if len(self._events) >= MOST:
            self._lost += len(self._events)
            self._events.clear()
        self._events.append(event)
        self._wake()

    @property
    def ended(self) -> bool:
        return self.cancelled or self._engine.closed

    def take(self) -> list[bytes]:
        with self._engine.lock:
            if not self._events and not self.ended:
                self._engine.require_sound()
            events, self._events = self._events, deque()
            lost, self._lost = self._lost, 0
        gap = [{"event": "dropped", "events": lost}] if lost else []
        return [sse(shown(event, self._texts)) for event in (*gap, *events)]

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        self._wake = wake
        try:
            yield
        finally:
            self._wake = lambda: None

    @property
    def seconds_left(self) -> float:
        """It looks up every five seconds: whether the engine has died or was closed, which is no event."""
        return 5.0

    def cancel(self) -> None:
        self.cancelled = True
        self._wake()

    def close(self) -> None:
        """Listen no more."""
        with self._engine.lock:
            if self._hear in self._engine.timeline.listeners:
                self._engine.timeline.listeners.remove(self._hear)


class LiveWork(Work):
    """A viewer's answer."""

    def parts(self, batch: Sequence[bytes]) -> Iterator[bytes]:
        yield from batch
