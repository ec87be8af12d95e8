"""M2, M4 · Pages of keys and values: who holds which, who shares which, and what is free.

A page has ``page_size`` slots, a slot holds one token's key and value. A request's *block table* lists its pages
in order, so position p lives in page table[p // page_size] at offset p % page_size (Kwon et al. 2023,
"PagedAttention": fixed pages, block tables, reference counts and copy-on-write are taken from there).

    pool      0 [r1] 1 [r1 r2] 2 [r2] 3 [free] 4 [free]            page_size 4
    r1: pages (1, 0), 6 tokens     1: . . . .   0: . . _ _         2 slots reserved but empty
    r2: pages (1, 2), 5 tokens     shares page 1 after a fork, page 2 is its own copy

The manager keeps tables and counts and holds no numbers: those are in a *store* (``backend.KVStore``), which the
decoder writes through the same pages. ``append`` and ``read`` are the plain way to that same store.

Promises, each a property in tests/test_kv_cache.py:
- Conservation: after every call, returned or raised, free pages + pages in block tables = total; ``check()`` proves it.
- All or nothing: a call that raises OutOfPagesError has changed no table, no count and no stored number.
- Isolation: a slot is written only while its page is in exactly one table; a shared page is copied first.
- A released or foreign handle reaches nothing: StaleHandleError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from .errors import CapacityError, EngineError, OutOfPagesError, RequestError, StaleHandleError

if TYPE_CHECKING:
    from .backend import KVStore

_serials = count()  # one for all managers, so that a handle of one never opens a table of another


@dataclass(frozen=True)
class KVHandle:
    """A request's key to its pages. Opaque: only the manager that gave it out can use it."""

    request_id: str
    serial: int


@dataclass(frozen=True)
class PageInfo:
    """What can be observed of a page: how many tables list it, whose they are, and "free" or "used"."""

    refcount: int
    users: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class CacheStats:
    """Counters since the manager was made, and the state of the pool now.

    allocations, releases   handles given out (forks included) and taken back
    hits, misses            tokens taken over from another table, and tokens that had to be computed
    copies, evictions       pages copied on write; pages whose cached content was given up (prefix sharing)
    peak_pages, peak_bytes  the most pages in use at once, a shared page counted once
    internal_fragmentation  slots now reserved in used pages and holding no token, a shared page counted once
    """

    allocations: int
    releases: int
    hits: int
    misses: int
    copies: int
    evictions: int
    peak_pages: int
    peak_bytes: int
    internal_fragmentation: int


@dataclass
class _Table:
    request_id: str
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens whose slots are filled


class PlainStore:
    """The simplest store: a dictionary from slot to the (key, value) last written there."""

    def __init__(self, page_size: int, width: int) -> None:
        self.page_size, self.width = page_size, width
        self.page_bytes = 2 * 8 * page_size * width  # doubles
        self._slots: dict[int, tuple[list[float], list[float]]] = {}

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        self._slots[page * self.page_size + offset] = ([*map(float, key)], [*map(float, value)])

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        key, value = self._slots[page * self.page_size + offset]
        return list(key), list(value)

    def copy_page(self, source: int, target: int) -> None:
        for offset in range(self.page_size):
            if source * self.page_size + offset in self._slots:
                self.write(target, offset, *self.read(source, offset))


class KVCacheManager:
    """Gives out pages and takes them back.

    ``width`` is how many numbers a token's key has (all layers together). ``observer(kind, request_id, pages)`` is
    told of every change to a table: "allocate", "share", "copy", "release".
    """

    def __init__(self, num_pages: int, page_size: int, width: int = 1, prefix_sharing: bool = False,
                 store: KVStore | None = None, observer: Callable[[str, str, tuple[int, ...]], None] | None = None,
                 ) -> None:
        for name, number in (("num_pages", num_pages), ("page_size", page_size), ("width", width)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise RequestError(f"{name} must be an integer from 1, not {number!r}")
        if prefix_sharing:
            raise RequestError("prefix sharing across requests is not part of this version; pass prefix_sharing=False "
                               "(fork() shares pages between samples of one prompt)")
        self.page_size, self.width, self.prefix_sharing = page_size, width, prefix_sharing
        self.store: KVStore = store if store is not None else PlainStore(page_size, width)
        self._observer = observer or (lambda kind, request_id, pages: None)
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page released last is reused first
        self._refcounts = [0] * num_pages
        self._fill = [0] * num_pages  # tokens in each used page
        self._filled_slots = 0  # sum of _fill
        self._tables: dict[int, _Table] = {}
        self._allocations = self._releases = self._hits = self._misses = self._copies = self._peak_pages = 0

    # ---------------------------------------------------------------------------------------- observing

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""
        return len(self._refcounts)

    @property
    def free_pages(self) -> int:
        """Pages in no table."""
        return len(self._free)

    def owns(self, handle: KVHandle) -> bool:
        """Is this a handle of this manager that was not released?"""
        return handle.serial in self._tables

    def length(self, handle: KVHandle) -> int:
        """Tokens stored for this handle."""
        return self._table(handle).length

    def pages(self, handle: KVHandle) -> tuple[int, ...]:
        """The block table: page ids in the order of positions."""
        return tuple(self._table(handle).pages)

    def page(self, page_id: int) -> PageInfo:
        """Who uses a page. O(tables): for people and tests, not for the hot path."""
        if not 0 <= page_id < self.total_pages:
            raise RequestError(f"there is no page {page_id}; pages are 0 to {self.total_pages - 1}")
        users = tuple(table.request_id for table in self._tables.values() if page_id in table.pages)
        return PageInfo(self._refcounts[page_id], users, "used" if self._refcounts[page_id] else "free")

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens: ceil(tokens / page_size)."""
        return -(-tokens // self.page_size)

    def stats(self) -> CacheStats:
        """Counters and the pool's state. O(1)."""
        return CacheStats(self._allocations, self._releases, self._hits, self._misses, self._copies, 0,
                          self._peak_pages, self._peak_pages * self.store.page_bytes, self.internal_fragmentation())

    def internal_fragmentation(self) -> int:
        """Slots of used pages that hold no token. O(1)."""
        return (self.total_pages - len(self._free)) * self.page_size - self._filled_slots

    # ----------------------------------------------------------------------------------------- changing

    def allocate(self, request_id: str, token_count: int) -> KVHandle:
        """Open a block table with pages for ``token_count`` tokens, all or nothing. O(pages).

        CapacityError if the whole pool could not hold them, OutOfPagesError if it cannot now.
        """
        if isinstance(token_count, bool) or not isinstance(token_count, int) or token_count < 0:
            raise RequestError(f"token_count must be an integer from 0, not {token_count!r}")
        needed = self.pages_for(token_count)
        if needed > self.total_pages:
            raise CapacityError(f"{token_count} tokens need {needed} pages of {self.page_size}; the pool has "
                                f"{self.total_pages}: shorten the request or enlarge the pool")
        pages = self._take(needed, request_id)
        handle = self._open(_Table(request_id, pages))
        self._observer("allocate", request_id, tuple(pages))
        return handle

    def reserve(self, handle: KVHandle, token_count: int) -> None:
        """Make positions length .. token_count - 1 writable: add the missing pages, copy shared ones that would be
        written. All or nothing: OutOfPagesError leaves everything as it was. O(new pages)."""
        table = self._table(handle)
        shared = self._shared_among(table, table.length, token_count)
        missing = max(0, self.pages_for(token_count) - len(table.pages))
        if not shared and not missing:
            return
        fresh = self._take(len(shared) + missing, table.request_id)
        try:
            for index, target in zip(shared, fresh):
                self.store.copy_page(table.pages[index], target)
        except BaseException:
            for page in reversed(fresh):
                self._drop(page)
            raise
        for index, target in zip(shared, fresh):
            self._replace(table, index, target)
        added = fresh[len(shared):]
        table.pages += added
        if added:
            self._observer("allocate", table.request_id, tuple(added))

    def commit(self, handle: KVHandle, token_count: int) -> None:
        """The first ``token_count`` positions now hold keys and values that were written to the store directly."""
        table = self._table(handle)
        if not table.length <= token_count <= len(table.pages) * self.page_size:
            raise RequestError(f"{table.request_id} has {table.length} tokens and {len(table.pages)} pages of "
                               f"{self.page_size}; it cannot hold {token_count}")
        if self._shared_among(table, table.length, token_count):
            raise RequestError(f"{table.request_id} shares the page it would fill; reserve() the positions first")
        self._misses += token_count - table.length
        for i in range(table.length // self.page_size, self.pages_for(token_count)):
            self._fill_page(table.pages[i], min(self.page_size, token_count - i * self.page_size))
        table.length = token_count

    def append(self, handle: KVHandle, key: Sequence[float], value: Sequence[float]) -> None:
        """Store the next position's key and value, growing by a page where needed. O(width)."""
        position = self._table(handle).length
        for name, vector in (("key", key), ("value", value)):
            if len(vector) != self.width:
                raise RequestError(f"the {name} has {len(vector)} numbers; this cache stores {self.width} a token")
        self.reserve(handle, position + 1)
        page, offset = self._slot(handle, position)
        self.store.write(page, offset, key, value)
        self.commit(handle, position + 1)

    def read(self, handle: KVHandle, position: int) -> tuple[Sequence[float], Sequence[float]]:
        """Key and value of a stored position. IndexError outside 0 .. length - 1."""
        length = self._table(handle).length
        if not 0 <= position < length:
            raise IndexError(f"position {position} of {handle.request_id} is not stored; stored: {length} tokens")
        return self.store.read(*self._slot(handle, position))

    def fork(self, handle: KVHandle, request_id: str) -> KVHandle:
        """A second table over the same tokens. Pages that hold tokens are shared until one side writes. O(pages)."""
        parent = self._table(handle)
        shared = parent.pages[:self.pages_for(parent.length)]
        for page in shared:
            self._refcounts[page] += 1
        self._hits += parent.length
        child = self._open(_Table(request_id, list(shared), parent.length))
        self._observer("share", request_id, tuple(shared))
        return child

    def release(self, handle: KVHandle) -> None:
        """Close the table; pages without another user are free again. O(pages)."""
        table = self._table(handle)
        del self._tables[handle.serial]
        self._releases += 1
        for page in reversed(table.pages):
            self._drop(page)
        self._observer("release", table.request_id, tuple(table.pages))

    def check(self) -> None:
        """Raise EngineError with a full account unless pages are conserved. O(pages + tables)."""
        held = Counter(page for table in self._tables.values() for page in table.pages)
        wrong = [f"page {page}: refcount {refcount}, listed by {held[page]} tables"
                 for page, refcount in enumerate(self._refcounts) if refcount != held[page]]
        free = Counter(self._free)
        wrong += [f"page {page} is free {times} times" for page, times in free.items() if times > 1]
        wrong += [f"page {page} is free and used" for page in free if held[page]]
        wrong += [f"page {page} is neither free nor used" for page in range(self.total_pages)
                  if not held[page] and not free[page]]
        for table in self._tables.values():
            if len(set(table.pages)) != len(table.pages):
                wrong.append(f"{table.request_id} lists a page twice: {table.pages}")
            if table.length > len(table.pages) * self.page_size:
                wrong.append(f"{table.request_id} has {table.length} tokens in {len(table.pages)} pages")
            for i, page in enumerate(table.pages):
                tokens = min(max(table.length - i * self.page_size, 0), self.page_size)
                if tokens != self._fill[page]:
                    wrong.append(f"{table.request_id} has {tokens} tokens in page {page}, counted {self._fill[page]}")
        if wrong:
            raise EngineError("pages are not conserved: " + "; ".join(wrong))

    # ------------------------------------------------------------------------------------------- inside

    def _open(self, table: _Table) -> KVHandle:
        handle = KVHandle(table.request_id, next(_serials))
        self._tables[handle.serial] = table
        self._allocations += 1
        return handle

    def _table(self, handle: KVHandle) -> _Table:
        table = self._tables.get(handle.serial) if isinstance(handle, KVHandle) else None
        if table is None:
            raise StaleHandleError(f"{handle!r} was released, or is not of this cache manager; allocate a new one")
        return table

    def _slot(self, handle: KVHandle, position: int) -> tuple[int, int]:
        return self._table(handle).pages[position // self.page_size], position % self.page_size

    def _take(self, number: int, request_id: str) -> list[int]:
        """Pop free pages, all or nothing. O(number)."""
        if number > len(self._free):
            raise OutOfPagesError(f"{request_id} needs {number} pages, {len(self._free)} of {self.total_pages} are "
                                  f"free; release a handle, or try again later")
        pages = [self._free.pop() for _ in range(number)]
        for page in pages:
            self._refcounts[page] = 1
        self._peak_pages = max(self._peak_pages, self.total_pages - len(self._free))
        return pages

    def _drop(self, page: int) -> None:
        self._refcounts[page] -= 1
        if self._refcounts[page] == 0:
            self._fill_page(page, 0)
            self._free.append(page)

    def _shared_among(self, table: _Table, start: int, end: int) -> list[int]:
        """Indices in the block table of shared pages that positions start .. end - 1 fall into."""
        if start >= end:
            return []
        last = min(len(table.pages), self.pages_for(end))
        return [i for i in range(start // self.page_size, last) if self._refcounts[table.pages[i]] > 1]

    def _replace(self, table: _Table, index: int, target: int) -> None:
        """Copy-on-write, second half: the numbers are copied, now the table changes over."""
        source, table.pages[index] = table.pages[index], target
        self._fill_page(target, self._fill[source])
        self._drop(source)
        self._copies += 1
        self._observer("copy", table.request_id, (source, target))

    def _fill_page(self, page: int, tokens: int) -> None:
        self._filled_slots += tokens - self._fill[page]
        self._fill[page] = tokens
