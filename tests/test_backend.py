"""Backends: found by name, complete, and one clear error where they are not."""

from __future__ import annotations

import inspect
import unittest
from importlib.util import find_spec
from unittest import mock

from starter.backend import Backend, ReferenceBackend, ReferenceKVStore, load_backend
from starter.errors import BackendError, MissingWingError
from starter.kv_cache import KVStore, PlainStore
from tests.extras import needs
from tests.wings import needs_wing


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
        check_operations(self, ReferenceBackend, Backend)
        check_operations(self, ReferenceKVStore, KVStore)
        check_operations(self, PlainStore, KVStore)


@needs("numpy", "numpy")
@needs_wing("backends/numpy")
class NumpyProtocolTest(unittest.TestCase):
    def test_the_numpy_backend_has_every_operation(self) -> None:
        from starter import numpy_backend as plain
        from starter.backends.numpy import backend as fast
        for backend, store in ((plain.NumpyBackend, plain.NumpyKVStore), (fast.FastNumpyBackend, fast.NumpyKVStore)):
            check_operations(self, backend, Backend)
            check_operations(self, store, KVStore)


class LoadTest(unittest.TestCase):
    @needs_wing("backends/lanes")
    def test_by_name(self) -> None:
        self.assertIsInstance(load_backend("cpu"), ReferenceBackend)
        self.assertEqual(load_backend("cpu").name, "cpu")
        self.assertEqual(load_backend("auto").name, load_backend().name)
        self.assertEqual(load_backend("auto").name, "numpy" if find_spec("numpy") else "cpu")

    @needs_wing("backends/lanes")
    def test_without_numpy(self) -> None:
        """"auto" falls back; asking for it by name does not, and says how to get it."""
        with mock.patch("starter.backend.find_spec", lambda name, package=None: package):  # modules, but no packages
            self.assertEqual(load_backend("auto").name, "cpu")
            with self.assertRaisesRegex(BackendError, r"needs numpy.*pip install '\.\[numpy\]'"):
                load_backend("numpy")

    def test_a_backend_whose_module_is_not_here(self) -> None:
        """As in a student's project."""
        with mock.patch.dict("starter.backend._BACKENDS", gone=(("no_such_wing.module.Gone",), None, None)):
            self.assertRaisesRegex(MissingWingError, "backend 'gone' needs the package starter/no_such_wing, which",
                                   load_backend, "gone")

    def test_the_plainer_one_where_a_wing_was_deleted(self) -> None:
        places = ("no_such_wing.module.Gone", "backend.ReferenceBackend")
        with mock.patch.dict("starter.backend._BACKENDS", cpu=(places, None, None)):
            self.assertIs(type(load_backend("cpu")), ReferenceBackend)

    def test_a_ready_backend_passes_through(self) -> None:
        backend = ReferenceBackend()
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
