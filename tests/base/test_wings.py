"""Wings are reached by name; what a deleted one gave is refused in one sentence."""

from __future__ import annotations

import sys
import unittest
from unittest import mock

from starter.base import wings
from starter.base.wings import picture, wing
from starter.errors import BackendError, MissingWingError


class WingTest(unittest.TestCase):
    def missing(self, name: str) -> mock._patch[mock.Mock]:
        """As if there were no module of this name."""
        return mock.patch.object(wings, "import_module", side_effect=ModuleNotFoundError("no", name=name))

    def test_a_module_that_is_here(self) -> None:
        self.assertIs(wing("base.wings", "this"), sys.modules["starter.base.wings"])

    def test_the_sentence_names_what_was_deleted(self) -> None:
        """A wing, a package in it, or one of its files."""
        for deleted, named in (("starter.backends", "starter/backends"),
                               ("starter.backends.lanes", "starter/backends/lanes"),
                               ("starter.backends.lanes.backend", "starter/backends/lanes/backend")):
            with self.subTest(deleted), self.missing(deleted), self.assertRaises(MissingWingError) as caught:
                wing("backends.lanes.backend", "backend 'cpu'")
            self.assertEqual(str(caught.exception), f"backend 'cpu' needs the package {named}, which this copy does "
                             f"not have; take it from the complete project, or do without")
        self.assertIsInstance(caught.exception, BackendError)
        self.assertRaisesRegex(MissingWingError, "it needs the package starter/gone, ", wing, "gone.module", "it")

    def test_a_package_that_a_wing_uses_is_another_matter(self) -> None:
        for name in ("numpy", "starter.engine", "starter.back", None):
            with self.subTest(name=name), self.missing(name), self.assertRaises(ModuleNotFoundError) as caught:
                wing("backends.numpy.backend", "it")
            self.assertEqual(caught.exception.name, name)

    def test_a_picture_falls_back_to_the_repr(self) -> None:
        with self.missing("starter.observe"):
            self.assertIsNone(picture("engine_card", object()))
        with mock.patch.object(wings, "import_module", return_value=mock.Mock(card=str)):
            self.assertEqual(picture("card", 5), "5")


if __name__ == "__main__":
    unittest.main()
