"""M6 · One engine on several processes: each holds the weights, and computes some of a step's requests.

    engine = InferenceEngine.from_checkpoint(path, workers=2)         this process and one more

    one step's batch        A   B   C   D   E
    process 0, the parent   A       C       E       computes its share while the others compute theirs
    process 1, a child          B       D           a pipe (process.py): pieces go there, logits come back

Python code runs on one core; two processes run on two. Scheduler, block tables and sampling stay in the parent and see
no difference: ``ParallelModel`` is a ``Model``, ``ParallelStore`` a ``KVStore``. Every row of a batch is computed
separately, so the tokens are those of one process, bit for bit (with numpy: as far as batch equals solo there).

- Pages. Every process has room for all pages, and a page's numbers are in one process or in several. A request is
  computed where its pages are. If the load is uneven, or its pages are in two places (a prefix that two others
  computed), the missing ones are copied first. A page that was written is up to date only where it was written.
- Loss. A child that is killed loses its pages. The parent knows the tokens in each page, and has another process
  compute them again when they are next needed: no request ends and no token changes.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from math import inf
from threading import Lock
from typing import Any

from starter.backend import Batch, Piece
from starter.backends.workers.process import Key, Shelves, Worker, WorkerLost
from starter.errors import BackendError
from starter.kv_cache import KVStore
from starter.model import Model

PAGE_PRICE = 1 / 32  # the time to copy a page to another process, in times to compute a token

_numbers = count()


@dataclass
class _Page:
    where: set[int] = field(default_factory=set)  # processes that hold its numbers as they are now
    tokens: list[int | None] = field(default_factory=list)  # in its slots; None: numbers that came from no token


class ParallelStore(KVStore):
    """Knows which processes hold which page, and passes every operation on to them."""

    def __init__(self, crew: Sequence[Shelves | Worker], key: Key, local: KVStore) -> None:
        self.key, self.local, self.page_size = key, local, key[2]
        self.width, self.page_bytes, self.tail_bytes = local.width, local.page_bytes, local.tail_bytes
        self._tails: set[int] = set()  # pages that have one, in any process
        self._crew = crew
        self._pages: dict[int, _Page] = defaultdict(_Page)
        self._dropped: list[list[int]] = [[] for _ in crew]  # by process: tails whose end it does not know yet
        self._lock = Lock()  # of _dropped

    def ask(self, process: int, name: str, *arguments: Any) -> Callable[[], Any]:
        """Have a process do something with its store of this key; what is returned waits for the answer."""
        self.pass_on_drops(process)
        return self._crew[process].ask(name, self.key, *arguments)

    def pass_on_drops(self, process: int) -> None:
        """Have a process drop the tails that were dropped since the last call."""
        with self._lock:
            pages, self._dropped[process] = self._dropped[process], []
        if pages:
            self._crew[process].ask("drop_tails", self.key, pages)()

    def _holder(self, page: int) -> int:
        """The first living process that holds a page."""
        for process in sorted(self._pages[page].where):
            if self._crew[process].alive:
                return process
        raise WorkerLost(f"the numbers in page {page} were lost with their process")

    # ----------------------------------------------------------------------------------------- as a KVStore

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        process = self._holder(page) if offset else 0
        self.ask(process, "write", page, offset, list(key), list(value))()
        self._written(process, page, offset, None)

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        numbers: tuple[list[float], list[float]] = self.ask(self._holder(page), "read", page, offset)()
        return numbers

    def copy_page(self, source: int, target: int, origin: ParallelStore | None = None) -> None:
        """In every process that holds it. A lost page can still be computed again, in its new place."""
        origin = origin or self
        page = origin._pages[source]
        for process in sorted(page.where):
            with suppress(WorkerLost):  # its pages are lost
                self.ask(process, "copy", source, target, origin.key)()
        self._pages[target] = _Page(set(page.where), list(page.tokens))
        if source in origin._tails:
            self._opened(target)

    def drop_tail(self, page: int) -> None:
        """Waits for no process: each one gets this together with the next operation."""
        if self.tail_bytes:
            self._tails.discard(page)
            with self._lock:
                for pages in self._dropped:
                    pages.append(page)

    # ------------------------------------------------------------------------------------ for ParallelModel

    def context(self, piece: Piece) -> Sequence[int]:
        """The pages that hold what a piece looks back at."""
        return piece.pages[:-(-piece.start // self.page_size)]

    def missing(self, piece: Piece, process: int) -> list[int]:
        """Those of them that a process does not hold."""
        return [page for page in self.context(piece) if process not in self._pages[page].where]

    def begun_early(self, piece: Piece) -> Piece:
        """The piece, preceded by the tokens of its context from the first lost page on."""
        context = self.context(piece)
        for i, page in enumerate(context):
            if not any(self._crew[process].alive for process in self._pages[page].where):
                start = i * self.page_size
                lost = [token for page in context[i:] for token in self._pages[page].tokens][:piece.start - start]
                known = [token for token in lost if token is not None]
                if len(known) < piece.start - start:
                    raise BackendError(f"page {page} was lost with its process, and was not computed from tokens")
                return Piece([*known, *piece.tokens], start, piece.pages, piece.wants_logits)
        return piece

    def bring(self, pieces: Sequence[Piece], process: int) -> int:
        """Copy to a process the pages that it lacks to compute these pieces. Returns their number."""
        missing: dict[int, list[int]] = defaultdict(list)  # by where they are
        for page in dict.fromkeys(page for piece in pieces for page in self.missing(piece, process)):
            missing[self._holder(page)].append(page)
        for source, pages in missing.items():
            self.ask(process, "unpack", pages, self.ask(source, "pack", pages)())()
            for page in pages:
                self._pages[page].where.add(process)
        return sum(map(len, missing.values()))

    def note(self, pieces: Sequence[Piece], process: int) -> None:
        """A process is about to write these pieces' keys and values."""
        for piece in pieces:
            for position, token in enumerate(piece.tokens, piece.start):
                page, offset = divmod(position, self.page_size)
                self._written(process, piece.pages[page], offset, token)

    def notes(self, pieces: Sequence[Piece]) -> dict[int, _Page]:
        """The present notes on the pages that these pieces write to."""
        return {page: _Page(set(self._pages[page].where), list(self._pages[page].tokens))
                for piece in pieces for page in piece.pages[piece.start // self.page_size:]}

    def take_back(self, notes: dict[int, _Page]) -> None:
        """The step failed: restore the notes from before it."""
        self._pages.update(notes)

    def _written(self, process: int, page: int, offset: int, token: int | None) -> None:
        held = self._pages[page]
        held.where = {process}
        held.tokens[offset:] = [token]
        self._opened(page)

    def _opened(self, page: int) -> None:
        if self.tail_bytes:
            self._tails.add(page)
            self.peak_tails = max(self.peak_tails, len(self._tails))


@dataclass
class Work:
    """What a process has done: pieces and tokens computed, and pages copied to it from other processes."""

    pieces: int = 0
    tokens: int = 0
    pages: int = 0


class ParallelModel(Model):
    """A model whose batches are computed by several processes. BackendError if one cannot be started."""

    def __init__(self, model: Model, processes: int) -> None:
        vars(self).update(vars(model))  # the same weights under the same names
        self._here = Shelves(model)
        self.crew: list[Shelves | Worker] = [self._here]
        self.work = [Work() for _ in range(processes)]
        self._known_ends: list[Shelves | Worker] = []  # members whose end needs no warning any more
        try:
            self.crew += (Worker(f"worker {number}", model) for number in range(1, processes))
            for member in self.crew:
                member.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        done = (f"{member}: {work.tokens} tokens" for member, work in zip(self.crew, self.work))
        return f"<ParallelModel, {'; '.join(done)}>"

    def close(self) -> None:
        """End the children; this process computes alone from now on. Idempotent."""
        for member in self.crew[1:]:
            self._known_ends.append(member)
            member.close()

    def new_store(self, num_pages: int, page_size: int, kv_quantization: str | None = None,
                  host: bool = False) -> ParallelStore:
        """Empty storage; the other processes make theirs when they first use it."""
        key = next(_numbers), num_pages, page_size, kv_quantization
        store = ParallelStore(self.crew, key, self._here.store(key))
        weakref.finalize(store, self._here.stores.pop, key)
        return store

    def forward(self, batch: Batch, store: KVStore) -> Sequence[Sequence[float]]:
        """As ``Model.forward``. When a child is found to have ended, the others compute the batch again."""
        assert isinstance(store, ParallelStore)
        self._warn_of_losses()
        try:
            return self._forward(batch, store)
        except WorkerLost:
            if not self._warn_of_losses():
                raise
            return self.forward(batch, store)

    def _warn_of_losses(self) -> int:
        """Warn once of each child that has ended by itself. Returns the number of new ones."""
        lost = [member for member in self.crew if not member.alive and member not in self._known_ends]
        self._known_ends += lost
        for member in lost:
            warnings.warn(f"{member}; the other processes go on, and compute again what it held", RuntimeWarning,
                          stacklevel=3)
        return len(lost)

    def _forward(self, batch: Batch, store: ParallelStore) -> Sequence[Sequence[float]]:
        given = batch.pieces()
        pieces = [store.begun_early(piece) for piece in given]
        homes = self._share_out(pieces, store)
        shares = [[i for i, home in enumerate(homes) if home == process] for process in range(len(self.crew))]
        for process, share in enumerate(shares):
            self.work[process].pages += store.bring([pieces[i] for i in share], process)
        notes = store.notes(pieces)
        try:
            for process, share in enumerate(shares):
                store.note([pieces[i] for i in share], process)
                self.work[process].pieces += len(share)
                self.work[process].tokens += sum(len(pieces[i].tokens) for i in share)
            store.pass_on_drops(0)
            alone = len(shares[0]) == len(pieces) and pieces == given
            rows = super().forward(batch, store.local) if alone else self._compute(pieces, shares, store)
        except BaseException:
            store.take_back(notes)
            raise
        for piece, whole in zip(given, pieces):
            for page in whole.pages[whole.start // store.page_size:piece.start // store.page_size]:
                store.drop_tail(page)  # full, and computed once more
        return rows

    def _compute(self, pieces: Sequence[Piece], shares: Sequence[Sequence[int]],
                 store: ParallelStore) -> list[Sequence[float]]:
        """Logits of the pieces that want them, each computed by the process whose share it belongs to."""
        mine, *others = ([pieces[i] for i in share] for share in shares)
        answers = [store.ask(process, "forward", theirs) if theirs else list
                   for process, theirs in enumerate(others, start=1)]
        own = super().forward(Batch.of(mine, store.page_size), store.local) if mine else []
        rows: dict[int, list[Sequence[float]]] = {}  # by piece
        for share, computed in zip(shares, (own, *([row.tolist() for row in answer()] for answer in answers))):
            left = iter(computed)
            rows.update((i, list(islice(left, pieces[i].wants_logits))) for i in share)
        return [row for i in sorted(rows) for row in rows[i]]

    def _share_out(self, pieces: Sequence[Piece], store: ParallelStore) -> list[int]:
        """The process of each piece: first the one that lacks the fewest of its pages; then pieces move from the
        busiest process to the idlest for as long as that makes the busier of the two less busy."""
        alive = [process for process, member in enumerate(self.crew) if member.alive]
        prices = [{process: len(piece.tokens) + PAGE_PRICE * len(store.missing(piece, process)) for process in alive}
                  for piece in pieces]
        load = dict.fromkeys(alive, 0.0)
        homes = []
        for price in prices:
            homes.append(min(alive, key=lambda process: (price[process], load[process])))
            load[homes[-1]] += price[homes[-1]]
        while True:
            busiest, idlest = max(alive, key=load.__getitem__), min(alive, key=load.__getitem__)
            after, i = min(((max(load[idlest] + price[idlest], load[busiest] - price[busiest]), i)
                            for i, price in enumerate(prices) if homes[i] == busiest), default=(inf, 0))
            if after >= load[busiest]:
                return homes
            homes[i] = idlest
            load[busiest] -= prices[i][busiest]
            load[idlest] += prices[i][idlest]
