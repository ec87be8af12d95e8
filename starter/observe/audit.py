"""M6 · Proof from the file alone: does a timeline keep the promises V1 to V4, whichever engine wrote it?

    audit = Audit.of(read_timeline("run.jsonl"))
    for violation in audit.violations: print(violation)

What is proven, from the events and from nothing else (the block tables are rebuilt in ``observe/page_ledger.py``):

    order  steps are completed one by one, each planned once, or again after it was abandoned; time never goes back
    V1     a request computes with its own tokens: a chunk continues where the stored positions end, in pages of its own
           block table; shared pages hold the request's own beginning; the pages it writes to belong to it alone; and a
           token comes only when all known tokens were computed
    V2     pages add up: no page is given away that is in a table or can still be found; only a table's own pages are
           given back; used_pages, empty_slots and host pages agree with the events; a request ends without pages
    V3     a request has tokens 0, 1, 2, ..., at most max_tokens, none after its cancel, and one end; every chunk that
           reaches the last known token brings a token or an end
    V4     budgets and max_running hold; no live request is forgotten; none waits longer than ``scheduler.py`` promises;
           a decoding request gets its token in every step whose budget covers the running ones. While pages are held
           from outside, no wait counts; a fault or an abandoned step starts the count again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from starter.observe.page_ledger import PageLedger
from starter.observe.request_ledger import RequestRecord
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
    """Reads a timeline, an event at a time. ``violations`` are the broken promises, ``proven`` counts what was checked.
    """

    def __init__(self, header: Event) -> None:
        self.settings: EngineSettings = ENGINE_SHAPE.parse(header["settings"], "/settings")
        self.model: ModelConfig = MODEL_SHAPE.parse(header["model"], "/model")
        self.violations: list[Violation] = []
        self.proven: Counter[str] = Counter()
        self.longest_wait = (0, 0, 0)  # steps; its bounds: the work in front of it, and what is promised in general
        self._pages = PageLedger(header["num_pages"], self.settings.page_size, self.settings.host_pages)
        self._policy = POLICIES[self.settings.policy]()
        self._max_running = 1 if self.settings.batching == "none" else self.settings.max_running
        self._live: dict[str, RequestRecord] = {}
        self._line, self._step, self._time, self._plans, self._begun = 1, 0, header["time"], 0, 0
        self._plan: Event | None = None  # the last step, until it is completed
        self._checked = True  # whether the plan was; its chunks are checked after its page changes
        self._last_token: RequestRecord | None = None  # the request that had the latest token
        self._unlisted: list[RequestRecord] = []  # neither running nor waiting in the plan: they must have ended

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
        planned = event["event"] == "fault" or (event["event"] == "pages" and event["request"] in self._live)
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
        """The timeline ends here, so every request must have ended."""
        self._check_plan()
        for name in self._live:
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

    def _begin(self, family: str, request: Request, tokens: list[int]) -> RequestRecord:
        name = request.request_id
        if name in self._live:
            self._wrong("V3", f"{name} begins, but is live already")
            self._forget(name)
        rank = self._policy.rank(request, self._plans, 0)
        record = self._live[name] = RequestRecord(request, family, tokens, self._begun, self._plans, rank)
        self._begun += 1
        self._pages.open(name, tokens, request.cache_salt)
        record.begin_to_wait(self._live.values())
        self.proven["requests"] += 1
        return record

    def _on_fork(self, event: Event) -> None:
        parent = self._live.get(event["parent"])
        if parent is None or not parent.running:
            self._wrong("V3", f"{event['request']} is forked from {event['parent']}, which does not run")
            return
        request = replace(parent.request, request_id=event["request"])
        child = self._begin(parent.family, request, list(parent.tokens))
        child.computed, child.generated, child.due, child.running = parent.computed, parent.generated, parent.due, True
        child.begin_to_run(self._live.values())

    def _on_token(self, event: Event) -> None:
        if (record := self._find(event)) is None:
            return
        name, limit = event["request"], record.request.max_tokens
        if record.cancelled:
            self._wrong("V3", f"{name} gets a token after its cancel")
        if event["index"] != record.generated or record.generated >= limit:
            self._wrong("V3", f"{name} gets token {event['index']} after {record.generated} tokens of at most {limit}")
        if not record.due:
            self._wrong("V1", f"{name} gets a token, but {record.computed} of its {len(record.tokens)} tokens were "
                              f"computed, or it had its token of this step already")
        if event["token"] >= self.model.vocab_size:
            self._wrong("V1", f"{name} gets token {event['token']}, outside the vocabulary of {self.model.vocab_size}")
        self._last_token = record
        record.due = False
        record.generated += 1
        record.tokens.append(event["token"])
        self.proven["tokens"] += 1

    def _on_finish(self, event: Event) -> None:
        if (record := self._find(event)) is None:
            return
        name, reason = event["request"], event["reason"]
        if event["tokens"] != record.generated:
            self._wrong("V3", f"{name} ends with {event['tokens']} tokens, but got {record.generated}")
        if reason == "length" and record.generated != record.request.max_tokens:
            limit = record.request.max_tokens
            self._wrong("V3", f"{name} ends at its length with {record.generated} of {limit} tokens")
        if (reason == "cancelled") != record.cancelled and not (record.cancelled_at_token and self._may_end(record)):
            self._wrong("V3", f"{name} ends as {reason!r}, and was {'' if record.cancelled else 'not '}cancelled")
        if record.due and reason in ("stop", "length"):
            self._wrong("V3", f"{name} ends without the token that was computed last")
        self._forget(name)
        self.proven["ends"] += 1

    def _may_end(self, record: RequestRecord) -> bool:
        """Whether its last token may have ended it."""
        request = record.request
        return (record.generated == request.max_tokens or bool(request.sampling.stop)
                or record.tokens[-1] in (*self.model.eos_tokens, *request.stop_tokens))

    def _on_cancel(self, event: Event) -> None:
        family = [record for record in self._live.values() if record.family == event["request"]]
        if not family:
            self._wrong("V3", f"{event['request']} is cancelled, but is not live")
        for record in family:
            if record.cancelled:
                self._wrong("V3", f"{record.request.request_id} is cancelled again before its end came")
            record.cancelled, record.cancelled_at_token = True, record is self._last_token

    def _find(self, event: Event) -> RequestRecord | None:
        record = self._live.get(event["request"])
        if record is None:
            self._wrong("V3", f"a {event['event']} event of {event['request']}, which is not live")
        return record

    def _forget(self, name: str) -> None:
        del self._live[name]
        self._wrong("V2", *self._pages.close(name))

    # ------------------------------------------------------------------------------- pages and the plan

    def _on_pages(self, event: Event) -> None:
        for problem in self._pages.change(event):
            self._wrong("V1" if event["change"] in ("share", "append") and "used_pages" not in problem else "V2",
                        problem)
        self.proven["page changes"] += 1

    def _on_fault(self, event: Event) -> None:
        for record in self._live.values():
            record.waited = 0

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
        self._on_fault(event)  # the wait for a turn that came to nothing may begin again

    def _move(self, name: str, running: bool, verb: str) -> None:
        record = self._live.get(name)
        if record is None or record.running is running:
            self._wrong("V4", f"{name} is {verb}, but {'runs already' if record and running else 'does not run'}"
                        if record else f"{name} is {verb}, but is not live")
            return
        record.running = running
        if running:
            record.begin_to_run(self._live.values())
        else:
            record.rank = self._policy.rank(record.request, record.arrival, record.generated)
            record.begin_to_wait(self._live.values())

    def _check_plan(self) -> None:
        """The step's page changes are known now: check its chunks, and what it lists as running and waiting."""
        plan = self._plan
        if plan is None or self._checked:
            return
        self._checked = True
        listed, real = (plan["used_pages"], plan["empty_slots"]), (self._pages.used, self._pages.empty_slots)
        if listed != real:
            self._wrong("V2", f"the step says {listed} used pages and empty slots, the events add up to {real}")
        for name in plan["admitted"]:
            if name in self._live and self.settings.use_cache:
                self._live[name].computed = self._pages.tables[name].stored
        for name, tokens in plan["found"].items():
            if name in self._live and tokens != self._live[name].computed:
                self._wrong("V2", f"{name} found {tokens} tokens, but its pages hold {self._live[name].computed}")
        for chunk in plan["chunks"]:
            self._check_chunk(*chunk)
        for names, running in ((plan["running"], True), (plan["waiting"], False)):
            self._wrong("V4", *(f"{name} is listed as {'running' if running else 'waiting'}, but is not"
                                for name in names if name not in self._live or self._live[name].running is not running))
        named = {*plan["running"], *plan["waiting"]}
        self._unlisted = [record for name, record in self._live.items()
                          if name not in named and (record.running or "waiting_count" not in plan)]
        self._check_fairness(plan)

    def _check_chunk(self, name: str, start: int, count: int, phase: str) -> None:
        record = self._live.get(name)
        if record is None or not record.running:
            self._wrong("V1", f"a chunk of {name}, which does not run")
            return
        known, end = len(record.tokens), start + count
        if end > known or start != record.computed:
            self._wrong("V1", f"{name} computes positions {start} to {end - 1}, but has {record.computed} of {known}")
        if (phase == "decode") != (record.generated > 0 and start == known - 1):
            self._wrong("V4", f"the chunk of {name} from {start} on is called {phase}; {known} tokens are known")
        if self.settings.use_cache:
            self._wrong("V1", *self._pages.access(name, start, count))
            self.proven["page accesses"] += -(-end // self.settings.page_size)
        self.proven["chunks"] += 1

    def _check_fairness(self, plan: Event) -> None:
        budget, served = plan["budget"], {name for name, *_ in plan["chunks"]}
        patience = 1 if self._policy.decode_first else AGING + 1
        waits_count = budget > 0 and not self._pages.held_outside
        for name, record in self._live.items():
            if not record.running and waits_count:
                record.wait(-(-self._max_running // budget) * patience, not served)
                self.longest_wait = max(self.longest_wait, (record.waited, record.work, record.bound))
                if record.waited > record.bound:
                    self._wrong("V4", f"{name} has waited {record.waited} steps; at most {record.bound} are promised")
                elif record.waited > record.work:
                    self._wrong("V4", f"{name} has waited {record.waited} steps, while those who ran had {record.work} "
                                      f"tokens to compute")
            elif (record.running and name not in served and record.generated
                  and record.computed == len(record.tokens) - 1 and len(plan["running"]) <= budget
                  and self._policy.decode_first and record not in self._unlisted):
                self._wrong("V4", f"{name} does not decode in a step whose budget of {budget} covers all that run")

    # ---------------------------------------------------------------------------------- a step's results

    def _complete_step(self, step: int) -> None:
        """The step counter has moved on, so the planned step was computed."""
        self._expect_ends()
        plan, self._plan = self._plan, None
        if plan is None or step != self._step + 1:
            self._wrong("order", f"an event of step {step} after step {self._step}"
                                 + ("" if plan else ", which was not planned"))
        self._step = step
        for name, start, count, _ in plan["chunks"] if plan else ():
            record = self._live.get(name)
            if record and record.running:
                record.computed = start + count
                record.due = record.computed == len(record.tokens)
                self._pages.write(name, start, count)

    def _expect_ends(self) -> None:
        """Before the next step: requests that were due a token, cancelled or in neither list must have had an event."""
        for record in self._live.values():
            name = record.request.request_id
            if record.due or record.cancelled:
                self._wrong("V3", f"{name} {'was cancelled' if record.cancelled else 'has all computed'}, but no "
                                  f"{'end' if record.cancelled else 'token'} followed")
                record.due = record.cancelled = False
        for record in self._unlisted:
            name = record.request.request_id
            if self._live.get(name) is record:
                self._wrong("V4", f"{name} is live, but the step lists it neither as running nor as waiting")
        self._unlisted = []
