"""Hidden tests of M6: faults in the middle of a load, the record of a run, readers in threads, memory in bytes."""

from __future__ import annotations

import json
from threading import Thread

from harness import GENUINE, Meter
from hidden_case import Hidden, drawn, load, model, settings, tokens

import starter


def faults(rng):
    """Healthy requests, and two whose computation fails at a token that the others never meet."""
    made = model(rng, vocab_size=60)

    def prompt(length):
        return [rng.randrange(20) for _ in range(length)]

    healthy = [[prompt(rng.randint(1, 6)), rng.randint(2, 6)] for _ in range(5)]
    return {**made, "healthy": healthy, "steps": rng.randint(0, 4), "first": rng.randint(1, 4),
            "bad": [[prompt(before), prompt(after)] for before, after in (
                (rng.randint(0, 2), 0), (rng.randint(6, 20), rng.randint(0, 9)))],
            "settings": settings(rng, num_pages=160, max_running=rng.randint(3, 7), budget_tokens=rng.randint(4, 24))}


def recorded(rng):
    """A load in too little memory, some of it sampled, without seeds."""
    made = load(rng, 9, (1, 9), (2, 9), 0.4, page_size=4, num_pages=rng.randint(6, 10), max_running=4,
                keywords=lambda rng: rng.choice([{}, {"sampling": {"temperature": rng.choice([0.7, 1.5])}}]))
    made["moves"] += [["submit", "last", tokens(rng, made, 3), 9, {}], ["step", None], ["cancel", "last"]]
    return made


def readers(rng):
    """Prompts, one of which is no prompt in the second call."""
    made = model(rng)
    return {**made, "asked": [tokens(rng, made, rng.randint(1, 8)) for _ in range(5)], "most": rng.randint(4, 9),
            "bad": rng.randint(1, 4), "settings": settings(rng, num_pages=200)}


def budget_in_bytes(rng):
    """So many pages, and part of one."""
    made = load(rng, 6, (1, 8), (1, 9), sizes={"layers": 1}, page_size=rng.randint(1, 6))
    return {**made, "pages": rng.randint(17, 24), "part": rng.uniform(0.1, 0.9)}


class HiddenService(Hidden):
    @drawn("B16", "M6", faults, times=3)
    def test_faults(self, scenario):
        """B16: a request whose computation fails ends with "error" and its reason; its neighbours do not notice."""
        healthy, oracle = scenario["healthy"], self.make(scenario).oracle
        outputs = [oracle.tokens(prompt, most) for prompt, most in healthy]
        seen = {token for prompt, _ in healthy for token in prompt} | {token for made in outputs for token in made}
        poison = next(token for token in range(20, 60) if token not in seen)
        run = self.make(scenario, Meter(poison))
        for prompt, most in healthy[:scenario["first"]]:
            run.submit(prompt, most)
        for _ in range(scenario["steps"]):
            run.step()
        bad = [run.submit([*before, poison, *after], 5) for before, after in scenario["bad"]]
        for prompt, most in healthy[scenario["first"]:]:
            run.submit(prompt, most)
        run.finish()
        for name in bad:
            last = run.lives[name].events[-1]
            self.same((last.finish_reason, bool(last.error), run.lives[name].tokens), ("error", True, []),
                      "a failed request says why it ended")
        self.same(run.engine.metrics().finished["error"], 2, "errors are counted")

    @drawn("T6", "M6", recorded, times=2)
    def test_record(self, scenario):
        """T6: the timeline holds all that happened, and the same requests on the same weights give the same one."""
        timelines = []
        for _ in range(2):
            run = self.play(scenario)
            outputs = run.finish()
            timelines.append(list(run.engine.timeline))
        self.same(timelines[0], timelines[1], "no dependence on hash order, wall-clock time or global random numbers")
        for name, life in run.lives.items():
            mine = [event for event in timelines[0] if event.get("request") == name]
            kinds = [event["event"] for event in mine]
            self.same([kinds.count(kind) for kind in ("submit", "finish", "cancel")], [1, 1, int(life.cancelled)],
                      f"submits, ends and cancels of {name}")
            if not life.cancelled:
                self.same([event["token"] for event in mine if event["event"] == "token"], outputs[name], name)
        times = [event["time"] for event in timelines[0]]
        self.same(times, sorted(times), "time does not run backwards")
        from starter.metrics import Metrics
        self.same(Metrics.of(json.loads(json.dumps(timelines[0]))), run.engine.metrics(),
                  "metrics are functions of the timeline")
        self.measures(run)
        for owner, name, genuine in GENUINE:
            self.that(getattr(owner, name) is genuine, f"{owner.__name__}.{name} was replaced", "measure honestly")

    @drawn("M6", "M6", readers)
    def test_readers(self, scenario):
        """M6: streams can be read from threads; generate gives a list for each prompt, all or none."""
        run, asked, most, got = self.make(scenario), scenario["asked"], scenario["most"], {}
        wanted = [run.oracle.tokens(prompt, most) for prompt in asked]
        names = [run.engine.submit(prompt, most) for prompt in asked]
        threads = [Thread(target=lambda i=i: got.update({i: [event.token for event in run.engine.stream(names[i])]}),
                          daemon=True) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        self.same([got.get(i) for i in range(len(asked))], wanted, "one step at a time")
        self.same([list(made) for made in run.engine.generate(asked, max_tokens=most)], wanted, "generate")
        bad = [*asked[:scenario["bad"]], [], *asked[scenario["bad"]:]]
        self.refuses(starter.RequestError, lambda: run.engine.generate(bad, max_tokens=most), "an empty prompt")
        self.same((run.engine.active, run.engine.kv.free_pages), ((), 200), "all or none")

    @drawn("B17", "M6", budget_in_bytes)
    def test_budget_in_bytes(self, scenario):
        """B17: kv_budget_bytes buys as many pages as fit in it, never more; too little for one page is refused."""
        first = self.make(scenario, num_pages=1)
        first.submit([1], 1)
        first.finish()
        page, pages = first.engine.kv.stats().peak_bytes, scenario["pages"]
        budget = pages * page + int(scenario["part"] * page)
        run = self.play(scenario, kv_budget_bytes=budget)
        self.same(run.engine.kv.total_pages, pages, f"{budget} bytes, {page} a page")
        run.finish()
        self.that(run.engine.metrics().kv_peak_bytes <= budget, f"{run.engine.metrics().kv_peak_bytes}", "stay inside")
        self.refuses(starter.EngineError, lambda: self.make(scenario, kv_budget_bytes=page - 1),
                     "not even one page")
