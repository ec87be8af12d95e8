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
from tests.support import make_engine
from tests.wings import needs_wing


def parameters(owner: type) -> dict[str, list[str]]:
    """Public methods, inherited ones included, and the names of what they take."""
    return {name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(owner, inspect.isfunction) if not name.startswith("_")}


def check_operations(case: unittest.TestCase, made: type, base: type) -> None:
    """``made`` has every method of the base class, with the same parameters, and leaves none of them open."""
    wanted = parameters(base)
    case.assertGreaterEqual(len(wanted), 3)
    case.assertEqual({name: parameters(made).get(name) for name in wanted}, wanted)
    case.assertFalse(inspect.isabstract(made))
    case.assertTrue(issubclass(made, base))


class StandAlone:
    """A backend that inherits from nothing: the operations without a default, as ``ReferenceBackend`` has them."""

    name = "alone"


for _operation in Backend.__abstractmethods__:
    setattr(StandAlone, _operation, vars(ReferenceBackend)[_operation])
StandAlone._products = ReferenceBackend._products  # type: ignore[attr-defined]
StandAlone._attend_part = ReferenceBackend._attend_part  # type: ignore[attr-defined]


class OperationsTest(unittest.TestCase):
    def test_the_plain_backend_and_the_stores_have_every_operation(self) -> None:
        check_operations(self, ReferenceBackend, Backend)
        check_operations(self, ReferenceKVStore, KVStore)
        check_operations(self, PlainStore, KVStore)

    def test_what_has_a_default(self) -> None:
        self.assertEqual({*parameters(Backend)} - Backend.__abstractmethods__,
                         {"expect", "working_bytes", "host_kv_store", "step", "logits"})
        self.assertEqual({*parameters(KVStore)} - KVStore.__abstractmethods__, {"reserve_tails", "drop_tail"})
        store = PlainStore(4, 2)
        store.reserve_tails(10**9)
        store.drop_tail(3)
        self.assertEqual((store.tail_bytes, store.peak_tails), (0, 0))

    def test_a_class_that_leaves_an_operation_open_cannot_be_used(self) -> None:
        for base in (Backend, KVStore):
            for operation in base.__abstractmethods__:
                made = type("Open", (base,), {name: None for name in base.__abstractmethods__ if name != operation})
                with self.subTest(operation=operation), self.assertRaisesRegex(TypeError, operation):
                    made()

    def test_a_backend_that_inherits_from_nothing_gets_the_defaults(self) -> None:
        """And serves the same text: with swapping, which asks it for a store on the host."""
        options: dict[str, object] = {"page_size": 2, "num_pages": 12, "host_pages": 40, "preemption": "swap"}
        outcomes = []
        for backend in (ReferenceBackend(), StandAlone()):
            engine = make_engine(load_backend(backend), **options)  # type: ignore[arg-type]
            streams = [engine.submit((1 + i, 2, 3), 9) for i in range(4)]
            engine.run()
            texts = ["".join(stream) for stream in streams]
            outcomes.append((texts, engine.kv.stats().swaps_out > 0, engine.model.working_bytes))
        self.assertEqual(*outcomes)
        self.assertTrue(outcomes[0][1])

@needs("numpy", "numpy")
@needs_wing("backends/numpy")
class NumpyOperationsTest(unittest.TestCase):
    def test_the_numpy_backend_has_every_operation(self) -> None:
        from starter import numpy_backend as plain
        from starter.backends.numpy import backend as fast
        for backend, store in ((plain.NumpyBackend, plain.NumpyKVStore),
                               (fast.FastNumpyBackend, fast.FastNumpyKVStore)):
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
            says = "backend 'gone' needs the package starter/no_such_wing, which this"
            self.assertRaisesRegex(MissingWingError, says, load_backend, "gone")

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
        for operation in Backend.__abstractmethods__:
            incomplete = type("Incomplete", (), {name: None for name in parameters(Backend) if name != operation})
            with self.subTest(operation=operation), self.assertRaisesRegex(BackendError, f"it has no {operation}"):
                load_backend(incomplete())


if __name__ == "__main__":
    unittest.main()
