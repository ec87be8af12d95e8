"""Optional · What attention looks back at, as arrays: gathered from pages, and kept for the next decode if small.

    step   decodes at       read from pages
    7      A 129, B 70      all 130 + 71 positions, gathered side by side
    8      A 130, B 71      all again; A and B have stayed together, so what was gathered is kept
    9      A 131, B 72      only the two newest positions, which join the others
    10     A 132            all: B has ended, and what was kept is dropped

A decode looks at what the one before it looked at, and at one position more. Gathering that again takes a good part of
a small model's step, so up to KEPT bytes are kept; the limit is there because they copy numbers that the pages hold.
With a large model or many requests, every step gathers. Kept keys lie as BLAS multiplies them fastest, [d, n].

The pages remain the truth. What is kept belongs to a step's plan (``attention.py``) and is passed on only to the next
step's plan, only for the same requests, each a position longer. A store forgets its plan when a page changes in any
other way (a copy, a page that is swapped in, ``KVCacheManager.append``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray

KEPT = 16 * 1024**2  # bytes of a pool's kept contexts
WORTH = 3000  # numbers of a group's keys, in a layer: fewer are gathered as fast as they are found again
GROWTH = 64  # positions: a kept context has room for a multiple of that, and is gathered again when it is full


class Decodes(Protocol):
    """What is used of a ``Group`` of S spans with one row each; n is the longest context."""

    ends: list[int]  # of the contexts: [S]
    kept: KeptContexts | None

    @property
    def newest(self) -> tuple[Array, Array]:
        """Where in [S, n] the newest positions are."""

    def goes_on_from(self, earlier: Any) -> bool:
        """Are these decodes, each one position after those of an earlier group?"""


class GatheredStore(Protocol):
    """A pool's keys and values, K heads of d numbers in a layer, that can be gathered into arrays."""

    kv_heads: int
    head_width: int
    width: int  # of all layers' keys together

    def looks_the_same(self, group: Any) -> bool:
        """Do a group's decodes see the same numbers of all positions but the newest as the decodes before them?"""

    def gather(self, layer: int, group: Any) -> tuple[Array, Array]:
        """All keys [S, K, d, n] and values [S, K, n, d] that a group's rows look at, until the next call."""

    def newest(self, layer: int, group: Any) -> tuple[Array, Array]:
        """Only those of a group's own rows, one row a span: [S, K, d] each."""


def pass_on(groups: Sequence[Decodes], earlier: Sequence[Decodes], store: GatheredStore) -> None:
    """Let the groups of a step that go on from a group of the step before keep their contexts, the shortest first, as
    far as KEPT reaches. O(groups^2 + spans)."""
    left, unclaimed = KEPT, list(earlier)
    for group in groups:
        before = next((before for before in unclaimed if group.goes_on_from(before)), None)
        if before is None:
            continue
        unclaimed.remove(before)  # two that share their pages up to here go on from one, and part now
        spans, longest = len(group.ends), group.ends[-1]
        capacity = -(-longest // GROWTH) * GROWTH
        size = 8 * store.width * spans * capacity  # a key and a value of 4 bytes
        if size <= left and spans * longest * store.kv_heads * store.head_width >= WORTH:
            left -= size
            kept = before.kept if store.looks_the_same(group) else None
            group.kept = kept if kept and kept.capacity == capacity else KeptContexts(capacity)


class KeptContexts:
    """A group's keys and values in all layers, with room for ``capacity`` positions."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._layers: dict[int, tuple[Array, Array]] = {}

    def of(self, layer: int, group: Decodes, store: GatheredStore) -> tuple[Array, Array]:
        """As ``GatheredStore.gather``; of a layer that is kept, only the newest positions are read."""
        if layer in self._layers:
            keys, values = self._layers[layer]
            spans, last = group.newest
            keys[spans, :, :, last], values[spans, :, last] = store.newest(layer, group)
        else:
            keys, values = self._layers[layer] = self._roomy(*store.gather(layer, group))
        return keys[:, :, :, :group.ends[-1]], values[:, :, :group.ends[-1]]

    def _roomy(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Copies that can grow. What is not yet written there is 0: a mask hides it, but would not hide NaN."""
        spans, kv_heads, width, length = keys.shape
        roomy = (np.zeros((spans, kv_heads, width, self.capacity), dtype=np.float32),
                 np.zeros((spans, kv_heads, self.capacity, width), dtype=np.float32))
        roomy[0][:, :, :, :length], roomy[1][:, :, :length] = keys, values
        return roomy


class Room:
    """Memory that the keys and values of every group reuse in turn: new arrays would cost page faults each time."""

    def __init__(self) -> None:
        self._numbers = np.empty((2, 0), dtype=np.float32)
        self._shape: tuple[int, ...] = ()
        self._latest: tuple[Array, Array] = self._numbers[0], self._numbers[1]

    def of(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Two arrays of this shape, which hold anything."""
        if shape != self._shape:  # else it is the next layer's turn
            size = prod(shape)
            if size > self._numbers.shape[1]:
                self._numbers = np.empty((2, size), dtype=np.float32)
            keys, values = self._numbers[:, :size]
            self._latest, self._shape = (keys.reshape(shape), values.reshape(shape)), shape
        return self._latest
