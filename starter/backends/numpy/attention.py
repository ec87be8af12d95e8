"""Optional · Attention of a whole batch in a few array operations: requests of similar length side by side.

    decodes at positions 4, 5, 5, and a chunk of 3 rows that ends with position 8

    group  rows       counts  contexts                          keys [S, K, d, n]
    0      [0, 1, 2]  1       5, 6, 6: the first one is padded  [3, K, d, 6]
    1      [3, 4, 5]  3       9                                 [1, K, d, 9]

The S spans of a group have the same count of rows, and contexts of nearly the same length n. A shorter context is
padded with its own first position again, so nothing is read but what the request itself has written (pages that are
free, or not yet full, may hold anything), and a mask hides the padding. A batch is grouped once; all layers share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import sqrt
from typing import Any, Protocol, Union

import numpy as np

from starter.backend import Batch, Span
from starter.backends.numpy.contexts import GatheredStore, KeptContexts, pass_on

Array = Any  # numpy.ndarray
RowIndex = Union[slice, Array]  # of a batch

PADDING = 12_000  # numbers of padded keys, in a layer, that cost about as much as the calls for one more group
TILE = 128 * 1024  # numbers of a group's keys, in a layer: what is multiplied at once stays in the cache
SAFE = 60.0  # exp(60) * exp(-(-60)) * any context is far from float32's end, 1e38


class PlannedStore(GatheredStore, Protocol):
    """What grouping asks of a store."""

    page_size: int
    plan: AttentionPlan | None

    def parts(self, span: Span) -> Iterable[Span]:
        """The span, cut where its rows must not be computed together."""


@dataclass(eq=False)
class Group:
    """S spans with ``count`` rows each, the shortest context first; n is the longest."""

    count: int
    rows: RowIndex  # [S * count]
    written: Array  # [S * count]: slots of those rows
    ends: list[int]  # of the contexts: [S]
    tables: tuple[tuple[int, ...], ...]  # their pages: S block tables
    page_size: int
    hidden: Array | None  # float32 [S, 1, count, n]: -inf where a row must not look, else 0; None: all may be seen
    kept: KeptContexts | None = None

    @classmethod
    def of(cls, spans: list[Span], page_size: int, slots: Array) -> Group:
        """Of spans in the order of ``grouped``, and the batch's slots. O(S * (pages + count * n)), and O(S * pages) for
        decodes of equal length."""
        count, rows, ends = spans[0].count, _rows(spans), [span.end for span in spans]
        tables = tuple([tuple(span.pages[:-(-span.end // page_size)]) for span in spans])
        hidden = None
        if count > 1 or ends[0] < ends[-1]:
            last_seen = np.array(ends)[:, None] - count + np.arange(count)           # [S, count]
            beyond = np.arange(ends[-1]) > last_seen[:, :, None]
            hidden = np.where(beyond, np.float32("-inf"), np.float32(0))[:, None]
        return cls(count, rows, slots[rows], ends, tables, page_size, hidden)

    @property
    def pages(self) -> Array:
        """[S, most pages]: block tables, the shorter ones padded with their first page."""
        return _tables(self.tables, self.page_size)[0]

    @cached_property
    def slots(self) -> Array:
        """[S, n]: of positions 0 .. n - 1, the shorter contexts padded with their first slot."""
        slots = _tables(self.tables, self.page_size)[1][:, :self.ends[-1]]
        if self.ends[0] == self.ends[-1]:
            return np.ascontiguousarray(slots)
        return np.where(np.arange(self.ends[-1]) < np.array(self.ends)[:, None], slots, slots[:, :1])

    @cached_property
    def newest(self) -> tuple[Array, Array]:
        """Where in [S, n] the newest positions are."""
        return np.arange(len(self.ends)), np.array(self.ends) - 1

    def goes_on_from(self, earlier: Group) -> bool:
        """Are these decodes, each one position after those of an earlier group?"""
        return (self.count == 1 and self.ends == [end + 1 for end in earlier.ends]
                and all(pages[:len(before)] == before for pages, before in zip(self.tables, earlier.tables)))


@dataclass(eq=False)
class AttentionPlan:
    """A batch's slots as an array, and its groups."""

    batch: Batch
    slots: Array
    groups: list[Group]

    @classmethod
    def of(cls, batch: Batch, store: PlannedStore) -> AttentionPlan:
        """The plan of the last batch is kept in the store, for the layers to come and for the next batch."""
        last = store.plan
        if last is None or last.batch is not batch:
            slots = np.array(batch.slots)
            parts = [part for span in batch.spans for part in store.parts(span)]
            groups = [Group.of(spans, store.page_size, slots)
                      for spans in grouped(parts, store.kv_heads * store.head_width)]
            if last:
                pass_on(groups, last.groups, store)
            store.plan = last = cls(batch, slots, groups)
        return last


def grouped(spans: Iterable[Span], key_width: int) -> Iterator[list[Span]]:
    """Spans of equal count, the shortest context first, as many together as PADDING and TILE allow. Decodes that stay
    together stay in one group until one of them begins a page."""
    group: list[Span] = []
    total = 0
    for span in sorted(spans, key=lambda span: (span.count, span.end)):
        padded = (len(group) + 1) * span.end
        in_pages = (len(group) + 1) * -(-span.end // span.page_size) * span.page_size
        if group and (span.count != group[0].count or in_pages * key_width > TILE
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
    [S, most pages * page_size]. They stay the same from one decode to the next until a request begins a page."""
    most = max(map(len, tables))
    pages = np.array([table + table[:1] * (most - len(table)) for table in tables], dtype=np.intp)
    return pages, (pages[:, :, None] * page_size + np.arange(page_size)).reshape(len(tables), -1)


def _rows(spans: list[Span]) -> RowIndex:
    """The rows of the batch that belong to spans of equal count: a slice if they lie side by side."""
    count, firsts = spans[0].count, [span.first_row for span in spans]
    end = firsts[0] + len(spans) * count
    if firsts == list(range(firsts[0], end, count)):
        return slice(firsts[0], end)
    return (np.array(firsts)[:, None] + np.arange(count)).ravel()


@lru_cache
def ones(length: int) -> Array:
    """A product with this column is a row's sum, and faster than ``sum``."""
    return np.ones((length, 1), dtype=np.float32)


@lru_cache
def _scale(head_width: int) -> Any:
    return np.float32(1.0 / sqrt(head_width))


def attend(q: Array, keys: Array, values: Array, group: Group) -> Array:
    """softmax(q . k / sqrt(d)) . v of a group's rows: q [S * t, H * d], keys [S, K, d, n], values [S, K, n, d]
    -> as q."""
    spans, kv_heads, width, longest = keys.shape
    shape = (spans, group.count, kv_heads, -1, width)                                # S, t, K, G, d
    by_head = (q * _scale(width)).reshape(shape).transpose(0, 2, 3, 1, 4)            # [S, K, G, t, d]
    scores = by_head.reshape(spans, kv_heads, -1, width) @ keys                      # [S, K, G * t, n]
    flat = scores.reshape(-1)  # where argmax and argmin are faster than max and min
    safe = flat[flat.argmin()] > -SAFE and flat[flat.argmax()] < SAFE  # False for NaN, too
    if group.hidden is not None:
        masked = scores.reshape(spans, -1, group.count, longest)
        masked += group.hidden
    if not safe:  # shift the largest score of each row to 0; this costs as much as a product
        with np.errstate(invalid="ignore"):  # inf - inf
            scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    mixed = weights @ values                                                         # [S, K, G * t, d]
    mixed /= weights.reshape(-1, longest).dot(ones(longest)).reshape(*mixed.shape[:-1], 1)
    return mixed.reshape(by_head.shape).transpose(0, 3, 1, 2, 4).reshape(q.shape)
