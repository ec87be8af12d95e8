"""M6 · End to end: random loads, faults and too little memory; nobody is lost, and everything is on the record."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any, cast

from harness import GENUINE, ROOT, Case, Meter, item_bytes, tiny_document, tiny_scenario
from observed import Run
from oracle import CLEAR, Oracle

import starter


class M6EndToEnd(Case):
    # ----------------------------------------------------------------------------------------------------- loads

    def storm(self, requests, long_tail=False, **settings):
        """Random arrivals, lengths, budgets and cancels on a random configuration; everything is checked on the way."""
        rng, size = self.rng, self.rng.randint(1, 9)
        scenario = tiny_scenario(rng, layers=1, eos_tokens=[rng.randrange(24)])
        run = Run(self, scenario, **{"page_size": size, "num_pages": -(-rng.randint(20, 60) // size) + 1,
                                     "budget_tokens": rng.randint(1, 20), "max_running": rng.randint(1, 6), **settings})
        refused = 0
        for i in range(requests):
            tail = long_tail and rng.random() < 0.15
            try:
                run.submit(run.prompt(rng.randint(1, 30 if tail else 8)), rng.randint(0, 60 if tail else 8),
                           request_id=f"r{i}")
            except starter.CapacityError:
                refused += 1
            for _ in range(rng.choice([0, 0, 1, 3])):
                run.step(rng.choice([None, None, 0, rng.randint(1, 12)]))
            if run.engine.active and rng.random() < 0.2:
                run.cancel(rng.choice(run.engine.active))
        run.finish()
        metrics = run.engine.metrics()
        self.same((metrics.submitted, sum(metrics.finished.values())), (requests - refused, requests - refused),
                  "every accepted request ends exactly once")
        self.same(metrics.output_tokens, sum(len(life.token_times) for life in run.lives.values()),
                  "tokens are counted once")

    def test_random_arrivals(self):
        """B14, B18, B19: under random arrivals, cancels, budgets and page sizes every token and every page is right."""
        for _ in range(8):
            self.storm(14)

    def test_long_tails(self):
        """B11, B15: a few very long requests among many short ones."""
        for _ in range(3):
            self.storm(16, long_tail=True, num_pages=40, page_size=3)

    def test_memory_budget_in_bytes(self):
        """B17: kv_budget_bytes buys as many pages as fit in it, never more; too little for one page is refused."""
        run = Run(self, tiny_scenario(self.rng, layers=1), num_pages=2)
        run.submit(run.prompt(3), 2)
        run.finish()
        page, model = run.engine.kv.stats().peak_bytes, run.scenario.model  # one page of 4 tokens was used
        [life] = run.lives.values()
        store = cast("Any", run.meter.store)
        item = item_bytes(number for slot in range(3) for row in store.read(life.pages[0], slot) for number in row)
        self.that(page >= item * 2 * 4 * model.layers * model.kv_heads * model.width // model.heads,
                  f"{page} bytes a page; the numbers in it need {item} bytes each",
                  "a page holds keys and values of all layers; claim the bytes that they take")
        small = Run(self, run.scenario, kv_budget_bytes=5 * page + page // 2)
        self.same(small.engine.kv.total_pages, 5, f"{5.5} pages of {page} bytes")
        for _ in range(6):
            small.submit(small.prompt(7), 9)
        small.finish()
        self.that(small.engine.metrics().kv_peak_bytes <= 5 * page, f"{small.engine.metrics().kv_peak_bytes}",
                  "stay inside")
        self.refuses(starter.EngineError, lambda: Run(self, run.scenario, kv_budget_bytes=page - 1),
                     "not even one page")

    # ---------------------------------------------------------------------------------------------------- faults

    def test_a_fault_ends_one_request(self):
        """M6: a request whose computation fails ends with "error" and its reason; its neighbours do not notice."""
        scenario, weights_seed = tiny_scenario(self.rng), self.rng.randrange(2**31)
        healthy = Run(self, scenario, weights_seed)
        prompts = [healthy.prompt(4) for _ in range(5)]
        outputs = [healthy.oracle.tokens(prompt, 8) for prompt in prompts]
        seen = {token for tokens in prompts + outputs for token in tokens}
        poison = next(token for token in range(scenario.model.vocab_size + 1) if token not in seen)
        if poison == scenario.model.vocab_size:
            return  # the neighbours use every token there is; other seeds leave one
        run = Run(self, scenario, weights_seed, Meter(poison), max_running=6)
        for prompt in prompts[:3]:
            run.submit(prompt, 8)
        run.step()
        bad = [run.submit([prompts[0][0], poison], 8), run.submit([poison] * 20, 8)]
        for prompt in prompts[3:]:
            run.submit(prompt, 8)
        run.finish()
        for name in bad:
            last = run.lives[name].events[-1]
            self.same((last.finish_reason, bool(last.error)), ("error", True), "a failed request says why it ended")
        self.same(run.engine.metrics().finished["error"], 2, "errors are counted")

    def test_close_with_live_requests(self):
        """B16: close ends what is live, returns every page, may be called twice, and a closed engine says so."""
        run = Run(self)
        for _ in range(6):
            run.submit(run.prompt(8), 8)
        run.step()
        self.same(len(run.engine.active), 6, "after one step all of them live")
        run.engine.close()
        run.engine.close()
        self.same(run.engine.kv.free_pages, run.engine.kv.total_pages, "close returns every page")
        self.refuses(starter.EngineError, lambda: run.engine.submit([1], 1), "the engine is closed")

    # --------------------------------------------------------------------------------------------------- streams

    def test_streams_in_any_order(self):
        """M3, M6: streams can be read in turns, late, by several readers in a row, or never; nothing is lost."""
        run = Run(self, max_running=2)
        prompts = [run.prompt(5) for _ in range(5)]
        names = [run.engine.submit(prompt, 6) for prompt in prompts]
        streams = [run.engine.stream(name) for name in names[:3]]
        got = [[next(stream).token for stream in streams[::-1]] for _ in range(3)]  # in turns, the newest first
        for i in range(3):
            rest = [event.token for event in run.engine.stream(names[i])]  # goes on where the last reader stopped
            self.same([row[2 - i] for row in got] + rest, run.oracle.tokens(prompts[i], 6), f"tokens of {names[i]}")
        run.engine.run()
        self.same(run.engine.active, (), "the two that nobody reads end as well")
        self.same([event.token for event in run.engine.stream(names[4])], run.oracle.tokens(prompts[4], 6),
                  "read afterwards")

    def test_streams_from_threads(self):
        """M6: several threads may read streams of one engine; each gets the tokens of its request."""
        run = Run(self)
        prompts = [run.prompt(4) for _ in range(6)]
        names, got = [run.engine.submit(prompt, 8) for prompt in prompts], {}
        threads = [Thread(target=lambda i=i: got.update({i: [event.token for event in run.engine.stream(names[i])]}),
                          daemon=True)
                   for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        self.same([got.get(i) for i in range(6)], [run.oracle.tokens(prompt, 8) for prompt in prompts],
                  "one step at a time")

    def test_generate(self):
        """M6: generate continues several prompts together; when one is refused it raises and leaves nothing behind."""
        run = Run(self)
        prompts = [run.prompt(length) for length in (1, 5, 9)]
        self.same([list(tokens) for tokens in run.engine.generate(prompts, max_tokens=7)],
                  [run.oracle.tokens(prompt, 7) for prompt in prompts], "a list of tokens for each prompt")
        self.refuses(starter.RequestError, lambda: run.engine.generate([prompts[0], []], max_tokens=2),
                     "an empty prompt")
        self.same((run.engine.active, run.engine.kv.free_pages), ((), 64), "all or none")

    # ------------------------------------------------------------------------------------------------ the record

    def test_timeline(self):
        """T6: the timeline holds every submit, token, cancel and end, in order, and is written as JSON lines."""
        run = Run(self, max_running=2)
        names = [run.submit(run.prompt(4), 5) for _ in range(4)]
        run.step()
        run.cancel(names[3])
        outputs = run.finish()
        events = list(run.engine.timeline)
        for name in names:
            mine = [event for event in events if event.get("request") == name]
            kinds = [event["event"] for event in mine]
            self.same((kinds.count("submit"), kinds.count("finish"), kinds.count("cancel")),
                      (1, 1, int(name == names[3])), name)
            if name != names[3]:
                self.same([event["token"] for event in mine if event["event"] == "token"], outputs[name],
                          f"tokens of {name}")
        self.same(len([event for event in events if event["event"] == "step"]), len(run.decisions), "one event a step")
        times = [event["time"] for event in events]
        self.same(times, sorted(times), "time does not run backwards")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "timeline.jsonl")
            run.engine.timeline.write(path)
            lines = path.read_text(encoding="utf-8").splitlines()
        self.same([json.loads(line) for line in lines], json.loads(json.dumps(events)), "a line for each event")
        from starter.metrics import Metrics
        self.same(Metrics.of(json.loads(line) for line in lines), run.engine.metrics(),
                  "metrics are functions of the timeline")

    def test_same_seed_same_timeline(self):
        """T2, T6: the same requests on the same weights give the same timeline, event for event."""
        shape, weights_seed, load = self.rng.random(), self.rng.randrange(2**31), self.rng.random()
        timelines = []
        for _ in range(2):
            run, rng = Run(self, tiny_scenario(Random(shape)), weights_seed, num_pages=9), Random(load)
            for i in range(10):
                run.submit([rng.randrange(24) for _ in range(rng.randint(1, 9))], rng.randint(1, 9), request_id=f"r{i}",
                           sampling=starter.SamplingParams(temperature=rng.choice([0.0, 1.0])))
                run.step()
                if run.engine.active and rng.random() < 0.3:
                    run.cancel(rng.choice(run.engine.active))
            run.finish()
            timelines.append(list(run.engine.timeline))
        self.same(timelines[0], timelines[1], "no dependence on hash order, wall-clock time or global random numbers")

    def test_each_technique_gains(self):
        """P, M6: continuous batching needs fewer steps than static, static fewer than one request at a time."""
        steps, scenario, weights_seed = {}, tiny_scenario(self.rng, layers=1), self.rng.randrange(2**31)
        for batching in ("continuous", "static", "none"):
            run = Run(self, scenario, weights_seed, batching=batching, max_running=3)
            for i in range(9):
                run.submit([1 + i, 2, 3], 24 if i % 3 == 0 else 3)
            run.finish()
            steps[batching] = len(run.decisions)
        self.that(steps["continuous"] < 0.8 * steps["static"] < 0.8 * steps["none"], f"steps: {steps}",
                  "a freed slot is used at once; a batch shares its steps")

    def test_driver(self):
        """C4: the driver runs a scenario and exits with 0 if the output is golden, 1 if it differs, 2 on bad input."""
        from starter.base.weights import seeded_weights
        document = tiny_document(self.rng, layers=1)
        model = tiny_scenario(Random(0), **document["model"]).model
        prompts = {f"r{i}": [self.rng.randrange(24) for _ in range(4 + i)] for i in range(3)}
        while True:  # until no token is a near tie
            seed = self.rng.randrange(2**31)
            oracle = Oracle(model, seeded_weights(model, seed))
            steps = {name: oracle.generate(prompt, 6) for name, prompt in prompts.items()}
            if min(step.lead for mine in steps.values() for step in mine) >= CLEAR:
                break
        tokens = {name: [step.token for step in mine] for name, mine in steps.items()}
        document.update(weights={"source": "seeded", "seed": seed}, golden={"tokens": tokens, "smallest_margin": 0.0},
                        requests=[{"request_id": name, "prompt_tokens": prompt, "max_tokens": 6} for name,
                                  prompt in prompts.items()])
        wrong = json.loads(json.dumps(document))
        wrong["golden"]["tokens"]["r1"][3] = (tokens["r1"][3] + 1) % model.vocab_size
        for text, code in ((json.dumps(document), 0), (json.dumps(wrong), 1), ("{", 2)):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "fixture.json")
                path.write_text(text, encoding="utf-8")
                done = subprocess.run([sys.executable, str(ROOT / "starter" / "driver.py"), "--fixture", str(path)],
                                      cwd=ROOT, capture_output=True, timeout=60, check=False)
            self.same((done.returncode, b"Traceback" in done.stderr), (code, False),
                      (done.stdout[-300:] + done.stderr).decode(errors="replace"))

    def test_nothing_was_tampered_with(self):
        """X4: computing leaves the clocks, the random numbers, the interpreter's exits and the test framework alone."""
        run = Run(self)
        run.submit(run.prompt(3), 3)
        run.finish()
        for owner, name, genuine in GENUINE:
            self.that(getattr(owner, name) is genuine, f"{owner.__name__}.{name} was replaced", "measure honestly")
