"""M3 · Which tokens are computed in the next step, for which requests, and why.

Token-level ("continuous") batching (Yu et al. 2022, "Orca"): requests join and leave in every step. A step has a
token budget. Running requests that decode are served first, one token each; what is left is shared among prompts
(chunked prefill; Agrawal et al. 2024, "Sarathi-Serve"), so a long prompt never stops the others' tokens.

    submit --> waiting --admit--> running: prefill chunks ... decode, decode, ... --> finished
                  ^                  |
                  +---- preempt -----+     pages ran out: computed again, or swapped back in; no token is lost

The scheduler owns lifecycles and holds no tensor and no page number. With a ``KVCacheManager`` it reserves the pages
of what it plans in the same call, so that a plan and its pages are one decision; without one it counts tokens alone.
What ``step`` hands out counts as computed when the next step is asked for, or when ``complete_step`` is called.

The rules, and the promises that follow from them (each a property in tests/test_scheduler.py). Requests are ordered by
the policy's rank; under "fcfs" that is the order of arrival, and "first" and "last" below mean this order. P and M are
a request's prompt length and max_tokens, L is the largest P + M among live requests, and budgets are at least
max_running unless stated otherwise.

- Admission: in order, while a slot (of max_running) is free, the budget leaves it a token, and pages for *all* its
  known tokens are free. Prefill therefore never stops half-way for want of pages.
- Bypass: later requests that fit may overtake the first request that lacks pages, at most BYPASS_LIMIT times; then the
  queue waits until that request is in. Small requests pass a heavy one, and the heavy one is not starved.
- Preemption: when a decoding request needs a page and none is free, the *last* running request gives up its pages
  and goes back to its place in the queue. The first live request is never preempted once it runs: it always finishes.
- Decode gap: a running request that decodes gets a token in every step whose budget covers the running requests,
  unless that step preempts it. With a smaller budget requests take turns, least recently served first. (Under
  "prefill-first" the gap is at most AGING + 1 steps.)
- Wait: a request with k requests before it is admitted within (k + 1) * (BYPASS_LIMIT + 2) * L steps. Proof: the first
  live request, if it is not running, is admitted within (BYPASS_LIMIT + 1) * L steps, because each running request
  ends or is preempted within L steps and at most BYPASS_LIMIT others are admitted before it. Once running it is never
  preempted and ends within another L steps, (BYPASS_LIMIT + 2) * L in all. Then the next request is the first. A
  budget b below max_running multiplies the bound by ceil(max_running / b), "prefill-first" by AGING + 1.
- No livelock: a request that is refused pages REFUSAL_LIMIT times while no other request runs ends with an error:
  the pages are held from outside the engine, and the wait would never end.
- Refusal: ``submit`` refuses what would not fit an empty pool (CapacityError). The last token of a request is never
  stored, so P + M - 1 slots are needed.

**Policies.** A policy gives a request a *rank* in steps, as if it had arrived at that step; the smallest rank is served
first, the largest is preempted first. All waiting requests age alike, so their order does not change while they wait:

    fcfs            rank = arrival                            later arrivals overtake no request
    priority        rank = arrival - AGING * priority         one level of priority is worth AGING steps of waiting
    shortest        rank = arrival + remaining / AGING        AGING tokens fewer are worth one step of waiting
    prefill-first   rank = arrival, but prompts are computed before decodes, unless a decode has waited AGING steps:
                    kept as a bad example

From a finite number of steps after a request's arrival on, every new request has a larger rank. So k above counts the
requests that arrived before it and, under "priority", later ones of priority p' that arrive within AGING * (p' - p)
steps; under "shortest", later ones with fewer remaining tokens that arrive within difference / AGING steps.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import isfinite
from operator import attrgetter
from typing import NamedTuple, Protocol

from .base.wings import picture
from .errors import CapacityError, DuplicateRequestError, OutOfPagesError, RequestError, UnknownRequestError
from .kv_cache import KVCacheManager, KVHandle
from .schema import Request
from .sequences import SequenceState, WaitingQueue

AGING = 16  # steps
BYPASS_LIMIT = 8
REFUSAL_LIMIT = 8
WAITING_LISTED = 256
FINISHED_LISTED = 100_000
_order = attrgetter("order")


# ------------------------------------------------------------------------------------------------------------ policies


class Policy(Protocol):
    """Ranks requests; see the module's docstring."""

    decode_first: bool  # False: prompts go first, for at most AGING steps in a row

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        """Rank of a request that arrived at ``arrival_step`` and has generated this many tokens. Computed at submit and
        at each preemption; it must never grow."""


class FirstComeFirstServed:
    """The order of arrival."""

    decode_first = True

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        return arrival_step


class PriorityWithAging:
    """Higher priority first, unless it arrived AGING steps later for each level."""

    decode_first = True

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        return arrival_step - AGING * request.priority


class ShortestRemainingWithAging:
    """Fewer tokens left to compute first, unless it arrived one step later for each AGING tokens."""

    decode_first = True

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        return arrival_step + (len(request.prompt_tokens) + request.max_tokens - generated) / AGING


class PrefillFirst(FirstComeFirstServed):
    """Prompts before decodes: the shortest time to first token, while running requests nearly stop."""

    decode_first = False


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityWithAging,
    "shortest": ShortestRemainingWithAging,
    "prefill-first": PrefillFirst,
}


# ----------------------------------------------------------------------------------------------------- what is decided


class ScheduledChunk(NamedTuple):
    """``count`` tokens of one request from position ``start`` on; phase "prefill" or "decode".

    The chunk that reaches the end of the known tokens yields the request's next token (its first, after a prompt).
    """

    request_id: str
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    phase: str


class ScheduleDecision(NamedTuple):
    """What one step does. The tuples hold request ids; ``finished`` are those that ended since the last decision (where
    no step ran meanwhile, the last FINISHED_LISTED of them).

    ``chunks`` are in the order of the batch, ``running`` in the order of admission, ``waiting`` in the order in which
    the requests began to wait (again, after a preemption). ``waiting_count`` requests wait; of more than
    WAITING_LISTED, ``waiting`` names only the first, so that a decision stays small however long the queue. ``reasons``
    gives each live request one sentence (of a long queue, those that the policy puts first). ``found`` counts, for each
    admitted request, the prompt tokens that shared pages already hold; resuming after a preemption does not count.
    """

    step: int
    budget_tokens: int
    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    reasons: dict[str, str]
    found: dict[str, int]
    waiting_count: int

    @property
    def scheduled_tokens(self) -> int:
        """Tokens computed in this step, never more than the budget."""
        return sum(chunk.count for chunk in self.chunks)

    def __repr__(self) -> str:
        batch = " ".join(f"{chunk.request_id}+{chunk.count}" for chunk in self.chunks)
        return (f"<ScheduleDecision: step {self.step}, {self.scheduled_tokens} of {self.budget_tokens} tokens: "
                f"{batch or 'nothing'}; {self.waiting_count} wait>")

    def _repr_html_(self) -> str | None:
        return picture("schedule", self)


@dataclass(slots=True)
class Plan:
    """A decision in the making."""

    step: int
    budget: int
    left: int  # of the budget
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    decodes: dict[str, str] = field(default_factory=dict)  # reasons of the requests that decode
    reasons: dict[str, str] = field(default_factory=dict)  # reasons of all others


def counted(number: int, noun: str) -> str:
    """ "1 page", "3 pages"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ---------------------------------------------------------------------------------------------------- without any pages


class UnlimitedPages:
    """What a scheduler without a page manager uses in its place: every table fits, nothing is found, shared or kept."""

    page_size = total_pages = free_pages = sys.maxsize
    sharing = False

    def pages_for(self, tokens: int) -> int:
        return 1

    def allocate(self, request_id: str, token_count: int, tokens: Sequence[int], salt: str | None) -> KVHandle | None:
        return None

    def fork(self, handle: KVHandle | None, request_id: str) -> KVHandle | None:
        return None

    def length(self, handle: KVHandle | None) -> int:
        return 0

    def reserve(self, handle: KVHandle | None, token_count: int) -> None: ...

    def commit(self, handle: KVHandle | None, token_count: int, tokens: Sequence[int]) -> None: ...

    def owns(self, handle: KVHandle | None) -> bool:
        return False


# ------------------------------------------------------------------------------------------------------- the scheduler


class ContinuousBatchScheduler:
    """Implements the rules above. ``batching`` "static" admits a batch only when the previous one has ended, "none"
    one request at a time: both for comparison. ``preemption`` "swap" moves a victim's tokens to host pages while there
    are any, "recompute" computes them again.

    A step costs O(running + new pages); each request that starts or stops waiting costs a search in O(log waiting).
    """

    def __init__(self, max_running: int = 8, policy: str | Policy = "fcfs", kv: KVCacheManager | None = None,
                 batching: str = "continuous", preemption: str = "recompute") -> None:
        if isinstance(max_running, bool) or not isinstance(max_running, int) or max_running < 1:
            raise RequestError(f"max_running must be an integer from 1, not {max_running!r}")
        _require_one_of("batching", batching, ("continuous", "static", "none"))
        _require_one_of("preemption", preemption, ("recompute", "swap"))
        if isinstance(policy, str) or not callable(getattr(policy, "rank", None)):
            policy = POLICIES[_require_one_of("policy", policy, tuple(POLICIES))]()
        if kv is not None and not isinstance(kv, KVCacheManager):
            raise RequestError(f"kv must be a KVCacheManager or None, not {kv!r}")
        self.max_running = 1 if batching == "none" else max_running
        self.policy, self.batching, self.preemption, self.kv = policy, batching, preemption, kv
        self._pages: KVCacheManager | UnlimitedPages = kv or UnlimitedPages()
        self._waiting = WaitingQueue()
        self._running: dict[str, SequenceState] = {}  # in order of admission
        self._running_in_order: list[SequenceState] | None = []  # in the policy's order; None: to be sorted again
        self._in_flight: list[tuple[SequenceState, int]] = []  # and tokens handed out to it
        self._finished: deque[str] = deque(maxlen=FINISHED_LISTED)  # since the last decision
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
        return (*self._running, *self._waiting.ids())

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
        self.check(request)
        self.add(SequenceState(request))

    def check(self, request: Request) -> None:
        """The errors of ``submit``, without queueing the request."""
        self._require_free(request.request_id)
        slots = len(request.prompt_tokens) + request.max_tokens - 1
        if self.kv and request.max_tokens and self.kv.pages_for(slots) > self.kv.total_pages:
            raise CapacityError(
                f"{request.request_id}: prompt {len(request.prompt_tokens)} + max_tokens {request.max_tokens} - 1 = "
                f"{slots} tokens need {self.kv.pages_for(slots)} pages of {self.kv.page_size}; the pool has "
                f"{self.kv.total_pages}: ask for fewer tokens or enlarge the pool")

    def add(self, sequence: SequenceState) -> None:
        """Queue the sequence of a request that ``check`` has passed."""
        if sequence.request.max_tokens == 0:
            self._finished.append(sequence.id)
        else:
            self._rank(sequence)
            self._waiting.push(sequence)

    def fork(self, request_id: str, child: Request | SequenceState) -> None:
        """Start ``child`` where a running request stands now, on the same pages: another sample of one prompt, whose
        last generated token may differ. It runs at once, beyond max_running if need be (which limits admissions, not
        samples); pages are copied when either side writes to them."""
        parent = self._running.get(request_id)
        if parent is None:
            raise UnknownRequestError(f"request {request_id!r} is not running, so it cannot be forked")
        sequence = SequenceState(child, list(parent.tokens)) if isinstance(child, Request) else child
        self._require_free(sequence.id)
        self._rank(sequence)
        sequence.computed, sequence.known, sequence.last_served = parent.computed, parent.known, parent.last_served
        sequence.handle = self._pages.fork(parent.handle, sequence.id)  # type: ignore[arg-type]  # a running one has one
        self._run(sequence)

    def cancel(self, request_id: str) -> None:
        """End a live request now and free its pages. UnknownRequestError if it is not live. O(pages)."""
        self.finish(request_id, "cancelled")

    def finish(self, request_id: str, reason: str) -> None:
        """End a live request because of something that the scheduler does not see, such as an end-of-sequence token;
        ``reason`` names it in the error message. O(pages)."""
        sequence = self._find(request_id)
        if sequence is None:
            raise UnknownRequestError(f"request {request_id!r} cannot end as {reason!r}: it is not live, but finished "
                                      f"or was never submitted")
        self._end(sequence)

    def fail(self, request_id: str, error: Exception) -> None:
        """End a live request that cannot go on; ``take_failures`` reports it."""
        self._fail(self.sequence(request_id), error)

    def take_failures(self) -> dict[str, str]:
        """Requests that ended because of their pages, with the reason; each is reported once. The owner of their
        streams must end those."""
        failures, self._failures = self._failures, {}
        return failures

    def sequence(self, request_id: str) -> SequenceState:
        """The state of a live request. The caller appends the tokens that it samples to ``tokens``; everything else is
        for the scheduler to change."""
        if (sequence := self._find(request_id)) is None:
            raise UnknownRequestError(f"request {request_id!r} is not live")
        return sequence

    def handle(self, request_id: str) -> KVHandle:
        """The KV handle of a running request."""
        sequence = self._running.get(request_id)
        if sequence is None or sequence.handle is None:
            raise UnknownRequestError(f"request {request_id!r} is not running, so it holds no pages")
        return sequence.handle

    # --------------------------------------------------------------------------------------------- step

    def step(self, budget_tokens: int) -> ScheduleDecision:
        """Plan the next step and reserve its pages. Budget 0 schedules nothing and loses nothing."""
        require_budget(budget_tokens)
        self.complete_step()
        plan = Plan(self._steps, budget_tokens, budget_tokens)
        self._steps += 1
        if budget_tokens:
            self._plan_pages(plan)
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
        return self._decision(plan)

    def _decision(self, plan: Plan) -> ScheduleDecision:
        finished = tuple(self._finished)
        self._finished.clear()
        return ScheduleDecision(plan.step, plan.budget, tuple(plan.chunks), tuple(plan.admitted), tuple(plan.preempted),
                                finished, self._waiting.ids(WAITING_LISTED), tuple(self._running),
                                plan.decodes | plan.reasons, plan.found, len(self._waiting))

    def complete_step(self) -> None:
        """Count what the last step handed out as computed: requests that reach max_tokens are finished. Idempotent."""
        in_flight, self._in_flight = self._in_flight, []
        for sequence, count in in_flight:
            if self._running.get(sequence.id) is not sequence:
                continue  # cancelled or failed meanwhile; the id may already belong to a newer request
            sequence.computed += count
            try:
                self._pages.commit(sequence.handle, sequence.computed, sequence.tokens)  # type: ignore[arg-type]
            except Exception as error:  # its pages were taken away, for example: it alone ends
                self._fail(sequence, error)
                continue
            if sequence.computed == sequence.known:
                sequence.known += 1
                if sequence.generated == sequence.request.max_tokens:
                    self._end(sequence)

    def abandon_step(self) -> None:
        """The computation was interrupted: nothing of the last step counts, and it will be handed out again."""
        self._in_flight = []

    # -------------------------------------------------------------------------------------------- pages

    def _plan_pages(self, plan: Plan) -> None:
        """Reserve a page for each running sequence that has outgrown its table. This comes before anything is
        scheduled, so a sequence that has a chunk is not preempted in the same step. While any page is shared every
        sequence is asked, since a fork from outside may have made one of its pages read-only."""
        page_size, sharing = self._pages.page_size, self._pages.sharing
        for sequence in tuple(self._in_order()):
            if sharing or not sequence.handle or sequence.known > len(sequence.handle.pages) * page_size:
                self._provide_pages(plan, sequence)

    def _provide_pages(self, plan: Plan, sequence: SequenceState) -> None:
        """Make all known positions of a running sequence writable. Preempts running sequences, last first, until that
        succeeds or this one is preempted itself. Terminates: each round succeeds or takes one sequence out of the
        running set."""
        while self._running.get(sequence.id) is sequence:
            try:
                self._pages.reserve(sequence.handle, sequence.known)  # type: ignore[arg-type]
                return
            except OutOfPagesError as refusal:
                if len(self._running) > 1 or not self._refused_too_often(sequence, refusal):
                    self._preempt(plan, self._in_order()[-1], sequence)
            except Exception as error:  # concerns this request alone; the others go on
                self._fail(sequence, error)

    def _preempt(self, plan: Plan, victim: SequenceState, needy: SequenceState) -> None:
        """Take the pages of ``victim`` and send it back to its place in the queue."""
        order = self._order(victim, victim.generated, victim.order[1])  # a policy may raise: nothing has changed yet
        pages = self._page_count(victim)
        victim.swapped = self.preemption == "swap" and self._swap_out(victim)
        if not victim.swapped:
            self._release(victim)
            victim.computed = 0
        self._stop_running(victim)
        victim.preempted = True
        victim.order = order
        self._waiting.push(victim)
        plan.preempted.append(victim.id)
        fate = (f"keeps its {victim.computed} tokens in host pages" if victim.swapped else
                f"will compute its {victim.known} tokens again")
        plan.reasons[victim.id] = (f"preempted: {needy.id} needs a page and none is free; {victim.id} is last in "
                                   f"order, gives back {counted(pages, 'page')} and {fate}")

    def _swap_out(self, sequence: SequenceState) -> bool:
        """Move the tokens to host pages; False where that is impossible."""
        try:
            self.kv.swap_out(sequence.handle)  # type: ignore[union-attr, arg-type]
        except Exception:  # the host pool is full, or there is nothing to copy: computing again is always right
            return False
        return True

    def _open_table(self, plan: Plan, sequence: SequenceState) -> bool:
        """Pages for all known tokens of a waiting sequence: its swapped ones brought back, or new ones behind a shared
        prefix, whose tokens count as computed. On failure the reason is noted and nothing has changed."""
        try:
            if sequence.swapped and self.kv and sequence.handle:
                self.kv.swap_in(sequence.handle, sequence.known)
                sequence.swapped = False
            else:
                whole = sequence.request.sampling.prompt_logprobs is not None  # each position has to be computed
                sequence.handle = self._pages.allocate(sequence.id, sequence.known, () if whole else sequence.tokens,
                                                       sequence.request.cache_salt)
                sequence.computed = self._pages.length(sequence.handle)  # type: ignore[arg-type]
        except OutOfPagesError as error:
            if self._running or not self._refused_too_often(sequence, error):
                needed = counted(self._pages.pages_for(sequence.known), "page")
                plan.reasons[sequence.id] = (f"waits: needs {needed}, {self._pages.free_pages} free; "
                                             f"{self._next_release()}")
            return False
        except Exception as error:  # not a lack of pages: this request cannot be served, the others can
            self._fail(sequence, error)
            return False
        return True

    def _next_release(self) -> str:
        """The request closest to finishing, to explain a wait."""
        if not self._running:
            return "no running request will free any: pages are held from outside"
        soonest = min(self._running.values(), key=lambda running: running.request.max_tokens - running.generated)
        pages, left = self._page_count(soonest), soonest.request.max_tokens - soonest.generated
        return f"{soonest.id} frees {pages} at its end, at most {counted(left, 'token')} away"

    def _refused_too_often(self, sequence: SequenceState, error: OutOfPagesError) -> bool:
        sequence.refusals += 1
        if sequence.refusals >= REFUSAL_LIMIT:
            self._fail(sequence, error)
        return sequence.refusals >= REFUSAL_LIMIT

    def _page_count(self, sequence: SequenceState) -> int:
        owned = sequence.handle and self._pages.owns(sequence.handle)
        return len(sequence.handle.pages) if owned and sequence.handle else 0

    def _release(self, sequence: SequenceState) -> None:
        """Give its pages back, unless an outside holder of the handle has already done so."""
        if self.kv and sequence.handle and self.kv.owns(sequence.handle):
            self.kv.release(sequence.handle)
        sequence.handle, sequence.swapped = None, False

    # --------------------------------------------------------------------------------------- admissions

    def _plan_admissions(self, plan: Plan) -> None:
        """Admit from the head of the queue while slots, budget and pages last (see the module's rules)."""
        refusal = self._closed(plan) or self._full(plan)
        free_slots = 0 if refusal else self.max_running - len(self._running)
        blocked: SequenceState | None = None  # the first sequence that lacks pages
        for sequence in self._waiting.first(free_slots + BYPASS_LIMIT):
            refusal = refusal or self._full(plan) or _held(blocked)
            if refusal:
                plan.reasons.setdefault(sequence.id, refusal)
            elif self._open_table(plan, sequence):
                self._admit(plan, sequence)
                if blocked:
                    blocked.bypassed += 1
            elif self._waiting.get(sequence.id) is sequence:
                blocked = blocked or sequence

    def _admit(self, plan: Plan, sequence: SequenceState) -> None:
        self._waiting.remove(sequence)
        self._run(sequence)
        plan.admitted.append(sequence.id)
        if sequence.computed and not sequence.preempted:
            plan.found[sequence.id] = sequence.computed

    def _closed(self, plan: Plan) -> str:
        """Why no request is admitted in this step, or ""."""
        if plan.preempted:
            return "waits: no admission in a step that had to preempt"
        if self.batching == "static" and self._running:
            return f"waits: static batching, the batch of {', '.join(self._running)} must end first"
        return ""

    def _full(self, plan: Plan) -> str:
        """Why no further request is admitted in this step, or ""."""
        if len(self._running) >= self.max_running:
            return f"waits: {len(self._running)} of at most {self.max_running} requests are running"
        prefilling = sum(not sequence.decoding or sequence.id in plan.admitted for sequence in self._running.values())
        if plan.left <= prefilling:
            return (f"waits: {plan.left} of {plan.budget} budget tokens are left after the decodes, and {prefilling} "
                    f"prompts are already being computed")
        return ""

    # ------------------------------------------------------------------------------ decodes and prefills

    def _plan_decodes(self, plan: Plan) -> None:
        """One token for each decoding request, the first in order first."""
        decoding = [sequence for sequence in self._in_order()
                    if sequence.decoding and sequence.last_served != plan.step]
        served = _least_recently_served(decoding, plan.left)
        for sequence in served:
            self._schedule(plan, sequence, 1, "decode")
        if len(served) < len(decoding):
            self._explain_turns(plan, decoding)

    def _decode_overdue(self, plan: Plan) -> bool:
        """Has a decoding request waited AGING steps for others' prompts?"""
        return any(running.decoding and plan.step - running.last_served > AGING for running in self._running.values())

    def _plan_prefills(self, plan: Plan) -> None:
        """Share what is left of the budget evenly among prompts, short ones first so that what they do not need
        goes to the longer ones. A request that was admitted in this step with one token left to compute (swapped in,
        or all of its tokens found) belongs here too, so that it does not idle until the next step."""
        prefilling = [sequence for sequence in self._running.values() if sequence.last_served != plan.step
                      and (not sequence.decoding or sequence.id in plan.admitted)]
        served = _least_recently_served(prefilling, plan.left)
        served.sort(key=lambda sequence: (sequence.remaining, sequence.order))
        for i, sequence in enumerate(served):
            share = plan.left // (len(served) - i)
            phase = "decode" if sequence.decoding else "prefill"  # one that was swapped in goes on where it was
            self._schedule(plan, sequence, min(share, sequence.remaining), phase)
        if len(served) < len(prefilling):
            self._explain_turns(plan, prefilling)

    def _schedule(self, plan: Plan, sequence: SequenceState, count: int, phase: str) -> None:
        """Hand out a chunk of ``count`` tokens, with its reason."""
        start, end = sequence.computed, sequence.computed + count
        plan.chunks.append(ScheduledChunk(sequence.id, start, count, phase))
        plan.left -= count
        sequence.last_served = plan.step
        self._in_flight.append((sequence, count))
        if phase == "decode":
            number = end - sequence.prompt_length + 1
            plan.decodes[sequence.id] = (f"decodes position {start}: token {number} of at most "
                                         f"{sequence.request.max_tokens}")
            return
        admitted = "admitted; " if sequence.id in plan.admitted else ""
        left = f", {sequence.known - end} left for later steps (budget {plan.budget})" if end < sequence.known else ""
        plan.reasons[sequence.id] = f"{admitted}prefills positions {start} to {end - 1} of {sequence.known}{left}"

    def _explain_turns(self, plan: Plan, sequences: list[SequenceState]) -> None:
        for sequence in sequences:
            if sequence.id in self._running and sequence.last_served != plan.step:
                plan.reasons[sequence.id] = (f"waits for its turn: {len(self._running)} requests want a part of the "
                                             f"{plan.budget} budget tokens")

    # ------------------------------------------------------------------------------------------- queues

    def _rank(self, sequence: SequenceState) -> None:
        """Its place among all live requests, from now on."""
        sequence.arrival_step = self._steps
        sequence.order = self._order(sequence, 0, self._submitted + 1)
        self._submitted += 1

    def _order(self, sequence: SequenceState, generated: int, serial: int) -> tuple[float, int]:
        rank = self.policy.rank(sequence.request, sequence.arrival_step, generated)
        if not isfinite(rank):
            raise RequestError(f"a policy's rank must be a finite number, not {rank!r} for {sequence.id}")
        return rank, serial

    def _find(self, request_id: str) -> SequenceState | None:
        if not isinstance(request_id, str):
            return None
        return self._running.get(request_id) or self._waiting.get(request_id)

    def _require_free(self, request_id: str) -> None:
        if self._find(request_id):
            raise DuplicateRequestError(f"request {request_id!r} is live; choose another id or cancel it first")

    def _in_order(self) -> list[SequenceState]:
        """The running sequences in the policy's order."""
        if self._running_in_order is None:
            self._running_in_order = sorted(self._running.values(), key=_order)
        return self._running_in_order

    def _run(self, sequence: SequenceState) -> None:
        self._running[sequence.id] = sequence
        self._running_in_order = None

    def _stop_running(self, sequence: SequenceState) -> None:
        if self._running.pop(sequence.id, None):
            self._running_in_order = None

    def _end(self, sequence: SequenceState) -> None:
        """Take a sequence out of its queue and give its pages back."""
        self._stop_running(sequence)
        self._waiting.remove(sequence)
        self._release(sequence)
        self._finished.append(sequence.id)

    def _fail(self, sequence: SequenceState, error: Exception) -> None:
        self._failures[sequence.id] = f"{type(error).__name__}: {error}"
        self._end(sequence)


def _least_recently_served(sequences: list[SequenceState], number: int) -> list[SequenceState]:
    """At most ``number`` of the sequences, those that have waited longest for a chunk, in the policy's order."""
    if len(sequences) <= number:
        return sequences
    return sorted(nsmallest(number, sequences, key=lambda sequence: (sequence.last_served, sequence.order)), key=_order)


def _held(blocked: SequenceState | None) -> str:
    """Why the queue waits behind a sequence that was overtaken too often, or ""."""
    if blocked and blocked.bypassed >= BYPASS_LIMIT:
        return f"waits: {blocked.id} lacks pages and was overtaken {blocked.bypassed} times, so the queue holds for it"
    return ""


def require_budget(budget_tokens: int) -> None:
    """RequestError unless a step can have this budget."""
    if isinstance(budget_tokens, bool) or not isinstance(budget_tokens, int) or budget_tokens < 0:
        raise RequestError(f"budget_tokens must be an integer from 0, not {budget_tokens!r}")


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value
