"""What hidden tests are made of: a scenario is drawn from a seed as plain data, and then played.

    def short_load(rng):                                   # no engine takes part in drawing: nothing that it does can
        return load(rng, 5, outputs=(1, 4), page_size=4)   # change what is asked of it

    class HiddenLoads(Hidden):
        @drawn("B14", "M3", short_load, times=3)
        def test_random_arrivals(self, scenario):
            '''B14: what must hold. It becomes test_random_arrivals_1, _2 and _3, each with another draw.'''
            self.play(scenario).finish()

A drawn scenario is a JSON document, {"scenario": model, ..., "weights_seed": n, "settings": {}, "moves": [...]}, the
same to the byte for the same seed and test. Moves are ["submit", id, prompt, max_tokens, keywords], ["step", budget],
["drain"] and ["cancel", id]; what has ended by itself is not cancelled.
"""

from __future__ import annotations

import json
from functools import wraps
from random import Random

from harness import Case, load_document, tiny_document
from observed import Run

import starter


def drawn(requirement, milestone, draw, times=1):
    """Decorator of a test: it gets what ``draw(rng)`` returns, and is there ``times`` times.

    ``requirement`` of the handout; ``milestone`` that has to be complete before it can pass.
    """
    def mark(test):
        test.requirement, test.milestone, test.draw, test.times = requirement, milestone, draw, times
        return test
    return mark


def document(seed, test_id, draw):
    """What is drawn for a test, as built-in data."""
    return plain(draw(Random(f"{seed}.{test_id}")))


def plain(value):
    """As it reads in JSON."""
    return json.loads(json.dumps(value))


def _numbered(name, test):
    @wraps(test)
    def play(self):
        return test(self, plain(test.draw(self.rng)))  # setUp seeds rng as document() does

    vars(play)["kind"] = name.removeprefix("test_")
    return play


class Hidden(Case):
    """Base of the hidden tests of one milestone."""

    def __init_subclass__(cls):
        for name, test in list(vars(cls).items()):
            if hasattr(test, "draw"):
                delattr(cls, name)
                for number in range(1, test.times + 1):
                    setattr(cls, f"{name}_{number}", _numbered(name, test))
        super().__init_subclass__()

    def make(self, scenario, meter=None, **settings):
        """The engine of a drawn scenario, under observation."""
        return Run(self, load_document(scenario["scenario"]), scenario["weights_seed"], meter,
                   **{**scenario.get("settings", {}), **settings})

    def play(self, scenario, meter=None, after_step=None, **settings):
        """Make all moves; the run, not yet finished. ``after_step(run, decision)`` may look at every step."""
        run = self.make(scenario, meter, **settings)
        for number, (move, *arguments) in enumerate(scenario["moves"], 1):
            self.case = f"move {number} of {len(scenario['moves'])}: {move} {arguments}"
            if move == "submit":
                self.submit(run, *arguments)
            elif move == "step":
                decision = run.step(*arguments)
                if after_step:
                    after_step(run, decision)
            elif move == "drain":
                run.drain()
            elif arguments[0] in run.engine.active:
                run.cancel(arguments[0])
        self.case = "after all moves"
        return run

    def submit(self, run, name, prompt, max_tokens, keywords):
        """Accepted exactly if an empty pool holds it; a slot for the last token, which is never stored, may count."""
        size, pages = run.settings["page_size"], run.engine.kv.total_pages
        keywords = {key: starter.SamplingParams(**value) if key == "sampling" else value
                    for key, value in keywords.items()}
        least, most = (-(-(len(prompt) + max_tokens - last) // size) for last in (1, 0))
        try:
            run.submit(prompt, max_tokens, request_id=name, **keywords)
        except starter.CapacityError:
            self.that(most > pages, f"{len(prompt)} + {max_tokens} tokens were refused; {pages} pages of {size} hold "
                      "them", "refuse what could never be served, and nothing else")
        else:
            self.that(least <= pages or max_tokens == 0, f"{len(prompt)} + {max_tokens} tokens were accepted; {pages} "
                      f"pages of {size} never hold them", "refuse at the door what could never be served")

    def texts(self, run):
        """The texts of whole streams are their tokens, decoded."""
        for name, life in run.lives.items():
            if not life.cancelled and life.reason != "error":
                self.same("".join(event.text for event in life.events), run.engine.tokenizer.decode(life.tokens),
                          f"text of {name}: an event's text is what its token adds")

    def measures(self, run):
        """Metrics, and the timeline's cancels, equal what the harness recomputes from its own clock and events."""
        lives, metrics, stats = run.lives.values(), run.engine.metrics(), run.engine.kv.stats()
        firsts = [life.token_times[0] - life.submitted for life in lives if life.token_times]
        rates = [(life.token_times[-1] - life.token_times[0]) / (len(life.token_times) - 1) for life in lives
                 if len(life.token_times) > 1]
        busy = [decision for decision in run.decisions if decision.chunks]
        for name, got, wanted in [
                ("ttft.count", metrics.ttft.count, len(firsts)), ("ttft.mean", metrics.ttft.mean, _mean(firsts)),
                ("ttft.max", metrics.ttft.max, max(firsts, default=None)),
                ("tpot.count", metrics.tpot.count, len(rates)), ("tpot.mean", metrics.tpot.mean, _mean(rates)),
                ("submitted", metrics.submitted, len(lives)),
                ("output_tokens", metrics.output_tokens, sum(len(life.token_times) for life in lives)),
                ("computed_tokens", metrics.computed_tokens, run.meter.tokens),
                ("finished, all of it,", sum(metrics.finished.values()), len(lives)),
                ("finished, cancelled,", metrics.finished.get("cancelled", 0), sum(life.cancelled for life in lives)),
                ("running + waiting", metrics.running + metrics.waiting, 0),
                ("kv_peak_pages", metrics.kv_peak_pages, stats.peak_pages),
                ("kv_peak_bytes", metrics.kv_peak_bytes, stats.peak_bytes)]:
            self.that(_near(got, wanted), f"metrics().{name} is {got}, recomputed {wanted}",
                      "derive every metric from the events; starter/metrics.py defines them")
        self.same(sorted(event["request"] for event in run.engine.timeline if event["event"] == "cancel"),
                  sorted(name for name, life in run.lives.items() if life.cancelled), "cancels in the timeline")
        self.that(metrics.kv_peak_pages >= run.peak_pages, f"kv_peak_pages {metrics.kv_peak_pages}, the harness saw "
                  f"{run.peak_pages}", "the peak is the most pages ever used at once")
        self.same(list(metrics.active_requests), [len(decision.chunks) for decision in run.decisions],
                  "active_requests: the number of requests in each step")
        if len({decision.budget_tokens for decision in busy}) == 1:
            share = _mean([decision.scheduled_tokens / decision.budget_tokens for decision in busy])
            self.that(_near(metrics.batch_utilization, share), f"batch_utilization {metrics.batch_utilization}, "
                      f"recomputed {share}", "scheduled tokens / budget, over steps with work")


def _mean(numbers):
    return sum(numbers) / len(numbers) if numbers else None


def _near(got, wanted):
    return got is None if wanted is None else type(got) in (int, float) and abs(got - wanted) < 1e-9


# -------------------------------------------------------------------------------------------------------- draws


def model(rng, **sizes):
    """A model that nobody has seen before."""
    return {"scenario": tiny_document(rng, **sizes), "weights_seed": rng.randrange(2**31)}


def tokens(rng, drawn_model, count):
    """A prompt for it."""
    return [rng.randrange(drawn_model["scenario"]["model"]["vocab_size"]) for _ in range(count)]


def settings(rng, **fixed):
    """Of an engine: pages of 1 to 17 tokens, 1 to 20 tokens a step, up to 6 requests at a time."""
    return {"page_size": rng.randint(1, 17), "budget_tokens": rng.randint(1, 20), "max_running": rng.randint(1, 6),
            **fixed}


def load(rng, requests, prompts=(1, 9), outputs=(0, 9), cancels=0.2, sizes=None, length=None, keywords=None, **fixed):
    """Requests that arrive in bursts and pauses, steps of any budget between them, and cancels at any moment.

    The pool holds all of them at once unless ``fixed`` says otherwise. ``length(rng, low, high)`` draws a length,
    ``keywords(rng)`` what else is said of a request.
    """
    length = length or Random.randint
    made = {**model(rng, **(sizes or {"layers": 1, "eos_tokens": [rng.randrange(24)]})), "settings": settings(rng)}
    moves = []
    for i in range(requests):
        moves.append(["submit", f"r{i}", tokens(rng, made, length(rng, *prompts)), length(rng, *outputs),
                      keywords(rng) if keywords else {}])
        if rng.random() < cancels:
            moves.append(["step", None])
        moves += [["step", rng.choice([None, None, 0, rng.randint(1, 12)])] for _ in range(rng.choice([0, 0, 1, 4]))]
        if rng.random() < cancels:
            moves.append(["cancel", f"r{rng.randint(max(0, i - 3), i)}"])
    size = fixed.get("page_size", made["settings"]["page_size"])
    room = sum(-(-(len(prompt) + most) // size) for _, _, prompt, most, _ in moves_of(moves, "submit"))
    made["settings"] = {**made["settings"], "num_pages": max(1, room), **fixed}
    return {**made, "moves": moves}


def moves_of(moves, kind):
    return [move for move in moves if move[0] == kind]
