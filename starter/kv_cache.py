"""M2, M4 · The paged KV cache: which pages hold a request's keys and values; sharing, copying, swapping.

A page has ``page_size`` slots, a slot holds one token's key and value. A request's *block table* lists its pages in
order, so position p lives in page table[p // page_size] at offset p % page_size (Kwon et al. 2023, "PagedAttention":
fixed pages, block tables, reference counts, copy-on-write and swapping are taken from there).

    pool      0 [r1] 1 [r1 r2] 2 [r2] 3 [free] 4 [free]            page_size 4
    r1: pages (1, 0), 6 tokens     1: . . . .   0: . . _ _         2 slots reserved but empty
    r2: pages (1, 2), 5 tokens     shares page 1 after a fork, page 2 is its own copy

A page's life. It is freed in one place, ``PagePool.drop``, when its last user leaves:

    free ──take──▶ used (refcount 1, 2, ...) ──drop──▶ free
                    ▲                             └──▶ cached, if its content can be found again
                    ├─────── share ◀── find(content) ───┤
                    └─────── take ◀── evict the least recently used, if no page is free

The manager holds tables and counts; the numbers are in a *store*, which the decoder uses through the same tables.

Promises, each a property in tests/test_kv_cache.py:
- Conservation: after every call, returned or raised, free + cached + used pages = total; ``check()`` proves it.
- All or nothing: a call that raises OutOfPagesError has changed no table, no count and no stored number.
- Isolation: a slot is written only while its page is in exactly one table; a shared page is copied first.
- A page that can still be found is never handed out: eviction forgets it first, the least recently used one.
- At least one token of a prompt is left to compute, also when all of it was found.
- A released handle, or one from another manager, is refused: StaleHandleError.
- An observer may raise at any change. The call ends there with that exception: changes that were observed are complete,
  no page is lost, and a call that was to return a handle has opened nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from .base.strict_json import Integer, Text, check_argument
from .base.vectors import checked_vector
from .base.wings import picture
from .errors import EngineError, OutOfPagesError, PoolTooSmallError, RequestError, StaleHandleError


@dataclass(frozen=True)
class PageInfo:
    """One page, for people and tests."""

    refcount: int  # tables that list it
    users: tuple[str, ...]  # their request ids
    state: str  # "free", "used" or "cached"


@dataclass(frozen=True)
class CacheStats:
    """Counters since the manager was made, and the state of the pool now. A shared page counts once."""

    allocations: int  # handles given out, forks included
    releases: int  # handles taken back
    hits: int  # tokens found already computed: shared prefixes and forks
    misses: int  # tokens that were computed
    copies: int  # pages copied on write
    evictions: int  # cached pages whose content was given up for another use
    peak_pages: int  # the most pages in use at once
    peak_bytes: int
    internal_fragmentation: int  # empty slots in used pages now
    swaps_out: int = 0  # tables moved to host pages
    swaps_in: int = 0  # tables brought back
    peak_tail_bytes: int = 0  # the most bytes of tails at once (see ``KVStore``)


# -------------------------------------------------------------------------------------- the numbers inside the pages


class KVStore(ABC):
    """The numbers inside the pages, in a form of its own: each backend has a store that its attention reads. The page
    manager says which page; the store does not know which request it belongs to.

    A token's key is ``width`` = layers * kv_heads * head_width numbers, layer after layer; its value likewise. Int8
    pages also have *tails*, the float keys of a page that is being filled (``backends/int8_pages.py``).
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
        """Copy all slots of a page: for copy-on-write from this store, for swapping from ``origin``, another store of
        the same kind and shape."""

    def reserve_tails(self, count: int) -> None:
        """Take the memory of ``count`` tails now. BackendError if there is too little."""
        return  # by default there are no tails, or each takes its memory when it is opened

    def drop_tail(self, page: int) -> None:
        """The page is full and will not be computed again, or it has no user any more: its tail is not needed."""
        return


class PlainStore(KVStore):
    """The simplest store, for a page manager without a model: a page is a dict of keys and values by offset."""

    def __init__(self, page_size: int, width: int) -> None:
        self.width, self.page_bytes = width, 2 * 8 * page_size * width  # doubles
        self._pages: dict[int, dict[int, tuple[list[float], list[float]]]] = {}

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        self._pages.setdefault(page, {})[offset] = ([*map(float, key)], [*map(float, value)])

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        key, value = self._pages[page][offset]
        return list(key), list(value)

    def copy_page(self, source: int, target: int, origin: KVStore | None = None) -> None:
        pages = origin._pages if isinstance(origin, PlainStore) else self._pages
        self._pages[target] = dict(pages.get(source, {}))


# --------------------------------------------------------------------------------------------------------- the pages

_COUNT, _ID = Integer(), Text()
Node = Hashable  # where a prompt begins (``PrefixIndex.root``), or the number of a published page's content


class PrefixIndex:
    """Content -> page, for full pages whose keys and values were computed. All methods O(page_size).

    Keys and values depend on all tokens before them, so a page's content is (node of the page before, tokens of this
    page), and each content has a *node* of its own. Tokens are compared one by one: whatever their hashes, two
    prefixes are never confused.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Node, tuple[int, ...]], tuple[int, Node]] = {}
        self._keys: dict[int, tuple[Node, tuple[int, ...]]] = {}  # page -> its key in _found
        self._nodes = 0  # given out so far

    def root(self, salt: str | None) -> Node:
        """The node before the first page, equal only for equal salts: other requests share no page."""
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
    """The pages of one store: how many users each has, and which are free or cached. All methods O(1) a page."""

    def __init__(self, num_pages: int, store: KVStore) -> None:
        self.store = store
        self.index = PrefixIndex()
        self.total = num_pages
        self.refcounts = [0] * num_pages  # users of each page
        self.shared = 0  # pages with more than one
        self.cached: OrderedDict[int, None] = OrderedDict()  # unused but findable pages, least recently used first
        self.peak = self.evictions = 0
        self.on_evict: Callable[[str, tuple[int, ...]], None] = lambda for_whom, pages: None  # before they are taken
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is reused first

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones and cached ones."""
        return len(self._free) + len(self.cached)

    @property
    def used(self) -> int:
        """Pages with a user."""
        return self.total - self.available

    def state(self, page: int) -> str:
        """As in ``PageInfo``."""
        return "used" if self.refcounts[page] else "cached" if page in self.cached else "free"

    def require(self, number: int, for_whom: str, sharing: Sequence[int] = ()) -> None:
        """OutOfPagesError unless ``number`` pages can be taken once the pages ``sharing`` have one more user each."""
        available = self.available - sum(not self.refcounts[page] for page in sharing)
        if number > available:
            raise OutOfPagesError(f"{for_whom} needs {number} pages, {available} of {self.total} are free; release a "
                                  f"handle, or try again later")

    def take(self, number: int, for_whom: str) -> list[int]:
        """Pages for a first user, all or nothing: free ones first, then the least recently used cached ones."""
        self.require(number, for_whom)
        if evicted := self.next_evicted(number):
            self.on_evict(for_whom, evicted)
        pages = [self._free.pop() if self._free else self._evict() for _ in range(number)]
        for page in pages:
            self.refcounts[page] = 1
        self.peak = max(self.peak, self.used)
        return pages

    def take_copies(self, origin: PagePool, sources: Sequence[int], number: int, for_whom: str) -> list[int]:
        """Pages for a first user, all or nothing; the first ones hold what the pages ``sources`` of ``origin`` hold."""
        pages = self.take(number, for_whom)
        try:
            for source, target in zip(sources, pages):
                self.store.copy_page(source, target, origin.store)
        except BaseException:
            self.drop_all(pages)
            raise
        return pages

    def next_evicted(self, number: int) -> tuple[int, ...]:
        """The cached pages that ``take(number)`` would evict."""
        return tuple(islice(self.cached, max(0, number - len(self._free))))

    def _evict(self) -> int:
        page, _ = self.cached.popitem(last=False)
        self.index.forget(page)  # before its next user writes to it
        self.evictions += 1
        return page

    def share(self, page: int) -> None:
        """One more user of a used or cached page."""
        self.cached.pop(page, None)
        self.refcounts[page] += 1
        self.shared += self.refcounts[page] == 2
        self.peak = max(self.peak, self.used)

    def drop(self, page: int) -> None:
        """One user less. When the last one leaves, the store drops the page's tail, and the page is cached if its
        content can be found, else free."""
        self.refcounts[page] -= 1
        self.shared -= self.refcounts[page] == 1
        if self.refcounts[page]:
            return
        self.store.drop_tail(page)
        if page in self.index:
            self.cached[page] = None
        else:
            self._free.append(page)

    def drop_all(self, pages: Sequence[int]) -> None:
        """One user less of each page of a table."""
        for page in reversed(pages):  # so the end is evicted before the beginning, which more requests can use
            self.drop(page)

    def faults(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """Contradictions between the pool and the block tables over it, in words. O(pages)."""
        held, free = Counter(page for pages in tables for page in pages), Counter(self._free)
        shared = sum(users > 1 for users in held.values())
        wrong = [f"{self.shared} pages are counted as shared, {shared} are"] if self.shared != shared else []
        for page, refcount in enumerate(self.refcounts):
            places = ["free"] * free[page] + ["used"] * (held[page] > 0) + ["cached"] * (page in self.cached)
            if len(places) != 1:
                wrong.append(f"page {page} is {' and '.join(places) or 'nowhere'} ({len(places)} times)")
            if refcount != held[page]:
                wrong.append(f"page {page}: refcount {refcount}, listed by {held[page]} tables")
            if free[page] and page in self.index:
                wrong.append(f"page {page} is free and can still be found")
        return wrong


# -------------------------------------------------------------------------------------------- block tables, the manager


@dataclass(eq=False, repr=False)
class KVHandle:
    """A request's block table. The manager knows its open handles by identity: a copy, or a released handle, opens
    nothing. Others read ``request_id`` and ``pages``; the rest is the manager's."""

    request_id: str
    pages: tuple[int, ...] = ()  # replaced, never changed in place; empty while swapped out, and once released
    length: int = 0  # tokens stored
    nodes: list[Node] = field(default_factory=list)  # the root, then one for each leading page of known content
    host_pages: list[int] | None = None  # where the tokens are while swapped out

    def __repr__(self) -> str:
        return f"KVHandle(request_id={self.request_id!r})"


class KVCacheManager:
    """Gives out pages and takes them back.

    width          numbers in a token's key, all layers together
    host_pages     size of a second pool, for tables that are swapped out; its numbers are in ``host_store``
    observer       called as observer(kind, request_id, pages) at every change: "allocate", "share", "copy", "append",
                   "publish", "evict", "release", "swap_out", "swap_in" (see ``timeline.py``); "evict" comes before the
                   pages are taken, all others after the change
    before_take    an attribute, called as before_take(number, request_id) before fresh pages are taken. To refuse, it
                   raises OutOfPagesError; fault injection does
    """

    def __init__(self, num_pages: int, page_size: int, width: int = 1, prefix_sharing: bool = False,
                 store: KVStore | None = None, host_pages: int = 0, host_store: KVStore | None = None,
                 observer: Callable[[str, str, tuple[int, ...]], None] | None = None) -> None:
        for name, number, low in (("num_pages", num_pages, 1), ("page_size", page_size, 1), ("width", width, 1),
                                  ("host_pages", host_pages, 0)):
            check_argument(name, number, Integer(low))
        self.page_size, self.width, self.prefix_sharing = page_size, width, prefix_sharing
        self.store: KVStore = store if store is not None else PlainStore(page_size, width)
        self.host_store: KVStore = host_store if host_store is not None else PlainStore(page_size, width)
        self.before_take: Callable[[int, str], None] = lambda number, request_id: None
        self._observer = observer or (lambda kind, request_id, pages: None)
        self.total_pages, self.total_host_pages = num_pages, host_pages
        self._pool, self._host = PagePool(num_pages, self.store), PagePool(host_pages, self.host_store)
        self._pool.on_evict = partial(self._observer, "evict")
        self._tables: dict[KVHandle, None] = {}  # the open ones, in the order in which they were opened
        self._counts = dict.fromkeys(
            ("allocations", "releases", "hits", "misses", "copies", "swaps_out", "swaps_in"), 0)

    def __repr__(self) -> str:
        return (f"<KVCacheManager: {self.free_pages} of {self.total_pages} pages of {self.page_size} tokens free, "
                f"{self.cached_pages} of them cached; {len(self._tables)} block tables>")

    def _repr_html_(self) -> str | None:
        return picture("page_pool", self)

    # -------------------------------------------------------------------------------- what is there now

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
    def free_host_pages(self) -> int:
        """Host pages that hold nothing."""
        return self._host.available

    def owns(self, handle: KVHandle) -> bool:
        """Is this a handle of this manager that was not released?"""
        return isinstance(handle, KVHandle) and handle in self._tables

    def length(self, handle: KVHandle) -> int:
        """Tokens stored for this handle."""
        return self._table(handle).length

    def pages(self, handle: KVHandle) -> tuple[int, ...]:
        """The block table: page ids in the order of positions; empty while swapped out."""
        return self._table(handle).pages

    def resident_pages(self, handle: KVHandle) -> tuple[int, ...]:
        """The block table, to compute with: RequestError while swapped out."""
        return self._table(handle, resident=True).pages

    def page(self, page_id: int) -> PageInfo:
        """Who uses a page. O(tables)."""
        check_argument("page_id", page_id, Integer(0, self.total_pages - 1))
        users = tuple(table.request_id for table in tuple(self._tables) if page_id in table.pages)
        return PageInfo(self._pool.refcounts[page_id], users, self._pool.state(page_id))

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens need: ceil(tokens / page_size)."""
        return -(-tokens // self.page_size)

    def stats(self) -> CacheStats:
        """Counters and the pool's state. O(tables)."""
        pool, store = self._pool, self.store
        return CacheStats(
            **self._counts, evictions=pool.evictions, peak_pages=pool.peak, peak_bytes=pool.peak * store.page_bytes,
            internal_fragmentation=self.internal_fragmentation(), peak_tail_bytes=store.peak_tails * store.tail_bytes)

    def internal_fragmentation(self) -> int:
        """Slots of used pages that hold no token, a shared page counted once. O(tables), with sharing O(pages)."""
        size = self.page_size
        if not self._pool.shared:
            return self._pool.used * size - sum(table.length for table in tuple(self._tables) if table.pages)
        return sum({page: size - (0 if i else table.length % size) for table in tuple(self._tables)
                    for i, page in enumerate(table.pages[table.length // size:])}.values())

    def check(self) -> None:
        """Raise EngineError with a full account unless pages are conserved. O(pages + tables)."""
        wrong = self._pool.faults(table.pages for table in self._tables)
        wrong += [f"host: {fault}" for fault in self._host.faults(table.host_pages or () for table in self._tables)]
        fills: dict[int, int] = {}
        for table in self._tables:
            if len(set(table.pages)) != len(table.pages):
                wrong.append(f"{table.request_id} lists a page twice: {table.pages}")
            if table.host_pages is None and table.length > len(table.pages) * self.page_size:
                wrong.append(f"{table.request_id} has {table.length} tokens in {len(table.pages)} pages")
            for i, page in enumerate(table.pages):
                tokens = min(max(table.length - i * self.page_size, 0), self.page_size)
                if fills.setdefault(page, tokens) != tokens:
                    wrong.append(f"page {page} has {tokens} tokens for {table.request_id}, {fills[page]} for others")
        if wrong:
            raise EngineError("pages are not conserved: " + "; ".join(wrong))

    # ------------------------------------------------------------------------- opening and closing tables

    def allocate(self, request_id: str, token_count: int, tokens: Sequence[int] | None = None,
                 salt: str | None = None) -> KVHandle:
        """Open a block table with pages for ``token_count`` tokens, all or nothing. O(pages).

        With prefix sharing and the ``tokens`` themselves, the table starts on the longest run of pages that hold
        them, short of the last token; ``length`` says how many are there. OutOfPagesError if the pool cannot hold
        them now, PoolTooSmallError (both that and a CapacityError) if it never could.
        """
        check_argument("request_id", request_id, _ID)
        check_argument("token_count", token_count, _COUNT)
        needed = self.pages_for(token_count)
        if needed > self.total_pages:
            raise PoolTooSmallError(f"{token_count} tokens need {needed} pages of {self.page_size}; the pool has "
                                    f"{self.total_pages}: shorten the request or enlarge the pool")
        root = self._pool.index.root(salt)
        found = self._find_prefix(root, tokens[:token_count]) if self.prefix_sharing and tokens else []
        shared, nodes = tuple(page for page, _ in found), [root, *(node for _, node in found)]
        self._require(needed - len(shared), request_id, shared)
        with self._opening(KVHandle(request_id, shared, len(shared) * self.page_size, nodes)) as table:
            if shared:
                self._observer("share", request_id, shared)
            self._grow(table, needed - len(shared))
        return table

    def _find_prefix(self, root: Node, tokens: Sequence[int]) -> list[tuple[int, Node]]:
        """Pages that hold the beginning of ``tokens``, leaving at least the last token to be computed."""
        found: list[tuple[int, Node]] = []
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            hit = self._pool.index.find(found[-1][1] if found else root, tokens[start:start + self.page_size])
            if hit is None:
                break
            found.append(hit)
        return found

    def fork(self, handle: KVHandle, request_id: str) -> KVHandle:
        """A second table over the same tokens. Pages that hold tokens are shared until one side writes. O(pages)."""
        parent = self._table(handle, resident=True)
        check_argument("request_id", request_id, _ID)
        shared = parent.pages[:self.pages_for(parent.length)]
        with self._opening(KVHandle(request_id, shared, parent.length, list(parent.nodes))) as table:
            self._observer("share", request_id, shared)
        return table

    @contextmanager
    def _opening(self, table: KVHandle) -> Iterator[KVHandle]:
        """Open a table on pages that it shares; close it if the block fails, since the caller never sees the handle.
        The tokens that it starts with were found: hits."""
        for page in table.pages:
            self._pool.share(page)
        self._tables[table] = None
        try:
            yield table
        except BaseException:
            self._close(table)
            raise
        self._counts["allocations"] += 1
        self._counts["hits"] += table.length

    def release(self, handle: KVHandle) -> None:
        """Close the table; pages without another user are free again, or cached. O(pages)."""
        table = self._table(handle)
        pages = self._close(table)
        self._counts["releases"] += 1
        self._observer("release", table.request_id, pages)

    def _close(self, table: KVHandle) -> tuple[int, ...]:
        """Forget the table; returns the pages that it listed."""
        del self._tables[table]
        pages, table.pages = table.pages, ()
        self._pool.drop_all(pages)
        self._host.drop_all(table.host_pages or ())
        return pages

    # -------------------------------------------------------------------------------------------- filling

    def reserve(self, handle: KVHandle, token_count: int) -> None:
        """Make positions length .. token_count - 1 writable: copy the first one's page if it is shared, add the missing
        pages. All or nothing: OutOfPagesError leaves everything as it was. O(new pages)."""
        table = self._table(handle, resident=True)
        missing = max(0, self.pages_for(token_count) - len(table.pages))
        copies = self._needs_copy(table, token_count)
        if copies or missing:
            self._require(copies + missing, table.request_id)
        if copies:
            self._copy_on_write(table)
        if missing:
            self._grow(table, missing)

    def _needs_copy(self, table: KVHandle, token_count: int) -> bool:
        """Is any of the positions length .. token_count - 1 in a shared page? Tables share only pages that hold tokens,
        so it can only be the page of position ``length``, partly filled."""
        index = table.length // self.page_size
        return token_count > table.length and index < len(table.pages) and self._pool.refcounts[table.pages[index]] > 1

    def _copy_on_write(self, table: KVHandle) -> None:
        """Put a copy of its own in the place of the shared page that the table's next token goes into."""
        index = table.length // self.page_size
        source = table.pages[index]
        [target] = self._pool.take_copies(self._pool, [source], 1, table.request_id)
        table.pages = (*table.pages[:index], target, *table.pages[index + 1:])
        self._pool.drop(source)
        self._counts["copies"] += 1
        self._observer("copy", table.request_id, (source, target))

    def _grow(self, table: KVHandle, number: int) -> None:
        """Add fresh pages at the table's end."""
        fresh = tuple(self._pool.take(number, table.request_id))
        table.pages += fresh
        self._observer("allocate", table.request_id, fresh)

    def commit(self, handle: KVHandle, token_count: int, tokens: Sequence[int] | None = None) -> None:
        """The first ``token_count`` positions now hold computed keys and values. Pages that are now full no longer
        need their tails; with prefix sharing and the ``tokens`` themselves, they are published. O(new tokens)."""
        table = self._table(handle, resident=True)
        if not table.length <= token_count <= len(table.pages) * self.page_size:
            raise RequestError(f"{table.request_id} has {table.length} tokens and {len(table.pages)} pages of "
                               f"{self.page_size}; it cannot hold {token_count}")
        if self._needs_copy(table, token_count):
            raise RequestError(f"{table.request_id} shares the page it would fill; reserve() the positions first")
        first, full = table.length // self.page_size, token_count // self.page_size
        for page in table.pages[first:full]:
            self.store.drop_tail(page)
        self._counts["misses"] += token_count - table.length
        table.length = token_count
        if self.prefix_sharing and tokens is not None and len(table.nodes) <= full:  # the root is one of the nodes
            self._publish(table, tokens)

    def _publish(self, table: KVHandle, tokens: Sequence[int]) -> None:
        """From now on the table's full pages can be found by their content."""
        index = self._pool.index
        for i in range(len(table.nodes) - 1, min(table.length, len(tokens)) // self.page_size):
            page, known = table.pages[i], table.pages[i] in index
            content = tokens[i * self.page_size:(i + 1) * self.page_size]
            table.nodes.append(index.publish(table.nodes[-1], content, page))
            if page in index and not known:
                self._observer("publish", table.request_id, (page,))

    def append(self, handle: KVHandle, key: Sequence[float], value: Sequence[float]) -> None:
        """Store the next position's key and value, growing by a page where needed. O(width)."""
        table = self._table(handle, resident=True)
        position = table.length
        key, value = checked_vector("key", key, self.width), checked_vector("value", value, self.width)
        self.reserve(handle, position + 1)
        self.store.write(table.pages[position // self.page_size], position % self.page_size, key, value)
        self.commit(handle, position + 1)
        self._observer("append", table.request_id, table.pages)

    def read(self, handle: KVHandle, position: int) -> tuple[Sequence[float], Sequence[float]]:
        """Key and value of a stored position. IndexError outside 0 .. length - 1."""
        table = self._table(handle)
        if Integer(0, table.length - 1).problem(position):
            raise IndexError(f"{table.request_id} has {table.length} tokens; position {position!r} is not stored")
        index, offset = divmod(position, self.page_size)
        if table.host_pages is not None:
            return self.host_store.read(table.host_pages[index], offset)
        return self.store.read(table.pages[index], offset)

    def drop_unused_tails(self, pages: Iterable[int]) -> None:
        """After a step that computed in ``pages``. If a request was cancelled during the step, the decoder may have
        begun tails in its pages after they lost their last user."""
        for page in pages:
            if not self._pool.refcounts[page]:
                self.store.drop_tail(page)

    # ------------------------------------------------------------------------------------------- swapping

    def swap_out(self, handle: KVHandle) -> None:
        """Copy the table's tokens to host pages and give its own pages back. All or nothing: OutOfPagesError if the
        host pool cannot take them. O(pages)."""
        table = self._table(handle, resident=True)
        filled = table.pages[:self.pages_for(table.length)]
        host_pages = self._host.take_copies(self._pool, filled, len(filled), f"swapping out {table.request_id}")
        pages, table.pages, table.host_pages = table.pages, (), host_pages
        self._pool.drop_all(pages)
        self._counts["swaps_out"] += 1
        self._observer("swap_out", table.request_id, pages)

    def swap_in(self, handle: KVHandle, token_count: int) -> None:
        """Bring the tokens back into pages for ``token_count`` tokens and free the host pages. All or nothing:
        OutOfPagesError if the pool cannot take them now. O(pages)."""
        table = self._table(handle)
        if table.host_pages is None:
            raise RequestError(f"{table.request_id} is not swapped out; there is nothing to bring back")
        number = self.pages_for(max(token_count, table.length))
        self._require(number, table.request_id)
        pages = self._pool.take_copies(self._host, table.host_pages, number, table.request_id)
        self._host.drop_all(table.host_pages)
        table.pages, table.host_pages = tuple(pages), None
        del table.nodes[1:]  # these are copies: the originals may still be published
        self._counts["swaps_in"] += 1
        self._observer("swap_in", table.request_id, table.pages)

    # ------------------------------------------------------------------------------------------- inside

    def _table(self, handle: KVHandle, resident: bool = False) -> KVHandle:
        """The open table; with ``resident`` also one whose pages are in the pool, not in the host's."""
        if not isinstance(handle, KVHandle) or handle not in self._tables:
            raise StaleHandleError(f"{handle!r} was released, or is not of this cache manager; allocate a new one")
        if resident and handle.host_pages is not None:
            raise RequestError(f"{handle.request_id} is swapped out; swap it in before its pages are used")
        return handle

    def _require(self, number: int, request_id: str, sharing: Sequence[int] = ()) -> None:
        """OutOfPagesError unless ``number`` fresh pages can be taken, beyond the pages ``sharing``. A call asks for all
        its pages here, before its first change: from then on nothing is refused."""
        if number:
            self.before_take(number, request_id)
        self._pool.require(number, request_id, sharing)
