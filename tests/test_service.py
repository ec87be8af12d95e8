"""Ways to submit and to read that a caller would guess: texts, options by name, results, text pieces, asyncio,
timeouts; and what an engine keeps of requests that are not read."""

import asyncio
import gc
import os
import sys
import threading
import time
import unittest
import weakref
from threading import Thread

from starter.engine import InferenceEngine
from starter.errors import (
    BackendError,
    DuplicateRequestError,
    EngineError,
    QuantizationError,
    RequestError,
    SchemaError,
    StreamTimeoutError,
    UnknownRequestError,
)
from starter.model import Loaded, Model
from starter.quantization import quantize
from starter.sampling import Choice
from starter.schema import EngineSettings, QuantizationConfig, SamplingParams
from starter.streams import TokenStream
from starter.timeline import VirtualClock
from tests.support import CONFIG, HEALTHY, TOKENIZER, WEIGHTS, Ask, failing_on, make_engine, oracle

PROMPT = (3, 1, 4)
TEXT = "dbe"  # the same as text
HOT = SamplingParams(temperature=2.0, seed=1)
PATIENCE = 60  # seconds that a test waits for another thread


def tokens_of(request: Ask) -> list[int]:
    """Alone, in an engine of its own."""
    with make_engine() as engine:
        request.submit(engine, "solo")
        return [event.token for event in engine.stream("solo") if event.token is not None]


class Submit(unittest.TestCase):
    def test_a_text_is_encoded(self) -> None:
        engine = make_engine()
        request_id = engine.submit(TEXT, 6)
        self.assertEqual(list(engine.result(request_id).tokens), oracle(PROMPT, 6))

    def test_a_text_begins_as_the_model_needs_it(self) -> None:
        """With its beginning-of-sequence token, if it has one."""
        engine = make_engine()
        engine.tokenizer.encode = lambda text, bos: [9] if bos else [8]  # type: ignore[method-assign]
        try:
            self.assertEqual(engine.result(engine.submit(TEXT, 2)).prompt_tokens, (9,))
        finally:
            del engine.tokenizer.encode

    def test_a_text_with_a_character_that_the_model_lacks_is_refused(self) -> None:
        engine = make_engine()
        with self.assertRaises(RequestError):
            engine.submit("d?", 6)
        self.assertEqual((engine.active, engine.metrics().refused), ((), 1))

    def test_options_by_name_are_those_of_sampling_params(self) -> None:
        named = make_engine().generate(TEXT, 9, temperature=2.0, seed=1, stop="a")
        bundled = make_engine().generate(TEXT, 9, SamplingParams(temperature=2.0, seed=1, stop=("a",)))
        mixed = make_engine().generate(TEXT, 9, SamplingParams(temperature=2.0, seed=7), seed=1, stop=["a"])
        self.assertEqual((named, named), (bundled, mixed))
        self.assertEqual(list(make_engine().generate(TEXT, 9, HOT).tokens), tokens_of(Ask(PROMPT, 9, HOT)))

    def test_an_option_that_does_not_exist_is_named(self) -> None:
        engine = make_engine()
        with self.assertRaisesRegex(RequestError, "there is no option temprature; options are .* temperature, "):
            engine.submit(PROMPT, 6, temprature=0.5)  # type: ignore[call-arg]
        with self.assertRaisesRegex(RequestError, "temperature"):
            engine.submit(PROMPT, 6, temperature=-1.0)
        with self.assertRaisesRegex(RequestError, "sampling must be a SamplingParams"):
            engine.submit(PROMPT, 6, sampling={"top_k": 3}, seed=1)  # type: ignore[arg-type]
        self.assertEqual(engine.active, ())

    def test_ids_of_samples_and_of_requests_do_not_meet(self) -> None:
        engine = make_engine(num_pages=64)
        engine.submit(PROMPT, 30, request_id="b", temperature=2.0, seed=3, n=3, stop_tokens=[0, 1, 2, 3, 4, 5, 6])
        ended = []
        while not ended:  # one sample has ended, others go on
            engine.step()
            ended = [event.sample for event in engine.poll("b") if event.finish_reason and event.sample]
        self.assertEqual(engine.active, ("b",))
        with self.assertRaisesRegex(DuplicateRequestError, f"is sample {ended[0]} of the live request 'b'"):
            engine.submit(PROMPT, 2, request_id=f"b#{ended[0]}")
        engine.submit(PROMPT, 2, request_id="b#7")  # no sample of b
        with self.assertRaisesRegex(DuplicateRequestError, "'b' is live"):
            engine.submit(PROMPT, 2, request_id="b")
        engine.run()
        engine.kv.check()

    def test_a_request_is_live_until_its_last_sample_has_ended(self) -> None:
        """Its first sample may have ended long before."""
        stop, seeds = (3, 9, 14), range(200)

        def lengths(seed: int) -> list[int]:
            with make_engine() as engine:
                engine.submit(PROMPT, 20, request_id="a", temperature=2.0, seed=seed, n=2, stop_tokens=stop)
                return [len(sample.tokens) for sample in engine.result("a").samples]

        seed = next(seed for seed in seeds if lengths(seed)[0] <= 2 and lengths(seed)[1] >= 12)
        engine = make_engine()
        engine.submit(PROMPT, 20, request_id="a", temperature=2.0, seed=seed, n=2, stop_tokens=stop)
        for _ in range(5):
            engine.step()
        with self.assertRaisesRegex(DuplicateRequestError, "request 'a' is live"):
            engine.submit([8], 1, request_id="a")
        self.assertEqual([len(sample.tokens) for sample in engine.result("a").samples], lengths(seed))


class Generate(unittest.TestCase):
    def test_a_text_gives_a_result(self) -> None:
        result = make_engine().generate(TEXT, 6)
        expected = oracle(PROMPT, 6)
        self.assertEqual((result.text, list(result.tokens)), (TOKENIZER.decode(expected), expected))
        self.assertEqual((result.finish_reason, result.prompt_tokens, len(result.samples)), ("length", PROMPT, 1))
        self.assertEqual(len(result.logprobs), 6)
        self.assertTrue(all(number <= 0.0 for number in result.logprobs))

    def test_texts_give_results_in_their_order_and_token_lists_give_token_lists(self) -> None:
        engine = make_engine()
        first, second = engine.generate([TEXT, "b"], 6)
        self.assertEqual([list(first.tokens), list(second.tokens)], [oracle(PROMPT, 6), oracle((1,), 6)])
        self.assertEqual(engine.generate([PROMPT, (1,)], 6), [oracle(PROMPT, 6), oracle((1,), 6)])
        self.assertEqual((engine.generate([], 6), engine.active), ([], ()))

    def test_every_sample_is_in_the_result(self) -> None:
        result = make_engine().generate(TEXT, 6, temperature=2.0, seed=1, n=3, logprobs=2)
        self.assertEqual(len(result.samples), 3)
        alone = make_engine().generate(TEXT, 6, temperature=2.0, seed=1, logprobs=2)
        self.assertEqual(result.samples[0], alone.samples[0])
        for sample in result.samples:
            self.assertEqual((len(sample.tokens), len(sample.logprobs), len(sample.top_logprobs)), (6, 6, 6))
            self.assertEqual(sample.text, TOKENIZER.decode(sample.tokens))

    def test_mixed_and_other_prompts_are_refused(self) -> None:
        engine = make_engine()
        for prompts, words in (((TEXT, PROMPT), "1 of 2 are texts"), (7, "expected a text"),
                               (b"ab", "expected a text")):
            with self.assertRaisesRegex(RequestError, words):
                engine.generate(prompts, 6)  # type: ignore[call-overload]
        self.assertEqual(engine.active, ())

    def test_several_samples_of_token_lists_are_refused_before_anything_is_computed(self) -> None:
        engine = make_engine()
        for sampling, options in ((None, {"n": 2}), (SamplingParams(n=2, temperature=1.0), {})):
            with self.assertRaisesRegex(RequestError, "n must be 1"):
                engine.generate([PROMPT], 6, sampling, **options)
        self.assertEqual([event["event"] for event in engine.timeline], ["header"])
        self.assertEqual(engine.generate([PROMPT], 6, SamplingParams(n=2), n=1), [oracle(PROMPT, 6)])

    def test_a_result_says_how_a_sample_ended_that_was_read_before(self) -> None:
        engine = make_engine()
        request_id = engine.submit(TEXT, 6, temperature=2.0, seed=1, n=2)
        engine.run()
        stream = engine.stream(request_id)
        last = [event for event in (next(stream) for _ in range(11)) if event.finish_reason]
        result = engine.result(request_id)
        self.assertEqual(len(last), 1)
        self.assertEqual([sample.finish_reason for sample in result.samples], ["length", "length"])
        self.assertEqual(sum(len(sample.tokens) for sample in result.samples), 1)

    def test_an_error_cancels_the_others_and_forgets_all(self) -> None:
        engine = make_engine(failing_on(7))
        with self.assertRaisesRegex(BackendError, "no luck with token 7"):
            engine.generate(["d", "h", "b"], 6)
        self.assertEqual((engine.active, engine.kv.used_pages, len(engine._core.streams)), ((), 0, 0))

    def test_text_as_it_comes(self) -> None:
        engine = make_engine()
        request_id = engine.submit(TEXT, 6)
        pieces = list(engine.stream_text(request_id))
        self.assertEqual("".join(pieces), TOKENIZER.decode(oracle(PROMPT, 6)))
        self.assertEqual(len(pieces), 6)
        with self.assertRaisesRegex(RequestError, "2 samples, whose texts would mix"):
            engine.stream_text(engine.submit(TEXT, 6, n=2))
        with self.assertRaises(UnknownRequestError):
            engine.stream_text("never")
        failing = make_engine(failing_on(7))
        with self.assertRaisesRegex(BackendError, "no luck with token 7"):
            list(failing.stream_text(failing.submit("h", 2)))


class Reading(unittest.TestCase):
    def test_leaving_a_with_block_early_cancels(self) -> None:
        engine = make_engine()
        request_id = engine.submit(PROMPT, 20)
        with engine.stream(request_id) as events:
            for event in events:
                if event.index == 2:
                    break
        self.assertEqual((engine.active, engine.kv.used_pages), ((), 0))
        self.assertRaises(UnknownRequestError, engine.stream, request_id)
        self.assertEqual(engine.submit([1], 1, request_id=request_id), request_id)

    def test_leaving_a_with_block_at_the_end_changes_nothing(self) -> None:
        engine = make_engine()
        with engine.stream(engine.submit(PROMPT, 6)) as events:
            self.assertEqual([event.token for event in events], oracle(PROMPT, 6))
        self.assertEqual(engine.metrics().finished["cancelled"], 0)

    def test_without_a_with_block_the_rest_can_be_read_later(self) -> None:
        engine = make_engine()
        request_id = engine.submit(PROMPT, 6)
        for event in engine.stream(request_id):
            if event.index == 2:
                break
        self.assertEqual([event.token for event in engine.stream(request_id)], oracle(PROMPT, 6)[3:])

    def test_closing_does_not_touch_a_newer_request_of_the_same_id(self) -> None:
        engine = make_engine()
        old = engine.stream(engine.submit(PROMPT, 20, request_id="x"))
        engine.cancel("x")
        engine.submit(PROMPT, 6, request_id="x")
        old.close()
        self.assertEqual(list(engine.result("x").tokens), oracle(PROMPT, 6))

    def test_a_timeout_loses_nothing(self) -> None:
        engine = make_engine()
        request_id = engine.submit(PROMPT, 6)
        with self.assertRaisesRegex(StreamTimeoutError, "no event within 0 seconds"):
            next(engine.stream(request_id, timeout=0))
        self.assertIsInstance(StreamTimeoutError("x"), TimeoutError)
        self.assertEqual([event.token for event in engine.stream(request_id, timeout=PATIENCE)], oracle(PROMPT, 6))

    def test_a_timeout_while_the_engines_own_thread_computes(self) -> None:
        go_on = threading.Event()
        backend = failing_on(-1)
        backend.fault = lambda moment, tokens: self.assertTrue(go_on.wait(PATIENCE))
        with make_engine(backend) as engine:
            engine.start()
            request_id = engine.submit(PROMPT, 6)
            with self.assertRaises(StreamTimeoutError):
                next(engine.stream(request_id, timeout=0.02))
            go_on.set()
            self.assertEqual([event.token for event in engine.stream(request_id)], oracle(PROMPT, 6))

    def test_a_timeout_must_be_a_number(self) -> None:
        engine = make_engine()
        request_id = engine.submit(PROMPT, 6)
        for wrong in (-1, True, "1", float("nan")):
            with self.assertRaisesRegex(RequestError, "timeout must be a number of seconds"):
                engine.stream(request_id, timeout=wrong)  # type: ignore[arg-type]

    def test_an_interrupt_in_a_reader_loses_no_event(self) -> None:
        """Whichever line of ``take`` it strikes, at whichever event."""
        code = TokenStream.take.__code__
        lines = {line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno}
        struck = set()
        for line in sorted(lines):
            for at in range(1, 5):
                engine = make_engine()
                request_id = engine.submit(PROMPT, 4)
                hits = [0]

                def trace(frame: object, event: str, argument: object, line: int = line, at: int = at,
                          hits: list[int] = hits) -> object:
                    if frame.f_code is code and event == "line" and frame.f_lineno == line:  # type: ignore[attr-defined]
                        hits[0] += 1
                        if hits[0] == at:
                            sys.settrace(None)
                            raise KeyboardInterrupt
                    return trace

                read: list[int] = []
                before = sys.gettrace()
                sys.settrace(trace)  # type: ignore[arg-type]
                try:
                    for event in engine.stream(request_id):
                        read.append(event.index)
                except KeyboardInterrupt:
                    struck.add(line)
                finally:
                    sys.settrace(before)
                if len(read) < 4:
                    read += [event.index for event in engine.stream(request_id)]
                self.assertEqual(read, [0, 1, 2, 3], (line - code.co_firstlineno, at))
        self.assertGreaterEqual(len(struck), 6)


class Asynchronous(unittest.TestCase):
    def read(self, engine: InferenceEngine, request_ids: list[str]) -> list[list[int | None]]:
        async def one(request_id: str) -> list[int | None]:
            return [event.token async for event in engine.astream(request_id)]

        async def all_of_them() -> list[list[int | None]]:
            return await asyncio.wait_for(asyncio.gather(*map(one, request_ids)), PATIENCE)

        return asyncio.run(all_of_them())

    def test_several_tasks_with_and_without_a_thread_of_the_engine(self) -> None:
        prompts = [(number % 20, 3) for number in range(12)]
        for started in (False, True):
            with self.subTest(started=started), make_engine(max_running=4) as engine:
                if started:
                    engine.start()
                self.assertEqual(self.read(engine, [engine.submit(prompt, 6) for prompt in prompts]),
                                 [oracle(prompt, 6) for prompt in prompts])
                self.assertEqual((len(engine._core.streams), len(engine.readers)), (0, 0))

    def test_a_cancelled_task_cancels_its_request(self) -> None:
        for started in (False, True):
            with self.subTest(started=started), make_engine() as engine:
                if started:
                    engine.start()
                request_id, other = engine.submit(PROMPT, 20), engine.submit((1,), 6)

                async def read_two(request_id: str, first: asyncio.Event, engine: InferenceEngine) -> None:
                    async for event in engine.astream(request_id):
                        if event.index == 1:
                            first.set()
                            await asyncio.sleep(PATIENCE)

                async def run(engine: InferenceEngine = engine, request_id: str = request_id) -> None:
                    first = asyncio.Event()
                    task = asyncio.create_task(read_two(request_id, first, engine))
                    await asyncio.wait_for(first.wait(), PATIENCE)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    await asyncio.get_running_loop().shutdown_asyncgens()

                asyncio.run(run())
                self.assertNotIn(request_id, engine.active)
                self.assertEqual(list(engine.result(other).tokens), oracle((1,), 6))
                self.assertEqual(engine.kv.used_pages, 0)

    def test_unknown_ids_are_refused_at_once(self) -> None:
        self.assertRaises(UnknownRequestError, make_engine().astream, "never")

    def test_an_engine_that_stops_ends_the_task(self) -> None:
        engine = make_engine()
        request_id = engine.submit(PROMPT, 20)
        engine.start()
        engine._stop(MemoryError("none left"))
        with self.assertRaisesRegex(EngineError, "none left"):
            self.read(engine, [request_id])


class Kept(unittest.TestCase):
    def test_at_most_max_unread_finished_streams_are_kept(self) -> None:
        engine = make_engine(max_unread=3, max_running=2)
        ids = [engine.submit([number], 2) for number in range(6)]
        late = engine.stream(ids[0])  # its reader has it in hand
        engine.run()
        for request_id in ids[:3]:
            with self.assertRaisesRegex(UnknownRequestError, "waited to be read for longer than the settings allow"):
                engine.poll(request_id)
        self.assertEqual([event.token for event in late], oracle((0,), 2))
        self.assertEqual([list(engine.result(request_id).tokens) for request_id in ids[3:]],
                         [oracle((number,), 2) for number in range(3, 6)])
        self.assertEqual((len(engine._core.streams), len(engine._core.unread), len(engine._core.past)), (0, 0, 3))

    def test_and_for_at_most_unread_seconds(self) -> None:
        engine = make_engine(unread_seconds=5.0)  # the clock counts steps
        old = engine.submit([0], 1)
        engine.run()
        young = engine.submit([1], 9)
        engine.run()
        self.assertRaises(UnknownRequestError, engine.poll, old)
        self.assertEqual(len(engine.poll(young)), 9)

    def test_a_stream_whose_last_event_came_back_to_it_counts_like_any_other(self) -> None:
        engine = make_engine(max_unread=1)
        request_id = engine.submit([0], 1)
        engine.run()
        stream = engine._core.streams[request_id]
        engine.forget(stream)  # an interrupt takes the reader between this and the event's return
        engine.remember(stream)
        self.assertEqual([event.token for event in engine.stream(request_id)], oracle((0,), 1))
        engine.remember(stream)
        engine.submit([1], 1)
        engine.run()
        self.assertRaises(UnknownRequestError, engine.stream, request_id)

    def test_live_requests_and_half_read_ones_are_kept(self) -> None:
        engine = make_engine(max_unread=0)
        request_id = engine.submit(PROMPT, 6)
        first = next(engine.stream(request_id))
        engine.submit([1], 2)
        engine.step()
        self.assertEqual(first.token, oracle(PROMPT, 6)[0])
        self.assertIn(request_id, engine.active)

    def test_the_last_requests_are_remembered_as_finished(self) -> None:
        engine = make_engine(max_unread=2)
        ids = [f"r{number}" for number in range(4)]
        for request_id in ids:
            engine.result(engine.submit([1], 1, request_id=request_id))
        for request_id in ids[2:]:
            engine.cancel(request_id)  # nothing happens
            self.assertEqual(engine.status(request_id).state, "finished")
        for request_id in ids[:2]:
            self.assertRaises(UnknownRequestError, engine.cancel, request_id)
        engine.submit([5], 3, request_id=ids[3])
        self.assertEqual(engine.status(ids[3]).state, "waiting")

    def test_an_engine_with_a_thread_is_collected_when_nothing_refers_to_it(self) -> None:
        engine = make_engine()
        engine.start()
        engine.generate(TEXT, 3)
        thread, gone = engine._thread, weakref.ref(engine)
        assert thread
        del engine
        deadline = time.monotonic() + PATIENCE
        while gone() and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        self.assertIsNone(gone())
        thread.join(PATIENCE)
        self.assertFalse(thread.is_alive())

    @unittest.skipUnless(hasattr(os, "fork"), "needs os.fork, which Windows lacks")
    def test_after_a_fork_the_child_hears_at_once_that_the_thread_is_not_there(self) -> None:
        with make_engine() as engine:
            engine.start()
            read, write = os.pipe()
            with engine.stepping:  # no step before the fork
                request_id = engine.submit(PROMPT, 20)
                child = os.fork()
                if not child:
                    try:
                        engine.result(request_id, timeout=PATIENCE)
                    except EngineError as error:
                        os.write(write, str(error).encode())
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
            os.close(write)
            with os.fdopen(read, encoding="utf-8") as answer:
                self.assertIn("its thread runs in the parent process", answer.read())
            self.assertEqual(len(engine.result(request_id).tokens), 20)


class OwnParts(unittest.TestCase):
    def test_a_policy_object(self) -> None:
        class LastComeFirstServed:
            decode_first = True

            def rank(self, request: object, arrival_step: int, generated: int) -> float:
                return -arrival_step

        engine = InferenceEngine(HEALTHY, EngineSettings(max_running=1), VirtualClock(), policy=LastComeFirstServed())
        first = engine.submit([1], 3)
        engine.step()
        second = engine.submit([2], 3)
        engine.step()
        third = engine.submit([3], 3)
        order = []
        while engine.active:
            order += engine.step().admitted
        self.assertEqual(order, [third, second])
        self.assertEqual(engine.timeline.header["settings"]["policy"], "LastComeFirstServed")
        self.assertEqual(len(engine.result(first).tokens), 3)

    def test_a_sampler(self) -> None:
        def least_likely(row, params, draws, prompt, generated, end_tokens):  # type: ignore[no-untyped-def]
            self.assertEqual((len(row), tuple(prompt)), (CONFIG.vocab_size, PROMPT))
            token = min(range(len(row)), key=row.__getitem__)
            return Choice(token, -1.0)

        engine = InferenceEngine(HEALTHY, EngineSettings(), VirtualClock(), sampler=least_likely)
        mine = engine.generate(TEXT, 5)
        self.assertNotEqual(list(mine.tokens), oracle(PROMPT, 5))
        self.assertEqual(mine.logprobs, (-1.0,) * 5)

    def test_a_sampler_that_fails_or_invents_a_token_ends_its_request_alone(self) -> None:
        def broken(row, params, draws, prompt, generated, end_tokens):  # type: ignore[no-untyped-def]
            if prompt[0] == 1:
                raise ZeroDivisionError("by one's own fault")
            return Choice(CONFIG.vocab_size if prompt[0] == 2 else 0, -1.0)

        engine = InferenceEngine(HEALTHY, EngineSettings(), VirtualClock(), sampler=broken)
        ids = [engine.submit([number], 3) for number in (1, 2, 3)]
        engine.run()
        ends = [engine.poll(request_id)[-1] for request_id in ids]
        self.assertEqual([end.finish_reason for end in ends], ["error", "error", "length"])
        self.assertIn("by one's own fault", ends[0].error or "")
        self.assertIn(f"the sampler chose {CONFIG.vocab_size}", ends[1].error or "")

    def test_a_quantizer(self) -> None:
        coarse = QuantizationConfig(bits=4, group_size=4)
        seen = []

        def quantizer(rows):  # type: ignore[no-untyped-def]
            seen.append(len(rows))
            return quantize(rows, coarse)

        own = Model(CONFIG, WEIGHTS, HEALTHY.model.backend, quantizer)
        named = Model(CONFIG, WEIGHTS, HEALTHY.model.backend, coarse)
        self.assertEqual(own.parameters(), named.parameters())
        self.assertEqual(len(seen), len(own.matrices))
        with self.assertRaisesRegex(QuantizationError, "a quantizer returns a QuantizedTensor of .* not 7"):
            Model(CONFIG, WEIGHTS, HEALTHY.model.backend, lambda rows: 7)

    def test_other_objects_are_refused_in_a_sentence(self) -> None:
        with self.assertRaisesRegex(RequestError, "expected a loaded model"):
            InferenceEngine("fixtures/tiny_model.json")  # type: ignore[arg-type]
        with self.assertRaisesRegex(SchemaError, "/sampler: expected a function that chooses a token"):
            InferenceEngine(HEALTHY, sampler=7)  # type: ignore[arg-type]
        with self.assertRaisesRegex(RequestError, "policy must be one of"):
            InferenceEngine(HEALTHY, policy=7)  # type: ignore[arg-type]


class Listeners(unittest.TestCase):
    def test_one_that_fails_is_let_go_and_the_engines_thread_goes_on(self) -> None:
        """As without a thread, where the step's caller gets the exception once."""
        def full_disk(event: object) -> None:
            raise OSError(28, "No space left on device")

        loaded = Loaded(HEALTHY.model, TOKENIZER, {})
        with InferenceEngine(loaded, EngineSettings(), VirtualClock()) as engine:
            engine.start()
            engine.timeline.listen(full_disk)
            with self.assertLogs("starter.engine", "ERROR") as logs:
                results = [engine.result(engine.submit(PROMPT, 6)) for _ in range(3)]
                engine.submit(PROMPT, 1)
            self.assertEqual([list(result.tokens) for result in results], [oracle(PROMPT, 6)] * 3)
            self.assertEqual(len(logs.output), 1)
            self.assertIn("No space left on device", logs.output[0])


class Crowd(unittest.TestCase):
    def test_a_reader_is_woken_for_its_own_news(self) -> None:
        """Two hundred readers of as many requests: none is woken much more often than it has events."""
        with make_engine(max_running=4, num_pages=64) as engine:
            ids = [engine.submit([number % 20], 4) for number in range(200)]
            woken: list[int] = []
            right = engine.readers.wait_for

            def count(stream: object, seconds: float) -> None:
                right(stream, seconds)  # type: ignore[arg-type]
                woken.append(1)

            engine.readers.wait_for = count  # type: ignore[method-assign]
            results: dict[str, list[int]] = {}
            readers = [Thread(target=lambda name=name: results.update({name: list(engine.result(name).tokens)}))
                       for name in ids]
            with engine.stepping:  # no step until all of them wait
                engine.start()
                for reader in readers:
                    reader.start()
                while len(engine.readers) < len(ids):
                    time.sleep(0.001)
            for reader in readers:
                reader.join(PATIENCE)
            self.assertEqual(results, {name: oracle((number % 20,), 4) for number, name in enumerate(ids)})
            self.assertLess(len(woken), 200 * 4 * 4)
