"""Backends: found by name, complete, and one clear error where they are not."""

from __future__ import annotations

import inspect
import unittest
from importlib.util import find_spec
from unittest import mock

from starter.backend import Backend, KVStore, load_backend
from starter.cpu_backend import CpuBackend, CpuKVStore
from starter.errors import BackendError
from starter.plain_store import PlainStore
from tests.extras import needs


def parameters(owner: object) -> dict[str, list[str]]:
    """Public methods and the names of what they take."""
    return {name: list(inspect.signature(method).parameters)
            for name, method in vars(owner).items() if inspect.isfunction(method) and not name.startswith("_")}


def check_operations(case: unittest.TestCase, made: type, protocol: type) -> None:
    """``made`` has every method of the protocol, with the same parameters."""
    wanted = parameters(protocol)
    case.assertGreaterEqual(len(wanted), 3)
    case.assertEqual({name: parameters(made).get(name) for name in wanted}, wanted)


class ProtocolTest(unittest.TestCase):
    def test_the_plain_backend_and_the_stores_have_every_operation(self) -> None:
        check_operations(self, CpuBackend, Backend)
        check_operations(self, CpuKVStore, KVStore)
        check_operations(self, PlainStore, KVStore)



@needs("numpy", "numpy")
class NumpyProtocolTest(unittest.TestCase):
    def test_the_numpy_backend_has_every_operation(self) -> None:
        from starter.numpy_backend import NumpyBackend, NumpyKVStore
        check_operations(self, NumpyBackend, Backend)
        check_operations(self, NumpyKVStore, KVStore)


class LoadTest(unittest.TestCase):
    def test_by_name(self) -> None:
        self.assertIsInstance(load_backend("cpu"), CpuBackend)
        self.assertEqual(load_backend("cpu").name, "cpu")
        self.assertEqual(load_backend("auto").name, load_backend().name)
        self.assertEqual(load_backend("auto").name, "numpy" if find_spec("numpy") else "cpu")

    def test_without_numpy(self) -> None:
        """"auto" falls back; asking for it by name does not, and says how to get it."""
        with mock.patch("starter.backend.find_spec", lambda name, package=None: package):  # modules, but no packages
            self.assertEqual(load_backend("auto").name, "cpu")
            with self.assertRaisesRegex(BackendError, r"needs numpy.*pip install '\.\[numpy\]'"):
                load_backend("numpy")

    def test_a_backend_whose_module_is_not_here(self) -> None:
        """As in a student's project."""
        with mock.patch.dict("starter.backend._BACKENDS", gone=("no_such_module", "Gone", None, None)):
            self.assertRaisesRegex(BackendError, "backend 'gone' is not part of this project", load_backend, "gone")

    def test_a_ready_backend_passes_through(self) -> None:
        backend = CpuBackend()
        self.assertIs(load_backend(backend), backend)

    def test_what_is_no_backend(self) -> None:
        for name in ("gpu", "CPU", "", "numpy ", "../cpu_backend"):
            with self.subTest(name=name), self.assertRaisesRegex(BackendError, "'cpu', 'numpy', 'cuda', 'auto'"):
                load_backend(name)
        for thing in (None, 5, object(), b"cpu", {"name": "cpu"}):
            with self.subTest(thing=thing), self.assertRaisesRegex(BackendError, "is no backend: it has no matrix, "):
                load_backend(thing)  # type: ignore[arg-type]
        for operation in parameters(Backend):
            incomplete = type("Incomplete", (), {name: None for name in parameters(Backend) if name != operation})
            with self.subTest(operation=operation), self.assertRaisesRegex(BackendError, f"it has no {operation}"):
                load_backend(incomplete())


if __name__ == "__main__":
    unittest.main()
