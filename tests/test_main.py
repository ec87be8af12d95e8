"""``python3 -m starter``: the table of commands, and what is said where one is missing."""

from __future__ import annotations

import unittest
from unittest import mock

from starter import __main__ as program
from starter.base.wings import wing
from tests.support import Run, run_main
from tests.wings import has_wing, needs_wing

if has_wing("workloads"):
    from starter.workloads import draw


class CommandsTest(unittest.TestCase):
    def test_help_names_every_command(self) -> None:
        for option in ("--help", "-h"):
            result = run_main(program.main, option)
            self.assertEqual((result.code, result.err), (0, ""))
            for command, (_, summary) in program.COMMANDS.items():
                self.assertRegex(result.out, rf"\n  {command} +{summary}")

    @needs_wing("observe", "serving", "workloads")
    def test_every_command_exists(self) -> None:
        for command, (place, _) in program.COMMANDS.items():
            with self.subTest(command=command):
                module, function = place.split(":")
                self.assertTrue(callable(getattr(wing(module, command), function)))

    def test_none_or_an_unknown_one(self) -> None:
        for arguments, problem in (((), "which command?"), (("fly", "-x"), "there is no command 'fly'")):
            result = run_main(program.main, *arguments)
            self.assertEqual((result.code, result.out), (2, ""))
            self.assertIn("\n  replay ", result.err)
            self.assertTrue(result.err.endswith(f"\nerror: {problem}\n"), result.err)

    def test_a_wing_that_was_deleted(self) -> None:
        """Refused in one sentence, without a traceback."""
        with mock.patch.dict(program.COMMANDS, {"serve": ("no_such_wing.server:serve", "answer requests")}):
            result = run_main(program.main, "serve", "--port", 80)
        self.assertEqual((result.code, result.out), (2, ""))
        self.assertRegex(result.err, r"\Aerror: python3 -m starter serve needs the package starter/no_such_wing, which "
                                     r"this copy does not have[^\n]*\n\Z")

    @needs_wing("workloads")
    def test_draw_is_the_program_of_the_workloads(self) -> None:
        arguments = ("--seed", 5, "--requests", 3)
        drawn = run_main(program.main, "draw", *arguments)
        self.assertEqual(drawn, run_main(draw.main, *arguments))
        self.assertEqual((drawn.code, drawn.err), (0, ""))
        self.assertEqual(run_main(program.main, "draw", "--rate", 0), Run(2, "", run_main(draw.main, "--rate", 0).err))


if __name__ == "__main__":
    unittest.main()
