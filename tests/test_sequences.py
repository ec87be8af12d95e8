"""What is remembered of a live request, and the waiting queue held against a list that is sorted anew each time."""

from __future__ import annotations

import random
import unittest
from collections import Counter
from collections.abc import Sequence

from starter.base.tokenizer import TextStream
from starter.sampling import Choice, Draws
from starter.schema import Request, SamplingParams, TokenEvent, sample_id
from starter.sequences import SequenceState, WaitingQueue
from starter.streams import RequestStream, Sample


def sequence(name: str, serial: int = 0, rank: float = 0.0, prompt: int = 1, max_tokens: int = 4) -> SequenceState:
    return SequenceState(Request(name, [0] * prompt, max_tokens), order=(rank, serial))


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
        self.assertEqual(queue.ids(), tuple(ids))
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
        self.assertEqual(queue.ids(), ("r0", "r1", "r2", "r3", "r4"))

    def test_ids_of_those_that_have_waited_longest(self) -> None:
        queue = WaitingQueue()
        queue.push(sequence("a"))
        queue.remove(sequence("a"))  # another one: changes nothing
        self.assertEqual(queue.ids(), ("a",))
        queue.push(sequence("b"))
        self.assertEqual(queue.ids(1), ("a",))
        self.assertEqual(queue.ids(), ("a", "b"))
        queue.remove(queue.get("a"))
        self.assertEqual(queue.ids(), ("b",))

    def test_removed_ones_are_not_kept_behind_one_that_stays(self) -> None:
        """A head that waits long, and clients that give up: their prompts are let go."""
        queue = WaitingQueue()
        queue.push(sequence("head", 0, -1.0))
        for serial in range(1, 200):
            queue.push(given_up := sequence("r", serial))
            queue.remove(given_up)
        self.assertEqual((len(queue._sorted), queue.first(9)), (1, [queue.get("head")]))


def stream_of(pieces: Sequence[bytes], max_tokens: int = 99, **sampling: object) -> RequestStream:
    """A request whose token i adds ``pieces[i]``."""
    request = Request("r", (0,), max_tokens, sampling=SamplingParams(**sampling))
    stream = RequestStream(request)
    for number in range(request.sampling.n):
        draws = Draws(request.sampling, "r", number, 0)
        stream.samples.append(Sample(stream, number, draws, TextStream([b"", *pieces])))
    return stream


def add(sample: Sample, token: int, ends: bool = False) -> TokenEvent:
    """Token i of the pieces, which is token i + 1 of the vocabulary: 0 is the prompt's."""
    sample.stream.end_tokens = (token + 1,) if ends else ()
    complete = sample.delivered + 1 == sample.request.max_tokens  # the scheduler counts that
    return sample.add(Choice(token + 1, -0.5, ((token + 1, -0.5),)), complete, 7, 7.5)


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
        return list(sample.stream.events)

    def test_events(self) -> None:
        (sample,) = stream_of([b"a", b"b"], max_tokens=3).samples
        event = add(sample, 1)
        self.assertEqual(event, TokenEvent("r", 0, 2, "b", 7, 7.5, -0.5, None, None, 0, ((2, -0.5),)))
        add(sample, 0)
        self.assertEqual((sample.tokens, sample.delivered, sample.finish_reason), ([0, 2, 1], 2, None))
        self.assertEqual(add(sample, 1).finish_reason, "length")
        self.assertEqual([event.index for event in sample.stream.events], [0, 1, 2])

    def test_an_end_token_or_a_stop_string_goes_before_the_length(self) -> None:
        (sample,) = stream_of([b"a", b"b"], max_tokens=1).samples
        self.assertEqual(add(sample, 1, ends=True).finish_reason, "stop")
        (sample,) = stream_of([b"a", b"b"], max_tokens=1, stop="b").samples
        event = add(sample, 1)
        self.assertEqual((event.finish_reason, event.token, event.text), ("stop", 2, ""))

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
                    before = "".join(event.text for event in sample.stream.events)
                    if reason != "stop":
                        event = sample.end(reason, error, 8, 8.5)
                        self.assertEqual((event.token, event.index, event.logprob), (None, 2, None))
                        self.assertEqual(event.text, "" if reason == "cancelled" else wanted[len(before):])
                    self.assertEqual((event.finish_reason, event.error), (reason, error))
                    if reason != "cancelled":
                        self.assertEqual("".join(event.text for event in sample.stream.events), wanted)

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
                self.assertLessEqual({event.sample for event in stream.events}, finished)
                for sample in stream.samples:
                    if sample.number not in finished:
                        sample.end("cancelled", None, 0, 0.0)
                read += stream.events
                for sample in stream.samples:
                    mine = [event for event in read if event.sample == sample.number]
                    self.assertEqual([event.index for event in mine], list(range(len(mine))))
                    self.assertEqual([event.finish_reason for event in mine if event.finish_reason],
                                     ["length" if sample.number in finished else "cancelled"])
                    self.assertTrue(mine[-1].finish_reason)

    def read(self, dice: random.Random, stream: RequestStream, into: list[TokenEvent]) -> None:
        while stream.events and dice.random() < 0.5:
            into.append(stream.events.popleft())


if __name__ == "__main__":
    unittest.main()
