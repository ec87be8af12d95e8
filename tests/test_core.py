"""The loop's four verbs: a decision laid flat, rows that become tokens, failures that stay with their request; ids."""

from __future__ import annotations

import unittest
from dataclasses import replace
from math import nan

from starter.backend import Piece, ReferenceBackend
from starter.core import EngineCore, Work
from starter.errors import BackendError, DuplicateRequestError, RequestError
from starter.model import Loaded, Model
from starter.schema import EngineSettings, Request, SamplingParams
from starter.streams import RequestStream, Sample
from starter.timeline import VirtualClock
from tests.support import CONFIG, HEALTHY, TOKENIZER, WEIGHTS

END = 7
ROW = [0.0, 5.0, *[-9.0] * (CONFIG.vocab_size - 2)]  # token 1 is the likeliest


def make_core(loaded: Loaded = HEALTHY, **settings: object) -> EngineCore:
    return EngineCore(loaded, EngineSettings().override({"page_size": 4, "num_pages": 16, **settings}), VirtualClock())


def submit(core: EngineCore, request_id: str, *prompt: int, max_tokens: int = 5, **sampling: object) -> Sample:
    """The first sample of a new request."""
    request = Request(request_id, prompt or (1, 2), max_tokens, sampling=SamplingParams(**sampling))
    core.check(request)
    core.accept(core.make_stream(request))
    return core.samples[request_id]


def events(core: EngineCore, kind: str) -> list[str]:
    return [event["request"] for event in core.recorder.timeline if event["event"] == kind]


class PlanTest(unittest.TestCase):
    """From a decision to a batch: whose tokens, at which positions, on which pages; and which cannot be computed."""

    def test_chunks_of_prompts_and_decodes(self) -> None:
        core = make_core()
        submit(core, "a", 1, 2)
        work = core.plan(8)
        core.settle(core.choose(work, {work.samples[0]: [[*ROW[:9], 9.0, *ROW[10:]]]}))  # its first token is 9
        submit(core, "b", 3, 4, 5, 6, 7)
        work = core.plan(4)
        a, b = (core.kv.pages(core.scheduler.handle(name)) for name in "ab")
        self.assertEqual([sample.id for sample in work.samples], ["a", "b"])
        self.assertEqual(work.batch.pieces(), [Piece([9], 2, a, True), Piece([3, 4, 5], 0, b, False)])
        step = core.recorder.timeline.events[-2]
        self.assertEqual((work.batch.page_size, step["event"], step["computed"]), (4, "step", 4))

    def test_tokens_are_copied(self) -> None:
        for use_cache in (True, False):
            core = make_core(use_cache=use_cache)
            sample = submit(core, "a", 1, 2)
            work = core.plan(8)
            sample.tokens[0] = 8
            self.assertEqual(work.batch.tokens, [1, 2])

    def test_a_request_whose_pages_do_not_reach_fails_alone(self) -> None:
        core = make_core(preemption="swap")
        for name, prompt in (("a", (1, 2)), ("b", (3, 4, 5, 6, 7)), ("c", (5,)), ("d", (6,))):
            submit(core, name, *prompt)
        decide = core.scheduler.step

        def decide_and_lose_pages(budget: int) -> object:
            decision = decide(budget)
            handles = {name: core.scheduler.handle(name) for name in "abc"}
            core.kv.release(handles["a"])
            handles["b"].pages = handles["b"].pages[:1]
            core.kv.swap_out(handles["c"])
            return decision

        core.scheduler.step = decide_and_lose_pages  # type: ignore[method-assign, assignment]
        streams = dict(core.streams)
        work = core.plan(16)
        self.assertEqual(([sample.id for sample in work.samples], work.batch.tokens), (["d"], [6]))
        errors = {name: stream.events[-1].error for name, stream in streams.items() if stream.events}
        self.assertEqual(sorted(errors), ["a", "b", "c"])
        self.assertRegex(errors["a"], "StaleHandleError")
        self.assertRegex(errors["b"], "b is to compute position 4, and its 1 pages of 4 end before it")
        self.assertRegex(errors["c"], "c is swapped out")

    def test_without_a_cache(self) -> None:
        """All tokens each time, computed when the next one is due."""
        core = make_core(use_cache=False)
        submit(core, "a", 1, 2, 3, 4)
        submit(core, "b", 5)
        work = core.plan(3)
        self.assertEqual(work.batch.slots, [])
        self.assertEqual({sample.id: piece for sample, piece in zip(work.samples, work.batch.pieces())},
                         {"a": Piece([1, 2, 3, 4], 0, (), False), "b": Piece([5], 0, (), True)})
        self.assertEqual(core.recorder.timeline.events[-1]["computed"], 1)
        core.settle(core.choose(work, {core.samples["b"]: [ROW]}))
        core.plan(3)
        self.assertEqual(core.recorder.timeline.events[-1]["computed"], 6)


class ChooseAndSettleTest(unittest.TestCase):
    """What a step's rows become: a token for each sample that is due one, an error that stays with its request."""

    def setUp(self) -> None:
        model = Model(replace(CONFIG, eos_tokens=(END,)), WEIGHTS, ReferenceBackend())
        self.core = make_core(Loaded(model, TOKENIZER, {}))

    def started(self, request_id: str, **settings: object) -> tuple[Sample, Work]:
        """A request whose prompt a step is computing."""
        sample = submit(self.core, request_id, **settings)
        return sample, self.core.plan(32)

    def test_a_row_becomes_a_token_of_its_stream(self) -> None:
        sample, work = self.started("a")
        chosen = self.core.choose(work, {sample: [ROW]})
        self.core.settle(chosen)
        [event] = sample.stream.events
        self.assertEqual((chosen.tokens[sample].token, event.token, event.index, event.finish_reason), (1, 1, 0, None))
        self.assertEqual(events(self.core, "token"), ["a"])

    def test_after_the_prompt_one_token_for_each_sample(self) -> None:
        sample, work = self.started("a", n=3, temperature=1.0, seed=1)
        chosen = self.core.choose(work, {sample: [ROW]})
        self.assertEqual([each.number for each in chosen.tokens], [0, 1, 2])
        self.core.settle(chosen)
        self.assertEqual(len(events(self.core, "fork")), 2)
        self.assertEqual(list(self.core.choose(work, {sample: [ROW]}).tokens), [sample])

    def test_choosing_again_chooses_the_same(self) -> None:
        """As after an interrupted step: a choice that was not settled has used up no random number."""
        sample, work = self.started("a", temperature=1.5, seed=2)
        flat = [0.0] * CONFIG.vocab_size
        self.assertEqual(*(self.core.choose(work, {sample: [flat]}) for _ in range(2)))

    def test_an_end_token_ends_the_request(self) -> None:
        sample, work = self.started("a")
        self.core.settle(self.core.choose(work, {sample: [[*ROW[:END], 9.0, *ROW[END + 1:]]]}))
        self.assertEqual((sample.finish_reason, self.core.samples, self.core.scheduler.idle), ("stop", {}, True))
        self.assertEqual(events(self.core, "finish"), ["a"])

    def test_what_is_wrong_with_a_row_concerns_its_request_alone(self) -> None:
        bad = submit(self.core, "bad")
        good, work = self.started("good")
        chosen = self.core.choose(work, {bad: [[nan, *ROW[1:]]], good: [ROW]})
        self.assertEqual((list(chosen.tokens), list(chosen.failures)), ([good], [bad]))
        self.assertIsInstance(chosen.failures[bad], BackendError)
        self.core.settle(chosen)
        [event] = bad.stream.events
        self.assertEqual((event.token, event.finish_reason), (None, "error"))
        self.assertIn("NaN", event.error)
        self.assertEqual([event.token for event in good.stream.events], [1])
        self.assertEqual(list(self.core.samples), ["good"])

    def test_a_failed_computation_is_passed_on(self) -> None:
        sample, work = self.started("a")
        failure = OSError("no luck")
        chosen = self.core.choose(work, {sample: failure})
        self.assertEqual((chosen.tokens, chosen.failures), ({}, {sample: failure}))
        self.core.settle(chosen)
        self.assertEqual(sample.stream.events[-1].error, "OSError: no luck")


class IdsTest(unittest.TestCase):
    """Which ids are taken."""

    def end(self, core: EngineCore, request_id: str, reason: str) -> RequestStream:
        stream = core.streams[request_id]
        core.end_all(stream, reason)
        return stream

    def test_an_id_is_taken_until_its_last_event_was_read(self) -> None:
        core = make_core()
        submit(core, "a")
        self.assertRaisesRegex(DuplicateRequestError, "'a' is live", submit, core, "a")
        self.end(core, "a", "length")
        self.assertRaisesRegex(DuplicateRequestError, "not read to its end", submit, core, "a")

    def test_after_a_cancel_it_is_free(self) -> None:
        core = make_core()
        submit(core, "a")
        old = self.end(core, "a", "cancelled")
        submit(core, "a")
        self.assertIsNot(core.streams["a"], old)

    def test_samples_are_sequences_with_ids_of_their_own(self) -> None:
        core = make_core()
        submit(core, "a", n=3)
        self.assertEqual(len(core.samples), 3)
        for sequence_id in core.samples:
            self.assertRaises(DuplicateRequestError, submit, core, sequence_id)

    def test_tokens_that_end_a_request(self) -> None:
        model = Model(replace(CONFIG, eos_tokens=(1, 2)), WEIGHTS, ReferenceBackend())
        core = make_core(Loaded(model, TOKENIZER, {}))
        for ignore_eos, stop_tokens, ends in ((False, (), (1, 2)), (False, (3,), (1, 2, 3)), (True, (), ()),
                                              (True, (1,), (1,))):
            request = Request("a", (1,), 3, sampling=SamplingParams(ignore_eos=ignore_eos), stop_tokens=stop_tokens)
            self.assertEqual(core.make_stream(request).end_tokens, ends)

    def test_what_the_model_cannot_serve(self) -> None:
        core = make_core(num_pages=99)
        self.assertRaises(RequestError, core.check, Request("a", (1,) * CONFIG.max_context, 9))


if __name__ == "__main__":
    unittest.main()
