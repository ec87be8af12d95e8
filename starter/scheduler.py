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
(``policies.py``; under "fcfs" the order of arrival), and "first" and "last" below mean that order. P, M: prompt and
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
  ceil(max_running / b), "prefill-first" by AGING + 1. ``policies.py`` says who counts in k.
- No livelock: a request that is refused pages REFUSAL_LIMIT times while no other request runs is ended as failed:
  somebody outside holds the pages, and waiting would not end.
- Refusal: what would not fit an empty pool is refused at ``submit`` (CapacityError). The last token of a request is
  never stored, so P + M - 1 slots are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from heapq import nsmallest
from operator import attrgetter

from .block_tables import BlockTables
from .decisions import Plan, Reasons, ScheduledChunk, ScheduleDecision, counted
from .errors import CapacityError, DuplicateRequestError, OutOfPagesError, RequestError, UnknownRequestError
from .kv_cache import KVCacheManager, KVHandle
from .policies import AGING, POLICIES, Policy
from .schema import Request
from .sequences import Sequence, WaitingQueue

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
                 tokens_of: Callable[[str], Tokens[int]] | None = None) -> None:
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
        self._running: dict[str, Sequence] = {}  # in order of admission
        self._running_ids: tuple[str, ...] | None = None  # the same; None: changed since it was last told
        self._in_order: list[Sequence] | None = None  # in the policy's order; None: the same
        self._in_flight: list[tuple[list[Sequence], int]] = []  # handed so many tokens, not yet counted as computed
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

    def handles(self, request_ids: Tokens[str]) -> list[KVHandle]:
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

    def _provide_pages(self, plan: Plan, sequence: Sequence) -> None:
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

    def _preempt(self, plan: Plan, victim: Sequence, needy: Sequence) -> None:
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
        blocked: Sequence | None = None  # the first request that lacks pages
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

    def _open_table(self, sequence: Sequence, plan: Plan) -> bool:
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

    def _hand_out(self, plan: Plan, sequences: list[Sequence], count: int, phase: str) -> None:
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

    def _schedule(self, plan: Plan, sequence: Sequence, count: int, phase: str) -> None:
        """A chunk for one sequence, with its reason."""
        self._hand_out(plan, [sequence], count, phase)
        if phase == "decode":
            return
        start, end = sequence.computed, sequence.computed + count
        admitted = "admitted; " if sequence.id in plan.admitted else ""
        left = f", {sequence.known - end} left for later steps (budget {plan.budget})" if end < sequence.known else ""
        plan.reasons[sequence.id] = f"{admitted}prefills positions {start} to {end - 1} of {sequence.known}{left}"

    def _explain_turns(self, plan: Plan, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.id in self._running and sequence.last_served != plan.step:
                plan.reasons[sequence.id] = (f"waits for its turn: {len(self._running)} requests want a part of the "
                                             f"{plan.budget} budget tokens")

    def _new_sequence(self, request: Request) -> Sequence:
        rank = self.policy.rank(request, self._steps, 0)
        self._submitted += 1
        return Sequence(request, self._steps, (rank, self._submitted))

    def _find(self, request_id: str) -> Sequence | None:
        if not isinstance(request_id, str):
            return None
        return self._running.get(request_id) or self._waiting.get(request_id)

    def _live(self, request_id: str) -> Sequence:
        sequence = self._find(request_id)
        if sequence is None:
            raise UnknownRequestError(f"request {request_id!r} is not live")
        return sequence

    def _ids_running(self) -> tuple[str, ...]:
        if self._running_ids is None:
            self._running_ids = tuple(self._running)
        return self._running_ids

    def _running_in_order(self) -> list[Sequence]:
        if self._in_order is None:
            self._in_order = sorted(self._running.values(), key=_order)
        return self._in_order

    def _run(self, sequence: Sequence) -> None:
        self._running[sequence.id] = sequence
        self._running_ids = self._in_order = None

    def _stop_running(self, sequence: Sequence) -> None:
        if self._running.pop(sequence.id, None):
            self._running_ids = self._in_order = None

    def _remove(self, sequence: Sequence) -> None:
        """Take a sequence out of every queue and give its pages back."""
        self._stop_running(sequence)
        self._waiting.remove(sequence)
        self._tables.close(sequence)

    def _refused_too_often(self, sequence: Sequence, error: OutOfPagesError) -> bool:
        sequence.refusals += 1
        if sequence.refusals >= REFUSAL_LIMIT:
            self._fail(sequence, error)
        return sequence.refusals >= REFUSAL_LIMIT

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._remove(sequence)
        self._failures[sequence.id] = f"{type(error).__name__}: {error}"
        self._finished.append(sequence.id)


def _least_recently_served(sequences: list[Sequence], number: int) -> list[Sequence]:
    """At most ``number`` of the sequences, those that have waited longest for a chunk, in the policy's order."""
    if len(sequences) <= number:
        return sequences
    return sorted(nsmallest(number, sequences, key=lambda sequence: (sequence.last_served, sequence.order)), key=_order)


def _held(blocked: Sequence | None) -> str:
    if blocked and blocked.bypassed >= BYPASS_LIMIT:
        return f"waits: {blocked.id} lacks pages and was overtaken {blocked.bypassed} times, so the queue holds for it"
    return ""


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value
