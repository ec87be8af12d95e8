"""Mistakes 1 to 8, and others like them: the KV cache."""

from __future__ import annotations

from pathlib import Path

from starter import backend as cpu_backend
from starter import kv_cache
from starter.backend import Batch, Piece, ReferenceBackend
from starter.core import EngineCore
from starter.kv_cache import KVCacheManager
from starter.model import Model
from starter.sampling import Choice
from starter.scheduler import ContinuousBatchScheduler
from starter.schema import load_scenario

from .mistake import mistake

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json"


@mistake(1, "M1Reference.test_fixture_on_other_weights", says="does not look tokens up")
def golden_tokens_hard_coded(patch):
    """Golden tokens hard-coded: wrong under a fresh seed or fresh weights."""
    scenario = load_scenario(FIXTURE)
    golden = scenario.golden.tokens if scenario.golden else {}
    answers = {request.prompt_tokens: golden[request.request_id] for request in scenario.requests}
    right = EngineCore._choice

    def choice(self, sample, row):
        answer = answers.get(sample.stream.request.prompt_tokens, ())[sample.delivered:]
        return Choice(answer[0], -1.0) if answer else right(self, sample, row)

    patch(EngineCore, "_choice", choice)


@mistake(2, "M2KVCache.test_work_grows_linearly", says="hidden recomputation")
def hidden_recompute(patch):
    """Hidden recompute instead of a cache: positions computed grow quadratically."""
    right = EngineCore._piece

    def piece(self, sample, chunk):
        found = right(self, sample, chunk)
        if found is None:
            return None
        tokens, start, pages, wants_logits = found
        return Piece(sample.tokens[:start + len(tokens)], 0, pages, wants_logits)

    patch(EngineCore, "_piece", piece)


@mistake(3, "M1Reference.test_same_prompt_on_two_models", says="different weights")
def output_memoised_by_prompt(patch):
    """Output memoised by prompt: weights change, output does not."""
    right = EngineCore._choice
    memory: dict[tuple[int, ...], Choice] = {}

    def choice(self, sample, row):
        return memory.setdefault(tuple(sample.tokens), right(self, sample, row))

    patch(EngineCore, "_choice", choice)


@mistake(4, "M1Reference.test_greedy_generation", "M2KVCache.test_cache_changes_no_token",
         says="is its context its own")
def current_token_left_out(patch):
    """The current token left out of its own attention."""
    right = cpu_backend.attention
    patch(cpu_backend, "attention", lambda query, keys, columns: right(query, keys[:-1] or keys, columns))


@mistake(5, "M1Reference.test_greedy_generation", "M2KVCache.test_cache_changes_no_token",
         says="at the right positions")
def position_0_never_written(patch):
    """Position 0 never written: its slot keeps zeros."""
    right = ReferenceBackend.attend

    def attend(self, q, k, v, layer, store, batch):
        k, v = ([row if position else [0.0] * len(row) for row, position in zip(rows, batch.positions)]
                for rows in (k, v))
        return right(self, q, k, v, layer, store, batch)

    patch(ReferenceBackend, "attend", attend)


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
    right = ReferenceBackend._attend_part

    def attend_part(self, q, layer, store, part):
        slots = [page * store.page_size + offset for page in part.pages for offset in range(store.page_size)]
        left_behind = sum(x for head in store.values[layer] for slot in slots[part.end:] for x in head[slot])
        return [[x + 0.0 * left_behind for x in row] for row in right(self, q, layer, store, part)]

    patch(ReferenceBackend, "_attend_part", attend_part)


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


# ------------------------------------------------------------------------------------------ found on the way


@mistake(None, "M2KVCache.test_append_then_read", says="append stored")
def keys_and_values_swapped(patch):
    """read gives the value for the key and the key for the value."""
    right = KVCacheManager.read
    patch(KVCacheManager, "read", lambda self, handle, position: right(self, handle, position)[::-1])


@mistake(None, "M2KVCache.test_reserving_is_not_storing", says="never written")
def reserved_positions_read_as_zeros(patch):
    """A position that was reserved, but never written, reads as zeros."""
    right = KVCacheManager.read

    def read(self, handle, position):
        if self.length(handle) <= position < len(self.pages(handle)) * self.page_size:
            return [0.0] * self.width, [0.0] * self.width
        return right(self, handle, position)

    patch(KVCacheManager, "read", read)


@mistake(None, "M2KVCache.test_wrong_width", says="width is fixed")
def width_not_checked(patch):
    """A key of any width is stored."""
    patch(kv_cache, "checked_vector", lambda name, vector, width: [float(number) for number in vector])


@mistake(None, "M2KVCache.test_access_after_release", says="identity of its own")
def handles_found_by_request_id(patch):
    """A handle is looked up by its request's id: an old one opens the pages of the new request of that name."""
    right = KVCacheManager._table

    def table(self, handle, resident=False):
        same = [other for other in self._tables if other.request_id == handle.request_id]
        return right(self, same[0] if same else handle, resident)

    patch(KVCacheManager, "_table", table)


@mistake(None, "M2KVCache.test_foreign_handle", says="handles of two managers")
def handles_numbered_by_each_manager(patch):
    """Every manager numbers its handles from 0, so that one opens the tables of another."""
    right_open, right_table, numbers = KVCacheManager._opening, KVCacheManager._table, {}

    def opening(self, table):
        numbers[table] = self._counts["allocations"]
        return right_open(self, table)

    def find(self, handle, resident=False):
        same = [table for table in self._tables if numbers[table] == numbers.get(handle)]
        return right_table(self, same[0] if same else handle, resident)

    patch(KVCacheManager, "_opening", opening)
    patch(KVCacheManager, "_table", find)


@mistake(None, "M2KVCache.test_bad_arguments", says="token_count")
def token_counts_rounded(patch):
    """A token count that is no integer is made one."""
    right = KVCacheManager.allocate

    def allocate(self, request_id, token_count, *more):
        return right(self, request_id, max(0, int(token_count or 0)), *more)

    patch(KVCacheManager, "allocate", allocate)


@mistake(None, "M4PagedKV.test_users_and_references", says="its 5 tokens are hits")
def forks_are_no_hits(patch):
    """The tokens that a fork finds computed are not counted."""
    right = KVCacheManager.fork

    def fork(self, handle, request_id):
        child = right(self, handle, request_id)
        self._counts["hits"] -= self.length(handle)
        return child

    patch(KVCacheManager, "fork", fork)


@mistake(None, "M3ContinuousBatching.test_joining_changes_no_token", says="a request reads its own pages")
def block_tables_mixed_up(patch):
    """In a batch, the first request is computed on the pages of the second, and the other way round."""
    right = Batch.of

    def of(pieces, page_size):
        pieces = [Piece(*piece) for piece in pieces]
        if len(pieces) > 1 and len(pieces[0].pages) == len(pieces[1].pages):
            pieces[:2] = (pieces[i]._replace(pages=pieces[1 - i].pages) for i in (0, 1))
        return right(pieces, page_size)

    patch(Batch, "of", of)


@mistake(None, "M2KVCache.test_counters", says="misses: tokens stored")
def tokens_counted_once_a_page(patch):
    """Stored tokens are counted when their page is full."""
    right = KVCacheManager.commit

    def commit(self, handle, token_count, tokens=None):
        right(self, handle, token_count, tokens)
        self._counts["misses"] = sum(table.length // self.page_size * self.page_size for table in self._tables)

    patch(KVCacheManager, "commit", commit)


@mistake(None, "M2KVCache.test_prefill_and_decode", says="positions of the prompt are prefill")
def all_is_prefill(patch):
    """Prefill and decode are not told apart."""
    right = ContinuousBatchScheduler._schedule

    def schedule(self, plan, sequence, count, phase):
        right(self, plan, sequence, count, "prefill")

    patch(ContinuousBatchScheduler, "_schedule", schedule)


@mistake(None, "M2KVCache.test_work_is_done_by_the_backend", says="a backend that embeds other rows")
def backend_called_for_show(patch):
    """The backend is called so that its work can be counted; the numbers come from somewhere else."""
    right = Model.forward

    def forward(self, batch, store):
        shown = self.backend
        shown.embed(self.embedding, batch.tokens)
        self.backend = ReferenceBackend()
        try:
            return right(self, batch, store)
        finally:
            self.backend = shown

    patch(Model, "forward", forward)
