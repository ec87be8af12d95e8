"""scripts/accuracy.py: its formats of keys and values, and that a form without an error shows none."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from scripts import accuracy
from starter.base.weights import seeded_weights
from tests.models import random_config


def rows(seed: int, count: int = 40, width: int = 6) -> list[list[float]]:
    """Channels of different size and place, as keys have."""
    dice = random.Random(seed)
    places = [dice.uniform(-9, 9) for _ in range(width)]
    return [[dice.gauss(place, 1.0 + i) for i, place in enumerate(places)] for _ in range(count)]


def errors(form: accuracy.Format, numbers: list[list[float]]) -> list[list[float]]:
    return [[abs(a - b) for a, b in zip(row, rounded)] for row, rounded in zip(numbers, form(numbers))]


class FormatsTest(unittest.TestCase):
    def test_half_a_step_of_the_largest_number_of_a_token(self) -> None:
        for row, off in zip(rows(1), errors(accuracy.by_token, rows(1))):
            self.assertLessEqual(max(off), max(map(abs, row)) / 127 / 2 * 1.001)

    def test_half_a_step_of_a_channels_range_over_a_page(self) -> None:
        numbers, off = rows(2), errors(accuracy.by_channel, rows(2))
        for start in range(0, 40, accuracy.PAGE):
            page = slice(start, start + accuracy.PAGE)
            for channel, wrong in zip(zip(*numbers[page]), zip(*off[page])):
                self.assertLessEqual(max(wrong), (max(channel) - min(channel)) / 255 / 2 * 1.001)

    def test_less_the_mean_channels_far_from_zero_cost_nothing(self) -> None:
        far = [[1000.0 + row[0], *row[1:]] for row in rows(3)]
        self.assertGreater(max(map(max, errors(accuracy.by_token, far))), 1.0)
        self.assertLess(max(map(max, errors(accuracy.centred, far))), 0.2)

    def test_a_fixed_grid_cuts_off_what_lies_beyond_it(self) -> None:
        numbers = [[50.0] * 6, *rows(4)]
        off = errors(accuracy.fixed, numbers)
        self.assertGreater(min(off[0]), 10.0)
        self.assertLess(max(map(max, off[1:])), 0.2)


class MeasurementTest(unittest.TestCase):
    def test_what_is_exact_changes_nothing_and_what_is_not_does(self) -> None:
        config = random_config(random.Random(7), group=2)
        measurement = accuracy.Measurement(config, seeded_weights(config, 7), texts=2, tokens=12)
        forms = {"none": (accuracy.exact, accuracy.exact), "keys": (accuracy.by_token, accuracy.exact)}
        weights = {"none": ("reference", None, False), "lanes": ("cpu", None, False)}
        with mock.patch.object(accuracy, "PAGES", forms), mock.patch.object(accuracy, "WEIGHTS", weights):
            for row in (measurement.pages_in("none"), measurement.weights_in("none")):
                self.assertEqual((row.mean_logit, row.largest_logit, row.flips, row.loss_change), (0.0, 0.0, 0, 0.0))
            self.assertEqual(measurement.weights_in("none").greedy_agree, measurement.tokens)
            self.assertTrue(0.0 < measurement.pages_in("keys").mean_logit < 0.1)
            self.assertTrue(0.0 < measurement.weights_in("lanes").mean_logit < 0.02)

    def test_the_command(self) -> None:
        """One text of five tokens of the quatrain model; nonsense is one line."""
        out = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out), \
                contextlib.redirect_stderr(io.StringIO()) as err, \
                mock.patch.object(accuracy, "WEIGHTS", {"float": accuracy.WEIGHTS["float"]}):
            target = Path(folder) / "a.json"
            self.assertEqual(accuracy.main(["--texts", "1", "--tokens", "5", "--json", str(target)]), 0)
            written = json.loads(target.read_text(encoding="utf-8"))
            self.assertEqual(accuracy.main(["--checkpoint", str(Path(folder) / "nowhere")]), 2)
        self.assertEqual([row["name"] for row in written], ["float", *accuracy.PAGES])
        self.assertEqual({row["positions"] for row in written}, {4})
        self.assertEqual(len(out.getvalue().splitlines()), 1 + len(written))
        self.assertEqual(len(err.getvalue().splitlines()), 1)


if __name__ == "__main__":
    unittest.main()
