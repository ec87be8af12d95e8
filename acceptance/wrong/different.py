"""Other implementations that are right. All of the suite must pass: it asks for the contract, not for one way to it."""

from __future__ import annotations

from array import array
from math import floor

from starter import quantization
from starter.backend import ReferenceKVStore
from starter.kv_cache import PagePool
from starter.quantization import Grid
from starter.scheduler import ContinuousBatchScheduler

from .mistake import different


@different("M2KVCache", "M4PagedKV")
def pages_in_turn(patch):
    """Another allocator: the page that was free longest first, and the most recently used cached page evicted."""
    right = PagePool._evict

    def take(self, number, for_whom):
        self.require(number, for_whom)
        if evicted := self.next_evicted(number):
            self.on_evict(for_whom, evicted)
        pages = [self._free.pop(0) if self._free else self._evict() for _ in range(number)]
        for page in pages:
            self.refcounts[page] = 1
        self.peak = max(self.peak, self.used)
        return pages

    def evict(self):
        self.cached.move_to_end(next(reversed(self.cached)), last=False)
        return right(self)

    patch(PagePool, "take", take)
    patch(PagePool, "_evict", evict)
    patch(PagePool, "next_evicted", lambda self, number: tuple(reversed(self.cached))[:max(
        0, number - len(self._free))])


@different("M2KVCache", "M4PagedKV")
def a_row_for_each_slot(patch):
    """Another layout of pages: a slot is one row of numbers, key and value of layer 0, of layer 1 and so on."""
    def rows(store):
        return store.__dict__.setdefault("_rows", {})

    def write_layer(self, layer, slots, k, v):
        size = 2 * self.row_width
        for slot, key, value in zip(slots, k, v):
            row = rows(self).setdefault(slot, array("d", bytes(8 * 2 * self.width)))
            row[layer * size:(layer + 1) * size] = array("d", [*key, *value])

    def context(self, layer, head, span):
        at = 2 * layer * self.row_width + head * self.head_width
        found = [rows(self)[slot] for slot in span.context]
        keys, values = ([row[start:start + self.head_width] for row in found] for start in (at, at + self.row_width))
        return keys, list(zip(*values))

    def read(self, page, offset):
        row, size = rows(self)[page * self.page_size + offset], self.row_width
        return tuple([x for layer in range(self.layers) for x in row[(2 * layer + i) * size:(2 * layer + i + 1) * size]]
                     for i in (0, 1))

    def copy_page(self, source, target, origin=None):
        for offset in range(self.page_size):
            if found := rows(origin or self).get(source * self.page_size + offset):
                rows(self)[target * self.page_size + offset] = found[:]

    for function in (write_layer, context, read, copy_page):
        patch(ReferenceKVStore, function.__name__, function)


@different("M3ContinuousBatching", "M4PagedKV")
def newest_first_within_a_step(patch):
    """Another scheduler: chunks the other way round, prompts before decodes, and whoever holds most pages gives way
    first, the first in order excepted."""
    step, preempt = ContinuousBatchScheduler.step, ContinuousBatchScheduler._preempt

    def reversed_step(self, budget_tokens):
        decision = step(self, budget_tokens)
        return decision._replace(chunks=decision.chunks[::-1])

    def preempt_the_largest(self, plan, victim, needy):
        others = sorted(self._running.values(), key=lambda sequence: sequence.order)[1:]
        preempt(self, plan, max(others, key=lambda sequence: (self._page_count(sequence), sequence.order),
                                default=victim), needy)

    patch(ContinuousBatchScheduler, "step", reversed_step)
    patch(ContinuousBatchScheduler, "_preempt", preempt_the_largest)


@different("M3ContinuousBatching")
def prompts_share_alike(patch):
    """Another scheduler: every prompt gets the same share of the budget, and what short ones leave over goes to the
    first that can use it."""
    def plan_prefills(self, plan):
        waiting = [sequence for sequence in self._running.values() if sequence.last_served != plan.step
                   and (not sequence.decoding or sequence.id in plan.admitted)]
        served = sorted(waiting, key=lambda sequence: (sequence.last_served, sequence.order))[:plan.left]
        shares = {sequence: min(plan.left // len(served), sequence.remaining) for sequence in served}
        rest = plan.left - sum(shares.values())
        for sequence, share in shares.items():
            more = min(rest, sequence.remaining - share)
            rest -= more
            self._schedule(plan, sequence, share + more, "decode" if sequence.decoding else "prefill")

    patch(ContinuousBatchScheduler, "_plan_prefills", plan_prefills)


@different("M5Quantization")
def grids_that_hold_zero(patch):
    """Another quantizer: halves round up, and every asymmetric grid reaches to 0, whatever its group holds."""
    right = quantization.choose_grids

    def nearest(self, group):
        return [max(self.first, min(self.last, floor(x / self.scale + 0.5))) for x in group]

    def choose_grids(groups, config):
        if not config.symmetric:
            groups = [[*group, 0.0] if any(x != group[0] for x in group) else group for group in groups]
        return right(groups, config)

    patch(Grid, "nearest", nearest)
    patch.everywhere(right, choose_grids)
