"""scripts/serve_load.py, small: all streams are whole, nothing is kept of clients that leave. Nothing is timed."""

from __future__ import annotations

import argparse
import json
import unittest
from unittest import mock

from tests.support import run_main
from tests.wings import has_wing, needs_wing

if has_wing("serving"):
    from scripts import serve_load


@needs_wing("serving", "checkpoints")
class LoadTest(unittest.TestCase):
    def test_streams(self) -> None:
        result = run_main(serve_load.main, "streams", "--clients", 12, "--json")
        document = json.loads(result.out)["streams"]
        self.assertEqual((result.code, document["complete"], document["ok"]), (0, 12, True))
        self.assertEqual(document["left"], {"pages": 0, "requests": 0, "threads": 0})

    def test_clients_that_leave(self) -> None:
        result = run_main(serve_load.main, "leave", "--clients", 40)
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertRegex(result.out, r"\Aok    leave: clients 40, ")

    def test_what_is_kept_is_a_failure(self) -> None:
        """A client that is not noticed, as if nothing watched it, is still there at the end."""
        left = {"pages": 3, "requests": 1, "threads": 0}
        with mock.patch.object(serve_load, "settled", return_value=left):
            result = run_main(serve_load.main, "leave", "--clients", 5)
        self.assertEqual(result.code, 1)
        self.assertTrue(result.out.startswith("FAIL  leave: "), result.out)

    def test_the_first_token(self) -> None:
        result = serve_load.first_token(argparse.Namespace(backend="cpu", requests=3))
        self.assertEqual(result["requests"], 3)
        self.assertGreater(result["http_ms"], 0.0)
        self.assertGreater(result["in_process_ms"], 0.0)


if __name__ == "__main__":
    unittest.main()
