"""M4 · The page pool: which pages are free, used or cached, and which cached page holds which tokens.

    free ──take──▶ used (refcount 1, 2, ...) ──last user leaves──▶ free
                    ▲                                        └────▶ cached, if its content can be found again
                    └──────────── share ◀── find(content) ─────────┘   │
                                                                       └─evict: least recently used first─▶ free

A page's content is named by the pages before it: ``PrefixIndex`` gives each (node of the page before, tokens of this
page) a *node*, compared token by token, so two prefixes can never be confused, whatever their hashes. A request with
a ``cache_salt`` starts from another root and shares only with the same salt.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from itertools import islice

from .errors import OutOfPagesError

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
