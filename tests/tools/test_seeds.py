"""A seed is the same text, and draws the same tests, whatever the locale."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest

from tests.paths import ROOT

SEED = "geheim-\u00fc\u5bc6"
CODE = ("import sys; sys.path.insert(0, 'acceptance'); from hidden import digest; from seeds import plain_seed; "
        "print(digest(plain_seed(sys.argv[1])))")
BAD = "import sys; sys.path.insert(0, 'acceptance'); from hidden import main; sys.exit(main(['--seed', '-', '--show']))"


class Seeds(unittest.TestCase):
    def run_code(self, code, *arguments, given=b"", **environment):
        return subprocess.run([sys.executable, "-c", code, *arguments], input=given, capture_output=True, check=False,
                              cwd=ROOT, env={**os.environ, **environment})

    def test_the_same_everywhere(self):
        found = {self.run_code(CODE, "-", given=SEED.encode() + b"\r\n").stdout}
        found.add(self.run_code(CODE, "-", given=b"\xef\xbb\xbf" + SEED.encode()).stdout)
        found.add(self.run_code(CODE, "-", given=SEED.encode(), PYTHONIOENCODING="cp1252").stdout)
        found.add(self.run_code(CODE, SEED).stdout)
        if os.name == "posix":  # elsewhere command lines are Unicode
            for more in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONUTF8": "1"}):
                found.add(self.run_code(CODE, SEED, **more).stdout)
        self.assertEqual(len(found), 1)
        self.assertEqual(len(found.pop().strip()), 64)

    def test_what_is_no_utf8_is_refused(self):
        run = self.run_code(BAD, given=b"geheim-\xfc\n")
        self.assertEqual((run.returncode, run.stdout), (2, b""))
        self.assertIn(b"--seed is not in UTF-8", run.stderr)


if __name__ == "__main__":
    unittest.main()
