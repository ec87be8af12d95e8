"""The fields of each body: their shapes and defaults, declared once. Parsing, error messages and the OpenAPI document
follow from these declarations.

    parse_body(COMPLETION, b'{"prompt": "Once", "max_tokens": 20}') -> CompletionBody, or ApiError 400

``null`` in an optional field is the same as leaving it out, as OpenAI's clients expect. A field that is not declared is
ignored if it changes no output (``IGNORED``) and refused by name otherwise: an answer that silently disregards what was
asked for is worse than an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Union

from starter.base.strict_json import (
    Boolean,
    Integer,
    ListOf,
    Nullable,
    Number,
    Record,
    Shape,
    Text,
    defaults_of,
    describe,
    parse_json,
    pointer,
)
from starter.errors import SchemaError
from starter.schema import MAX_CONTEXT, SAMPLING_SHAPE, SEED_SHAPE, SamplingParams
from starter.serving.problems import ApiError, of_field

TOKENS = ListOf(Integer(0, in_file=2**31 - 1), longest=MAX_CONTEXT)
MAX_PROMPTS = 1_024
_TEXT = Text(0, 16 * MAX_CONTEXT)
_OF_SAMPLING = SAMPLING_SHAPE.fields

IGNORED = {  # what these say is of no consequence to what is generated here
    "user": "who asks", "metadata": "labels for the caller's own use", "store": "nothing is stored",
    "service_tier": "there is one", "safety_identifier": "who asks",
    "parallel_tool_calls": "there are no tools",
    "prompt_cache_key": "prefixes are found by content", "prompt_cache_retention": "prefixes are found by content"}
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {  # values that ask for nothing, and why others are refused
    "suffix": ((), "the model continues a text, it does not fill a gap"),
    "best_of": ((1,), "samples are not ranked; ask for n samples and choose"),
    "use_beam_search": ((False,), "tokens are sampled one by one"),
    "length_penalty": ((1.0,), "it belongs to beam search"),
    "prompt_logprobs": ((), "give echo and logprobs to /v1/completions"),
    "prompt_embeds": ((), "prompts are texts or tokens"),
    "response_format": (({"type": "text"},), "the output is free text"),
    "guided_json": ((), "the output is free text"), "guided_regex": ((), "the output is free text"),
    "guided_choice": ((), "the output is free text"), "guided_grammar": ((), "the output is free text"),
    "structured_outputs": ((), "the output is free text"),
    "messages": ((), "it belongs to /v1/chat/completions; give a prompt"),
    "tools": (([],), "calls of tools are not recognized in what the model writes"),
    "tool_choice": (("none", "auto"), "calls of tools are not recognized in what the model writes"),
    "functions": (([],), "calls of tools are not recognized in what the model writes"),
    "function_call": (("none", "auto"), "calls of tools are not recognized in what the model writes"),
    "modalities": ((["text"],), "the output is text"), "audio": ((), "the output is text"),
    "prediction": ((), "no output is predicted"), "web_search_options": ((), "nothing is looked up"),
    "reasoning_effort": ((), "give chat_template_kwargs, if the template has such a variable"),
    "verbosity": ((), "say it in a message"),
    "reasoning": (({},), "the model has no effort to choose"),
    "text": (({"format": {"type": "text"}}, {}), "the output is text"),
    "previous_response_id": ((), "nothing is stored; send the whole conversation"),
    "conversation": ((), "nothing is stored; send the whole conversation"),
    "background": ((False,), "the answer comes on this connection"),
    "truncation": (("disabled",), "no part of a conversation is dropped silently"),
    "include": (([],), "there is nothing more to include"),
    "max_tool_calls": ((), "there are no tools"),
    "add_generation_prompt": ((True,), "the answer is always a new message of the assistant"),
    "continue_final_message": ((False,), "the answer is always a new message of the assistant"),
    "chat_template": ((), "the checkpoint's own is rendered"), "documents": ((), "say it in a message"),
    "truncate_prompt_tokens": ((), "no part of a prompt is dropped silently"),
    "include_stop_str_in_output": ((False,), "a stop string is not part of the text"),
    "skip_special_tokens": ((True,), "special tokens add no text"),
    "spaces_between_special_tokens": ((True,), "special tokens add no text"),
    "bad_words": (([],), "give logit_bias for single tokens"),
    "allowed_token_ids": ((), "give logit_bias")}


# ------------------------------------------------------------------------------------------------------ shapes


@dataclass(frozen=True)
class Prompts(Shape):
    """A text, texts, a list of tokens, or lists of tokens -> a tuple of prompts, each a text or a tuple of tokens."""

    def parse(self, value: object, path: str) -> tuple[Union[str, tuple[int, ...]], ...]:
        if isinstance(value, str):
            return (_TEXT.parse(value, path),)
        if not isinstance(value, list) or not value:
            raise SchemaError(f"expected a text, texts, a list of tokens, or lists of tokens, not "
                              f"{'an empty list' if value == [] else describe(value)}", path)
        if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
            raise SchemaError(f"{len(value)} prompts; at most {MAX_PROMPTS} are allowed", path)
        if isinstance(value[0], str):
            return tuple(_TEXT.parse(text, pointer(path, i)) for i, text in enumerate(value))
        if isinstance(value[0], list):
            return tuple(TOKENS.parse(tokens, pointer(path, i)) for i, tokens in enumerate(value))
        return (TOKENS.parse(value, path),)

    def json_schema(self) -> dict[str, object]:
        one = (_TEXT.json_schema(), TOKENS.json_schema())
        lists = [{"type": "array", "items": item, "minItems": 1, "maxItems": MAX_PROMPTS} for item in one]
        return {"anyOf": [*one, *lists]}


@dataclass(frozen=True)
class TextOrTexts(Shape):
    """A string, or a list of them -> a tuple."""

    texts: Shape

    def parse(self, value: object, path: str) -> tuple[str, ...]:
        if not isinstance(value, str):
            parsed: tuple[str, ...] = self.texts.parse(value, path)
            return parsed
        try:
            return tuple(self.texts.parse([value], path))
        except SchemaError as error:
            raise SchemaError(error.problem, path) from None

    def json_schema(self) -> dict[str, object]:
        texts = self.texts.json_schema()
        return {"anyOf": [texts["items"], texts]}


@dataclass(frozen=True)
class Biases(Shape):
    """An object from token numbers, written as strings, to numbers -> (token, number) pairs."""

    def parse(self, value: object, path: str) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise SchemaError(f"expected an object from tokens to numbers, not {describe(value)}", path)
        pairs: list[list[object]] = []
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise SchemaError("expected the number of a token as the key", pointer(path, key))
            if problem := _BIAS.problem(bias):
                raise SchemaError(problem, pointer(path, key))
            pairs.append([int(key), bias])
        parsed: tuple[tuple[int, float], ...] = _OF_SAMPLING["logit_bias"].parse(pairs, path)
        return parsed

    def json_schema(self) -> dict[str, object]:
        return {"type": "object", "additionalProperties": _BIAS.json_schema(),
                "propertyNames": {"pattern": "^[0-9]{1,9}$"}}


_BIAS = Number(-1e6, 1e6)


@dataclass(frozen=True)
class Messages(Shape):
    """Messages of a conversation -> dictionaries whose contents are texts. Several parts of text in one message are
    joined by line ends, as vLLM does; other parts, such as images, are refused."""

    def parse(self, value: object, path: str) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not value:
            raise SchemaError(f"expected a list of messages, not {describe(value)}", path)
        return [self._message(message, pointer(path, i)) for i, message in enumerate(value)]

    def _message(self, message: object, path: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise SchemaError(f"expected an object with role and content, not {describe(message)}", path)
        given = {key: value for key, value in message.items() if value not in (None, [], {}) or key == "content"}
        for key, value in given.items():
            if key not in _OF_MESSAGE:
                raise SchemaError(f"unknown field; allowed: {', '.join(_OF_MESSAGE)}", pointer(path, key))
            if _OF_MESSAGE[key] is not None and not isinstance(value, str) and key != "content":
                raise SchemaError(f"expected a text, not {describe(value)}", pointer(path, key))
        if (role := given.get("role")) not in ROLES:
            raise SchemaError(f"allowed: {', '.join(ROLES)}; not {describe(role)}", pointer(path, "role"))
        if not (given.get("content") is None and "tool_calls" in given):
            given["content"] = self._content(given.get("content"), pointer(path, "content"))
        return given

    @staticmethod
    def _content(content: object, path: str) -> str:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise SchemaError(f"expected a text, or parts of text, not {describe(content)}", path)
        for i, part in enumerate(parts):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise SchemaError(f'expected {{"type": "text", "text": ...}}, not {describe(kind)}', pointer(path, i))
        return "\n".join(part["text"] for part in parts)

    def json_schema(self) -> dict[str, object]:
        part = {"type": "object", "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
        content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}, {"type": "null"}]}
        properties: dict[str, object] = {"role": {"enum": list(ROLES)}, "content": content}
        properties |= {key: {} if shape is None else {"type": "string"}
                       for key, shape in _OF_MESSAGE.items() if key not in properties}
        return {"type": "array", "minItems": 1,
                "items": {"type": "object", "required": ["role"], "properties": properties}}


ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_MESSAGE: Mapping[str, Shape | None] = {  # None: whatever the template understands
    "role": _TEXT, "content": _TEXT, "name": _TEXT, "tool_call_id": _TEXT, "reasoning_content": _TEXT,
    "tool_calls": None}


@dataclass(frozen=True)
class InputItems(Shape):
    """The input of a response: a text, or messages -> messages. Items of other kinds, such as calls, are refused."""

    def parse(self, value: object, path: str) -> list[dict[str, Any]]:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise SchemaError(f"expected a text or a list of messages, not {describe(value)}", path)
        messages = []
        for i, item in enumerate(value):
            if not isinstance(item, dict) or item.get("type", "message") != "message":
                kind = item.get("type") if isinstance(item, dict) else item
                raise SchemaError(f"expected a message, not {describe(kind)}", pointer(path, i))
            kept = {key: item[key] for key in item if key not in ("type", "id", "status")}
            if isinstance(kept.get("content"), list):
                kept["content"] = [
                    {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part
                    for part in kept["content"]]
            messages.append(kept)
        return Messages().parse(messages, path)

    def json_schema(self) -> dict[str, object]:
        return {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]}


_TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True)
class Variables(Shape):
    """An object that is passed on as it is."""

    def parse(self, value: object, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SchemaError(f"expected an object, not {describe(value)}", path)
        for taken in ("messages", "tools", "add_generation_prompt"):
            if taken in value:
                raise SchemaError("is no variable of the template's own", pointer(path, taken))
        return value

    def json_schema(self) -> dict[str, object]:
        return {"type": "object"}


# ------------------------------------------------------------------------------------------------------ bodies


@dataclass(frozen=True)
class StreamOptions:
    """``include_usage``: one more chunk at the end says how many tokens there were. ``continuous_usage_stats``: every
    chunk does."""

    include_usage: Annotated[bool, Boolean()] = False
    continuous_usage_stats: Annotated[bool, Boolean()] = False
    include_obfuscation: Annotated[bool, Boolean()] = False  # ignored: chunks are not padded


@dataclass(frozen=True, kw_only=True)
class GenerationBody:
    """What /v1/completions and /v1/chat/completions have in common. Defaults are OpenAI's: temperature 1."""

    model: Annotated[str | None, Text(1, 4_096)] = None
    max_tokens: Annotated[int | None, Integer(0, in_file=MAX_CONTEXT)] = None
    temperature: Annotated[float, _OF_SAMPLING["temperature"]] = 1.0
    top_p: Annotated[float, _OF_SAMPLING["top_p"]] = 1.0
    n: Annotated[int, _OF_SAMPLING["n"]] = 1
    stop: Annotated[tuple[str, ...], TextOrTexts(_OF_SAMPLING["stop"])] = ()
    seed: Annotated[int | None, SEED_SHAPE] = None
    presence_penalty: Annotated[float, _OF_SAMPLING["presence_penalty"]] = 0.0
    frequency_penalty: Annotated[float, _OF_SAMPLING["frequency_penalty"]] = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], Biases()] = ()
    stream: Annotated[bool, Boolean()] = False
    stream_options: Annotated[StreamOptions | None, Record.of(StreamOptions)] = None
    # Further fields, under vLLM's names:
    top_k: Annotated[int, Integer(-1, in_file=2**53)] = 0
    min_p: Annotated[float, _OF_SAMPLING["min_p"]] = 0.0
    min_tokens: Annotated[int, _OF_SAMPLING["min_tokens"]] = 0
    ignore_eos: Annotated[bool, Boolean()] = False
    repetition_penalty: Annotated[float, _OF_SAMPLING["repetition_penalty"]] = 1.0
    stop_token_ids: Annotated[tuple[int, ...], ListOf(TOKENS.item, longest=64)] = ()
    priority: Annotated[int, Integer(None, in_file=1_000_000)] = 0
    cache_salt: Annotated[str | None, Text(1, 200)] = None
    request_id: Annotated[str | None, Text(1, 100)] = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise SchemaError("goes with stream: true", "/stream_options")

    def sampling_with(self, **further: Any) -> SamplingParams:
        """For the engine, which counts top_k = -1 (all tokens) as 0."""
        same = ("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
                "min_p", "min_tokens", "ignore_eos", "repetition_penalty")
        options: dict[str, Any] = {name: getattr(self, name) for name in same}
        return SamplingParams(**options, top_k=max(self.top_k, 0), **further)

    @property
    def usage(self) -> tuple[bool, bool]:
        """Of a stream: is usage told at its end, and in every chunk?"""
        options = self.stream_options or StreamOptions()
        return options.include_usage, options.include_usage and options.continuous_usage_stats


@dataclass(frozen=True, kw_only=True)
class CompletionBody(GenerationBody):
    """Of POST /v1/completions: at most 16 tokens, or as many as fit, unless max_tokens says more."""

    prompt: Annotated[tuple[Union[str, tuple[int, ...]], ...], Prompts()]
    logprobs: Annotated[int | None, Integer(0, in_file=1_000)] = None
    echo: Annotated[bool, Boolean()] = False
    add_special_tokens: Annotated[bool, Boolean()] = True
    return_tokens_as_token_ids: Annotated[bool, Boolean()] = False

    @property
    def only_scores(self) -> bool:
        """Nothing is to be generated: it is the prompt's log-probabilities that are asked for."""
        return self.echo and self.logprobs is not None and self.max_tokens == 0

    @property
    def sampling(self) -> SamplingParams:
        """For the engine. With echo, the prompt's tokens have log-probabilities, too."""
        return self.sampling_with(logprobs=self.logprobs, prompt_logprobs=self.logprobs if self.echo else None)


@dataclass(frozen=True, kw_only=True)
class ChatBody(GenerationBody):
    """Of POST /v1/chat/completions: as many tokens as fit, unless max_completion_tokens (formerly max_tokens) says
    less.

    ``top_logprobs`` is how many of the likeliest tokens are listed, with ``logprobs`` true. ``chat_template_kwargs``
    are variables for the checkpoint's template, such as enable_thinking."""

    messages: Annotated[list[dict[str, Any]], Messages()]
    max_completion_tokens: Annotated[int | None, Integer(1, in_file=MAX_CONTEXT)] = None
    logprobs: Annotated[bool, Boolean()] = False
    top_logprobs: Annotated[int | None, Integer(0, 20)] = None
    chat_template_kwargs: Annotated[dict[str, Any], Variables()] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise SchemaError("goes with logprobs: true", "/top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise SchemaError("is the former name of max_completion_tokens, and says something else", "/max_tokens")

    @property
    def most(self) -> int | None:
        """Tokens of an answer, if that is limited."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def sampling(self) -> SamplingParams:
        """For the engine."""
        return self.sampling_with(logprobs=(self.top_logprobs or 0) if self.logprobs else None)


@dataclass(frozen=True, kw_only=True)
class ResponseBody:
    """Of POST /v1/responses: as many tokens as fit, unless max_output_tokens says less. ``instructions`` are the
    system's message before the others."""

    input: Annotated[list[dict[str, Any]], InputItems()]
    model: Annotated[str | None, Text(1, 4_096)] = None
    instructions: Annotated[str | None, _TEXT] = None
    max_output_tokens: Annotated[int | None, Integer(1, in_file=MAX_CONTEXT)] = None
    temperature: Annotated[float, _OF_SAMPLING["temperature"]] = 1.0
    top_p: Annotated[float, _OF_SAMPLING["top_p"]] = 1.0
    seed: Annotated[int | None, SEED_SHAPE] = None
    stream: Annotated[bool, Boolean()] = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*system, *self.input]

    @property
    def sampling(self) -> SamplingParams:
        """For the engine."""
        return SamplingParams(self.temperature, top_p=self.top_p, seed=self.seed)


@dataclass(frozen=True)
class TokenizeBody:
    """Of POST /tokenize. ``add_special_tokens``: begin with the model's beginning-of-sequence token, if it has one."""

    prompt: Annotated[str, _TEXT]
    model: Annotated[str | None, Text(1, 4_096)] = None
    add_special_tokens: Annotated[bool, Boolean()] = True
    return_token_strs: Annotated[bool, Boolean()] = False


@dataclass(frozen=True)
class DetokenizeBody:
    """Of POST /detokenize."""

    tokens: Annotated[tuple[int, ...], TOKENS]
    model: Annotated[str | None, Text(1, 4_096)] = None


COMPLETION, CHAT, RESPONSE, TOKENIZE, DETOKENIZE = map(
    Record.of, (CompletionBody, ChatBody, ResponseBody, TokenizeBody, DetokenizeBody))


# ----------------------------------------------------------------------------------------------------- reading


def parse_body(record: Record, raw: bytes) -> Any:
    """The body of a request -> an object of the record's class. ApiError 400 names what is wrong, and where."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is wrong", code="invalid_json") from None
    try:
        document = parse_json(text)
    except SchemaError as error:
        problem = of_field(error)
        problem.code = "invalid_json"
        raise problem from None
    try:
        if not isinstance(document, dict):
            raise SchemaError(f"the body must be an object, not {describe(document)}")
        return record.parse({name: value for name, value in document.items() if _counts(record, name, value)}, "")
    except SchemaError as error:
        raise of_field(error) from None


def _counts(record: Record, name: str, value: object) -> bool:
    """Is this field to be parsed? SchemaError if it is one that is refused."""
    if name in record.fields:
        return value is not None or name not in defaults_of(record.make)
    if name in IGNORED:
        return False
    if name in REFUSED:
        neutral, reason = REFUSED[name]
        if value is None or any(value == each and type(value) is type(each) for each in neutral):
            return False
        raise SchemaError(f"is not supported: {reason}", pointer("", name))
    raise SchemaError(f"unknown field; allowed: {', '.join(record.fields)}", pointer("", name))


def body_schema(record: Record) -> dict[str, object]:
    """The JSON Schema of a body: optional fields may be null, ignored ones may be there."""
    schema: dict[str, Any] = record.json_schema()
    defaults = defaults_of(record.make)
    for name, shape in record.fields.items():
        if name in defaults:
            schema["properties"][name] = _described(Nullable(shape).json_schema(), defaults[name])
    schema["properties"] |= {name: {"description": f"Ignored: {why}."} for name, why in IGNORED.items()}
    return schema


def _described(schema: dict[str, object], default: object) -> dict[str, object]:
    return {**schema, "default": default} if isinstance(default, (bool, int, float, str)) else schema
