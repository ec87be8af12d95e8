"""Near copies: found under other names, layout and comments; not found where the work is one's own, or was given."""

from __future__ import annotations

import random
import tempfile
import unittest
from pathlib import Path

from scripts.grading.similarity import WINDOW, Fingerprint, K, fingerprint, grouped, near_pairs, similarity, winnow

FIRST = '''
def schedule(queue, budget, running):
    """Who is served."""
    chosen = []
    for request in sorted(queue, key=lambda r: (r.arrival, r.name)):
        if request.tokens <= budget and len(running) + len(chosen) < 8:
            chosen.append(request)
            budget -= request.tokens
        elif request.waited > 12:
            request.waited += 1
            break
    return chosen, budget

def grid(values, bits, symmetric):
    low, high = min(values), max(values)
    if symmetric:
        scale = max(abs(low), abs(high)) / (2 ** (bits - 1) - 1)
        return scale or 1.0, 0
    scale = (high - low) / (2 ** bits - 1) or 1.0
    zero = round(-low / scale)
    while zero * scale + low > scale / 2:
        zero -= 1
    return scale, zero

def append(table, pool, key, value, size):
    place, offset = divmod(table.length, size)
    if place == len(table.pages):
        table.pages.append(pool.pop())
    page = table.pages[place]
    if pool.references[page] > 1:
        fresh = pool.pop()
        pool.copy(page, fresh)
        pool.references[page] -= 1
        table.pages[place] = page = fresh
    pool.keys[page][offset], pool.values[page][offset] = list(key), list(value)
    table.length += 1
'''
OTHER = '''
def schedule(queue, budget, running):
    waiting = list(queue)
    waiting.sort(key=rank)
    result = {}
    while waiting and budget:
        first = waiting.pop(0)
        share = min(budget, first.left)
        result[first.name] = share
        budget -= share
    return result

def grid(values, bits, symmetric):
    steps = 1 << bits
    best = None
    for divisor in range(1, 40):
        scale = sum(v * v for v in values) ** 0.5 / divisor
        codes = [max(0, min(steps - 1, int(v / scale + steps / 2))) for v in values]
        error = sum((v - (c - steps / 2) * scale) ** 2 for v, c in zip(values, codes))
        if best is None or error < best[0]:
            best = error, scale
    return best[1], steps // 2

def append(table, pool, key, value, size):
    if not table.tail or len(table.tail) == size:
        number = pool.take(table.owner)
        assert number not in table.numbers, "twice"
        table.numbers += [number]
        table.tail = pool.open(number)
    else:
        table.tail = pool.own(table.numbers[-1], table.owner)
    table.tail.append((tuple(key), tuple(value)))
    return sum(len(pool.open(n)) for n in table.numbers)
'''


class Similarity(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)

    def prints(self, name, code, given=""):
        for part, text in ((name, code), (f"{name}-given", given)):
            (self.place / part).mkdir()
            (self.place / part / "a.py").write_text(text, encoding="utf-8")
        return fingerprint(self.place / name, self.place / f"{name}-given")

    def test_other_names_comments_and_order_are_the_same_work(self):
        renamed = FIRST.replace("request", "job").replace("pages", "sheets").replace("scale", "s")
        renamed = renamed.replace('"""Who is served."""', '"""Mine."""')
        renamed = renamed.replace("return chosen, budget", "return (chosen,\n  # done\n budget)")
        parts = renamed.split("\ndef ")[1:]
        shuffled = "".join(f"\ndef {part}\n" for part in parts[::-1])
        self.assertEqual(similarity(self.prints("a", FIRST), self.prints("b", shuffled)), 1)

    def test_own_work_is_not(self):
        self.assertLess(similarity(self.prints("a", FIRST), self.prints("b", OTHER)), 0.2)

    def test_what_was_given_does_not_count(self):
        self.assertEqual(self.prints("a", FIRST, given=FIRST).numbers, frozenset())
        self.assertEqual(similarity(self.prints("b", FIRST, FIRST), self.prints("c", FIRST, FIRST)), 0)

    def test_what_is_no_python_has_no_prints(self):
        self.assertEqual(self.prints("a", "def (").numbers, frozenset())

    def test_any_long_common_run_is_seen(self):
        """The guarantee of winnowing: a common run of K + WINDOW - 1 tokens leaves a common number."""
        for seed in range(30):
            rng = random.Random(seed)
            words = [f"w{rng.randrange(50)}" for _ in range(K + WINDOW - 1)]
            noise = [[f"w{rng.randrange(50)}" for _ in range(rng.randrange(80))] for _ in range(4)]
            one, other = (*noise[0], *words, *noise[1]), (*noise[2], *words, *noise[3])
            with self.subTest(seed=seed):
                self.assertTrue(winnow(one) & winnow(other))

    def test_what_everybody_has_is_nobodys(self):
        shared = set(range(1000, 1100))
        prints = {f"s{i}": Fingerprint(frozenset(shared | set(range(100 * i, 100 * i + 50)))) for i in range(7)}
        self.assertEqual(near_pairs(prints), [])
        prints["copy"] = prints["s3"]
        self.assertEqual([pair[1:] for pair in near_pairs(prints)], [("copy", "s3")])

    def test_a_class_full_of_copies_of_the_complete_engine(self):
        """They come first and do not hide each other, whether they are equal or slightly changed."""
        whole = frozenset(range(1000))
        prints = {f"s{i:02}": Fingerprint(frozenset(range(100 * i, 100 * i + 50))) for i in range(20, 40)}
        prints |= {"t1": Fingerprint(frozenset(range(9000, 9100))), "t2": Fingerprint(frozenset(range(9000, 9100)))}
        for changed in (False, True):
            copies = {f"c{i:02}": Fingerprint(whole - set(range(i)) if changed else whole) for i in range(30)}
            pairs = near_pairs({**prints, **copies, "(whole)": Fingerprint(whole)}, "(whole)")
            with self.subTest(changed=changed):
                self.assertEqual({name for pair in pairs[:30] for name in pair[1:]}, {*copies, "(whole)"})
                self.assertTrue(all("(whole)" in pair for pair in pairs[:30]))
                lines = grouped(pairs, "(whole)")
                self.assertEqual(lines[0], (1.0, "  ".join(["(whole)", *copies])))
                self.assertIn((1.0, "t1  t2"), lines)

    def test_one_stands_for_its_equals(self):
        pairs = [(0.7, "d", "e"), (0.8, "a", "d"), (1.0, "a", "b"), (0.8, "b", "d"), (0.999, "b", "c")]
        self.assertEqual(grouped(pairs), [(1.0, "a  b  c"), (0.8, "a and 2 equal ones  d"), (0.7, "d  e")])
        self.assertEqual(grouped(pairs, "e")[0], (0.7, "e  d"))


if __name__ == "__main__":
    unittest.main()
