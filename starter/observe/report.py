"""M6 · One HTML file that replays a run: pages, block tables, batches, and every wait with its reason.

    python3 -m starter report run.jsonl -o report.html        from a timeline on disk
    write_report(engine.timeline.events, "report.html")       from an engine

The file needs nothing else: no network, no server, no library. A timeline is folded here into a *model*, plain JSON
between <script> tags of the page; the files in ``viewer/`` draw it (read ``replay.js`` first).

    events   submit a | step 0 | pages a | token a | submit b | step 1 | pages b | finish a | ...
    frames   [-------- frame 0 ----------] [token: out of 0]...[-- frame 1 ------]  ...         [end]

A *frame* is what one step looks like while it computes: what has changed since the frame before (``ops``, in order),
the batch, the reasons, and what came out of it. A last frame holds what happened after the last step. Sentences that
differ only in their numbers are stored once, with the numbers apart: reasons are most of a timeline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from starter.errors import SchemaError
from starter.metrics import MetricsCollector
from starter.schema import MAX_PAGES
from starter.timeline import Event

MODEL_VERSION = 1
SCRIPTS = ("words.js", "dom.js", "replay.js", "story.js", "panel.js", "gantt.js", "pool.js", "charts.js", "cards.js",
           "storycard.js", "pointing.js", "report.js")
PHASES = ("waiting", "prefill", "decode", "preempted", "idle")  # idle: runs, but has no chunk in this step
TABLE_CHANGES = ("allocate", "share", "copy", "release", "swap_out", "swap_in", "publish", "evict")
GAP = "\0"  # in place of a number in a sentence
_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,14})(?![0-9])")


def write_report(events: Iterable[Event], path: str | Path) -> None:
    """Write the report of a timeline's events. SchemaError for events that are not a timeline's, and for a path that
    cannot be written to."""
    html = report_html(events)
    try:
        Path(path).write_text(html, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SchemaError(f"cannot write the report {path}: {error}") from None


def report_html(events: Iterable[Event]) -> str:
    """The whole page. Deterministic: the same events give the same text."""
    model = json.dumps(build_model(events), separators=(",", ":"))  # ASCII: half surrogates stay \ud800
    viewer = resources.files(__package__) / "viewer"

    def read(name: str) -> str:
        return (viewer / name).read_text(encoding="utf-8")

    parts = {"STYLE": read("report.css"), "SCRIPT": "\n".join(map(read, SCRIPTS)),
             "MODEL": model.replace("<", "\\u003c")}  # so that no text in it can end its <script>
    return re.sub(r"\{\{(STYLE|SCRIPT|MODEL)\}\}", lambda match: parts[match[1]], read("report.html"))


def build_model(events: Iterable[Event]) -> dict[str, Any]:
    """Fold a timeline from its header on into the JSON that the viewer draws. O(events)."""
    builder, collector, number = _Builder(), MetricsCollector(), 0
    for number, event in enumerate(events, start=1):
        try:
            builder.observe(event)
            collector.observe(event)
        except SchemaError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise SchemaError(f"event {number} is not what a timeline holds ({type(error).__name__}: {error}); "
                              f"see timeline.py for what each kind of event says") from error
    if not number:
        raise SchemaError("a report needs a timeline's events; there are none")
    return {"version": MODEL_VERSION, **builder.finish(), "metrics": collector.snapshot().to_dict()}


class _Builder:
    """The fold: one method for each kind of event; unknown kinds are passed over."""

    def __init__(self) -> None:
        self.run: Event = {}
        self.pieces: list[str] = []  # of the vocabulary, where the header holds it
        self.requests: list[dict[str, Any]] = []
        self.latest: dict[str, int] = {}  # id -> the last request, or other holder of pages, that has it
        self.frames: list[dict[str, Any]] = []
        self.sentences: dict[str, int] = {}
        self.ops: list[list[Any]] = []  # changes of the frame in the making, or of the next one
        self.planning = False  # whether events still belong to the last step's plan
        self.waiting: list[int] = []
        self.unlisted = False  # a step has named only the first of its queue: some requests that wait are in no list
        self.end: tuple[int, float] = 0, 0.0

    def observe(self, event: Event) -> None:
        """Take one event."""
        kind, self.end = event["event"], (event["step"], event["time"])
        if not self.run and kind != "header":
            raise SchemaError("a report needs a timeline from its beginning: the first event must be the header "
                              "(an engine keeps the last events in memory and its header in engine.timeline.header; "
                              "a timeline written to a file is complete)")
        if kind in ("submit", "token", "cancel", "finish", "fork", "refuse") or event["step"] > self._last_step():
            self._end_plan()
        handler = getattr(self, f"_on_{kind}", None)
        if handler:
            handler(event)

    def finish(self) -> dict[str, Any]:
        """The model, without its metrics."""
        if not self.run:
            raise SchemaError("a report needs a timeline's header")
        self._end_plan()
        for request in self.requests:
            if "finished" not in request and "outside" not in request:
                self._fill(request, len(self.frames))
        step, time = self.end
        last = {"step": step, "time": time, "end": True, "ops": self.ops}
        return {"run": self.run, "phases": PHASES, "requests": self.requests, "sentences": list(self.sentences),
                "frames": [*self.frames, last]}

    def _last_step(self) -> int:
        return int(self.frames[-1]["step"]) if self.frames else -1

    def _end_plan(self) -> None:
        """Further changes belong to the next frame."""
        if self.planning:
            self.planning, self.ops = False, []

    # ------------------------------------------------------------------------------------------- kinds

    def _on_header(self, event: Event) -> None:
        settings, pages = event["settings"], event["num_pages"]
        if self.run:
            raise SchemaError("a second header: a report shows one run")
        if not isinstance(pages, int) or not 1 <= pages <= MAX_PAGES:
            raise SchemaError(f"num_pages must be an integer from 1 to {MAX_PAGES}, not {pages!r}", "/num_pages")
        hidden = ("event", "step", "time", "version", "tokenizer")
        about = {key: value for key, value in event.items() if key not in hidden}
        self.run = {**about, "began": event["time"], "page_size": settings["page_size"], "num_pages": pages,
                    "settings": dict(settings)}
        if tokenizer := event.get("tokenizer"):  # then prompts can be shown as text
            self.pieces = [*([""] * len(tokenizer["specials"])), *tokenizer["characters"]]

    def _on_submit(self, event: Event) -> None:
        tokens = event["prompt_tokens"]
        text = {"text": "".join(self.pieces[token] for token in tokens)} if self.pieces else {}
        self._open(event, prompt=len(tokens), max=event["max_tokens"], **text)

    def _on_fork(self, event: Event) -> None:
        parent = self._find(event["parent"])
        origin = self.requests[parent]
        self._open(event, prompt=origin["prompt"], max=origin["max"], parent=parent)

    def _on_step(self, event: Event) -> None:
        self._end_plan()
        find, number = self._find, len(self.frames)
        chunks = [(find(request), start, count, PHASES.index(phase))
                  for request, start, count, phase in event["chunks"]]
        waiting, running = [*map(find, event["waiting"])], [*map(find, event["running"])]
        frame: dict[str, Any] = {
            "step": event["step"], "time": event["time"], "budget": event["budget"], "computed": event["computed"],
            "used": event["used_pages"], "empty": event["empty_slots"], "running": running,
            "chunks": [part for chunk in chunks for part in chunk],
            "why": [[find(request), *self._fold(reason)] for request, reason in event["reasons"].items()],
            "ops": self.ops, "out": []}
        if waiting != self.waiting:
            self.waiting = frame["waiting"] = waiting
        if "waiting_count" in event:
            self.unlisted, frame["waiting_count"] = True, event["waiting_count"]
        for name in ("admitted", "preempted"):
            if event[name]:
                frame[name] = [*map(find, event[name])]
        if event["found"]:
            frame["found"] = [[find(request), int(tokens)] for request, tokens in event["found"].items()]
        self.frames.append(frame)
        self.planning = True
        for request in frame.get("preempted", ()):
            self.requests[request]["preempted"] = True
        phases = {**dict.fromkeys(running, "idle"), **dict.fromkeys(waiting, "waiting"),
                  **{request: PHASES[phase] for request, _, _, phase in chunks}}
        for request, phase in phases.items():
            self._fill(self.requests[request], number)
            self._extend(self.requests[request], phase, number, number)

    def _on_abandon(self, event: Event) -> None:
        if self.frames:
            self.frames[-1]["chunks"] = []  # nothing of it was computed

    def _on_pages(self, event: Event) -> None:
        if event["change"] not in TABLE_CHANGES:
            return
        pages = list(event["pages"])
        if not all(isinstance(page, int) and 0 <= page < self.run["num_pages"] for page in pages):
            raise SchemaError(f"the pages of this run are 0 to {self.run['num_pages'] - 1}, not {pages!r}", "/pages")
        self._note(event["change"], self._holder(event.get("request")), pages)

    def _on_token(self, event: Event) -> None:
        number = self._find(event["request"])
        request = self.requests[number]
        request["tokens"] += 1
        request.setdefault("first", event["time"])
        request["last"] = event["time"]
        if "parent" not in request:  # further samples of a request have no time of their own to a first token
            request["ttft"] = request["first"] - request["submitted_at"]
        self.frames[-1]["out"].append([number, event["token"], str(event["text"])])

    def _on_cancel(self, event: Event) -> None:
        self._note("cancel", self._find(event["request"]))

    def _on_finish(self, event: Event) -> None:
        number = self._find(event["request"])
        request = self.requests[number]
        request["reason"], request["finished"] = str(event["reason"]), len(self.frames)
        self._fill(request, len(self.frames))
        if event.get("error"):
            request["error"] = str(event["error"])
        if request["tokens"] >= 2:
            request["tpot"] = (request["last"] - request["first"]) / (request["tokens"] - 1)
        self._note("finish", number)

    def _on_refuse(self, event: Event) -> None:
        self._note("refuse", str(event["request"]), str(event["error"]))

    def _on_fault(self, event: Event) -> None:
        self._note("fault", str(event["kind"]), json.dumps(event["fault"]))

    # ------------------------------------------------------------------------------------------ inside

    def _open(self, event: Event, **fields: object) -> None:
        """A new request; its id may have been another's before."""
        self.latest[event["request"]] = len(self.requests)
        self._note("fork" if "parent" in fields else "submit", len(self.requests))
        self.requests.append({"id": str(event["request"]), **fields, "submitted": len(self.frames),
                              "submitted_at": event["time"], "tokens": 0, "spans": []})

    def _find(self, request_id: str) -> int:
        if request_id not in self.latest:
            raise SchemaError(f"request {request_id!r} was never submitted in these events; a report needs the whole "
                              f"timeline (a timeline written to a file is complete)")
        return self.latest[request_id]

    def _holder(self, request_id: str | None) -> int | None:
        """The owner of a table, which need not be a request (a fault may hold pages). None: the pool itself."""
        if request_id is not None and request_id not in self.latest:
            self.latest[request_id] = len(self.requests)
            self.requests.append({"id": str(request_id), "outside": True, "submitted": len(self.frames), "tokens": 0,
                                  "spans": []})
        return None if request_id is None else self.latest[request_id]

    def _note(self, kind: str, *about: object) -> None:
        self.ops.append([kind, *about])

    def _fold(self, sentence: str) -> list[int]:
        """A sentence -> its number among those that differ from it in their numbers only, and its numbers."""
        numbers = [] if GAP in sentence else [int(digits) for digits in _NUMBER.findall(sentence)]
        pattern = _NUMBER.sub(GAP, sentence) if numbers else sentence
        return [self.sentences.setdefault(pattern, len(self.sentences)), *numbers]

    def _fill(self, request: dict[str, Any], end: int) -> None:
        """In frames before ``end`` in which it lives and has no phase, the request waits, too far back to be listed."""
        first = request["spans"][-1][1] + 1 if request["spans"] else request["submitted"]
        if self.unlisted and first < end:
            self._extend(request, "waiting", first, end - 1)

    def _extend(self, request: dict[str, Any], phase: str, first: int, last: int) -> None:
        """More frames in a phase: the Gantt chart's bars are [first frame, last frame, phase]."""
        if phase == "waiting" and request.get("preempted"):
            phase = "preempted"
        number, spans = PHASES.index(phase), request["spans"]
        if spans and spans[-1][1:] == [first - 1, number]:
            spans[-1][1] = last
        else:
            spans.append([first, last, number])
