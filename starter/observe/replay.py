"""M6 · Replay: do to a fresh engine what a timeline says was done to another, and see that everything else follows.

    timeline ──submit, cancel, inject, budgets, what outsiders did to pages──▶ a fresh engine
        └──────────────── must be equal, event for event ◀──────────────────── its timeline

    outcome = Replay(read_timeline("run.jsonl"), loaded).run()
    print(outcome.difference or f"{outcome.compared} events, all equal")

On a virtual clock the times must be equal, too; on a real clock all but the times. What came from other threads while
a step was computed is done again while it is computed; a step that was interrupted is interrupted again. A refusal
changed nothing and is taken as told. Five things cannot be told from a timeline, and may end in a difference: what
somebody outside does to the pages of a running request other than forking them or through a fault; pages that
outsiders asked for in vain, where a RefusedPages fault counts the asks; how far a step had come when it was
interrupted, where a fault counts the decoder's calls; a plan that was interrupted before it was told; and whether
several cancels after a token came from who heard of it or after the step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from starter.backend import Batch, load_backend
from starter.base.fault_kinds import HOLDER
from starter.base.strict_json import ListOf, Nullable
from starter.base.wings import wing
from starter.core import HasId, ModelRunner
from starter.core import Outcome as Row
from starter.engine import InferenceEngine
from starter.errors import EngineError, RequestError, UnknownRequestError
from starter.kv_cache import KVHandle
from starter.model import Loaded, load_scenario_model
from starter.schema import (
    ENGINE_SHAPE,
    FAULT_SHAPE,
    MODEL_SHAPE,
    QUANTIZATION_SHAPE,
    REQUEST_SHAPE,
    SCENARIO_VERSION,
    TOKENIZER_SHAPE,
    WEIGHTS_SHAPE,
    Request,
    SafetensorsWeights,
    Scenario,
)
from starter.timeline import Event, VirtualClock

FREE_IN_HEADER = ("engine", "checkpoint", "weights")  # a newer engine, moved files: weights_sha256 says what counts


@dataclass(frozen=True)
class Difference:
    """The first event that is not the same. ``number`` is its line in the file; None: nothing more happened there."""

    number: int
    step: int
    recorded: Event | None
    replayed: Event | None
    problem: str

    def __str__(self) -> str:
        sides = [f"  {name}: {'nothing' if event is None else json.dumps(event, ensure_ascii=False)}"
                 for name, event in (("timeline", self.recorded), ("replay  ", self.replayed))]
        return "\n".join([f"line {self.number}, step {self.step}: {self.problem}", *sides])


@dataclass(frozen=True)
class Outcome:
    """How many events were equal, and the first that was not. ``surplus``: events of a step in the middle of which the
    timeline breaks off, as after a crash."""

    compared: int
    surplus: int
    difference: Difference | None


class _Interrupted(BaseException):
    """The step is interrupted here, as it was then."""


class Replay:
    """One timeline and the engine that runs it again."""

    def __init__(self, recorded: Sequence[Event], loaded: Loaded,
                 progress: Callable[[str], None] = lambda text: None) -> None:
        self._recorded, self._progress = recorded, progress
        self._compared = self._surplus = 0
        self._difference: Difference | None = None
        step_seconds = recorded[0]["step_seconds"]
        self._timed = step_seconds is not None
        self._engine = InferenceEngine(loaded, ENGINE_SHAPE.parse(recorded[0]["settings"], "/settings"),
                                       time.monotonic if step_seconds is None else VirtualClock(step_seconds))
        self._engine.runner = _Watched(self._engine, self)
        self._outsiders = _Outsiders(self._engine)
        self._expect(self._engine.timeline.header)
        self._engine.timeline.listen(self._expect)

    def run(self) -> Outcome:
        """Play the timeline to its end or to the first difference."""
        while self._difference is None and (event := self._next()) is not None:
            before = self._compared
            self._progress(f"{before} of {len(self._recorded)} events are the same")
            try:
                self._act(event)
            except _Interrupted:
                pass
            except EngineError as error:
                self._differ(event, None, f"the replay fails: {type(error).__name__}: {error}")
            if self._compared == before:
                self._differ(event, None, "the replay does nothing here")
        return Outcome(self._compared, self._surplus, self._difference)

    # ---------------------------------------------------------------------------------------- comparing

    def _next(self) -> Event | None:
        """The first event that was not yet compared."""
        return self._recorded[self._compared] if self._compared < len(self._recorded) else None

    def _expect(self, event: Event) -> None:
        """Hear an event of the replay: it must be the next one of the timeline."""
        recorded = self._next()
        if recorded is None or self._difference:
            self._surplus += self._difference is None
            return
        here, there = self._what_counts(recorded), self._what_counts(event)
        if here == there:
            self._compared += 1
            if event["event"] == "token":
                self._cancel_as_a_listener()
            return
        keys = [key for key in {**here, **there} if here.get(key, ...) != there.get(key, ...)]
        self._differ(recorded, event, f"{recorded['event']} events differ in {', '.join(keys)}"
                     if recorded["event"] == event["event"] else
                     f"a {recorded['event']} event in the timeline, a {event['event']} event in the replay")

    def _cancel_as_a_listener(self) -> None:
        """Who heard of a token may have cancelled a request at once, in the middle of the step: it is done again here,
        also where the caller did it after the step's last token, which comes to the same."""
        event = self._next()
        if event and event["event"] == "cancel":
            with suppress(UnknownRequestError):  # a timeline that does not fit: the next act says so
                self._engine.cancel(event["request"])

    def _what_counts(self, event: Event) -> Event:
        """The event as plain JSON, without what may differ."""
        free = (*(() if self._timed else ("time",)), *(FREE_IN_HEADER if event["event"] == "header" else ()))
        plain: Event = json.loads(json.dumps({key: value for key, value in event.items() if key not in free}))
        return plain

    def _differ(self, recorded: Event, replayed: Event | None, problem: str) -> None:
        if self._difference is None:
            self._difference = Difference(self._compared + 1, recorded["step"], recorded, replayed, problem)

    # ------------------------------------------------------------------------------------------- acting

    def _act(self, event: Event) -> None:
        """Do what came from outside; anything else must be what the next step brings."""
        engine = self._engine
        if event["event"] == "submit":
            self._submit(_request(event, self._compared + 1))
        elif event["event"] == "refuse":
            engine.record("refuse", request=event["request"], error=event["error"])
        elif event["event"] == "cancel":
            engine.cancel(event["request"])
        elif event["event"] == "inject":
            engine.inject(ListOf(FAULT_SHAPE).parse(event["faults"], "/faults"))
        elif event["event"] == "lift":
            engine.lift_faults()
        elif self._is_from_outside(event):
            self._outsiders.act(self._recorded[self._compared:self._compared + 4])
        else:
            budgets = (event["budget"] for event in self._recorded[self._compared:] if event["event"] == "step")
            engine.step(next(budgets, None))  # None: the timeline breaks off before the step itself

    def _is_from_outside(self, event: Event) -> bool:
        if event["event"] != "pages":
            return event["event"] in ("submit", "refuse", "cancel", "inject", "lift")
        return event["request"] != HOLDER and not self._engine.scheduler.is_live(event["request"])

    def _submit(self, request: Request) -> None:
        with suppress(UnknownRequestError):
            self._engine.poll(request.request_id)  # an earlier request of this name was read to its end
        with suppress(RequestError):  # the refusal is an event, and not the one that was expected
            self._engine.submit(request.prompt_tokens, request.max_tokens, request_id=request.request_id,
                                sampling=request.sampling, priority=request.priority,
                                stop_tokens=request.stop_tokens, cache_salt=request.cache_salt)

    def computing(self) -> None:
        """A step is being computed: now other threads did what they did. Interrupt it if it was interrupted."""
        while self._difference is None and (event := self._next()) is not None \
                and event["step"] == self._engine.steps and self._is_from_outside(event):
            before = self._compared
            self._act(event)
            if self._compared == before:
                break
        event = self._next()
        if self._difference or (event is not None and event["event"] == "abandon"):
            raise _Interrupted


S = TypeVar("S", bound=HasId)


class _Watched(ModelRunner):
    """Computes as the engine's own runner does, and says when."""

    def __init__(self, engine: InferenceEngine, replay: Replay) -> None:
        super().__init__(engine.model, engine.kv.store if engine.settings.use_cache else None)
        self._replay = replay

    def run(self, samples: Sequence[S], batch: Batch) -> dict[S, Row]:
        self._replay.computing()
        rows = super().run(samples, batch)
        self._replay.computing()  # once more, after the faults that happened
        return rows


class _Outsiders:
    """Who holds pages without being a request, and what they do with them, again."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine, self._kv = engine, engine.kv
        self._handles: list[KVHandle] = []

    def act(self, events: Sequence[Event]) -> None:
        """Repeat the act that the first of these events tell: what it evicts, copies and allocates comes before a
        token is appended."""
        told: dict[str, list[int]] = {}
        name = events[0]["request"]
        for event in events:
            if event["event"] != "pages" or event["change"] in told or event["request"] != name:
                break
            told[event["change"]] = event["pages"]
            if event["change"] in ("release", "append"):
                break
        first = next((change for change in told if change != "evict"), "")
        if first == "release":
            self._release(name, told["release"])
        elif first == "share":
            self._handles.append(self._kv.fork(self._parent(told["share"]), name))
        elif first == "allocate" and not _grows(told):
            self._handles.append(self._kv.allocate(name, len(told["allocate"]) * self._kv.page_size))
        elif "append" in told:
            self._append(name, told)

    def _release(self, name: str, pages: Sequence[int]) -> None:
        handle = self._find(name, pages)
        self._kv.release(handle)
        self._handles.remove(handle)

    def _append(self, name: str, told: Mapping[str, Sequence[int]]) -> None:
        """The table was as it is told, less the page it grew by, and with the copied page in place of the copy."""
        if len(told.get("copy", (0, 0))) != 2:
            raise RequestError(f"a copy is a page and its copy, not {list(told['copy'])}")
        before = list(told["append"])[:len(told["append"]) - len(told.get("allocate", ()))]
        if "copy" in told:
            before = [told["copy"][0] if page == told["copy"][1] else page for page in before]
        zeros = [0.0] * self._kv.width  # nobody else sees what an outsider writes
        self._kv.append(self._find(name, before), zeros, zeros)

    def _find(self, name: str, pages: Sequence[int]) -> KVHandle:
        for handle in self._handles:
            if handle.request_id == name and self._kv.pages(handle) == tuple(pages):
                return handle
        raise RequestError(f"{name!r}, which is no request, holds no table of pages {list(pages)}")

    def _parent(self, pages: Sequence[int]) -> KVHandle:
        scheduler, kv = self._engine.scheduler, self._kv
        running = [scheduler.handle(name) for name in scheduler.live if scheduler.is_running(name)]
        for handle in (*running, *self._handles):
            if kv.owns(handle) and kv.pages(handle)[:kv.pages_for(kv.length(handle))] == tuple(pages):
                return handle
        raise RequestError(f"no table begins with the pages {list(pages)}, so none can have been forked")


def _grows(told: Mapping[str, Sequence[int]]) -> bool:
    """Was the page allocated for a table that has others, whose next token goes there? (A table that has none is as
    good as a new one.)"""
    table = told.get("append", ())
    return len(table) > 1 and list(table[-1:]) == told["allocate"]


def _request(event: Event, number: int) -> Request:
    """The request of a submit event. SchemaError names the line."""
    fields = {key: event[key] for key in REQUEST_SHAPE.fields if key in event}
    request: Request = REQUEST_SHAPE.parse({"request_id": event["request"], **fields}, f"/line {number}")
    return request


def load_recorded(header: Event, folder: Path = Path(), checkpoint: str | Path | None = None,
                  device: str | None = None) -> Loaded:
    """The model that a timeline's header names. ``checkpoint`` is the path of a checkpoint or of a scenario's
    safetensors file, which the header knows by its name only; else the latter is looked for from ``folder`` on.
    ``device`` is that of backend "cuda", of which the header does not tell."""
    backend = load_backend(header["backend"], **({} if device is None else {"device": device}))
    quantization = Nullable(QUANTIZATION_SHAPE).parse(header.get("quantization"), "/quantization")
    if "weights" in header and "tokenizer" in header:
        weights = WEIGHTS_SHAPE.parse(header["weights"], "/weights")
        if isinstance(weights, SafetensorsWeights):
            if checkpoint is not None:
                place = Path(checkpoint) / Path(weights.path).name if Path(checkpoint).is_dir() else Path(checkpoint)
                folder, weights = place.parent, SafetensorsWeights(place.name, weights.sha256)
            elif not (folder / weights.path).is_file():
                raise RequestError(f"the weights {weights.path} are not beside this timeline: say where they are with "
                                   f"--checkpoint PATH")
        scenario = Scenario(
            SCENARIO_VERSION, header.get("scenario", ""), MODEL_SHAPE.parse(header["model"], "/model"), weights,
            TOKENIZER_SHAPE.parse(header["tokenizer"], "/tokenizer"), (), quantization=quantization, folder=folder)
        return load_scenario_model(scenario, backend)
    if "checkpoint" not in header:
        raise RequestError("this timeline names neither a scenario nor a checkpoint: its engine was made in code; only "
                           "that code can replay it, with Replay(events, loaded)")
    if checkpoint is None:
        raise RequestError(f"this timeline was made with the checkpoint {header['checkpoint']}: say where it is with "
                           f"--checkpoint PATH")
    reader = wing("checkpoints.load", f"the checkpoint {checkpoint}")
    loaded: Loaded = reader.load_checkpoint_model(checkpoint, backend, quantization)
    return loaded
