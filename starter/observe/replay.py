"""M6 · Replay: do to a fresh engine what a timeline says was done to another, and check that all else follows.

    timeline ──submit, cancel, inject, budgets, what outsiders did to pages──▶ a fresh engine
        └──────────────── must be equal, event for event ◀──────────────────── its timeline

    outcome = Replay(read_timeline("run.jsonl"), loaded).run()
    print(outcome.difference or f"{outcome.compared} events, all equal")

On a virtual clock the times must be equal, too; on a real clock they are ignored. What other threads did while a step
was computed is repeated while that step is computed; an interrupted step is interrupted again. A refusal changed
nothing and is copied from the timeline. A timeline does not show five things, any of which may end in a difference:

    - what an outsider did to the pages of a running request, other than fork them or through a fault
    - pages that outsiders asked for in vain, where a RefusedPages fault counts the asks
    - how far a step had come when it was interrupted, where a fault counts the decoder's calls
    - a plan that was interrupted before its event was written
    - whether several cancels after a token came from a listener or after the step
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
from starter.errors import EngineError, RequestError, SchemaError, UnknownRequestError
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
    SamplingParams,
    Scenario,
)
from starter.timeline import Event, VirtualClock

FREE_IN_HEADER = ("engine", "checkpoint", "weights")  # may differ: newer engine, moved files; not weights_sha256


@dataclass(frozen=True)
class Difference:
    """The first event that is not the same; ``number`` is its line in the file. An event is None where that side has
    ended."""

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
    """How many events were equal, and the first that was not. ``surplus``: how many more events the replay has of the
    step within which the timeline breaks off, as after a crash."""

    compared: int
    surplus: int
    difference: Difference | None


class _Interrupted(BaseException):
    """Interrupts the step where it was interrupted when it was recorded."""


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
        """The first event that has not been compared yet."""
        return self._recorded[self._compared] if self._compared < len(self._recorded) else None

    def _expect(self, event: Event) -> None:
        """Compare an event of the replay: it must be the next one of the timeline."""
        recorded = self._next()
        if recorded is None or self._difference:
            self._surplus += self._difference is None
            return
        here, there = self._comparable(recorded), self._comparable(event)
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
        """A listener may have cancelled a request on a token, in the middle of the step: cancel it here again. If the
        caller did so after the step's last token, the result is the same."""
        event = self._next()
        if event and event["event"] == "cancel":
            with suppress(UnknownRequestError):  # the timeline does not fit; the next act reports it
                self._engine.cancel(event["request"])

    def _comparable(self, event: Event) -> Event:
        """The event as plain JSON, without the fields that may differ."""
        free = (*(() if self._timed else ("time",)), *(FREE_IN_HEADER if event["event"] == "header" else ()))
        plain: Event = json.loads(json.dumps({key: value for key, value in event.items() if key not in free}))
        return plain

    def _differ(self, recorded: Event, replayed: Event | None, problem: str) -> None:
        if self._difference is None:
            self._difference = Difference(self._compared + 1, recorded["step"], recorded, replayed, problem)

    # ------------------------------------------------------------------------------------------- acting

    def _act(self, event: Event) -> None:
        """Repeat an event that came from outside; any other must follow from running the next step."""
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
        with suppress(RequestError):  # the refusal is an event, which is compared and differs
            self._engine.submit(request.prompt_tokens, request.max_tokens, request_id=request.request_id,
                                sampling=request.sampling, priority=request.priority,
                                stop_tokens=request.stop_tokens, cache_salt=request.cache_salt)

    def computing(self) -> None:
        """Called while a step is computed: repeat what other threads did then, and interrupt the step if it was."""
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
    """The engine's own runner, which calls the replay before and after it computes."""

    def __init__(self, engine: InferenceEngine, replay: Replay) -> None:
        super().__init__(engine.model, engine.kv.store if engine.settings.use_cache else None)
        self._replay = replay

    def run(self, samples: Sequence[S], batch: Batch) -> dict[S, Row]:
        self._replay.computing()
        rows = super().run(samples, batch)
        self._replay.computing()  # once more, after the faults that happened
        return rows


class _Outsiders:
    """Repeats what holders of pages did that are not requests."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine, self._kv = engine, engine.kv
        self._handles: list[KVHandle] = []

    def act(self, events: Sequence[Event]) -> None:
        """Repeat the act that the first of these events record: an append comes after what it evicts, copies and
        allocates."""
        changes: dict[str, list[int]] = {}
        name = events[0]["request"]
        for event in events:
            if event["event"] != "pages" or event["change"] in changes or event["request"] != name:
                break
            changes[event["change"]] = event["pages"]
            if event["change"] in ("release", "append"):
                break
        first = next((change for change in changes if change != "evict"), "")
        if first == "release":
            self._release(name, changes["release"])
        elif first == "share":
            self._handles.append(self._kv.fork(self._parent(changes["share"]), name))
        elif first == "allocate" and not _grows(changes):
            self._handles.append(self._kv.allocate(name, len(changes["allocate"]) * self._kv.page_size))
        elif "append" in changes:
            self._append(name, changes)

    def _release(self, name: str, pages: Sequence[int]) -> None:
        handle = self._find(name, pages)
        self._kv.release(handle)
        self._handles.remove(handle)

    def _append(self, name: str, changes: Mapping[str, Sequence[int]]) -> None:
        """Before the append, the table lacked the page it grew by, and had the copied page in place of the copy."""
        if len(changes.get("copy", (0, 0))) != 2:
            raise RequestError(f"a copy is a page and its copy, not {list(changes['copy'])}")
        before = list(changes["append"])[:len(changes["append"]) - len(changes.get("allocate", ()))]
        if "copy" in changes:
            before = [changes["copy"][0] if page == changes["copy"][1] else page for page in before]
        zeros = [0.0] * self._kv.width  # only the outsider itself would read them
        self._kv.append(self._find(name, before), zeros, zeros)

    def _find(self, name: str, pages: Sequence[int]) -> KVHandle:
        for handle in self._handles:
            if handle.request_id == name and self._kv.pages(handle) == tuple(pages):
                return handle
        raise RequestError(f"{name!r}, which is not a request, holds no table of pages {list(pages)}")

    def _parent(self, pages: Sequence[int]) -> KVHandle:
        scheduler, kv = self._engine.scheduler, self._kv
        running = [scheduler.handle(name) for name in scheduler.live if scheduler.is_running(name)]
        for handle in (*running, *self._handles):
            if kv.owns(handle) and kv.pages(handle)[:kv.pages_for(kv.length(handle))] == tuple(pages):
                return handle
        raise RequestError(f"no table begins with the pages {list(pages)}, so none can have been forked")


def _grows(changes: Mapping[str, Sequence[int]]) -> bool:
    """Whether the page was allocated to grow a table that has pages. (One without pages is as good as a new one.)"""
    table = changes.get("append", ())
    return len(table) > 1 and list(table[-1:]) == changes["allocate"]


def _request(event: Event, number: int) -> Request:
    """The request of a submit event, as ``submit`` would take it in code: what it took once, it takes again, also where
    a scenario file has narrower limits. SchemaError names the line."""
    fields = {key: event[key] for key in REQUEST_SHAPE.fields if key in event}
    try:
        sampling = SamplingParams(**fields.pop("sampling", {}))
        return Request(event["request"], sampling=sampling, **fields)
    except (RequestError, TypeError) as error:  # TypeError: sampling has a key that is none
        raise SchemaError(str(error), f"/line {number}") from None


def load_recorded(header: Event, folder: Path = Path(), checkpoint: str | Path | None = None,
                  device: str | None = None) -> Loaded:
    """The model that a timeline's header names. ``checkpoint`` is the path of a checkpoint or of a scenario's
    safetensors file, of which the header holds only the name; without it, the latter is looked up from ``folder``.
    ``device`` is that of backend "cuda", which the header does not name."""
    backend = load_backend(header["backend"], **({} if device is None else {"device": device}))
    if backend.name != header["backend"]:
        raise RequestError(f"this timeline was made by backend {header['backend']!r}, which needs the package "
                           f"starter/backends; this copy computes with {backend.name!r} instead")
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
