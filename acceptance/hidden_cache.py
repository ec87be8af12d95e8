"""Hidden tests of M2: the page manager's append, read and release, and an engine that uses it, a request at a time."""

from __future__ import annotations

from functools import partial

from harness import PATIENCE
from hidden_case import Hidden, drawn, model, settings, tokens
from hidden_tables import Tables, operations
from stored import Change


def cached_answers(rng):
    """Requests after one another, the pages dirty from the beginning, the prompt cut into chunks."""
    made = model(rng, eos_tokens=[rng.randrange(24)])
    asked = [[tokens(rng, made, rng.randint(1, 24)), rng.randint(1, 12)] for _ in range(4)]
    size = rng.randint(1, 9)
    longest = max(len(prompt) + most for prompt, most in asked)
    return {**made, "asked": asked, "settings": settings(
        rng, page_size=size, budget_tokens=rng.randint(1, 9), num_pages=-(-longest // size))}


def cancels(rng):
    """Requests of one id, each cancelled after some steps."""
    made = model(rng, layers=1)
    asked = [[tokens(rng, made, rng.randint(1, 20)), rng.randint(6, 20), steps]
             for steps in (rng.randint(0, 1), rng.randint(2, 3), rng.randint(4, 6))]
    return {**made, "asked": asked, "settings": settings(rng, budget_tokens=rng.randint(2, 6), num_pages=64)}


def changes(rng):
    """Requests side by side; of some, what is stored in some positions of a layer changes after some token."""
    made = model(rng)
    asked = [[tokens(rng, made, rng.randint(3, 16)), rng.randint(8, 14)] for _ in range(rng.randint(2, 4))]
    many = made["scenario"]["model"]["layers"]
    drawn_changes = []
    for which in range(len(asked) - 1):
        every = rng.randint(1, 3)
        drawn_changes.append({
            "request": which, "tokens": rng.randint(1, 6), "layer": rng.randrange(many), "every": every,
            "first": rng.randrange(every), "key": rng.choice([-1, -0.5, 0, 1]), "value": rng.choice([-1, -0.5, 0])})
    size = rng.randint(1, 9)
    room = sum(-(-(len(prompt) + most) // size) for prompt, most in asked)
    return {**made, "asked": asked, "changes": drawn_changes, "settings": settings(
        rng, page_size=size, num_pages=room + 2)}


class HiddenCache(Hidden):
    @drawn("B9", "M2", partial(operations, number=100, forks=False), times=4)
    def test_operations(self, scenario):
        """B9: whatever is appended, read, released and misused, handles reach their own numbers, or nothing."""
        Tables(self, scenario).play()

    @drawn("M2", "M2", cached_answers, times=3)
    def test_cached_answers(self, scenario):
        """V6: tokens over the cache are the reference's, each position computed once, and dirt in pages is not read."""
        run = self.make(scenario)
        kv, sizes = run.engine.kv, run.scenario.model
        nan = [float("nan")] * (sizes.layers * sizes.kv_heads * sizes.width // sizes.heads)
        vandal = kv.allocate("vandal", kv.total_pages * run.settings["page_size"])
        for _ in range(kv.total_pages * run.settings["page_size"]):
            kv.append(vandal, nan, nan)
        kv.release(vandal)
        for prompt, max_tokens in scenario["asked"]:
            self.case = f"prompt {prompt}, max_tokens {max_tokens}"
            before, first = run.meter.tokens, len(run.decisions)
            name = run.submit(prompt, max_tokens)
            made = len(run.finish()[name])
            self.same(run.meter.tokens - before, len(prompt) + made - 1,
                      "n tokens cost n positions through the decoder; the last one is delivered, never computed")
            chunks = [(chunk.start, chunk.phase) for decision in run.decisions[first:] for chunk in decision.chunks]
            self.same([phase for _, phase in chunks],
                      ["prefill" if start < len(prompt) else "decode" for start, _ in chunks],
                      "positions of the prompt are prefill, the others decode")

    @drawn("V1", "M2", changes, times=3)
    def test_stored_numbers(self, scenario):
        """M2, V1: tokens come from what is stored in a request's own pages, also when that is changed between steps."""
        run, left = self.make(scenario), scenario["changes"]
        names = [run.submit(prompt, most) for prompt, most in scenario["asked"]]
        while run.engine.active and len(run.decisions) < PATIENCE:
            run.step()
            for change in list(left):
                life = run.lives[names[change["request"]]]
                if len(life.token_times) == change["tokens"]:
                    left.remove(change)
                    Change(run, names[change["request"]], change["key"], change["value"], [change["layer"]],
                           range(change["first"], life.computed, change["every"])).apply()
        run.finish()
        self.same(left, [], "every change was made")

    @drawn("B8", "M2", cancels, times=2)
    def test_cancels(self, scenario):
        """V3, B8: cancel returns all pages at once, at any moment, and the id may be used again at once."""
        run = self.make(scenario)
        for prompt, max_tokens, steps in scenario["asked"]:
            self.case = f"cancelled after {steps} steps"
            run.submit(prompt, max_tokens, request_id="x")
            for _ in range(steps):
                run.step()
            if "x" in run.engine.active:  # else all was computed
                run.cancel("x")
            else:
                run.finish()
            self.same((run.engine.kv.free_pages, run.engine.active), (64, ()), "without another step")
        run.submit(scenario["asked"][0][0], 5, request_id="x")
        run.finish()
        self.same(run.lives["x"].reason, "length", "a late cancel of the old x must not end the new x")
