"""M3 · What the scheduler remembers of a live request, and the queue of those that wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from .kv_cache import KVHandle
from .schema import Request


@dataclass(eq=False, slots=True)
class Sequence:
    """A live request: how much of it is known, computed and stored."""

    request: Request
    arrival_step: int
    order: tuple[float, int]  # among all live requests: the policy's rank, ties broken by the order of submission
    known: int = field(init=False)  # tokens whose numbers are known: the prompt and what was generated
    computed: int = 0
    handle: KVHandle | None = None
    preempted: bool = False  # at least once
    swapped: bool = False  # the handle's tokens are in host pages
    last_served: int = -1  # step of its last chunk
    bypassed: int = 0  # later requests admitted while this one lacked pages
    refusals: int = 0  # times it got no pages although nothing else was running
    id: str = field(init=False)  # the request's
    prompt_length: int = field(init=False)
    end: int = field(init=False)  # known tokens with which it is finished

    def __post_init__(self) -> None:
        self.id = self.request.request_id
        self.known = self.prompt_length = len(self.request.prompt_tokens)
        self.end = self.prompt_length + self.request.max_tokens

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return self.known - self.prompt_length

    @property
    def remaining(self) -> int:
        """Known tokens still to be computed; the last of them yields the next token."""
        return self.known - self.computed

    @property
    def decoding(self) -> bool:
        return self.prompt_length <= self.computed == self.known - 1


_Entry = tuple[tuple[float, int], int, Sequence]  # order, ticket, sequence


class WaitingQueue:
    """Sequences in order. ``push`` O(log n), ``remove`` amortized O(1): what was removed is skipped when it comes up,
    and swept out when it is the greater part."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._waiting: dict[str, tuple[int, Sequence]] = {}  # with the ticket of the heap's entry that counts
        self._tickets = count()
        self._ids: tuple[str, ...] | None = ()

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, request_id: str) -> Sequence | None:
        return self._waiting.get(request_id, (0, None))[1]

    def push(self, sequence: Sequence) -> None:
        ticket = next(self._tickets)
        self._waiting[sequence.id] = ticket, sequence
        self._ids = None
        heappush(self._heap, (sequence.order, ticket, sequence))

    def remove(self, sequence: Sequence) -> None:
        if self.get(sequence.id) is sequence:
            del self._waiting[sequence.id]
            self._ids = None
            if len(self._heap) > 2 * len(self._waiting) + 64:
                self._heap = list(filter(self._counts, self._heap))
                heapify(self._heap)

    def _counts(self, entry: _Entry) -> bool:
        """Was the sequence not removed since this entry was made?"""
        _, ticket, sequence = entry
        return self._waiting.get(sequence.id, (-1, None))[0] == ticket

    def first(self, number: int) -> list[Sequence]:
        """The first ``number`` in order; they stay. O(number log n), and amortized O(log n) for each one removed."""
        found: list[_Entry] = []
        while self._heap and len(found) < number:
            entry = heappop(self._heap)
            if self._counts(entry):
                found.append(entry)
        for entry in found:
            heappush(self._heap, entry)
        return [sequence for _, _, sequence in found]

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids in the order in which they began to wait. O(1) unless the queue changed since the last call."""
        if self._ids is None:
            self._ids = tuple(self._waiting)
        return self._ids
