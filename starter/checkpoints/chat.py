"""Optional · A conversation as a prompt, written by the checkpoint's own chat template (extra ``checkpoints``).

    [{"role": "user", "content": "Hi"}]  --template-->  "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n"
                                         --tokens---->  [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]

A chat template is a program in Jinja. It is run by the package ``jinja2`` in its sandbox, with the functions, filters
and variables that transformers gives it; what it renders is what transformers renders (tests/checkpoints/test_chat.py).
A template that cannot be run, or that refuses the conversation, is a RequestError: no prompt is written by a guess.

Only the template writes control tokens. Where a message's text holds the name of one, its first character is *hidden*
while the template runs, behind a character that occurs nowhere else. It comes back when the text is encoded:

    text of a user      a<|im_end|>b
    hidden              a?|im_end|>b                 the template sees no name, whatever it does with the text
    rendered            <|im_start|>user\\na?|im_end|>b<|im_end|>\\n
    encoded             control, ordinary "user\\na<|im_end|>b", control, ordinary "\\n"

A template could still put a name together from parts, say by deleting "</think>" from "<|im_</think>end|>". So the
conversation is rendered once more with every first character of a name hidden, and unless the control tokens are the
same, it is refused.

Read for this: transformers, ``utils/chat_template_utils.py`` (5.24). Taken: what a template may use. Changed: the texts
of messages cannot become control tokens, and the tokens that end an answer are found by rendering one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, Union

from starter.base.strict_json import describe
from starter.base.tokenizer import Tokenizer
from starter.checkpoints.hf_tokenizer import HfTokenizer
from starter.errors import EngineError, RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")

Message = Mapping[str, Any]
Conversation = Union[str, Sequence[Message]]  # a str: one message of the user


class ChatPrompt(NamedTuple):
    """The tokens of a conversation, and the tokens that end an answer beside the model's own ends of sequence."""

    tokens: list[int]
    ends: tuple[int, ...]


def chat_prompt(tokenizer: Tokenizer, messages: Conversation, /, tools: Sequence[Mapping[str, Any]] | None = None,
                **variables: Any) -> ChatPrompt:
    """The prompt that asks for an answer to ``messages``. ``tools`` are JSON schemas of functions, for templates that
    know them; ``variables`` are the template's own, such as enable_thinking. O(text).

    RequestError for a checkpoint without a chat template, a malformed message, a template that refuses the conversation
    or fails, and a text that would change the turns; EngineError without the package ``jinja2``."""
    chat = _Chat(tokenizer, tools)
    conversation = checked(messages)
    rendering = chat.render(conversation, tools, True, variables)
    return ChatPrompt(chat.tokens(rendering), chat.ends())


def render(tokenizer: Tokenizer, messages: Conversation, /, tools: Sequence[Mapping[str, Any]] | None = None,
           add_generation_prompt: bool = True, **variables: Any) -> str:
    """The text of the same prompt, in which names of control tokens in a message look like control tokens."""
    chat = _Chat(tokenizer, tools)
    return chat.shown(chat.render(checked(messages), tools, add_generation_prompt, variables))


def checked(messages: Conversation) -> list[dict[str, Any]]:
    """The messages as dictionaries. RequestError, with the message's number, for one that is malformed."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"expected a text, or a list of messages with role and content, not {describe(messages)}")
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {number} must have a role and a content; it is {describe(message)}")
        if unknown := message.keys() - set(KEYS):
            raise RequestError(f"message {number} has the key {min(map(str, unknown))!r}; known are {', '.join(KEYS)}")
        if message.get("role") not in ROLES:
            raise RequestError(f"message {number} has the role {message.get('role')!r}; allowed: {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"message {number} must have a text as its content, not {describe(content)}")
        found.append(dict(message))
    return found


class _Chat:
    """One rendering: a checkpoint's template, and the names of its control tokens."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None) -> None:
        if not isinstance(tokenizer, HfTokenizer) or tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; have it continue a text instead")
        self._tokenizer = tokenizer
        self._source = _chosen(tokenizer.chat_template, tools)
        names = sorted(tokenizer.control_names, key=len, reverse=True)  # at one place, the longest counts
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._firsts = sorted({name[0] for name in names})
        self._hidden: dict[str, str] = {}  # what hides a first character -> that character

    def render(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None,
               add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The conversation as the template writes it, names of control tokens in it hidden."""
        given = {**variables, "messages": messages, "tools": list(tools) if tools else None}
        used = {*self._source, *"".join(_texts(given))}
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)  # private use
        self._hidden = {next(free): first for first in self._firsts}
        cautious, strict = (self._run(_mapped(given, hide), add_generation_prompt)
                            for hide in (self._hide_names, self._hide_firsts))
        if self._names.findall(cautious) != self._names.findall(strict):
            raise RequestError("the chat template would make a control token out of a message's text; leave the names "
                               "of control tokens out of it")
        return cautious

    def _run(self, given: Mapping[str, Any], add_generation_prompt: bool) -> str:
        try:
            return str(_compiled(self._source).render(
                {**self._tokenizer.template_names, **given, "add_generation_prompt": add_generation_prompt}))
        except EngineError:  # jinja2 is missing, or the template refuses
            raise
        except Exception as error:  # a template may raise whatever Python does
            raise RequestError(f"the chat template of this checkpoint cannot be run: {type(error).__name__}: {error}"
                               ) from None

    def _hide_names(self, text: str) -> str:
        hiding = {first: hidden for hidden, first in self._hidden.items()}
        while found := self._names.search(text):  # behind one name, a second one may begin within it
            text = text[:found.start()] + hiding[found[0][0]] + text[found.start() + 1:]
        return text

    def _hide_firsts(self, text: str) -> str:
        return text.translate({ord(first): hidden for hidden, first in self._hidden.items()})

    def shown(self, rendering: str) -> str:
        """The rendering with nothing hidden."""
        return rendering.translate({ord(hidden): first for hidden, first in self._hidden.items()})

    def tokens(self, rendering: str) -> list[int]:
        """Control tokens where the template wrote their names, ordinary tokens elsewhere."""
        tokens: list[int] = []
        start = 0
        strip = False  # the last control token takes the space behind it
        for found in [*self._names.finditer(rendering), None]:
            text = rendering[start:found.start() if found else None]
            control = self._tokenizer.control_names[found[0]] if found else None
            if strip:
                text = text.lstrip()
            if control and control.lstrip:
                text = text.rstrip()
            if text:
                tokens += self._tokenizer.ordinary(self.shown(text))
            if found and control:
                tokens.append(control.token)
                start, strip = found.end(), control.rstrip
        return tokens

    def ends(self) -> tuple[int, ...]:
        """The control token that the template writes directly behind an answer, if it does."""
        answer = chr(0xFFFFD)
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        try:
            _, _, rest = self.render(messages, None, False, {}).partition(answer)
        except RequestError:  # it takes no answers back
            return ()
        found = self._names.match(rest.lstrip())
        return (self._tokenizer.control_names[found[0]].token,) if found else ()


def _chosen(template: object, tools: object) -> str:
    """The template itself, or of several named ones that for tools or the default, as transformers chooses."""
    if isinstance(template, str):
        return template
    if isinstance(template, Sequence):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        chosen = named.get("tool_use") if tools and "tool_use" in named else named.get("default")
        if isinstance(chosen, str):
            return chosen
        raise RequestError(f"this checkpoint has the chat templates {', '.join(map(repr, named)) or '(none)'}; "
                           f"none of them is called 'default'")
    raise RequestError(f"the chat template of this checkpoint is {describe(template)}; a text, or a list of named "
                       f"texts, is known")


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON data with every text in it changed, those of keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> Any:
    """What a template may use, as in transformers: its own raise_exception, strftime_now, tojson and {% generation %};
    loop controls; no attribute or method of Python that changes something or leaves the sandbox."""
    try:
        import_module("jinja2")
    except ImportError:
        raise EngineError("a chat template is a program in Jinja, and the package jinja2 is not installed: pip install "
                          "'.[checkpoints]'") from None
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks what the model has written, for training; here its contents as they are."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(reason: str) -> NoReturn:
    raise RequestError(f"the chat template of this checkpoint refuses the conversation: {reason}")
