"""M6 · Proof from the file alone: does a timeline keep the promises V1 to V4, whoever's engine wrote it?

    audit = Audit.of(read_timeline("run.jsonl"))
    for violation in audit.violations: print(violation)

What is proven, from the events and from nothing else (the page tables are built up in ``observe/page_ledger.py``):

    order  steps are completed one by one, each planned once, or again after it was abandoned; time never goes back
    V1     a request computes with its own tokens: a chunk goes on where the stored positions end, in pages of its own
           block table; shared pages hold the beginning that it has itself; what it writes to belongs to it alone; and
           a token comes only when all known tokens were computed
    V2     pages add up: nobody is given a page that somebody has or that could still be found; who gives pages back
           has them; used_pages, empty_slots and host pages are what the events come to; at its end a request has none
    V3     a request has tokens 0, 1, 2, ..., at most max_tokens, none after its cancel, and one end; every chunk that
           completes what is known brings a token or an end
    V4     budgets and max_running hold; nobody who lives is forgotten; nobody waits longer than ``scheduler.py``
           promises; who decodes does so in every step whose budget covers the running ones. While pages are held from
           outside no wait counts; a fault starts the count again, and so does an abandoned step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from starter.observe.page_ledger import PageLedger
from starter.observe.request_ledger import Life
from starter.scheduler import AGING, POLICIES
from starter.schema import ENGINE_SHAPE, MODEL_SHAPE, EngineSettings, ModelConfig, Request, SamplingParams
from starter.timeline import Event


@dataclass(frozen=True)
class Violation:
    """One broken promise. ``line`` counts the timeline's events from 1, as the lines of its file."""

    line: int
    step: int
    promise: str
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}, step {self.step}: {self.promise}: {self.problem}"


class Audit:
    """Reads a timeline, an event at a time; what is wrong is in ``violations``, what was looked at in ``proven``."""

    def __init__(self, header: Event) -> None:
        self.settings: EngineSettings = ENGINE_SHAPE.parse(header["settings"], "/settings")
        self.model: ModelConfig = MODEL_SHAPE.parse(header["model"], "/model")
        self.violations: list[Violation] = []
        self.proven: Counter[str] = Counter()
        self.longest_wait = (0, 0)  # steps, of so many that were allowed
        self._pages = PageLedger(header["num_pages"], self.settings.page_size, self.settings.host_pages)
        self._policy = POLICIES[self.settings.policy]()
        self._max_running = 1 if self.settings.batching == "none" else self.settings.max_running
        self._lives: dict[str, Life] = {}
        self._line, self._step, self._time, self._plans, self._begun = 1, 0, header["time"], 0, 0
        self._plan: Event | None = None  # the last step, until what it computes is there
        self._told: Life | None = None  # who had the latest token
        self._checked = True  # the plan was: its chunks have to wait for its page changes
        self._unlisted: list[Life] = []  # neither running nor waiting in the plan: they must have ended

    @classmethod
    def of(cls, events: Iterable[Event]) -> Audit:
        """Read a whole timeline, header first."""
        reader = iter(events)
        audit = cls(next(reader))
        for event in reader:
            audit.observe(event)
        audit.end()
        return audit

    def observe(self, event: Event) -> None:
        """Take the next event into account."""
        self._line += 1
        planned = event["event"] == "fault" or (event["event"] == "pages" and event["request"] in self._lives)
        if event["step"] != self._step or not planned:
            self._check_plan()
        if event["step"] != self._step:
            self._complete_step(event["step"])
        if event["time"] < self._time:
            self._wrong("order", f"time goes back from {self._time} to {event['time']}")
        self._time = event["time"]
        if handler := getattr(self, f"_on_{event['event']}", None):
            handler(event)

    def end(self) -> None:
        """The timeline ends here: so must everything else."""
        self._check_plan()
        for name in self._lives:
            self._wrong("V3", f"{name} has not ended when the timeline does")

    def _wrong(self, promise: str, *problems: str) -> None:
        self.violations += [Violation(self._line, self._step, promise, problem) for problem in problems]

    # ------------------------------------------------------------------------------- from submit to end

    def _on_submit(self, event: Event) -> None:
        name = event["request"]
        self._begin(name, Request(name, event["prompt_tokens"], event["max_tokens"], priority=event.get("priority", 0),
                                  sampling=SamplingParams(stop=event.get("sampling", {}).get("stop", ())),
                                  stop_tokens=event.get("stop_tokens", ()), cache_salt=event.get("cache_salt")),
                    list(event["prompt_tokens"]))

    def _begin(self, family: str, request: Request, tokens: list[int]) -> Life:
        name = request.request_id
        if name in self._lives:
            self._wrong("V3", f"{name} begins, but lives already")
            self._forget(name)
        rank = self._policy.rank(request, self._plans, 0)
        life = self._lives[name] = Life(request, family, tokens, self._begun, self._plans, rank)
        self._begun += 1
        self._pages.open(name, tokens, request.cache_salt)
        life.begin_to_wait(self._lives.values())
        self.proven["requests"] += 1
        return life

    def _on_fork(self, event: Event) -> None:
        parent = self._lives.get(event["parent"])
        if parent is None or not parent.running:
            self._wrong("V3", f"{event['request']} is forked from {event['parent']}, which does not run")
            return
        request = replace(parent.request, request_id=event["request"])
        child = self._begin(parent.family, request, list(parent.tokens))
        child.computed, child.generated, child.due, child.running = parent.computed, parent.generated, parent.due, True

    def _on_token(self, event: Event) -> None:
        if (life := self._find(event)) is None:
            return
        name, limit = event["request"], life.request.max_tokens
        if life.cancelled:
            self._wrong("V3", f"{name} gets a token after its cancel")
        if event["index"] != life.generated or life.generated >= limit:
            self._wrong("V3", f"{name} gets token {event['index']} after {life.generated} tokens of at most {limit}")
        if not life.due:
            self._wrong("V1", f"{name} gets a token, but {life.computed} of its {len(life.tokens)} tokens were "
                              f"computed, or it has had the token of this step")
        if event["token"] >= self.model.vocab_size:
            self._wrong("V1", f"{name} gets token {event['token']}, outside the vocabulary of {self.model.vocab_size}")
        self._told = life
        life.due = False
        life.generated += 1
        life.tokens.append(event["token"])
        self.proven["tokens"] += 1

    def _on_finish(self, event: Event) -> None:
        if (life := self._find(event)) is None:
            return
        name, reason = event["request"], event["reason"]
        if event["tokens"] != life.generated:
            self._wrong("V3", f"{name} ends with {event['tokens']} tokens, but got {life.generated}")
        if reason == "length" and life.generated != life.request.max_tokens:
            self._wrong("V3", f"{name} ends for its length with {life.generated} of {life.request.max_tokens} tokens")
        if (reason == "cancelled") != life.cancelled and not (life.late and self._may_end(life)):
            self._wrong("V3", f"{name} ends as {reason!r}, and was {'' if life.cancelled else 'not '}cancelled")
        if life.due and reason in ("stop", "length"):
            self._wrong("V3", f"{name} ends without the token that was computed last")
        self._forget(name)
        self.proven["ends"] += 1

    def _may_end(self, life: Life) -> bool:
        """Can its last token have ended it?"""
        request = life.request
        return (life.generated == request.max_tokens or bool(request.sampling.stop)
                or life.tokens[-1] in (*self.model.eos_tokens, *request.stop_tokens))

    def _on_cancel(self, event: Event) -> None:
        family = [life for life in self._lives.values() if life.family == event["request"]]
        if not family:
            self._wrong("V3", f"{event['request']} is cancelled, but does not live")
        for life in family:
            if life.cancelled:
                self._wrong("V3", f"{life.request.request_id} is cancelled again before its end came")
            life.cancelled, life.late = True, life is self._told

    def _find(self, event: Event) -> Life | None:
        life = self._lives.get(event["request"])
        if life is None:
            self._wrong("V3", f"a {event['event']} event of {event['request']}, which does not live")
        return life

    def _forget(self, name: str) -> None:
        del self._lives[name]
        self._wrong("V2", *self._pages.close(name))

    # ------------------------------------------------------------------------------- pages and the plan

    def _on_pages(self, event: Event) -> None:
        for problem in self._pages.change(event):
            self._wrong("V1" if event["change"] in ("share", "append") and "used_pages" not in problem else "V2",
                        problem)
        self.proven["page changes"] += 1

    def _on_fault(self, event: Event) -> None:
        for life in self._lives.values():
            life.waited = 0

    def _on_step(self, event: Event) -> None:
        self._expect_ends()
        if self._plan:
            self._wrong("order", f"step {event['step']} is planned twice, and was not abandoned in between")
        self._plan, self._checked = event, False
        self._plans += 1
        self.proven["steps"] += 1
        for names, running, verb in ((event["preempted"], False, "preempted"), (event["admitted"], True, "admitted")):
            for name in names:
                self._move(name, running, verb)
        counts = [count for _, _, count, _ in event["chunks"]]
        if sum(counts) > event["budget"]:
            self._wrong("V4", f"{sum(counts)} tokens are scheduled; the budget is {event['budget']}")
        if 0 in counts or len({name for name, *_ in event["chunks"]}) < len(counts):
            self._wrong("V4", "a chunk is empty, or a request has two")
        if self.settings.use_cache and event["computed"] != sum(counts):
            self._wrong("V4", f"{sum(counts)} tokens are scheduled, but {event['computed']} positions computed")
        if event["admitted"] and len(event["running"]) > self._max_running:
            self._wrong("V4", f"{len(event['running'])} run after an admission; at most {self._max_running} may")

    def _on_abandon(self, event: Event) -> None:
        if self._plan is None:
            self._wrong("order", f"step {event['step']} is abandoned, but was not planned")
        self._plan = None
        self._on_fault(event)  # a turn that came to nothing may have to be waited for once more

    def _move(self, name: str, running: bool, verb: str) -> None:
        life = self._lives.get(name)
        if life is None or life.running is running:
            self._wrong("V4", f"{name} is {verb}, but {'runs already' if life and running else 'does not run'}"
                        if life else f"{name} is {verb}, but does not live")
            return
        life.running = running
        if not running:
            life.rank = self._policy.rank(life.request, life.arrival, life.generated)
            life.begin_to_wait(self._lives.values())

    def _check_plan(self) -> None:
        """The step's page changes are known: are its chunks right, is everybody where the step says?"""
        plan = self._plan
        if plan is None or self._checked:
            return
        self._checked = True
        told, real = (plan["used_pages"], plan["empty_slots"]), (self._pages.used, self._pages.empty_slots)
        if told != real:
            self._wrong("V2", f"the step tells {told} used pages and empty slots, the events come to {real}")
        for name in plan["admitted"]:
            if name in self._lives and self.settings.use_cache:
                self._lives[name].computed = self._pages.tables[name].stored
        for name, tokens in plan["found"].items():
            if name in self._lives and tokens != self._lives[name].computed:
                self._wrong("V2", f"{name} found {tokens} tokens, but its pages hold {self._lives[name].computed}")
        for chunk in plan["chunks"]:
            self._check_chunk(*chunk)
        for names, running in ((plan["running"], True), (plan["waiting"], False)):
            self._wrong("V4", *(f"{name} is told to {'run' if running else 'wait'}, but does not" for name in names
                                if name not in self._lives or self._lives[name].running is not running))
        listed = {*plan["running"], *plan["waiting"]}
        self._unlisted = [life for name, life in self._lives.items() if name not in listed]
        self._check_fairness(plan)

    def _check_chunk(self, name: str, start: int, count: int, phase: str) -> None:
        life = self._lives.get(name)
        if life is None or not life.running:
            self._wrong("V1", f"a chunk of {name}, which does not run")
            return
        known, end = len(life.tokens), start + count
        if end > known or start != life.computed:
            self._wrong("V1", f"{name} computes positions {start} to {end - 1} when it has {life.computed} of {known}")
        if (phase == "decode") != (life.generated > 0 and start == known - 1):
            self._wrong("V4", f"the chunk of {name} from {start} on is told as {phase}; {known} tokens are known")
        if self.settings.use_cache:
            self._wrong("V1", *self._pages.access(name, start, count))
            self.proven["page accesses"] += -(-end // self.settings.page_size)
        self.proven["chunks"] += 1

    def _check_fairness(self, plan: Event) -> None:
        budget, served = plan["budget"], {name for name, *_ in plan["chunks"]}
        patience = 1 if self._policy.decode_first else AGING + 1
        waits_count = budget > 0 and not self._pages.held_outside
        for name, life in self._lives.items():
            if not life.running and waits_count:
                life.wait(-(-self._max_running // budget) * patience)
                self.longest_wait = max(self.longest_wait, (life.waited, life.bound))
                if life.waited > life.bound:
                    self._wrong("V4", f"{name} has waited {life.waited} steps; at most {life.bound} are promised")
            elif (life.running and name not in served and life.generated and life.computed == len(life.tokens) - 1
                  and len(plan["running"]) <= budget and self._policy.decode_first and life not in self._unlisted):
                self._wrong("V4", f"{name} does not decode in a step whose budget of {budget} covers all that run")

    # ---------------------------------------------------------------------------------- a step's results

    def _complete_step(self, step: int) -> None:
        """Time has moved on: what was planned is computed."""
        self._expect_ends()
        plan, self._plan = self._plan, None
        if plan is None or step != self._step + 1:
            self._wrong("order", f"an event of step {step} after step {self._step}"
                                 + ("" if plan else ", which was not planned"))
        self._step = step
        for name, start, count, _ in plan["chunks"] if plan else ():
            life = self._lives.get(name)
            if life and life.running:
                life.computed = start + count
                life.due = life.computed == len(life.tokens)
                self._pages.write(name, start, count)

    def _expect_ends(self) -> None:
        """Before the next step: who was due, cancelled or in no list must have been heard of."""
        for life in self._lives.values():
            name = life.request.request_id
            if life.due or life.cancelled:
                self._wrong("V3", f"{name} {'was cancelled' if life.cancelled else 'has all computed'}, but no "
                                  f"{'end' if life.cancelled else 'token'} came of it")
                life.due = life.cancelled = False
        self._wrong("V4", *(f"{life.request.request_id} lives, but the step told neither that it runs nor that it waits"
                            for life in self._unlisted if self._lives.get(life.request.request_id) is life))
        self._unlisted = []
