"""Mistakes 1 to 15: the KV cache and its pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from starter import cpu_backend
from starter.batch import Batch, Piece
from starter.cpu_backend import CpuBackend
from starter.engine import InferenceEngine
from starter.errors import OutOfPagesError
from starter.kv_cache import KVCacheManager
from starter.pages import PagePool, PrefixIndex
from starter.sampling import Choice
from starter.scheduler import ContinuousBatchScheduler
from starter.schema import load_scenario

from .mistake import mistake

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json"


@mistake(1, "M1Reference.test_fixture_on_other_weights", says="does not look tokens up")
def golden_tokens_hard_coded(patch):
    """Golden tokens hard-coded: wrong under a fresh seed or fresh weights."""
    scenario = load_scenario(FIXTURE)
    answers = {request.prompt_tokens: scenario.golden.tokens[request.request_id] for request in scenario.requests}
    right = InferenceEngine._choose

    def choose(self, sample, row):
        answer = answers.get(sample.stream.request.prompt_tokens, ())[sample.generated:]
        return [Choice(answer[0], -1.0)] if answer else right(self, sample, row)

    patch(InferenceEngine, "_choose", choose)


@mistake(2, "M2KVCache.test_work_grows_linearly", says="hidden recomputation")
def hidden_recompute(patch):
    """Hidden recompute instead of a cache: positions computed grow quadratically."""
    right = InferenceEngine._piece

    def piece(self, chunk):
        mine, tokens = right(self, chunk), self._samples[chunk.request_id].tokens
        return Piece(tokens[:chunk.start + chunk.count], 0, mine.pages, mine.wants_logits)

    patch(InferenceEngine, "_piece", piece)


@mistake(3, "M1Reference.test_same_prompt_on_two_models", says="different weights")
def output_memoised_by_prompt(patch):
    """Output memoised by prompt: weights change, output does not."""
    right, memory = InferenceEngine._choose, {}

    def choose(self, sample, row):
        return memory.setdefault(tuple(sample.tokens), right(self, sample, row))

    patch(InferenceEngine, "_choose", choose)


@mistake(4, "M1Reference.test_greedy_generation", "M2KVCache.test_cache_changes_no_token", says="is its context its own")
def current_token_left_out(patch):
    """The current token left out of its own attention."""
    right = cpu_backend.attention
    patch(cpu_backend, "attention", lambda query, keys, columns: right(query, keys[:-1] or keys, columns))


@mistake(5, "M1Reference.test_greedy_generation", "M2KVCache.test_cache_changes_no_token", says="at the right positions")
def position_0_never_written(patch):
    """Position 0 never written: its slot keeps zeros."""
    right = CpuBackend.attend

    def attend(self, q, k, v, layer, store, batch):
        k, v = ([row if position else [0.0] * len(row) for row, position in zip(rows, batch.positions)]
                for rows in (k, v))
        return right(self, q, k, v, layer, store, batch)

    patch(CpuBackend, "attend", attend)


@mistake(6, "M2KVCache.test_cache_changes_no_token", says="chunking")
def positions_counted_from_the_chunk(patch):
    """Wrong position offset after prefill: chunked differs from unchunked."""
    right = Batch.of

    def of(pieces, page_size):
        batch = right(pieces, page_size)
        batch.positions = [i for span in batch.spans for i in range(span.count)]
        return batch

    patch(Batch, "of", of)


@mistake(7, "M2KVCache.test_dirty_pages", says="earlier users left in a page")
def dirty_page_reuse(patch):
    """Dirty page reuse: slots behind a request's last token enter its sums with weight 0, and 0 * NaN is NaN."""
    right = CpuBackend._attend_part

    def attend_part(self, q, layer, store, part):
        slots = [page * store.page_size + offset for page in part.pages for offset in range(store.page_size)]
        left_behind = sum(x for head in store.values[layer] for slot in slots[part.end:] for x in head[slot])
        return [[x + 0.0 * left_behind for x in row] for row in right(self, q, layer, store, part)]

    patch(CpuBackend, "_attend_part", attend_part)


@mistake(8, "M2KVCache.test_cancel_returns_pages", "M3ContinuousBatching.test_cancel_leaves_neighbours_alone",
         says="a request that has ended holds no page")
def leak_on_cancel(patch):
    """Leak on cancel or error: free pages differ from total after a drain."""
    right = ContinuousBatchScheduler.finish

    def finish(self, request_id, reason):
        sequence = self._find(request_id)
        if reason in ("cancelled", "error") and sequence:
            sequence.handle = None  # forgotten instead of released
        right(self, request_id, reason)

    patch(ContinuousBatchScheduler, "finish", finish)


@mistake(9, "M4PagedKV.test_random_operations", says="free \\+ held = total")
def double_free(patch):
    """Double free: one page in two live tables. (And a check that finds nothing.)"""
    right = PagePool.drop

    def drop(self, page):
        right(self, page)
        if not self.refcounts[page]:
            self._free.append(page)

    patch(PagePool, "drop", drop)
    patch(KVCacheManager, "check", lambda self: None)


@mistake(10, "M4PagedKV.test_exactly_full_pages", says="mind the exact multiples")
def one_page_too_many_at_full_pages(patch):
    """Trouble when the length is k x page size: an extra page."""
    patch(KVCacheManager, "pages_for", lambda self, tokens: tokens // self.page_size + 1)


@mistake(11, "M4PagedKV.test_shared_prefixes", says="begin alike")
def stale_prefix_entry(patch):
    """Stale prefix entry: a page is reused while still findable under its old content. (And a check that finds
    nothing.)"""
    patch(PrefixIndex, "forget", lambda self, page: None)
    patch(KVCacheManager, "check", lambda self: None)


@mistake(12, "M4PagedKV.test_running_out_of_pages_changes_nothing", says="take back what was taken")
def no_rollback(patch):
    """No rollback when pages run out: counts drift after the error."""
    def take(self, number, for_whom):
        pages = []
        for _ in range(number):
            if not self.available:
                raise OutOfPagesError(f"{for_whom} needs {number} pages, and {len(pages)} were free")
            pages.append(self._free.pop() if self._free else self._evict())
            self.refcounts[pages[-1]] = 1
        self.peak = max(self.peak, self.used)
        return pages

    patch(PagePool, "take", take)
    patch(PagePool, "require", lambda self, number, for_whom, besides=(): None)


@mistake(13, "M4PagedKV.test_shared_prefixes", says="begin alike")
def prefix_published_before_computed(patch):
    """Prefix published before it is computed: two sharers admitted in the same step read unwritten pages. (And a
    check that finds nothing.)"""
    right = KVCacheManager.allocate

    def allocate(self, request_id, token_count, tokens=None, salt=None):
        handle = right(self, request_id, token_count, tokens, salt)
        if self.prefix_sharing and tokens:
            table = self._tables[handle.serial]
            self._publish(replace(table, length=token_count), tokens)
        return handle

    patch(KVCacheManager, "allocate", allocate)
    patch(KVCacheManager, "check", lambda self: None)


@mistake(14, "M4PagedKV.test_copy_on_write", says="copy a shared page before writing")
def no_copy_on_write(patch):
    """Shared tail page without copy-on-write: a fork writes into its sibling."""
    patch(KVCacheManager, "_shared_among", lambda self, table, start, end: [])


@mistake(15, "M4PagedKV.test_shared_prefixes", says="begin alike")
def nothing_left_to_compute(patch):
    """A whole-prompt hit leaves nothing to compute: hang or stale logits."""
    right = KVCacheManager._find_prefix

    def find_prefix(self, root, tokens):
        return right(self, root, [*tokens, -1])  # as if one more token came

    patch(KVCacheManager, "_find_prefix", find_prefix)
