"""Callers who submit, read a few events, cancel, ask for what is not there, or never come back; against a plain model
of what each id must give next.

    Readers(case, scenario).play()      ``visits`` draws scenarios

A move is ["submit", id, prompt, max_tokens, stop], ["read", id, count], ["cancel", id] or ["step"]. Ids are few, so
most moves meet one that is taken, or unknown; what must happen follows from the contract alone.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from hidden_case import model, tokens

import starter

CANCELLED = [(None, None, "cancelled")]


def visits(rng, moves, ids, prompts=(1, 6), outputs=(0, 7), **more):
    """Moves of callers who share a few ids."""
    made = model(rng, layers=1, eos_tokens=rng.sample(range(24), 2))
    weights = {"submit": 5, "read": 6, "cancel": 2, "step": 3}
    drawn = []
    for move in rng.choices(list(weights), weights.values(), k=moves):
        name = f"x{rng.randrange(ids)}"
        drawn.append({"submit": ["submit", name, tokens(rng, made, rng.randint(*prompts)), rng.randint(*outputs),
                                 rng.sample(range(24), rng.choice([0, 0, 1]))],
                      "read": ["read", name, rng.randint(1, 4)], "cancel": ["cancel", name], "step": ["step"]}[move])
    unread = [f"x{i}" for i in range(ids) if rng.random() < 0.3]
    return {**made, "moves": drawn, "unread": unread, **more}


class Readers:
    """``left``: by id, the events that are still to be read, as (index, token, finish_reason)."""

    def __init__(self, case, scenario, **settings):
        self.case, self.scenario = case, scenario
        self.run = case.make(scenario, **settings)
        self.engine, self.left, self.ended, self.cancelled = self.run.engine, {}, set(), []

    def play(self):
        """All moves, then the rest of every stream but those that nobody reads; all pages are back."""
        for number, (move, *arguments) in enumerate(self.scenario["moves"], 1):
            self.case.case = f"move {number} of {len(self.scenario['moves'])}: {move} {arguments}"
            getattr(self, move)(*arguments)
            self.engine.kv.check()
        self.case.case = "after all moves"
        for name in set(self.left) - set(self.scenario["unread"]):
            self.read(name, len(self.left[name]))
        self.engine.run()
        kv = self.engine.kv
        self.case.same((self.engine.active, kv.free_pages), ((), kv.total_pages),
                       "streams that nobody reads end as well, and all pages are free")
        self.case.same(self.run.strangers, [], "a request reads and writes its own pages")
        self.case.same([event["request"] for event in self.engine.timeline if event["event"] == "cancel"],
                       self.cancelled, "cancels in the timeline")
        for name, rest in self.left.items():
            self.case.that(bool(rest), f"{name} has no event left", "an id is free once its last event was read")

    def submit(self, name, prompt, max_tokens, stop):
        call = partial(self.engine.submit, prompt, max_tokens, request_id=name, stop_tokens=stop)
        if name in self.left and self.left[name] != CANCELLED:  # after a cancel an id is free at once
            self.case.refuses(starter.DuplicateRequestError, call, f"{name} lives, or its stream is unread")
            return
        self.case.same(call(), name, "submit returns the request's id")
        steps = self.run.oracle.tokens(prompt, max_tokens, stop) if max_tokens else []
        ends = bool(steps) and steps[-1] in (*stop, *self.run.scenario.model.eos_tokens)
        last = "stop" if ends else "length"
        self.left[name] = [(i, token, last if i == len(steps) - 1 else None) for i, token in enumerate(steps)] or [
            (None, None, last)]

    def read(self, name, count):
        if name not in self.left:
            self.case.refuses(starter.UnknownRequestError, lambda: next(self.engine.stream(name)),
                              f"{name} was never seen, or read to its end")
            return
        for _ in range(count):
            if not self.left.get(name):
                return
            event, (index, token, reason) = next(self.engine.stream(name)), self.left[name].pop(0)
            self.case.same((event.request_id, event.token, event.finish_reason), (name, token, reason),
                           "the next event of this request, where its last reader stopped")
            if token is not None:
                self.case.same(event.index, index, "indices count from 0")
            if reason:
                del self.left[name]
                self.ended.add(name)

    def cancel(self, name):
        if name not in self.left and name in self.ended:  # an engine may remember it, or not
            with suppress(starter.UnknownRequestError):
                self.engine.cancel(name)
            return
        if name not in self.left:
            self.case.refuses(starter.UnknownRequestError, partial(self.engine.cancel, name), f"{name} is unknown")
            return
        lives = name in self.engine.active
        self.engine.cancel(name)
        if lives:
            self.left[name] = list(CANCELLED)
            self.cancelled.append(name)
            self.case.that(name not in self.engine.active, f"active is {self.engine.active}", "cancel is at once")

    def step(self):
        self.engine.step()
