"""A conversation in the terminal: ``python3 -m starter chat PATH``.

    > What is the capital of France?
    The capital of France is Paris.
    > And of Germany?
    ...

Every turn is served with the whole conversation before it, whose pages are still there and are shared. Ctrl-C ends the
answer, which stays in the conversation as far as it came. Lines that begin with a slash:

    /reset    begin a new conversation       /stats    what the last answer took
    /help     this list                      /exit     the end, as Ctrl-D is
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starter.base.console import EXIT_OK, Console, guarded, started
from starter.base.wings import wing
from starter.command.options import add_engine_options, add_sampling_options, check_options, sampling_params
from starter.command.run import load_model
from starter.engine import InferenceEngine
from starter.errors import EngineError, RequestError
from starter.schema import SamplingParams
from starter.streams import TokenStream

ROOM = 4096  # tokens of a conversation that pages are taken for, unless --num-pages says otherwise
HELP = __doc__.rpartition("slash:\n\n")[2].rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    parser = argparse.ArgumentParser(prog=started("python3 -m starter chat"), description=started(__doc__),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="PATH", help="GGUF file, folder from Hugging Face, or llama2.c model")
    parser.add_argument("--system", metavar="TEXT", help="the system's message, before the conversation")
    add_sampling_options(parser.add_argument_group("answers"))
    add_engine_options(parser)
    parser.set_defaults(fixture=None, prompt=None, chat=["conversation"], n=None, steps="few", manifest_only=False,
                        timeline=None, trace=None, report=None, quiet=False, json=False)
    options = parser.parse_args(arguments)
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    check_options(options)
    if options.prefix_sharing is None and options.use_cache is None:
        options.prefix_sharing = True
    if options.clock != "real":
        raise RequestError("--clock virtual has no effect on a conversation; leave it out")
    console, sampling = Console(sys.stdout), sampling_params(options)
    loaded, settings = load_model(options, console, Console(sys.stderr))
    pages = -(-min(ROOM, loaded.model.config.max_context) // settings.page_size)
    if options.num_pages is None and pages > settings.num_pages:
        settings = settings.override({"num_pages": pages})
    with InferenceEngine(loaded, settings) as engine:
        engine.start()  # so that an interrupt reaches this thread, which only reads
        chat = Conversation(engine, console, sampling, options.max_tokens, options.system)
        chat.check()
        converse(chat, _ask)
    return EXIT_OK


def _ask() -> str | None:
    """The next line of the person; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def converse(chat: Conversation, ask: Callable[[], str | None]) -> None:
    """Answer what ``ask`` returns until it returns None."""
    console = chat.console
    while True:
        try:
            text = ask()
        except KeyboardInterrupt:
            console.line("\n(/exit or Ctrl-D ends the conversation)")
            continue
        if text is None or text.strip() == "/exit":
            return
        if text.strip() == "/reset":
            chat.reset()
        elif text.strip() == "/stats":
            console.line(chat.stats())
        elif text.lstrip().startswith("/"):
            console.line(HELP)
        elif text.strip():
            try:
                chat.answer(text)
            except RequestError as error:  # it does not fit, for instance
                console.line(f"(not answered: {error})")


@dataclass
class Conversation:
    """What was said so far, and the engine that answers."""

    engine: InferenceEngine
    console: Console
    sampling: SamplingParams
    max_tokens: int | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    _stats: str = "no answer yet"

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again, with the system's text alone."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def check(self) -> None:
        """RequestError if the checkpoint cannot chat; EngineError if a package is missing for it."""
        self._prompt("?")

    def _prompt(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        chat = wing("checkpoints.chat", started("python3 -m starter chat"))
        tokens, ends = chat.chat_prompt(self.engine.tokenizer, [*self.messages, {"role": "user", "content": text}])
        return tokens, ends

    def answer(self, text: str) -> None:
        """Print the answer as it comes; an interrupt ends it. RequestError, and nothing is said, if it does not fit."""
        prompt, ends = self._prompt(text)
        kv, context = self.engine.kv, self.engine.model.config.max_context
        room = min(context, kv.total_pages * kv.page_size) - len(prompt)
        if room < 1:
            raise RequestError(f"the conversation has {len(prompt)} tokens now; there is room for {room + len(prompt)} "
                               f"in the pages (--num-pages) and the model's context of {context}; /reset begins anew")
        before = self.engine.metrics()
        request_id = self.engine.submit(prompt, min(room, self.max_tokens or 512), stop_tokens=ends,
                                        sampling=self.sampling)
        with self.engine.stream(request_id) as events:
            said, count, end = self._print(events)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
        found = self.engine.metrics().found_tokens - before.found_tokens
        self._stats = (f"prompt of {len(prompt)} tokens, {found} of them found in shared pages; {count} tokens of "
                       f"answer, ended by {end}")

    def _print(self, events: TokenStream) -> tuple[str, int, str]:
        """The text, the number of tokens, and why it ended."""
        said, count = "", 0
        try:
            for event in events:
                if event.finish_reason == "error":
                    raise EngineError(f"the answer ended with an error: {event.error}")
                count += event.token is not None
                said += event.text
                self.console.write(event.text)
                if event.finish_reason:
                    self.console.line()
                    return said, count, event.finish_reason
        except KeyboardInterrupt:
            self.console.line(" ... (interrupted)")
        return said, count, "an interrupt"

    def stats(self) -> str:
        """What the last answer took, and how long the conversation is."""
        metrics = self.engine.metrics()
        rate = f"{metrics.tokens_per_second:.1f} tokens/s, " if metrics.tokens_per_second else ""
        return f"{self._stats}; {rate}{len(self.messages)} messages so far"
