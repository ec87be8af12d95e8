"""M6 · Everything that happens, in order, as events: the one record that metrics, replays and pictures read.

An event is a flat dictionary. Every event has "event" (its kind), "step" (steps completed before it) and "time"
(the engine's clock, seconds); the rest depends on the kind:

    header   version, engine, settings, model, weights_sha256, page_bytes, ...    the first line of a file
    submit   request, prompt_tokens, max_tokens          refuse  request, error (nothing was queued)
    step     budget, computed, chunks [[request, start, count, phase]], admitted, preempted, waiting, running,
             reasons {request: sentence}, used_pages, empty_slots
    pages    change ("allocate", "share", "copy", "release", "swap_out", "swap_in"), request, pages, used_pages
    token    request, index, token, text                 fork    request, parent: another sample of one prompt
    cancel   request                                     finish  request, reason, tokens, error
    fault    kind, and the fault's own fields: injected on purpose (``faults.py``)

On disk a timeline is JSON Lines, one event a line, written as it happens: a crash loses at most the last line.
With a ``VirtualClock`` the same scenario and seed give the same file, byte for byte.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from .errors import SchemaError
from .shapes import parse_json

TIMELINE_VERSION = 1
KEPT_EVENTS = 100_000

Event = dict[str, Any]


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
        for listener in self._listeners:
            listener(entry)

    def write(self, path: str | Path) -> None:
        """Write what is kept in memory as JSON Lines."""
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for event in self._events:
                write_event(file, event)


def write_event(file: TextIO, event: Event) -> None:
    """One event as one line."""
    file.write(json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
    file.flush()


def read_timeline(path: str | Path) -> list[Event]:
    """Timeline file -> events. SchemaError names the line of the first damage."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise SchemaError(f"cannot read the timeline {path}: {error}") from None
    events = [_read_event(path, number, line) for number, line in enumerate(text.splitlines(), start=1)]
    if not events or events[0]["event"] != "header":
        raise SchemaError(f"{path} does not begin with a header event: not a timeline")
    if events[0].get("version") != TIMELINE_VERSION:
        raise SchemaError(f"{path} has version {events[0].get('version')!r}; this reader knows {TIMELINE_VERSION}")
    return events


def _read_event(path: str | Path, number: int, line: str) -> Event:
    try:
        event = parse_json(line)
    except SchemaError as error:
        raise SchemaError(f"{path}, line {number}: {error.problem}", error.path) from None
    if not isinstance(event, dict) or not {"event", "step", "time"} <= event.keys():
        raise SchemaError(f"{path}, line {number}: an event has at least the keys event, step and time")
    return event
