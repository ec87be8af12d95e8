"""Records made fast equal those made by name."""

from __future__ import annotations

import unittest
from typing import NamedTuple

from starter.base.records import quick


class Pair(NamedTuple):
    first: int
    second: str = "two"


class QuickTest(unittest.TestCase):
    def test_equal_to_one_made_by_name(self) -> None:
        made = quick(Pair)((1, "b"))
        self.assertEqual((made, made.second, type(made), repr(made)), (Pair(1, "b"), "b", Pair, repr(Pair(1, "b"))))
        self.assertEqual(made._replace(first=3), Pair(3, "b"))


if __name__ == "__main__":
    unittest.main()
