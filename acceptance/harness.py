"""What the acceptance tests are written with: fresh models, an engine under observation, messages that help.

    class M2KVCache(Case):
        def test_something(self):
            '''V6: what must hold, in one sentence. It becomes the head of the failure message.'''
            run = Run(self, page_size=4)                 # an engine on a model that nobody has seen before
            request = run.submit(run.prompt(5), 8)
            run.finish()                                 # steps, reads and checks everything

``Run`` drives an engine through its public names only and, after every step, checks what must always hold: the budget,
each position computed once, pages conserved and owned by live requests. ``finish`` compares every token with an oracle.

Models, weights and prompts are drawn anew in every run from one seed; a failure prints how to replay it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import unittest
from dataclasses import dataclass, field
from faulthandler import cancel_dump_traceback_later, dump_traceback_later
from functools import wraps
from pathlib import Path

from oracle import Oracle

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

GENUINE = [(owner, name, getattr(owner, name)) for owner, names in (  # as they are before the engine is imported
    (time, ("perf_counter", "monotonic", "time")), (random.Random, ("random", "seed")), (os, ("_exit",)), (sys, ("exit",)),
    (unittest.TestCase, ("run", "fail", "assertEqual")), (json, ("loads", "dumps"))) for name in names]

import starter  # noqa: E402  its names are imported when first used, so one missing module fails its tests alone

SWITCH = "RUN_STUDENT_ACCEPTANCE"
SEED = os.environ.get("P07_SEED") or str(random.SystemRandom().randrange(1_000_000))
PATIENCE = 2_000  # steps after which a request that is still live counts as starved
HANG_SECONDS = 60  # a single call that does not return in this time ends the run, with a traceback
TOLERANCE = 1e-3  # of logarithms of probabilities; float64 stays below 1e-12


# ----------------------------------------------------------------------------------------------------- messages


def _explained(test):
    """Wrap a test so that a failure says what must hold, what happened, and how to replay it."""
    rule = " ".join(test.__doc__.split())

    @wraps(test)
    def run(self):
        try:
            test(self)
        except SkipPart as part:
            self.skipTest(str(part))
        except (Exception, SystemExit, unittest.SkipTest) as error:  # nothing the engine raises may end the suite
            what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            if isinstance(error, NotImplementedError):
                what += "\n  hint:     this part is still to be written"
            name = ".".join(self.id().split(".")[-2:])
            what += f"\n  case:     {self.case}" if self.case else ""
            message = (f"{rule}\n  {what}\n  replay:   {SWITCH}=1 P07_SEED={SEED} "
                       f"python3 -m unittest discover -s acceptance -k {name}")
            raise AssertionError(message).with_traceback(error.__traceback__) from None

    return run


class SkipPart(Exception):
    """Raised by a test for an optional part that the engine refuses with a clear error."""


class Case(unittest.TestCase):
    """Base of the milestones: ``self.rng``, and assertions that explain themselves.

    ``self.case`` may name what is tried at the moment, in a test that tries several things.
    """

    case = ""

    def __init_subclass__(cls):
        for name, test in list(vars(cls).items()):
            if name.startswith("test_"):
                setattr(cls, name, _explained(test))

    def setUp(self):
        self.rng = random.Random(".".join([SEED, *self.id().split(".")[-2:]]))
        dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)
        self.addCleanup(cancel_dump_traceback_later)

    def same(self, got, expected, hint):
        """``got`` must equal ``expected``."""
        if got != expected:
            raise AssertionError(f"expected: {expected!r}\n  happened: {got!r}\n  hint:     {hint}")

    def that(self, condition, happened, hint):
        """The condition must hold; ``happened`` describes what was found."""
        if condition is not True:
            raise AssertionError(f"happened: {happened}\n  hint:     {hint}")

    def refuses(self, error, call, hint):
        """The call must raise ``error`` (a class of starter/errors.py, or a tuple of them) with a message."""
        wanted = " or ".join(kind.__name__ for kind in (error if isinstance(error, tuple) else (error,)))
        try:
            result = call()
        except error as refusal:
            self.that(len(str(refusal)) > 10, f"{wanted} with the message {str(refusal)!r}",
                      "say what was given, what is allowed, and what to do")
        except Exception as other:
            raise AssertionError(f"expected: {wanted}\n  happened: {type(other).__name__}: {other}\n  hint:     {hint}") from other
        else:
            raise AssertionError(f"expected: {wanted}\n  happened: it returned {result!r}\n  hint:     {hint}")


# ------------------------------------------------------------------------------------------------------- models


def load_document(document):
    """A scenario as a JSON document -> Scenario, through a file as any user would."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "scenario.json")
        path.write_text(json.dumps(document), encoding="utf-8")
        return starter.load_scenario(path)


def tiny_document(rng, **model):
    """A scenario document: a small model of a shape drawn at random, no requests; ``model`` fixes some of its sizes."""
    heads, kv_heads = rng.choice([(4, 2), (4, 1), (2, 2), (2, 1)])
    sizes = {"vocab_size": rng.randint(24, 40), "width": 16, "layers": rng.choice([1, 2]), "heads": heads,
             "kv_heads": kv_heads, "ffn_width": rng.choice([20, 24, 33]), "max_context": 160, "eos_tokens": [],
             "rope_theta": rng.choice([100.0, 10_000.0]), "tied_output": rng.random() < 0.5, **model}
    characters = "".join(chr(ord("a") + i) if i < 26 else chr(0x4E00 + i) for i in range(sizes["vocab_size"]))
    return {"version": 1, "name": "acceptance", "model": sizes, "requests": [], "weights": {"source": "seeded", "seed": 0},
            "tokenizer": {"characters": characters}}


def tiny_scenario(rng, **model):
    """The same, loaded."""
    return load_document(tiny_document(rng, **model))


class Clock:
    """A clock that only the harness moves: one second a step."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Meter:
    """The standard-library backend, counting the tokens that enter the decoder and failing on ``poison`` on demand."""

    def __init__(self, poison=None):
        self.inner, self.poison, self.tokens = starter.load_backend("cpu"), poison, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def embed(self, table, tokens):
        if self.poison in tokens:
            raise RuntimeError("a fault injected by the acceptance suite")
        self.tokens += len(tokens)
        return self.inner.embed(table, tokens)


# --------------------------------------------------------------------------------------------------- observation


@dataclass
class Life:
    """One request from submit to its terminal event, as the harness saw it."""

    prompt: list
    max_tokens: int
    stop: tuple
    greedy: bool
    submitted: float
    computed: int = 0  # positions in the cache
    token_times: list = field(default_factory=list)  # of the steps whose chunk yielded a token
    cancelled: bool = False
    events: list = field(default_factory=list)

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

    def __init__(self, case, scenario=None, weights_seed=None, poison=None, **settings):
        self.case = case
        self.scenario = scenario or tiny_scenario(case.rng)
        self.weights_seed = case.rng.randrange(2**31) if weights_seed is None else weights_seed
        self.clock, self.meter = Clock(), Meter(poison)
        self.settings = {"page_size": 4, "num_pages": 64, "budget_tokens": 16, "max_running": 4, "quantization": None,
                         "kv_quantization": None, "prefix_sharing": False, **settings}
        self.engine = starter.InferenceEngine.from_scenario(
            self.scenario, backend=self.meter, weights_seed=self.weights_seed, clock=self.clock, **self.settings)
        case.addCleanup(self.engine.close)
        self.lives, self.decisions, self.sharing = {}, [], self.settings["prefix_sharing"]
        self._oracle = None

    @property
    def oracle(self):
        if self._oracle is None:
            from starter.weights import seeded_weights
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
        self.clock.now += 1
        before = self.meter.tokens
        decision = self.engine.step() if budget is None else self.engine.step(budget)
        self.decisions.append(decision)
        self._check_decision(decision, self.settings["budget_tokens"] if budget is None else budget,
                             self.meter.tokens - before)
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
        self.case.same(self.engine.kv.free_pages, self.engine.kv.total_pages,
                       "all requests have ended, so all pages must be free: look for a path that forgets release")
        return {name: life.tokens for name, life in self.lives.items()}

    # ------------------------------------------------------------------------------------------------- checks

    def _check_decision(self, decision, budget, embedded):
        case, names = self.case, [chunk.request_id for chunk in decision.chunks]
        case.same(decision.scheduled_tokens, sum(chunk.count for chunk in decision.chunks),
                  "scheduled_tokens is the sum of the chunks")
        case.that(decision.budget_tokens == budget and decision.scheduled_tokens <= budget,
                  f"{decision.scheduled_tokens} tokens scheduled, decision.budget_tokens {decision.budget_tokens}, budget "
                  f"given {budget}", "a step never computes more tokens than its budget")
        case.same(len(set(names)), len(names), "a request has one chunk in a step at most")
        for name in decision.preempted:
            self.lives[name].computed = 0
        for chunk in decision.chunks:
            life = self.lives[chunk.request_id]
            case.that(not life.cancelled, f"{chunk} after the request's cancel", "a cancelled request computes nothing (V3)")
            case.that(chunk.count >= 1 and chunk.start == life.computed and chunk.start + chunk.count <= life.known,
                      f"{chunk} although {life.computed} of {life.known} known positions are computed",
                      "each position is computed once, in order, unless its request was preempted")
            life.computed += chunk.count
            if life.computed == life.known:
                life.token_times.append(self.clock())
        if self.meter.poison is None and self.settings.get("use_cache", True):
            case.same(embedded, decision.scheduled_tokens, "the decoder must compute exactly the tokens that the step "
                      "planned: more is a hidden recomputation, fewer is work that was not done")

    def check_pages(self):
        """Conservation and ownership of pages, seen from outside."""
        kv, case = self.engine.kv, self.case
        kv.check()
        infos = [kv.page(page) for page in range(kv.total_pages)]
        used = [info for info in infos if info.refcount]
        for info in infos:
            case.same(len(info.users), info.refcount, "a page's reference count is the number of its users")
            case.that(set(info.users) <= set(self.engine.active), f"a page is used by {info.users}, live are "
                      f"{self.engine.active}", "a request that has ended holds no page")
        if not self.sharing:
            case.same(kv.free_pages + len(used), kv.total_pages, "free pages + used pages = all pages, after every call")
            case.that(all(info.refcount <= 1 for info in infos), "a page belongs to two requests",
                      "without sharing a page has one user (V1): look for a page freed twice")
            self._check_sizes(used)

    def _check_sizes(self, used):
        """Every running request holds as many pages as its tokens need."""
        size = self.settings["page_size"]
        for name in self.engine.active:
            life, held = self.lives[name], sum(name in info.users for info in used)
            most = -(-(len(life.prompt) + life.max_tokens) // size)
            if held and self.settings.get("use_cache", True):
                self.case.that(-(-life.computed // size) <= held <= most,
                               f"{name} has {life.computed} tokens computed and {held} pages of {size}; at most {most} are "
                               f"ever needed", "a request holds ceil(tokens / page_size) pages")

    def check_stream(self, name):
        """The events of one request: identity, order, one end, and the right tokens."""
        case, life, events = self.case, self.lives[name], self.lives[name].events
        shown = [(event.index, event.token, event.finish_reason) for event in events]
        case.that(bool(events) and all(event.request_id == name for event in events),
                  f"the stream of {name} held {[event.request_id for event in events]}", "events carry their request's id")
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
        elif life.reason != "error":
            case.same([event.time for event in with_token], life.token_times,
                      f"an event of {name} carries the time of the step that computed it, one for each step that did")
            if life.greedy:
                self.check_greedy(name, with_token)

    def check_greedy(self, name, events):
        life = self.lives[name]
        wanted = self.oracle.generate(life.prompt, life.max_tokens, life.stop) if life.max_tokens else []
        case, tokens = self.case, [step.token for step in wanted]
        case.same(life.tokens, tokens, f"{name} must get the tokens of the independent decoder in acceptance/oracle.py: "
                  f"is its context its own, complete, and at the right positions (V1, V6)?")
        ended = bool(tokens) and tokens[-1] in (*life.stop, *self.scenario.model.eos_tokens)
        case.same(life.reason, "stop" if ended else "length", "the reason of the end")
        for event, step in zip(events, wanted):
            case.that(event.logprob is None or abs(event.logprob - step.logprob) <= TOLERANCE,
                      f"token {event.index} of {name}: logprob {event.logprob}, the oracle says {step.logprob}",
                      "the token is right by luck: its logits are not")
