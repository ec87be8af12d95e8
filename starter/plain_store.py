"""M2 · The simplest storage behind the pages: what a page manager uses that is given no other.

The backends bring stores of their own (``CpuKVStore`` and others), which the decoder reads in its own form; all of
them are a ``backend.KVStore``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import KVStore


class PlainStore:
    """The simplest store: a dictionary from slot to the (key, value) last written there."""

    def __init__(self, page_size: int, width: int) -> None:
        self.page_size, self.width = page_size, width
        self.page_bytes = 2 * 8 * page_size * width  # doubles
        self.tail_bytes = self.peak_tails = 0
        self._slots: dict[int, tuple[list[float], list[float]]] = {}

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        self._slots[page * self.page_size + offset] = ([*map(float, key)], [*map(float, value)])

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        key, value = self._slots[page * self.page_size + offset]
        return list(key), list(value)

    def copy_page(self, source: int, target: int, origin: KVStore | None = None) -> None:
        slots = origin._slots if isinstance(origin, PlainStore) else self._slots
        for offset in range(self.page_size):
            if source * self.page_size + offset in slots:
                self.write(target, offset, *slots[source * self.page_size + offset])

    def settle(self, page: int) -> None:
        """Nothing is kept besides the page."""
