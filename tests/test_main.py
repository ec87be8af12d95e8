"""``python3 -m starter``: the table of commands, and what is said where one is missing."""

from __future__ import annotations

import sys
import unittest
from unittest import mock

from starter import __main__ as program
from starter.base.bundled import bundled
from starter.base.wings import wing
from tests.paths import FIXTURE, ROOT
from tests.support import Run, run_main
from tests.wings import has_wing, needs_wing

if has_wing("workloads"):
    from starter.workloads import draw


class CommandsTest(unittest.TestCase):
    def test_help_names_every_command(self) -> None:
        for options in (("--help",), ("-h",), ()):
            result = run_main(program.main, *options)
            self.assertEqual((result.code, result.err), (0, ""))
            for command, (_, summary) in program.COMMANDS.items():
                self.assertRegex(result.out, rf"\n  {command} +{summary}")

    @needs_wing("observe", "serving", "workloads")
    def test_every_command_exists(self) -> None:
        for command, (place, _) in program.COMMANDS.items():
            with self.subTest(command=command):
                module, function = place.split(":")
                home = program if module == "__main__" else wing(module, command)
                self.assertTrue(callable(getattr(home, function)))

    def test_none_or_an_unknown_one(self) -> None:
        result = run_main(program.main, "fly", "-x")
        self.assertEqual((result.code, result.out), (2, ""))
        self.assertIn("\n  replay ", result.err)
        self.assertTrue(result.err.endswith("\nerror: there is no command 'fly'\n"), result.err)

    def test_version(self) -> None:
        self.assertRegex(run_main(program.main, "--version").out, r"\Ap07 \d+\.\d+\.\d+, Python 3\.\d+\.\d+\n\Z")

    def test_the_name_that_it_was_started_by(self) -> None:
        """On its own screen and in the help of each command."""
        as_module = str(ROOT / "starter" / "__main__.py")
        for file, name, other in (("/bin/p07", "p07", "python3 -m starter"), ("p07.exe", "p07", "python3 -m starter"),
                                  (as_module, "python3 -m starter", "p07 ")):
            with mock.patch.object(sys, "argv", [file]):
                screen = run_main(program.main)
                self.assertIn(f"\nusage: {name} COMMAND ...\n", screen.out)
                self.assertNotIn(other, screen.out)
                for command, (place, _) in program.COMMANDS.items():
                    if not (place.startswith(("__main__:", "driver:")) or has_wing(place.partition(".")[0])):
                        continue
                    with self.subTest(name=name, command=command):
                        result = run_main(program.main, command, "--help")
                        self.assertEqual((result.code, result.err), (0, ""))
                        self.assertTrue(result.out.startswith(f"usage: {name} {command} "), result.out)
                        self.assertNotIn(other, result.out)
                        self.assertNotIn("driver.py", result.out)
                        self.assertNotIn("fixtures/", result.out)

    def test_a_scenario_by_its_name_alone(self) -> None:
        options = ("--manifest-only", "--json")
        whole = run_main(program.main, "run", "--fixture", FIXTURE, *options)
        self.assertEqual(run_main(program.main, "run", "--fixture", "tiny_model", *options), whole)
        result = run_main(program.main, "run", "--fixture", "nothing")
        self.assertEqual((result.code, result.out), (2, ""))
        self.assertRegex(result.err, r"\Aerror: cannot read nothing: [^\n]+; by name there are quatrains and "
                                     r"tiny_model\n\Z")

    def test_the_demo_and_options_without_a_command_run_scenarios(self) -> None:
        """From any folder: the scenario is found where the package is."""
        options = ("--fixture", "tiny_model.json", "--clock", "virtual")
        for arguments in (("demo", "tiny_model", "--clock", "virtual"), options, ("run", *options)):
            result = run_main(program.main, *arguments)
            self.assertEqual((result.code, result.err), (0, ""))
            self.assertTrue(result.out.endswith("All 10 outputs equal the golden tokens.\n"))
        for name in ("nonsense", "../fixtures/tiny_model"):
            result = run_main(program.main, "demo", name)
            self.assertEqual((result.code, result.err),
                             (2, f"error: there is no demo {name!r}; there are quatrains and tiny_model\n"))

    def test_what_comes_with_the_project(self) -> None:
        self.assertEqual((bundled("tiny_model.json"), bundled("tiny_model")), (FIXTURE, FIXTURE))
        for name in ("nothing.json", "scenario.schema", "fixtures/tiny_model.json", "..", "", "/etc/passwd"):
            self.assertIsNone(bundled(name), name)

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
