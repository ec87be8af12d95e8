"""M3 · A live sequence, as the scheduler counts it, and the queue of those that wait.

A request is one sequence for each of its samples (``SamplingParams.n``). The first has the request's id, the i-th is
"<request>#<i>". The scheduler counts (``known``, ``computed``) and decides when a sequence has all its tokens;
``streams.Sample`` is a sequence together with what was generated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from .kv_cache import KVHandle
from .schema import Request

_order = attrgetter("order")


@dataclass(eq=False, repr=False, slots=True)
class SequenceState:
    """A live sequence (a request, or one of its samples): how much of it is known, computed and stored."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # the prompt, then what is appended by whoever samples the tokens
    arrival_step: int = 0
    order: tuple[float, int] = (0.0, 0)  # the policy's rank, then the order of submission
    known: int = 0  # prompt plus generated tokens, counted by the scheduler
    computed: int = 0  # of these, tokens whose keys and values were computed
    handle: KVHandle | None = None  # of its block table, while it is running or swapped out
    preempted: bool = False  # at least once
    swapped: bool = False  # its tokens are in host pages
    last_served: int = -1  # step of its last chunk
    bypassed: int = 0  # later requests that were admitted while this one lacked pages
    refusals: int = 0  # times it got no pages although no other request was running
    id: str = ""  # the request's
    prompt_length: int = 0

    def __post_init__(self) -> None:
        self.id = self.request.request_id
        self.tokens = self.tokens or list(self.request.prompt_tokens)
        self.known = self.prompt_length = len(self.request.prompt_tokens)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r}: {self.computed} of {self.known} tokens computed>"

    @property
    def generated(self) -> int:
        """Tokens generated so far, as the scheduler counts them."""
        return self.known - self.prompt_length

    @property
    def remaining(self) -> int:
        """Known tokens still to be computed; the last of them yields the next token."""
        return self.known - self.computed

    @property
    def decoding(self) -> bool:
        """The prompt is computed, and of what was generated all but the newest token."""
        return self.prompt_length <= self.computed == self.known - 1


class WaitingQueue:
    """Waiting sequences, sorted by ``order``.

    ``push`` and ``remove`` compare O(log n) times and move what lies between the place and the nearer end of the queue:
    under "fcfs", where requests join at one end and leave near the other, next to nothing.
    """

    def __init__(self) -> None:
        self._sorted: deque[SequenceState] = deque()
        # In the order in which they began to wait. A plain dict would slow down as its first entries leave.
        self._by_id: OrderedDict[str, SequenceState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> SequenceState | None:
        return self._by_id.get(request_id)

    def push(self, sequence: SequenceState) -> None:
        insort(self._sorted, sequence, key=_order)
        self._by_id[sequence.id] = sequence

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence; nothing happens if this very object does not wait."""
        if self._by_id.get(sequence.id) is sequence:
            del self._by_id[sequence.id]
            del self._sorted[bisect_left(self._sorted, sequence.order, key=_order)]  # no two have the same order

    def first(self, number: int) -> list[SequenceState]:
        """The first ``number`` in order; they stay. O(number)."""
        return list(islice(self._sorted, number))

    def ids(self, number: int | None = None) -> tuple[str, ...]:
        """Ids of the ``number`` sequences that have waited longest since they were queued or preempted; by default of
        all. O(number)."""
        return tuple(islice(self._by_id, number))
