"""M6 · The engine's pen: it turns what happens into timeline events, and the timeline into metrics.

While a step is being planned, the page manager and the faults already tell what they do; that is written after the
step's own event, so that a timeline reads in the order of cause and effect. A step's tokens have one time and are
written together, as far as nothing else happens between them. Everything else is written at once.
"""

from __future__ import annotations

from collections.abc import Callable

from .kv_cache import KVCacheManager
from .metrics import Metrics, MetricsCollector
from .requests import TokenFields
from .scheduler import ScheduleDecision
from .schema import REQUEST_SHAPE, Request
from .timeline import TIMELINE_VERSION, Event, Timeline, VirtualClock


class Recorder:
    """Stamps every event with the number of completed steps and the clock's time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.steps = 0
        self.now = clock()  # the time of the last event
        self.tokens: dict[str, TokenFields] = {}  # the last ones, of sequences, that are not yet written
        self.timeline = Timeline()
        self._collector = MetricsCollector()
        self._held_back: list[tuple[str, Event]] | None = None  # while a step is being planned
        self._under_way = False  # a step was planned, and is not yet completed

    def metrics(self) -> Metrics:
        """What the events so far add up to."""
        return self._collector.snapshot()

    def raise_trouble(self) -> None:
        """Raise what a listener failed with, now that nothing is left half done."""
        if self.timeline.troubles:
            raise self.timeline.troubles.pop(0)

    def header(self, **fields: object) -> None:
        """The first event."""
        step_seconds = self.clock.step_seconds if isinstance(self.clock, VirtualClock) else None
        self._append("header", {"version": TIMELINE_VERSION, "step_seconds": step_seconds, **fields})

    def event(self, event: str, **fields: object) -> None:
        """Any event."""
        if self._held_back is None:
            self._append(event, fields)
        else:
            self._held_back.append((event, fields))

    def write_tokens(self) -> None:
        """Write ``tokens``, whose time is ``now``."""
        if self.tokens:
            tokens, self.tokens = self.tokens, {}
            self._collector.tokens(list(tokens), self.now)
            self.timeline.tokens(tokens.values())

    def submitted(self, request: Request) -> None:
        """A request was queued: all of it, what has its default aside."""
        fields = REQUEST_SHAPE.dump(request)
        assert isinstance(fields, dict)
        self.event("submit", request=fields.pop("request_id"),
                   **{key: value for key, value in fields.items() if key != "arrival"})  # that is the event's time

    def hold_back(self) -> None:
        """A step is being planned: events wait until ``write_held_back``, after the step that ``planned`` tells."""
        self._held_back = []

    def write_held_back(self) -> None:
        """Planning is over, however it ended."""
        held_back, self._held_back = self._held_back or (), None
        for event, fields in held_back:
            self._append(event, fields)

    def planned(self, decision: ScheduleDecision, computed: int, kv: KVCacheManager) -> None:
        """A step was planned; ``computed`` positions will go through the decoder."""
        self._append("step", {
            "budget": decision.budget_tokens, "computed": computed,
            "chunks": decision.planned, "admitted": decision.admitted, "preempted": decision.preempted,
            "waiting": decision.waiting, "running": decision.running, "reasons": decision.why,
            "found": decision.found, "used_pages": kv.used_pages,
            "empty_slots": kv.internal_fragmentation()})
        self._under_way = True

    def abandoned(self) -> None:
        """The step was interrupted. Not told of one whose plan was not told either."""
        if self._under_way:
            self._under_way = False
            self._append("abandon", {})

    def step_completed(self) -> None:
        """The step's numbers are there: time moves on before its tokens are told."""
        self._under_way = False
        self.steps += 1
        if isinstance(self.clock, VirtualClock):
            self.clock.tick()
        self.now = self.clock()

    def page_change(self, change: str, request_id: str, pages: tuple[int, ...], used_pages: int) -> None:
        """A block table changed."""
        self.event("pages", change=change, request=request_id, pages=list(pages), used_pages=used_pages)

    def _append(self, event: str, fields: Event) -> None:
        self.write_tokens()
        self.now = self.clock()
        entry = {"event": event, "step": self.steps, "time": self.now, **fields}
        self._collector.observe(entry)  # before any listener can fail, or ask
        self.timeline.append(entry)
