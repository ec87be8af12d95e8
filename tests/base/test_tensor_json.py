"""The JSON form of a quantized tensor, written by hand: what its parts become, and what is refused."""

from __future__ import annotations

import unittest
from array import array

from starter.base.tensor_json import parse_tensor
from starter.errors import QuantizationError

DOCUMENT = {"shape": [1, 3], "bits": 4, "group_size": 2, "symmetric": False, "scale_format": "f",
            "scales": [0.5, 0.25], "zero_points": [1, -300], "packed": "210f"}


class Parse(unittest.TestCase):
    def test_parts_by_hand(self) -> None:
        self.assertEqual(parse_tensor(DOCUMENT), {
            "shape": (1, 3), "bits": 4, "group_size": 2, "symmetric": False, "scales": array("f", [0.5, 0.25]),
            "zero_points": array("h", [1, -300]), "packed": b"\x21\x0f"})

    def test_number_formats(self) -> None:
        for changes, formats in (({}, ("f", "h")), ({"scale_format": "d"}, ("d", "q")),
                                 ({"zero_points": [0.5, 1.0]}, ("f", "f")), ({"zero_points": []}, ("f", "h"))):
            with self.subTest(changes=changes):
                parts = parse_tensor({**DOCUMENT, **changes})
                self.assertEqual((parts["scales"].typecode, parts["zero_points"].typecode), formats)

    def test_refusals(self) -> None:
        for changes, words in (({"more": 1}, "exactly the keys shape, bits"), ({"bits": "4"}, "/bits"),
                               ({"scales": [0.1, 1.0]}, "a float32 holds exactly; write 'd'"),
                               ({"zero_points": [1, 40_000]}, "not a quantized tensor"),
                               ({"packed": "zz"}, "not a quantized tensor"), ({"scale_format": "e"}, "/scale_format")):
            with self.subTest(changes=changes), self.assertRaisesRegex(QuantizationError, words):
                parse_tensor({**DOCUMENT, **changes})
        self.assertRaises(QuantizationError, parse_tensor, [])


if __name__ == "__main__":
    unittest.main()
