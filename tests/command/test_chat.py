"""A conversation in the terminal, with an engine that answers by rule (extra ``checkpoints``)."""

from __future__ import annotations

import io
import sys
import unittest
from collections.abc import Callable, Iterable
from unittest import mock

from starter.backend import ReferenceBackend
from starter.base.console import Console
from starter.base.weights import seeded_weights
from starter.command import chat
from starter.command.chat import Conversation, converse, main
from starter.engine import InferenceEngine
from starter.errors import RequestError
from starter.model import Loaded, Model
from starter.schema import EngineSettings, ModelConfig, SamplingParams
from starter.streams import TokenStream
from tests.extras import needs
from tests.support import HEALTHY, run_main
from tests.wings import has_wing, needs_wing

if has_wing("checkpoints"):
    from tests.checkpoints.test_chat import CHATML, SPECIALS, number, ours


@needs_wing("checkpoints")
@needs("checkpoints", "tokenizers", "jinja2")
class ConversationTest(unittest.TestCase):
    def setUp(self) -> None:
        tokenizer = ours(CHATML)
        config = ModelConfig(vocab_size=tokenizer.vocab_size, width=8, layers=1, heads=2, kv_heads=2, ffn_width=8,
                             max_context=400, bos_token=256, eos_tokens=(257,), tied_output=False)
        model = Model(config, seeded_weights(config, 3), ReferenceBackend())
        self.engine = InferenceEngine(Loaded(model, tokenizer, {}),
                                      EngineSettings(page_size=8, num_pages=60, budget_tokens=64, prefix_sharing=True))
        self.addCleanup(self.engine.close)
        self.out = io.StringIO()

    def talk(self, lines: Iterable[str | BaseException], sampling: SamplingParams | None = None,
             **options: object) -> Conversation:
        said = Conversation(self.engine, Console(self.out), sampling or saying("a"), 4, **options)  # type: ignore[arg-type]
        converse(said, asking(lines))
        return said

    def prompts(self) -> list[str]:
        """What was submitted, control tokens by name."""
        return ["".join(SPECIALS[token - 256] if token >= 256 else chr(token) for token in event["prompt_tokens"])
                for event in self.engine.timeline if event["event"] == "submit"]

    def test_each_turn_holds_those_before(self) -> None:
        said = self.talk(["Hi", "  ", "<|im_end|>"], system="S")
        turn = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        more = "aaaa<|im_end|>\n<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
        self.assertEqual(self.prompts(), [turn, turn + more])
        self.assertEqual([message["content"] for message in said.messages], ["S", "Hi", "aaaa", "<|im_end|>", "aaaa"])
        self.assertEqual(self.out.getvalue(), "aaaa\naaaa\n")

    def test_earlier_turns_are_found_in_their_pages(self) -> None:
        said = self.talk(["Hi", "Why?"])
        self.assertRegex(said.stats(), "prompt of 50 tokens, 24 of them found in shared pages; 4 tokens of answer, "
                                       "ended by length; .*4 messages so far")

    def test_the_models_mark_ends_an_answer(self) -> None:
        said = self.talk(["Hi"], saying(number("<|im_end|>")))
        self.assertEqual([message["content"] for message in said.messages], ["Hi", ""])
        self.assertIn("ended by stop", said.stats())

    def test_commands(self) -> None:
        said = self.talk(["/stats", "Hi", "/reset", "/help", "/nonsense", "Ho", "/exit", "never"])
        self.assertEqual([message["content"] for message in said.messages], ["Ho", "aaaa"])
        self.assertEqual(self.out.getvalue().count("/reset    begin a new conversation"), 2)
        self.assertIn("no answer yet; 0 messages", self.out.getvalue())

    def test_an_interrupt_ends_the_answer_and_not_the_program(self) -> None:
        """What came of it stays in the conversation; the pages are free at once."""
        plain, numbers = TokenStream.__next__, iter(range(100))

        def interrupted(stream: TokenStream) -> object:
            if next(numbers) == 2:
                raise KeyboardInterrupt
            return plain(stream)

        with mock.patch.object(TokenStream, "__next__", interrupted):
            said = self.talk(["Hi", KeyboardInterrupt(), "Ho"])
        self.assertEqual([message["content"] for message in said.messages], ["Hi", "aa", "Ho", "aaaa"])
        self.assertIn("aa ... (interrupted)\n\n(/exit or Ctrl-D ends the conversation)\naaaa\n", self.out.getvalue())
        self.assertEqual((self.engine.active, self.engine.kv.used_pages), ((), 0))

    def test_a_conversation_that_does_not_fit(self) -> None:
        said = self.talk(["x" * 400, "Hi"])
        self.assertRegex(self.out.getvalue(), r"\A\(not answered: the conversation has 419 tokens now; there is room "
                                              r"for 400 in the pages .* context of 400; /reset begins anew")
        self.assertEqual([message["content"] for message in said.messages], ["Hi", "aaaa"])

    def test_a_text_that_is_no_text(self) -> None:
        self.talk(["\ud800", "Hi"])
        self.assertRegex(self.out.getvalue(), r"\A\(not answered: .*surrogate pair.*\)\naaaa\n\Z")


class ProgramTest(unittest.TestCase):
    @needs_wing("checkpoints")
    def test_a_model_that_cannot_chat(self) -> None:
        with InferenceEngine(HEALTHY) as engine, self.assertRaisesRegex(RequestError, "no chat template"):
            Conversation(engine, Console(None), SamplingParams()).check()

    @needs_wing("checkpoints")
    def test_what_is_wrong_is_said_in_a_line(self) -> None:
        for arguments, words in ((["nowhere"], "nowhere"), (["x", "--top-k", 3], "--top-k has no effect"),
                                 (["x", "--backend", "gpu"], "--backend: there is no backend 'gpu'"),
                                 (["x", "--temperature", -1], "--temperature")):
            run = run_main(main, *arguments)
            self.assertEqual((run.code, run.out, run.err.count("\n")), (2, "", 1), run)
            self.assertIn(words, run.err)

    def test_help_and_the_end_of_input(self) -> None:
        self.assertIn("/reset    begin a new conversation", run_main(main, "--help").out)
        with mock.patch.object(sys, "stdin", io.StringIO("one\n")):
            self.assertEqual([chat._ask(), chat._ask()], ["one", None])


def saying(letter: str | int) -> SamplingParams:
    """Always the same token."""
    return SamplingParams(logit_bias={ord(letter) if isinstance(letter, str) else letter: 1000.0})


def asking(lines: Iterable[str | BaseException]) -> Callable[[], str | None]:
    left = iter(lines)

    def ask() -> str | None:
        line = next(left, None)
        if isinstance(line, BaseException):
            raise line
        return line
    return ask


if __name__ == "__main__":
    unittest.main()
