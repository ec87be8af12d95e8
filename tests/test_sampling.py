"""From logits to a token: every edge in the module's table, the distribution, adjustments, logprobs, draws."""

from __future__ import annotations

import random
import unittest
from itertools import pairwise
from math import exp, fsum, inf, log, nan

from starter.errors import BackendError, RequestError
from starter.sampling import BORDER, Choice, Draws, adjust, choose_token, kept_tokens
from starter.schema import SamplingParams

LOGITS = [0.5, 2.0, -1.0, 2.0, 1.25, -3.0, 0.0, 1.9]
BEST = 1  # the first of the equal maxima at 1 and 3
SIZE = len(LOGITS)


def draw(logits, seed=0, **params) -> int:
    return choose_token(logits, SamplingParams(**params), Fresh(seed)).token


def drawn(logits, draws=300, **params) -> set[int]:
    """Tokens that occur in many draws."""
    fresh, params = Fresh(1), SamplingParams(**params)
    return {choose_token(logits, params, fresh).token for _ in range(draws)}


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> dict[int, float]:
    """Token -> probability, from the definitions in SamplingParams, a filter at a time, renormalized after each.
    (The random cases here stay away from the borders; ``test_borders`` is about them.)"""
    def normalized(pairs):
        total = fsum(weight for _, weight in pairs)
        return [(token, weight / total) for token, weight in pairs]

    ranked = normalized([(token, exp(logit / temperature)) for token, logit in enumerate(logits)])
    ranked.sort(key=lambda pair: (-pair[1], pair[0]))
    if top_k:
        ranked = normalized(ranked[:top_k])
    while top_p < 1 and len(ranked) > 1 and fsum(weight for _, weight in ranked[:-1]) >= top_p:
        ranked.pop()
    ranked = normalized(ranked)
    return dict(normalized([pair for pair in ranked if pair[1] >= min_p * ranked[0][1]]))


def logprob(token: int) -> float:
    return LOGITS[token] - log(fsum(map(exp, LOGITS)))


class Stuck(Draws):
    """Random numbers that are all the same."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


class Fresh(Draws):
    """Random numbers of which none is ever drawn twice, though nobody accepts them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(SamplingParams(seed=seed), "r", 0, 0)

    def random(self) -> float:
        number = super().random()
        self.accept()
        return number


class Edges(unittest.TestCase):
    def test_temperature_0_is_greedy_and_the_lowest_token_wins(self) -> None:
        for temperature in (0, 0.0, -0.0):
            self.assertEqual(draw(LOGITS, temperature=temperature), BEST)
        self.assertEqual(draw([7.0] * 5), 0)
        self.assertEqual(draw([-inf, -inf, -1e308, -inf]), 2)

    def test_a_tiny_temperature_does_not_overflow(self) -> None:
        """K068"""
        for temperature in (1e-3, 1e-6, 1e-12, 1e-300, 5e-324):
            for logits in (LOGITS[2:], [-1e308, 1e308, 0.0], [1e-300, 0.0], [-700.0, -800.0, -inf]):
                best = logits.index(max(logits))
                if (sorted(logits)[-1] - sorted(logits)[-2]) / temperature > 40:
                    self.assertEqual(draw(logits, temperature=temperature), best)
            self.assertEqual(drawn(LOGITS, temperature=temperature), {1, 3})  # equals stay equally likely

    def test_a_huge_temperature_is_uniform(self) -> None:
        self.assertEqual(drawn(LOGITS, temperature=1e6), set(range(SIZE)))

    def test_top_k(self) -> None:
        """K070"""
        everything = drawn(LOGITS, temperature=5.0)
        self.assertEqual(everything, set(range(SIZE)))
        for top_k in (0, SIZE, SIZE + 1, 2**31):
            self.assertEqual(drawn(LOGITS, temperature=5.0, top_k=top_k), everything)
        self.assertEqual(drawn(LOGITS, temperature=5.0, top_k=SIZE - 1), everything - {5})
        self.assertEqual(drawn(LOGITS, temperature=5.0, top_k=3), {1, 3, 7})
        self.assertEqual(drawn(LOGITS, temperature=5.0, top_k=1), {BEST})

    def test_top_p(self) -> None:
        """K069"""
        for top_p in (0, 0.0, 5e-324, 1e-45, 1e-8):
            self.assertEqual(drawn(LOGITS, temperature=5.0, top_p=top_p), {BEST})
        self.assertEqual(drawn(LOGITS, temperature=5.0, top_p=1), set(range(SIZE)))
        quarters = [0.0] * 4
        weights = [0.5, 0.3, 0.1, 0.1]  # F024: the sum of the first two is less than .8 in doubles
        for top_p, kept in ((0.5, 1), (0.8, 2), (0.80001, 3), (0.9, 3)):
            self.assertEqual(drawn(list(map(log, weights)), temperature=1.0, top_p=top_p), set(range(kept)))
        for top_p, kept in ((0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4)):
            self.assertEqual(drawn(quarters, temperature=1.0, top_p=top_p), set(range(kept)))

    def kept(self, probabilities, **params) -> list[int]:
        logits = [log(p) for p in probabilities]
        return [token for token, _ in kept_tokens(logits, max(logits), SamplingParams(1.0, **params))]

    def test_borders(self) -> None:
        """Sums by hand: what reaches top_p or min_p exactly has reached it, however it was rounded."""
        halves = (0.5, 0.3, 0.1, 0.1)
        for top_p, count in ((0.5, 1), (0.5 + 1e-8, 2), (0.8, 2), (0.8 + 1e-8, 3), (0.8 - 1e-8, 2), (0.9, 3), (1.0, 4)):
            self.assertEqual(self.kept(halves, top_p=top_p), list(range(count)), top_p)
        for min_p, count in ((0.2, 4), (0.2 + 1e-8, 2), (0.6, 2), (0.6 + 1e-8, 1), (1.0, 1)):
            self.assertEqual(self.kept(halves, min_p=min_p), list(range(count)), min_p)
        for seed in range(500):  # every sum of the likeliest, exact as a fraction
            dice = random.Random(seed)
            parts = sorted((dice.randint(1, 20) for _ in range(dice.randint(2, 9))), reverse=True)
            shifted = [part / sum(parts) * exp(dice.choice((-40.0, 0.0, 40.0))) for part in parts]
            shifted = [part * shifted[0] / parts[0] for part in parts]  # logits are known up to a constant
            for count in range(1, len(parts)):
                top_p = sum(parts[:count]) / sum(parts)
                self.assertEqual(self.kept(shifted, top_p=top_p), list(range(count)), (seed, count))
                self.assertEqual(len(self.kept(shifted, top_p=top_p * (1 + 4 * BORDER))), count + 1)

    def test_the_tolerance_lies_between_the_rounding_of_sums_and_of_logits(self) -> None:
        flat = [1.0] * 150_000  # exact sums are whole numbers
        self.assertEqual(len(self.kept(flat, top_p=0.3)), 45_000)
        self.assertLess(150_000 * 2.0**-53, BORDER / 10)
        self.assertLess(BORDER * 10, 2.0**-24)

    def test_equals(self) -> None:
        """Of equals the lowest numbers stay, and no more than asked for. (transformers keeps all four that reach the
        second place.)"""
        logits = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0]
        self.assertEqual(kept_tokens(logits, 3.0, SamplingParams(1.0, top_k=2)), [(1, 1.0), (2, exp(-1.0))])
        self.assertEqual(self.kept([0.2] * 5, top_p=0.4), [0, 1])
        self.assertEqual(self.kept([0.2] * 5, min_p=1.0), [0, 1, 2, 3, 4])

    def test_order_of_the_filters(self) -> None:
        """Each works on what the one before has left; other orders would give other sets."""
        halves = (0.5, 0.3, 0.1, 0.1)
        self.assertEqual(self.kept(halves, top_p=0.6, min_p=0.5), [0, 1])  # min_p first: 0.5 / 0.8 reaches 0.6
        self.assertEqual(self.kept(halves, top_k=2, top_p=0.6), [0])  # top_p first: 0.5 does not reach 0.6
        self.assertEqual(self.kept(halves, top_k=3, top_p=0.9, min_p=0.2), [0, 1, 2])  # 0.8 / 0.9 is less than 0.9

    def test_min_p(self) -> None:
        self.assertEqual(drawn(LOGITS, temperature=5.0, min_p=1), {1, 3})
        self.assertEqual(drawn(LOGITS, temperature=1.0, min_p=exp(-0.11)), {1, 3, 7})
        self.assertEqual(drawn(LOGITS, temperature=5.0, min_p=0), set(range(SIZE)))

    def test_no_distribution_no_token(self) -> None:
        """K076: never a silent token 0"""
        for logits in ([nan] * 4, [-inf] * 4, [0.0, nan, 1.0], [nan, 0.0, 1.0], [0.0, 1.0, nan], [0.0, inf, 1.0],
                       [inf] * 4, [inf, nan, -inf]):
            for temperature in (0.0, 1.0):
                with self.subTest(logits=logits, temperature=temperature), self.assertRaises(BackendError):
                    draw(logits, temperature=temperature)

    def test_a_token_of_probability_0_is_never_drawn(self) -> None:
        for number in (0.0, 5e-324, 0.5, 1.0 - 2.0**-53):
            for logits, allowed in (([-inf, 0.0, -1.0, -inf], {1, 2}), ([-inf, 3.0, -inf], {1}), ([-900.0, 0.0], {1})):
                for params in (SamplingParams(1.0), SamplingParams(1.0, top_k=4), SamplingParams(1.0, top_p=0.999)):
                    self.assertIn(choose_token(logits, params, Stuck(number)).token, allowed)

    def test_parameters_out_of_range_are_refused(self) -> None:
        for name, wrongs in (("temperature", (-1.0, nan, inf, -5e-324, True, "1", None)),
                             ("top_k", (-1, 1.0, True, "1")), ("top_p", (-0.1, 1.0000001, nan, True)),
                             ("min_p", (-0.1, 1.1, nan)), ("seed", (-1, 1.5, True, "7")),
                             ("repetition_penalty", (0.0, -1.0, nan, 101.0)), ("presence_penalty", (101.0, nan)),
                             ("frequency_penalty", (-101.0, True)), ("min_tokens", (-1, 1.0)), ("n", (0, 65, True)),
                             ("ignore_eos", (1, "yes")), ("logprobs", (-1, True, 2.0)),
                             ("logit_bias", ({-1: 1.0}, {1.5: 1.0}, {0: nan}, {0: "x"}, {True: 1.0})),
                             ("stop", ("", ["a", ""], [1]))):
            for wrong in wrongs:
                with self.subTest(name=name, wrong=wrong), self.assertRaisesRegex(RequestError, name):
                    SamplingParams(**{name: wrong})


class Distribution(unittest.TestCase):
    CASES = ({}, {"temperature": 0.7}, {"temperature": 2.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2},
             {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.1}, {"top_k": SIZE + 3, "top_p": 0.9999})

    def test_draws_follow_the_exact_probabilities(self) -> None:
        """Chi-squared: 4000 draws; 40 is far out for at most 7 degrees of freedom (probability 1e-6)."""
        for case in self.CASES:
            with self.subTest(case=case):
                params = SamplingParams(**{"temperature": 1.0, **case})
                probabilities = exact(LOGITS, **{"temperature": 1.0, **case})
                fresh, draws = Fresh(7), 4000
                counts = dict.fromkeys(range(SIZE), 0)
                for _ in range(draws):
                    counts[choose_token(LOGITS, params, fresh).token] += 1
                self.assertLessEqual({token for token, count in counts.items() if count}, set(probabilities))
                distance = sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in probabilities.items())
                self.assertLess(distance, 40)

    def test_kept_tokens_are_those_of_the_definition(self) -> None:
        for seed in range(300):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                logits = [dice.choice((dice.gauss(0, 3), 1.0)) for _ in range(dice.randint(1, 12))]
                case = {"temperature": dice.choice((0.3, 1.0, 4.0)), "top_k": dice.randint(0, 13),
                        "top_p": dice.choice((1.0, dice.random())), "min_p": dice.choice((0.0, dice.random()))}
                kept = dict(kept_tokens(logits, max(logits), SamplingParams(**case)))
                probabilities = exact(logits, **case)
                self.assertEqual(set(kept), set(probabilities))
                total = fsum(kept.values())
                for token, weight in kept.items():
                    self.assertAlmostEqual(weight / total, probabilities[token], places=12)

    def test_logprob_is_that_of_temperature_1_without_filters(self) -> None:
        for params in (SamplingParams(), SamplingParams(0.1), SamplingParams(3.0, top_k=2)):
            choice = choose_token(LOGITS, params, Fresh(3))
            self.assertAlmostEqual(choice.logprob, logprob(choice.token), places=12)
        self.assertEqual(choose_token([5.0], SamplingParams(), Fresh()), Choice(0, 0.0))
        self.assertEqual(choose_token([1e308, -1e308], SamplingParams(), Fresh()), Choice(0, 0.0))
        for level in (-1e5, -700.0, -599.0, 0.0, 599.0, 700.0, 1e5):  # exp would over- or underflow at some
            self.assertAlmostEqual(choose_token([level] * 4, SamplingParams(), Fresh()).logprob, -log(4.0))

    def test_tied_logits_of_any_size_share_the_probability(self) -> None:
        for size in (0.0, 1e5, -1e5, 1e16, 1e300, -1e300):
            choice = choose_token([size, size, size - abs(size) - 100.0], SamplingParams(logprobs=2), Fresh())
            self.assertAlmostEqual(choice.logprob, -log(2.0))
            self.assertEqual([token for token, _ in choice.top_logprobs], [0, 1])
            self.assertAlmostEqual(choice.top_logprobs[1][1], -log(2.0))

    def test_the_likeliest_tokens_and_the_chosen_one(self) -> None:
        """K078, K079"""
        ranking = [1, 3, 7, 4, 0, 6, 2, 5]  # of equals, the lower token first
        self.assertEqual(choose_token(LOGITS, SamplingParams(), Fresh()).top_logprobs, ())
        for number in range(SIZE + 1):
            params = SamplingParams(logprobs=number, logit_bias={5: 100.0})
            choice = choose_token(LOGITS, params, Fresh())
            self.assertEqual(choice.token, 5)
            tokens = [token for token, _ in choice.top_logprobs]
            self.assertEqual(tokens, ranking[:number] + ([5] if number < SIZE else []))
            for token, value in choice.top_logprobs:
                self.assertAlmostEqual(value, logprob(token), places=12)  # of the model alone: no bias
        choice = choose_token([0.0, -inf, 1.0], SamplingParams(logprobs=3, top_k=1), Fresh())
        self.assertEqual([token for token, _ in choice.top_logprobs], [2, 0])  # no infinity, which JSON cannot write


class Adjusted(unittest.TestCase):
    def adjusted(self, logits, prompt=(), generated=(), end_tokens=(), **params) -> list[float]:
        before = list(logits)
        after = adjust(logits, SamplingParams(**params), prompt, generated, end_tokens)
        self.assertEqual(logits, before)  # a row of the model's is not written to
        return after

    def test_nothing_asked_nothing_changed(self) -> None:
        self.assertEqual(self.adjusted(LOGITS, [1, 2], [3], [4]), LOGITS)

    def test_bias(self) -> None:
        self.assertEqual(self.adjusted([1.0, 2.0, 3.0], logit_bias={0: 5.0, 2: -1.5}), [6.0, 2.0, 1.5])
        self.assertEqual(draw(LOGITS, logit_bias=[(5, 100.0)]), 5)
        self.assertEqual(drawn(LOGITS, temperature=5.0, logit_bias={1: -1e6, 3: -1e6}), {0, 2, 4, 5, 6, 7})

    def test_repetition_penalty_makes_what_was_said_less_likely(self) -> None:
        self.assertEqual(self.adjusted([4.0, -4.0, 4.0, -4.0, 0.0], [0, 0], [1, 4], repetition_penalty=2.0),
                         [2.0, -8.0, 4.0, -4.0, 0.0])

    def test_presence_and_frequency_penalties_count_the_output_alone(self) -> None:
        self.assertEqual(self.adjusted([4.0, 4.0, 4.0], [2, 2], [0, 1, 1], presence_penalty=1.0, frequency_penalty=0.5),
                         [2.5, 2.0, 4.0])

    def test_no_end_before_min_tokens(self) -> None:
        for count in range(5):
            expected = [-inf, 1.0, -inf] if count < 3 else [2.0, 1.0, 3.0]
            self.assertEqual(self.adjusted([2.0, 1.0, 3.0], [1], [1] * count, [0, 2], min_tokens=3), expected)
        with self.assertRaisesRegex(BackendError, "adjusted"):
            choose_token([2.0, 1.0], SamplingParams(min_tokens=1), Fresh(), [0], [], [0, 1])

    def test_an_overflow_is_an_error(self) -> None:
        with self.assertRaisesRegex(BackendError, "adjusted"):
            choose_token([1e308, 0.0], SamplingParams(repetition_penalty=0.01), Fresh(), [0])

    def test_order(self) -> None:
        """Bias, then repetition, then presence and frequency: (2 + 4) / 2 - 1 - 0.5."""
        self.assertEqual(self.adjusted([2.0, 0.0], [], [0], logit_bias={0: 4.0}, repetition_penalty=2.0,
                                       presence_penalty=1.0, frequency_penalty=0.5)[0], 1.5)


class RandomNumbers(unittest.TestCase):
    def numbers(self, name: str, seed: int | None, engine_seed: int, number: int = 0) -> list[float]:
        draws, taken = Draws(SamplingParams(1.0, seed=seed), name, number, engine_seed), []
        for _ in range(3):
            taken.append(draws.random())
            draws.accept()
        return taken

    def test_one_number_for_a_sampled_token_none_for_a_greedy_one(self) -> None:
        for params, numbers in ((SamplingParams(), 0), (SamplingParams(1.0), 1), (SamplingParams(1.0, top_k=1), 1)):
            used, fresh = Fresh(5), Fresh(5)
            choose_token(LOGITS, params, used)
            for _ in range(numbers):
                fresh.random()
            self.assertEqual(used.random(), fresh.random())

    def test_a_number_is_drawn_again_until_it_is_accepted(self) -> None:
        draws = Draws(SamplingParams(1.0, seed=3), "r", 0, 0)
        params = SamplingParams(3.0)
        tokens = []
        for _ in range(20):
            tokens.append({choose_token(LOGITS, params, draws).token for _ in range(3)})
            draws.accept()
        self.assertTrue(all(len(choices) == 1 for choices in tokens))
        self.assertGreater(len(set.union(*tokens)), 3)

    def test_they_depend_on_the_seed_or_the_engine_and_the_id_and_on_the_sample_alone(self) -> None:
        """K073"""
        for number in range(3):
            self.assertEqual(self.numbers("a", 42, 0, number), self.numbers("b", 42, 1, number))
            self.assertEqual(self.numbers("a", None, 5, number), self.numbers("a", None, 5, number))
        streams = [self.numbers(*case) for case in (
            ("a", 42, 0), ("a", 43, 0), ("a", 0, 0), ("a", None, 0), ("a", None, 1), ("b", None, 0), ("a", 42, 0, 1),
            ("a", 42, 0, 2), ("a", None, 0, 1), ("a", None, 0, 2))]
        self.assertEqual(len({first for first, *_ in streams}), len(streams))

    def test_neighbouring_seeds_ids_and_samples_are_unrelated(self) -> None:
        """K075: the first numbers of 2000 neighbours fill ten bins evenly, and so do the differences of neighbours."""
        for kind, first in (("seed", [self.numbers("r", i, 0)[0] for i in range(2000)]),
                            ("id", [self.numbers(f"r{i}", None, 0)[0] for i in range(2000)]),
                            ("sample", [self.numbers("r", 7, 0, i)[0] for i in range(2000)])):
            steps = [(b - a) % 1.0 for a, b in pairwise(first)]
            for numbers in (first, steps):
                bins = [sum(int(number * 10) == i for number in numbers) for i in range(10)]
                self.assertLess(sum((count - 200) ** 2 / 200 for count in bins), 45, kind)

    def test_the_same_numbers_in_every_process(self) -> None:
        """Not by way of hash(), which differs from process to process."""
        self.assertEqual(Draws(SamplingParams(seed=7), "r", 0, 0).random(), random.Random("7/0").random())
        self.assertEqual(Draws(SamplingParams(), "r", 1, 3).random(), random.Random("3/r/1").random())


if __name__ == "__main__":
    unittest.main()
