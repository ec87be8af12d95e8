"""What is stored in a request's pages, changed between two steps: from then on its tokens must be other ones.

    change = Change(run, "r1", key=-1.0, value=1.0)     every key of r1 that is stored now, turned round
    change.apply()                                       in the engine's pages; the oracle will do the same to its cache
    run.finish()                                         the tokens of r1 are those of the changed numbers

Attention that reads a copy beside the pages, or positions that are computed again in secret, give the tokens of the
numbers as they were. Free pages are overwritten, too, which must not matter. Not noticed are a copy that follows every
``write``, which is as good as the store, and secret computation that begins with the first ``write`` from outside.

Whatever form a store gives its numbers, it must ``read`` and ``write`` slots as ``backend.KVStore`` says: a key is that
of layer 0, then that of layer 1 and so on, a value likewise. No store is asked for more than a request would do: slots
of a page are written in their order, and no number is larger than the model's own. Out of scope are int8 pages, which
would round the changes.
"""

from __future__ import annotations


class Change:
    """Keys and values of some positions and layers of a request, all of them if not said, each times a factor
    of -1 to 1."""

    def __init__(self, run, request_id, key, value, layers=None, positions=None):
        self.run, self.life, self.key, self.value = run, run.lives[request_id], key, value
        self.moment = self.life.computed  # so many positions are stored
        model = run.scenario.model
        self.width = model.kv_heads * model.width // model.heads  # of one layer
        self.layers = range(model.layers) if layers is None else layers
        self.positions = range(self.moment) if positions is None else positions

    def apply(self):
        """Change what is stored; the oracle is told."""
        store, size = self.run.meter.store, self.run.settings["page_size"]
        slots = [(self.life.pages[position // size], position % size) for position in range(self.moment)]
        stored = [tuple(map(list, store.read(*slot))) for slot in slots]
        self._check_store(store, *stored[0])
        self._overwrite_free_pages(store, *stored[0])
        for position, (slot, (key, value)) in enumerate(zip(slots, stored)):
            if position in self.positions:
                key, value = self._changed(key, self.key), self._changed(value, self.value)
            store.write(*slot, key, value)
        self.life.changes.append(self)

    def of_oracle(self, cache):
        """The same in the oracle's cache."""
        for layer in self.layers:
            for rows, factor in zip(cache[layer], (self.key, self.value)):
                for position in self.positions:
                    rows[position] = [number * factor for number in rows[position]]

    def _changed(self, numbers, factor):
        return [number * factor if i // self.width in self.layers else number for i, number in enumerate(numbers)]

    def _check_store(self, store, key, value):
        """The page manager's append writes where the decoder reads: what it stores is found there."""
        kv = self.run.engine.kv
        handle = kv.allocate("probe", 1)
        [page] = kv.pages(handle)
        store.write(page, 0, [0.0] * len(key), [0.0] * len(value))
        kv.append(handle, key, value)
        found = [*map(float, store.read(page, 0)[0]), *map(float, store.read(page, 0)[1])]
        far = max(abs(a - b) for a, b in zip(found, [*key, *value]))
        self.run.case.that(far < 0.01 * max(map(abs, [*key, *value])), f"append, then read: {found[:3]} for {key[:3]}",
                           "append writes to another store than the one that the decoder is given: its pages are for "
                           "show. There must be one store, whose pages are counted, shared and freed")
        kv.release(handle)

    def _overwrite_free_pages(self, store, key, value):
        kv, key, value = self.run.engine.kv, [-number for number in key], [-number for number in value]
        for page in range(kv.total_pages):
            if kv.page(page).refcount == 0:
                for offset in range(self.run.settings["page_size"]):
                    store.write(page, offset, key, value)


def hint(life, name, unchanged):
    """For a request whose tokens are not those of what is stored; ``unchanged``: those of what was stored before."""
    moments = " and ".join(str(change.moment) for change in life.changes)
    what = f"the numbers in the pages of {name} were changed when {moments} positions were stored"
    if life.tokens == unchanged:
        return (f"{what}, and its tokens are as if nothing had been changed: its pages are for show. Attention has to "
                "read the store behind them, not a copy elsewhere, nor what is computed again")
    return f"{what}: from then on attention reads the changed ones, of all its own positions and of no others"
