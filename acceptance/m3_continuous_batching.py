"""M3 · Continuous batching: requests join and leave in every step, nobody starves, and the numbers are honest."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import PATIENCE, Case
from observed import Run

import starter


class Desk:
    """A scheduler alone, without a model, checked in every step: the budget, and each position once and in order."""

    def __init__(self, case, **settings):
        self.case, self.scheduler = case, starter.ContinuousBatchScheduler(**settings)
        self.sizes, self.computed, self.admitted = {}, {}, []

    def submit(self, name, prompt, max_tokens, priority=0):
        self.sizes[name], self.computed[name] = (prompt, max_tokens), 0
        self.scheduler.submit(starter.Request(name, (1,) * prompt, max_tokens, priority=priority))

    def step(self, budget):
        """The chunks of one step: {id: (start, count)}."""
        decision = self.scheduler.step(budget)
        chunks = {chunk.request_id: (chunk.start, chunk.count) for chunk in decision.chunks}
        scheduled = sum(count for _, count in chunks.values())
        self.case.that(len(chunks) == len(decision.chunks) and scheduled == decision.scheduled_tokens <= budget,
                       f"{decision.scheduled_tokens} tokens in {decision.chunks}, budget {budget}",
                       "respect the budget")
        for name, (start, count) in chunks.items():
            prompt, max_tokens = self.sizes[name]
            known = max(prompt, self.computed[name] + 1)
            self.case.that(start == self.computed[name] and start + count <= min(known, prompt + max_tokens - 1),
                           f"{name} (prompt {prompt}, max_tokens {max_tokens}): {count} positions from {start} on, "
                           f"after {self.computed[name]}", "compute each known position once, in order")
            self.computed[name] += count
        self.admitted += decision.admitted
        return chunks

    def done(self, name):
        """Has it computed all but its last token?"""
        return self.computed[name] == sum(self.sizes[name]) - 1

    def drain(self, budget=8):
        for _ in range(PATIENCE):
            if self.scheduler.idle:
                break
            self.step(budget)
        self.case.that(all(map(self.done, self.sizes)), f"computed {self.computed} of {self.sizes}",
                       "every request is computed to its end")


class M3ContinuousBatching(Case):
    def ready(self):
        desk = Desk(self)
        for name in "ab":
            desk.submit(name, 1, 2)
        self.that(len(desk.step(8)) == 2, "two short requests, a budget of 8: the step computes for one of them alone",
                  "continuous batching is still to be written; nothing in this milestone counts before")

    # -------------------------------------------------------------------------------------- the scheduler alone

    def test_every_position_once(self):
        """M3: whatever arrives, every request is given exactly its prompt + max_tokens - 1 positions."""
        desk = Desk(self, max_running=3)
        for i in range(30):
            desk.submit(f"r{i}", self.rng.randint(1, 20), self.rng.randint(1, 12))
            desk.step(self.rng.randint(0, 9))
        desk.drain()

    def test_budget_zero(self):
        """B10: a step with budget 0 schedules nothing and loses nothing; a negative or float budget is refused."""
        desk = Desk(self)
        desk.submit("r", 5, 3)
        for budget in (0, 2, 0, 2, 0):
            self.same(bool(desk.step(budget)), budget > 0, f"budget {budget}")
        wrong: tuple[Any, ...] = (-1, 1.5, True, None, "4")
        for no_budget in wrong:
            self.refuses(starter.RequestError, partial(desk.scheduler.step, no_budget), f"budget {no_budget!r}")
        desk.drain()

    def test_first_come_first_served(self):
        """V4: with policy "fcfs" requests are admitted in the order of arrival, whatever their lengths."""
        desk = Desk(self, max_running=2, policy="fcfs")
        for i in range(12):
            desk.submit(f"r{i}", self.rng.randint(1, 30), self.rng.randint(1, 9))
            desk.step(i % 3)
        desk.drain()
        self.same(desk.admitted, [f"r{i}" for i in range(12)], "no newer request overtakes an older one that would fit")

    def test_long_request_in_endless_short_ones(self):
        """V4: a long request is served although short ones arrive in every step, for ever; and the other way round."""
        for mine, others in (((60, 20), (2, 2)), ((2, 2), (40, 20))):
            desk = Desk(self, max_running=3)
            for i in range(6):
                desk.submit(f"before{i}", *others)
            desk.submit("mine", *mine)
            for step in range(500):
                for i in range(3):  # more than can be served
                    desk.submit(f"after{step}/{i}", *others)
                desk.step(8)
                if desk.done("mine"):
                    break
            self.that(desk.done("mine"), f"(prompt, max_tokens) {mine} among endless {others}: "
                      f"{desk.computed['mine']} positions computed after 500 steps",
                      "serve by age, or let waiting raise a request's rank")

    def test_no_policy_starves(self):
        """V4: whatever the policy, a waiting request starts although better-ranked ones keep arriving, for ever."""
        for policy in ("fcfs", "priority", "shortest", "prefill-first"):
            self.case = f"policy {policy!r}"
            try:
                desk = Desk(self, max_running=3, policy=policy)
            except starter.RequestError:  # of these names, "fcfs" alone is asked for
                self.that(policy != "fcfs", 'policy "fcfs" is refused', "it is the default, and must exist")
                continue
            for step in range(500):
                for i in range(3):  # shorter, more urgent, and more than can be served
                    desk.submit(f"better{step}/{i}", 2, 2, priority=3)
                if step == 0:  # by its arrival alone it is the last of those that wait
                    desk.submit("mine", 30, 10)
                desk.step(8)
                if desk.computed["mine"]:
                    break
            self.that(desk.computed["mine"] > 0, "it has not started after 500 steps",
                      "let waiting raise a request's rank until no new arrival can pass it")

    def test_short_request_behind_long_prompt(self):
        """B11: a short request does not wait until a long prompt that came before it is computed."""
        waits = []
        for length in (100, 1_000):
            desk = Desk(self, max_running=4)
            desk.submit("long", length, 2)
            desk.step(8)
            desk.submit("short", 3, 2)
            waits.append(next(step for step in range(PATIENCE) if desk.step(8) and desk.computed["short"] >= 3))
        self.same(waits[0], waits[1], "share the budget among prompts instead of finishing one before the next")

    def test_decode_gap(self):
        """V4: while prompts keep arriving, a request that generates gets a token in every step that could afford it."""
        desk = Desk(self, max_running=4)
        desk.submit("steady", 3, 60)
        desk.step(8)
        for i in range(50):
            desk.submit(f"prompt{i}", 50, 1)
            self.that("steady" in desk.step(8), f"no token for the generating request in step {i + 1}",
                      "schedule decodes first; prompts get what is left of the budget")

    def test_turns_under_a_small_budget(self):
        """V4: when the budget is smaller than the number of running requests they take turns."""
        desk, last = Desk(self, max_running=4), {}
        for i in range(4):
            desk.submit(f"r{i}", 1, 40)
        desk.step(8)
        for step in range(60):
            last.update(dict.fromkeys(desk.step(2), step))
            for i in range(4):
                self.that(step - last.get(f"r{i}", 0) <= 6, f"r{i} got nothing for {step - last.get(f'r{i}', 0)} steps",
                          "budget 2, 4 requests: each should come every second step")

    def test_cancel_in_the_scheduler(self):
        """V3: a cancelled request gets no further chunk, its slot is free, and its id may be used again."""
        desk = Desk(self, max_running=2)
        for i in range(20):  # ten times as many as run at a time: a slot that is not given back would be missed
            desk.submit(f"r{i}", 5, 9)
            for _ in range(i % 4):
                desk.step(4)
            desk.scheduler.cancel(f"r{i}")
            self.that(f"r{i}" not in desk.step(4), f"r{i} was scheduled after its cancel", "remove it from every queue")
            desk.sizes[f"r{i}"], desk.computed[f"r{i}"] = (1, 1), 1  # nothing more is expected of it
        self.refuses(starter.UnknownRequestError, lambda: desk.scheduler.cancel("r0"), "it is not live")
        desk.submit("r0", 6, 2)
        desk.drain()

    def test_end_of_sequence_in_the_scheduler(self):
        """M3: finish(id, "stop"), said by whoever computes the tokens, ends a request before max_tokens."""
        desk = Desk(self)
        desk.submit("r", 3, 50)
        desk.step(8)
        desk.step(8)
        desk.scheduler.finish("r", "stop")
        decision = desk.scheduler.step(8)
        self.same((decision.chunks, decision.finished, desk.scheduler.idle), ((), ("r",), True), "r has ended")

    # ------------------------------------------------------------------------------------------------ the engine

    def test_requests_are_batched(self):
        """M3: requests share steps: several of them compute in one step, and together they need far fewer steps."""
        run = Run(self, max_running=4)
        for _ in range(4):
            run.submit(run.prompt(4), 10)
        run.finish()
        self.that(max(len(decision.chunks) for decision in run.decisions) == 4 and len(run.decisions) <= 14,
                  f"requests in each step: {[len(decision.chunks) for decision in run.decisions]}",
                  "sequential service would need 40 steps, a batch of four about 10")

    def test_freed_slot_is_used_at_once(self):
        """M3: when a short request ends, a waiting one takes its slot while a long one goes on (not static)."""
        run = Run(self, max_running=2)
        long, _, third = run.submit(run.prompt(3), 40), run.submit(run.prompt(3), 2), run.submit(run.prompt(3), 2)
        run.finish()
        ended, began = run.lives[long].token_times[-1], run.lives[third].token_times[0]
        self.that(began < ended - 30, f"the third request began at {began}, the long one ended at {ended}",
                  "admit in every step, not when the whole batch has ended")

    def test_joining_changes_no_token(self):
        """V1: a request's tokens are the same alone, in any batch, and when others join or leave while it runs."""
        run = Run(self, max_running=5, budget_tokens=11)
        for _ in range(15):
            run.submit(run.prompt(self.rng.randint(1, 14)), self.rng.randint(1, 14))
            for _ in range(self.rng.randint(0, 3)):
                run.step(self.rng.choice([None, 0, 1, 5, 30]))
        run.finish()

    def test_streaming_is_incremental(self):
        """M3: a token can be read as soon as it is computed, long before the request has ended."""
        run = Run(self)
        stream = run.engine.stream(run.submit(run.prompt(5), 20))
        for n in range(10):
            next(stream)
            self.that(run.meter.tokens <= 5 + n + 1, f"{run.meter.tokens} positions computed before token {n} was read",
                      "stream runs engine steps only until its request has news")

    def test_cancel_inside_the_stream_loop(self):
        """V3, B8: after cancel no token follows, nothing is computed for it, and its stream ends once."""
        run = Run(self)
        name, seen = run.submit(run.prompt(4), 30), []
        for event in run.engine.stream(name):
            seen.append((event.token is not None, event.finish_reason))
            if len(seen) == 3:
                run.engine.cancel(name)
                run.engine.step()
        self.same(seen, [(True, None)] * 3 + [(False, "cancelled")], "the terminal event, and nothing else, is left")
        self.same(run.meter.tokens, 4 + 2, "a cancelled request is not computed any further")
        metrics = run.engine.metrics()
        self.same((run.engine.kv.free_pages, metrics.running, metrics.kv_bytes), (run.engine.kv.total_pages, 0, 0),
                  "its pages are free, and the gauges say so")

    def test_cancel_leaves_neighbours_alone(self):
        """V1, V3: cancelling at any moment, finished requests included, changes nobody else's tokens."""
        run = Run(self, max_running=3)
        names = [run.submit(run.prompt(6), 8) for _ in range(8)]
        for name in names[::2]:
            for _ in range(self.rng.randint(0, 4)):
                run.step()
            if name in run.engine.active:
                run.cancel(name)
        run.finish()

    def test_id_reused_right_after_cancel(self):
        """B8: the id of a cancelled request can be used at once, and the old request never touches the new one."""
        run = Run(self)
        for _ in range(4):
            run.submit(run.prompt(9), 12, request_id="x")
            for _ in range(self.rng.randint(0, 4)):
                run.step()
            self.same(run.engine.active, ("x",), "the late cancel of the old x must not end the new x")
            run.cancel("x")
        run.submit(run.prompt(5), 10, request_id="x")
        run.finish()
        self.same(run.lives["x"].reason, "length", "the late cancel of the old x must not end the new x")

    def test_sampling_is_isolated(self):
        """V1: a seeded sampling request draws the same tokens alone and among neighbours; temperature ~0 is greedy."""
        sampling, outputs = starter.SamplingParams(temperature=1.5, seed=42), []
        weights_seed, model = self.rng.randrange(2**31), Run(self).scenario
        prompt = [1, 2, 3]
        for neighbours in (0, 3):
            run = Run(self, model, weights_seed, budget_tokens=6)
            for _ in range(neighbours):
                run.submit(run.prompt(4), 9, sampling=starter.SamplingParams(temperature=2.0))
            name = run.submit(prompt, 12, sampling=sampling)
            cold = run.submit(prompt, 6, sampling=starter.SamplingParams(temperature=1e-9, seed=1))
            tokens = run.finish()
            outputs.append(tokens[name])
            self.same(tokens[cold], run.oracle.tokens(prompt, 6), "a tiny temperature must neither overflow nor sample")
        self.same(outputs[0], outputs[1], "give every request a generator of its own")
        self.that(len(set(outputs[0])) > 1, f"tokens {outputs[0]}", "temperature 1.5 should not repeat one token")

    def test_metrics_agree_with_the_events(self):
        """T7, P: TTFT, TPOT and the counts equal what the harness computes from its own clock and events."""
        run = Run(self, max_running=3, budget_tokens=7)
        for i in range(10):
            run.submit(run.prompt(self.rng.randint(1, 12)), self.rng.randint(0, 9), request_id=f"r{i}")
            run.step()
        run.submit(run.prompt(3), 50, request_id="victim")
        run.cancel("victim")
        run.finish()
        times = {name: [event.time for event in life.events if event.token is not None] for name,
                 life in run.lives.items()}
        ttft = [at[0] - run.lives[name].submitted for name, at in times.items() if at]
        tpot = [(at[-1] - at[0]) / (len(at) - 1) for at in times.values() if len(at) > 1]
        metrics = run.engine.metrics()
        for field, got, expected in [
                ("ttft.count", metrics.ttft.count, len(ttft)), ("ttft.mean", metrics.ttft.mean, sum(ttft) / len(ttft)),
                ("ttft.max", metrics.ttft.max, max(ttft)), ("tpot.count", metrics.tpot.count, len(tpot)),
                ("tpot.mean", metrics.tpot.mean, sum(tpot) / len(tpot)), ("submitted", metrics.submitted, 11),
                ("output_tokens", metrics.output_tokens, sum(map(len, times.values()))),
                ("computed_tokens", metrics.computed_tokens, run.meter.tokens),
                ("finished + cancelled", sum(metrics.finished.values()), 11),
                ("cancelled", metrics.finished["cancelled"], 1), ("running", metrics.running + metrics.waiting, 0)]:
            self.that(abs(got - expected) < 1e-9, f"metrics().{field} is {got}, recomputed {expected}",
                      "derive every metric "
                      "from the events; starter/metrics.py defines them")
        stats = run.engine.kv.stats()
        self.same((metrics.kv_peak_pages, metrics.kv_peak_bytes), (stats.peak_pages, stats.peak_bytes),
                  "one truth about pages")
        self.that(metrics.kv_peak_pages >= run.peak_pages > 0,
                  f"kv_peak_pages {metrics.kv_peak_pages}, the harness saw "
                  f"{run.peak_pages}", "the peak is the most pages ever used at once")
        self.same(list(metrics.active_requests), [len(decision.chunks) for decision in run.decisions],
                  "active_requests: the number of requests in each step")
        scheduled = [decision.scheduled_tokens for decision in run.decisions if decision.chunks]
        self.that(abs(metrics.batch_utilization - sum(scheduled) / (7 * len(scheduled))) < 1e-9,
                  f"batch_utilization {metrics.batch_utilization}", "scheduled tokens / budget, over steps with work")

    def test_metrics_without_samples(self):
        """T7: TPOT of requests with fewer than two tokens does not exist; asking for it is no division by zero."""
        run = Run(self)
        self.same(run.engine.metrics().ttft.count, 0, "no request yet")
        run.submit(run.prompt(2), 1)
        run.finish()
        metrics = run.engine.metrics()
        self.same((metrics.ttft.count, metrics.tpot.count, metrics.tpot.mean), (1, 0, None),
                  "one token has no interval")
