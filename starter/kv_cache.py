"""M2, M4 · Block tables: which pages hold a request's keys and values, shared, copied, swapped out and back.

A page has ``page_size`` slots, a slot holds one token's key and value. A request's *block table* lists its pages
in order, so position p lives in page table[p // page_size] at offset p % page_size (Kwon et al. 2023,
"PagedAttention": fixed pages, block tables, reference counts, copy-on-write and swapping are taken from there).

    pool      0 [r1] 1 [r1 r2] 2 [r2] 3 [free] 4 [free]            page_size 4
    r1: pages (1, 0), 6 tokens     1: . . . .   0: . . _ _         2 slots reserved but empty
    r2: pages (1, 2), 5 tokens     shares page 1 after a fork, page 2 is its own copy

The manager keeps tables and counts (``kv_cache.py`` keeps the pool) and holds no numbers: those are in a *store*
(``backend.KVStore``), which the decoder writes through the same pages. ``append`` and ``read`` are the plain way to
that same store.

With ``prefix_sharing`` a new request starts on the pages that already hold the beginning of its prompt. Pages are
published when ``commit`` says that they were computed, and found by exact comparison of all tokens up to them.

Promises, each a property in tests/test_kv_cache.py:
- Conservation: after every call, returned or raised, free + cached + used pages = total; ``check()`` proves it.
- All or nothing: a call that raises OutOfPagesError has changed no table, no count and no stored number.
- Isolation: a slot is written only while its page is in exactly one table; a shared page is copied first.
- A page that can still be found is never handed out: eviction forgets it first, the least recently used one.
- At least one token of a prompt is left to compute, also when all of it was found.
- A released or foreign handle reaches nothing: StaleHandleError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .base.wings import picture
from .errors import EngineError, OutOfPagesError, PoolTooSmallError, RequestError, StaleHandleError

# ------------------------------------------------------------------------------------------------- what can be observed

#: M2, M4 · What can be seen of a page manager from outside: of one page, and of all.


@dataclass(frozen=True)
class PageInfo:
    """What can be observed of a page: how many tables list it, whose they are, and "free", "used" or "cached"."""

    refcount: int
    users: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class CacheStats:
    """Counters since the manager was made, and the state of the pool now.

    allocations, releases   handles given out (forks included) and taken back
    hits, misses            tokens found already computed (shared prefixes and forks), and tokens that were computed
    copies, evictions       pages copied on write; cached pages whose content was given up for another use
    peak_pages, peak_bytes  the most pages in use at once, a shared page counted once
    internal_fragmentation  slots now reserved in used pages and holding no token, a shared page counted once
    swaps_out, swaps_in     tables moved to host pages and back
    peak_tail_bytes         the most held besides the pages, for those that were being filled (int8 pages)
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
    swaps_out: int = 0
    swaps_in: int = 0
    peak_tail_bytes: int = 0


# ------------------------------------------------------------------------------------------------------------- the pool

#: M4 · The page pool: which pages are free, used or cached, and which cached page holds which tokens.
#:
#:     free ──take──▶ used (refcount 1, 2, ...) ──last user leaves──▶ free
#:                     ▲                                        └────▶ cached, if its content can be found again
#:                     └──────────── share ◀── find(content) ─────────┘   │
#:                                                                        └─evict: least recently used first─▶ free
#:
#: A page's content is named by the pages before it: ``PrefixIndex`` gives each (node of the page before, tokens of this
#: page) a *node*, compared token by token, so two prefixes can never be confused, whatever their hashes. A request with
#: a ``cache_salt`` starts from another root and shares only with the same salt.


Node = Hashable  # a root, or the number of a published page's content


class PrefixIndex:
    """Content -> page, for full pages whose keys and values were computed. All methods O(page_size)."""

    def __init__(self) -> None:
        self._found: dict[tuple[Node, tuple[int, ...]], tuple[int, Node]] = {}
        self._keys: dict[int, tuple[Node, tuple[int, ...]]] = {}  # page -> its key in _found
        self._nodes = 0  # given out so far

    def root(self, salt: str | None) -> Node:
        """Where the chains of a salt begin; tagged, so that no salt equals another or none."""
        return ("root", salt)

    def find(self, node: Node, tokens: Sequence[int]) -> tuple[int, Node] | None:
        """The page that holds ``tokens`` after ``node``, and its own node."""
        return self._found.get((node, tuple(tokens)))

    def publish(self, node: Node, tokens: Sequence[int], page: int) -> Node:
        """From now on ``page`` is found by its content; if another page already is, that one stays. Returns the
        content's node."""
        key = (node, tuple(tokens))
        if key not in self._found:
            self._nodes += 1
            self._found[key] = page, self._nodes
            self._keys[page] = key
        return self._found[key][1]

    def forget(self, page: int) -> None:
        """The page is about to be reused. Pages that followed it keep their nodes but are no longer reached."""
        del self._found[self._keys.pop(page)]

    def __contains__(self, page: int) -> bool:
        return page in self._keys


class PagePool:
    """Reference counts, the free list and the cached pages of ``num_pages`` pages. All methods O(1) a page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.refcounts = [0] * num_pages
        self.index = PrefixIndex()
        self.peak = self.evictions = 0
        self.shared = 0  # pages with more than one user
        self.filled_slots = 0  # of used pages, a shared page counted once
        self.fills = [0] * num_pages  # tokens in each page
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page released last is reused first
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused but findable, least recently used first

    @property
    def total(self) -> int:
        """Pages in the pool."""
        return len(self.refcounts)

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Pages with a user."""
        return len(self.refcounts) - len(self._free) - len(self._cached)

    @property
    def cached(self) -> tuple[int, ...]:
        """Pages without a user whose content can be found, least recently used first."""
        return tuple(self._cached)

    def state(self, page: int) -> str:
        """"used", "cached" or "free"."""
        return "used" if self.refcounts[page] else "cached" if page in self._cached else "free"

    def fill(self, page: int) -> int:
        """Tokens in a page."""
        return self.fills[page]

    def set_fill(self, page: int, tokens: int) -> None:
        """A used page now holds so many tokens."""
        self.filled_slots += tokens - self.fills[page]
        self.fills[page] = tokens

    def take(self, number: int, for_whom: str) -> list[int]:
        """Pages for a first user, all or nothing: free ones first, then the least recently used cached ones."""
        self.require(number, for_whom)
        pages = [self._free.pop() if self._free else self._evict() for _ in range(number)]
        for page in pages:
            self.refcounts[page] = 1
        self.peak = max(self.peak, self.used)
        return pages

    def next_evicted(self, number: int) -> tuple[int, ...]:
        """The cached pages that taking so many would evict."""
        return tuple(islice(self._cached, max(0, number - len(self._free))))

    def require(self, number: int, for_whom: str, besides: Sequence[int] = ()) -> None:
        """OutOfPagesError unless so many pages can be taken and the pages ``besides`` be shared, too."""
        available = self.available - sum([not self.refcounts[page] for page in besides])
        if number > available:
            raise OutOfPagesError(f"{for_whom} needs {number} pages, {available} of {self.total} are free; release a "
                                  f"handle, or try again later")

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self.index.forget(page)  # before anyone can write to it
        self.fills[page] = 0
        self.evictions += 1
        return page

    def share(self, page: int) -> None:
        """One more user of a used or cached page."""
        if page in self._cached:
            del self._cached[page]
            self.filled_slots += self.fills[page]
        self.refcounts[page] += 1
        self.shared += self.refcounts[page] == 2
        self.peak = max(self.peak, self.used)

    def drop(self, page: int) -> None:
        """One user less; the last one leaves the page cached if its content can be found, else free."""
        self.refcounts[page] -= 1
        self.shared -= self.refcounts[page] == 1
        if self.refcounts[page]:
            return
        self.filled_slots -= self.fills[page]
        if page in self.index:
            self._cached[page] = None
        else:
            self.fills[page] = 0
            self._free.append(page)

    def faults(self, held: Counter[int]) -> list[str]:
        """What is wrong, in words, given how often each page stands in a block table. O(pages)."""
        free = Counter(self._free)
        wrong = [f"page {page}: refcount {refcount}, listed by {held[page]} tables"
                 for page, refcount in enumerate(self.refcounts) if refcount != held[page]]
        for page in range(self.total):
            places = [name for name, there in (("free", free[page]), ("used", held[page]),
                                               ("cached", page in self._cached)) if there]
            if len(places) != 1 or free[page] > 1:
                wrong.append(f"page {page} is {' and '.join(places) or 'nowhere'}, {free[page]} times in the free list")
        if self.shared != sum(refcount > 1 for refcount in self.refcounts):
            wrong.append(f"{self.shared} pages are counted as shared")
        wrong += [f"page {page} is free and can still be found" for page in free if page in self.index]
        filled = sum(self.fills[page] for page, tables in held.items() if tables)
        if filled != self.filled_slots:
            wrong.append(f"{filled} slots are filled, {self.filled_slots} were counted")
        return wrong


# ----------------------------------------------------------------------------------------- the numbers inside the pages


class KVStore(ABC):
    """The numbers inside the pages, in a form of its own: each backend has a store that its attention reads. The page
    manager says which page; the store does not know which request that belongs to.

    A token's key is ``width`` = layers * kv_heads * head_width numbers, layer after layer; its value likewise.

    Int8 pages also have *tails* (``backends/int8_pages.py``): the float keys of a page that is being filled. For pages
    of floats the defaults are right.
    """

    width: int
    page_bytes: int  # of one page, keys and values of all layers
    tail_bytes: int = 0  # of one tail
    peak_tails: int = 0  # the most tails held at a time

    @abstractmethod
    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        """Put one token's key and value into a slot."""

    @abstractmethod
    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        """The key and the value in a slot."""

    @abstractmethod
    def copy_page(self, source: int, target: int, origin: Any = None) -> None:
        """Copy all slots of a page, for copy-on-write; from the pages of another store of the same kind and shape
        (``origin``) when swapping."""

    def reserve_tails(self, count: int) -> None:
        """Take the memory of ``count`` tails now. BackendError if there is too little."""
        return  # by default a tail takes its memory when it is opened, if there are tails at all

    def drop_tail(self, page: int) -> None:
        """The page is full and will not be computed again, or it has no user any more: its tail is not needed."""
        return  # by default there is none


class PlainStore(KVStore):
    """The simplest store, for a page manager without a model: (key, value) by the slot that they were written to."""

    def __init__(self, page_size: int, width: int) -> None:
        self.page_size, self.width = page_size, width
        self.page_bytes = 2 * 8 * page_size * width  # doubles
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


# --------------------------------------------------------------------------------------------------------- block tables

@dataclass(eq=False, repr=False, slots=True)
class KVHandle:
    """A request's key to its pages: this very object, no other like it. Only the manager that gave it out knows it."""

    request_id: str
    pages: tuple[int, ...] = ()  # its block table, for others to read; () while swapped out, and once released

    def __repr__(self) -> str:
        return f"KVHandle(request_id={self.request_id!r})"

    def __copy__(self) -> KVHandle:
        return KVHandle(self.request_id)  # not this very object, so it opens nothing


@dataclass(eq=False, repr=False, slots=True)
class _Table(KVHandle):
    """What the manager gives out as a handle, and what others need not know of it."""

    root: Node = None
    length: int = 0  # tokens whose slots are filled
    nodes: list[Node] = field(default_factory=list)  # content of the leading full pages, as far as it is known
    host_pages: list[int] | None = None  # where the tokens are while swapped out
    pool: PagePool | None = field(default=None, init=False)  # whose pages these are, from opening it to its release


class KVCacheManager:
    """Gives out pages and takes them back.

    ``width`` is how many numbers a token's key has (all layers together). ``host_pages`` is the size of a second
    pool for tables that are swapped out, its numbers in ``host_store``. ``observer(kind, request_id, pages)`` is told
    of every change: "allocate", "share", "copy", "append", "publish", "evict", "release", "swap_out", "swap_in" (see
    ``timeline.py`` for what each means).
    """

    def __init__(self, num_pages: int, page_size: int, width: int = 1, prefix_sharing: bool = False,
                 store: KVStore | None = None, host_pages: int = 0, host_store: KVStore | None = None,
                 observer: Callable[[str, str, tuple[int, ...]], None] | None = None) -> None:
        for name, number, low in (("num_pages", num_pages, 1), ("page_size", page_size, 1), ("width", width, 1),
                                  ("host_pages", host_pages, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < low:
                raise RequestError(f"{name} must be an integer from {low}, not {number!r}")
        self.page_size, self.width, self.prefix_sharing = page_size, width, prefix_sharing
        self.store: KVStore = store if store is not None else PlainStore(page_size, width)
        self.host_store: KVStore = host_store if host_store is not None else PlainStore(page_size, width)
        self._pool = PagePool(num_pages, page_size)
        self._host = PagePool(host_pages, page_size)
        self._observer = observer or (lambda kind, request_id, pages: None)
        self.gate: Callable[[int, str], None] = lambda number, for_whom: None  # asked before fresh pages are taken
        self._tables: dict[_Table, None] = {}  # those that are open, in the order in which they were opened
        self._counts: Counter[str] = Counter()
        self._misses = 0

    def __repr__(self) -> str:
        return (f"<KVCacheManager: {self.free_pages} of {self.total_pages} pages of {self.page_size} tokens free, "
                f"{self.cached_pages} of them cached; {len(self._tables)} block tables>")

    def _repr_html_(self) -> str | None:
        return picture("page_pool", self)

    # ---------------------------------------------------------------------------------------- observing

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""
        return self._pool.total

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out: in no table, their content findable or not."""
        return self._pool.available

    @property
    def cached_pages(self) -> int:
        """Those free pages whose content can still be found."""
        return len(self._pool.cached)

    @property
    def used_pages(self) -> int:
        """Pages in a table."""
        return self._pool.used

    @property
    def sharing(self) -> bool:
        """Is any page in more than one table?"""
        return self._pool.shared > 0

    @property
    def total_host_pages(self) -> int:
        """Pages in the host pool."""
        return self._host.total

    @property
    def free_host_pages(self) -> int:
        """Host pages that hold nothing."""
        return self._host.available

    def owns(self, handle: KVHandle) -> bool:
        """Is this a handle of this manager that was not released?"""
        return isinstance(handle, _Table) and handle.pool is self._pool

    def length(self, handle: KVHandle) -> int:
        """Tokens stored for this handle."""
        return self._table(handle).length

    def pages(self, handle: KVHandle) -> tuple[int, ...]:
        """The block table: page ids in the order of positions; empty while swapped out."""
        return self._table(handle).pages

    def resident_pages(self, handle: KVHandle) -> tuple[int, ...]:
        """The same, to compute with: RequestError while swapped out."""
        return self._resident(handle).pages

    def page(self, page_id: int) -> PageInfo:
        """Who uses a page. O(tables): for people and tests, not for the hot path."""
        if isinstance(page_id, bool) or not isinstance(page_id, int) or not 0 <= page_id < self.total_pages:
            raise RequestError(f"there is no page {page_id!r}; pages are 0 to {self.total_pages - 1}")
        users = tuple(table.request_id for table in self._tables if page_id in table.pages)
        return PageInfo(self._pool.refcounts[page_id], users, self._pool.state(page_id))

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens: ceil(tokens / page_size)."""
        return -(-tokens // self.page_size)

    def stats(self) -> CacheStats:
        """Counters and the pool's state. O(1)."""
        counts, pool = self._counts, self._pool
        return CacheStats(
            counts["allocations"], counts["releases"], counts["hits"], self._misses, counts["copies"],
            pool.evictions, pool.peak, pool.peak * self.store.page_bytes, self.internal_fragmentation(),
            counts["swaps_out"], counts["swaps_in"], self.store.peak_tails * self.store.tail_bytes)

    def internal_fragmentation(self) -> int:
        """Slots of used pages that hold no token. O(1)."""
        return self._pool.used * self.page_size - self._pool.filled_slots

    # ------------------------------------------------------------------------- opening and closing tables

    def allocate(self, request_id: str, token_count: int, tokens: Sequence[int] | None = None,
                 salt: str | None = None) -> KVHandle:
        """Open a block table with pages for ``token_count`` tokens, all or nothing. O(pages).

        With prefix sharing and the ``tokens`` themselves, the table starts on the longest run of pages that hold
        them, short of the last token; ``length`` says how many are there. OutOfPagesError if the pool cannot hold
        them now, PoolTooSmallError (both that and a CapacityError) if it never could.
        """
        _check_id(request_id)
        if isinstance(token_count, bool) or not isinstance(token_count, int) or token_count < 0:
            raise RequestError(f"token_count must be an integer from 0, not {token_count!r}")
        needed = self.pages_for(token_count)
        if needed > self.total_pages:
            raise PoolTooSmallError(f"{token_count} tokens need {needed} pages of {self.page_size}; the pool has "
                                    f"{self.total_pages}: shorten the request or enlarge the pool")
        table = _Table(request_id, (), self._pool.index.root(salt))
        found = self._find_prefix(table.root, tokens[:token_count]) if self.prefix_sharing and tokens else []
        shared = [page for page, _ in found]
        self._ask(needed - len(shared), request_id, besides=shared)
        for page in shared:
            self._pool.share(page)
        if shared:
            self._observer("share", request_id, tuple(shared))
        fresh = self._take(needed - len(shared), request_id)
        table.pages, table.nodes = (*shared, *fresh), [node for _, node in found]
        table.length = len(found) * self.page_size
        self._counts["hits"] += table.length
        self._observer("allocate", request_id, tuple(fresh))
        return self._open(table)

    def _find_prefix(self, root: Node, tokens: Sequence[int]) -> list[tuple[int, Node]]:
        """Pages that hold the beginning of ``tokens``, leaving at least the last token to be computed."""
        found: list[tuple[int, Node]] = []
        node = root
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            hit = self._pool.index.find(node, tokens[start:start + self.page_size])
            if hit is None:
                break
            found.append(hit)
            node = hit[1]
        return found

    def fork(self, handle: KVHandle, request_id: str) -> KVHandle:
        """A second table over the same tokens. Pages that hold tokens are shared until one side writes. O(pages)."""
        parent = self._resident(handle)
        _check_id(request_id)
        shared = parent.pages[:self.pages_for(parent.length)]
        for page in shared:
            self._pool.share(page)
        self._counts["hits"] += parent.length
        child = self._open(_Table(request_id, shared, parent.root, parent.length, list(parent.nodes)))
        self._observer("share", request_id, shared)
        return child

    def release(self, handle: KVHandle) -> None:
        """Close the table; pages without another user are free again, or cached. O(pages)."""
        table = self._table(handle)
        pages = self._close(table)
        self._counts["releases"] += 1
        for page in reversed(pages):  # the end first: it is evicted before the beginning, which more can use
            self._drop(page)
        for page in table.host_pages or ():
            self._drop(page, self._host, self.host_store)
        self._observer("release", table.request_id, pages)

    # -------------------------------------------------------------------------------------------- filling

    def reserve(self, handle: KVHandle, token_count: int) -> None:
        """Make positions length .. token_count - 1 writable: add the missing pages, copy shared ones that would be
        written. All or nothing: OutOfPagesError leaves everything as it was. O(new pages)."""
        table = self._resident(handle)
        if token_count <= len(table.pages) * self.page_size and not self._pool.shared:
            return  # as nearly always while decoding
        shared = self._shared_among(table, table.length, token_count)
        missing = max(0, self.pages_for(token_count) - len(table.pages))
        if not shared and not missing:
            return
        self._ask(len(shared) + missing, table.request_id)
        fresh = self._take(len(shared) + missing, table.request_id)
        if shared:
            self._copy_pages([table.pages[i] for i in shared], fresh)
            for index, target in zip(shared, fresh):
                self._replace(table, index, target)
        added = tuple(fresh[len(shared):])
        table.pages += added
        if added:
            self._observer("allocate", table.request_id, added)

    def commit(self, handle: KVHandle, token_count: int, tokens: Sequence[int] | None = None) -> None:
        """The first ``token_count`` positions now hold computed keys and values. With prefix sharing and the
        ``tokens`` themselves, pages that became full are published. O(new tokens)."""
        if isinstance(handle, _Table) and handle.pool is self._pool and handle.host_pages is None:
            table = handle  # at once: two calls less for every token
        else:
            table = self._resident(handle)
        page_size = self.page_size
        if not table.length <= token_count <= len(table.pages) * page_size:
            raise RequestError(f"{table.request_id} has {table.length} tokens and {len(table.pages)} pages of "
                               f"{page_size}; it cannot hold {token_count}")
        if self._pool.shared and self._shared_among(table, table.length, token_count):
            raise RequestError(f"{table.request_id} shares the page it would fill; reserve() the positions first")
        self._misses += token_count - table.length  # an attribute: this is the hot path
        first, last, filled = table.length // page_size, token_count // page_size, token_count % page_size
        if filled and last == first:  # within one page, as nearly always while decoding
            pool, page = self._pool, table.pages[last]
            pool.filled_slots += filled - pool.fills[page]
            pool.fills[page] = filled
        else:
            for i in range(first, self.pages_for(token_count)):
                self._pool.set_fill(table.pages[i], min(page_size, token_count - i * page_size))
            for page in table.pages[first:last]:
                self.store.drop_tail(page)
        table.length = token_count
        if self.prefix_sharing and tokens is not None:
            self._publish(table, tokens)

    def _publish(self, table: _Table, tokens: Sequence[int]) -> None:
        """Name the content of the full pages that have no node yet."""
        for i in range(len(table.nodes), table.length // self.page_size):
            node = table.nodes[-1] if table.nodes else table.root
            content = tokens[i * self.page_size:(i + 1) * self.page_size]
            if len(content) < self.page_size:  # the caller knows only the beginning of what is stored
                break
            new = table.pages[i] not in self._pool.index
            table.nodes.append(self._pool.index.publish(node, content, table.pages[i]))
            if new and table.pages[i] in self._pool.index:
                self._observer("publish", table.request_id, (table.pages[i],))

    def append(self, handle: KVHandle, key: Sequence[float], value: Sequence[float]) -> None:
        """Store the next position's key and value, growing by a page where needed. O(width)."""
        position = self._resident(handle).length
        key, value = self._numbers("key", key), self._numbers("value", value)
        self.reserve(handle, position + 1)
        self.store.write(*self._slot(self._table(handle).pages, position), key, value)
        self.commit(handle, position + 1)
        self._observer("append", handle.request_id, self.pages(handle))

    def read(self, handle: KVHandle, position: int) -> tuple[Sequence[float], Sequence[float]]:
        """Key and value of a stored position. IndexError outside 0 .. length - 1."""
        table = self._table(handle)
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < table.length:
            raise IndexError(f"position {position!r} of {handle.request_id} is not stored; stored: "
                             f"{table.length} tokens")
        if table.host_pages is not None:
            return self.host_store.read(*self._slot(table.host_pages, position))
        return self.store.read(*self._slot(table.pages, position))

    # ------------------------------------------------------------------------------------------- swapping

    def swap_out(self, handle: KVHandle) -> None:
        """Copy the table's tokens to host pages and give its own pages back. All or nothing: OutOfPagesError if the
        host pool cannot take them. O(pages)."""
        table = self._resident(handle)
        filled = table.pages[:self.pages_for(table.length)]
        host_pages = self._host.take(len(filled), f"swapping out {table.request_id}")
        self._copy_pages(filled, host_pages, self._host, self.host_store, self.store)
        for page in reversed(table.pages):
            self._drop(page)
        self._observer("swap_out", table.request_id, table.pages)
        table.pages, table.host_pages = (), host_pages
        self._counts["swaps_out"] += 1

    def swap_in(self, handle: KVHandle, token_count: int) -> None:
        """Bring the tokens back into pages for ``token_count`` tokens and free the host pages. All or nothing:
        OutOfPagesError if the pool cannot take them now. O(pages)."""
        table = self._table(handle)
        if table.host_pages is None:
            raise RequestError(f"{table.request_id} is not swapped out; there is nothing to bring back")
        needed = self.pages_for(max(token_count, table.length))
        self._ask(needed, table.request_id)
        pages = self._take(needed, table.request_id)
        self._copy_pages(table.host_pages, pages, self._pool, self.store, self.host_store)
        for page in table.host_pages:
            self._drop(page, self._host, self.host_store)
        table.pages, table.host_pages = tuple(pages), None
        table.nodes = []  # these are copies: the originals may be published still
        for i in range(self.pages_for(table.length)):
            self._pool.set_fill(pages[i], min(self.page_size, table.length - i * self.page_size))
        self._counts["swaps_in"] += 1
        self._observer("swap_in", table.request_id, tuple(pages))

    # ------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Raise EngineError with a full account unless pages are conserved. O(pages + tables)."""
        tables = self._tables
        wrong = self._pool.faults(Counter(page for table in tables for page in table.pages))
        wrong += [f"host: {fault}" for fault in
                  self._host.faults(Counter(page for table in tables for page in table.host_pages or ()))]
        for table in tables:
            if len(set(table.pages)) != len(table.pages):
                wrong.append(f"{table.request_id} lists a page twice: {table.pages}")
            if table.host_pages is None and table.length > len(table.pages) * self.page_size:
                wrong.append(f"{table.request_id} has {table.length} tokens in {len(table.pages)} pages")
            for i, page in enumerate(table.pages):
                tokens = min(max(table.length - i * self.page_size, 0), self.page_size)
                if tokens != self._pool.fill(page):
                    wrong.append(f"{table.request_id} has {tokens} tokens in page {page}, counted "
                                 f"{self._pool.fill(page)}")
        if wrong:
            raise EngineError("pages are not conserved: " + "; ".join(wrong))

    # ------------------------------------------------------------------------------------------- inside

    def _numbers(self, name: str, vector: Sequence[float]) -> list[float]:
        """The vector as ``width`` floats, or RequestError before anything has changed."""
        try:
            numbers = [float(number) for number in vector]
        except (TypeError, ValueError):
            raise RequestError(f"the {name} must be a sequence of numbers, not {vector!r}") from None
        if len(numbers) != self.width:
            raise RequestError(f"the {name} has {len(numbers)} numbers; this cache stores {self.width} a token")
        return numbers

    def _ask(self, number: int, for_whom: str, besides: Sequence[int] = ()) -> None:
        """OutOfPagesError, with nothing changed, unless so many fresh pages can be taken."""
        if number:
            self.gate(number, for_whom)
        self._pool.require(number, for_whom, besides)

    def _take(self, number: int, for_whom: str) -> list[int]:
        """Fresh pages. What is evicted for them is told first."""
        if doomed := self._pool.next_evicted(number):
            self._observer("evict", for_whom, doomed)
        return self._pool.take(number, for_whom)

    def _drop(self, page: int, pool: PagePool | None = None, store: KVStore | None = None) -> None:
        """One user less; with the last one goes what the store kept besides the page."""
        pool = pool or self._pool
        pool.drop(page)
        if not pool.refcounts[page]:
            (store or self.store).drop_tail(page)

    def settle_unused(self, pages: Iterable[int]) -> None:
        """A step has computed in these pages: what a store kept for its rows goes, where nobody uses the page (any
        more: a request may be cancelled by another thread while it is computed)."""
        for page in pages:
            if not self._pool.refcounts[page]:
                self.store.drop_tail(page)

    def _open(self, table: _Table) -> KVHandle:
        table.pool = self._pool
        self._tables[table] = None
        self._counts["allocations"] += 1
        return table

    def _close(self, table: _Table) -> tuple[int, ...]:
        """Its handle reaches nothing any more; the pages that it had."""
        pages, table.pages, table.pool = table.pages, (), None
        del self._tables[table]
        return pages

    def _table(self, handle: KVHandle) -> _Table:
        if isinstance(handle, _Table) and handle.pool is self._pool:
            return handle
        raise StaleHandleError(f"{handle!r} was released, or is not of this cache manager; allocate a new one")

    def _resident(self, handle: KVHandle) -> _Table:
        table = self._table(handle)
        if table.host_pages is not None:
            raise RequestError(f"{table.request_id} is swapped out; swap it in before its pages are used")
        return table

    def _slot(self, pages: Sequence[int], position: int) -> tuple[int, int]:
        return pages[position // self.page_size], position % self.page_size

    def _shared_among(self, table: _Table, start: int, end: int) -> list[int]:
        """Indices in the block table of shared pages that positions start .. end - 1 fall into."""
        if start >= end or not self._pool.shared:
            return []
        last = min(len(table.pages), self.pages_for(end))
        return [i for i in range(start // self.page_size, last) if self._pool.refcounts[table.pages[i]] > 1]

    def _copy_pages(self, sources: Sequence[int], fresh: Sequence[int], pool: PagePool | None = None,
                    store: KVStore | None = None, origin: KVStore | None = None) -> None:
        """Copy numbers into the first of the pages just taken; if that fails, give all of those back."""
        try:
            for source, target in zip(sources, fresh):
                (store or self.store).copy_page(source, target, origin)
        except BaseException:
            for page in reversed(fresh):
                self._drop(page, pool, store)
            raise

    def _replace(self, table: _Table, index: int, target: int) -> None:
        """Copy-on-write, second half: the numbers are copied, now the table changes over."""
        source = table.pages[index]
        table.pages = (*table.pages[:index], target, *table.pages[index + 1:])
        self._pool.set_fill(target, self._pool.fill(source))
        self._pool.drop(source)
        self._counts["copies"] += 1
        self._observer("copy", table.request_id, (source, target))


def _check_id(request_id: object) -> None:
    if not isinstance(request_id, str):
        raise RequestError(f"request_id must be a string, not {request_id!r}")
