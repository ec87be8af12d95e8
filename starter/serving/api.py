"""Method, path and body -> an answer, or a generation whose answer grows. No socket is known here: the standard
library's server and the ASGI application both call ``Api.handle``.

    GET  /health           200 while the engine can serve; 503 when it has stopped. Open without a key
    GET  /v1/models        the model's name and context; /v1/models/NAME: the same of one
    POST /v1/completions   continue prompts, at once or as a stream of server-sent events
    POST /v1/chat/completions    answer a conversation, with a checkpoint that has a chat template
    POST /v1/responses     the same in the form of OpenAI's newer API; nothing is stored
    POST /tokenize         text -> tokens        POST /detokenize       tokens -> text
    GET  /metrics          for Prometheus        GET  /openapi.json     all of this, as an OpenAPI document
    GET  /                 a page that shows what the engine does, as it happens; it reads GET /live
"""

from __future__ import annotations

import hmac
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from starter.base.strict_json import pointer
from starter.base.wings import wing
from starter.engine import InferenceEngine
from starter.errors import EngineError, RequestError, SchemaError
from starter.serving.answers import Answer, CompletionWork, HttpRequest, Work
from starter.serving.chat import ChatWriter
from starter.serving.completions import CompletionWriter, to_json, token_text
from starter.serving.fields import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    RESPONSE,
    TOKENIZE,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponseBody,
    TokenizeBody,
    parse_body,
)
from starter.serving.generation import Ask, Generation
from starter.serving.live import Feed, LiveWork, page
from starter.serving.openapi import OPEN, Operation, openapi_document
from starter.serving.problems import ApiError, as_api_error, of_field
from starter.serving.responses import ResponseWork, ResponseWriter

DEFAULT_TOKENS = 16  # of a body without max_tokens, as in OpenAI's API


@dataclass(frozen=True)
class Settings:
    """What the person who starts a server decides. ``seconds`` bounds the time of a generation; ``origins`` may read
    answers in a browser, "*" any; ``texts``: viewers see prompts and texts, too."""

    model: str
    key: str | None = None
    seconds: float | None = 600.0
    origins: Sequence[str] = ()
    texts: bool = False


class Api:
    """The routes, over an engine whose own thread runs (``engine.start()``)."""

    def __init__(self, engine: InferenceEngine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self._created = int(time.time())
        self._routes: dict[tuple[str, str], tuple[Operation, Callable[[HttpRequest], Answer | Work]]] = {}
        for operation, function in (
                (Operation("GET", "/health", "Can the engine serve?"), self._health),
                (Operation("GET", "/v1/models", "The models: one."), self._models),
                (Operation("GET", "/v1/models/{model}", "One model."), self._model),
                (Operation("POST", "/v1/completions", "Continue prompts.", COMPLETION, streams=True), self._complete),
                (Operation("POST", "/v1/chat/completions", "Answer a conversation.", CHAT, streams=True), self._chat),
                (Operation("POST", "/v1/responses", "Answer a conversation.", RESPONSE, streams=True), self._respond),
                (Operation("POST", "/tokenize", "Text to tokens.", TOKENIZE), self._tokenize),
                (Operation("POST", "/detokenize", "Tokens to text.", DETOKENIZE), self._detokenize),
                (Operation("GET", "/metrics", "For Prometheus.", content_type="text/plain"), self._metrics),
                (Operation("GET", "/openapi.json", "This document."), self._openapi),
                (Operation("GET", "/", "A page that shows what happens.", content_type="text/html"), self._page),
                (Operation("GET", "/live", "What happens.", content_type="text/event-stream"), self._live)):
            self._routes[operation.method, operation.path] = operation, function

    # ----------------------------------------------------------------------------------------- any request

    def handle(self, request: HttpRequest) -> Answer | Work:
        """Answer a request; every refusal is an answer, too. A GET answers HEAD; the server then leaves the body out.
        Only a bug raises."""
        allowed = self._cross_origin(request)
        try:
            answer = self._handle(request)
        except (EngineError, ApiError) as error:
            answer = Answer.of(as_api_error(error))
        return replace(answer, headers={**answer.headers, **allowed}) if allowed else answer

    def _handle(self, request: HttpRequest) -> Answer | Work:
        path = self._pattern(request.path)
        methods = [method for method, known in self._routes if known == path]
        if not methods:
            raise ApiError(404, f"there is no {request.path}; GET /openapi.json lists what there is", code="not_found")
        methods += ["HEAD"] if "GET" in methods else []
        allow = {"Allow": ", ".join([*methods, "OPTIONS"])}
        if request.method == "OPTIONS":
            return Answer(204, headers=allow)
        if request.method not in methods:
            raise ApiError(405, f"{request.path} answers {' and '.join(methods)}, not {request.method}",
                           code="method_not_allowed", headers=allow)
        if path not in OPEN:
            self._check_key(request.headers.get("authorization", ""))
        operation, function = self._routes["GET" if request.method == "HEAD" else request.method, path]
        if operation.body is not None:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":  # a web page may send any other type to a server on this machine unasked
                raise ApiError(415, f"the body must be of type application/json, not {kind or 'of no type'}; send the "
                                    f"header Content-Type: application/json", code="unsupported_media_type")
        return function(request)

    @staticmethod
    def _pattern(path: str) -> str:
        """The path of the route; a model's name may hold slashes."""
        return "/v1/models/{model}" if path.startswith("/v1/models/") else path

    def _check_key(self, authorization: str) -> None:
        """ApiError 401. The comparison takes the same time wherever the first difference is."""
        if self.settings.key is None:
            return
        scheme, _, given = authorization.partition(" ")
        sent = given.strip().encode("latin-1", "replace")  # a header's bytes, as they came
        right = hmac.compare_digest(sent, self.settings.key.encode())
        if scheme.lower() != "bearer" or not right:
            problem = "the API key is wrong" if authorization else "an API key is needed"
            raise ApiError(401, f"{problem}; send the header Authorization: Bearer KEY", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})

    def _cross_origin(self, request: HttpRequest) -> dict[str, str]:
        """Headers that let a browser show the answer to a page of another origin, where that is allowed."""
        origin = request.headers.get("origin")
        if origin is None or not {origin, "*"} & set(self.settings.origins):
            return {}
        allowed = {"Access-Control-Allow-Origin": "*" if "*" in self.settings.origins else origin, "Vary": "Origin",
                   "Access-Control-Expose-Headers": "X-Request-Id, Retry-After"}
        if request.method == "OPTIONS":
            allowed |= {"Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS", "Access-Control-Max-Age": "600",
                        "Access-Control-Allow-Headers": "Authorization, Content-Type"}
        return allowed

    # ---------------------------------------------------------------------------------------------- routes

    def _health(self, request: HttpRequest) -> Answer:
        self.engine.require_sound()
        if self.engine.closed or not self.engine.has_thread:
            raise ApiError(503, "the engine is closed", kind="server_error", code="engine_stopped")
        return Answer(200, to_json({"status": "ok"}))

    def _about_model(self) -> dict[str, object]:
        return {"id": self.settings.model, "object": "model", "created": self._created, "owned_by": "starter",
                "root": self.settings.model, "parent": None, "max_model_len": self.engine.model.config.max_context}

    def _models(self, request: HttpRequest) -> Answer:
        return Answer(200, to_json({"object": "list", "data": [self._about_model()]}))

    def _model(self, request: HttpRequest) -> Answer:
        self._check_model(unquote(request.path.removeprefix("/v1/models/")))
        return Answer(200, to_json(self._about_model()))

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.settings.model):
            raise ApiError(404, f"there is no model {name!r}; this server has {self.settings.model!r}", param="model",
                           code="model_not_found")

    def _tokenize(self, request: HttpRequest) -> Answer:
        body: TokenizeBody = parse_body(TOKENIZE, request.body)
        self._check_model(body.model)
        tokens = self._encode(body.prompt, body.add_special_tokens, "/prompt")
        texts = [token_text(self.engine.tokenizer, token) for token in tokens] if body.return_token_strs else None
        return Answer(200, to_json({"count": len(tokens), "max_model_len": self.engine.model.config.max_context,
                                    "tokens": tokens, "token_strs": texts}))

    def _detokenize(self, request: HttpRequest) -> Answer:
        body: DetokenizeBody = parse_body(DETOKENIZE, request.body)
        self._check_model(body.model)
        try:
            return Answer(200, to_json({"prompt": self.engine.tokenizer.decode(body.tokens)}))
        except RequestError as error:
            raise ApiError(400, f"/tokens: {error}", param="tokens", code="invalid_value") from None

    def _metrics(self, request: HttpRequest) -> Answer:
        to_prometheus = wing("observe.prometheus", "GET /metrics").to_prometheus
        text: str = to_prometheus(replace(self.engine.metrics(), model_name=self.settings.model))
        return Answer(200, text.encode(), content_type="text/plain; version=0.0.4; charset=utf-8")

    def _page(self, request: HttpRequest) -> Answer:
        return page()

    def _live(self, request: HttpRequest) -> Answer | Work:
        if request.method == "HEAD":
            return Answer(200, content_type="text/event-stream")
        return LiveWork(Feed(self.engine, self.settings.texts), True, {})

    def _openapi(self, request: HttpRequest) -> Answer:
        return Answer(200, to_json(openapi_document([operation for operation, _ in self._routes.values()],
                                                    self.settings.key is not None)))

    # ----------------------------------------------------------------------------------------- completions

    def _complete(self, request: HttpRequest) -> Work:
        body: CompletionBody = parse_body(COMPLETION, request.body)
        self._check_model(body.model)
        self._check_vocabulary(body)
        prompts = [self._encode(prompt, body.add_special_tokens, self._where(body, i)) if isinstance(prompt, str)
                   else prompt for i, prompt in enumerate(body.prompt)]
        name = f"cmpl-{body.request_id or uuid.uuid4().hex}"
        asks = [self._ask(body, tokens, name if len(prompts) == 1 else f"{name}-{i}", self._where(body, i))
                for i, tokens in enumerate(prompts)]
        if len(asks) > self.engine.settings.max_waiting:
            raise ApiError(400, f"/prompt: {len(asks)} prompts; at most {self.engine.settings.max_waiting} may wait",
                           param="prompt", code="invalid_value")
        writer = CompletionWriter(body, prompts, self.engine.tokenizer, name=name, model=self.settings.model,
                                  created=int(time.time()))
        generation = Generation(self.engine, asks, self.settings.seconds)
        writer.scores = generation.prompt_logprobs
        return CompletionWork(generation, body.stream, {"X-Request-Id": name}, writer)

    def _chat(self, request: HttpRequest) -> Work:
        body: ChatBody = parse_body(CHAT, request.body)
        self._check_model(body.model)
        self._check_vocabulary(body)
        tokens, ends, room = self._conversation(body.messages, "messages", body.chat_template_kwargs)
        name = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
        ask = Ask(name, tokens, room if body.most is None else body.most, body.sampling, body.priority,
                  (*body.stop_token_ids, *ends), body.cache_salt)
        writer = ChatWriter(body, len(tokens), self.engine.tokenizer, name=name, model=self.settings.model,
                            created=int(time.time()))
        generation = Generation(self.engine, [ask], self.settings.seconds)
        return CompletionWork(generation, body.stream, {"X-Request-Id": name}, writer)

    def _respond(self, request: HttpRequest) -> Work:
        body: ResponseBody = parse_body(RESPONSE, request.body)
        self._check_model(body.model)
        tokens, ends, room = self._conversation(body.messages, "input", {})
        name = uuid.uuid4().hex
        most = room if body.max_output_tokens is None else body.max_output_tokens
        writer = ResponseWriter(body, len(tokens), name=name, model=self.settings.model, created=int(time.time()))
        ask = Ask(f"resp_{name}", tokens, most, body.sampling, stop_tokens=ends)
        generation = Generation(self.engine, [ask], self.settings.seconds)
        return ResponseWork(generation, body.stream, {"X-Request-Id": f"resp_{name}"}, writer)

    def _conversation(self, messages: Sequence[Mapping[str, Any]], field: str,
                      variables: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int], int]:
        """The tokens of a conversation, those that end an answer, and how long the answer may be. ApiError names the
        field."""
        chat = wing("checkpoints.chat", "a conversation")
        try:
            tokens, ends = chat.chat_prompt(self.engine.tokenizer, messages, **variables)
        except RequestError as error:
            raise ApiError(400, f"/{field}: {error}", param=field, code="invalid_value") from None
        context, kv = self.engine.model.config.max_context, self.engine.kv
        if len(tokens) >= context:
            raise ApiError(400, f"/{field}: the conversation has {len(tokens)} tokens, and the context of this model "
                                f"has room for {context}, the answer included; shorten it", param=field,
                           code="context_length_exceeded")
        return tokens, ends, max(min(context, kv.total_pages * kv.page_size) - len(tokens), 1)

    def _check_vocabulary(self, body: CompletionBody | ChatBody) -> None:
        """ApiError 400 points at the first number that names no token of this model."""
        size = self.engine.model.config.vocab_size
        places: list[tuple[str, int]] = []
        if isinstance(body, CompletionBody):
            places += [(pointer(self._where(body, i), j), token) for i, prompt in enumerate(body.prompt)
                       if not isinstance(prompt, str) and max(prompt, default=0) >= size
                       for j, token in enumerate(prompt)]
        places += [(pointer("/stop_token_ids", i), token) for i, token in enumerate(body.stop_token_ids)]
        places += [(pointer("/logit_bias", token), token) for token, _ in body.logit_bias]
        if isinstance(body, CompletionBody):
            places += [("/logprobs", (body.logprobs or 0) - 1)]
        for place, token in places:
            if token >= size:
                problem = (f"token {token} is outside the vocabulary; allowed: 0 to {size - 1}" if place != "/logprobs"
                           else f"must be from 0 to {size}, the size of the vocabulary, not {token + 1}")
                raise of_field(SchemaError(problem, place))

    @staticmethod
    def _where(body: CompletionBody, number: int) -> str:
        """A JSON pointer to a prompt."""
        return "/prompt" if len(body.prompt) == 1 else f"/prompt/{number}"

    def _encode(self, text: str, bos: bool, where: str) -> list[int]:
        try:
            return self.engine.tokenizer.encode(text, bos=bos)
        except RequestError as error:
            raise ApiError(400, f"{where}: {error}", param="prompt", code="invalid_value") from None

    def _ask(self, body: CompletionBody, tokens: Sequence[int], request_id: str, where: str) -> Ask:
        """ApiError for what is wrong with a prompt, or with its length."""
        context = self.engine.model.config.max_context
        if not tokens:
            raise ApiError(400, f"{where}: the prompt is empty; give at least one token", param="prompt",
                           code="invalid_value")
        wanted = body.max_tokens
        if len(tokens) + (1 if wanted is None else 0) > context:
            raise ApiError(400, f"{where}: the prompt has {len(tokens)} tokens, and the context of this model has room "
                                f"for {context}, the completion included; shorten the prompt", param="prompt",
                           code="context_length_exceeded")
        max_tokens = min(DEFAULT_TOKENS, context - len(tokens)) if wanted is None else wanted
        max_tokens += body.only_scores  # a prompt is scored when it is computed, and one without an output is not
        return Ask(request_id, tokens, max_tokens, body.sampling, body.priority, body.stop_token_ids, body.cache_salt)
