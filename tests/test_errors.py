"""The exception family: who inherits from whom, and what a SchemaError carries."""

from __future__ import annotations

import pickle
import unittest

import starter
from starter import errors
from starter.errors import EngineError, SchemaError, UnknownRequestError

FAMILY = {
    "SchemaError": ValueError, "RequestError": ValueError, "QuantizationError": ValueError,
    "UnknownRequestError": KeyError, "StreamTimeoutError": TimeoutError,
    "DuplicateRequestError": errors.RequestError, "CapacityError": errors.RequestError,
    "QueueFullError": errors.RequestError, "PoolTooSmallError": errors.OutOfPagesError,
    "OutOfPagesError": EngineError, "StaleHandleError": EngineError, "BackendError": EngineError,
    "MissingWingError": errors.BackendError,
}


class ErrorsTest(unittest.TestCase):
    def test_family(self) -> None:
        for name, parent in FAMILY.items():
            with self.subTest(name):
                error = getattr(errors, name)
                self.assertTrue(issubclass(error, EngineError))
                self.assertTrue(issubclass(error, parent))
                self.assertIs(getattr(starter, name), error)
        defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
        self.assertEqual(defined, {"EngineError", *FAMILY})

    def test_different_troubles_are_not_confused(self) -> None:
        for one, other in (("OutOfPagesError", "CapacityError"), ("UnknownRequestError", "DuplicateRequestError"),
                           ("SchemaError", "RequestError"), ("StaleHandleError", "OutOfPagesError")):
            with self.subTest(one=one, other=other):
                self.assertFalse(issubclass(getattr(errors, one), getattr(errors, other)))
                self.assertFalse(issubclass(getattr(errors, other), getattr(errors, one)))

    def test_a_schema_error_says_where(self) -> None:
        error = SchemaError("must be 1", "/requests/2/max_tokens")
        self.assertEqual((error.path, error.problem), ("/requests/2/max_tokens", "must be 1"))
        self.assertEqual(str(error), "/requests/2/max_tokens: must be 1")
        self.assertEqual((SchemaError("is empty").path, str(SchemaError("is empty"))), ("", "is empty"))

    def test_every_error_survives_the_way_to_another_process(self) -> None:
        for name in ("EngineError", *FAMILY):
            kind = getattr(errors, name)
            for error in (kind("no, it's 'bad'"), *([kind("is odd", "/a/b")] if name == "SchemaError" else [])):
                error.more = {"pages": 3}
                for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                    with self.subTest(name, protocol=protocol):
                        there = pickle.loads(pickle.dumps(error, protocol))
                        self.assertIs(type(there), kind)
                        self.assertEqual((str(there), there.args, vars(there)), (str(error), error.args, vars(error)))

    def test_an_unknown_request_reads_as_a_sentence(self) -> None:
        self.assertEqual(str(UnknownRequestError("no request 'r1'")), "no request 'r1'")
        self.assertEqual(str(UnknownRequestError()), "")


if __name__ == "__main__":
    unittest.main()
