"""M6 · The pages of a timeline, rebuilt from its events alone: which tables they are in, and which tokens they hold.

A page's content is named by (name of all that comes before it, its tokens), so that two pages have the same name only
if they hold the same tokens at the same positions after the same beginning:

    r1: [5 6 7 8] [9 4 . .]     page 3: (root, [5 6 7 8]) = #1      page 7: (#1, [9 4])
    r2: [5 6 7 8] [2 . . .]     page 3 again, which is right        page 1: (#1, [2])

``observe/audit.py`` feeds the events and asks before each chunk. Problems are returned as sentences; the ledger then
continues with what the timeline says, so that one fault does not look like many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from starter.timeline import Event

Name = object  # of a beginning: equal only if all its tokens and the salt are


@dataclass
class _Content:
    before: Name
    tokens: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Table:
    """A block table and the tokens it is for, ``stored`` of which are in its pages; None: an outsider's table."""

    owner: str
    tokens: Sequence[int] | None = None
    salt: str | None = None
    pages: list[int] = field(default_factory=list)
    stored: int = 0
    swapped: list[_Content] | None = None  # while it is in host pages
    names: list[Name] = field(default_factory=list)  # of the beginning before each page


class PageLedger:
    """Block tables of requests and outsiders, and the content of every page."""

    def __init__(self, num_pages: int, page_size: int, host_pages: int) -> None:
        self.num_pages, self.page_size, self.host_pages = num_pages, page_size, host_pages
        self.tables: dict[str, Table] = {}
        self._outside: defaultdict[str, list[Table]] = defaultdict(list)
        self._users: Counter[int] = Counter()
        self._published: set[int] = set()
        self._contents: dict[int, _Content] = {}
        self._names: dict[tuple[Name, tuple[int, ...]], Name] = {}

    @property
    def used(self) -> int:
        """Pages in some table."""
        return len(self._users)

    @property
    def empty_slots(self) -> int:
        """Slots of used pages that hold no token. O(used)."""
        return self.used * self.page_size - sum(len(self._content(page).tokens) for page in self._users)

    @property
    def held_outside(self) -> bool:
        """Whether an outsider, which is not a request, holds pages."""
        return any(table.pages for tables in self._outside.values() for table in tables)

    # ---------------------------------------------------------------------------------------- changes

    def open(self, owner: str, tokens: Sequence[int], salt: str | None) -> None:
        """A request begins; ``tokens`` will grow."""
        self.tables[owner] = Table(owner, tokens, salt)

    def close(self, owner: str) -> list[str]:
        """The request has ended."""
        table = self.tables.pop(owner)
        self._drop(table.pages)
        return [f"{owner} has ended, but still has the pages {table.pages}"] if table.pages else []

    def change(self, event: Event) -> list[str]:
        """Take a pages event into account."""
        pages = event["pages"]
        wrong = [f"there is no page {page}; the pool has {self.num_pages}" for page in pages if page >= self.num_pages]
        if len(set(pages)) != len(pages):
            wrong.append(f"a page is twice in {pages}")
        table = self.tables.get(event["request"]) or self._table_outside(event)
        wrong += getattr(self, f"_{event['change']}")(table, pages)
        if event["used_pages"] != self.used:
            wrong.append(f"used_pages is {event['used_pages']}, but {self.used} pages are in some table")
        return wrong

    def _table_outside(self, event: Event) -> Table:
        """The outsider's table that the event is about; a new one if none fits."""
        tables, pages, change = self._outside[event["request"]], event["pages"], event["change"]
        fits = {"release": lambda table: table.pages == pages,
                "append": lambda table: table.pages in (pages, pages[:-1]) and table.pages,
                "copy": lambda table: pages[0] in table.pages}.get(change)
        found = sorted(filter(fits, tables), key=lambda table: -len(table.pages)) if fits else []
        if not found:
            found = [Table(event["request"])]
            tables += found
        return found[0]

    def _allocate(self, table: Table, pages: list[int]) -> list[str]:
        wrong = [f"page {page} is given to {table.owner}, but {self._owners(page)} has it" for page in pages
                 if page in self._users]
        wrong += [f"page {page} is given to {table.owner} although its content can still be found" for page in pages
                  if page in self._published]
        self._take(table, pages)
        return wrong

    def _take(self, table: Table, pages: Sequence[int]) -> None:
        for page in pages:
            self._contents.pop(page, None)
        self._published.difference_update(pages)
        self._users.update(pages)
        table.pages += pages

    def _share(self, table: Table, pages: list[int]) -> list[str]:
        wrong = [f"page {page} is shared with {table.owner}, but no table has it and its content cannot be found"
                 for page in pages if page not in self._users and page not in self._published]
        if table.pages:
            wrong.append(f"{table.owner} shares pages for a new table, but has the pages {table.pages}")
        self._users.update(pages)
        for index, page in enumerate(pages):
            table.pages.append(page)
            table.stored += len(self._content(page).tokens)
            if table.tokens is not None and not self._fits(table, index):
                wrong.append(f"page {page} is shared with {table.owner}, but holds other tokens than it begins with")
        return wrong

    def _copy(self, table: Table, pages: list[int]) -> list[str]:
        if len(pages) != 2 or pages[0] not in table.pages:
            return [f"{table.owner} copies pages {pages}, but has the pages {table.pages}"]
        source, target = pages
        content = self._content(source)
        wrong = self._allocate(Table(table.owner), [target])
        table.pages[table.pages.index(source)] = target
        self._contents[target] = _Content(content.before, list(content.tokens))
        self._drop([source])
        return wrong

    def _append(self, table: Table, pages: list[int]) -> list[str]:
        """An outsider's token. If its table grew, the page was first recorded as a new table, which is merged here."""
        if table.tokens is not None or not pages:
            return [f"{table.owner} appends to {pages}; requests append by their chunks, outsiders to their pages"]
        if len(pages) > len(table.pages):
            tables = self._outside[table.owner]
            tables[:] = [other for other in tables if other.pages != pages[-1:]]
            table.pages = list(pages)
        page = table.pages[min(table.stored // self.page_size, len(table.pages) - 1)]
        table.stored += 1
        self._contents[page] = _Content(None, [*self._content(page).tokens, -1])
        return self._wrong_writes(table, [page])

    def _publish(self, table: Table, pages: list[int]) -> list[str]:
        wrong = [f"{table.owner} publishes page {page}, which is not full of its tokens" for page in pages
                 if page not in table.pages or len(self._content(page).tokens) < self.page_size
                 or not self._fits(table, table.pages.index(page))]
        wrong += [f"{table.owner} publishes page {page}, which can be found already" for page in pages
                  if page in self._published]
        self._published.update(pages)
        return wrong

    def _evict(self, table: Table, pages: list[int]) -> list[str]:
        wrong = [f"page {page} is evicted, but was not cached" for page in pages
                 if page in self._users or page not in self._published]
        self._published.difference_update(pages)
        return wrong

    def _release(self, table: Table, pages: list[int]) -> list[str]:
        wrong = self._whole(table, pages, "releases")
        tables = self._outside[table.owner]
        tables[:] = [other for other in tables if other is not table]
        table.stored, table.swapped = 0, None
        return wrong

    def _swap_out(self, table: Table, pages: list[int]) -> list[str]:
        table.swapped = [replace(content, tokens=list(content.tokens)) for content in map(self._content, table.pages)
                         if content.tokens]
        wrong = self._whole(table, pages, "swaps out")
        swapped = sum(len(other.swapped) for other in self.tables.values() if other.swapped)
        if swapped > self.host_pages:
            wrong.append(f"{swapped} pages are swapped out, but there are {self.host_pages} host pages")
        return wrong

    def _swap_in(self, table: Table, pages: list[int]) -> list[str]:
        contents, table.swapped = table.swapped, None
        wrong = self._allocate(table, pages)
        self._contents.update(zip(pages, contents or ()))
        return wrong + [f"{table.owner} is swapped in, but was not swapped out"] * (contents is None)

    def _whole(self, table: Table, pages: list[int], verb: str) -> list[str]:
        """Give all pages of a table back."""
        had, table.pages = table.pages, []
        self._drop(had)
        return [] if had == pages else [f"{table.owner} {verb} the pages {pages}, but has the pages {had}"]

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if self._users[page] <= 0:
                del self._users[page]
                if page not in self._published:
                    self._contents.pop(page, None)

    def _owners(self, page: int) -> str:
        tables = [*self.tables.values(), *(table for tables in self._outside.values() for table in tables)]
        return " and ".join(table.owner for table in tables if page in table.pages)

    # --------------------------------------------------------------------------------------- contents

    def _content(self, page: int) -> _Content:
        return self._contents.get(page) or _Content(None)

    def _fits(self, table: Table, index: int) -> bool:
        """Whether this page of the table holds the table's tokens, after the same beginning."""
        content, start = self._content(table.pages[index]), index * self.page_size
        tokens = [] if table.tokens is None else list(table.tokens[start:start + len(content.tokens)])
        return bool(tokens) and content == _Content(self._name(table, index), tokens)

    def _name(self, table: Table, index: int) -> Name:
        """The name of the beginning before a page of a table."""
        names, tokens = table.names, table.tokens or ()
        if not names:
            names.append(("root", table.salt))
        while len(names) <= index:
            start = (len(names) - 1) * self.page_size
            key = names[-1], tuple(tokens[start:start + self.page_size])
            names.append(self._names.setdefault(key, len(self._names)))
        return names[index]

    def access(self, owner: str, start: int, count: int) -> list[str]:
        """Check that a request may read positions 0 .. start + count - 1 and write the last ``count``. O(count)."""
        table, end = self.tables[owner], start + count
        if table.stored != start:
            return [f"{owner} computes from position {start} on, but its pages hold {table.stored} positions"]
        if end > len(table.pages) * self.page_size:
            return [f"{owner} writes position {end - 1}, but has {len(table.pages)} pages of {self.page_size}"]
        return self._wrong_writes(table, table.pages[start // self.page_size:-(-end // self.page_size)])

    def _wrong_writes(self, table: Table, pages: Sequence[int]) -> list[str]:
        return [f"{table.owner} writes to page {page}, which belongs to {self._owners(page)}" for page in pages
                if self._users[page] > 1]

    def write(self, owner: str, start: int, count: int) -> None:
        """A request's keys and values of these positions have been stored."""
        table = self.tables[owner]
        for position in range(start, start + count):
            index, offset = divmod(position, self.page_size)
            if table.tokens is None or position >= len(table.tokens) or index >= len(table.pages):
                return  # no such token or page; ``access`` has reported it
            if offset == 0:
                self._contents[table.pages[index]] = _Content(self._name(table, index))
            self._content(table.pages[index]).tokens[offset:] = [table.tokens[position]]
            table.stored = position + 1
