"""M6 · A timeline in Chrome's trace-event format, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    python3 -m starter trace run.jsonl -o trace.json

    process "engine"      steps       [step 0     ][step 1     ][step 2  ] ...     and the counters: pages, budget,
    process "requests"    a           [prefill 0..7][decode 8  ][decode 9]            requests
                          b           [waiting                 ][prefill 0..5] ...

Each request, and each further sample of one, has its own track. A slice's arguments hold the rest: the reason in words,
the token that came out. Times are the engine's clock, in microseconds since the header; a step of a virtual clock takes
a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starter.errors import SchemaError
from starter.timeline import Event

ENGINE, REQUESTS = 1, 2  # process ids
STEPS = 1  # the engine's only thread


def write_chrome_trace(events: Iterable[Event], path: str | Path) -> None:
    """Write the trace of a timeline's events, the header first. SchemaError if the path cannot be written to."""
    document = {"displayTimeUnit": "ms", "traceEvents": chrome_trace(events)}
    try:
        Path(path).write_text(json.dumps(document, allow_nan=False, separators=(",", ":")), encoding="ascii")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SchemaError(f"cannot write the trace {path}: {error}") from None


def chrome_trace(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The trace events. O(events + chunks)."""
    writer = _Writer()
    for event in events:
        writer.observe(event)
    writer.end()
    return writer.trace


@dataclass
class _Track:
    """A request's track, and the slice that is open on it, if there is one."""

    thread: int
    name: str = ""
    since: float = 0.0
    arguments: dict[str, object] | None = None


class _Writer:
    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self._tracks: dict[str, _Track] = {}  # of live requests
        self._threads = REQUESTS  # the last number in use; a thread with a process's number is its main thread
        self._steps = _Track(STEPS)
        self._step = self._pages = 0
        self._start = self._now = 0.0

    def observe(self, event: Event) -> None:
        """Take one event into account; kinds without a handler are not shown."""
        self._now = event["time"]
        if event["step"] != self._step:
            self._end_step()
            self._step = event["step"]
        if handler := getattr(self, f"_on_{event['event']}", None):
            handler(event)

    def end(self) -> None:
        """The timeline is over: end the open slices."""
        self._end_step()
        for track in self._tracks.values():
            self._close(REQUESTS, track)

    # ------------------------------------------------------------------------------------ what happens

    def _on_header(self, event: Event) -> None:
        self._start, self._pages = event["time"], event["num_pages"]
        for process, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
            self._emit("M", process, 0, "process_name", args={"name": name})
        self._emit("M", ENGINE, STEPS, "thread_name", args={"name": "steps"})

    def _on_submit(self, event: Event) -> None:
        track = self._begin(event["request"])
        self._open(track, "waiting", prompt_tokens=len(event["prompt_tokens"]), max_tokens=event["max_tokens"])

    def _on_fork(self, event: Event) -> None:
        self._begin(event["request"])
        self._instant(event["request"], f"sample of {event['parent']}")

    def _begin(self, request: str) -> _Track:
        self._threads += 1
        self._emit("M", REQUESTS, self._threads, "thread_name", args={"name": request})
        self._emit("M", REQUESTS, self._threads, "thread_sort_index", args={"sort_index": self._threads})
        self._tracks[request] = _Track(self._threads)
        return self._tracks[request]

    def _on_step(self, event: Event) -> None:
        reasons = event["reasons"]
        scheduled = sum(count for _, _, count, _ in event["chunks"])
        self._open(self._steps, f"step {event['step']}", scheduled=scheduled, budget=event["budget"],
                   admitted=event["admitted"], preempted=event["preempted"])
        for request in event["preempted"]:
            self._turn(request, "preempted", reasons)
        for request, start, count, phase in event["chunks"]:
            self._turn(request, f"{phase} {start}" if count == 1 else f"{phase} {start}..{start + count - 1}", reasons)
        self._count("budget", used=scheduled, left=event["budget"] - scheduled)
        self._count("requests", running=len(event["running"]),
                    waiting=event.get("waiting_count", len(event["waiting"])))

    def _turn(self, request: str, name: str, reasons: dict[str, str]) -> None:
        if track := self._tracks.get(request):
            self._close(REQUESTS, track)
            self._open(track, name, **({"reason": reasons[request]} if request in reasons else {}))

    def _end_step(self) -> None:
        self._close(ENGINE, self._steps)
        for track in self._tracks.values():
            if track.name.startswith(("prefill", "decode")):
                self._close(REQUESTS, track)

    def _on_abandon(self, event: Event) -> None:
        self._end_step()

    def _on_pages(self, event: Event) -> None:
        self._count("pages", used=event["used_pages"], free=self._pages - event["used_pages"])

    def _on_token(self, event: Event) -> None:
        self._instant(event["request"], f"token {event['index']}", token=event["token"], text=event["text"])

    def _on_cancel(self, event: Event) -> None:
        self._instant(event["request"], "cancel")

    def _on_finish(self, event: Event) -> None:
        self._instant(event["request"], f"finish: {event['reason']}",
                      **{key: event[key] for key in ("tokens", "error") if key in event})
        if track := self._tracks.pop(event["request"], None):
            self._close(REQUESTS, track)

    def _on_fault(self, event: Event) -> None:
        self._emit("i", ENGINE, STEPS, f"fault: {event['kind']}", s="g", args=event["fault"])

    # ---------------------------------------------------------------------------------- trace events

    def _open(self, track: _Track, name: str, **arguments: object) -> None:
        track.name, track.since, track.arguments = name, self._now, arguments

    def _close(self, process: int, track: _Track) -> None:
        """End the open slice; one that took no time is left out."""
        if track.name and self._now > track.since:
            self._emit("X", process, track.thread, track.name, since=track.since, args=track.arguments,
                       dur=self._micros(self._now) - self._micros(track.since))
        track.name = ""

    def _instant(self, request: str, name: str, **arguments: object) -> None:
        if track := self._tracks.get(request):
            self._emit("i", REQUESTS, track.thread, name, s="t", args=arguments)

    def _count(self, name: str, **series: int) -> None:
        self._emit("C", ENGINE, 0, name, args=series)

    def _emit(self, phase: str, process: int, thread: int, name: str, since: float | None = None,
              **fields: object) -> None:
        moment = self._micros(self._now if since is None else since)
        self.trace.append({"ph": phase, "pid": process, "tid": thread, "ts": moment, "name": name, **fields})

    def _micros(self, seconds: float) -> int:
        return round((seconds - self._start) * 1e6)
