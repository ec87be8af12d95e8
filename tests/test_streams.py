"""A request's samples: indices, text, ends, and what a cancel withholds."""

from __future__ import annotations

import random
import unittest
from collections.abc import Sequence

from starter.base.tokenizer import TextStream
from starter.engine import RequestStream, Sample
from starter.sampling import Choice, Draws, StopStrings
from starter.schema import Request, SamplingParams, TokenEvent, sample_id


def stream_of(pieces: Sequence[bytes], max_tokens: int = 99, **sampling: object) -> RequestStream:
    """A request whose token i adds ``pieces[i]``."""
    request = Request("r", (0, 1), max_tokens, sampling=SamplingParams(**sampling))
    stream = RequestStream(request)
    for number in range(request.sampling.n):
        stream.samples.append(Sample(stream, number, Draws(request.sampling, "r", number, 0),
                                     TextStream(pieces),
                                     StopStrings(request.sampling.stop) if request.sampling.stop else None,
                                     list(request.prompt_tokens)))
    return stream


def add(sample: Sample, token: int, ends: bool = False) -> TokenEvent:
    sample.end_tokens = (token,) if ends else ()
    return TokenEvent._make(sample.add(Choice(token, -0.5, ((token, -0.5),)), 7, 7.5))


class SampleTest(unittest.TestCase):
    def test_half_a_character_completes_a_stop_string(self) -> None:
        stream = stream_of([b"b", b"\xe4"], max_tokens=2, stop=("b\ufffd",))
        self.assertEqual([add(stream.samples[0], token).text for token in (0, 1)], ["", ""])

    def play(self, pieces: Sequence[bytes], **settings: object) -> list[TokenEvent]:
        """One token for each piece until the sample ends; then its end, if it has none yet."""
        (sample,) = stream_of(pieces, **{"max_tokens": len(pieces), **settings}).samples
        for token in range(len(pieces)):
            if sample.finish_reason is None:
                add(sample, token)
        return sample.stream.unread

    def test_events(self) -> None:
        (sample,) = stream_of([b"a", b"b"], max_tokens=3).samples
        event = add(sample, 1)
        self.assertEqual(event, TokenEvent("r", 0, 1, "b", 7, 7.5, -0.5, None, None, 0, ((1, -0.5),)))
        add(sample, 0)
        self.assertEqual((sample.tokens, sample.generated, sample.finish_reason), ([0, 1, 1, 0], 2, None))
        self.assertEqual(add(sample, 1).finish_reason, "length")
        self.assertEqual([event.index for event in sample.stream.unread], [0, 1, 2])

    def test_an_end_token_or_a_stop_string_goes_before_the_length(self) -> None:
        (sample,) = stream_of([b"a", b"b"], max_tokens=1).samples
        self.assertEqual(add(sample, 1, ends=True).finish_reason, "stop")
        (sample,) = stream_of([b"a", b"b"], max_tokens=1, stop="b").samples
        event = add(sample, 1)
        self.assertEqual((event.finish_reason, event.token, event.text), ("stop", 1, ""))

    def test_characters_cut_at_every_byte(self) -> None:
        """Joined, the texts are the text: no character doubled, lost, or shown as U+FFFD."""
        for text in ("A 世ab", "é", "😀!", "世界"):
            data = text.encode()
            for cut in range(1 << (len(data) - 1) if len(data) < 8 else 256):
                ends = [i + 1 for i in range(len(data) - 1) if cut >> i & 1]
                pieces = [data[start:end] for start, end in zip((0, *ends), (*ends, len(data)))]
                for stop in ((), ("?",), ("b?", "界x", "!😀")):
                    events = self.play(pieces, stop=stop)
                    self.assertEqual("".join(event.text for event in events), text)
                    self.assertEqual(events[-1].finish_reason, "length")

    def test_stop_strings_in_characters_cut_at_every_byte(self) -> None:
        data = "a世b界c".encode()
        for stop, wanted in (("世", "a"), ("b界", "a世"), ("c", "a世b界"), ("a", "")):
            for size in range(1, len(data) + 1):
                events = self.play([data[i:i + size] for i in range(0, len(data), size)], stop=stop)
                self.assertEqual("".join(event.text for event in events), wanted)
                self.assertEqual(events[-1].finish_reason, "stop")
                after = data.index(stop.encode()) + len(stop.encode())
                self.assertEqual(len(events), -(-after // size))  # with the token that completes it

    def test_nothing_follows_a_stop_string_that_was_found(self) -> None:
        """Not even the beginning of a character that came with it."""
        events = self.play([b"ab", b"STOP\xe4\xb8", b"more"], stop="STOP")
        self.assertEqual([(event.text, event.finish_reason) for event in events], [("ab", None), ("", "stop")])

    def test_what_is_held_back_is_told_with_the_last_event(self) -> None:
        """An incomplete character, the beginning of a stop string; by length, end token, error; not after a cancel."""
        for pieces, stop, wanted in (([b"a", b"\xe4\xb8"], (), "a\ufffd"), ([b"a", b"ST"], ("STOP",), "aST"),
                                     ([b"a", b"ST\xe4"], ("STOP",), "aST\ufffd"), ([b"a", b"x"], ("\ufffd",), "ax")):
            with self.subTest(pieces=pieces):
                self.assertEqual("".join(event.text for event in self.play(pieces, stop=stop)), wanted)
                for reason, error in (("stop", None), ("error", "broken"), ("cancelled", None)):
                    (sample,) = stream_of(pieces, stop=stop).samples
                    add(sample, 0)
                    event = add(sample, 1, ends=reason == "stop")
                    before = "".join(event.text for event in sample.stream.unread)
                    if reason != "stop":
                        event = sample.end(reason, error, 8, 8.5)
                        self.assertEqual((event.token, event.index, event.logprob), (None, 2, None))
                        self.assertEqual(event.text, "" if reason == "cancelled" else wanted[len(before):])
                    self.assertEqual((event.finish_reason, event.error), (reason, error))
                    if reason != "cancelled":
                        self.assertEqual("".join(event.text for event in sample.stream.unread), wanted)

    def test_a_number_is_drawn_again_until_its_token_was_added(self) -> None:
        (sample,) = stream_of([b"a"], temperature=1.0).samples
        first = sample.draws.random()
        self.assertEqual(sample.draws.random(), first)
        add(sample, 0)
        self.assertNotEqual(sample.draws.random(), first)

    def test_ids(self) -> None:
        self.assertEqual([sample_id("r", number) for number in range(3)], ["r", "r#1", "r#2"])
        self.assertEqual([sample.id for sample in stream_of([], n=3).samples], ["r", "r#1", "r#2"])


class StreamTest(unittest.TestCase):
    def test_it_ends_with_its_last_sample(self) -> None:
        stream = stream_of([b"a"], max_tokens=2, n=3)
        for number in (1, 1, 0, 2, 2):
            self.assertIsNone(stream.finish_reason)
            add(stream.samples[number], 0)
        self.assertIsNone(stream.finish_reason)
        self.assertFalse(stream.drained)
        add(stream.samples[0], 0, ends=True)
        self.assertEqual((stream.finish_reason, stream.drained), ("length", False))
        stream.events.clear()
        self.assertTrue(stream.drained)

    def test_cancelled_or_failed_if_one_sample_was(self) -> None:
        """Whichever it is: a cancelled request's id is free, though its last sample had all its tokens before."""
        for reason in ("cancelled", "error"):
            for number in range(3):
                stream = stream_of([b"a"], max_tokens=1, n=3)
                for sample in stream.samples:
                    if sample.number == number:
                        sample.end(reason, "broken" if reason == "error" else None, 0, 0.0)
                    else:
                        add(sample, 0)
                self.assertEqual(stream.finish_reason, reason)

    def test_a_cancel_withholds_unread_tokens_of_samples_that_are_not_finished(self) -> None:
        """Whatever was read before: each sample's indices go on without a gap to its one last event."""
        for seed in range(200):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                n = dice.randint(1, 3)
                stream = stream_of([b"a"], max_tokens=3, n=n)
                read: list[TokenEvent] = []
                for _ in range(dice.randint(0, 3 * n - 1)):
                    sample = dice.choice([each for each in stream.samples if each.finish_reason is None])
                    add(sample, 0)
                    self.read(dice, stream, read)
                finished = {sample.number for sample in stream.samples if sample.finish_reason}
                stream.withhold()
                self.assertLessEqual({event.sample for event in stream.unread}, finished)
                for sample in stream.samples:
                    if sample.number not in finished:
                        sample.end("cancelled", None, 0, 0.0)
                read += stream.unread
                for sample in stream.samples:
                    mine = [event for event in read if event.sample == sample.number]
                    self.assertEqual([event.index for event in mine], list(range(len(mine))))
                    self.assertEqual([event.finish_reason for event in mine if event.finish_reason],
                                     ["length" if sample.number in finished else "cancelled"])
                    self.assertTrue(mine[-1].finish_reason)

    def read(self, dice: random.Random, stream: RequestStream, into: list[TokenEvent]) -> None:
        while stream.events and dice.random() < 0.5:
            into.append(TokenEvent._make(stream.events.popleft()))


if __name__ == "__main__":
    unittest.main()
