"""Mistakes 32 to 36, and others like them: lifecycles, metrics, the record."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import current_thread, main_thread
from unittest import mock

from starter import core
from starter.backend import Batch
from starter.core import ModelRunner
from starter.engine import InferenceEngine
from starter.metrics import MetricsCollector
from starter.sampling import Draws
from starter.scheduler import ContinuousBatchScheduler
from starter.streams import Sample, TokenStream
from starter.timeline import Recorder

from .mistake import mistake


@mistake(32, "M3ContinuousBatching.test_streaming_is_incremental", says="until its request has news")
def fake_streaming(patch):
    """Fake streaming: all tokens arrive at the end."""
    right = TokenStream.__next__

    def wait(self):
        self._engine.run()
        return right(self)

    patch(TokenStream, "__next__", wait)


@mistake(33, "M3ContinuousBatching.test_cancel_inside_the_stream_loop", "M2KVCache.test_cancel_returns_pages",
         says="V3")
def cancel_sets_a_flag_only(patch):
    """Flag-only cancel: tokens or pages go on after it."""
    right, cancelled = Sample.add, set()

    def add(self, choice, *arguments):
        event = right(self, choice, *arguments)
        if self.stream in cancelled and event.finish_reason:  # the flag is looked at when it ends anyway
            self.stream.events[-1] = event._replace(finish_reason="cancelled")
        return event

    patch(InferenceEngine, "cancel", lambda self, request_id: cancelled.add(self._find(request_id)))
    patch(Sample, "add", add)


@mistake(34, "M6EndToEnd.test_a_fault_ends_one_request", says="its neighbours do not notice")
def one_fault_kills_its_neighbours(patch):
    """One fault kills its neighbours: the whole batch ends with the error."""
    def run(self, samples, batch):
        try:
            return self._forward(samples, batch)
        except Exception as error:
            return dict.fromkeys(samples, error)

    patch(ModelRunner, "run", run)


@mistake(34, "M6EndToEnd.test_a_fault_ends_one_request", says="exactly one terminal event")
def two_terminal_events(patch):
    """One fault gives two terminal events."""
    right = Sample.end

    def end(self, reason, error, step, time):
        event = right(self, reason, error, step, time)
        if reason == "error":
            self.stream.events.append(event)
        return event

    patch(Sample, "end", end)


@mistake(35, "M1Reference.test_greedy_generation", says="tokens of")
def one_token_too_many(patch):
    """One token too many."""
    right = InferenceEngine.submit

    def submit(self, prompt_tokens, max_tokens, **keywords):
        return right(self, prompt_tokens, max_tokens + 1 if type(max_tokens) is int and max_tokens else max_tokens,
                     **keywords)

    patch(InferenceEngine, "submit", submit)


@mistake(35, "M1Reference.test_end_of_sequence", "M6EndToEnd.test_random_arrivals",
         says="tokens of|end-of-sequence")
def first_token_never_ends(patch):
    """An end-of-sequence token right after prefill is taken for any other: one token too many."""
    right = Sample.add

    def add(self, choice, *arguments):
        ends, self.stream.end_tokens = self.stream.end_tokens, self.stream.end_tokens if self.delivered else ()
        try:
            return right(self, choice, *arguments)
        finally:
            self.stream.end_tokens = ends

    patch(Sample, "add", add)


@mistake(36, "M3ContinuousBatching.test_metrics_agree_with_the_events", says="ttft.mean")
def time_to_first_token_without_the_wait(patch):
    """Faked metrics: the time to the first token counts from admission, so that waiting costs nothing."""
    right = MetricsCollector._on_step

    def on_step(self, event):
        for request in event["admitted"]:
            if not self.requests[request].admitted:
                self.requests[request].submitted = event["time"]
        right(self, event)

    patch(MetricsCollector, "_on_step", on_step)


@mistake(36, "M3ContinuousBatching.test_metrics_agree_with_the_events", says="one truth about pages")
def peak_memory_halved(patch):
    """Faked metrics: half of the peak is reported."""
    right = InferenceEngine.metrics

    def halved(self):
        real = right(self)
        return replace(real, kv_peak_pages=real.kv_peak_pages // 2, kv_peak_bytes=real.kv_peak_bytes // 2)

    patch(InferenceEngine, "metrics", halved)


# ------------------------------------------------------------------------------------------ found on the way


@mistake(None, "M4PagedKV.test_tight_pools", says="ended with an error")
def preempted_requests_end_with_an_error(patch):
    """A request that was preempted ends with an error, as if that were an answer."""
    right = ContinuousBatchScheduler._preempt

    def preempt(self, plan, victim, needy):
        right(self, plan, victim, needy)
        self._fail(victim, RuntimeError("there was no page left"))

    patch(ContinuousBatchScheduler, "_preempt", preempt)


@mistake(None, "M6EndToEnd.test_long_tails", says="tokens of|its logits are not")
def positions_end_at_40(patch):
    """A table of angles that is too short: all positions from 40 on are position 40."""
    right = Batch.of

    def of(pieces, page_size):
        batch = right(pieces, page_size)
        batch.positions = [min(position, 40) for position in batch.positions]
        return batch

    patch(Batch, "of", of)


@mistake(None, "M6EndToEnd.test_memory_budget_in_bytes", says="5.5 pages")
def memory_budget_rounded_up(patch):
    """The budget in bytes buys one page more than fits."""
    right = core.pages_within
    patch(core, "pages_within", lambda *arguments: right(*arguments) + 1)


@mistake(None, "M6EndToEnd.test_close_with_live_requests", says="close returns every page")
def close_forgets_the_pages(patch):
    """close only says that the engine is closed."""
    patch(InferenceEngine, "close", lambda self: setattr(self, "closed", True))


@mistake(None, "M6EndToEnd.test_streams_in_any_order", says="nothing is lost")
def unread_tokens_dropped(patch):
    """Tokens that nobody reads in the step they come from are dropped."""
    right = TokenStream.step

    def step(self):
        for other in self._engine._core.streams.values():
            if other is not self.stream and other.finish_reason is None:
                other.events.clear()
        right(self)

    patch(TokenStream, "step", step)


@mistake(None, "M6EndToEnd.test_streams_from_threads", says="several threads")
def one_thread_only(patch):
    """A stream that is read from another thread is empty."""
    right = TokenStream.__next__

    def read(self):
        if current_thread() is not main_thread():
            raise StopIteration
        return right(self)

    patch(TokenStream, "__next__", read)


@mistake(None, "M6EndToEnd.test_generate", says="all or none")
def generate_leaves_the_rest_behind(patch):
    """When a prompt is refused, those before it stay in the engine."""
    def generate(self, prompts, max_tokens, sampling=None):
        names = [self.submit(prompt, max_tokens, sampling=sampling) for prompt in prompts]
        return [list(self.result(name).tokens) for name in names]

    patch(InferenceEngine, "generate", generate)


@mistake(None, "M6EndToEnd.test_timeline", says="the timeline holds every submit, token, cancel and end")
def cancels_not_recorded(patch):
    """The timeline holds no cancel."""
    right = Recorder.event

    def event(self, event, **fields):
        if event != "cancel":
            right(self, event, **fields)

    patch(Recorder, "event", event)


@mistake(None, "M6EndToEnd.test_same_seed_same_timeline", says="global random numbers")
def seeds_from_the_system(patch):
    """A request without a seed draws from the system's random numbers."""
    right: Callable[..., None] = Draws.__init__
    system = random.SystemRandom()

    def init(self, params, request_id, number, engine_seed):
        right(self, params, request_id, number, engine_seed if params.seed is not None else system.random())

    patch(Draws, "__init__", init)


@mistake(None, "M6EndToEnd.test_each_technique_gains", says="steps:")
def batching_setting_ignored(patch):
    """batching="static" is continuous all the same, so that a comparison compares nothing."""
    right = ContinuousBatchScheduler.__init__

    def init(self, *settings, **more):
        right(self, *settings, **more)
        self.batching = "continuous"

    patch(ContinuousBatchScheduler, "__init__", init)


@mistake(None, "M6EndToEnd.test_driver", says="exits with 0")
def driver_always_exits_with_0(patch):
    """The driver's exit code says that all is well, whatever happened."""
    folder = patch.enter_context(TemporaryDirectory())  # holds what Python imports first in the driver's process
    Path(folder, "sitecustomize.py").write_text("import atexit, os\natexit.register(os._exit, 0)\n", encoding="utf-8")
    patch.enter_context(mock.patch.dict(os.environ, PYTHONPATH=folder))
