"""What is remembered of a live request, and the waiting queue held against a list that is sorted anew each time."""

from __future__ import annotations

import random
import unittest
from collections import Counter

from starter.scheduler import SequenceState, WaitingQueue
from starter.schema import Request


def sequence(name: str, serial: int = 0, rank: float = 0.0, prompt: int = 1, max_tokens: int = 4) -> SequenceState:
    return SequenceState(Request(name, [0] * prompt, max_tokens), 0, (rank, serial))


class Remembered(unittest.TestCase):
    def test_a_prompt_in_chunks_then_decodes(self) -> None:
        mine = sequence("r", prompt=5, max_tokens=3)
        self.assertEqual((mine.id, mine.known, mine.remaining, mine.decoding), ("r", 5, 5, False))
        mine.computed = 4
        self.assertEqual((mine.remaining, mine.decoding), (1, False))  # the last of a prompt is no decode
        mine.computed, mine.known = 5, 6
        self.assertEqual((mine.generated, mine.remaining, mine.decoding), (1, 1, True))
        mine.computed = 0  # preempted: all that is known is computed again
        self.assertEqual((mine.generated, mine.remaining, mine.decoding), (1, 6, False))

    def test_order_is_rank_then_submission(self) -> None:
        ordered = [sequence("a", 5, -1.5), sequence("b", 1, 0.0), sequence("c", 2, 0.0), sequence("d", 0, 0.25)]
        shuffled = random.Random(1).sample(ordered, 4)
        self.assertEqual(sorted(shuffled, key=lambda each: each.order), ordered)

    def test_two_with_one_id_are_two(self) -> None:
        self.assertNotEqual(sequence("r"), sequence("r"))


class Queue(unittest.TestCase):
    def check(self, queue: WaitingQueue, waiting: list[SequenceState], ids: list[str]) -> None:
        self.assertEqual((len(queue), bool(queue)), (len(waiting), bool(waiting)))
        ordered = sorted(waiting, key=lambda each: each.order)
        for number in (0, 1, 3, len(waiting), len(waiting) + 5):
            self.assertEqual(queue.first(number), ordered[:number])
        self.assertEqual(queue.ids, tuple(ids))
        for each in waiting:
            self.assertIs(queue.get(each.id), each)
        self.assertIsNone(queue.get("never"))

    def test_against_a_sorted_list(self) -> None:
        """Push, remove, push again with another rank, an old id on a new sequence: in any order."""
        seen: Counter[str] = Counter()
        for seed in range(30):
            dice = random.Random(seed)
            queue, waiting, ids, gone = WaitingQueue(), [], [], []
            for number in range(60):
                operation = dice.choice(("push", "push", "remove", "again", "reuse", "remove a stranger"))
                with self.subTest(seed=seed, number=number, operation=operation):
                    if operation == "push" or (operation in ("again", "reuse") and not gone):
                        new = sequence(f"r{number}", number, dice.choice((0.0, 1.0, dice.random())))
                    elif operation == "again":  # as after a preemption
                        new = gone.pop(dice.randrange(len(gone)))
                        new.order = dice.random(), new.order[1]
                    elif operation == "reuse":
                        new = sequence(gone.pop().id, number, dice.random())
                    else:
                        new = None
                    if new and new.id not in ids:
                        queue.push(new)
                        waiting.append(new)
                        ids.append(new.id)
                    elif operation == "remove" and waiting:
                        old = waiting.pop(dice.randrange(len(waiting)))
                        queue.remove(old)
                        ids.remove(old.id)
                        gone.append(old)
                    elif operation == "remove a stranger" and ids:
                        queue.remove(sequence(dice.choice(ids)))  # an equal id is not enough
                        queue.remove(sequence("never"))
                    self.check(queue, waiting, ids)
                seen[operation] += 1
        self.assertGreater(min(seen.values()), 100)

    def test_most_of_many_removed(self) -> None:
        dice = random.Random(2)
        queue, waiting = WaitingQueue(), [sequence(f"r{serial}", serial, dice.random()) for serial in range(400)]
        for each in waiting:
            queue.push(each)
        while waiting:
            queue.remove(waiting.pop(dice.randrange(len(waiting))))
            if len(waiting) in (140, 30, 2, 0):  # each look sweeps, too
                self.check(queue, waiting, [each.id for each in waiting])

    def test_looking_changes_nothing(self) -> None:
        queue = WaitingQueue()
        for serial in range(5):
            queue.push(sequence(f"r{serial}", serial, -serial))
        for _ in range(3):
            self.assertEqual([each.id for each in queue.first(2)], ["r4", "r3"])
        self.assertEqual(queue.ids, ("r0", "r1", "r2", "r3", "r4"))

    def test_ids_are_put_together_once_until_something_changes(self) -> None:
        queue = WaitingQueue()
        queue.push(sequence("a"))
        ids = queue.ids
        queue.first(1)
        queue.remove(sequence("a"))  # another one: changes nothing
        self.assertIs(queue.ids, ids)
        queue.push(sequence("b"))
        self.assertEqual(queue.ids, ("a", "b"))
        queue.remove(queue.get("a"))
        self.assertEqual(queue.ids, ("b",))

    def test_removed_ones_are_not_kept_behind_one_that_stays(self) -> None:
        """A head that waits long, and clients that give up: their prompts are let go."""
        queue = WaitingQueue()
        queue.push(sequence("head", 0, -1.0))
        for serial in range(1, 2000):
            queue.push(given_up := sequence("r", serial))
            queue.remove(given_up)
            self.assertEqual(len(queue.first(1)), 1)
        self.assertLess(len(queue._heap), 100)
        self.assertEqual(queue.first(9), [queue.get("head")])


if __name__ == "__main__":
    unittest.main()
