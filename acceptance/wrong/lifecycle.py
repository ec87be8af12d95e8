"""Mistakes 32 to 37: lifecycles, metrics, and cheats."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from starter.engine import InferenceEngine
from starter.executor import Executor
from starter.metrics import MetricsCollector
from starter.streams import Sample

from .mistake import mistake


@mistake(32, "M3ContinuousBatching.test_streaming_is_incremental", says="until its request has news")
def fake_streaming(patch):
    """Fake streaming: all tokens arrive at the end."""
    right = InferenceEngine._read

    def read(self, stream):
        self.run()
        yield from right(self, stream)

    patch(InferenceEngine, "_read", read)


@mistake(33, "M3ContinuousBatching.test_cancel_inside_the_stream_loop", "M2KVCache.test_cancel_returns_pages",
         says="V3")
def cancel_sets_a_flag_only(patch):
    """Flag-only cancel: tokens or pages go on after it."""
    right, cancelled = Sample.add, set()

    def add(self, choice, ends, step, time):
        event = right(self, choice, ends, step, time)
        if self.stream in cancelled and event.finish_reason:  # the flag is looked at when it ends anyway
            self.stream.events[-1] = replace(event, finish_reason="cancelled")
        return event

    patch(InferenceEngine, "cancel", lambda self, request_id: cancelled.add(self._find(request_id)))
    patch(Sample, "add", add)


@mistake(34, "M6EndToEnd.test_a_fault_ends_one_request", says="its neighbours do not notice")
def one_fault_kills_its_neighbours(patch):
    """One fault kills its neighbours: the whole batch ends with the error."""
    def run(self, pieces):
        try:
            return self._forward(pieces)
        except Exception as error:
            return dict.fromkeys(pieces, error)

    patch(Executor, "run", run)


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


@mistake(35, "M1Reference.test_end_of_sequence", says="end-of-sequence token")
def first_token_never_ends(patch):
    """An end-of-sequence token right after prefill is taken for any other: one token too many."""
    right = Sample.add

    def add(self, choice, ends, step, time):
        return right(self, choice, ends and self.generated > 0, step, time)

    patch(Sample, "add", add)


@mistake(36, "M3ContinuousBatching.test_metrics_agree_with_the_events", says="ttft.mean")
def time_to_first_token_without_the_wait(patch):
    """Faked metrics: the time to the first token counts from admission, so that waiting costs nothing."""
    right = MetricsCollector._on_step

    def on_step(self, event):
        for request in event["admitted"]:
            if not self.lives[request].admitted:
                self.lives[request].submitted = event["time"]
        right(self, event)

    patch(MetricsCollector, "_on_step", on_step)


@mistake(36, "M3ContinuousBatching.test_metrics_agree_with_the_events", says="kv_peak_pages")
def peak_memory_halved(patch):
    """Faked metrics: half of the peak is reported."""
    right = InferenceEngine.metrics

    def halved(self):
        real = right(self)
        return replace(real, kv_peak_pages=real.kv_peak_pages // 2, kv_peak_bytes=real.kv_peak_bytes // 2)

    patch(InferenceEngine, "metrics", halved)


@mistake(37, "M6EndToEnd.test_nothing_was_tampered_with", says="perf_counter was replaced")
def patched_timer(patch):
    """Tampering: a timer that stands still."""
    patch(time, "perf_counter", lambda: 0.0)


class Anything(int):
    """Equal to whatever it is compared with."""

    __hash__ = int.__hash__

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


@mistake(37, "M1Reference.test_greedy_generation", says="a token is an int")
def tokens_equal_to_everything(patch):
    """Tampering: tokens that are equal to whatever they are compared with."""
    right = Sample.add

    def add(self, choice, ends, step, time):
        return right(self, replace(choice, token=Anything(choice.token)), ends, step, time)

    patch(Sample, "add", add)


@mistake(37, "M4PagedKV.test_exactly_full_pages", says="plain")
def counts_equal_to_everything(patch):
    """Tampering: numbers of pages that are equal to whatever they are compared with."""
    from starter.kv_cache import KVCacheManager
    right = KVCacheManager.pages
    patch(KVCacheManager, "pages", lambda self, handle: tuple(map(Anything, right(self, handle))))
    patch(KVCacheManager, "free_pages", property(lambda self: Anything(self._pool.available)))


@mistake(37, "M1Reference.test_greedy_generation", says="SystemExit")
def exit_with_status_0(patch):
    """Tampering: sys.exit(0) in the middle of a step."""
    patch(InferenceEngine, "step", lambda self, budget_tokens=None: sys.exit(0))


@mistake(37, "M1Reference.test_greedy_generation", says="ended before")
def process_ends_with_status_0(patch):
    """Tampering: the process is over, with status 0, before a test can fail."""
    patch(InferenceEngine, "step", lambda self, budget_tokens=None: os._exit(0))
