"""The pictures of notebooks: what they show is what is so, nothing of a request becomes markup, reprs are one line."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import unittest
from collections import Counter
from xml.etree import ElementTree

from starter.base.model_config import QuantizationConfig
from starter.errors import QuantizationError
from starter.kv_cache import KVCacheManager
from starter.observe.notebook import HUES, PHASE_HUES, colours, quantization_error
from starter.quantization import quantize
from starter.schema import Request, SamplingParams, TokenEvent
from starter.timeline import Timeline
from tests.paths import ROOT
from tests.support import FIVE, TIGHT, make_engine
from tests.timelines import full_engine

NASTY = "<script>&\"'\u202e|"


def drawn(html: str) -> ElementTree.Element:
    """Well-formed, or an error."""
    return ElementTree.fromstring(f"<div>{html}</div>")


def rects(element: ElementTree.Element, fill: str) -> list[ElementTree.Element]:
    return [rect for rect in element.iter("rect") if rect.get("fill") == fill]


def cells(element: ElementTree.Element) -> list[list[str]]:
    """The text of every table's rows."""
    return [["".join(cell.itertext()) for cell in row] for row in element.iter("tr")]


class PagePoolTest(unittest.TestCase):
    def setUp(self) -> None:
        self.kv = KVCacheManager(num_pages=6, page_size=4, width=1)
        self.first = self.kv.allocate("first", 6)
        for position in range(6):
            self.kv.append(self.first, [position], [position])
        self.kv.fork(self.first, NASTY)

    def test_a_box_for_each_page_in_the_colours_of_its_owners(self) -> None:
        picture = drawn(self.kv._repr_html_())
        groups = list(picture.iter("g"))
        hues = colours(["first", NASTY])
        fills = [[rect.get("fill") for rect in group.iter("rect")][1:] for group in groups]
        self.assertEqual(fills, [[hues["first"], hues[NASTY], "#111"]] * 2 + [[]] * 4)
        self.assertEqual([(rect.get("x"), rect.get("width")) for rect in list(groups[1].iter("rect"))[1:3]],
                         [("45", "20"), ("65", "20")])  # side by side, half of a box each
        self.assertEqual([float(bar.get("width", "")) for bar in rects(picture, "#111")], [40.0, 20.0])  # 4 and 2 of 4
        self.assertEqual(["".join(group.find("text").itertext()) for group in groups],  # type: ignore[union-attr]
                         ["0 ×2", "1 ×2", "2", "3", "4", "5"])
        self.assertEqual(groups[1][0].text, f"page 1: used by first, {NASTY}, 2 tokens")

    def test_block_tables_and_the_line_above(self) -> None:
        picture = drawn(self.kv._repr_html_())
        self.assertEqual([row[1:] for row in cells(picture)[1:]], [["first", "6", "0 1"], [NASTY, "6", "0 1"]])
        self.assertEqual("".join(picture[0].itertext()),
                         "Pages · 2 of 6 pages of 4 tokens used, 0 cached (dashed), 2 used slots empty")

    def test_cached_pages_are_dashed_and_a_large_pool_is_cut(self) -> None:
        kv = KVCacheManager(num_pages=600, page_size=2, prefix_sharing=True)
        handle = kv.allocate("r", 5, [1, 2, 3, 4, 5])
        kv.commit(handle, 5, [1, 2, 3, 4, 5])
        kv.release(handle)
        picture = drawn(kv._repr_html_())
        self.assertEqual(len([rect for rect in picture.iter("rect") if rect.get("stroke-dasharray")]), 2)
        self.assertEqual(len([*picture.iter("g")]), 512)
        self.assertIn("and 88 more pages", "".join(picture.itertext()))

    def test_a_table_that_is_swapped_out(self) -> None:
        kv = KVCacheManager(num_pages=2, page_size=2, host_pages=2)
        handle = kv.allocate("r", 3)
        kv.swap_out(handle)
        self.assertEqual(cells(drawn(kv._repr_html_()))[1][1:], ["r", "0", "swapped out"])


class ScheduleTest(unittest.TestCase):
    def test_bars_are_as_long_as_their_share_of_the_budget_and_everybody_has_a_reason(self) -> None:
        engine = make_engine(**TIGHT)
        for name, ask in FIVE.items():
            ask.submit(engine, name)
        while engine.active:
            decision = engine.step()
            picture = drawn(decision._repr_html_())
            widths = [float(rect.get("width", "")) for rect in picture.iter("rect") if rect.get("height") == "22"]
            wanted = [640 * chunk.count / 6 for chunk in decision.chunks]
            self.assertEqual(widths, [float(f"{width:.4g}") for width in (*wanted, 640)])
            rows = {row[1]: row[3] for row in cells(picture)[1:]}
            self.assertEqual(rows, {request: decision.reasons.get(request, "") for request in rows})
            self.assertEqual(set(rows), {*decision.running, *decision.waiting, *decision.preempted})

    def test_a_long_queue_is_counted(self) -> None:
        engine = make_engine(max_running=1)
        for _ in range(300):
            engine.submit([1], 2)
        picture = engine.step()._repr_html_()
        self.assertIn("1 of 32 tokens; 299 wait, of which 256 are listed", picture)
        self.assertNotIn("are listed", make_engine().step()._repr_html_())

    def test_what_each_does(self) -> None:
        engine = make_engine(**TIGHT)
        engine.submit([1] * 9, 2, request_id=NASTY)
        engine.submit([1, 2], 2, request_id="b")
        engine.submit([3] * 8, 2, request_id="waits")
        self.assertEqual([row[1:3] for row in cells(drawn(engine.step()._repr_html_()))[1:]],
                         [["b", "prefill, positions 0 to 1"], [NASTY, "prefill, positions 0 to 3"], ["waits", "waits"]])
        engine.step()
        self.assertEqual(cells(drawn(engine.step()._repr_html_()))[1][1:3], [NASTY, "decode, position 9"])


class GanttTest(unittest.TestCase):
    def test_a_request_has_a_column_in_its_phase_s_colour_for_every_step(self) -> None:
        engine = make_engine(**TIGHT)
        for name, ask in FIVE.items():
            ask.submit(engine, name)
        columns: Counter[str] = Counter()
        before: set[str] = set()
        while engine.active:
            decision = engine.step()
            before |= set(decision.preempted)
            doing = {chunk.request_id: chunk.phase for chunk in decision.chunks}
            columns.update(doing.values())
            columns.update("preempted" if name in before else "waiting" for name in decision.waiting)
        self.assertGreater(min(columns[phase] for phase in ("waiting", "prefill", "decode", "preempted")), 0)
        picture = drawn(engine.timeline._repr_html_())
        width = 600 / engine.steps
        for phase, number in columns.items():
            bars = [bar for bar in rects(picture, PHASE_HUES[phase]) if bar.get("height") == "14"]
            self.assertAlmostEqual(sum(float(bar.get("width", "")) for bar in bars) / width, number, delta=0.05)

    def test_ends_are_named(self) -> None:
        engine = full_engine()
        text = "".join(drawn(engine.timeline._repr_html_()).itertext())
        for words in ("× cancelled", "! error", "a: prefill, steps 0 to 0", "waiting", "0 tokens"):
            self.assertIn(words, text)

    def test_a_timeline_without_its_beginning_says_so(self) -> None:
        timeline = Timeline(keep=2)
        for step in range(3):
            timeline.append({"event": "lift", "step": step, "time": 0.0})
        self.assertIn("3 events; no picture: a report needs a timeline from its beginning", timeline._repr_html_())

    def test_an_empty_one(self) -> None:
        self.assertIn("no picture", Timeline()._repr_html_())
        self.assertIn("1 event, 0 steps", make_engine().timeline._repr_html_())


class QuantizationPictureTest(unittest.TestCase):
    ROWS = ((7.0, -7.0, 3.0, 0.0), (1.0, 1.0, 0.5, -0.3))

    def test_codes_and_half_steps(self) -> None:
        tensor = quantize(self.ROWS, QuantizationConfig(bits=4, group_size=2))
        titles = [title.text for title in drawn(tensor._repr_html_()).iter("title")]
        # scales 1, 3/7, 1/7, 1/14; codes 7 -7, 7 0, 7 7, 7 -4
        self.assertEqual(titles[:4], ["-7: 1", "-4: 1", "0: 1", "7: 5"])
        self.assertEqual(titles[4:], ["row 0, group 0: ±0.5", "row 0, group 1: ±0.214", "row 1, group 0: ±0.0714",
                                      "row 1, group 1: ±0.0357"])

    def test_bars_of_int8_join_sixteen_codes(self) -> None:
        dice = random.Random(4)
        tensor = quantize([[dice.gauss(0, 1) for _ in range(200)] for _ in range(40)], QuantizationConfig(bits=8))
        titles = [title.text or "" for title in drawn(tensor._repr_html_()).iter("title")]
        bars = [tuple(map(int, title.split(": "))) for title in titles if not title.startswith("row")]
        self.assertEqual(sum(number for _, number in bars), 8000)
        self.assertTrue(all((low + 127) % 16 == 0 for low, _ in bars))
        self.assertEqual(len(titles) - len(bars), 32 * 7)  # rows are cut, groups of 200 / 32 are not

    def test_numbers_become_grid_points(self) -> None:
        for symmetric in (True, False):
            with self.subTest(symmetric=symmetric):
                tensor = quantize(self.ROWS, QuantizationConfig(bits=4, group_size=3, symmetric=symmetric))
                picture = drawn(quantization_error(tensor, self.ROWS, row=1, group=1))
                self.assertEqual([title.text for title in picture.iter("title")], ["-0.3 becomes -0.3"])
                picture = drawn(quantization_error(tensor, self.ROWS, row=1))
                self.assertEqual(len([*picture.iter("circle")]), 6)

    def test_a_group_that_is_not_there(self) -> None:
        tensor = quantize(self.ROWS, QuantizationConfig(bits=4, group_size=3))
        with self.assertRaisesRegex(QuantizationError, "group 2 of a row; a row has groups 0 to 1"):
            quantization_error(tensor, self.ROWS, group=2)


class AllPicturesTest(unittest.TestCase):
    def pictures(self) -> list[str]:
        engine = make_engine(**TIGHT)
        engine.submit([1, 2, 3], 4, request_id=NASTY)
        decision = engine.step()
        return [thing._repr_html_() for thing in (engine, engine.kv, decision, engine.timeline, engine.metrics())]

    def test_they_are_well_formed_and_escaped(self) -> None:
        for html in self.pictures():
            drawn(html)
            self.assertNotIn("<script", html)

    def test_they_are_the_same_every_time(self) -> None:
        self.assertEqual(self.pictures(), self.pictures())

    def test_text_is_the_page_s_own_colour_or_black_on_a_filled_box(self) -> None:
        for html in self.pictures():
            fills = set(re.findall(r'<text [^>]*fill="([^"]+)"', html))
            self.assertLessEqual(fills, {"currentColor", "#111"})

    def test_an_engine_shows_requests_and_pages(self) -> None:
        engine = make_engine()
        engine.submit([1, 2, 3], 4, request_id="r")
        engine.step()
        self.assertEqual([row for row in cells(drawn(engine._repr_html_())) if "r" in row],
                         [["r", "running", "3", "1"], ["", "r", "3", "0"]])

    def test_metrics_are_those_of_the_object(self) -> None:
        engine = full_engine()
        rows, metrics = dict(cells(drawn(engine.metrics()._repr_html_()))), engine.metrics()
        self.assertEqual(rows["preemptions"], str(metrics.preemptions))
        self.assertIn(f"{metrics.submitted} submitted, {metrics.refused} refused", rows["requests"])
        self.assertIn(f"median {metrics.ttft.p50:.4g}", rows["time to first token, s"])
        self.assertIn(f"{metrics.output_tokens} tokens in {metrics.steps} steps", rows["output"])
        self.assertEqual(dict(cells(drawn(make_engine().metrics()._repr_html_())))["time to first token, s"], "-")

    def test_nobody_loads_the_pictures_unless_they_are_looked_at(self) -> None:
        code = "import sys, starter.engine; sys.exit('starter.observe.notebook' in sys.modules)"
        self.assertEqual(subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode, 0)


class ColoursTest(unittest.TestCase):
    def test_ten_are_told_apart_and_keep_theirs(self) -> None:
        dice = random.Random(8)
        for size in range(1, len(HUES) + 1):
            names = [f"request-{dice.randrange(10**6)}" for _ in range(size)]
            self.assertEqual(len(set(colours(names).values())), size)
            self.assertEqual(colours(names), colours(reversed(names)))
            self.assertEqual(colours([names[0]]), colours([names[0]]))

    def test_more_than_ten_share(self) -> None:
        self.assertEqual(set(colours(map(str, range(30))).values()), set(HUES))


class ReprTest(unittest.TestCase):
    def test_one_line_each(self) -> None:
        engine = make_engine(page_size=4, num_pages=9)
        engine.submit([1, 2, 3], 3, request_id="r")
        tensor = quantize([[1.0, 2.0]], QuantizationConfig(bits=4, group_size=None, symmetric=False))
        for thing, wanted in (
                (engine.step(), "<ScheduleDecision: step 0, 3 of 32 tokens: r+3; 0 wait>"),
                (engine.step(0), "<ScheduleDecision: step 1, 0 of 0 tokens: nothing; 0 wait>"),
                (engine, "<InferenceEngine reference: step 2, 1 active requests, 8 of 9 pages free>"),
                (engine.kv, "<KVCacheManager: 8 of 9 pages of 4 tokens free, 0 of them cached; 1 block tables>"),
                (engine.metrics(), "<Metrics: 1 requests, 2 steps, 1 tokens, TTFT 1 s, TPOT - (medians)>"),
                (tensor, f"<QuantizedTensor 1 x 2: int4, a group a row, asymmetric; {tensor.nbytes} bytes, "
                         f"{tensor.nbytes / 8:.2f} of float32>"),
                (quantization_error(tensor, [[1.0, 2.0]]), re.compile(r"<Picture: \d+ characters of HTML>"))):
            self.assertRegex(repr(thing), wanted if isinstance(wanted, re.Pattern) else f"^{re.escape(wanted)}$")

    def test_requests_and_events_leave_out_their_defaults(self) -> None:
        for thing, wanted in (
                (SamplingParams(), "SamplingParams()"),
                (SamplingParams(temperature=0.5, stop=["x"]), "SamplingParams(temperature=0.5, stop=('x',))"),
                (Request("r", [1, 2], 3), "Request(request_id='r', prompt_tokens=(1, 2), max_tokens=3)"),
                (TokenEvent("r", 0, None, "", 2, 2.0, finish_reason="length"),
                 "TokenEvent(request_id='r', index=0, token=None, text='', step=2, time=2.0, finish_reason='length')")):
            self.assertEqual(repr(thing), wanted)
            self.assertEqual(eval(wanted), thing)  # it is Python


if __name__ == "__main__":
    unittest.main()
