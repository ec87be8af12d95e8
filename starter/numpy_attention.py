"""Optional · Attention of a whole batch in a few array operations: requests of like length side by side.

    decodes at positions 4, 5, 5, and a chunk of 3 rows that ends with position 8

    group  rows       counts  contexts                          keys [S, n, K, d]
    0      [0, 1, 2]  1       5, 6, 6: the first one is padded  [3, 6, K, d]
    1      [3, 4, 5]  3       9                                 [1, 9, K, d]

The S spans of a group have the same count of rows, and contexts of nearly the same length n. A shorter context is
padded with its own first position again, so nothing is read but what the request itself has written (pages that are
free, or not yet full, may hold anything), and a mask hides the padding. A batch is grouped once; all layers share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt
from typing import Any, Protocol, Union

import numpy as np

from .batch import Batch, Span

Array = Any  # numpy.ndarray
Rows = Union[slice, Array]

PADDING = 12_000  # numbers of padded keys, in a layer, that cost about as much as the calls for one more group
TILE = 64 * 1024  # numbers of a group's keys, in a layer: they are gathered, then multiplied, and stay in the cache
SAFE = 60.0  # exp(60) * exp(-(-60)) * any context is far from float32's end, 1e38


class PagedStore(Protocol):
    """What grouping asks of a store."""

    page_size: int
    kv_heads: int
    head_width: int
    plan: Plan | None

    def parts(self, span: Span) -> Iterable[Span]:
        """The span, cut where its rows must not be computed together."""


@dataclass(eq=False)  # not frozen, which would set each field through a call: there is one or more a step
class Group:
    """S spans with ``count`` rows each; n is the longest context."""

    count: int
    rows: Rows  # of the batch: [S * count]
    ends: Array  # [S, 1]
    pages: Array  # [S, most pages]: block tables, the shorter ones padded with their first page
    slots: Array  # [S, n]: of positions 0 .. n - 1, the shorter ones padded with their first slot
    hidden: Array | None  # float32 [S, 1, 1, count, n]: -inf where a row must not look, else 0; None: all may be seen

    @classmethod
    def of(cls, spans: list[Span], page_size: int) -> Group:
        """Of spans in the order of ``grouped``. O(S * (pages + count * n)), in a fixed number of array operations."""
        count, longest = spans[0].count, spans[-1].end
        pages, slots = _tables(tuple([tuple(span.pages[:-(-span.end // page_size)]) for span in spans]), page_size)
        slots = np.ascontiguousarray(slots[:, :longest])
        ends = np.array([span.end for span in spans])[:, None]
        hidden = None
        if count > 1 or spans[0].end < longest:
            positions = np.arange(longest)
            slots = np.where(positions < ends, slots, slots[:, :1])
            last_seen = ends - count + np.arange(count)                              # [S, count]
            hidden = np.where(positions > last_seen[:, :, None], np.float32("-inf"), np.float32(0))[:, None, None]
        return cls(count, _rows(spans), ends, pages, slots, hidden)


@dataclass(eq=False)
class Plan:
    """A batch's slots as an array, and its groups."""

    batch: Batch
    slots: Array
    groups: list[Group]

    @classmethod
    def of(cls, batch: Batch, store: PagedStore) -> Plan:
        """The plan of the last batch is kept in the store, for the layers to come."""
        if store.plan is None or store.plan.batch is not batch:
            parts = [part for span in batch.spans for part in store.parts(span)]
            groups = grouped(parts, store.kv_heads * store.head_width)
            store.plan = cls(batch, np.array(batch.slots), [Group.of(spans, store.page_size) for spans in groups])
        return store.plan


def grouped(spans: Iterable[Span], key_width: int) -> Iterator[list[Span]]:
    """Spans of equal count, the shortest context first, as many together as PADDING and TILE allow."""
    group: list[Span] = []
    total = 0
    for span in sorted(spans, key=lambda span: (span.count, span.end)):
        padded = (len(group) + 1) * span.end
        if group and (span.count != group[0].count or padded * key_width > TILE
                      or (padded - total - span.end) * key_width > PADDING):
            yield group
            group, total = [], 0
        group.append(span)
        total += span.end
    if group:
        yield group


@lru_cache(8)
def _tables(tables: tuple[tuple[int, ...], ...], page_size: int) -> tuple[Array, Array]:
    """Block tables, the shorter ones padded with their first page, and the slots of all their pages: [S, most pages],
    [S, most pages * page_size]. They are the same from one decode to the next, until somebody begins a page."""
    most = max(map(len, tables))
    pages = np.array([table + table[:1] * (most - len(table)) for table in tables], dtype=np.intp)
    return pages, (pages[:, :, None] * page_size + np.arange(page_size)).reshape(len(tables), -1)


def _rows(spans: list[Span]) -> Rows:
    """The rows of the batch that belong to spans of equal count: a slice, where they lie side by side."""
    count, firsts = spans[0].count, [span.first_row for span in spans]
    end = firsts[0] + len(spans) * count
    if firsts == list(range(firsts[0], end, count)):
        return slice(firsts[0], end)
    return (np.array(firsts)[:, None] + np.arange(count)).ravel()


class Room:
    """Memory for the keys and values of one group after the other: new arrays would cost page faults each time."""

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
            self._shape, self._latest = shape, (keys.reshape(shape), values.reshape(shape))
        return self._latest


@lru_cache
def ones(length: int) -> Array:
    """A product with this column is a row's sum, and faster than ``sum``."""
    return np.ones((length, 1), dtype=np.float32)


@lru_cache
def _scale(head_width: int) -> Any:
    return np.float32(1.0 / sqrt(head_width))


def attend(q: Array, keys: Array, values: Array, group: Group) -> Array:
    """softmax(q . k / sqrt(d)) . v of a group's rows: q [S * t, H * d], keys and values [S, n, K, d] -> as q."""
    spans, longest, kv_heads, width = keys.shape
    shape = (spans, group.count, kv_heads, -1, width)                                # S, t, K, G, d
    by_head = (q * _scale(width)).reshape(shape).transpose(0, 2, 3, 1, 4)            # [S, K, G, t, d]
    scores = by_head.reshape(spans, kv_heads, -1, width) @ keys.transpose(0, 2, 3, 1)  # [S, K, G * t, n]
    flat = scores.reshape(-1)  # where argmax and argmin are faster than max and min
    safe = flat[flat.argmin()] > -SAFE and flat[flat.argmax()] < SAFE  # False for NaN, too
    if group.hidden is not None:
        masked = scores.reshape(*by_head.shape[:4], -1)                              # [S, K, G, t, n]
        masked += group.hidden
    if not safe:  # the largest score of each row to 0; it is not needed else, and costs as much as a product
        with np.errstate(invalid="ignore"):  # inf - inf
            scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    mixed = weights @ values.transpose(0, 2, 1, 3)                                   # [S, K, G * t, d]
    mixed /= weights.reshape(-1, longest).dot(ones(longest)).reshape(*mixed.shape[:-1], 1)
    return mixed.reshape(by_head.shape).transpose(0, 3, 1, 2, 4).reshape(q.shape)
