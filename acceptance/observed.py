"""An engine under observation: driven through its public names only, checked after every step.

After every call: the budget holds; each position is computed once, and by the decoder, which touches no page of another
request; pages are conserved, and used by live requests alone. At the end: every request has its events, its tokens
equal the oracle's, all pages are free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

from harness import PATIENCE, TIMELINES, TOLERANCE, Clock, Meter, tiny_scenario
from oracle import Oracle
from stored import hint

import starter


@dataclass
class Life:
    """One request from submit to its terminal event, as the harness saw it."""

    prompt: list[int]
    max_tokens: int
    stop: tuple[int, ...]
    greedy: bool
    submitted: float
    computed: int = 0  # positions in the cache
    settled: bool = False  # it was given a chunk since it was admitted, or admitted again after a preemption
    token_times: list[float] = field(default_factory=list)  # of the steps whose chunk yielded a token
    cancelled: bool = False
    pages: list[int] = field(default_factory=list)  # of the positions in the cache, in their order
    changes: list[Any] = field(default_factory=list)  # of what is stored in them (stored.py)
    events: list[Any] = field(default_factory=list)

    @property
    def known(self):
        return len(self.prompt) + len(self.token_times)

    @property
    def tokens(self):
        return [event.token for event in self.events if event.token is not None]

    @property
    def reason(self):
        return self.events[-1].finish_reason


class Run:
    """An engine on fresh weights, driven a step at a time and checked after each."""

    def __init__(self, case, scenario=None, weights_seed=None, meter=None, **settings):
        self.case = case
        self.scenario = scenario or tiny_scenario(case.rng)
        self.weights_seed = case.rng.randrange(2**31) if weights_seed is None else weights_seed
        self.clock = Clock()
        self.meter = meter or Meter()
        self.settings = {"page_size": 4, "num_pages": 64, "budget_tokens": 16, "max_running": 4, "quantization": None,
                         "kv_quantization": None, "prefix_sharing": False, **settings}
        self.engine = starter.InferenceEngine.from_scenario(
            self.scenario, backend=cast("Any", self.meter), weights_seed=self.weights_seed, clock=self.clock,
            **self.settings)
        case.engines.append(self.engine)
        case.addCleanup(self.engine.close)
        if TIMELINES:
            case.addCleanup(self._keep_timeline)
        self.lives, self.decisions, self.sharing = {}, [], self.settings["prefix_sharing"]
        self.peak_pages = 0
        self.strangers, self.accesses = [], []  # to pages of others, in words; of a step: (owner, position, rows)
        if self.settings.get("use_cache", True):
            self.meter.watch = self._watch
        self._oracle = None

    def _keep_timeline(self):
        """In a file of its own, numbered in the order in which a test made its engines."""
        folder = Path(TIMELINES or "")
        folder.mkdir(parents=True, exist_ok=True)
        name = self.case.id().rpartition(".")[2]
        number = next(n for n in count(1) if not (folder / f"{name}-{n}.jsonl").exists())
        self.engine.timeline.write(folder / f"{name}-{number}.jsonl")

    @property
    def oracle(self):
        if self._oracle is None:
            from starter.base.weights import seeded_weights
            self._oracle = Oracle(self.scenario.model, seeded_weights(self.scenario.model, self.weights_seed))
        return self._oracle

    def prompt(self, length):
        """Tokens drawn at random."""
        return [self.case.rng.randrange(self.scenario.model.vocab_size) for _ in range(length)]

    def submit(self, prompt, max_tokens, request_id=None, **keywords):
        """Submit and remember; the id."""
        greedy = "sampling" not in keywords
        name = self.engine.submit(prompt, max_tokens, request_id=request_id, **keywords)
        self.case.that(type(name) is str and request_id in (None, name), f"submit returned {name!r} for {request_id!r}",
                       "submit returns the request's id, a string")
        self.lives[name] = Life(list(prompt), max_tokens, tuple(keywords.get("stop_tokens", ())), greedy, self.clock())
        return name

    def cancel(self, request_id):
        self.engine.cancel(request_id)
        self.lives[request_id].cancelled = True
        self.check_pages()

    def step(self, budget=None):
        """One step of the engine, one second of the clock, and all checks."""
        self.clock.tick()
        before, self.accesses = self.meter.tokens, []
        decision = self.engine.step() if budget is None else self.engine.step(budget)
        self.decisions.append(decision)
        self._check_decision(decision, self.settings["budget_tokens"] if budget is None else budget,
                             self.meter.tokens - before)
        self._check_accesses(decision)
        self.check_pages()
        return decision

    def drain(self, budget=None):
        """Step until nothing is live."""
        for _ in range(PATIENCE):
            if not self.engine.active:
                return
            self.step(budget)
        self.case.that(False, f"{self.engine.active} still live after {PATIENCE} steps",
                       "every waiting request must be served, or refused, within finitely many steps (V4)")

    def finish(self, budget=None):
        """Drain, read every stream to its end, check every event, and see all pages back. Returns tokens by id."""
        self.drain(budget)
        for name in self.case.rng.sample(list(self.lives), len(self.lives)):  # streams are read in any order
            if not self.lives[name].events:
                self.lives[name].events = list(self.engine.stream(name))
                self.check_stream(name)
        if not self.sharing:  # else pages may be kept for later requests
            self.case.same(self.engine.kv.free_pages, self.engine.kv.total_pages,
                           "all requests have ended, so all pages must be free: look for a path that forgets release")
        return {name: life.tokens for name, life in self.lives.items()}

    # ------------------------------------------------------------------------------------------------- checks

    def _check_decision(self, decision, budget, embedded):
        case, names = self.case, [chunk.request_id for chunk in decision.chunks]
        case.same(decision.scheduled_tokens, sum(chunk.count for chunk in decision.chunks),
                  "scheduled_tokens is the sum of the chunks")
        case.that(decision.budget_tokens == budget and decision.scheduled_tokens <= budget,
                  f"budget {budget}; the decision: budget {decision.budget_tokens}, {decision.scheduled_tokens} tokens",
                  "a step never computes more tokens than its budget")
        case.same(len(set(names)), len(names), "a request has one chunk in a step at most")
        for name in decision.preempted:
            self.lives[name].settled = False
        for chunk in decision.chunks:
            life = self.lives[chunk.request_id]
            case.that(not life.cancelled, f"{chunk} after the request's cancel",
                      "a cancelled request computes nothing (V3)")
            if not life.settled and (chunk.start == 0 or self.sharing):
                life.computed = chunk.start  # from the beginning, or behind a prefix that another request computed
            life.settled = True
            case.that(chunk.count >= 1 and chunk.start == life.computed and chunk.start + chunk.count <= life.known,
                      f"{chunk} although {life.computed} of {life.known} known positions are computed",
                      "each position is computed once, in order, unless its request was preempted")
            life.computed += chunk.count
            if life.computed == life.known:
                life.token_times.append(self.clock())
        if self.meter.poison is None and self.settings.get("use_cache", True):
            case.same(embedded, decision.scheduled_tokens, "the decoder must compute exactly the tokens that the step "
                      "planned: more is a hidden recomputation, fewer is work that was not done")

    def _watch(self, batch):
        """Inside a step: whose pages do the rows of each request write to, and do its owner's tables hold all that they
        read?"""
        kv, size = self.engine.kv, self.settings["page_size"]
        for span in batch.spans:
            pages, start = list(span.pages)[:-(-span.end // size)], span.end - span.count
            users = [kv.page(page).users for page in pages]
            owner = (users[-1] or ("nobody",))[0]
            if any(owner not in some for some in users) or any(len(some) != 1 for some in users[start // size:]):
                self.strangers.append(f"pages {pages}, read for one request and written to from position {start} on, "
                                      f"have the users {users}")
            elif owner in self.lives:
                self.lives[owner].pages = pages
            self.accesses.append((owner, start, span.count))

    def _check_accesses(self, decision):
        hint = "a request reads its own pages, and writes to those that it shares with nobody (V1, V2)"
        self.case.same(self.strangers, [], hint)
        if self.meter.watch and self.meter.poison is None:
            planned = [(chunk.request_id, chunk.start, chunk.count) for chunk in decision.chunks]
            self.case.same(sorted(self.accesses), sorted(planned), f"(owner of the pages, position, rows): {hint}")

    def check_pages(self):
        """Conservation and ownership of pages, seen from outside."""
        kv, case = self.engine.kv, self.case
        kv.check()
        infos = [kv.page(page) for page in range(kv.total_pages)]
        used = [info for info in infos if info.refcount]
        self.peak_pages = max(self.peak_pages, len(used))
        for info in infos:
            case.same(len(info.users), info.refcount, "a page's reference count is the number of its users")
            case.that(set(info.users) <= set(self.engine.active), f"a page is used by {info.users}, live are "
                      f"{self.engine.active}", "a request that has ended holds no page")
        if not self.sharing:
            case.same(kv.free_pages + len(used), kv.total_pages,
                      "free pages + used pages = all pages, after every call")
            case.that(all(info.refcount <= 1 for info in infos), "a page belongs to two requests",
                      "without sharing a page has one user (V1): look for a page freed twice")
            if self.settings.get("use_cache", True):
                self._check_sizes(used)

    def _check_sizes(self, used):
        """Every running request holds as many pages as its tokens need."""
        size = self.settings["page_size"]
        for name in self.engine.active:
            life, held = self.lives[name], sum(name in info.users for info in used)
            most = -(-(len(life.prompt) + life.max_tokens) // size)
            self.case.that(-(-life.computed // size) * life.settled <= held <= most,
                           f"{name}: {life.computed} tokens computed, {held} pages of {size}, at most {most} needed",
                           "a request holds ceil(tokens / page_size) pages")

    def check_stream(self, name):
        """The events of one request: identity, order, one end, and the right tokens."""
        case, life, events = self.case, self.lives[name], self.lives[name].events
        shown = [(event.index, event.token, event.finish_reason) for event in events]
        case.that(bool(events) and all(event.request_id == name for event in events),
                  f"the stream of {name} held {[event.request_id for event in events]}",
                  "events carry their request's id")
        case.that([bool(event.finish_reason) for event in events] == [False] * (len(events) - 1) + [True],
                  f"(index, token, finish_reason) of {name}: {shown}", "exactly one terminal event, and it is the last")
        case.that(all(type(token) is int for token in life.tokens), f"tokens of {name}: {shown}", "a token is an int")
        with_token = [event for event in events if event.token is not None]
        case.same([event.index for event in with_token], list(range(len(with_token))),
                  f"indices of {name} count from 0 without gap or repetition")
        case.refuses(starter.UnknownRequestError, lambda: list(self.engine.stream(name)),
                     "after its terminal event was read an id is unknown")
        if life.cancelled:
            case.same((life.reason, life.tokens), ("cancelled", []),
                      f"{name} was cancelled before it was read: its stream holds the terminal event alone (V3)")
        elif life.reason == "error":
            case.that(self.meter.poison in life.prompt, f"{name} ended with an error: {events[-1].error}",
                      "only a request whose own computation fails may end so")
        else:
            case.same([event.time for event in with_token], life.token_times,
                      f"an event of {name} carries the time of the step that computed it, one for each step that did")
            if life.greedy:
                self.check_greedy(name, with_token)

    def check_greedy(self, name, events):
        life = self.lives[name]
        asked = life.prompt, life.max_tokens, life.stop
        wanted = self.oracle.generate(*asked, life.changes) if life.max_tokens else []
        case, tokens = self.case, [step.token for step in wanted]
        changed = hint(life, name, self.oracle.tokens(*asked)) if life.changes else ""
        case.same(life.tokens, tokens, changed or (
            f"tokens of {name} against acceptance/oracle.py: is its context its own, complete, and at the right "
            "positions (V1, V6)?"))
        ended = bool(tokens) and tokens[-1] in (*life.stop, *self.scenario.model.eos_tokens)
        case.same(life.reason, "stop" if ended else "length", "the reason of the end")
        for event, step in zip(events, wanted):
            case.that(event.logprob is None or abs(event.logprob - step.logprob) <= TOLERANCE,
                      f"token {event.index} of {name}: logprob {event.logprob}, the oracle says {step.logprob}",
                      changed or "the token is right by luck: its logits are not")
