"""M3 · Which tokens are computed in the next step, for whom, and why.

Token-level ("continuous") batching (Yu et al. 2022, "Orca"): requests join and leave in every step. A step has a
token budget. Running requests that decode are served first, one token each; what is left is shared among prompts
(chunked prefill; Agrawal et al. 2024, "Sarathi-Serve"), so a long prompt never stops the others' tokens.

    submit --> waiting --admit--> running: prefill chunks ... decode, decode, ... --> finished
                  ^                  |
                  +---- preempt -----+     pages ran out: computed again later, no token is lost

The scheduler owns lifecycles and holds no tensor and no page number. With a ``KVCacheManager`` it reserves the pages
of what it plans in the same call, so that a plan and its pages are one decision; without one it counts tokens alone.
What ``step`` hands out counts as computed when the next step is asked for, or when ``complete_step`` is called.

Rules, and the promises that follow (properties in tests/test_scheduler.py). P, M: prompt and max_tokens of a
request; L: the largest P + M among live requests; budgets are at least max_running unless said otherwise.

- Admission: in order of arrival, when a slot (of max_running) is free, the budget leaves it a token, and pages for
  *all* its known tokens are free: prefill never stops half-way for want of pages.
- Bypass: the oldest request that lacks pages may be overtaken by later ones that fit, at most BYPASS_LIMIT times;
  then the queue holds until it is in. So small requests pass a heavy one, and the heavy one is not starved.
- Preemption: when a decoding request needs a page and none is free, the running request that arrived *last* gives
  up its pages and goes back to its place in the queue. The oldest request is never preempted: it always finishes.
- Decode gap: a running request that decodes gets a token in every step whose budget covers the running requests,
  unless it is preempted in it. With a smaller budget turns go round: least recently served first.
- Wait: a request with k older live requests is admitted within (k + 1) * (BYPASS_LIMIT + 2) * L steps. The oldest
  live request o, if it is not running, is admitted within (BYPASS_LIMIT + 1) * L: whoever runs ends or is preempted
  within L steps, and at most BYPASS_LIMIT others get in before it. Once running it is never preempted and ends within
  L. Then the next is the oldest. A budget b below max_running multiplies this by ceil(max_running / b).
- No livelock: a request that is refused pages REFUSAL_LIMIT times while no other request runs is ended as failed:
  somebody outside holds the pages, and waiting would not end.
- Refusal: what would not fit an empty pool is refused at ``submit`` (CapacityError). The last token of a request is
  never stored, so P + M - 1 slots are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import merge, nsmallest
from itertools import islice

from .errors import CapacityError, DuplicateRequestError, OutOfPagesError, RequestError, UnknownRequestError
from .kv_cache import KVCacheManager, KVHandle
from .schema import Request

BYPASS_LIMIT = 8
REFUSAL_LIMIT = 8


@dataclass(frozen=True)
class ScheduledChunk:
    """``count`` tokens of one request from position ``start`` on; phase "prefill" or "decode".

    The chunk that reaches the end of the known tokens yields the request's next token (its first, after a prompt).
    """

    request_id: str
    start: int
    count: int
    phase: str


@dataclass(frozen=True)
class ScheduleDecision:
    """What one step does. The tuples hold request ids; ``finished`` are those that ended since the last decision.

    ``reasons`` says in words why each live request mentioned got what it got; of a long queue, those at its head.
    """

    step: int
    budget_tokens: int
    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    reasons: Mapping[str, str]

    @property
    def scheduled_tokens(self) -> int:
        """Tokens computed in this step, never more than the budget."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(eq=False)
class _Sequence:
    """A live request: how much of it is known, computed and stored."""

    request: Request
    serial: int  # order of arrival; the smaller the older
    computed: int = 0
    generated: int = 0
    handle: KVHandle | None = None
    last_served: int = -1  # step of its last chunk
    bypassed: int = 0  # later requests admitted while this one lacked pages
    refusals: int = 0  # times it got no pages although nothing else was running

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def known(self) -> int:
        """Tokens whose numbers are known: the prompt and what was generated."""
        return len(self.request.prompt_tokens) + self.generated

    @property
    def remaining(self) -> int:
        """Known tokens still to be computed; the last of them yields the next token."""
        return self.known - self.computed

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.remaining == 1


@dataclass
class _Plan:
    """A decision in the making."""

    step: int
    budget: int
    left: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


class ContinuousBatchScheduler:
    """Implements the rules above. ``batching`` "static" admits a batch only when the last one has ended, "none" one
    request at a time: kept for comparison. A step costs O(running + admissions + new pages + ids it names)."""

    def __init__(self, max_running: int = 8, policy: str = "fcfs", kv: KVCacheManager | None = None,
                 batching: str = "continuous") -> None:
        _require_positive("max_running", max_running)
        for name, value, allowed in (("policy", policy, ("fcfs",)),
                                     ("batching", batching, ("continuous", "static", "none"))):
            if value not in allowed:
                raise RequestError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
        self.max_running = 1 if batching == "none" else max_running
        self.policy, self.batching, self.kv = policy, batching, kv
        self._waiting: dict[str, _Sequence] = {}  # never admitted, in order of arrival
        self._preempted: dict[str, _Sequence] = {}  # to be admitted again, in order of arrival
        self._running: dict[str, _Sequence] = {}  # in order of admission
        self._in_flight: list[tuple[_Sequence, ScheduledChunk]] = []  # handed out, not yet counted as computed
        self._finished: list[str] = []  # since the last decision
        self._failures: dict[str, str] = {}  # not yet taken
        self._steps = self._arrivals = 0

    # --------------------------------------------------------------------------------------- lifecycles

    @property
    def idle(self) -> bool:
        """True when no request is live."""
        return not (self._waiting or self._preempted or self._running)

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of all live requests, running ones first."""
        return (*self._running, *self._preempted, *self._waiting)

    def is_running(self, request_id: str) -> bool:
        """Is the request admitted, and not preempted or finished?"""
        return request_id in self._running

    def submit(self, request: Request) -> None:
        """Queue a request. DuplicateRequestError while its id is live; CapacityError if no pool state could ever
        serve it. max_tokens 0 finishes at once."""
        if self._find(request.request_id):
            raise DuplicateRequestError(f"request {request.request_id!r} is live; choose another id or cancel it first")
        slots = len(request.prompt_tokens) + request.max_tokens - 1
        if self.kv and request.max_tokens and self.kv.pages_for(slots) > self.kv.total_pages:
            raise CapacityError(
                f"{request.request_id}: prompt {len(request.prompt_tokens)} + max_tokens {request.max_tokens} - 1 = "
                f"{slots} tokens need {self.kv.pages_for(slots)} pages of {self.kv.page_size}; the pool has "
                f"{self.kv.total_pages}: ask for fewer tokens or enlarge the pool")
        if request.max_tokens == 0:
            self._finished.append(request.request_id)
            return
        self._waiting[request.request_id] = _Sequence(request, self._arrivals)
        self._arrivals += 1

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

    def handle(self, request_id: str) -> KVHandle:
        """The KV handle of a running request."""
        sequence = self._running.get(request_id)
        if sequence is None or sequence.handle is None:
            raise UnknownRequestError(f"request {request_id!r} is not running, so it holds no pages")
        return sequence.handle

    # --------------------------------------------------------------------------------------------- step

    def step(self, budget_tokens: int) -> ScheduleDecision:
        """Plan the next step and reserve its pages. Budget 0 schedules nothing and loses nothing."""
        if isinstance(budget_tokens, bool) or not isinstance(budget_tokens, int) or budget_tokens < 0:
            raise RequestError(f"budget_tokens must be an integer from 0, not {budget_tokens!r}")
        self.complete_step()
        plan = _Plan(self._steps, budget_tokens, budget_tokens)
        self._steps += 1
        if budget_tokens:
            self._plan_decodes(plan)
            self._plan_admissions(plan)
            self._plan_prefills(plan)
        else:
            named = (*self._running.values(), *self._queue(self.max_running + BYPASS_LIMIT))
            plan.reasons.update((sequence.id, "waits: this step's budget is 0") for sequence in named)
        return self._decide(plan)

    def complete_step(self) -> None:
        """Count what the last step handed out as computed: requests that reach max_tokens are finished. Idempotent."""
        for sequence, chunk in self._in_flight:
            if self._running.get(sequence.id) is not sequence:
                continue  # cancelled or failed meanwhile; the id may already belong to a newer request
            sequence.computed += chunk.count
            if self._commit(sequence) and sequence.remaining == 0:
                sequence.generated += 1
                if sequence.generated == sequence.request.max_tokens:
                    self.finish(sequence.id, "length")
        self._in_flight = []

    def abandon_step(self) -> None:
        """The computation was interrupted: nothing of the last step counts, it will be handed out again."""
        self._in_flight = []

    def take_failures(self) -> dict[str, str]:
        """Requests that were ended because their pages could not be provided, with the reason; each is told once.
        Whoever owns their streams must end those."""
        failures, self._failures = self._failures, {}
        return failures

    def _commit(self, sequence: _Sequence) -> bool:
        """Tell the page manager how many positions are filled; False if the pages were taken away from outside."""
        try:
            if self.kv and sequence.handle:
                self.kv.commit(sequence.handle, sequence.computed)
        except Exception as error:  # whatever went wrong concerns this request alone: it ends with the reason
            self._fail(sequence, error)
            return False
        return True

    # ------------------------------------------------------------------------------------------ decodes

    def _plan_decodes(self, plan: _Plan) -> None:
        """One token for each decoding request, the oldest first, preempting the youngest where pages run out."""
        decoding = [sequence for sequence in self._running.values() if sequence.decoding]
        served = _least_recently_served(decoding, plan.left)
        for sequence in sorted(served, key=lambda sequence: sequence.serial):
            if sequence.id in self._running and self._provide_page(plan, sequence):
                self._schedule(plan, sequence, 1, "decode")
        for sequence in decoding:
            if sequence.id in self._running and sequence.last_served != plan.step:
                plan.reasons[sequence.id] = (f"waits for its turn: {len(decoding)} requests decode, the budget is "
                                             f"{plan.budget}")

    def _provide_page(self, plan: _Plan, sequence: _Sequence) -> bool:
        """Reserve the slot of the next position. Preempts from the youngest on until it succeeds; False if the
        sequence itself had to go. Terminates: every round either succeeds or removes a running request."""
        while sequence.id in self._running:
            try:
                if self.kv and sequence.handle:
                    self.kv.reserve(sequence.handle, sequence.known)
                return True
            except OutOfPagesError as error:
                if len(self._running) == 1 and self._refused_too_often(sequence, error):
                    break
                victim = max(self._running.values(), key=lambda running: running.serial)
                self._preempt(plan, victim, sequence)
            except Exception as error:  # not a lack of pages: this request cannot go on, the others can
                self._fail(sequence, error)
        return False

    def _preempt(self, plan: _Plan, victim: _Sequence, needy: _Sequence) -> None:
        pages = len(self.kv.pages(victim.handle)) if self.kv and self._holds_pages(victim) and victim.handle else 0
        self._remove(victim)
        victim.handle, victim.computed = None, 0
        self._preempted = dict(sorted([*self._preempted.items(), (victim.id, victim)], key=lambda item: item[1].serial))
        plan.preempted.append(victim.id)
        plan.reasons[victim.id] = (
            f"preempted: {needy.id} needs a page and none is free; {victim.id} arrived last, gives back "
            f"{counted(pages, 'page')} and will compute its {victim.known} tokens again")

    # --------------------------------------------------------------------------------------- admissions

    def _plan_admissions(self, plan: _Plan) -> None:
        """Admit from the head of the queue while slots, budget and pages last (see the module's rules)."""
        queue = self._queue(self.max_running + BYPASS_LIMIT)
        refusal = self._closed(plan)
        blocked: _Sequence | None = None  # the oldest request that lacks pages
        for sequence in queue:
            refusal = refusal or self._full(plan) or _held(blocked)
            if refusal:
                plan.reasons.setdefault(sequence.id, refusal)
            elif self._open_table(sequence, plan):
                self._waiting.pop(sequence.id, None)
                self._preempted.pop(sequence.id, None)
                self._running[sequence.id] = sequence
                plan.admitted.append(sequence.id)
                if blocked:
                    blocked.bypassed += 1
            elif self._find(sequence.id):  # it did not fail
                blocked = blocked or sequence

    def _queue(self, length: int) -> Iterable[_Sequence]:
        """The oldest ``length`` of waiting and preempted requests, by arrival."""
        both = merge(self._preempted.values(), self._waiting.values(), key=lambda sequence: sequence.serial)
        return list(islice(both, length))

    def _closed(self, plan: _Plan) -> str:
        """Why nobody is admitted in this step, or ""."""
        if plan.preempted:
            return "waits: no admission in a step that had to preempt"
        if self.batching == "static" and self._running:
            return f"waits: static batching, the batch of {', '.join(self._running)} must end first"
        return ""

    def _full(self, plan: _Plan) -> str:
        """Why nobody more is admitted in this step, or ""."""
        if len(self._running) >= self.max_running:
            return f"waits: {len(self._running)} of at most {self.max_running} requests are running"
        prefilling = sum(not sequence.decoding for sequence in self._running.values())
        if plan.left <= prefilling:
            return (f"waits: {plan.left} of {plan.budget} budget tokens are left after the decodes, and {prefilling} "
                    f"prompts are already being computed")
        return ""

    def _open_table(self, sequence: _Sequence, plan: _Plan) -> bool:
        """Allocate pages for all known tokens; on failure note why and change nothing."""
        if not self.kv:
            return True
        try:
            sequence.handle = self.kv.allocate(sequence.id, sequence.known)
        except OutOfPagesError as error:
            if not self._running and self._refused_too_often(sequence, error):
                return False
            needed = self.kv.pages_for(sequence.known)
            plan.reasons[sequence.id] = (f"waits: needs {counted(needed, 'page')}, {self.kv.free_pages} free; "
                                         f"{self._next_release()}")
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
        held = len(self.kv.pages(soonest.handle)) if self.kv and soonest.handle and self._holds_pages(soonest) else 0
        left = soonest.request.max_tokens - soonest.generated
        return f"{soonest.id} frees {held} at its end, at most {counted(left, 'token')} away"

    # ----------------------------------------------------------------------------------------- prefills

    def _plan_prefills(self, plan: _Plan) -> None:
        """Share what is left of the budget evenly among prompts, short ones first so that what they do not need
        goes to the longer ones. Their pages were reserved at admission."""
        prefilling = [sequence for sequence in self._running.values()
                      if not sequence.decoding and sequence.last_served != plan.step]
        served = _least_recently_served(prefilling, plan.left)
        served.sort(key=lambda sequence: (sequence.remaining, sequence.serial))
        for i, sequence in enumerate(served):
            share = plan.left // (len(served) - i)
            self._schedule(plan, sequence, min(share, sequence.remaining), "prefill")
        for sequence in prefilling:
            if sequence.last_served != plan.step:
                plan.reasons[sequence.id] = (f"waits for its turn: {plan.budget - plan.left} of {plan.budget} budget "
                                             f"tokens went to other requests")

    # ------------------------------------------------------------------------------------------- inside

    def _schedule(self, plan: _Plan, sequence: _Sequence, count: int, phase: str) -> None:
        start, end = sequence.computed, sequence.computed + count
        chunk = ScheduledChunk(sequence.id, start, count, phase)
        plan.chunks.append(chunk)
        plan.left -= count
        sequence.last_served = plan.step
        self._in_flight.append((sequence, chunk))
        if phase == "decode":
            what = f"decodes position {start}: token {sequence.generated + 1} of at most {sequence.request.max_tokens}"
        else:
            what = f"prefills positions {start} to {end - 1} of {sequence.known}"
            if end < sequence.known:
                what += f", {sequence.known - end} left for later steps (budget {plan.budget})"
        plan.reasons[sequence.id] = f"admitted; {what}" if sequence.id in plan.admitted else what

    def _decide(self, plan: _Plan) -> ScheduleDecision:
        finished, self._finished = tuple(self._finished), []
        return ScheduleDecision(
            plan.step, plan.budget, tuple(plan.chunks), tuple(plan.admitted), tuple(plan.preempted), finished,
            waiting=(*self._preempted, *self._waiting), running=tuple(self._running), reasons=plan.reasons)

    def _find(self, request_id: str) -> _Sequence | None:
        return self._running.get(request_id) or self._preempted.get(request_id) or self._waiting.get(request_id)

    def _holds_pages(self, sequence: _Sequence) -> bool:
        return bool(self.kv and sequence.handle and self.kv.owns(sequence.handle))

    def _remove(self, sequence: _Sequence) -> None:
        """Take a sequence out of every queue and give its pages back."""
        for queue in (self._running, self._preempted, self._waiting):
            queue.pop(sequence.id, None)
        if self.kv and sequence.handle and self._holds_pages(sequence):
            self.kv.release(sequence.handle)

    def _refused_too_often(self, sequence: _Sequence, error: OutOfPagesError) -> bool:
        sequence.refusals += 1
        if sequence.refusals >= REFUSAL_LIMIT:
            self._fail(sequence, error)
        return sequence.refusals >= REFUSAL_LIMIT

    def _fail(self, sequence: _Sequence, error: Exception) -> None:
        self._remove(sequence)
        self._failures[sequence.id] = f"{type(error).__name__}: {error}"
        self._finished.append(sequence.id)


def _least_recently_served(sequences: list[_Sequence], number: int) -> list[_Sequence]:
    """At most ``number`` of the sequences, those that have waited longest for a chunk first."""
    if len(sequences) <= number:
        return list(sequences)
    return nsmallest(number, sequences, key=lambda sequence: (sequence.last_served, sequence.serial))


def counted(number: int, noun: str) -> str:
    """ "1 page", "3 pages"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _held(blocked: _Sequence | None) -> str:
    if blocked and blocked.bypassed >= BYPASS_LIMIT:
        return f"waits: {blocked.id} lacks pages and was overtaken {blocked.bypassed} times, so the queue holds for it"
    return ""


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} must be an integer from 1, not {value!r}")
