"""Mistakes 37: cheats that the harness sees by itself. Edited tests, and an engine that writes its own results, need a
grader that runs a copy of the suite of its own and believes nothing that the engine's process says."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from typing import Any

from starter.backend import Batch, Piece, ReferenceBackend, ReferenceKVStore
from starter.core import ModelRunner
from starter.engine import InferenceEngine
from starter.kv_cache import KVCacheManager, PlainStore
from starter.model import Model
from starter.quantization import dequantize
from starter.reference import reference_logits
from starter.scheduler import ContinuousBatchScheduler
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

    def add(self, choice, *arguments):
        event = right(self, choice, *arguments)
        event = self.stream.events[-1] = event._replace(token=Anything(event.token or 0))
        return event

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


# ------------------------------------------- found on the way: pages for show (of floats; int8 pages are left alone)


def beside(store):
    """A dictionary beside a store's pages, where a cheat keeps what is in no account."""
    return store.__dict__.setdefault("_beside", {})


def follow_copies(patch):
    """When a page is copied, so is what lies beside it: a slot's number is the last part of each name."""
    right = ReferenceKVStore.copy_page

    def copy_page(self, source, target, origin=None):
        right(self, source, target, origin)
        size = self.page_size
        beside(self).update({(*name, target * size + slot % size): found
                             for (*name, slot), found in list(beside(origin or self).items())
                             if slot // size == source})

    patch(ReferenceKVStore, "copy_page", copy_page)


@mistake(None, "M2KVCache.test_stored_numbers_are_what_counts", says="as if nothing had been changed: its pages")
def shadow_cache(patch):
    """Keys and values lie in a dictionary beside the store, where attention reads them; pages are written for show."""
    right, right_context = ReferenceBackend.attend, ReferenceKVStore.context

    def attend(self, q, k, v, layer, store, batch):
        if isinstance(store, ReferenceKVStore):
            beside(store).update(((layer, slot), row) for slot, *row in zip(batch.slots, k, v))
        return right(self, q, k, v, layer, store, batch)

    def context(self, layer, head, span):
        right_context(self, layer, head, span)
        part = slice(head * self.head_width, (head + 1) * self.head_width)
        rows = [beside(self)[layer, slot] for slot in span.context]
        return [key[part] for key, _ in rows], list(zip(*[value[part] for _, value in rows]))

    patch(ReferenceBackend, "attend", attend)
    patch(ReferenceKVStore, "context", context)
    follow_copies(patch)


class Listening:
    """A backend that is called for show: it does the work, and the embedded rows are kept."""

    def __init__(self, backend):
        self.backend, self.rows = backend, []

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def embed(self, table, tokens):
        self.rows = self.backend.embed(table, tokens)
        return self.rows


class Again(ReferenceBackend):
    """A private backend that begins with rows embedded before."""

    def __init__(self, rows):
        self.embedded = rows

    def embed(self, table, tokens):
        return self.embedded


@mistake(None, "M2KVCache.test_stored_numbers_are_what_counts", says="as if nothing had been changed: its pages")
def private_recompute(patch):
    """The backend does its work for show; tokens come from a private one, which computes every position again."""
    right = Model.forward

    def forward(self, batch, store):
        shown = self.backend
        if not isinstance(store, ReferenceKVStore) or isinstance(shown, Again):
            return right(self, batch, store)
        logits: list[Any] = []
        try:
            self.backend = Listening(shown)
            right(self, batch, store)
            beside(store).update(((slot,), row) for slot, row in zip(batch.slots, self.backend.rows))
            for span in batch.spans:
                if span.first_row + span.count - 1 in batch.logit_rows:
                    self.backend = Again([beside(store)[slot,] for slot in span.context])
                    again = Batch.of([Piece([0] * span.end, 0, (0,), wants_logits=True)], span.end)
                    logits += right(self, again, self.new_store(1, span.end))
        finally:
            self.backend = shown
        return logits

    patch(Model, "forward", forward)
    follow_copies(patch)


@mistake(None, "M2KVCache.test_stored_numbers_are_what_counts", says="pages are for show. There must be one store")
def store_for_show(patch):
    """The page manager's store is for show: the decoder is given another one of the same size."""
    right, right_copy = ModelRunner.__init__, ReferenceKVStore.copy_page

    def twin(store):
        return beside(store).setdefault("twin", ReferenceKVStore(
            store.layers, store.kv_heads, store.head_width, len(store.keys[0][0]) // store.page_size, store.page_size))

    def init(self, model, store):
        right(self, model, twin(store) if isinstance(store, ReferenceKVStore) else store)

    def copy_page(self, source, target, origin=None):
        right_copy(self, source, target, origin)
        right_copy(twin(self), source, target, twin(origin) if origin else None)

    patch(ModelRunner, "__init__", init)
    patch(ReferenceKVStore, "copy_page", copy_page)


# ------------------------------------------------- what was given does the work, and figures that are only claimed


@mistake(None, "M1Reference.test_operations", says="still to be written")
def reference_does_the_work(patch):
    """The operations are not written: tokens come from the cache-less reference, which was given."""
    known: dict[Any, list[int]] = {}

    def missing(self, *arguments):
        raise NotImplementedError("M1: still to be written")

    def forward(self, batch, store):
        parameters, logits = self.parameters(), []
        tokens = self.backend.embed(self.embedding, batch.tokens) and list(batch.tokens)
        for span in batch.spans:
            slots = list(span.context)
            mine = known.setdefault((id(store), slots[0]), [])
            mine[span.end - span.count:] = tokens[span.first_row:span.first_row + span.count]
            logits += [reference_logits(self.config, parameters, mine)] * (
                span.first_row + span.count - 1 in batch.logit_rows)
        return logits

    patch(Model, "forward", forward)
    for name in ("norm", "linear", "rotate", "swiglu"):
        patch(ReferenceBackend, name, missing)


@mistake(None, "M2KVCache.test_counters", "M6EndToEnd.test_memory_budget_in_bytes", says="bytes")
def a_quarter_of_the_bytes(patch):
    """Pages are said to take a quarter of the bytes that their numbers do."""
    for store in (ReferenceKVStore, PlainStore):
        def init(self, *arguments, right=store.__init__, **more):
            right(self, *arguments, **more)
            self.page_bytes //= 4

        patch(store, "__init__", init)


@mistake(None, "M5Quantization.test_memory_really_falls", says="no float copy")
def small_while_it_is_watched(patch):
    """Float weights are kept beside the codes, unless memory is being traced."""
    right = ReferenceBackend.matrix

    def matrix(self, tensor, quantization, *more):
        made = right(self, tensor, quantization, *more)
        if quantization and not tracemalloc.is_tracing():
            object.__setattr__(made, "copy", dequantize(made))
        return made

    patch(ReferenceBackend, "matrix", matrix)


@mistake(None, "M4PagedKV.test_pages_are_taken_as_they_fill", says="do not reserve the pages of max_tokens")
def pages_of_max_tokens_reserved(patch):
    """No preemption is written: a request is admitted when all pages that it may ever need are free beside those of
    the running ones."""
    right = ContinuousBatchScheduler._open_table

    def most(self, sequence):
        return -(-(len(sequence.request.prompt_tokens) + sequence.request.max_tokens - 1) // self._pages.page_size)

    def open_table(self, plan, sequence):
        asked = sum(most(self, one) for one in (*self._running.values(), sequence))
        if self.kv and self._running and asked > self.kv.total_pages:
            plan.reasons.setdefault(sequence.id, "waits: all pages that it may need are to be free")
            return False
        return right(self, plan, sequence)

    patch(ContinuousBatchScheduler, "_open_table", open_table)
