"""M6 · Everything that happens, in order, as events: the one record that metrics, replays, proofs and pictures read.

An event is a flat dictionary. Every event has "event" (its kind), "step" (steps completed before it) and "time" (the
engine's clock, seconds). What begins with ``>`` comes from outside, and a replay does it again; all else must follow:

      header   version, engine (its version), backend, settings, model, weights_sha256, quantization, page_bytes,
               num_pages, weight_bytes, step_seconds (of a virtual clock; null on a real one); of a scenario its name
               (scenario), weights and tokenizer, all as they stand there, so that together with the events below the
               file holds the whole scenario; or checkpoint, the name of its file
    > submit   request, prompt_tokens, max_tokens, and, where they are not the default, priority, sampling, stop_tokens,
               cache_salt. Its time is its arrival
    > refuse   request, error: a submit that was refused and changed nothing
    > cancel   request
    > inject   faults, as in a scenario: from now on they may happen (see ``faults.py``)
    > lift     the memory cuts that last are ended before their time
      fault    kind, fault (its fields): one of them happened
      step     the schedule: budget, computed (positions that go through the decoder), chunks [[request, start, count,
               phase]], admitted (the first time or, after a preemption, resumed), preempted, waiting, running, reasons
               {request: sentence}, found {request: prompt tokens in shared pages}, used_pages, empty_slots
      abandon  the step just planned was interrupted: what it was to compute does not count, what planning it changed
               stays, and the next step has its number
      pages    change, request (whose block table it is), pages, used_pages (in some table, after this change):
                   allocate   fresh pages at the end of the table
                   share      pages that hold the beginning already, for a new table: of a sample, or found
                   copy       [page, its copy], which takes its place: it is shared and about to be written
                   publish    full pages of the table whose content can be found from now on
                   evict      published pages without a table that lose their content; the request needs pages
                   release    the whole table; pages that nobody else has are free, or cached if published
                   swap_out, swap_in   the table that is given up, its tokens kept in host pages; and the new one
      fork     request, parent: another sample of one prompt starts where the parent stands
      token    request, index, token, text
      finish   request, reason, tokens (how many), error (where the reason is "error")

Position p of a request lies in slot p % page_size of the page table[p // page_size]; so the chunks say which slots are
written (appended to) and read. First comes a step's own event, then what planning it changed, then, with the next
step's number, what it brought. Somebody outside the engine may hold pages, too, under any name that is no request's:

    > pages    allocate, share (a fork of a request's table), release, and append: it wrote one more token, and pages
               are its whole table

On disk a timeline is JSON Lines, one event a line, written as it happens: a crash loses at most the last line.
With a ``VirtualClock`` the same scenario and seed give the same file, byte for byte.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, TextIO

from .errors import SchemaError
from .requests import TokenEvent, TokenFields
from .schema import (
    ENGINE_SHAPE,
    FAULT_SHAPE,
    MAX_PAGES,
    MODEL_SHAPE,
    QUANTIZATION_SHAPE,
    TOKENIZER_SHAPE,
    WEIGHTS_SHAPE,
)
from .shapes import Choice, Integer, ListOf, MapOf, Nullable, Number, Text, describe, parse_json, pointer

TIMELINE_VERSION = 2
KEPT_EVENTS = 100_000
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
    """The last ``keep`` events in memory, and all of them to whoever listens (a file, say)."""

    def __init__(self, keep: int = KEPT_EVENTS) -> None:
        self.header: Event = {}
        self._events: deque[Event | TokenFields] = deque(maxlen=keep)  # as they came: see _event
        self.listeners: list[Callable[[Event], None]] = []
        self._lock = RLock()  # what is appended while a listener is given the past comes to it afterwards
        self._untold: deque[Event] = deque()  # what a listener brings about waits until all have heard what came before
        self._telling = False
        self.troubles: list[Exception] = []  # of listeners that failed, and were let go
        self.recorded = 0

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        return f"<Timeline: {self.recorded} events, {len(self._events)} kept>"

    def _repr_html_(self) -> str:
        from .notebook import gantt
        return gantt(self)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events kept in memory, oldest first; made for the call, O(events)."""
        return tuple(map(_event, tuple(self._events)))

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with every event from now on, in the middle of what happens: it may look at the engine and,
        hearing of a token, cancel a request, but do nothing else to it."""
        self.listeners.append(listener)

    def _let_go(self, listener: Callable[[Event], None]) -> None:
        with self._lock:
            if listener in self.listeners:
                self.listeners.remove(listener)

    def append(self, event: Event) -> None:
        """Append an event and tell the listeners."""
        if event["event"] == "header":
            self.header = event
        with self._lock:
            self._events.append(event)
            self.recorded += 1
            if self.listeners:
                self._tell(_event(event))

    def tokens(self, tokens: Collection[TokenFields]) -> None:
        """Append tokens as they wait for their readers: most events are tokens, so nothing more is made of them here.
        Their top_logprobs, which are no part of the event, had better be (): all of them are as long as the vocabulary.
        """
        with self._lock:
            self._events.extend(tokens)
            self.recorded += len(tokens)
            if self.listeners:
                for token in tokens:
                    self._tell(_event(token))

    def _tell(self, event: Event) -> None:
        self._untold.append(event)
        self._tell_untold()

    def _tell_untold(self) -> None:
        if self._telling:  # within a listener's call: whoever made it goes on with what is untold
            return
        self._telling = True
        try:
            while self._untold:
                event = self._untold.popleft()
                for listener in tuple(self.listeners):
                    try:
                        listener(event)
                    except Exception as error:  # a full disk, say: kept until it can be told without losing a step
                        self._let_go(listener)
                        self.troubles.append(error)
        finally:  # after a Ctrl-C there may be some left, for the next time
            self._telling = False

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

            with self._lock:
                self._tell_untold()
                dropped = [self.header] if self.header and self.recorded > len(self._events) else []
                for event in (*dropped, *self.events):
                    write(event)
                self.listen(write)
            try:
                yield
            finally:
                self._let_go(write)


def _event(entry: Event | TokenFields) -> Event:
    """An entry as it is told. Tokens and steps come as they are elsewhere, and nearly all entries are one or the other:
    what it takes to make plain lists and dictionaries of them is spent when somebody looks."""
    if isinstance(entry, tuple):
        token = TokenEvent._make(entry)
        return {"event": "token", "step": token.step + 1, "time": token.time, "request": token.sequence_id,
                "index": token.index, "token": token.token, "text": token.text}
    if entry["event"] != "step":
        return entry
    names = {key: list(entry[key]) for key in ("admitted", "preempted", "waiting", "running")}
    maps = {key: dict(entry[key]) for key in ("reasons", "found")}
    return {**entry, "chunks": list(map(list, entry["chunks"])), **names, **maps}


def _open_to_write(path: str | Path) -> TextIO:
    try:  # "backslashreplace" writes half of a surrogate pair as JSON does: \ud800
        return open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SchemaError(f"cannot write the timeline {path}: {error}") from None


def read_timeline(path: str | Path) -> list[Event]:
    """Timeline file -> events, each with all that the module's docstring promises of its kind, and of the right type;
    kinds and keys that it does not name are left alone. SchemaError names the line of the first damage."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        raise SchemaError(f"cannot read the timeline {path}: {error}") from None
    events = [_read_event(f"{path}, line {number}", line)
              for number, line in enumerate(lines, start=1) if line or number < len(lines)]
    if not events or events[0]["event"] != "header":
        raise SchemaError(f"{path} does not begin with a header event: not a timeline")
    if any(event["event"] == "header" for event in events[1:]):
        raise SchemaError(f"{path} has more than one header: these are several timelines")
    return events


def _read_event(place: str, line: bytes) -> Event:
    try:
        event = parse_json(line.decode("utf-8"))
        if not isinstance(event, dict):
            raise SchemaError("an event is an object")
        _check_keys(event, _COMMON)
        if event["event"] == "header" and event.get("version") != TIMELINE_VERSION:
            raise SchemaError(f"version {event.get('version')!r}; this reader knows {TIMELINE_VERSION}", "/version")
        _check_keys(event, _KEYS.get(event["event"], {}))
    except UnicodeDecodeError as error:
        raise SchemaError(f"{place}: not UTF-8 text: {error}") from None
    except SchemaError as error:
        raise SchemaError(f"{place}: {error.problem}", error.path) from None
    return event


_Rule = Callable[[object, str], object]  # of a value and its path: SchemaError unless it is as it should be


def _check_keys(event: Event, rules: Mapping[str, _Rule]) -> None:
    missing = [key for key in rules if key not in event and not key.endswith("?")]
    if missing:
        kind = "header" if event.get("event") == "header" else f"{event.get('event', '')!s:.40} event".strip()
        raise SchemaError(f"this {kind} lacks {', '.join(missing)}")
    for key, rule in rules.items():
        key = key.rstrip("?")
        if key in event:
            rule(event[key], f"/{key}")


def _text(value: object, path: str) -> None:
    """A string of any characters, half a surrogate pair included: a token's text may be one."""
    if not isinstance(value, str):
        raise SchemaError(f"a string is wanted, not {describe(value)}", path)


def _chunks(value: object, path: str) -> None:
    for i, chunk in enumerate(_list(value, path)):
        if len(parts := _list(chunk, f"{path}/{i}")) != 4:
            raise SchemaError("a chunk is [request, start, count, phase]", f"{path}/{i}")
        for part, rule in zip(parts, (_ID, _COUNT, _COUNT, Choice(("prefill", "decode")).parse)):
            rule(part, f"{path}/{i}")


def _list(value: object, path: str) -> list[object]:
    if not isinstance(value, list):
        raise SchemaError(f"a list is wanted, not {describe(value)}", path)
    return value


def _object(value: object, path: str) -> None:
    if not isinstance(value, dict):
        raise SchemaError(f"an object is wanted, not {describe(value)}", path)


def _sentences(value: object, path: str) -> None:
    _object(value, path)
    assert isinstance(value, dict)
    for key, sentence in value.items():
        _text(sentence, pointer(path, key))


_TIME = Number(-1e15, 1e15).parse
_COUNT = Integer(0, 2**53).parse
_COUNTS = ListOf(Integer(0, 2**53)).parse
_ID = Text(1).parse
_IDS = ListOf(Text(1)).parse
_COMMON: Mapping[str, _Rule] = {"event": _text, "step": _COUNT, "time": _TIME}
_KEYS: Mapping[str, Mapping[str, _Rule]] = {  # what a reader may rely on, by kind; "?" marks what may be missing
    "header": {"version": _COUNT, "engine": _text, "backend": _text, "settings": ENGINE_SHAPE.parse,
               "model": MODEL_SHAPE.parse, "weights_sha256?": Nullable(Text(64, 64)).parse,
               "quantization?": Nullable(QUANTIZATION_SHAPE).parse, "page_bytes": _COUNT,
               "num_pages": Integer(1, MAX_PAGES).parse, "weight_bytes": _COUNT,
               "step_seconds": Nullable(Number(-1e15, 1e15)).parse, "scenario?": _text, "weights?": WEIGHTS_SHAPE.parse,
               "tokenizer?": TOKENIZER_SHAPE.parse, "checkpoint?": _text},
    "submit": {"request": _ID, "prompt_tokens": ListOf(Integer(), 1).parse, "max_tokens": _COUNT,
               "priority?": Integer(-2**53, 2**53).parse, "sampling?": _object, "stop_tokens?": _COUNTS,
               "cache_salt?": Nullable(Text()).parse},
    "refuse": {"request": _text, "error": _text},
    "cancel": {"request": _ID},
    "inject": {"faults": ListOf(FAULT_SHAPE).parse},
    "lift": {},
    "fault": {"kind": _text, "fault": _object},
    "step": {"budget": _COUNT, "computed": _COUNT, "chunks": _chunks, "admitted": _IDS, "preempted": _IDS,
             "waiting": _IDS, "running": _IDS, "reasons": _sentences, "found": MapOf(Integer(0, 2**53)).parse,
             "used_pages": _COUNT, "empty_slots": _COUNT},
    "abandon": {},
    "pages": {"change": Choice(CHANGES).parse, "request": _text, "pages": _COUNTS, "used_pages": _COUNT},
    "fork": {"request": _ID, "parent": _ID},
    "token": {"request": _ID, "index": _COUNT, "token": _COUNT, "text": _text},
    "finish": {"request": _ID, "reason": Choice(FINISH_REASONS).parse, "tokens": _COUNT, "error?": _text},
}
