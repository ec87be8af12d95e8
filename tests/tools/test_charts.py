"""Pictures as SVG: are they well-formed, as long as their numbers, and in the order of their parts?"""

from __future__ import annotations

import unittest
import xml.etree.ElementTree as ElementTree

from scripts.charts import GAP, bars, lines, one_below_another

SVG = "{http://www.w3.org/2000/svg}"


def height(picture: ElementTree.Element) -> int:
    return int(picture.attrib["viewBox"].split()[3])


class Charts(unittest.TestCase):
    def test_bars_are_as_long_as_their_values(self) -> None:
        rects = ElementTree.fromstring(bars("speed", {"a": 10.0, "b": 5.0})).findall(f"{SVG}rect")
        longest, other = (float(rect.attrib["width"]) for rect in rects)
        self.assertAlmostEqual(other / longest, 0.5, places=3)

    def test_a_whisker_spans_the_middle_half(self) -> None:
        picture = ElementTree.fromstring(bars("speed", {"a": 10.0}, {"a": (5.0, 20.0)}))
        start, end = picture.find(f"{SVG}path").attrib["d"].removeprefix("M").split("H")  # type: ignore[union-attr]
        left, right = float(start.split()[0]), float(end)
        bar = picture.find(f"{SVG}rect").attrib  # type: ignore[union-attr]
        origin, length = float(bar["x"]), float(bar["width"])
        self.assertAlmostEqual((left - origin) / length, 0.5, places=3)
        self.assertAlmostEqual((right - origin) / length, 2.0, places=3)

    def test_names_are_escaped(self) -> None:
        texts = ElementTree.fromstring(bars("<speed>", {"a & b": 1.0})).findall(f"{SVG}text")
        self.assertEqual([text.text for text in texts], ["<speed>", "a & b", "1"])

    def test_lines_start_at_zero(self) -> None:
        line = ElementTree.fromstring(lines("pages", {"a": [0, 2, 4]})).find(f"{SVG}polyline")
        heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]  # type: ignore[union-attr]
        self.assertEqual(heights[0] - heights[1], heights[1] - heights[2])
        self.assertEqual(heights[0], 214)

    def test_one_below_another(self) -> None:
        charts = [bars("first", {"a": 1.0}), lines("second", {"b": [1, 2]}), bars("third", {"c": 1.0, "d": 2.0})]
        heights = [height(ElementTree.fromstring(chart)) for chart in charts]
        picture = ElementTree.fromstring(one_below_another(charts))
        parts = picture.findall(f"{SVG}svg")
        self.assertEqual([part.find(f"{SVG}text").text for part in parts],  # type: ignore[union-attr]
                         ["first", "second", "third"])
        self.assertEqual([int(part.attrib["y"]) for part in parts],
                         [0, heights[0] + GAP, heights[0] + heights[1] + 2 * GAP])
        self.assertEqual(height(picture), sum(heights) + 2 * GAP)
        self.assertEqual(len(picture.findall(f".//{SVG}style")), 1)

    def test_nothing_to_draw(self) -> None:
        self.assertEqual(height(ElementTree.fromstring(one_below_another([]))), 0)


if __name__ == "__main__":
    unittest.main()
