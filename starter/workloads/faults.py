"""M6 · Faults on purpose: what an engine must survive, injected from a scenario (``"faults": [...]``) or from code.

    engine.inject([NanLogits(call=3, request_id="r1"), MemoryCut(step=5, pages=4, until=9)])

Decoder calls, requests for pages, and steps are counted from the injection on, each from 0. A fault that fires is an
event of the timeline. The engine promises that under any faults the request that is hit either ends with finish_reason
"error" and the reason, or continues with the same tokens; that every other stream is unchanged, bit for bit; and that
no page is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from math import inf

from starter.base.fault_kinds import (
    HOLDER,
    AbnormalRelease,
    BackendFault,
    Fault,
    MemoryCut,
    NanLogits,
    RefusedPages,
    SlowConsumer,
)
from starter.errors import BackendError, OutOfPagesError, StaleHandleError
from starter.kv_cache import KVCacheManager, KVHandle


class FaultInjector:
    """Fires faults at the moments when the engine calls it. ``record(event, **fields)`` is called for each."""

    def __init__(self, faults: Iterable[Fault], kv: KVCacheManager, handle_of: Callable[[str], KVHandle],
                 record: Callable[..., None]) -> None:
        self._faults = tuple(faults)
        self.slow = frozenset(fault.request_id for fault in self._faults if isinstance(fault, SlowConsumer))
        self._kv, self._handle_of, self._record = kv, handle_of, record
        self._steps = self._calls = self._asks = 0
        self._held: list[tuple[int, KVHandle]] = []  # (step at which they are given back, pages)
        kv.before_take = self.ask_for_pages

    def before_step(self) -> None:
        """Take or give back the pages of outside holders that are due at this step."""
        step, self._steps = self._steps, self._steps + 1
        self._give_back(step)
        for fault in self._faults:
            if isinstance(fault, AbnormalRelease) and fault.step == step:
                self._release(fault)
            elif isinstance(fault, MemoryCut) and fault.step == step:
                self._cut(fault)

    def _cut(self, fault: MemoryCut) -> None:
        pages = min(fault.pages, self._kv.free_pages)
        try:
            self._held.append((fault.until, self._kv.allocate(HOLDER, pages * self._kv.page_size)))
        except OutOfPagesError:  # a RefusedPages fault, which cancels this one
            return
        self._fire(fault)

    def _release(self, fault: AbnormalRelease) -> None:
        try:
            self._kv.release(self._handle_of(fault.request_id))
        except (KeyError, StaleHandleError):  # it is not running, so it has no pages to lose
            return
        self._fire(fault)

    def end(self) -> None:
        """Outside holders give back all they hold."""
        if self._held:
            self._record("lift")
            self._give_back(inf)

    def _give_back(self, step: float) -> None:
        """Give back what is held until ``step``."""
        for until, handle in self._held:
            if until <= step:
                self._kv.release(handle)
        self._held = [held for held in self._held if held[0] > step]

    def ask_for_pages(self, number: int, for_whom: str) -> None:
        """The page manager calls this before it takes fresh pages. OutOfPagesError where a fault refuses them."""
        ask, self._asks = self._asks, self._asks + 1
        for fault in self._faults:
            if isinstance(fault, RefusedPages) and fault.ask == ask:
                self._fire(fault)
                raise OutOfPagesError(f"{for_whom} needs {number} pages; refused on purpose")

    def before_forward(self, request_ids: Collection[str]) -> None:
        """Called before the decoder computes these requests. BackendError where a fault says so."""
        call, self._calls = self._calls, self._calls + 1
        for fault in self._faults:
            hit = isinstance(fault, BackendFault) and (
                fault.call == call if fault.request_id is None
                else fault.call <= call and fault.request_id in request_ids)
            if hit:
                self._fire(fault)
                raise BackendError(f"failed on purpose at call {call}")

    def after_forward(self, request_ids: Sequence[str], rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """The decoder's logits for these requests, a row each, with NaN in the rows that a fault hits."""
        result = list(rows)
        for fault in self._faults:
            if isinstance(fault, NanLogits) and fault.call == self._calls - 1:
                hit = [i for i, request_id in enumerate(request_ids) if fault.request_id in (None, request_id)]
                for i in hit:
                    result[i] = [float("nan")] * len(rows[i])
                if hit:
                    self._fire(fault)
        return result

    def _fire(self, fault: Fault) -> None:
        self._record("fault", kind=type(fault).__name__, fault=asdict(fault))
