"""M6 · The engine's pen: it turns what happens into timeline events, and the timeline into metrics.

Page changes are told by the page manager while a step is still being planned; they are written after the step's own
event, so that a timeline reads in the order of cause and effect.
"""

from __future__ import annotations

from collections.abc import Callable

from .kv_cache import KVCacheManager
from .metrics import Metrics, MetricsCollector
from .scheduler import ScheduleDecision
from .timeline import TIMELINE_VERSION, Timeline, VirtualClock


class Recorder:
    """Stamps every event with the number of completed steps and the clock's time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.steps = 0
        self.timeline = Timeline()
        self._collector = MetricsCollector()
        self._page_changes: list[tuple[str, str, tuple[int, ...], int]] = []
        self.timeline.listen(self._collector.observe)

    def metrics(self) -> Metrics:
        """What the events so far add up to."""
        return self._collector.snapshot()

    def raise_trouble(self) -> None:
        """Raise what a listener failed with, now that nothing is left half done."""
        if self.timeline.troubles:
            raise self.timeline.troubles.pop(0)

    def header(self, **fields: object) -> None:
        """The first event."""
        self._append("header", version=TIMELINE_VERSION, **fields)

    def event(self, event: str, **fields: object) -> None:
        """Any event, after the page changes that led to it."""
        self._flush_page_changes()
        self._append(event, **fields)

    def planned(self, decision: ScheduleDecision, computed: int, kv: KVCacheManager) -> None:
        """A step was planned; ``computed`` positions will go through the decoder."""
        self._append(
            "step", budget=decision.budget_tokens, computed=computed,
            chunks=[[chunk.request_id, chunk.start, chunk.count, chunk.phase] for chunk in decision.chunks],
            admitted=list(decision.admitted), preempted=list(decision.preempted), waiting=list(decision.waiting),
            running=list(decision.running), reasons=dict(decision.reasons), found=dict(decision.found),
            used_pages=kv.total_pages - kv.free_pages, empty_slots=kv.internal_fragmentation())
        self._flush_page_changes()

    def step_completed(self) -> None:
        """The step's numbers are there: time moves on before its tokens are told."""
        self.steps += 1
        if isinstance(self.clock, VirtualClock):
            self.clock.tick()

    def page_change(self, change: str, request_id: str, pages: tuple[int, ...], used_pages: int) -> None:
        """Note a change of a block table; it is written with the next event."""
        self._page_changes.append((change, request_id, pages, used_pages))

    def _flush_page_changes(self) -> None:
        changes, self._page_changes = self._page_changes, []
        for change, request_id, pages, used in changes:
            self._append("pages", change=change, request=request_id, pages=list(pages), used_pages=used)

    def _append(self, event: str, **fields: object) -> None:
        self.timeline.record(event, self.steps, self.clock(), **fields)
