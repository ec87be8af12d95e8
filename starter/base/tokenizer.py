"""M1 · Text to token numbers and back, also token by token while they are being generated.

    encode("the cat")  -> [19, 7, 4, 0, 2, 0, 19]       decode(...) -> "the cat"

Two tokenizers satisfy the ``Tokenizer`` protocol:

    CharacterTokenizer   one token for each character, as in the fixtures
    Llama2cTokenizer     byte-pair encoding over a vocabulary with scores, in the format of llama2.c

A token is not always text: "世" may be three tokens of one byte each. ``TextStream`` therefore holds bytes back until
a character is complete, so that text, once shown, is never taken back, repeated or garbled.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from starter.base.model_config import MAX_VOCABULARY
from starter.base.strict_json import ListOf, Record, Text
from starter.errors import RequestError, SchemaError


@dataclass(frozen=True)
class CharacterVocabulary:
    """``specials`` take the ids 0, 1, ...; the characters follow in order, one id each."""

    characters: Annotated[str, Text(1, MAX_VOCABULARY)]
    specials: Annotated[tuple[str, ...], ListOf(Text(1, 100), longest=1_000)] = ()

    def __post_init__(self) -> None:
        if len(set(self.characters)) != len(self.characters):
            twice = next(c for c in self.characters if self.characters.count(c) > 1)
            raise SchemaError(f"the character {twice!r} appears twice", "/characters")
        if len(set(self.specials)) != len(self.specials):
            raise SchemaError("a special token appears twice", "/specials")


TOKENIZER_SHAPE = Record.of(CharacterVocabulary)


class Tokenizer(Protocol):
    """What every tokenizer can do. Subclasses inherit ``decode`` and ``bytes_of``."""

    vocab_size: int
    bos_token: int | None
    eos_tokens: tuple[int, ...]

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Text -> tokens. If the model has a beginning-of-sequence token, it comes first, once, where ``bos`` is true
        or the text begins with its name (such as "<s>", as chat templates do). RequestError for text that cannot be
        written in this vocabulary."""

    def stream(self) -> TextStream:
        """A decoder of one text, token by token."""

    def bytes_of(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8: perhaps a part of a character, which ``decode`` can only show as
        U+FFFD. A control token, such as those of beginning and end of sequence, adds none: b"". A space that is silent
        where a text begins is there. RequestError for a token outside the vocabulary."""
        return self.stream().bytes_of(token)

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens -> text; the tokens of beginning and end of sequence add none. RequestError for a token outside the
        vocabulary."""
        stream = self.stream()
        return "".join(map(stream.push, tokens)) + stream.finish()


class TextStream:
    """Incremental decoding: all ``push`` results and ``finish`` joined equal ``decode`` of all tokens.

    To continue a prompt, push its tokens first and drop what they return: then a character begun in the prompt, or
    the space that is silent after the beginning of the sequence, comes out right.
    """

    __slots__ = ("_before_text", "_begun", "_opening", "_previous", "_shown")

    def __init__(self, shown: Sequence[str | bytes], opening: Sequence[str | bytes] = (),
                 before_text: Collection[int | None] = ()) -> None:
        """``shown[token]`` is what a token adds, ``text_or_bytes`` of it; after those of ``before_text`` (None: nothing
        comes before the first token), where a text begins, it is ``opening[token]``."""
        self._shown, self._opening, self._before_text = shown, opening, before_text
        self._previous: int | None = None
        self._begun = b""  # of a character that is not complete

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none; never a part of a character."""
        piece = self._piece(token, self._opening if self._previous in self._before_text else self._shown)
        self._previous = token
        if isinstance(piece, str):
            if not self._begun:  # as nearly always
                return piece
            piece = piece.encode()
        added = self._begun + piece
        text, used = utf_8_decode(added, "replace")  # as far as characters are complete
        self._begun = added[used:]
        return text

    def bytes_of(self, token: int) -> bytes:
        """What a token adds, wherever the text has got to."""
        piece = self._piece(token, self._shown)
        return piece.encode() if isinstance(piece, str) else piece

    def _piece(self, token: int, pieces: Sequence[str | bytes]) -> str | bytes:
        if not 0 <= token < len(pieces):
            raise RequestError(f"token {token} is outside the vocabulary; allowed: 0 to {len(pieces) - 1}")
        return pieces[token]

    def finish(self) -> str:
        """What was held back: "" or, for bytes that never became a character, U+FFFD."""
        begun, self._begun = self._begun, b""
        return begun.decode(errors="replace")


class StopStrings:
    """Cuts a streamed text where a stop string begins: no character of the stop string is ever shown, and no other
    character is lost.

        stop "CDE"    pushed   "A"   "BC"   "D"   "E"           pushed   "BC"   "D"   "X"
                      shown    "A"   "B"    ""    "" stopped    shown    "B"    ""    "CDX"

    Text that may be the beginning of a stop string is held back until that is decided. Of several stop strings the one
    that is complete first counts (of those, the one that began first), so the result does not depend on how the text
    was split into tokens. A push costs at most O(S * (S + pushed text)), with S the total length of the stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """More text -> what may be shown now, and whether a stop string is complete, with which the text ends. One that
        is completed where the text may not end is text like any other."""
        if not self._stops:
            return text, False
        held, text = len(self._held), self._held + text  # one that ends within what is held was not to end the text
        ends = [(at + len(stop), at) for stop in self._stops
                if (at := text.find(stop, max(held - len(stop) + 1, 0))) >= 0]
        if ends and may_stop:
            self._held = ""
            return text[:min(ends)[1]], True  # the cut
        keep = max(self._overlap(text, stop) for stop in self._stops)
        shown, self._held = text[:len(text) - keep], text[len(text) - keep:]
        return shown, False

    def finish(self) -> str:
        """The text ended for another reason: what was held back is no stop string, and may be shown."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text that is a proper beginning of the stop string."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def text_or_bytes(piece: bytes) -> str | bytes:
    """Text if these bytes are whole characters, else the bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


def text_start(text: str, bos_name: str) -> int:
    """Index of the first character after any names of the beginning-of-sequence token that the text opens with."""
    if not isinstance(text, str):
        raise RequestError(f"expected a text, not a {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"position {error.start} holds half of a surrogate pair, which is no character") from None
    start = 0
    while bos_name and text.startswith(bos_name, start):
        start += len(bos_name)
    return start


class CharacterTokenizer(Tokenizer):
    """One token a character; the specials' tokens come first and decode to nothing."""

    def __init__(self, vocabulary: CharacterVocabulary, bos_token: int | None = None,
                 eos_tokens: Sequence[int] = ()) -> None:
        self.bos_token, self.eos_tokens = bos_token, tuple(eos_tokens)
        self._shown = [""] * len(vocabulary.specials) + list(vocabulary.characters)
        self._tokens = {c: i for i, c in enumerate(vocabulary.characters, start=len(vocabulary.specials))}
        self.vocab_size = len(self._shown)
        names = dict(enumerate(vocabulary.specials))
        self._bos_name = "" if bos_token is None else names.get(bos_token, "")

    def encode(self, text: str, bos: bool = False) -> list[int]:
        start = text_start(text, self._bos_name)
        tokens = [self.bos_token] if self.bos_token is not None and (bos or start) else []
        for position, character in enumerate(text[start:], start):
            if character not in self._tokens:
                known = "".join(self._tokens)
                more = f" and {len(known) - 60} more characters" if len(known) > 60 else ""
                raise RequestError(f"the character {character!r} at position {position} is not in the vocabulary; "
                                   f"allowed: {known[:60]!r}{more}")
            tokens.append(self._tokens[character])
        return tokens

    def stream(self) -> TextStream:
        return TextStream(self._shown)
