"""Mistakes 16 to 24, and others like them: the scheduler."""

from __future__ import annotations

from starter import scheduler
from starter.base.statistics import Summary
from starter.core import EngineCore
from starter.engine import InferenceEngine
from starter.model import Model
from starter.sampling import Draws
from starter.scheduler import ContinuousBatchScheduler, FirstComeFirstServed, Plan, ShortestRemainingWithAging

from .mistake import mistake


@mistake(16, "M3ContinuousBatching.test_freed_slot_is_used_at_once", says="admit in every step")
def static_batching(patch):
    """Static batching: a freed slot idles until the longest request ends."""
    right = ContinuousBatchScheduler._closed

    def closed(self, plan):
        return right(self, plan) or ("waits: the batch must end first" if self._running else "")

    patch(ContinuousBatchScheduler, "_closed", closed)


@mistake(17, "M3ContinuousBatching.test_requests_are_batched", says="one of them alone")
def sequential(patch):
    """Sequential: never more than one request in a step."""
    right = ContinuousBatchScheduler.__init__

    def init(self, max_running=8, *settings, **more):
        right(self, min(max_running, 1), *settings, **more)

    patch(ContinuousBatchScheduler, "__init__", init)


@mistake(18, "M3ContinuousBatching.test_long_request_in_endless_short_ones",
         "M3ContinuousBatching.test_first_come_first_served", says="V4")
def last_in_first_out(patch):
    """Last in, first out: the oldest wait is unbounded."""
    patch(FirstComeFirstServed, "rank", lambda self, request, arrival_step, generated: -arrival_step)


@mistake(18, "M3ContinuousBatching.test_no_policy_starves", says="let waiting raise a request's rank")
def shortest_first_without_aging(patch):
    """Shortest first without aging: the oldest wait is unbounded."""
    def rank(self, request, arrival_step, generated):
        return len(request.prompt_tokens) + request.max_tokens - generated

    patch(ShortestRemainingWithAging, "rank", rank)


@mistake(19, "M3ContinuousBatching.test_every_position_once", says="respect the budget")
def budget_ignored(patch):
    """Budget ignored: a step schedules more tokens than it was given."""
    patch(scheduler, "Plan", lambda step, budget, left: Plan(step, budget, 2 * left))


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
    right = EngineCore.end_all

    def end_all(self, stream, reason, error=None):
        if reason != "error":
            right(self, stream, reason, error)
        else:
            for sample in stream.samples:  # as if it had never been there
                self.scheduler.finish(sample.id, reason)
                del self.samples[sample.id]
            del self.streams[stream.request.request_id]

    patch(EngineCore, "end_all", end_all)


@mistake(23, "M4PagedKV.test_what_never_fits_is_refused", says="4 pages hold 16")
def what_never_fits_waits_for_ever(patch):
    """A request that can never fit waits forever, or blocks those behind it."""
    right = ContinuousBatchScheduler.check

    def check(self, request):
        kv, self.kv = self.kv, None  # it is not asked
        try:
            right(self, request)
        finally:
            self.kv = kv

    patch(ContinuousBatchScheduler, "check", check)


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


# ------------------------------------------------------------------------------------------ found on the way


@mistake(None, "M3ContinuousBatching.test_budget_zero", says="budget 0")
def budget_0_means_no_limit(patch):
    """A budget of 0 is taken for none."""
    right = ContinuousBatchScheduler.step

    def step(self, budget_tokens):
        decision = right(self, 64 if type(budget_tokens) is int and budget_tokens == 0 else budget_tokens)
        return decision._replace(budget_tokens=budget_tokens)

    patch(ContinuousBatchScheduler, "step", step)


@mistake(None, "M3ContinuousBatching.test_short_request_behind_long_prompt", says="share the budget among prompts")
def prompts_one_after_the_other(patch):
    """The first prompt gets all of the budget until it is computed."""
    def plan_prefills(self, plan):
        for sequence in sorted(self._running.values(), key=lambda sequence: sequence.order):
            if plan.left and sequence.last_served != plan.step and not sequence.decoding:
                self._schedule(plan, sequence, min(plan.left, sequence.remaining), "prefill")

    patch(ContinuousBatchScheduler, "_plan_prefills", plan_prefills)


@mistake(None, "M3ContinuousBatching.test_turns_under_a_small_budget", says="take turns")
def the_same_ones_first(patch):
    """When the budget is too small for all, the same requests are served in every step."""
    patch(scheduler, "_least_recently_served", lambda sequences, number: sequences[:number])


@mistake(None, "M3ContinuousBatching.test_cancel_in_the_scheduler", says="every request is computed to its end")
def slot_lost_with_a_cancel(patch):
    """The slot of a cancelled request is never given to another."""
    right = ContinuousBatchScheduler.cancel

    def cancel(self, request_id):
        self.max_running -= self.is_running(request_id)
        right(self, request_id)

    patch(ContinuousBatchScheduler, "cancel", cancel)


@mistake(None, "M3ContinuousBatching.test_end_of_sequence_in_the_scheduler", says="r has ended")
def goes_on_after_the_end(patch):
    """A request goes on to max_tokens after its end-of-sequence token."""
    right = ContinuousBatchScheduler.finish

    def finish(self, request_id, reason):
        if reason != "stop":
            right(self, request_id, reason)

    patch(ContinuousBatchScheduler, "finish", finish)


@mistake(None, "M3ContinuousBatching.test_joining_changes_no_token", says="V1")
def logits_handed_out_the_wrong_way_round(patch):
    """In a batch, each request gets the logits of another."""
    right = Model.forward
    patch(Model, "forward", lambda self, batch, store: right(self, batch, store)[::-1])


@mistake(None, "M3ContinuousBatching.test_sampling_is_isolated", says="a generator of its own")
def one_generator_for_all(patch):
    """All requests draw from one generator."""
    right, shared = Draws.__init__, []

    def init(self, *arguments):
        right(self, *arguments)
        shared.append(self._generator)
        self._generator = shared[0]

    patch(Draws, "__init__", init)


@mistake(None, "M3ContinuousBatching.test_metrics_without_samples", says="one token has no interval")
def no_sample_is_a_sample_of_0(patch):
    """The mean of nothing is reported as 0."""
    right = Summary.of
    patch(Summary, "of", lambda samples: right(samples) if samples else Summary(0, 0.0))
