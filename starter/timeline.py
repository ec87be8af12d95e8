"""M6 · Everything that happens, in order, as events: the one record that metrics, replays and pictures read.

An event is a flat dictionary. Every event has "event" (its kind), "step" (steps completed before it) and "time"
(the engine's clock, seconds); the rest depends on the kind:

    header   version, engine, settings, model, weights_sha256, page_bytes, ...    the first line of a file
    submit   request, prompt_tokens, max_tokens          refuse  request, error (nothing was queued)
    step     budget, computed, chunks [[request, start, count, phase]], admitted, preempted, waiting, running,
             reasons {request: sentence}, found {request: shared prompt tokens}, used_pages, empty_slots
    pages    change ("allocate", "share", "copy", "release", "swap_out", "swap_in"), request, pages, used_pages
    token    request, index, token, text                 fork    request, parent: another sample of one prompt
    cancel   request                                     finish  request, reason, tokens, error
    fault    kind, fault (its fields): injected on purpose, see ``faults.py``

On disk a timeline is JSON Lines, one event a line, written as it happens: a crash loses at most the last line.
With a ``VirtualClock`` the same scenario and seed give the same file, byte for byte.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from .errors import SchemaError
from .shapes import parse_json

TIMELINE_VERSION = 1
KEPT_EVENTS = 100_000

Event = dict[str, Any]
_COMMON: dict[str, Any] = {"event": str, "step": int, "time": (int, float)}
_KEYS = {  # what a reader may rely on, by kind
    "submit": "request prompt_tokens max_tokens", "refuse": "request error",
    "step": "budget computed chunks admitted preempted waiting running reasons found used_pages empty_slots",
    "pages": "change request pages used_pages", "token": "request index token text", "fork": "request parent",
    "cancel": "request", "finish": "request reason tokens", "fault": "kind fault",
}


class VirtualClock:
    """A clock that stands still during a step and then advances: times count steps, whatever the machine does."""

    def __init__(self, step_seconds: float = 1.0) -> None:
        self.step_seconds = step_seconds
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def tick(self) -> None:
        """One step has passed."""
        self.seconds += self.step_seconds


class Timeline:
    """The last ``keep`` events in memory, and all of them to whoever listens (a file, the metrics)."""

    def __init__(self, keep: int = KEPT_EVENTS) -> None:
        self.header: Event = {}
        self._events: deque[Event] = deque(maxlen=keep)
        self._listeners: list[Callable[[Event], None]] = []
        self.troubles: list[Exception] = []  # of listeners that failed, and were let go
        self.recorded = 0

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))

    def __repr__(self) -> str:
        return f"<Timeline: {self.recorded} events, {len(self._events)} kept>"

    @property
    def events(self) -> tuple[Event, ...]:
        """The events kept in memory, oldest first."""
        return tuple(self._events)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with every event from now on."""
        self._listeners.append(listener)

    def record(self, event: str, step: int, time: float, **fields: object) -> None:
        """Append an event and tell the listeners."""
        entry: Event = {"event": event, "step": step, "time": time, **fields}
        if event == "header":
            self.header = entry
        self._events.append(entry)
        self.recorded += 1
        for listener in tuple(self._listeners):
            try:
                listener(entry)
            except Exception as error:  # a full disk, say: kept until a caller can be told without losing a step
                self._listeners.remove(listener)
                self.troubles.append(error)

    def write(self, path: str | Path) -> None:
        """Write what is kept in memory as JSON Lines, the header in any case. SchemaError if the path is no place
        to write to."""
        with self.written_to(path):
            pass

    @contextmanager
    def written_to(self, path: str | Path) -> Iterator[None]:
        """Write what is kept in memory and, while the block runs, every further event as it happens."""
        with _open_to_write(path) as file:
            def write(event: Event) -> None:
                file.write(json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
                file.flush()

            dropped = [self.header] if self.header and self.recorded > len(self._events) else []
            for event in (*dropped, *self._events):
                write(event)
            self._listeners.append(write)
            try:
                yield
            finally:
                if write in self._listeners:
                    self._listeners.remove(write)


def _open_to_write(path: str | Path) -> TextIO:
    try:  # "backslashreplace" writes half of a surrogate pair as JSON does: \ud800
        return open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SchemaError(f"cannot write the timeline {path}: {error}") from None


def read_timeline(path: str | Path) -> list[Event]:
    """Timeline file -> events. SchemaError names the line of the first damage."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        raise SchemaError(f"cannot read the timeline {path}: {error}") from None
    events = [_read_event(f"{path}, line {number}", line)
              for number, line in enumerate(lines, start=1) if line or number < len(lines)]
    if not events or events[0]["event"] != "header":
        raise SchemaError(f"{path} does not begin with a header event: not a timeline")
    if events[0].get("version") != TIMELINE_VERSION:
        raise SchemaError(f"{path} has version {events[0].get('version')!r}; this reader knows {TIMELINE_VERSION}")
    return events


def _read_event(place: str, line: bytes) -> Event:
    try:
        event = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SchemaError(f"{place}: not UTF-8 text: {error}") from None
    except SchemaError as error:
        raise SchemaError(f"{place}: {error.problem}", error.path) from None
    if not isinstance(event, dict) or not all(isinstance(event.get(key), kind) for key, kind in _COMMON.items()):
        raise SchemaError(f"{place}: an event has at least the keys event (a string), step and time (numbers)")
    missing = [key for key in _KEYS.get(event["event"], "").split() if key not in event]
    if missing:
        raise SchemaError(f"{place}: this {event['event']} event lacks {', '.join(missing)}")
    return event
