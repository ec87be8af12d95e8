"""Mistakes 37: cheats that the harness sees by itself. Edited tests, and an engine that writes its own results, need a
grader that runs a copy of the suite of its own and believes nothing that the engine's process says."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from starter.engine import InferenceEngine
from starter.kv_cache import KVCacheManager
from starter.streams import Sample

from .mistake import mistake


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


@mistake(37, "M2KVCache.test_access_after_release", says="plain data")
def counts_equal_to_everything(patch):
    """Tampering: numbers of pages that are equal to whatever they are compared with."""
    patch(KVCacheManager, "free_pages", property(lambda self: Anything(self._pool.available)))


@mistake(37, "M1Reference.test_greedy_generation", says="SystemExit")
def exit_with_status_0(patch):
    """Tampering: sys.exit(0) in the middle of a step."""
    patch(InferenceEngine, "step", lambda self, budget_tokens=None: sys.exit(0))


@mistake(37, "M1Reference.test_greedy_generation", says="ended with status 0")
def process_ends_with_status_0(patch):
    """Tampering: the process is over, with status 0, before a test can fail."""
    patch(InferenceEngine, "step", lambda self, budget_tokens=None: os._exit(0))
