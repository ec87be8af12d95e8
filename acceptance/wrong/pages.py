"""Mistakes 9 to 15, and others like them: pages, shared and scarce."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starter import scheduler
from starter.backend import Batch
from starter.core import EngineCore, ModelRunner
from starter.errors import CapacityError, OutOfPagesError
from starter.kv_cache import KVCacheManager, PagePool, PrefixIndex
from starter.sampling import Draws
from starter.scheduler import ContinuousBatchScheduler

from .mistake import mistake


def blind(patch):
    """The page manager's own check finds nothing: the suite has to see by itself."""
    patch(KVCacheManager, "check", lambda self: None)


@mistake(9, "M4PagedKV.test_random_operations", says="free \\+ held = total")
def double_free(patch):
    """Double free: one page in two live tables."""
    right = PagePool.drop

    def drop(self, page):
        right(self, page)
        if not self.refcounts[page]:
            self._free.append(page)

    patch(PagePool, "drop", drop)
    blind(patch)


@mistake(10, "M4PagedKV.test_exactly_full_pages", says="mind the exact multiples")
def one_page_too_many_at_full_pages(patch):
    """Trouble when the length is k x page size: an extra page."""
    patch(KVCacheManager, "pages_for", lambda self, tokens: tokens // self.page_size + 1)


@mistake(11, "M4PagedKV.test_shared_prefixes", says="begin alike")
def stale_prefix_entry(patch):
    """Stale prefix entry: a page is reused while still findable under its old content."""
    patch(PrefixIndex, "forget", lambda self, page: None)
    blind(patch)


@mistake(12, "M4PagedKV.test_running_out_of_pages_changes_nothing", says="take back what was taken")
def no_rollback(patch):
    """No rollback when pages run out: counts drift after the error."""
    def take(self, number, for_whom):
        pages: list[int] = []
        for _ in range(number):
            if not self.available:
                raise OutOfPagesError(f"{for_whom} needs {number} pages, and {len(pages)} were free")
            pages.append(self._free.pop() if self._free else self._evict())
            self.refcounts[pages[-1]] = 1
        self.peak = max(self.peak, self.used)
        return pages

    patch(PagePool, "take", take)
    patch(PagePool, "require", lambda self, number, for_whom, sharing=(): None)


@mistake(13, "M4PagedKV.test_shared_prefixes", says="begin alike")
def prefix_published_before_computed(patch):
    """Prefix published before it is computed: two sharers admitted in the same step read unwritten pages."""
    right = KVCacheManager.allocate

    def allocate(self, request_id, token_count, tokens=None, salt=None):
        handle: Any = right(self, request_id, token_count, tokens, salt)
        if self.prefix_sharing and tokens:
            self._publish(replace(handle, length=token_count), tokens)
        return handle

    patch(KVCacheManager, "allocate", allocate)
    blind(patch)


@mistake(14, "M4PagedKV.test_copy_on_write", says="copy a shared page before writing")
def no_copy_on_write(patch):
    """Shared tail page without copy-on-write: a fork writes into its sibling."""
    patch(KVCacheManager, "_needs_copy", lambda self, table, token_count: False)
    blind(patch)


@mistake(15, "M4PagedKV.test_shared_prefixes", says="begin alike")
def nothing_left_to_compute(patch):
    """A whole-prompt hit leaves nothing to compute: hang or stale logits."""
    right = KVCacheManager._find_prefix

    def find_prefix(self, root, tokens):
        return right(self, root, [*tokens, -1])  # as if one more token came

    patch(KVCacheManager, "_find_prefix", find_prefix)


# ------------------------------------------------------------------------------------------ found on the way


@mistake(None, "M4PagedKV.test_users_and_references", says="page ")
def one_user_a_page(patch):
    """A page shows whoever took it last as its only user."""
    right = KVCacheManager.page

    def page(self, page_id):
        info = right(self, page_id)
        return replace(info, users=info.users[-1:], refcount=min(info.refcount, 1))

    patch(KVCacheManager, "page", page)


@mistake(None, "M4PagedKV.test_last_slot_needs_no_page", says="OutOfPagesError")
def one_page_ahead(patch):
    """A page is taken when the last slot is filled, not when the next token comes."""
    right = KVCacheManager.reserve
    patch(KVCacheManager, "reserve", lambda self, handle, token_count: right(self, handle, token_count + 1))


@mistake(None, "M4PagedKV.test_fragmentation", says="shares the page with the empty slots")
def shared_slots_counted_twice(patch):
    """Internal fragmentation counts the empty slots of a shared page once for each user."""
    def internal_fragmentation(self):
        return sum(len(table.pages) * self.page_size - table.length for table in self._tables)

    patch(KVCacheManager, "internal_fragmentation", internal_fragmentation)


@mistake(None, "M4PagedKV.test_page_sizes", says="page size")
def page_size_written_into_the_code(patch):
    """The decoder finds its slots as if every page had 4 of them."""
    right = ModelRunner._forward
    patch(ModelRunner, "_forward", lambda self, samples, batch: right(self, samples, Batch.of(batch.pieces(), 4)))


@mistake(None, "M4PagedKV.test_sampling_survives_preemption", says="draw no number twice")
def random_numbers_start_again(patch):
    """After a preemption a request draws its random numbers from the beginning."""
    right = EngineCore.plan

    def plan(self, budget_tokens):
        work = right(self, budget_tokens)
        for request_id in work.decision.preempted:
            sample = self.samples[request_id]
            sample.draws = Draws(sample.stream.request.sampling, request_id, sample.number, self.settings.seed)
        return work

    patch(EngineCore, "plan", plan)


@mistake(None, "M4PagedKV.test_edge_of_capacity", says="accept what fits")
def a_page_kept_back(patch):
    """A request that needs all pages is refused, although the empty pool could hold it."""
    right = ContinuousBatchScheduler.check

    def check(self, request):
        slots = len(request.prompt_tokens) + request.max_tokens - 1
        if self.kv and self.kv.pages_for(slots) >= self.kv.total_pages:
            raise CapacityError(f"{slots} tokens need {self.kv.pages_for(slots)} pages")
        right(self, request)

    patch(ContinuousBatchScheduler, "check", check)


@mistake(None, "M4PagedKV.test_heavy_request_among_light_ones", says="bound the overtaking")
def endless_overtaking(patch):
    """Whoever fits goes first: a request that needs many pages never finds them free."""
    patch(scheduler, "BYPASS_LIMIT", 10**6)


@mistake(None, "M4PagedKV.test_heavy_request_among_light_ones", says="must not hold back one that fits")
def nobody_overtakes(patch):
    """The first that lacks pages holds back everybody, those that would fit as well."""
    patch(scheduler, "_held", lambda blocked: f"waits for {blocked.id}" if blocked else "")


@mistake(None, "M4PagedKV.test_cache_salt", says="salt")
def salt_ignored(patch):
    """Requests with different salts share pages."""
    right = PrefixIndex.root
    patch(PrefixIndex, "root", lambda self, salt: right(self, None))
