"""Stop strings: the result is that of one pass over the whole text, however it was cut, and nothing is lost."""

from __future__ import annotations

import random
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from starter.base.tokenizer import CharacterTokenizer, CharacterVocabulary, StopStrings, TextStream
from starter.engine import InferenceEngine
from starter.errors import RequestError
from starter.schema import SamplingParams
from tests.support import HEALTHY, Ask, make_engine, solo


def definition(text: str, stops: Sequence[str], after: int = 0) -> tuple[str, bool]:
    """One character after another; the first, ``after`` so many, that completes a stop string ends the text before it,
    before the longest if it completes several."""
    for end in range(after + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[:end - max(map(len, complete))], True
    return text, False


def all_cuts(text: str) -> Iterator[list[str]]:
    """Every way to cut a text into pieces."""
    for number in range(len(text)):
        for cuts in combinations(range(1, len(text)), number):
            yield [text[start:end] for start, end in zip((0, *cuts), (*cuts, len(text)))]


class PiecesTest(unittest.TestCase):
    def shown(self, stops: Sequence[str], pieces: Sequence[str], number: int | None = None) -> tuple[str, bool]:
        """What a reader has seen at the end, and whether a stop string ended it. Nothing is ever taken back: what is
        held back is the longest end of the text that may become a stop string, no more and no less."""
        watcher, seen, pushed = StopStrings(stops), "", ""
        for piece in pieces:
            pushed += piece
            text, stopped = watcher.push(piece)
            seen += text
            if stopped:
                return seen, True
            beginnings = [stop[:n] for stop in stops for n in range(len(stop))]
            held = max((len(beginning) for beginning in beginnings if pushed.endswith(beginning)), default=0)
            self.assertEqual(seen, pushed[:len(pushed) - held])
        return seen + watcher.finish(), False

    def check(self, text: str, stops: Sequence[str], wanted: str, stopped: bool) -> None:
        self.assertEqual(definition(text, stops), (wanted, stopped))
        for pieces in all_cuts(text):
            self.assertEqual(self.shown(stops, pieces), (wanted, stopped), pieces)

    def test_across_pieces(self) -> None:
        """K054: "A", "BC", "D", "E" with stop "CDE" shows "AB" only."""
        watcher = StopStrings(["CDE"])
        self.assertEqual([watcher.push(piece) for piece in ("A", "BC", "D", "E")],
                         [("A", False), ("B", False), ("", False), ("", True)])
        self.check("ABCDEF", ["CDE"], "AB", True)

    def test_near_miss_is_released_in_full(self) -> None:
        """K054"""
        watcher = StopStrings(["CDE"])
        self.assertEqual([watcher.push(piece) for piece in ("BC", "D", "X")],
                         [("B", False), ("", False), ("CDX", False)])
        self.check("ABCDX", ["CDE"], "ABCDX", False)
        self.check("CDCDCE", ["CDE"], "CDCDCE", False)
        self.check("aaab", ["aac", "aaad"], "aaab", False)

    def test_at_the_start_and_at_the_end(self) -> None:
        """K054"""
        self.check("CDEAB", ["CDE"], "", True)
        self.check("ABCDE", ["CDE"], "AB", True)
        self.check("C", ["C"], "", True)

    def test_overlapping(self) -> None:
        """K054: the one that is complete first; of two that are complete together the one that began first."""
        for text, stops, wanted in (("xabcd", ["abc", "ab"], "x"), ("xabcd", ["bc", "abcd"], "xa"),
                                    ("xabcd", ["bc", "abc"], "x"), ("aaab", ["aab"], "a"), ("ababac", ["abac"], "ab"),
                                    ("aaaa", ["aa", "aaa"], ""), ("abcabd", ["abd", "cabe"], "abc"),
                                    ("xaxbxc", ["xc", "xbx"], "xa")):
            with self.subTest(text=text, stops=stops):
                self.check(text, stops, wanted, True)

    def test_held_back_text_is_released_at_the_end(self) -> None:
        """K055: "..as" might have become "assistant"."""
        self.check("..as", ["assistant"], "..as", False)
        watcher = StopStrings(["assistant"])
        self.assertEqual(watcher.push("..as"), ("..", False))
        self.assertEqual((watcher.finish(), watcher.finish()), ("as", ""))

    def test_a_stop_string_that_begins_where_none_may_end(self) -> None:
        """By hand: nothing of it was shown, and what was complete too early is text like any other."""
        for stops, early, late, wanted in ((["ab"], "a", "bcd", ""), (["ab"], "ab", "cdab", "abcd"),
                                           (["aa"], "aa", "a", "a"), (["abc", "b"], "ab", "x", "abx"),
                                           (["abc", "b"], "ab", "xb", "abx"), (["abc", "b"], "ab", "c", ""),
                                           (["aba"], "aba", "ba", "ab"), (["b"], "ab", "", "ab")):
            with self.subTest(stops=stops, early=early, late=late):
                watcher, seen, stopped = StopStrings(stops), "", False
                for piece in early:
                    text, stopped = watcher.push(piece, may_stop=False)
                    seen += text
                    self.assertFalse(stopped)
                for piece in late:
                    if not stopped:
                        text, stopped = watcher.push(piece)
                        seen += text
                seen += watcher.finish()
                self.assertEqual((seen, stopped), definition(early + late, stops, len(early)))
                self.assertEqual(seen, wanted)

    def test_without_stop_strings_everything_passes(self) -> None:
        self.assertEqual(self.shown([], ["a", "", "bc"]), ("abc", False))

    def test_random_texts_stops_and_cuts(self) -> None:
        for seed in range(1500):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                letters = dice.choice(("a", "ab", "ab", "abc", "世界a"))
                text = "".join(dice.choice(letters) for _ in range(dice.randint(0, 14)))
                stops = ["".join(dice.choice(letters) for _ in range(dice.randint(1, 6)))
                         for _ in range(dice.randint(0, 3))]
                cuts = sorted(dice.choices(range(len(text) + 1), k=dice.randint(0, 6)))  # empty pieces, too
                pieces = [text[start:end] for start, end in zip((0, *cuts), (*cuts, len(text)))]
                self.assertEqual(self.shown(stops, pieces), definition(text, stops))
                early = dice.randint(0, len(text))
                watcher = StopStrings(stops)
                seen, stopped = watcher.push(text[:early], may_stop=False)
                for character in text[early:]:
                    if not stopped:
                        more, stopped = watcher.push(character)
                        seen += more
                self.assertEqual((seen + watcher.finish(), stopped), definition(text, stops, early))


class ParametersTest(unittest.TestCase):
    def test_empty_stop_strings_are_refused_and_no_stop_string_is_none(self) -> None:
        """K053"""
        for wrong in ("", [""], ["", "x"], [7], [None]):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(RequestError, "stop must be strings"):
                SamplingParams(stop=wrong)
        self.assertEqual([SamplingParams(stop=stop).stop for stop in (None, [], (), "ab", ["a", "b"])],
                         [(), (), (), ("ab",), ("a", "b")])


class EngineTest(unittest.TestCase):
    PROMPT, LENGTH = (3, 1, 4), 10

    def setUp(self) -> None:
        self.tokens = [token for token, _ in solo(Ask(self.PROMPT, self.LENGTH))[0]]
        self.text = "".join("abcdefghijklmnopqrst"[token] for token in self.tokens)

    def run_one(self, max_tokens: int, **sampling: object) -> tuple[list[int], list[str], str]:
        engine = make_engine()
        events = list(engine.stream(engine.submit(self.PROMPT, max_tokens, sampling=SamplingParams(**sampling))))
        self.assertEqual(engine.kv.free_pages, engine.kv.total_pages)
        return [event.token for event in events], [event.text for event in events], events[-1].finish_reason

    def test_every_part_of_the_text_as_stop_string(self) -> None:
        """The text ends before it, the tokens with the one that completes it."""
        for start, end in combinations(range(self.LENGTH + 1), 2):
            stop = self.text[start:end]
            tokens, texts, reason = self.run_one(self.LENGTH, stop=stop)
            at = self.text.index(stop)
            self.assertEqual("".join(texts), self.text[:at], stop)
            self.assertEqual((tokens, reason), (self.tokens[:at + len(stop)], "stop"))

    def test_joined_text_whatever_the_length(self) -> None:
        """K056: a stop string that never completes costs no character, with whichever token the request ends."""
        for max_tokens in range(1, self.LENGTH + 1):
            for stop in ((), (self.text[max_tokens - 1:max_tokens] + "?",), (self.text + "?",)):
                tokens, texts, reason = self.run_one(max_tokens, stop=stop)
                self.assertEqual("".join(texts), self.text[:max_tokens])
                self.assertEqual((tokens, reason), (self.tokens[:max_tokens], "length"))

    def test_held_back_text_is_released_by_an_end_token(self) -> None:
        """K055: the last token might begin a stop string, and is an end token."""
        last = self.tokens[4]
        first = self.tokens.index(last)
        engine = make_engine()
        name = engine.submit(self.PROMPT, self.LENGTH, stop_tokens=[last],
                             sampling=SamplingParams(stop=self.text[max(0, first - 1):first + 1] + "?"))
        events = list(engine.stream(name))
        self.assertEqual("".join(event.text for event in events), self.text[:first + 1])
        self.assertEqual(events[-1].finish_reason, "stop")

    def test_min_tokens(self) -> None:
        """Only a later token can complete a stop string, which may have begun before. (Here a token is a letter.)"""
        begun_before = 0
        for start, end in combinations(range(6), 2):
            for min_tokens in range(self.LENGTH + 1):
                stop = self.text[start:end]
                tokens, texts, reason = self.run_one(self.LENGTH, stop=stop, min_tokens=min_tokens)
                shown, stopped = definition(self.text, [stop], min_tokens)
                self.assertEqual("".join(texts), shown, (stop, min_tokens))
                self.assertEqual(reason, "stop" if stopped else "length")
                self.assertEqual(len(tokens), len(shown) + (len(stop) if stopped else 0))
                self.assertGreaterEqual(len(tokens), min_tokens)
                begun_before += stopped and len(shown) < min_tokens
        self.assertGreater(begun_before, 10)

    def test_min_tokens_and_bytes_that_are_no_character(self) -> None:
        """What the last token leaves incomplete is shown as U+FFFD, a stop string like others, from min_tokens on."""
        class Bytes(CharacterTokenizer):
            def stream(self) -> TextStream:
                return TextStream([b"\xe4"] * 3 + ["x"] + [b"\xe4"] * 16)

        engine = InferenceEngine(replace(HEALTHY, tokenizer=Bytes(CharacterVocabulary("abcdefghijklmnopqrst"))))
        for min_tokens, wanted in ((0, ""), (1, "\ufffd"), (2, "\ufffd")):
            name = engine.submit((3,), 1, sampling=SamplingParams(stop="\ufffd", min_tokens=min_tokens))
            token, = engine.stream(name)
            self.assertEqual((token.token != 3, token.text, token.finish_reason), (True, wanted, "length"))


if __name__ == "__main__":
    unittest.main()
