"""M3 · Which tokens are computed in the next step, for whom, and why.

Token-level ("continuous") batching (Yu et al. 2022, "Orca"): requests join and leave in every step. A step has a
token budget. Running requests that decode are served first, one token each; what is left is shared among prompts
(chunked prefill; Agrawal et al. 2024, "Sarathi-Serve"), so a long prompt never stops the others' tokens.

    submit --> waiting --admit--> running: prefill chunks ... decode, decode, ... --> finished
                  ^                  |
                  +---- preempt -----+     pages ran out: computed again, or swapped back in; no token is lost

The scheduler owns lifecycles and holds no tensor and no page number. With a ``KVCacheManager`` it reserves the pages
of what it plans in the same call, so that a plan and its pages are one decision; without one it counts tokens alone.
What ``step`` hands out counts as computed when the next step is asked for, or when ``complete_step`` is called.

Rules, and the promises that follow (properties in tests/test_scheduler.py). Requests are ordered by the policy's rank
(``scheduler.py``; under "fcfs" the order of arrival), and "first" and "last" below mean that order. P, M: prompt and
max_tokens of a request; L: the largest P + M among live requests; budgets are at least max_running unless said
otherwise.

- Admission: in order, when a slot (of max_running) is free, the budget leaves it a token, and pages for *all* its
  known tokens are free: prefill never stops half-way for want of pages.
- Bypass: the first request that lacks pages may be overtaken by later ones that fit, at most BYPASS_LIMIT times;
  then the queue holds until it is in. So small requests pass a heavy one, and the heavy one is not starved.
- Preemption: when a decoding request needs a page and none is free, the *last* running request gives up its pages
  and goes back to its place in the queue. The first live request is never preempted once it runs: it always finishes.
- Decode gap: a running request that decodes gets a token in every step whose budget covers the running requests,
  unless it is preempted in it. With a smaller budget turns go round: least recently served first. (Under
  "prefill-first" every AGING + 1 steps at least.)
- Wait: a request with k requests before it is admitted within (k + 1) * (BYPASS_LIMIT + 2) * L steps. For the first
  live request, if it is not running, is admitted within (BYPASS_LIMIT + 1) * L: whoever runs ends or is preempted
  within L steps, and at most BYPASS_LIMIT others get in before it. Once running it is never preempted and ends within
  another L: that makes BYPASS_LIMIT + 2. Then the next is the first. A budget b below max_running multiplies this by
  ceil(max_running / b), "prefill-first" by AGING + 1. ``scheduler.py`` says who counts in k.
- No livelock: a request that is refused pages REFUSAL_LIMIT times while no other request runs is ended as failed:
  somebody outside holds the pages, and waiting would not end.
- Refusal: what would not fit an empty pool is refused at ``submit`` (CapacityError). The last token of a request is
  never stored, so P + M - 1 slots are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count as numbered
from operator import attrgetter
from typing import NamedTuple, Protocol

from .base.wings import picture
from .errors import CapacityError, DuplicateRequestError, OutOfPagesError, RequestError, UnknownRequestError
from .kv_cache import KVCacheManager, KVHandle
from .schema import Request

# ------------------------------------------------------------------------------------------------------- who goes first

#: M3 · Who goes first when not everybody can: policies behind one small interface.
#:
#: A policy gives a request a *rank* in steps, as if it had arrived at that step; the smaller rank is served first, and the
#: largest is the first to be preempted. Aging needs no clock: all waiting requests age alike, so their order does not
#: change while they wait. With A = AGING steps:
#:
#:     fcfs            rank = arrival                            nobody is overtaken by later arrivals
#:     priority        rank = arrival - A * priority             one level of priority is worth A steps of waiting
#:     shortest        rank = arrival + remaining tokens / A     so many tokens less are worth a step of waiting
#:     prefill-first   rank = arrival, but prompts are computed before decodes, unless a decode has waited A steps for
#:                     them: the bad example
#:
#: What that promises (k and the bound as in ``scheduler.py``): only requests of a smaller rank go before a request, and
#: from a finite number of steps after its arrival on every new request has a larger one. So k counts
#:
#:     fcfs            the requests that arrived before it
#:     priority        those, and later ones of a higher priority p' that arrive within A * (p' - p) steps
#:     shortest        those, and later ones with fewer remaining tokens that arrive within (difference) / A steps
#:     prefill-first   as fcfs; but while prompts arrive, whoever runs gets a token in one of A + 1 steps only, so all
#:                     waits are as many times as long


AGING = 16


class Policy(Protocol):
    """Ranks requests; see the module's docstring."""

    decode_first: bool  # else prompts go first, but for no more than AGING steps on end

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        """Rank of a request that arrived at ``arrival_step`` and has generated so many tokens. Computed at submit and
        at each preemption; it must never grow."""


class FirstComeFirstServed:
    """The order of arrival."""

    decode_first = True

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        return arrival_step


class PriorityWithAging:
    """Higher priority first, unless it came AGING steps later for each level."""

    decode_first = True

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        return arrival_step - AGING * request.priority


class ShortestRemainingWithAging:
    """Fewer tokens left to compute first, unless it came a step later for each AGING tokens."""

    decode_first = True

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        return arrival_step + (len(request.prompt_tokens) + request.max_tokens - generated) / AGING


class PrefillFirst(FirstComeFirstServed):
    """Prompts before decodes: the best time to first token, and running requests nearly stop while prompts arrive."""

    decode_first = False


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityWithAging,
    "shortest": ShortestRemainingWithAging,
    "prefill-first": PrefillFirst,
}


# ------------------------------------------------------------------------------------------------------- a live request

#: M3 · What the scheduler remembers of a live request, and the queue of those that wait.


@dataclass(eq=False, slots=True)
class SequenceState:
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


_Entry = tuple[tuple[float, int], int, SequenceState]  # order, ticket, sequence


class WaitingQueue:
    """Sequences in order. ``push`` O(log n), ``remove`` amortized O(1): what was removed is skipped when it comes up,
    and swept out when it is the greater part."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._waiting: dict[str, tuple[int, SequenceState]] = {}  # with the ticket of the heap's entry that counts
        self._tickets = numbered()
        self._ids: tuple[str, ...] | None = ()

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, request_id: str) -> SequenceState | None:
        return self._waiting.get(request_id, (0, None))[1]

    def push(self, sequence: SequenceState) -> None:
        ticket = next(self._tickets)
        self._waiting[sequence.id] = ticket, sequence
        self._ids = None
        heappush(self._heap, (sequence.order, ticket, sequence))

    def remove(self, sequence: SequenceState) -> None:
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

    def first(self, number: int) -> list[SequenceState]:
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


# ------------------------------------------------------------------------------------------------------ what is decided

#: M3 · What a step of the scheduler decides, and how it says why.


class ScheduledChunk(NamedTuple):
    """``count`` tokens of one request from position ``start`` on; phase "prefill" or "decode".

    The chunk that reaches the end of the known tokens yields the request's next token (its first, after a prompt).
    """

    request_id: str
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    phase: str


class Run(NamedTuple):
    """Chunks of equal length and phase: whose they are, and where each of them starts."""

    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    count: int  # type: ignore[assignment]  # as above
    phase: str


@dataclass(slots=True)
class Chunks:
    """A step's chunks in runs. The decodes are one run, so two tuples, however many they are: that is quick to make,
    and little to keep for a timeline, which remembers many thousands of steps."""

    runs: list[Run] = field(default_factory=list)

    def add(self, request_ids: tuple[str, ...], starts: tuple[int, ...], count: int, phase: str) -> None:
        """One more run, behind the others."""
        self.runs.append(Run(request_ids, starts, count, phase))

    @property
    def tokens(self) -> int:
        """Of all chunks together. O(runs)."""
        return sum([len(starts) * count for _, starts, count, _ in self.runs])

    def __len__(self) -> int:
        return sum([len(starts) for _, starts, _, _ in self.runs])

    def __iter__(self) -> Iterator[ScheduledChunk]:
        for request_ids, starts, count, phase in self.runs:
            for request_id, start in zip(request_ids, starts):
                yield ScheduledChunk(request_id, start, count, phase)


class Reasons(Mapping[str, str]):
    """Why each request got what it got, by id. In most steps all requests decode, and in few of them somebody asks why:
    so that is put into words when somebody does."""

    __slots__ = ("_said", "_unsaid")

    def __init__(self, said: dict[str, str], chunks: Iterable[ScheduledChunk],
                 decoding: Sequence[SequenceState]) -> None:
        """``said``: of those that do not decode."""
        self._said = said
        self._unsaid: tuple[Iterable[ScheduledChunk], Sequence[SequenceState]] | None = (chunks, decoding)

    def _all(self) -> dict[str, str]:
        if unsaid := self._unsaid:
            chunks, decoding = unsaid
            starts = {chunk.request_id: chunk.start for chunk in chunks}
            self._said = {one.id: f"decodes position {starts[one.id]}: token {starts[one.id] - one.prompt_length + 2} "
                                  f"of at most {one.end - one.prompt_length}" for one in decoding} | self._said
            self._unsaid = None
        return self._said

    def __getitem__(self, request_id: str) -> str:
        return self._all()[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


class ScheduleDecision(NamedTuple):
    """What one step does. The tuples hold request ids; ``finished`` are those that ended since the last decision.

    ``running`` is in the order of admission, ``waiting`` in the order in which they began to wait (again, after a
    preemption). ``reasons`` says in words why each live request got what it got; of a long queue, those that the policy
    puts first. ``found`` are prompt tokens of admitted requests that shared pages already hold; coming back after a
    preemption does not count.
    """

    step: int
    budget_tokens: int
    planned: Chunks  # ``chunks``, in runs
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    why: Mapping[str, str]  # ``reasons``, not yet in words
    found: Mapping[str, int]

    @property
    def chunks(self) -> tuple[ScheduledChunk, ...]:
        """What is computed, in the order of the batch. O(requests) for each call."""
        return tuple(self.planned)

    @property
    def reasons(self) -> dict[str, str]:
        """One sentence for each request, by id. O(requests) for each call."""
        return dict(self.why)

    @property
    def scheduled_tokens(self) -> int:
        """Tokens computed in this step, never more than the budget."""
        return self.planned.tokens

    def __repr__(self) -> str:
        batch = " ".join(f"{chunk.request_id}+{chunk.count}" for chunk in self.planned)
        return (f"<ScheduleDecision: step {self.step}, {self.scheduled_tokens} of {self.budget_tokens} tokens: "
                f"{batch or 'nothing'}; {len(self.waiting)} wait>")

    def _repr_html_(self) -> str | None:
        return picture("schedule", self)


@dataclass(slots=True)
class Plan:
    """A decision in the making."""

    step: int
    budget: int
    left: int
    chunks: Chunks = field(default_factory=Chunks)
    decoding: list[SequenceState] = field(default_factory=list)  # whose chunk is a decode
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # of all others


def counted(number: int, noun: str) -> str:
    """ "1 page", "3 pages"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------------------------------------------------ its pages

#: M3, M4 · What the scheduler does with a sequence's block table: open, reserve, fill, share, swap out and in, close.
#:
#: A scheduler without a page manager counts tokens alone: every call succeeds then and does nothing.


class BlockTables:
    """``tokens_of(request_id)`` gives the known tokens, for prefix sharing; ``swaps``: are host pages to be used?"""

    def __init__(self, kv: KVCacheManager | None, swaps: bool, tokens_of: Callable[[str], Sequence[int]]) -> None:
        self._kv, self._swaps, self._tokens_of = kv, swaps, tokens_of

    def open(self, sequence: SequenceState) -> None:
        """Pages for a waiting sequence: its swapped ones brought back, or new ones behind a shared prefix, whose tokens
        count as computed. OutOfPagesError changes nothing."""
        if not self._kv:
            return
        if sequence.swapped and sequence.handle:
            self._kv.swap_in(sequence.handle, sequence.known)
            sequence.swapped = False
        else:
            tokens = self._tokens_of(sequence.id) if self._kv.prefix_sharing else None
            sequence.handle = self._kv.allocate(sequence.id, sequence.known, tokens, sequence.request.cache_salt)
            sequence.computed = self._kv.length(sequence.handle)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """The child starts on its parent's pages."""
        if self._kv and parent.handle:
            child.handle = self._kv.fork(parent.handle, child.id)

    def lacking(self, sequences: list[SequenceState]) -> list[SequenceState]:
        """Those of the sequences that have to ``reserve``: few of them, while no page is shared and may have to be
        copied."""
        if not self._kv:
            return []
        if self._kv.sharing:
            return sequences
        page_size = self._kv.page_size
        return [sequence for sequence in sequences
                if not sequence.handle or sequence.known > len(sequence.handle.pages) * page_size]

    def reserve(self, sequence: SequenceState) -> None:
        """Make all known positions writable. OutOfPagesError changes nothing."""
        if self._kv and sequence.handle:
            self._kv.reserve(sequence.handle, sequence.known)

    def fill(self, sequence: SequenceState) -> None:
        """The computed positions hold keys and values now."""
        if self._kv and sequence.handle:
            tokens = self._tokens_of(sequence.id) if self._kv.prefix_sharing else None
            self._kv.commit(sequence.handle, sequence.computed, tokens)

    def swap_out(self, sequence: SequenceState) -> bool:
        """Move the tokens to host pages; False where that is not asked for, or cannot be done."""
        if not self._swaps or not self._kv or not sequence.handle:
            return False
        try:
            self._kv.swap_out(sequence.handle)
        except Exception:  # full, taken away from outside, not to be copied: computing again is always right
            return False
        sequence.swapped = True
        return True

    def close(self, sequence: SequenceState) -> None:
        """Give the pages back, unless somebody outside already has."""
        if self._kv and sequence.handle and self._kv.owns(sequence.handle):
            self._kv.release(sequence.handle)
        sequence.handle, sequence.swapped = None, False

    def lack(self, sequence: SequenceState) -> str:
        """What its opening needs and what there is, in words."""
        if not self._kv:
            return ""
        return f"needs {counted(self._kv.pages_for(sequence.known), 'page')}, {self._kv.free_pages} free"

    def page_count(self, sequence: SequenceState) -> int:
        """Pages in the table now."""
        if self._kv and sequence.handle and self._kv.owns(sequence.handle):
            return len(self._kv.pages(sequence.handle))
        return 0


# -------------------------------------------------------------------------------------------------------- the scheduler

__all__ = ["BYPASS_LIMIT", "REFUSAL_LIMIT", "ContinuousBatchScheduler", "ScheduleDecision", "ScheduledChunk"]

BYPASS_LIMIT = 8
REFUSAL_LIMIT = 8
_order = attrgetter("order")


class ContinuousBatchScheduler:
    """Implements the rules above. ``batching`` "static" admits a batch only when the last one has ended, "none" one
    request at a time: kept for comparison. ``preemption`` "swap" moves a victim's tokens to host pages while those
    last, "recompute" computes them again. ``tokens_of(request_id)`` gives the known tokens, for prefix sharing.

    A step costs O(running + new pages), and O(log waiting) for each request that begins or ends to wait.
    """

    def __init__(self, max_running: int = 8, policy: str | Policy = "fcfs", kv: KVCacheManager | None = None,
                 batching: str = "continuous", preemption: str = "recompute",
                 tokens_of: Callable[[str], Sequence[int]] | None = None) -> None:
        if isinstance(max_running, bool) or not isinstance(max_running, int) or max_running < 1:
            raise RequestError(f"max_running must be an integer from 1, not {max_running!r}")
        _choice("batching", batching, ("continuous", "static", "none"))
        _choice("preemption", preemption, ("recompute", "swap"))
        if isinstance(policy, str) or not callable(getattr(policy, "rank", None)):
            policy = POLICIES[_choice("policy", policy, tuple(POLICIES))]()
        if kv is not None and not isinstance(kv, KVCacheManager):
            raise RequestError(f"kv must be a KVCacheManager or None, not {kv!r}")
        self.max_running = 1 if batching == "none" else max_running
        self.policy, self.batching, self.preemption, self.kv = policy, batching, preemption, kv
        self._tables = BlockTables(kv, preemption == "swap",
                                   tokens_of or (lambda request_id: self._live(request_id).request.prompt_tokens))
        self._waiting = WaitingQueue()
        self._running: dict[str, SequenceState] = {}  # in order of admission
        self._running_ids: tuple[str, ...] | None = None  # the same; None: changed since it was last told
        self._in_order: list[SequenceState] | None = None  # in the policy's order; None: the same
        self._in_flight: list[tuple[list[SequenceState], int]] = []  # handed so many tokens, not yet counted as computed
        self._finished: list[str] = []  # since the last decision
        self._failures: dict[str, str] = {}  # not yet taken
        self._steps = self._submitted = 0

    # --------------------------------------------------------------------------------------- lifecycles

    @property
    def idle(self) -> bool:
        """True when no request is live."""
        return not (self._waiting or self._running)

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of all live requests, running ones first."""
        return (*self._running, *self._waiting.ids)

    @property
    def waiting_count(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def is_live(self, request_id: str) -> bool:
        """Is the request submitted and not finished?"""
        return self._find(request_id) is not None

    def is_running(self, request_id: str) -> bool:
        """Is the request admitted, and not preempted or finished?"""
        return request_id in self._running

    def submit(self, request: Request) -> None:
        """Queue a request. DuplicateRequestError while its id is live; CapacityError if no pool state could ever
        serve it. max_tokens 0 finishes at once."""
        if not isinstance(request, Request):
            raise RequestError(f"request must be a Request, not {request!r}")
        self.require_free(request.request_id)
        slots = len(request.prompt_tokens) + request.max_tokens - 1
        if self.kv and request.max_tokens and self.kv.pages_for(slots) > self.kv.total_pages:
            raise CapacityError(
                f"{request.request_id}: prompt {len(request.prompt_tokens)} + max_tokens {request.max_tokens} - 1 = "
                f"{slots} tokens need {self.kv.pages_for(slots)} pages of {self.kv.page_size}; the pool has "
                f"{self.kv.total_pages}: ask for fewer tokens or enlarge the pool")
        if request.max_tokens == 0:
            self._finished.append(request.request_id)
        else:
            self._waiting.push(self._new_sequence(request))

    def require_free(self, request_id: str) -> None:
        """DuplicateRequestError while a live request has this id."""
        if self._find(request_id):
            raise DuplicateRequestError(f"request {request_id!r} is live; choose another id or cancel it first")

    def fork(self, request_id: str, child: Request) -> None:
        """Start ``child`` where a running request stands now, on the same pages: another sample of one prompt, whose
        last generated token may differ. It runs at once, beyond max_running if need be (which limits admissions, not
        samples); pages are copied when either side writes to them."""
        parent = self._running.get(request_id)
        if parent is None:
            raise UnknownRequestError(f"request {request_id!r} is not running, so it cannot be forked")
        self.require_free(child.request_id)
        sequence = self._new_sequence(child)
        sequence.computed, sequence.known, sequence.last_served = parent.computed, parent.known, parent.last_served
        self._tables.fork(parent, sequence)
        self._run(sequence)

    def cancel(self, request_id: str) -> None:
        """End a live request now and free its pages. UnknownRequestError if it is not live. O(pages)."""
        self.finish(request_id, "cancelled")

    def finish(self, request_id: str, reason: str) -> None:
        """End a live request for a reason seen by whoever computes, such as an end-of-sequence token. O(pages)."""
        sequence = self._find(request_id)
        if sequence is None:
            raise UnknownRequestError(f"request {request_id!r} cannot end as {reason!r}: it is not live, but finished "
                                      f"or was never submitted")
        self._remove(sequence)
        self._finished.append(request_id)

    def fail(self, request_id: str, error: Exception) -> None:
        """End a live request that cannot go on; ``take_failures`` tells it."""
        self._fail(self._live(request_id), error)

    def handle(self, request_id: str) -> KVHandle:
        """The KV handle of a running request."""
        sequence = self._running.get(request_id)
        if sequence is None or sequence.handle is None:
            raise UnknownRequestError(f"request {request_id!r} is not running, so it holds no pages")
        return sequence.handle

    def handles(self, request_ids: Sequence[str]) -> list[KVHandle]:
        """Those of several running requests, asked for at once because every step does. Only with a page manager."""
        running = self._running
        try:
            return [running[request_id].handle for request_id in request_ids]  # type: ignore[misc]  # who runs has one
        except KeyError as missing:
            raise UnknownRequestError(f"request {missing} is not running, so it holds no pages") from None

    # --------------------------------------------------------------------------------------------- step

    def step(self, budget_tokens: int) -> ScheduleDecision:
        """Plan the next step and reserve its pages. Budget 0 schedules nothing and loses nothing."""
        if isinstance(budget_tokens, bool) or not isinstance(budget_tokens, int) or budget_tokens < 0:
            raise RequestError(f"budget_tokens must be an integer from 0, not {budget_tokens!r}")
        self.complete_step()
        plan = Plan(self._steps, budget_tokens, budget_tokens)
        self._steps += 1
        if budget_tokens:
            for sequence in self._tables.lacking(self._running_in_order()):
                self._provide_pages(plan, sequence)  # before anything is scheduled: who has a chunk is not preempted
            decode_first = self.policy.decode_first or self._decode_overdue(plan)
            if decode_first:
                self._plan_decodes(plan)
            self._plan_admissions(plan)
            self._plan_prefills(plan)
            if not decode_first:
                self._plan_decodes(plan)
        else:
            for sequence in (*self._running.values(), *self._waiting.first(BYPASS_LIMIT)):
                plan.reasons[sequence.id] = "waits: this step's budget is 0"
        finished, self._finished = tuple(self._finished), []
        return ScheduleDecision(plan.step, plan.budget, plan.chunks, tuple(plan.admitted), tuple(plan.preempted),
                                finished, self._waiting.ids, self._ids_running(),
                                Reasons(plan.reasons, plan.chunks, plan.decoding), plan.found)

    def complete_step(self) -> None:
        """Count what the last step handed out as computed: requests that reach max_tokens are finished. Idempotent."""
        in_flight, self._in_flight = self._in_flight, []
        running = self._running
        for sequences, count in in_flight:
            for sequence in sequences:
                if running.get(sequence.id) is not sequence:
                    continue  # cancelled or failed meanwhile; the id may already belong to a newer request
                sequence.computed += count
                try:
                    self._tables.fill(sequence)
                except Exception as error:  # its pages were taken away, say: it alone ends, with the reason
                    self._fail(sequence, error)
                    continue
                if sequence.computed == sequence.known:
                    sequence.known += 1
                    if sequence.known == sequence.end:
                        self.finish(sequence.id, "length")

    def abandon_step(self) -> None:
        """The computation was interrupted: nothing of the last step counts, it will be handed out again."""
        self._in_flight = []

    def take_failures(self) -> dict[str, str]:
        """Requests that were ended because their pages could not be provided, with the reason; each is told once.
        Whoever owns their streams must end those."""
        failures, self._failures = self._failures, {}
        return failures

    # -------------------------------------------------------------------------------------------- pages

    def _provide_pages(self, plan: Plan, sequence: SequenceState) -> None:
        """Make all known positions of a running sequence writable: a page now and then while it decodes; a prompt has
        its pages since its admission, unless somebody outside forked its table. Preempts from the last on until it
        succeeds or the sequence itself had to go. Terminates: every round succeeds or ends somebody's running."""
        while self._running.get(sequence.id) is sequence:
            try:
                self._tables.reserve(sequence)
                return
            except OutOfPagesError as refusal:
                if len(self._running) > 1 or not self._refused_too_often(sequence, refusal):
                    self._preempt(plan, self._running_in_order()[-1], sequence)
            except Exception as error:  # concerns this request alone; the others go on
                self._fail(sequence, error)

    def _preempt(self, plan: Plan, victim: SequenceState, needy: SequenceState) -> None:
        pages = self._tables.page_count(victim)
        swapped = self._tables.swap_out(victim)
        if not swapped:
            self._tables.close(victim)
            victim.computed = 0
        self._stop_running(victim)
        victim.preempted = True
        victim.order = self.policy.rank(victim.request, victim.arrival_step, victim.generated), victim.order[1]
        self._waiting.push(victim)
        plan.preempted.append(victim.id)
        fate = (f"keeps its {victim.computed} tokens in host pages" if swapped else
                f"will compute its {victim.known} tokens again")
        plan.reasons[victim.id] = (f"preempted: {needy.id} needs a page and none is free; {victim.id} is last in "
                                   f"order, gives back {counted(pages, 'page')} and {fate}")

    # --------------------------------------------------------------------------------------- admissions

    def _plan_admissions(self, plan: Plan) -> None:
        """Admit from the head of the queue while slots, budget and pages last (see the module's rules)."""
        if not self._waiting:
            return
        refusal = self._closed(plan) or self._full(plan)
        if refusal:
            for sequence in self._waiting.first(BYPASS_LIMIT):
                if sequence.id not in plan.reasons:
                    plan.reasons[sequence.id] = refusal
            return
        blocked: SequenceState | None = None  # the first request that lacks pages
        for sequence in self._waiting.first(self.max_running - len(self._running) + BYPASS_LIMIT):
            refusal = refusal or self._full(plan) or _held(blocked)
            if refusal:
                plan.reasons[sequence.id] = refusal
            elif self._open_table(sequence, plan):
                self._waiting.remove(sequence)
                self._run(sequence)
                plan.admitted.append(sequence.id)
                if sequence.computed and not sequence.preempted:
                    plan.found[sequence.id] = sequence.computed
                if blocked:
                    blocked.bypassed += 1
            elif self._waiting.get(sequence.id) is sequence:
                blocked = blocked or sequence

    def _closed(self, plan: Plan) -> str:
        """Why nobody is admitted in this step, or ""."""
        if plan.preempted:
            return "waits: no admission in a step that had to preempt"
        if self.batching == "static" and self._running:
            return f"waits: static batching, the batch of {', '.join(self._running)} must end first"
        return ""

    def _full(self, plan: Plan) -> str:
        """Why nobody more is admitted in this step, or ""."""
        if len(self._running) >= self.max_running:
            return f"waits: {len(self._running)} of at most {self.max_running} requests are running"
        prefilling = sum(not sequence.decoding or sequence.id in plan.admitted for sequence in self._running.values())
        if plan.left <= prefilling:
            return (f"waits: {plan.left} of {plan.budget} budget tokens are left after the decodes, and {prefilling} "
                    f"prompts are already being computed")
        return ""

    def _open_table(self, sequence: SequenceState, plan: Plan) -> bool:
        """Provide pages for all known tokens; on failure note why and change nothing."""
        try:
            self._tables.open(sequence)
        except OutOfPagesError as error:
            if self._running or not self._refused_too_often(sequence, error):
                plan.reasons[sequence.id] = f"waits: {self._tables.lack(sequence)}; {self._next_release()}"
            return False
        except Exception as error:  # not a lack of pages: this request cannot be served, the others can
            self._fail(sequence, error)
            return False
        return True

    def _next_release(self) -> str:
        """Who is nearest to its end, for the reason of a wait."""
        if not self._running:
            return "no running request will free any: pages are held from outside"
        soonest = min(self._running.values(), key=lambda running: running.request.max_tokens - running.generated)
        pages, left = self._tables.page_count(soonest), soonest.request.max_tokens - soonest.generated
        return f"{soonest.id} frees {pages} at its end, at most {counted(left, 'token')} away"

    # ------------------------------------------------------------------------------ decodes and prefills

    def _plan_decodes(self, plan: Plan) -> None:
        """One token for each decoding request, the first in order first."""
        decoding = [sequence for sequence in self._running_in_order() if sequence.last_served != plan.step
                    and sequence.prompt_length <= sequence.computed == sequence.known - 1]  # .decoding, but quicker
        served = _least_recently_served(decoding, plan.left)
        if served:
            self._hand_out(plan, served, 1, "decode")
        if len(served) < len(decoding):
            self._explain_turns(plan, decoding)

    def _decode_overdue(self, plan: Plan) -> bool:
        """Has somebody who decodes waited AGING steps for others' prompts?"""
        return any(running.decoding and plan.step - running.last_served > AGING for running in self._running.values())

    def _plan_prefills(self, plan: Plan) -> None:
        """Share what is left of the budget evenly among prompts, short ones first so that what they do not need
        goes to the longer ones. A request that was admitted in this step with one token left to compute (swapped in,
        or all of its tokens found) belongs here too, so that it does not idle until the next step."""
        if len(plan.decoding) == len(self._running):  # as nearly always
            return
        prefilling = [sequence for sequence in self._running.values() if sequence.last_served != plan.step
                      and (not sequence.decoding or sequence.id in plan.admitted)]
        if not prefilling:
            return
        served = _least_recently_served(prefilling, plan.left)
        served.sort(key=lambda sequence: (sequence.remaining, sequence.order))
        for i, sequence in enumerate(served):
            share = plan.left // (len(served) - i)
            phase = "decode" if sequence.decoding else "prefill"  # one that was swapped in goes on where it was
            self._schedule(plan, sequence, min(share, sequence.remaining), phase)
        if len(served) < len(prefilling):
            self._explain_turns(plan, prefilling)

    # ------------------------------------------------------------------------------------------- inside

    def _hand_out(self, plan: Plan, sequences: list[SequenceState], count: int, phase: str) -> None:
        """A chunk of so many tokens for each of the sequences."""
        plan.chunks.add(tuple([sequence.id for sequence in sequences]),
                        tuple([sequence.computed for sequence in sequences]), count, phase)
        plan.left -= count * len(sequences)
        step = plan.step
        for sequence in sequences:
            sequence.last_served = step
        self._in_flight.append((sequences, count))
        if phase == "decode":
            plan.decoding += sequences

    def _schedule(self, plan: Plan, sequence: SequenceState, count: int, phase: str) -> None:
        """A chunk for one sequence, with its reason."""
        self._hand_out(plan, [sequence], count, phase)
        if phase == "decode":
            return
        start, end = sequence.computed, sequence.computed + count
        admitted = "admitted; " if sequence.id in plan.admitted else ""
        left = f", {sequence.known - end} left for later steps (budget {plan.budget})" if end < sequence.known else ""
        plan.reasons[sequence.id] = f"{admitted}prefills positions {start} to {end - 1} of {sequence.known}{left}"

    def _explain_turns(self, plan: Plan, sequences: list[SequenceState]) -> None:
        for sequence in sequences:
            if sequence.id in self._running and sequence.last_served != plan.step:
                plan.reasons[sequence.id] = (f"waits for its turn: {len(self._running)} requests want a part of the "
                                             f"{plan.budget} budget tokens")

    def _new_sequence(self, request: Request) -> SequenceState:
        rank = self.policy.rank(request, self._steps, 0)
        self._submitted += 1
        return SequenceState(request, self._steps, (rank, self._submitted))

    def _find(self, request_id: str) -> SequenceState | None:
        if not isinstance(request_id, str):
            return None
        return self._running.get(request_id) or self._waiting.get(request_id)

    def _live(self, request_id: str) -> SequenceState:
        sequence = self._find(request_id)
        if sequence is None:
            raise UnknownRequestError(f"request {request_id!r} is not live")
        return sequence

    def _ids_running(self) -> tuple[str, ...]:
        if self._running_ids is None:
            self._running_ids = tuple(self._running)
        return self._running_ids

    def _running_in_order(self) -> list[SequenceState]:
        if self._in_order is None:
            self._in_order = sorted(self._running.values(), key=_order)
        return self._in_order

    def _run(self, sequence: SequenceState) -> None:
        self._running[sequence.id] = sequence
        self._running_ids = self._in_order = None

    def _stop_running(self, sequence: SequenceState) -> None:
        if self._running.pop(sequence.id, None):
            self._running_ids = self._in_order = None

    def _remove(self, sequence: SequenceState) -> None:
        """Take a sequence out of every queue and give its pages back."""
        self._stop_running(sequence)
        self._waiting.remove(sequence)
        self._tables.close(sequence)

    def _refused_too_often(self, sequence: SequenceState, error: OutOfPagesError) -> bool:
        sequence.refusals += 1
        if sequence.refusals >= REFUSAL_LIMIT:
            self._fail(sequence, error)
        return sequence.refusals >= REFUSAL_LIMIT

    def _fail(self, sequence: SequenceState, error: Exception) -> None:
        self._remove(sequence)
        self._failures[sequence.id] = f"{type(error).__name__}: {error}"
        self._finished.append(sequence.id)


def _least_recently_served(sequences: list[SequenceState], number: int) -> list[SequenceState]:
    """At most ``number`` of the sequences, those that have waited longest for a chunk, in the policy's order."""
    if len(sequences) <= number:
        return sequences
    return sorted(nsmallest(number, sequences, key=lambda sequence: (sequence.last_served, sequence.order)), key=_order)


def _held(blocked: SequenceState | None) -> str:
    if blocked and blocked.bypassed >= BYPASS_LIMIT:
        return f"waits: {blocked.id} lacks pages and was overtaken {blocked.bypassed} times, so the queue holds for it"
    return ""


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value
