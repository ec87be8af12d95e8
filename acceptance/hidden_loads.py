"""Hidden tests of M3: random arrivals, long tails, many seeds; a scheduler alone; sampling. Pages are plentiful."""

from __future__ import annotations

from functools import partial

from hidden_case import Hidden, drawn, load, model, settings, tokens
from m3_continuous_batching import Desk, M3ContinuousBatching
from oracle import Cache

import starter

POLICIES = ("fcfs", "priority", "shortest", "prefill-first")


def pareto(rng, low, high):
    """A length with a long tail: half of them are short, one in ten is five times as long."""
    return min(high, low + int(1.5 / (1 - rng.random()) ** 1.2 - 1))


def long_tails(rng):
    """Many short requests, and some, at least one of each, with a long prompt or a long answer."""
    made = load(rng, 14, (1, 70), (1, 60), 0.1, length=pareto, sizes={"layers": 1}, budget_tokens=rng.randint(6, 20))
    submits = [move for move in made["moves"] if move[0] == "submit"]
    long_prompt, long_answer = rng.sample(submits[:6], 2)
    long_prompt[2], long_answer[3] = tokens(rng, made, rng.randint(45, 70)), rng.randint(45, 60)
    made["settings"]["num_pages"] += 140
    return made


def many_seeds(rng):
    """Small loads, each on a model of its own."""
    return [load(rng, 4, (1, 6), (1, 6)) for _ in range(4)]


def one_token_each(rng):
    """Requests that want one token at most: there is no time between tokens."""
    return load(rng, 8, (1, 9), (0, 1), 0, sizes={"layers": 1})


def desk(rng):
    """Requests for a scheduler without a model: arrivals, cancels, ends, budgets."""
    moves = []
    for i in range(30):
        moves.append(["submit", f"r{i}", rng.randint(1, 24), rng.randint(1, 12)])
        moves += [["step", rng.choice([0, rng.randint(1, 9), rng.randint(1, 9)])] for _ in range(rng.choice([0, 1, 3]))]
        if rng.random() < 0.5:
            moves.append([rng.choice(["cancel", "cancel", "stop"]), f"r{rng.randint(max(0, i - 3), i)}"])
    return {"moves": moves, "max_running": rng.randint(2, 4), "bad": rng.choice([-1, -7, 1.5, True, None, "4"])}


def rush(rng):
    """Under each policy, requests that arrive for ever, more of them than can be served."""
    drawn = []
    for policy in POLICIES:
        others = [[rng.randint(2, 4), rng.randint(1, 3)] for _ in range(3)]
        arriving = sum(prompt + output - 1 for prompt, output in others)  # positions a step
        long = [rng.randint(20, 60), rng.randint(5, 15)]
        drawn.append({"policy": policy, "max_running": rng.randint(2, 4), "others": others,
                      "budget": rng.randint(5, min(10, arriving - 1)),
                      "mine": long if policy == "shortest" else rng.choice([long, [2, 2]])})
    return drawn


def turns(rng):
    """More requests than a step's budget serves."""
    running = rng.randint(3, 6)
    return {"running": running, "budget": rng.randint(1, running - 1), "steps": 80}


def long_prompt(rng):
    """A short request behind a long prompt, and one that generates while prompts arrive."""
    return {"short": rng.randint(1, 5), "budget": rng.randint(6, 12), "long": rng.randint(80, 150)}


def sampled(rng):
    """One request among neighbours, sampled with filters."""
    made = model(rng, vocab_size=40)
    asked = [[tokens(rng, made, rng.randint(1, 8)), rng.randint(8, 14), {
        "temperature": rng.choice([0.8, 1.5, 3.0]), "top_k": rng.choice([0, 2, 5]), "seed": rng.randrange(1000)}]
        for _ in range(4)]
    return {**made, "asked": asked, "settings": settings(rng, max_running=4, num_pages=120)}


def stream(rng):
    """How much of a stream is read before it is cancelled."""
    made = model(rng)
    return {**made, "prompt": tokens(rng, made, rng.randint(1, 9)), "read": rng.randint(2, 12),
            "settings": settings(rng, num_pages=64)}


def techniques(rng):
    """Of three requests one has a long answer."""
    made = model(rng, layers=1)
    asked = []
    for _ in range(3):
        asked += rng.sample([[tokens(rng, made, 3), rng.randint(20, 28)], *(
            [tokens(rng, made, rng.randint(1, 3)), rng.randint(2, 4)] for _ in range(2))], 3)
    return {**made, "asked": asked, "settings": {"max_running": 3}}


class HiddenLoads(Hidden):
    ready = M3ContinuousBatching.ready

    def served(self, scenario):
        """Play, look at every step, finish, and recompute the metrics."""
        run = self.play(scenario, after_step=self.nothing_idles)
        for _ in range(2_000):
            if run.engine.active:
                self.nothing_idles(run, run.step())
        run.finish()
        self.texts(run)
        self.measures(run)

    def nothing_idles(self, run, decision):
        """Nobody waits for a budget and a slot that are there (there are pages enough for all)."""
        spare = decision.budget_tokens - decision.scheduled_tokens
        self.that(not (spare and decision.waiting and len(decision.running) < run.settings["max_running"]),
                  f"waiting: {decision.waiting}, running: {decision.running} of {run.settings['max_running']}, "
                  f"{spare} tokens of the budget unused", "admit in every step whoever has a slot")

    @drawn("B14", "M3", partial(load, requests=14), times=4)
    def test_random_arrivals(self, scenario):
        """B14: whenever requests arrive, and some are cancelled, every token, page and metric is right."""
        self.served(scenario)

    @drawn("B15", "M3", long_tails, times=3)
    def test_long_tails(self, scenario):
        """B11, B15: a few very long requests among many short ones change nobody's tokens, and hold up nobody."""
        self.served(scenario)

    @drawn("B19", "M3", many_seeds, times=2)
    def test_many_seeds(self, scenarios):
        """B14, B19: the same on model after model."""
        for scenario in scenarios:
            self.served(scenario)

    @drawn("B2", "M3", one_token_each)
    def test_one_token_each(self, scenario):
        """T7: one token has no interval: TPOT of such requests does not exist, and is not 0."""
        self.served(scenario)

    @drawn("B10", "M3", desk, times=3)
    def test_scheduler_alone(self, scenario):
        """B10: whatever the budget, 0 included, each position is given out once, and slots are never lost or idle."""
        desk = Desk(self, max_running=scenario["max_running"])
        gone = set()
        for move, what, *sizes in scenario["moves"]:
            self.case = f"{move} {what} {sizes or ''}"
            if move == "submit":
                desk.submit(what, *sizes)
            elif move == "step":
                desk.step(what)
            elif not desk.done(what) and what not in gone:
                if move == "cancel":
                    desk.scheduler.cancel(what)
                else:
                    desk.scheduler.finish(what, "stop")
                gone.add(what)
                desk.sizes[what], desk.computed[what] = (1, 1), 1  # nothing more is expected of it
        self.refuses(starter.RequestError, partial(desk.scheduler.step, scenario["bad"]), f"budget {scenario['bad']!r}")
        for _ in range(2_000):
            if desk.scheduler.idle:
                break
            decision = desk.scheduler.step(0)
            self.same((decision.chunks, decision.scheduled_tokens), ((), 0), "budget 0 computes nothing")
            desk.step(9)
        desk.drain()
        self.same([name for name in desk.admitted if name not in gone],
                  [f"r{i}" for i in range(30) if f"r{i}" not in gone], "policy fcfs admits in the order of arrival")
        for i in range(scenario["max_running"]):
            desk.submit(f"last{i}", 1, 9)
        desk.step(9)
        self.same(len(desk.step(9)), scenario["max_running"], "all slots are still there")

    @drawn("V4", "M3", rush, times=2)
    def test_rush(self, scenarios):
        """V4: a request is served to its end although others keep arriving, more than can be served."""
        for scenario in scenarios:
            self.case = f"policy {scenario['policy']!r}"
            try:
                desk = Desk(self, max_running=scenario["max_running"], policy=scenario["policy"])
            except starter.RequestError:
                self.that(scenario["policy"] != "fcfs", 'policy "fcfs" is refused', "of all policies it must exist")
            else:
                self.rushed(desk, scenario)

    def rushed(self, desk, scenario):
        for step in range(800):
            for i, sizes in enumerate(scenario["others"]):
                desk.submit(f"other{step}/{i}", *sizes, priority=3)
            if step == 20:  # by now others are waiting
                desk.submit("mine", *scenario["mine"])
            desk.step(scenario["budget"])
            if step >= 20 and desk.done("mine"):
                break
        self.that(desk.done("mine"), f"{desk.computed['mine']} positions of {scenario['mine']} computed after 800 "
                  "steps", "let waiting raise a request's rank until no new arrival can pass it")

    @drawn("V4", "M3", turns, times=2)
    def test_turns(self, scenario):
        """V4: when the budget is smaller than the number of running requests they take turns."""
        running, budget = scenario["running"], scenario["budget"]
        desk, last, bound = Desk(self, max_running=running), {}, 3 * -(-running // budget)
        for i in range(running):
            desk.submit(f"r{i}", 1, 2 * scenario["steps"])
        desk.step(running)
        for step in range(scenario["steps"]):
            last.update(dict.fromkeys(desk.step(budget), step))
            gaps = [step - last.get(f"r{i}", 0) for i in range(running)]
            self.that(max(gaps) <= bound, f"steps since each of {running} got a token: {gaps}, budget {budget}",
                      "serve whoever waited longest")

    @drawn("B11", "M3", long_prompt, times=2)
    def test_long_prompt(self, scenario):
        """B11: neither a short request nor one that generates waits for a long prompt."""
        waits = []
        for times in (1, 8):
            desk = Desk(self, max_running=4)
            desk.submit("steady", 2, 200)
            desk.step(scenario["budget"])
            desk.submit("long", times * scenario["long"], 2)
            desk.step(scenario["budget"])
            desk.submit("short", scenario["short"], 2)
            for wait in range(400):
                self.that("steady" in desk.step(scenario["budget"]), f"no token for the request that generates, "
                          f"{wait} steps after the short one came", "schedule decodes first")
                if desk.computed["short"] >= scenario["short"]:
                    break
            waits.append(wait)
        self.same(waits[0], waits[1], "share the budget among prompts instead of finishing one before the next")

    @drawn("V1", "M3", sampled, times=2)
    def test_sampling(self, scenario):
        """V1: a sampled request draws the same tokens alone and in a batch, and only tokens that its filter keeps."""
        alone = []
        for prompt, most, how in scenario["asked"]:
            run = self.make(scenario)
            name = run.submit(prompt, most, request_id="x", sampling=starter.SamplingParams(**how))
            alone.append(run.finish()[name])
            self.case = f"prompt {prompt}, {how}"
            self.that(not how["top_k"] or within(run.oracle, prompt, alone[-1], how["top_k"]),
                      f"tokens {alone[-1]}", "top_k keeps the k likeliest tokens")
        run = self.make(scenario)
        names = [run.submit(prompt, most, sampling=starter.SamplingParams(**how))
                 for prompt, most, how in scenario["asked"]]
        greedy = [run.submit(scenario["asked"][0][0], 6, sampling=how) for how in (
            starter.SamplingParams(temperature=1e-9), starter.SamplingParams(temperature=2.0, top_k=1),
            starter.SamplingParams(temperature=1.0, top_p=1e-9))]
        outputs = run.finish()
        self.same([outputs[name] for name in names], alone, "give every request a generator of its own")
        self.same([outputs[name] for name in greedy], [run.oracle.tokens(scenario["asked"][0][0], 6)] * 3,
                  "temperature near 0, top_k 1 and top_p near 0 leave the likeliest token alone")
        self.that(len(set(map(tuple, alone))) > 1, f"tokens {alone}", "sampling with other prompts and seeds differs")

    @drawn("V3", "M3", stream, times=2)
    def test_stream(self, scenario):
        """V3: a token can be read as soon as it is computed; after a cancel nothing is computed, and none follows."""
        run, prompt, count = self.make(scenario), scenario["prompt"], scenario["read"]
        name = run.submit(prompt, count + 20)
        stream, wanted = run.engine.stream(name), run.oracle.tokens(prompt, count)
        for n in range(count):
            self.same(next(stream).token, wanted[n], f"token {n}")
            self.that(run.meter.tokens <= len(prompt) + n + 1, f"{run.meter.tokens} positions computed before token "
                      f"{n} was read", "stream runs engine steps only until its request has news")
        before = run.meter.tokens
        run.engine.cancel(name)
        run.engine.step()
        self.same([(event.token, event.finish_reason) for event in stream], [(None, "cancelled")],
                  "the terminal event, and nothing else, is left")
        metrics = run.engine.metrics()
        self.same((run.meter.tokens, run.engine.kv.free_pages, metrics.running, metrics.kv_bytes), (before, 64, 0, 0),
                  "a cancelled request computes nothing and holds nothing")

    @drawn("P", "M3", techniques)
    def test_techniques(self, scenario):
        """P: continuous batching needs fewer steps than static, static fewer than one request at a time."""
        steps = {}
        for batching in ("continuous", "static", "none"):
            run = self.make(scenario, batching=batching)
            for prompt, most in scenario["asked"]:
                run.submit(prompt, most)
            run.finish()
            steps[batching] = len(run.decisions)
        self.that(steps["continuous"] < 0.8 * steps["static"] < 0.8 * steps["none"], f"steps: {steps}",
                  "a freed slot is used at once; a batch shares its steps")


def within(oracle, prompt, made, top_k):
    """Is each token among the likeliest ``top_k`` after those before it?"""
    cache: Cache = [([], []) for _ in range(oracle.config.layers)]
    for position, token in enumerate([*prompt, *made[:-1]]):
        logits = oracle._forward(token, position, cache)
        if position >= len(prompt) - 1:
            least = sorted(logits)[-top_k]
            if logits[made[position - len(prompt) + 1]] < least - 1e-9:
                return False
    return True
