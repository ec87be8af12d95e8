"""The quatrains as data: which poems are trained on and which held out, their tokens, their form, and how well a
model foretells a poem that it has never seen.

    scenario, poems = load_scenario(SCENARIO), read_held_out()       # 300 poems
    held_out_loss(model, scenario.tokenizer, poems)                  # nats a character; lower is better
    keeps_form("床前明月光，疑是地上霜。举头望明月，低头思故乡。")          # True

Standard library only, so that reports and tests can use it anywhere; ``train_quatrains.py`` makes the files.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import exp, fsum, log
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from starter.backend import Batch, Piece
from starter.model import Model
from starter.schema import CharacterVocabulary

SCENARIO = ROOT / "fixtures" / "quatrains.json"
HELD_OUT = ROOT / "fixtures" / "quatrains.heldout.txt"
PAGE_SIZE = 16
BOS, EOS, UNKNOWN = 0, 1, 2  # <bos>, <eos> and □, the sign for every character that is not in the vocabulary
_FORM = re.compile(r"(?:[^，。]{5}，[^，。]{5}。){2}|(?:[^，。]{7}，[^，。]{7}。){2}")


# ----------------------------------------------------------------------------------------------------- poems


def keeps_form(text: str) -> bool:
    """Four lines of five characters, or four of seven, closed by ，。，。"""
    return _FORM.fullmatch(text) is not None


def lines(poem: str) -> list[str]:
    """The lines without their marks."""
    return poem.replace("，", "。").split("。")[:-1]


def cut(poem: str) -> list[str]:
    """A longer poem, its lines all of five or all of seven characters, in pieces of two couplets; an odd last couplet
    is dropped. Any other poem: nothing."""
    couplets = [couplet + "。" for couplet in poem.split("。")[:-1]]
    pieces = ["".join(couplets[i:i + 2]) for i in range(0, len(couplets) - 1, 2)]
    alike = len(set(map(len, couplets))) == 1 and all(map(keeps_form, pieces))
    return pieces if alike and len(couplets) > 2 else []


def split(poems: Sequence[str], held_out: int, seed: int) -> tuple[list[str], list[str], list[str]]:
    """Quatrains to train on, pieces of longer poems to train on, quatrains held out. None stands twice in its list,
    and nothing that shares a line with a held-out poem is trained on. O(characters)."""
    quatrains = list(dict.fromkeys(filter(keeps_form, poems)))
    random.Random(seed).shuffle(quatrains)
    kept = quatrains[:held_out]
    known = {line for poem in kept for line in lines(poem)}
    pieces = dict.fromkeys(piece for poem in poems for piece in cut(poem))
    train, rest = ([poem for poem in group if known.isdisjoint(lines(poem))] for group in (quatrains, pieces))
    return train, rest, kept


def read_held_out(path: Path = HELD_OUT) -> list[str]:
    """The held-out poems, one a line."""
    return path.read_text(encoding="utf-8").splitlines()


# ---------------------------------------------------------------------------------------------------- tokens


def most_frequent(poems: Iterable[str], number: int) -> CharacterVocabulary:
    """<bos>, <eos>, □ and so many characters, ， and 。 among them, the most frequent first."""
    counts = Counter("".join(poems).replace("□", ""))
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[:number]
    return CharacterVocabulary("□" + "".join(frequent), ("<bos>", "<eos>"))


def poem_tokens(vocabulary: CharacterVocabulary, poem: str) -> list[int]:
    """<bos>, a token a character, <eos>; a character that the vocabulary lacks becomes □. O(vocabulary + poem)."""
    numbers = {character: i for i, character in enumerate(vocabulary.characters, start=len(vocabulary.specials))}
    return [BOS, *(numbers.get(character, UNKNOWN) for character in poem), EOS]


# ---------------------------------------------------------------------------------------------------- quality


def held_out_loss(model: Model, vocabulary: CharacterVocabulary, poems: Iterable[str]) -> float:
    """The mean of -ln p(token | all before it) over the poems' characters and their ends, in nats.

    □ is no target, here as in training: what it stands for could not be known. A decoder pass a poem.
    """
    losses = [loss for poem in poems for loss in token_losses(model, poem_tokens(vocabulary, poem))]
    return fsum(losses) / len(losses)


def token_losses(model: Model, tokens: Sequence[int]) -> list[float]:
    """-ln p of each token after the first, □ left out."""
    return surprises(poem_logits(model, tokens), tokens)


def poem_logits(model: Model, tokens: Sequence[int], kv_quantization: str | None = None) -> Sequence[Sequence[float]]:
    """Logits after every token but the last, in one pass."""
    pages = range(-(-len(tokens) // PAGE_SIZE))
    batch = Batch.of([Piece(tokens[:-1], start=0, pages=pages, wants_logits=len(tokens) - 1)], PAGE_SIZE)
    return model.forward(batch, model.new_store(len(pages), PAGE_SIZE, kv_quantization))


def surprises(logits: Sequence[Sequence[float]], tokens: Sequence[int]) -> list[float]:
    """-ln p of each token after the first by the logits before it, □ left out."""
    return [_surprise(row, target) for row, target in zip(logits, tokens[1:]) if target != UNKNOWN]


def _surprise(logits: Sequence[float], target: int) -> float:
    highest = max(logits)
    return highest - logits[target] + log(fsum(exp(logit - highest) for logit in logits))


def bigram_loss(trained_on: Iterable[Sequence[int]], poems: Iterable[Sequence[int]], vocab_size: int,
                ignored: Sequence[int] = (UNKNOWN,), discount: float = 0.75) -> float:
    """What a model that sees one token back would lose: the baseline of ``held_out_loss``, on the same targets.

    p(b | a) = (count(ab) - discount) / count(a) + freed(a) * p(b), where p(b) is the share of different pairs that
    end in b: an interpolated bigram after Kneser and Ney (1995) as in Chen and Goodman (1999). O(tokens).
    """
    counts = Counter(pair for poem in trained_on for pair in pairwise(poem) if pair[1] not in ignored)
    total, followers, endings = Counter[int](), Counter[int](), Counter[int]()
    for (a, b), count in counts.items():
        total[a] += count
        followers[a] += 1
        endings[b] += 1
    losses = []
    for a, b in [pair for poem in poems for pair in pairwise(poem) if pair[1] not in ignored]:
        unigram = (endings[b] + 1) / (len(counts) + vocab_size)  # one more for each token, so that none has no chance
        freed = discount * followers[a] / total[a] if total[a] else 1.0
        seen = max(0.0, counts[a, b] - discount) / total[a] if total[a] else 0.0
        losses.append(-log(seen + freed * unigram))
    return fsum(losses) / len(losses)
