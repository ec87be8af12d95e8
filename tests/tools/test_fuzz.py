"""The fuzz itself: some of its seeds, and that it notices what is broken."""

from __future__ import annotations

import subprocess
import sys
import unittest
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from unittest.mock import patch

from scripts import fuzz
from starter import scheduler
from starter.backend import Piece
from starter.backends.int8_pages import Int8KVStore
from starter.base.fault_kinds import MemoryCut
from starter.core import EngineCore, ModelRunner, Outcome
from starter.kv_cache import KVCacheManager, PagePool, PrefixIndex
from starter.sampling import Draws
from starter.streams import RequestStream
from tests.paths import ROOT


class FuzzTest(unittest.TestCase):
    def test_some_seeds(self) -> None:
        for seed in (*range(1000, 1012), 1019):
            with self.subTest(seed=seed):
                fuzz.run_threads(seed) if seed % 10 == 9 else fuzz.Fuzz(seed).run(60)

    def assert_noticed(self, within: int = 60) -> None:
        """One of the first seeds fails."""
        for seed in range(within):
            try:
                fuzz.Fuzz(seed).run(60)
            except Exception:
                return
        self.fail(f"{within} seeds have noticed nothing")

    def test_a_page_that_is_never_given_back(self) -> None:
        drop = PagePool.drop
        with patch.object(PagePool, "drop", lambda pool, page: drop(pool, page) if page else None):
            self.assert_noticed()

    def test_shared_pages_that_are_written_without_a_copy(self) -> None:
        with patch.object(KVCacheManager, "_needs_copy", lambda *arguments: False):
            self.assert_noticed()

    def test_prefixes_that_are_confused(self) -> None:
        find = PrefixIndex.find
        with patch.object(PrefixIndex, "find", lambda index, node, tokens: find(index, index.root(None), tokens)), \
                patch.object(PrefixIndex, "publish", lambda index, node, tokens, page, publish=PrefixIndex.publish:
                             publish(index, index.root(None), tokens, page)):
            self.assert_noticed()

    def test_tokens_after_a_cancel(self) -> None:
        with patch.object(RequestStream, "withhold", lambda stream: None):
            self.assert_noticed()

    def test_a_stream_that_never_ends(self) -> None:
        with patch.object(EngineCore, "_end_failures", lambda core: None), \
                patch.object(fuzz, "MANY_STEPS", 1_000):
            self.assert_noticed()

    def test_pages_that_are_given_back_twice(self) -> None:
        drop = PagePool.drop
        with patch.object(PagePool, "drop", lambda pool, page: (drop(pool, page), drop(pool, page))):
            self.assert_noticed()

    def test_swapped_tokens_that_are_not_copied(self) -> None:
        with patch.object(PagePool, "take_copies", lambda pool, origin, sources, *more: pool.take(*more)):
            self.assert_noticed()

    def test_random_numbers_that_depend_on_the_neighbours(self) -> None:
        shared = Draws(fuzz.SamplingParams(), "all", 0, 0)
        with patch.object(Draws, "random", lambda draws: shared._generator.random()):
            self.assert_noticed()

    def test_a_failure_that_is_passed_on_to_neighbours(self) -> None:
        """Whoever shares the step with the one at fault ends with it."""
        def run(executor: ModelRunner, pieces: Mapping[str, Piece]) -> dict[str, Outcome]:
            try:
                return executor._forward(pieces)
            except Exception as error:
                return dict.fromkeys(pieces, error)

        with patch.object(ModelRunner, "run", run):
            self.assert_noticed()

    def test_tails_of_int8_pages_that_nobody_uses(self) -> None:
        with patch.object(Int8KVStore, "drop_tail", lambda store, page: None):
            self.assert_noticed()

    def test_grids_of_int8_pages_that_are_not_copied(self) -> None:
        def copy_page(store: Int8KVStore, source: int, target: int, origin: Int8KVStore | None = None) -> None:
            copied(store, source, target, origin)
            store.tails.pop(target, None)

        copied = Int8KVStore.copy_page
        with patch.object(Int8KVStore, "copy_page", copy_page):
            self.assert_noticed()

    def test_a_cut_of_memory_that_begins_after_the_last_operation(self) -> None:
        """It ends with the run, and loses no page: some of these begin in the steps that finish the requests."""
        for step in range(15):
            with self.subTest(step=step), \
                    patch.object(fuzz, "random_faults", lambda rng, step=step: [MemoryCut(step, 1, 10**6)]):
                fuzz.Fuzz(4).run(20)

    def test_a_request_that_gives_up_at_its_first_refusal(self) -> None:
        with patch.object(scheduler, "REFUSAL_LIMIT", 1):
            self.assert_noticed()

    def test_the_command(self) -> None:
        script = str(ROOT / "scripts" / "fuzz.py")
        run = subprocess.run([sys.executable, script, "--first", "3", "--seeds", "2", "--operations", "20"],
                             capture_output=True, encoding="utf-8", check=False)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.assertEqual(run.stdout, "2 seeds, 40 operations: no page lost, no stream wrong\n")

    def test_a_failure_says_how_to_replay_it(self) -> None:
        with patch.object(fuzz.Fuzz, "run", side_effect=AssertionError("broken")), \
                patch.object(sys, "argv", ["fuzz.py", "--first", "7", "--seeds", "1"]), \
                redirect_stderr(StringIO()) as told:
            self.assertEqual(fuzz.main(), 1)
        self.assertIn("replay: python3 scripts/fuzz.py --first 7 --seeds 1 --operations 100", told.getvalue())


if __name__ == "__main__":
    unittest.main()
