"""The request-stream generator: the same everywhere, distributed as promised, valid for the model it is drawn for."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from starter.errors import SchemaError
from starter.schema import ModelConfig, Request, SamplingParams, Scenario, ScenarioEvent, load_scenario, parse_scenario
from starter.workloads.draw import (
    ARRIVALS,
    DEFAULT_MODEL,
    LENGTHS,
    Workload,
    generate_requests,
    generate_scenario,
    main,
)
from tests.paths import ROOT

EVERYTHING = Workload(seed=7, requests=40, arrivals="bursty", rate=0.3, burst=3, prompt="long-tailed", output="mixed",
                      prefix_share=0.4, prefix_tokens=11, cancel_share=0.3, sample_share=0.5)
GOLDEN = {  # sha256 of what stream_digest writes down, recorded once; every platform and Python version must agree
    EVERYTHING: "bcea4dd02beacdd950b45bf79d8dbca7c7a4fbc67b2d4eff3d5aaac0b2fda03a",
    Workload(seed=2**63 - 1, requests=30, prompt="short", output="long-tailed", rate=7.0):
        "5041b6ef70d7a88a24f83e7cc4c0d3376d6ea4a9394f1a11ad4fa6c674720d7f",
}


def requests_of(model: ModelConfig = DEFAULT_MODEL, **options: Any) -> tuple[Request, ...]:
    return generate_requests(Workload(**options), model)[0]


def stream_digest(requests: tuple[Request, ...], events: tuple[ScenarioEvent, ...]) -> str:
    lines = [[r.request_id, r.prompt_tokens, r.max_tokens, r.arrival, r.sampling.seed] for r in requests]
    return hashlib.sha256(json.dumps([lines, [[e.step, e.cancel] for e in events]]).encode()).hexdigest()


class Case(unittest.TestCase):
    def assertShare(self, count: int, total: int, probability: float) -> None:
        """Within five standard deviations of a binomial count; the seeds are fixed, so this holds or fails for good."""
        deviation = math.sqrt(total * probability * (1 - probability))
        self.assertLessEqual(abs(count - total * probability), 5 * deviation, f"{count} of {total}, not {probability}")


class ReproducibleTest(Case):
    def test_golden_streams(self) -> None:
        for workload, digest in GOLDEN.items():
            with self.subTest(seed=workload.seed):
                self.assertEqual(stream_digest(*generate_requests(workload, DEFAULT_MODEL)), digest)

    def test_the_seed_decides_everything(self) -> None:
        again = dataclasses.replace(EVERYTHING)
        self.assertEqual(generate_scenario(again), generate_scenario(EVERYTHING))
        digests = {stream_digest(*generate_requests(dataclasses.replace(EVERYTHING, seed=seed), DEFAULT_MODEL))
                   for seed in range(50)}
        self.assertEqual(len(digests), 50)

    def test_aspects_are_independent(self) -> None:
        """Another choice in one field leaves what the others decide as it was."""
        requests, _ = generate_requests(EVERYTHING, DEFAULT_MODEL)
        for change, same in (
                ({"arrivals": "steady"}, ("prompt_tokens", "max_tokens", "sampling")),
                ({"rate": 2.0, "burst": 1}, ("prompt_tokens", "max_tokens", "sampling")),
                ({"cancel_share": 1.0}, ("prompt_tokens", "max_tokens", "sampling", "arrival")),
                ({"sample_share": 0.0}, ("prompt_tokens", "max_tokens", "arrival")),
                ({"output": (1, 1)}, ("prompt_tokens", "sampling", "arrival"))):
            other, _ = generate_requests(dataclasses.replace(EVERYTHING, **change), DEFAULT_MODEL)
            for name in same:
                with self.subTest(change=change, same=name):
                    self.assertEqual([getattr(r, name) for r in other], [getattr(r, name) for r in requests])
        for short, long in zip(requests_of(**{**vars(EVERYTHING), "prompt": "short"}), requests):
            shared = min(len(short.prompt_tokens), len(long.prompt_tokens))
            self.assertEqual(short.prompt_tokens[:shared], long.prompt_tokens[:shared])

    def test_more_requests_leave_the_first_as_they_were(self) -> None:
        few, events = generate_requests(EVERYTHING, DEFAULT_MODEL)
        more, more_events = generate_requests(dataclasses.replace(EVERYTHING, requests=100), DEFAULT_MODEL)
        self.assertEqual(more[:40], few)
        self.assertLessEqual(set(events), set(more_events))


class ArrivalTest(Case):
    def arrivals(self, **options: Any) -> list[int]:
        steps = [request.arrival for request in requests_of(prompt=(1, 1), output=(1, 1), **options)]
        self.assertEqual(steps, [float(int(step)) for step in steps])
        self.assertEqual(steps, sorted(steps))
        return [int(step) for step in steps]

    def test_steady(self) -> None:
        for rate in ("0.25", "0.5", "1", "2", "3", "0.003"):
            with self.subTest(rate=rate):
                wanted = [math.floor(i / Fraction(rate)) for i in range(50)]
                self.assertEqual(self.arrivals(arrivals="steady", requests=50, rate=float(rate)), wanted)

    def test_given_steps(self) -> None:
        self.assertEqual([r.arrival for r in requests_of(requests=3, arrivals=[5, 0, 10**9])], [5.0, 0.0, 1e9])

    def test_poisson_gaps_are_exponential(self) -> None:
        """Against 1 - exp(-x), with steps so short that rounding to steps does not show."""
        for seed in (1, 2):
            steps = self.arrivals(seed=seed, arrivals="poisson", requests=4_000, rate=0.001)
            gaps = [(b - a) / 1000 for a, b in pairwise(steps)]
            for x in (0.05, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0):
                with self.subTest(seed=seed, x=x):
                    self.assertShare(sum(gap <= x for gap in gaps), len(gaps), 1 - math.exp(-x))

    def test_poisson_gaps_are_independent(self) -> None:
        steps = self.arrivals(arrivals="poisson", requests=4_000, rate=0.001)
        above = [b - a > 1000 * math.log(2) for a, b in pairwise(steps)]  # of the median
        self.assertShare(sum(a == b for a, b in pairwise(above)), len(above) - 1, 0.5)

    def test_poisson_counts_of_a_step(self) -> None:
        """P(k arrivals) = rate^k exp(-rate) / k!"""
        rate = 1.5
        steps = self.arrivals(arrivals="poisson", requests=6_000, rate=rate)
        counts = Counter(Counter(steps)[step] for step in range(1, steps[-1]))
        for k in range(6):
            with self.subTest(k=k):
                self.assertShare(counts[k], steps[-1] - 1, rate**k * math.exp(-rate) / math.factorial(k))

    def test_bursts(self) -> None:
        steps = self.arrivals(arrivals="bursty", requests=6_000, rate=0.001, burst=6)
        bursts = [steps[i:i + 6] for i in range(0, len(steps), 6)]
        self.assertTrue(all(len(set(burst)) == 1 for burst in bursts))
        gaps = [(b[0] - a[0]) / 6_000 for a, b in pairwise(bursts)]
        self.assertShare(sum(gap <= 1 for gap in gaps), len(gaps), 1 - math.exp(-1))
        self.assertEqual(self.arrivals(arrivals="bursty", requests=30, burst=30), [0] * 30)

    def test_all_patterns_have_the_same_mean_rate(self) -> None:
        for arrivals in ARRIVALS:
            with self.subTest(arrivals=arrivals):
                steps = self.arrivals(arrivals=arrivals, requests=8_000, rate=0.5, burst=4)
                self.assertAlmostEqual(8_000 / steps[-1], 0.5, delta=0.05)


class LengthTest(Case):
    """The default model's context is 256, so that half of it is 128."""

    def lengths(self, kind: str) -> list[int]:
        requests = requests_of(requests=4_000, prompt=kind, output=(1, 1))
        return [len(request.prompt_tokens) for request in requests]

    def test_ranges(self) -> None:
        for kind, low, high in (("short", 1, 8), ("long", 64, 128), ("mixed", 1, 128), ("long-tailed", 4, 128)):
            with self.subTest(kind=kind):
                lengths = self.lengths(kind)
                self.assertEqual((min(lengths), max(lengths)), (low, high))

    def test_uniform(self) -> None:
        counts = Counter(self.lengths("short"))
        for length in range(1, 9):
            self.assertShare(counts[length], 4_000, 1 / 8)

    def test_mixed_is_one_long_in_four(self) -> None:
        lengths = self.lengths("mixed")
        self.assertShare(sum(length >= 64 for length in lengths), 4_000, 1 / 4)
        self.assertFalse([length for length in lengths if 8 < length < 64])

    def test_long_tail(self) -> None:
        """P(length >= n * 4) = 1 / n."""
        lengths = self.lengths("long-tailed")
        for n in (1.25, 2, 4, 8, 16, 32):
            with self.subTest(n=n):
                self.assertShare(sum(length >= 4 * n for length in lengths), 4_000, 1 / n)

    def test_prompt_and_output_are_drawn_alike_and_apart(self) -> None:
        requests = requests_of(requests=4_000, prompt=(1, 4), output=(1, 4))
        pairs = Counter((len(request.prompt_tokens), request.max_tokens) for request in requests)
        self.assertEqual(len(pairs), 16)
        for pair, count in pairs.items():
            with self.subTest(pair=pair):
                self.assertShare(count, 4_000, 1 / 16)

    def test_every_request_fits_whatever_the_context(self) -> None:
        for context in (*range(1, 40), 63, 64, 65):
            model = ModelConfig(5, 2, 1, 1, 1, 1, max_context=context)
            for kind in (*LENGTHS, (1, 1_000_000), (200, 200)):
                workload = Workload(seed=context, requests=10, prompt=kind, output=kind, prefix_share=0.5,
                                    prefix_tokens=context // 2)
                for request in generate_requests(workload, model)[0]:
                    with self.subTest(context=context, kind=kind, request=request):
                        request.check_against(model)
                        self.assertGreaterEqual(request.max_tokens, min(1, context - 1))


class ContentTest(Case):
    def test_tokens(self) -> None:
        """Every token but bos and eos occurs, equally often; none else does."""
        requests = requests_of(requests=200, prompt="long")
        counts = Counter(token for request in requests for token in request.prompt_tokens)
        self.assertEqual(set(counts), set(range(2, 46)))
        for token, count in counts.items():
            with self.subTest(token=token):
                self.assertShare(count, sum(counts.values()), 1 / 44)

    def test_token_limits(self) -> None:
        model = dataclasses.replace(DEFAULT_MODEL, bos_token=8, eos_tokens=(5, 9))
        requests = requests_of(model, requests=50, tokens=(4, 9))
        self.assertEqual({token for request in requests for token in request.prompt_tokens}, {4, 6, 7})
        for tokens in ((8, 9), (5, 5), (46, 46), (0, 46)):
            with self.subTest(tokens=tokens), self.assertRaises(SchemaError) as caught:
                requests_of(model, tokens=tokens)
            self.assertEqual(caught.exception.path, "/tokens")

    def test_prefixes(self) -> None:
        for share in (0.0, 0.3, 1.0):
            requests = requests_of(requests=1_000, prompt=(5, 20), prefix_share=share, prefix_tokens=16)
            heads = Counter(request.prompt_tokens[:16] for request in requests)
            with self.subTest(share=share):
                common = max(heads.values())
                self.assertShare(common if common > 1 else 0, 1_000, share)
                own = Counter(len(request.prompt_tokens) for request in requests)
                self.assertEqual((min(own), max(own)), (5 + 16 * (share == 1), 20 + 16 * (share > 0)))

    def test_cancels(self) -> None:
        workload = Workload(requests=2_000, cancel_share=0.25, output=(10, 10))
        requests, events = generate_requests(workload, DEFAULT_MODEL)
        self.assertShare(len(events), 2_000, 0.25)
        self.assertEqual(len({event.cancel for event in events}), len(events))
        self.assertEqual([event.step for event in events], sorted(event.step for event in events))
        arrivals = {request.request_id: request.arrival for request in requests}
        delays = Counter(event.step - arrivals[event.cancel] for event in events)
        self.assertEqual(set(delays), set(range(1, 21)))
        self.assertEqual(generate_requests(Workload(), DEFAULT_MODEL)[1], ())
        self.assertEqual(len(generate_requests(Workload(cancel_share=1.0), DEFAULT_MODEL)[1]), 20)

    def test_sampling(self) -> None:
        params = SamplingParams(temperature=2.0, top_k=3)
        requests = requests_of(requests=1_000, sample_share=0.25, sampling=params)
        sampled = [request.sampling for request in requests if request.sampling.temperature]
        self.assertShare(len(sampled), 1_000, 0.25)
        self.assertEqual({dataclasses.replace(sampling, seed=None) for sampling in sampled}, {params})
        self.assertEqual(len({sampling.seed for sampling in sampled}), len(sampled))
        self.assertEqual({request.sampling for request in requests} - set(sampled), {SamplingParams()})

    def test_identities(self) -> None:
        self.assertEqual([request.request_id for request in requests_of(requests=3)], ["r1", "r2", "r3"])
        self.assertEqual(generate_requests(Workload(requests=0), DEFAULT_MODEL), ((), ()))


class WorkloadTest(unittest.TestCase):
    def test_values_that_are_none(self) -> None:
        wrong: dict[str, tuple[Any, ...]] = {
            "seed": (-1, 2**63, 1.0, True, "7", None), "requests": (-1, 100_001, 2.5, False, None),
            "arrivals": ("Poisson", "", None, 3, [1], [1] * 19, [-1] * 20, [0.5] * 20, [10**9 + 1] * 20),
            "rate": (0, -1, 1e7, math.nan, math.inf, "1", None), "burst": (0, 1.5, None),
            "prompt": ("tiny", None, 5, (5,), (1, 2, 3), (0, 4), (9, 3), (1, 2.0)), "output": ("", (-1, 1), (3, 2)),
            "prefix_share": (-0.1, 1.1, math.nan, True), "prefix_tokens": (-1, 2**21, 0.5), "cancel_share": (2, "all"),
            "sample_share": (-1, None), "tokens": ((3, 2), (-1, 4), 5, (1,), "ab"),
        }
        for name, values in wrong.items():
            for value in values:
                with self.subTest(name=name, value=value), self.assertRaises(SchemaError) as caught:
                    Workload(**{name: value})
                self.assertTrue(caught.exception.path.startswith(f"/{name}"), caught.exception.path)

    def test_lists_become_tuples(self) -> None:
        workload = Workload(requests=2, arrivals=[0, 1], prompt=[1, 2], tokens=[3, 4])
        self.assertEqual((workload.arrivals, workload.prompt, workload.tokens), ((0, 1), (1, 2), (3, 4)))
        self.assertIsInstance(hash(workload), int)


class ScenarioTest(unittest.TestCase):
    def check(self, scenario: Scenario) -> None:
        self.assertEqual(parse_scenario(scenario.to_json()), scenario)
        longest = max((len(r.prompt_tokens) + r.max_tokens for r in scenario.requests), default=1)
        self.assertGreaterEqual(scenario.engine.page_size * scenario.engine.num_pages, longest)

    def test_many_seeds_are_valid_and_every_request_fits_the_pool(self) -> None:
        page_sizes, full = set(), 0
        for seed in range(100):
            with self.subTest(seed=seed):
                scenario = generate_scenario(dataclasses.replace(EVERYTHING, seed=seed, requests=8))
                self.check(scenario)
                page_sizes.add(scenario.engine.page_size)
                longest = max(len(r.prompt_tokens) + r.max_tokens for r in scenario.requests)
                full += scenario.engine.num_pages == -(-longest // scenario.engine.page_size)
                self.assertLessEqual(scenario.engine.num_pages, 3 * -(-longest // scenario.engine.page_size))
        self.assertEqual(page_sizes, {1, 2, 4, 8, 16, 32})
        self.assertGreater(full, 0)

    def test_settings_that_are_given_are_kept(self) -> None:
        drawn = generate_scenario(EVERYTHING)
        for settings in ({"page_size": 3}, {"num_pages": 2}, {"budget_tokens": 5, "max_running": 2},
                         {"prefix_sharing": True}):
            with self.subTest(settings=settings):
                scenario = generate_scenario(EVERYTHING, **settings)
                self.assertEqual({name: getattr(scenario.engine, name) for name in settings}, settings)
                self.assertEqual(scenario.requests, drawn.requests)
        self.check(generate_scenario(EVERYTHING, page_size=3))
        self.check(generate_scenario(Workload(requests=0)))
        wrong: tuple[dict[str, Any], ...] = ({"page_size": 0}, {"pages": 4}, {"num_pages": None})
        for settings in wrong:
            with self.subTest(settings=settings), self.assertRaises(SchemaError) as caught:
                generate_scenario(EVERYTHING, **settings)
            self.assertEqual(caught.exception.path, f"/engine/{next(iter(settings))}")

    def test_a_vocabulary_that_does_not_fit_the_model(self) -> None:
        with self.assertRaisesRegex(SchemaError, "/tokenizer: names 46 tokens"):
            generate_scenario(Workload(), dataclasses.replace(DEFAULT_MODEL, vocab_size=47))

    def test_its_description_says_how_it_was_drawn(self) -> None:
        self.assertIn("seed=7, requests=40, arrivals='bursty'", generate_scenario(EVERYTHING).description)
        long = Workload(requests=20_000, arrivals=(0,) * 20_000, prompt=(1, 1), output=(1, 1))
        self.assertLessEqual(len(generate_scenario(long).description), 1_000)


class CommandLineTest(unittest.TestCase):
    def command(self, line: str) -> tuple[int | str | None, str, str]:
        """Exit code, standard output, standard error."""
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                code: int | str | None = main(line.split())
            except SystemExit as stop:
                code = stop.code
        return code, output.getvalue(), errors.getvalue()

    def test_every_option_arrives(self) -> None:
        code, output, errors = self.command(
            "--seed 7 --requests 40 --arrivals bursty --rate 0.3 --burst 3 --prompt long-tailed --output mixed "
            "--prefix-share 0.4 --prefix-tokens 11 --cancel-share 0.3 --sample-share 0.5 "
            "--page-size 4 --num-pages 99 --budget 6 --max-running 2")
        wanted = generate_scenario(EVERYTHING, page_size=4, num_pages=99, budget_tokens=6, max_running=2)
        self.assertEqual((code, output, errors), (0, wanted.to_json(), ""))

    def test_numbers(self) -> None:
        _, output, _ = self.command("--requests 3 --arrivals 0,0,7 --prompt 5,5 --output 1,2")
        self.assertEqual(parse_scenario(output), generate_scenario(
            Workload(requests=3, arrivals=(0, 0, 7), prompt=(5, 5), output=(1, 2))))

    def test_defaults(self) -> None:
        self.assertEqual(self.command("")[1], generate_scenario(Workload()).to_json())

    def test_bad_options_are_one_line_and_exit_code_2(self) -> None:
        for line in ("--seed x", "--seed -1", "--seed " + "9" * 5_000, "--requests 1e3", "--requests -1", "--arrivals",
                     "--arrivals sometimes", "--arrivals 1,2", "--rate 0", "--rate nan", "--rate inf", "--burst 0",
                     "--prompt 9,3", "--prompt 5", "--prompt 1,x", "--output ,", "--prefix-share 1.5", "--page-size 0",
                     "--budget 1.5", "--max-running 0", "--unknown", "stray", "--see 7"):
            with self.subTest(line=line[:30]):
                code, output, errors = self.command(line)
                self.assertEqual((code, output), (2, ""))
                self.assertRegex(errors, r"\Aerror: [^\n]+\n\Z")

    def test_as_a_program(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "scenario.json"
            with open(path, "wb") as file:
                command = [sys.executable, "-m", "starter.workloads", "--seed", "7"]
                subprocess.run(command, cwd=ROOT, stdout=file, check=True)
            self.assertEqual(load_scenario(path), generate_scenario(Workload(seed=7)))


if __name__ == "__main__":
    unittest.main()
