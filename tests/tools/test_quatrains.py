"""The trained model: its data are kept apart, its figures are what the log says, its scenario writes poems."""

from __future__ import annotations

import contextlib
import io
import json
import re
import unittest
from math import exp, fsum, inf, log

from scripts.quatrains import (
    BOS,
    EOS,
    SCENARIO,
    UNKNOWN,
    bigram_loss,
    cut,
    held_out_loss,
    keeps_form,
    most_frequent,
    poem_tokens,
    read_held_out,
    split,
    token_losses,
)
from starter import driver
from starter.backend import ReferenceBackend
from starter.base.weights import weights_digest
from starter.model import Model, load_scenario_model, scenario_weights
from starter.schema import CharacterVocabulary, load_scenario
from tests.extras import needs
from tests.test_oracle import Transformers

LOG = SCENARIO.with_suffix(".log")
FIVES = "床前明月光，疑是地上霜。举头望明月，低头思故乡。"
SEVENS = "朝辞白帝彩云间，千里江陵一日还。两岸猿声啼不住，轻舟已过万重山。"

# Nats a character of the first held-out poems, by transformers' LlamaForCausalLM. With the extra "oracle" this compares
# them again and shows those that differ: python3 -m unittest tests.tools.test_quatrains.TransformersTest
GOLDEN_LOSSES = (4.49786, 4.749572, 3.944331, 3.67605, 3.313951)
TOLERANCE = 1e-5  # transformers norms and rotates in float32 even where the rest is float64


class PoemsTest(unittest.TestCase):
    def test_form(self) -> None:
        for text, kept in ((FIVES, True), (SEVENS, True), ("", False), (FIVES[:-1], False), (FIVES + FIVES, False),
                           (FIVES[:12] + SEVENS[16:], False), (FIVES.replace("。", "，"), False),
                           (FIVES.replace("头", ""), False), (FIVES.replace("头", "，"), False)):
            with self.subTest(text=text):
                self.assertEqual(keeps_form(text), kept)

    def test_longer_poems_are_cut_in_twos(self) -> None:
        other = "白日依山尽，黄河入海流。"
        self.assertEqual(cut(FIVES + FIVES), [FIVES, FIVES])
        self.assertEqual(cut(FIVES + other), [FIVES])
        for text in (FIVES, FIVES + SEVENS, FIVES + other[:5] + "。", ""):
            with self.subTest(text=text):
                self.assertEqual(cut(text), [])

    def test_the_split_keeps_held_out_lines_out(self) -> None:
        """A hundred quatrains, each beginning with the last line of the one before; longer poems of the same lines."""
        def poem(*numbers: int) -> str:
            return "".join(f"{number:05}" + "，。"[i % 2] for i, number in enumerate(numbers))
        quatrains = [poem(*range(3 * i, 3 * i + 4)) for i in range(100)]
        longer = [poem(*range(6 * i, 6 * i + 8)) for i in range(60)]
        for seed in range(5):
            with self.subTest(seed=seed):
                train, pieces, held_out = split([*quatrains, *longer, *longer, *quatrains], 10, seed)
                seen = {line for text in (*train, *pieces) for line in re.findall(r"\d{5}", text)}
                unseen = {line for text in held_out for line in re.findall(r"\d{5}", text)}
                self.assertEqual(len({*held_out}), 10)
                self.assertLess({*held_out}, {*quatrains})
                self.assertFalse(seen & unseen)
                # All else is there, once: a quatrain shares one line with the one before and one with the next.
                apart = [text for text in quatrains if unseen.isdisjoint(re.findall(r"\d{5}", text))]
                self.assertEqual(sorted(train), apart)
                self.assertGreaterEqual(len(apart), 70)
                self.assertEqual(len(pieces), len({*pieces}))
                self.assertGreater(len(pieces), 60)

    def test_the_most_frequent_characters_become_tokens_and_the_rest_one_sign(self) -> None:
        vocabulary = most_frequent(["天地，天。", "天地，人□。□□"], 4)
        self.assertEqual(vocabulary, CharacterVocabulary("□天。地，", ("<bos>", "<eos>")))
        self.assertEqual(poem_tokens(vocabulary, "地人，天"), [BOS, 5, UNKNOWN, 6, 3, EOS])

    def test_the_bigram_by_hand(self) -> None:
        """0-3 twice, 3-1, 3-4 and 4-1 once; □ (2) is no target. So 1 ends two different pairs, 3 and 4 one each."""
        trained_on = [[0, 3, 1], [0, 3, 4, 1], [0, 2]]
        unigram = {1: 3 / 9, 3: 2 / 9, 4: 2 / 9}
        wanted = [(2 - 0.5) / 2 + 0.5 * 1 / 2 * unigram[3],  # 3 after 0
                  (1 - 0.5) / 2 + 0.5 * 2 / 2 * unigram[4],  # 4 after 3
                  0.5 * 1 / 1 * unigram[4],                  # 4 after 4: never seen
                  unigram[1]]                                # 1 after 2: 2 was never followed
        loss = bigram_loss(trained_on, [[0, 3, 4, 4], [2, 1], [0, 2]], vocab_size=5, discount=0.5)
        self.assertAlmostEqual(loss, -fsum(map(log, wanted)) / 4, places=12)


class ShippedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.scenario = load_scenario(SCENARIO)
        cls.loaded = load_scenario_model(cls.scenario, "cpu")
        cls.poems = read_held_out()
        cls.log = LOG.read_text(encoding="utf-8")

    def recorded(self, pattern: str) -> float:
        """A figure of the log."""
        found = re.search(pattern, self.log)
        self.assertIsNotNone(found, pattern)
        return float(found[1])

    def test_the_weights_are_those_of_the_scenario_and_small(self) -> None:
        file = self.scenario.folder / self.scenario.weights.path
        self.assertLess(file.stat().st_size, 1_200_000)
        weights = scenario_weights(self.scenario, self.scenario.weights)
        self.assertRegex(self.scenario.weights.sha256, "[0-9a-f]{64}")
        self.assertEqual(weights_digest(weights), self.scenario.weights.sha256)

    def test_the_held_out_poems_are_quatrains_and_none_stands_twice(self) -> None:
        self.assertEqual(len({*self.poems}), 300)
        self.assertEqual([poem for poem in self.poems if not keeps_form(poem)], [])

    def test_held_out_losses_are_those_of_transformers(self) -> None:
        """Of the plain backend to the last digits; the default one rounds weights, which must not cost a thousandth."""
        plain = Model(self.scenario.model, scenario_weights(self.scenario, self.scenario.weights), ReferenceBackend())
        for model, number, tolerance in ((plain, 2, TOLERANCE), (self.loaded.model, 5, 1e-3)):
            for i, golden in enumerate(GOLDEN_LOSSES[:number]):
                with self.subTest(backend=model.backend.name, poem=self.poems[i]):
                    loss = held_out_loss(model, self.scenario.tokenizer, [self.poems[i]])
                    self.assertAlmostEqual(loss, golden, delta=tolerance)

    def test_a_character_is_as_good_as_another(self) -> None:
        """The mean is over characters, not over poems."""
        model, vocabulary, poems = self.loaded.model, self.scenario.tokenizer, self.poems[1:3]
        losses = [loss for poem in poems for loss in token_losses(model, poem_tokens(vocabulary, poem))]
        known = [character for poem in poems for character in poem if character in vocabulary.characters]
        self.assertEqual(len(losses), len(known) + 2)  # and the two ends
        self.assertEqual(held_out_loss(model, vocabulary, poems), fsum(losses) / len(losses))

    def test_the_figures_asked_for(self) -> None:
        loss = self.recorded(r"held out +([\d.]+) nats a character")
        bigram = self.recorded(r"nats a character; interpolated bigram ([\d.]+)")
        self.assertGreaterEqual(bigram - loss, 0.70)
        self.assertGreaterEqual(self.recorded(r"([\d.]+)% keep the form"), 97.0)
        self.assertTrue(40.0 <= self.recorded(r"([\d.]+)% are quatrains of seven") <= 80.0)

    def test_the_driver_writes_poems(self) -> None:
        """Several at once; the greedy ones are golden, and what is sampled has the form and no □."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = driver.main(["--fixture", str(SCENARIO), "--json", "--clock", "virtual"])
        self.assertEqual(code, 0)
        document = json.loads(out.getvalue())
        self.assertEqual({*document["golden"].values()}, {"equal"})
        self.assertEqual([*document["golden"]], [request.request_id for request in self.scenario.requests
                                                 if request.sampling.temperature == 0.0])
        texts = []
        for request in self.scenario.requests:
            written = document["tokens"][request.request_id]
            self.assertEqual(written[-1], EOS)
            texts.append(self.loaded.tokenizer.decode([*request.prompt_tokens, *written]))
        self.assertEqual([text for text in texts if not keeps_form(text) or "□" in text], [])
        self.assertEqual(len({*texts}), len(texts))


@needs("oracle", "torch", "transformers")
class TransformersTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.scenario = load_scenario(SCENARIO)
        cls.oracle = Transformers(cls.scenario.model, scenario_weights(cls.scenario, cls.scenario.weights))
        cls.oracle.model.double()

    def losses(self, poem: str) -> list[float]:
        """-ln p of every target but □."""
        tokens = poem_tokens(self.scenario.tokenizer, poem)
        return [log(fsum(map(exp, row))) - row[target]
                for row, target in zip(self.oracle.logits(tokens[:-1]), tokens[1:]) if target != UNKNOWN]

    def test_golden_tokens_and_their_margin(self) -> None:
        margins = []
        for request in self.scenario.requests:
            if (golden := self.scenario.golden.tokens.get(request.request_id)) is None:
                continue
            rows = self.oracle.logits([*request.prompt_tokens, *golden[:-1]])[len(request.prompt_tokens) - 1:]
            for row, token in zip(rows, golden, strict=True):
                row[UNKNOWN] = -inf
                self.assertEqual(row.index(max(row)), token)
                second, best = sorted(row)[-2:]
                margins.append(best - second)
            self.assertEqual(golden.index(EOS), len(golden) - 1)
        self.assertAlmostEqual(min(margins), self.scenario.golden.smallest_margin, delta=TOLERANCE)
        self.assertGreater(min(margins), 100 * TOLERANCE)

    def test_losses(self) -> None:
        """The golden ones above, and what the log says of all."""
        losses = [self.losses(poem) for poem in read_held_out()]
        first = [fsum(poem) / len(poem) for poem in losses[:len(GOLDEN_LOSSES)]]
        self.assertEqual([round(loss, 6) for loss in first], [*GOLDEN_LOSSES])
        flat = [loss for poem in losses for loss in poem]
        logged = re.search(r"held out +([\d.]+) nats", LOG.read_text(encoding="utf-8"))
        self.assertAlmostEqual(fsum(flat) / len(flat), float(logged[1]), delta=1e-4)


if __name__ == "__main__":
    unittest.main()
