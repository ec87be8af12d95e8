"""Mistakes 16 to 24: the scheduler."""

from __future__ import annotations

from dataclasses import replace

from starter.engine import InferenceEngine
from starter.policies import FirstComeFirstServed, ShortestRemainingWithAging
from starter.scheduler import ContinuousBatchScheduler

from .mistake import mistake


@mistake(16, "M3ContinuousBatching.test_freed_slot_is_used_at_once", says="admit in every step")
def static_batching(patch):
    """Static batching: a freed slot idles until the longest request ends."""
    right = ContinuousBatchScheduler._closed

    def closed(self, plan):
        return right(self, plan) or ("waits: the batch must end first" if self._running else "")

    patch(ContinuousBatchScheduler, "_closed", closed)


@mistake(17, "M3ContinuousBatching.test_requests_are_batched", says="sequential service")
def sequential(patch):
    """Sequential: never more than one request in a step."""
    right = ContinuousBatchScheduler.__init__

    def init(self, max_running=8, *settings, **more):
        right(self, min(max_running, 1), *settings, **more)

    patch(ContinuousBatchScheduler, "__init__", init)


@mistake(18, "M3ContinuousBatching.test_long_request_in_endless_short_ones",
         "M3ContinuousBatching.test_first_come_first_served", says="")
def last_in_first_out(patch):
    """Last in, first out: the oldest wait is unbounded."""
    patch(FirstComeFirstServed, "rank", lambda self, request, arrival_step, generated: -arrival_step)


@mistake(18, "M3ContinuousBatching.test_no_policy_starves", says="let waiting raise a request's rank")
def shortest_first_without_aging(patch):
    """Shortest first without aging: the oldest wait is unbounded."""
    def rank(self, request, arrival_step, generated):
        return len(request.prompt_tokens) + request.max_tokens - generated

    patch(ShortestRemainingWithAging, "rank", rank)


@mistake(19, "M3ContinuousBatching.test_every_position_once", says="budget")
def budget_ignored(patch):
    """Budget ignored: a step schedules more tokens than it was given."""
    right = ContinuousBatchScheduler.step

    def step(self, budget_tokens):
        decision = right(self, budget_tokens)
        return replace(decision, budget_tokens=budget_tokens) if budget_tokens == 0 else replace(
            right(self, 2 * budget_tokens), budget_tokens=budget_tokens)

    patch(ContinuousBatchScheduler, "step", step)


@mistake(20, "M4PagedKV.test_tight_pools", says="when pages run out")
def preemption_loses_a_token(patch):
    """Preemption loses or repeats tokens: the newest one is forgotten with the pages."""
    right = ContinuousBatchScheduler._preempt

    def preempt(self, plan, victim, needy):
        right(self, plan, victim, needy)
        victim.known = max(victim.prompt_length, victim.known - 1)

    patch(ContinuousBatchScheduler, "_preempt", preempt)


@mistake(21, "M3ContinuousBatching.test_decode_gap", says="schedule decodes first")
def prefill_starves_decode(patch):
    """Prefill starves decode: a running request stops getting tokens while prompts arrive."""
    patch(FirstComeFirstServed, "decode_first", False)


@mistake(22, "M6EndToEnd.test_a_fault_ends_one_request", says="whose computation fails")
def failures_dropped(patch):
    """Drops failures: submitted does not equal terminal events."""
    right = InferenceEngine._end_all

    def end_all(self, stream, reason, error=None):
        if reason != "error":
            return right(self, stream, reason, error)
        for sample in stream.samples:  # as if it had never been there
            self.scheduler.finish(sample.id, reason)
            del self._samples[sample.id]
        del self._streams[stream.request.request_id]

    patch(InferenceEngine, "_end_all", end_all)


@mistake(23, "M4PagedKV.test_what_never_fits_is_refused", says="4 pages hold 16")
def what_never_fits_waits_for_ever(patch):
    """A request that can never fit waits forever, or blocks those behind it."""
    right = ContinuousBatchScheduler.submit

    def submit(self, request):
        kv, self.kv = self.kv, None  # it is not asked
        try:
            right(self, request)
        finally:
            self.kv = kv

    patch(ContinuousBatchScheduler, "submit", submit)


@mistake(24, "M3ContinuousBatching.test_id_reused_right_after_cancel",
         says="the late cancel of the old x must not end the new x")
def late_cancel_kills_the_new_request(patch):
    """Cancel then submit the same id at once: the late cancel kills the new request."""
    cancel, step, late = InferenceEngine.cancel, InferenceEngine.step, []

    def cancel_twice(self, request_id):
        cancel(self, request_id)
        late.append(request_id)

    def step_after_cancels(self, budget_tokens=None):
        while late:
            if late[-1] in self.active:
                cancel(self, late[-1])
            late.pop()
        return step(self, budget_tokens)

    patch(InferenceEngine, "cancel", cancel_twice)
    patch(InferenceEngine, "step", step_after_cancels)
