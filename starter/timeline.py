"""M6 · Everything that happens, in order, as events: the one record that metrics, replays, proofs and pictures read.

An event is a flat dictionary. Every event has "event" (its kind), "step" (steps completed before it) and "time" (the
engine's clock, seconds). Kinds marked ``>`` come from outside, and a replay repeats them; everything else must follow
from those:

      header   version, engine (its version), backend, settings, model, weights_sha256, quantization, page_bytes,
               num_pages, weight_bytes, step_seconds (of a virtual clock; null on a real one); of a scenario its name
               (scenario), weights and tokenizer, copied from it, so that together with the events below the file holds
               the whole scenario; or checkpoint, the name of its file
    > submit   request, prompt_tokens, max_tokens, and, where they are not the default, priority, sampling, stop_tokens,
               cache_salt. Its time is its arrival
    > refuse   request (200 characters of it at most), error (1,000): a submit that was refused and changed nothing
    > cancel   request
    > inject   faults, as in a scenario: from now on they may happen (see ``workloads/faults.py``)
    > lift     memory cuts that still last are ended early
      fault    kind, fault (its fields): one of them happened
      step     the schedule: budget, computed (positions that go through the decoder), chunks [[request, start, count,
               phase]], admitted (for the first time, or resumed after a preemption), preempted, waiting, running,
               reasons {request: sentence}, found {request: prompt tokens in shared pages}, used_pages, empty_slots.
               Of more than 256 waiting requests, waiting names the first, and waiting_count says how many there are
      abandon  the step just planned was interrupted: its computation does not count, changes made while planning
               stay, and the next step reuses its number
      pages    change, request (whose block table it is), pages, used_pages (in some table, after this change):
                   allocate   fresh pages at the end of the table
                   share      pages that already hold the beginning, for a new table (of a sample, or of a found prefix)
                   copy       [page, its copy]: the page is shared and about to be written, so its copy takes its place
                   publish    full pages of the table whose content can be found from now on
                   evict      published pages without a table that lose their content because the request needs pages
                   release    the whole table; pages without another user are free, or cached if published
                   swap_out, swap_in   the table that is given up, its tokens kept in host pages; and the new one
      fork     request, parent: another sample of one prompt starts at the parent's position
      token    request, index, token, text
      finish   request, reason, tokens (how many), error (where the reason is "error")
      dropped  events: so many came between the header and what follows; they are no longer in memory (see
               ``EngineSettings.keep_events``). Only in what was written afterwards; nothing can be proved from it

Position p of a request lies in slot p % page_size of the page table[p // page_size], so the chunks say which slots are
written (appended to) and read. A step's own event comes first, then what planning it changed, then, with the next
step's number, its results. Code outside the engine may hold pages, too, under any name that is not a request's:

    > pages    allocate, share (a fork of a request's table), release, and append: it wrote one more token, and pages
               are its whole table

On disk a timeline is JSON Lines, one event a line, written as it happens: a crash loses at most the last line.
With a ``VirtualClock`` the same scenario and seed give the same file, byte for byte.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from math import inf, isfinite
from pathlib import Path
from threading import RLock
from typing import Any, Protocol, TextIO

from .base.strict_json import describe
from .base.wings import picture
from .errors import SchemaError
from .kv_cache import KVCacheManager
from .scheduler import ScheduleDecision
from .schema import REQUEST_SHAPE, EngineSettings, Request, TokenEvent

# --------------------------------------------------------------------------------------------------------------- events

TIMELINE_VERSION = 2
FINISH_REASONS = ("stop", "length", "cancelled", "error")
CHANGES = ("allocate", "share", "copy", "append", "publish", "evict", "release", "swap_out", "swap_in")

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
    """The last ``keep`` events in memory; listeners, such as a file that is being written, get all of them."""

    def __init__(self, keep: int = EngineSettings.keep_events) -> None:
        self._header: Event = {}
        self._events: deque[Event | TokenEvent] = deque(maxlen=keep)  # as they were made: see _event
        self.listeners: list[Callable[[Event], None]] = []
        self._lock = RLock()  # held while a new listener catches up: later events reach it afterwards
        self._undelivered: deque[Event | TokenEvent] = deque()  # caused by a listener: all hear earlier ones first
        self._delivering = False
        self.troubles: list[Exception] = []  # of listeners that failed and were removed
        self.recorded = 0

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        return f"<Timeline: {self.recorded} events, {len(self._events)} kept>"

    def _repr_html_(self) -> str | None:
        return picture("gantt", self)

    @property
    def header(self) -> Event:
        """The first event, a copy; {} before there is one. It is kept when others are dropped."""
        header: Event = copied(self._header)
        return header

    @property
    def events(self) -> tuple[Event, ...]:
        """The events kept in memory, oldest first: copies, made for the call. O(events)."""
        return tuple(map(_event, tuple(self._events)))

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with every event from now on, in the middle of what happens. It may look at the engine
        and, on a token, cancel a request, but change nothing else. The event is a copy of the listener's own."""
        self.listeners.append(listener)

    def _remove(self, listener: Callable[[Event], None]) -> None:
        with self._lock:
            if listener in self.listeners:
                self.listeners.remove(listener)

    def append(self, event: Event) -> None:
        """Append an event and deliver it to the listeners."""
        if event["event"] == "header":
            self._header = event
        with self._lock:
            self._events.append(event)
            self.recorded += 1
            if self.listeners:
                self._deliver(event)

    def tokens(self, tokens: Collection[TokenEvent]) -> None:
        """Append tokens in the form in which their streams hold them: most events are tokens, so they become
        dictionaries only when they are read. Their top_logprobs should be (): they may be as long as the vocabulary,
        and are not part of the event."""
        with self._lock:
            self._events.extend(tokens)
            self.recorded += len(tokens)
            if self.listeners:
                for token in tokens:
                    self._deliver(token)

    def _deliver(self, entry: Event | TokenEvent) -> None:
        self._undelivered.append(entry)
        self._deliver_all()

    def _deliver_all(self) -> None:
        if self._delivering:  # within a listener's call: the outer call goes on with the rest
            return
        self._delivering = True
        try:
            while self._undelivered:
                entry = self._undelivered.popleft()
                for listener in tuple(self.listeners):
                    try:
                        listener(_event(entry))
                    except Exception as error:  # a full disk, for example; raised when the step is complete
                        self._remove(listener)
                        self.troubles.append(error)
        finally:  # an interrupt may leave some for the next time
            self._delivering = False

    def write(self, path: str | Path) -> None:
        """Write what is kept in memory as JSON Lines, the header in any case. SchemaError if the file cannot be
        written."""
        with self.written_to(path):
            pass

    @contextmanager
    def written_to(self, path: str | Path) -> Iterator[None]:
        """Write what is kept in memory and, while the block runs, every further event as it happens."""
        with _open_to_write(path) as file:
            def write(event: Event) -> None:
                file.write(json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
                file.flush()

            with self._lock:
                self._deliver_all()
                for event in (*self._beginning(), *self.events):
                    write(event)
                self.listen(write)
            try:
                yield
            finally:
                self._remove(write)

    def _beginning(self) -> list[Event]:
        """The header and a "dropped" event, in place of the events that are no longer in memory."""
        missing = self.recorded - len(self._events) - 1  # without the header
        if not self._header or missing < 0:
            return []
        where = _event(self._events[0]) if self._events else self._header
        mark = {"event": "dropped", "step": where["step"], "time": where["time"], "events": missing}
        return [self.header, mark] if missing else [self.header]


def _event(entry: Event | TokenEvent) -> Event:
    """An entry as a plain dictionary of its own. Tokens and steps, which are nearly all entries, are kept in the form
    that the engine made; the price of plain lists and dictionaries is paid when they are read."""
    if isinstance(entry, tuple):
        return {"event": "token", "step": entry.step + 1, "time": entry.time, "request": entry.sequence_id,
                "index": entry.index, "token": entry.token, "text": entry.text}
    if entry["event"] != "step":
        return {key: copied(value) for key, value in entry.items()}
    names = {key: list(entry[key]) for key in ("admitted", "preempted", "waiting", "running")}
    maps = {key: dict(entry[key]) for key in ("reasons", "found")}
    return {**entry, "chunks": list(map(list, entry["chunks"])), **names, **maps}


def copied(value: Any) -> Any:
    """A copy of what JSON can write, down to the last list."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return list(map(copied, value)) if isinstance(value, (list, tuple)) else value


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length - 1] + "…"


def _open_to_write(path: str | Path) -> TextIO:
    try:  # "backslashreplace" writes half of a surrogate pair as JSON does: \ud800
        return open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SchemaError(f"cannot write the timeline {path}: {error}") from None


# --------------------------------------------------------------------------------------------------------- the recorder

class Collector(Protocol):
    """Adds events up as they come: ``metrics.MetricsCollector``."""

    def observe(self, event: Event) -> None: ...

    def tokens(self, sequences: list[str], time: float) -> None: ...


class Recorder:
    """Turns what the engine does into events, stamped with the number of completed steps and the clock's time. Where a
    clock is set back, time stands still until it has caught up: no duration is ever negative.

    While a step is being planned, the page manager and the faults already report what they do. These events are written
    after the step's own event, so that a timeline reads in the order of cause and effect. A step's tokens have one time
    and are written together, unless something else happens in between. Everything else is written at once.
    """

    def __init__(self, clock: Callable[[], float], collector: Collector,
                 keep_events: int = EngineSettings.keep_events) -> None:
        self.clock = clock
        self.steps = 0
        self.now = clock()  # the time of the last event, never less than that of an earlier one
        if isinstance(self.now, bool) or not isinstance(self.now, (int, float)) or not isfinite(self.now):
            raise SchemaError(f"expected a function that returns seconds, not {describe(self.now)}", "/clock")
        self.timeline = Timeline(keep_events)
        self._collector = collector
        self._tokens: dict[str, TokenEvent] = {}  # the newest ones, by sequence, not yet written
        self._held_back: list[tuple[str, Event]] | None = None  # while a step is being planned
        self._planned = False  # a step was planned, and is not yet completed

    def raise_trouble(self) -> None:
        """Raise what a listener failed with, now that nothing is left half done."""
        if trouble := self.take_trouble():
            raise trouble

    def take_trouble(self) -> Exception | None:
        """What a listener failed with, each failure once."""
        return self.timeline.troubles.pop(0) if self.timeline.troubles else None

    def read_clock(self) -> float:
        """The time, in seconds, never less than before. A reading that is not a finite number is passed over."""
        time = self.clock()
        return time if self.now < time < inf else self.now

    def header(self, **fields: object) -> None:
        """The first event."""
        step_seconds = self.clock.step_seconds if isinstance(self.clock, VirtualClock) else None
        self._append("header", copied({"version": TIMELINE_VERSION, "step_seconds": step_seconds, **fields}))

    def event(self, event: str, **fields: object) -> None:
        """Any event."""
        if self._held_back is None:
            self._append(event, fields)
        else:
            self._held_back.append((event, fields))

    def submitted(self, request: Request) -> None:
        """A request was queued: all of it, except for fields that have their defaults."""
        fields = REQUEST_SHAPE.dump(request)
        assert isinstance(fields, dict)
        self.event("submit", request=fields.pop("request_id"),
                   **{key: value for key, value in fields.items() if key != "arrival"})  # that is the event's time

    def refused(self, request_id: str, error: str) -> None:
        """A submit was refused. Both texts may be as long as what the caller gave, so they are cut here."""
        self.event("refuse", request=_cut(request_id, 200), error=_cut(error, 1_000))

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """A step is being planned: what happens meanwhile is written at the end of the block, however it ends."""
        self._held_back = []
        try:
            yield
        finally:
            held_back, self._held_back = self._held_back, None
            for event, fields in held_back:
                self._append(event, fields)

    def planned(self, decision: ScheduleDecision, computed: int, kv: KVCacheManager) -> None:
        """A step was planned; ``computed`` positions will go through the decoder."""
        more = {"waiting_count": decision.waiting_count} if decision.waiting_count > len(decision.waiting) else {}
        self._append("step", {
            "budget": decision.budget_tokens, "computed": computed,
            "chunks": decision.chunks, "admitted": decision.admitted, "preempted": decision.preempted,
            "waiting": decision.waiting, "running": decision.running, "reasons": dict(decision.reasons),
            "found": dict(decision.found), "used_pages": kv.used_pages,
            "empty_slots": kv.internal_fragmentation(), **more})
        self._planned = True

    def abandoned(self) -> None:
        """The step was interrupted. Written only if its plan was."""
        if self._planned:
            self._planned = False
            self._append("abandon", {})

    def step_completed(self) -> None:
        """The step's numbers are there: time moves on before its tokens are recorded."""
        self._planned = False
        self.steps += 1
        if isinstance(self.clock, VirtualClock):
            self.clock.tick()
        self.now = self.read_clock()

    def token(self, sequence_id: str, token: TokenEvent) -> None:
        """A token of the step that was just completed. Listeners hear of it at once, as they may cancel the next
        one."""
        self._tokens[sequence_id] = token._replace(top_logprobs=()) if token.top_logprobs else token
        if self.timeline.listeners:
            self.write_tokens()

    def write_tokens(self) -> None:
        """Write the tokens that wait, whose time is ``now``."""
        if self._tokens:
            tokens, self._tokens = self._tokens, {}
            self._collector.tokens(list(tokens), self.now)
            self.timeline.tokens(tokens.values())

    def _append(self, event: str, fields: Event) -> None:
        self.write_tokens()
        self.now = self.read_clock()
        entry = {"event": event, "step": self.steps, "time": self.now, **fields}
        self._collector.observe(entry)  # before any listener can fail, or ask
        self.timeline.append(entry)
