"""Optional · Memory of a device, counted: what does not fit is refused before it is allocated.

A GPU that is full fails in the middle of a step; on Windows the driver may silently move pages to the computer's own
memory instead, and everything becomes many times slower. To avoid both, the engine takes at most 0.9 of the memory that
was free when it began, and counts every array in one account:

    |<------------------------- free at the beginning ------------------------->|
    |<------------------------- limit: 0.9 of it ---------------------->|       |
    | weights           | K/V pages                | scratch |  left    | others|
    |<---------------- live ------------------>|

    memory = DeviceMemory("cuda:0", free=8_000_000_000)
    memory.plan({"K/V pages": 6_000_000_000, "scratch": 100_000_000})     BackendError with the sum, if it is too much
    array = memory.allocate(4096, make)                                  or BackendError; counted until the array dies

``peak`` is the largest ``live`` so far. This account never touches a device: ``make`` allocates, and may fail.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from math import inf
from threading import RLock
from typing import TypeVar

from starter.errors import BackendError

USABLE = 0.9  # of the free memory: the rest is for the driver, the screen and kernels that are loaded later

Made = TypeVar("Made")


class DeviceMemory:
    """The account of one device. With ``free`` None the amount is unknown and nothing is refused. Thread-safe."""

    def __init__(self, device: str, free: int | None) -> None:
        if free is not None and (isinstance(free, bool) or not isinstance(free, int) or free < 1):
            raise BackendError(f"free memory is a number of bytes from 1, or None where it is not known, not {free!r}")
        self.device, self.free = device, free
        self.limit: float = inf if free is None else int(USABLE * free)
        self.live = 0  # bytes of the arrays that exist
        self.peak = 0
        self.planned = 0  # bytes of the largest plan: what was live then, and what was still to be allocated
        self._lock = RLock()  # reentrant: garbage collection may count the end of an array at any moment

    def plan(self, parts: Mapping[str, int]) -> None:
        """These bytes are going to be allocated. BackendError with the whole sum if they do not fit."""
        terms = {"already held": self.live, **parts}
        total = sum(terms.values())
        if total > self.limit:
            arithmetic = " + ".join(f"{name} {number:,}" for name, number in terms.items())
            raise BackendError(f"{arithmetic} = {total:,} bytes, but {self.device} may use {self.limit:,}: {USABLE} of "
                               f"the {self.free:,} that were free; take fewer or smaller pages, smaller steps, or a "
                               f"smaller form of the weights")
        self.planned = max(self.planned, total)

    def allocate(self, nbytes: int, make: Callable[[], Made]) -> Made:
        """What ``make`` returns, an array of ``nbytes`` bytes. BackendError if it would exceed the limit, or if the
        device fails to allocate it: nothing is counted then."""
        with self._lock:
            held, fits = self.live, self.live + nbytes <= self.limit
            if fits:
                self.live += nbytes
        if not fits:
            raise BackendError(f"out of memory: {nbytes:,} bytes more than the {held:,} already held are beyond the "
                               f"{self.limit:,} that {self.device} may use")
        try:
            made = make()
        except (RuntimeError, MemoryError) as error:
            self._gone(nbytes)
            raise BackendError(f"out of memory: {self.device} did not give {nbytes:,} bytes beside the {self.live:,} "
                               f"already held ({error})") from error
        weakref.finalize(made, self._gone, nbytes).atexit = False
        self.peak = max(self.peak, self.live)
        return made

    def _gone(self, nbytes: int) -> None:
        with self._lock:
            self.live -= nbytes
