"""M6 · Reads a timeline from its file, strictly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from starter.base.fault_kinds import FAULT_SHAPE
from starter.base.strict_json import (
    Integer,
    ListOf,
    MapOf,
    Nullable,
    Number,
    OneOf,
    Text,
    describe,
    parse_json,
    pointer,
)
from starter.errors import SchemaError
from starter.schema import ENGINE_SHAPE, MAX_PAGES, MODEL_SHAPE, QUANTIZATION_SHAPE, TOKENIZER_SHAPE, WEIGHTS_SHAPE
from starter.timeline import CHANGES, FINISH_REASONS, TIMELINE_VERSION, Event


def read_timeline(path: str | Path, whole: bool = True) -> list[Event]:
    """The events of a timeline file; where it has to be ``whole``, SchemaError if its beginning is lost.

    Each event has all keys that ``timeline.py`` documents for its kind, with values of the right type; unknown kinds
    and keys are left alone. SchemaError names the line of the first damage. O(bytes)."""
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
    if whole and (missing := sum(event["events"] for event in events if event["event"] == "dropped")):
        raise SchemaError(f"{path} lacks {missing} events after its header: they were no longer in memory when it was "
                          f"written. Write a timeline while the engine runs (--timeline, or timeline.written_to), or "
                          f"keep more events (keep_events)")
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


_Rule = Callable[[object, str], object]  # takes a value and its path; SchemaError unless the value is right


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
    """A string of any characters, half of a surrogate pair included: a token's text may be one."""
    if not isinstance(value, str):
        raise SchemaError(f"expected a string, not {describe(value)}", path)


def _chunks(value: object, path: str) -> None:
    for i, chunk in enumerate(_list(value, path)):
        if len(parts := _list(chunk, f"{path}/{i}")) != 4:
            raise SchemaError("a chunk is [request, start, count, phase]", f"{path}/{i}")
        for part, rule in zip(parts, (_ID, _COUNT, _COUNT, OneOf(("prefill", "decode")).parse)):
            rule(part, f"{path}/{i}")


def _list(value: object, path: str) -> list[object]:
    if not isinstance(value, list):
        raise SchemaError(f"expected a list, not {describe(value)}", path)
    return value


def _object(value: object, path: str) -> None:
    if not isinstance(value, dict):
        raise SchemaError(f"expected an object, not {describe(value)}", path)


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
_KEYS: Mapping[str, Mapping[str, _Rule]] = {  # by kind, what a reader may rely on; "?" marks keys that may be missing
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
             "used_pages": _COUNT, "empty_slots": _COUNT, "waiting_count?": _COUNT},
    "dropped": {"events": _COUNT},
    "abandon": {},
    "pages": {"change": OneOf(CHANGES).parse, "request": _text, "pages": _COUNTS, "used_pages": _COUNT},
    "fork": {"request": _ID, "parent": _ID},
    "token": {"request": _ID, "index": _COUNT, "token": _COUNT, "text": _text},
    "finish": {"request": _ID, "reason": OneOf(FINISH_REASONS).parse, "tokens": _COUNT, "error?": _text},
}
