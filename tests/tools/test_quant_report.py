"""scripts/quant_report.py: what it computes on small inputs, and what it says when a threshold is missed."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import unittest
from dataclasses import replace
from math import log, sqrt
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

from scripts import quant_report as report
from tests.extras import needs
from tests.paths import FIXTURE, ROOT

ROW = report.Row("float", 400, 1.0, 64.0, 0.0, 0.0, {"w": (0.0, 0.0)}, 0.0, 4.0, 0.0, 1.0, None, 10.0, "诗")


class ArithmeticTest(unittest.TestCase):
    def test_loss_is_the_mean_surprise_and_leaves_out_the_unknown(self) -> None:
        """Two of four logits equal and the others far below: p = 1/2; the target □ does not count."""
        rows = [[[0.0, 0.0, -1e3, -1e3], [0.0, -1e3, 0.0, -1e3], [5.0, 5.0, 5.0, 5.0]]]
        unknown = report.UNKNOWN
        self.assertAlmostEqual(report.mean_loss(rows, [[0, 1, unknown, 3]]), (log(2) + log(4)) / 2)

    def test_change_is_a_root_mean_square_over_all_logits(self) -> None:
        self.assertAlmostEqual(report.change([[[1.0, 2.0]], [[3.0, 5.0]]], [[[1.0, 2.0]], [[3.0, 1.0]]]), sqrt(16 / 4))

    def test_first_difference(self) -> None:
        self.assertEqual(report.first_difference([[1, 2, 3], [4, 5]], [[1, 2, 0], [4, 6]]), 1)
        self.assertIsNone(report.first_difference([[1], []], [[1], []]))

    def test_missed_thresholds_are_named(self) -> None:
        good = [ROW, replace(ROW, name="int8", weight_share=0.28, loss_change=0.003)]
        self.assertEqual(report.missed(good), [])
        for change, words in (({"loss_change": 0.0031}, "rises by 0.0031"), ({"weight_share": 0.31}, "0.310 of"),
                              ({"form": 0.97}, "97% of the samples")):
            with self.subTest(**change):
                [sentence] = report.missed([ROW, replace(good[1], **change)])
                self.assertIn(words, sentence)

    def test_a_backend_with_larger_zero_points_may_take_more_bytes(self) -> None:
        rows = [ROW, replace(ROW, name="int4, searched, calibrated", weight_share=0.188)]
        self.assertIn("0.188 of float32's bytes; at most 0.18 are allowed", report.missed(rows)[0])
        self.assertEqual(report.missed(rows, report.WIDER["cuda"]), [])

    def test_figure_is_xml_with_a_dot_for_each_form_of_the_weights(self) -> None:
        rows = [ROW, replace(ROW, name="int8", weight_share=0.28, loss_change=0.002), replace(ROW, name="KV int8")]
        figure = ElementTree.fromstring(report.drawing(rows))
        self.assertEqual(len(figure.findall("{http://www.w3.org/2000/svg}circle")), 2)


def run_main(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = report.main(arguments)
    return code, out.getvalue()


class CommandTest(unittest.TestCase):
    def test_two_variants_end_to_end(self) -> None:
        """The command with one poem and one sample: table, JSON, figure."""
        fixture = str(ROOT / "fixtures" / "quatrains.json")
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.object(report, "VARIANTS", (report.VARIANTS[0], report.VARIANTS[1])):
            json_file, svg_file = Path(folder) / "q.json", Path(folder) / "q.svg"
            code, out = run_main("--fixture", fixture, "--poems", "1", "--samples", "1",
                                      "--json", str(json_file), "--svg", str(svg_file))
            self.assertIn(code, (0, 1), out)  # one sample may lose its form
            plain, int8 = json.loads(json_file.read_text(encoding="utf-8"))["rows"]
            ElementTree.parse(svg_file)
        self.assertEqual((plain["loss_change"], plain["weight_rms"], plain["differs_at"]), (0.0, 0.0, None))
        self.assertTrue(0.0 < int8["weight_rms"] < 0.02 and int8["weight_share"] < 0.30, int8)
        self.assertTrue(0.0 < abs(int8["loss_change"]) < 0.01, int8)
        self.assertEqual(len([line for line in out.splitlines() if line.startswith(("float ", "int8 "))]), 4)

    def test_a_backend_that_is_not_there_is_told_before_the_work(self) -> None:
        for arguments, words in ((("--backend", "gpu"), "there is no backend 'gpu'"),
                                 (("--device", "cpu"), "device can be chosen for backend 'cuda' only")):
            with self.subTest(arguments=arguments), mock.patch.object(report, "Report") as never:
                code, out = run_main(*arguments)
                self.assertEqual((code, len(out.splitlines())), (2, 1), out)
                self.assertIn(words, out)
                never.assert_not_called()

    def test_a_fixture_of_another_vocabulary(self) -> None:
        code, out = run_main("--fixture", str(FIXTURE))
        self.assertEqual((code, len(out.splitlines())), (2, 1), out)
        self.assertRegex(out, "tiny_model cannot write the poems .* lacks .*晓.*; take fixtures/quatrains.json")

    def test_a_file_that_cannot_be_written_is_told_before_the_work(self) -> None:
        with mock.patch.object(report, "Report") as never:
            code, out = run_main("--json", str(ROOT / "no such folder" / "q.json"))
        self.assertEqual(code, 2)
        self.assertIn("cannot write", out)
        never.assert_not_called()

    def test_bad_input_is_one_sentence(self) -> None:
        code, out = run_main("--fixture", "nowhere.json")
        self.assertEqual((code, len(out.splitlines())), (2, 1), out)


@needs("cuda", "warp", "numpy")
class OtherBackendTest(unittest.TestCase):
    """The same by the CUDA backend's kernels, run by the processor; its pages are floats, so KV int8 is left out."""

    def test_two_variants_end_to_end(self) -> None:
        variants = (report.VARIANTS[0], report.VARIANTS[1], report.VARIANTS[6])
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(report, "VARIANTS", variants):
            path = Path(folder) / "q.json"
            code, out = run_main("--backend", "cuda", "--device", "cpu", "--poems", "1", "--samples", "1",
                                      "--json", str(path))
            document = json.loads(path.read_text(encoding="utf-8"))
        self.assertIn(code, (0, 1), out)
        self.assertEqual((document["backend"], document["device"]), ("cuda", "cpu"))
        self.assertEqual([row["name"] for row in document["rows"]], ["float", "int8"])
        exact = report.Report(report.load_scenario(ROOT / "fixtures" / "quatrains.json"), 1, 1,
                              lambda: report.load_backend("reference"))
        logits = [report.poem_logits(report.Model(exact.scenario.model, exact.tensors, exact.make_backend()), poem)
                  for poem in exact.poems]
        self.assertAlmostEqual(document["rows"][0]["loss"], report.mean_loss(logits, exact.poems), places=5)
        self.assertTrue(0.0 < abs(document["rows"][1]["loss_change"]) < 0.01, document)


if __name__ == "__main__":
    unittest.main()
