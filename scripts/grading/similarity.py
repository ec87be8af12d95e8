"""Which submissions are nearly the same? Fingerprints by winnowing (Schleimer, Wilkerson and Aiken, "Winnowing: Local
Algorithms for Document Fingerprinting", SIGMOD 2003), over what is left of the code when names, comments and layout are
gone.

    prints = fingerprint(folder, given)        numbers that stand for the submission's own code
    similarity(prints, others)                 share of the smaller one's numbers that the other has too
    near_pairs({name: prints}, original)       the pairs that are alike, those with the original first
    grouped(pairs, original)                   the same for reading: who is equal stands together

The syntax tree of each file is read as a row of tokens, every name being one and the same. Of all runs of ``K`` tokens
the hashes are taken, and of every ``WINDOW`` hashes in a row the smallest is kept: so any common run of K + WINDOW - 1
tokens leaves a common number, wherever it stands. Functions that the complete engine has, too, in the same form, are
given, or what everybody arrives at, and left out. What is flagged is for a person to read side by side, and no verdict.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations
from pathlib import Path

K, WINDOW = 24, 12  # tokens in a run; runs in a window
FEW = 20  # numbers below which nothing can be said
NEAR = 0.6  # share from which a pair is flagged
EQUAL = 0.995  # and from which it reads as 100%
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Fingerprint:
    """The numbers of a submission's own code."""

    numbers: frozenset[int]


def fingerprint(folder: Path, given: Path) -> Fingerprint:
    """Of the Python files in a folder, less those that ``given`` has. O(size of the files)."""
    known = {shape for path in sorted(given.rglob("*.py")) for shape in _functions(path)}
    numbers: set[int] = set()
    for path in sorted(folder.rglob("*.py")):
        for shape in _functions(path):
            if shape not in known:
                numbers |= winnow(shape)
    return Fingerprint(frozenset(numbers))


def _functions(path: Path) -> Iterable[tuple[str, ...]]:
    """The tokens of every function of a file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [tuple(_tokens(node)) for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def _tokens(function: ast.AST) -> Iterable[str]:
    """Kinds of nodes from left to right, with operators and numbers; names and texts are all alike."""
    todo = [function]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Constant):
            yield _number(node.value) if isinstance(node.value, (int, float)) else "constant"
            continue
        yield type(node).__name__
        children = [child for name, value in ast.iter_fields(node) if name not in ("annotation", "returns", "ctx")
                    for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        if isinstance(node, FUNCTIONS) and ast.get_docstring(node) is not None:
            children = [child for child in children if child is not node.body[0]]
        todo += children[::-1]


def _number(value: float) -> str:
    """Short, whatever its size: Python writes out no number of more than some thousand digits."""
    return hex(value % (1 << 64)) if isinstance(value, int) and value.bit_length() > 64 else repr(value)[:8]


def winnow(tokens: tuple[str, ...]) -> set[int]:
    """The kept hashes of a row of tokens."""
    hashes = [int.from_bytes(blake2b(" ".join(tokens[i:i + K]).encode(), digest_size=8).digest(), "big")
              for i in range(max(0, len(tokens) - K + 1))]
    return {min(hashes[i:i + WINDOW]) for i in range(max(1, len(hashes) - WINDOW + 1))} if hashes else set()


def similarity(one: Fingerprint, other: Fingerprint) -> float:
    """0 to 1; 0 where there is too little to compare."""
    fewest = min(len(one.numbers), len(other.numbers))
    return len(one.numbers & other.numbers) / fewest if fewest >= FEW else 0.0


Pair = tuple[float, str, str]


def near_pairs(prints: dict[str, Fingerprint], original: str = "") -> list[Pair]:
    """Pairs to read side by side: those with the ``original`` first, then the most alike. O(n^2) for n submissions.
    Numbers that more than half of the different works have, and more than three, are nobody's own, and do not count:
    but they do beside the original, since copies of it would hide each other."""
    works = {mine.numbers for mine in prints.values()}  # equal ones count once
    counts = Counter(number for numbers in works for number in numbers)
    common = {number for number, times in counts.items() if times > max(3, len(works) / 2)}
    own = {name: Fingerprint(mine.numbers - common) for name, mine in prints.items()}
    pairs = []
    for a, b in combinations(sorted(prints), 2):
        compared = prints if original in (a, b) else own
        pairs.append((similarity(compared[a], compared[b]), a, b))
    return sorted((pair for pair in pairs if pair[0] >= NEAR),
                  key=lambda pair: _first(pair[0], pair[1:], original))


def grouped(pairs: Iterable[Pair], original: str = "") -> list[tuple[float, str]]:
    """Pairs in fewer lines: (share, names). Those that are equal, 100% when rounded, stand in one line, and one of them
    stands for all in the other lines."""
    pairs = sorted(pairs, key=lambda pair: -pair[0])
    group: dict[str, list[str]] = {name: [name] for _, *both in pairs for name in both}
    for share, a, b in pairs:
        if share >= EQUAL and group[a] is not group[b]:
            union = sorted(group[a] + group[b], key=lambda name: (name != original, name))
            group.update(dict.fromkeys(union, union))
    lines = {(equal[0], equal[0]): (1.0, "  ".join(equal)) for equal in group.values() if len(equal) > 1}
    for share, a, b in pairs:
        ones = sorted((group[a], group[b]), key=lambda equal: (equal[0] != original, equal[0]))
        shown = "  ".join(one[0] + f" and {len(one) - 1} equal ones" * (len(one) > 1) for one in ones)
        lines.setdefault((ones[0][0], ones[1][0]), (share, shown))
    return [lines[key] for key in sorted(lines, key=lambda key: _first(lines[key][0], key, original))]


def _first(share: float, names: tuple[str, ...], original: str) -> tuple[bool, float, tuple[str, ...]]:
    """What comes first has the original in it, then the largest share."""
    return original not in names, -share, names
