"""Every route but completions, keys, origins, methods: over HTTP, and as pure functions where no socket matters."""

from __future__ import annotations

import json
import unittest
import unittest.mock
from dataclasses import replace
from typing import Any

from starter.serving.answers import Answer, HttpRequest
from starter.serving.api import Api, Settings
from starter.serving.fields import COMPLETION, IGNORED, StreamOptions, body_schema
from tests.extras import needs
from tests.paths import ROOT
from tests.serving.support import ServerCase, engine_of, eventually
from tests.wings import needs_wing


class RoutesTest(ServerCase):
    settings = Settings("maker/tiny model")

    def test_health(self) -> None:
        self.assertEqual(self.ask("GET", "/health").document, {"status": "ok"})

    def test_models(self) -> None:
        listed = self.ask("GET", "/v1/models").document
        self.assertEqual(listed["object"], "list")
        (model,) = listed["data"]
        self.assertEqual((model["id"], model["object"], model["max_model_len"]), ("maker/tiny model", "model", 128))
        for path in ("/v1/models/maker/tiny%20model", "/v1/models/maker%2Ftiny%20model?x=y"):
            self.assertEqual(self.ask("GET", path).document, model)
        reply = self.ask("GET", "/v1/models/gpt-4")
        self.assertEqual((reply.status, self.error_of(reply)["code"]), (404, "model_not_found"))

    def test_the_model_of_a_body(self) -> None:
        self.complete(model="maker/tiny model")
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"}),
                           ("/detokenize", {"tokens": [1]})):
            error = self.refused(404, {**body, "model": "gpt-4"}, path)
            self.assertEqual((error["param"], error["code"]), ("model", "model_not_found"))

    def test_tokens_and_back(self) -> None:
        reply = self.ask("POST", "/tokenize", {"prompt": "cab", "return_token_strs": True})
        self.assertEqual(reply.document, {"count": 3, "max_model_len": 128, "tokens": [2, 0, 1],
                                          "token_strs": ["c", "a", "b"]})
        self.assertEqual(self.ask("POST", "/tokenize", {"prompt": ""}).document["tokens"], [])
        self.assertEqual(self.ask("POST", "/detokenize", {"tokens": [2, 0, 1]}).document, {"prompt": "cab"})
        for path, body, where in (("/tokenize", {"prompt": "aZ"}, "/prompt: "), ("/tokenize", {}, "/prompt: "),
                                  ("/tokenize", {"prompt": ["a"]}, "/prompt: "),
                                  ("/detokenize", {"tokens": [20]}, "/tokens: token 20 "),
                                  ("/detokenize", {"tokens": "a"}, "/tokens: "),
                                  ("/detokenize", {"tokens": [-1]}, "/tokens/0: ")):
            self.assertTrue(self.refused(400, body, path)["message"].startswith(where))

    @needs_wing("observe")
    def test_metrics(self) -> None:
        self.complete(max_tokens=5)
        reply = self.ask("GET", "/metrics")
        self.assertEqual(reply.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8")
        self.assertIn(b'\nvllm:generation_tokens_total{model_name="maker/tiny model"} 5\n', reply.body)
        self.assertIn(b'\nvllm:num_requests_running{model_name="maker/tiny model"} 0\n', reply.body)

    def test_methods_and_paths(self) -> None:
        for path in ("/live/", "/v1", "/v1/completions/", "/V1/completions", "/v1/embeddings", "/v1/chat/completion"):
            reply = self.ask("POST", path, {})
            self.assertEqual((reply.status, self.error_of(reply)["code"]), (404, "not_found"))
        read = "GET, HEAD, OPTIONS"
        for method, path, allow in (("GET", "/v1/completions", "POST, OPTIONS"), ("POST", "/health", read),
                                    ("DELETE", "/v1/models/x", read), ("TRACE", "/health", read)):
            reply = self.ask(method, path, {} if method == "POST" else None)
            self.assertEqual((reply.status, reply.headers["allow"]), (405, allow))
            self.error_of(reply)
            options = self.ask("OPTIONS", path)
            self.assertEqual((options.status, options.headers["allow"], options.body), (204, allow, b""))

    def test_head(self) -> None:
        """The headers of GET, and no body."""
        for path in ("/health", "/v1/models", "/nowhere"):
            got, head = self.ask("GET", path), self.ask("HEAD", path)
            self.assertEqual((head.status, head.headers["content-length"], head.body),
                             (got.status, got.headers["content-length"], b""))

    def test_the_type_of_a_body(self) -> None:
        """A page of any origin may send these types unasked, so they are refused."""
        for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
            reply = self.ask("POST", "/v1/completions", b'{"prompt": "a"}', {"Content-Type": kind})
            self.assertEqual((reply.status, self.error_of(reply)["code"]), (415, "unsupported_media_type"))
        reply = self.ask("POST", "/tokenize", b'{"prompt": "a"}', {"Content-Type": "Application/JSON; charset=utf-8"})
        self.assertEqual(reply.status, 200)

    def test_the_log_holds_no_prompt(self) -> None:
        self.complete("abcabc")
        self.ask("GET", "/v1/models?key=secret")
        self.assertTrue(eventually(lambda: len(self.log) == 2))
        self.assertRegex(self.log[0], r"\A127\.0\.0\.1 POST /v1/completions 200 \d+\.\d+s\Z")
        self.assertNotIn("secret", "".join(self.log))
        self.server._log_prompts = True
        self.complete("abcabc")
        self.assertTrue(eventually(lambda: "abcabc" in self.log[-1]))

    @needs_wing("observe")
    def test_what_is_answered_without_a_wing(self) -> None:
        with unittest.mock.patch("starter.serving.api.wing", side_effect=_missing):
            reply = self.ask("GET", "/metrics")
        self.assertEqual((reply.status, self.error_of(reply)["code"]), (501, "not_implemented"))

    def test_a_bug_ends_one_connection(self) -> None:
        with unittest.mock.patch.object(Api, "_models", side_effect=ZeroDivisionError):
            api = self.server.api
            self.server.api = Api(self.engine, self.settings)
            reply = self.ask("GET", "/v1/models")
            self.server.api = api
        self.assertEqual((reply.status, self.error_of(reply)["code"]), (500, "internal_error"))
        self.assertIn("ZeroDivisionError", self.log.pop(0))
        self.assertEqual(self.ask("GET", "/v1/models").status, 200)


def _missing(module: str, purpose: str) -> Any:
    from starter.errors import MissingWingError
    raise MissingWingError(f"{purpose} needs the package starter/observe, which this copy does not have")


class KeyTest(ServerCase):
    settings = Settings("tiny", key="sécret", origins=("https://page.example",))

    def test_who_may(self) -> None:
        for given, status in ((None, 401), ("Bearer wrong", 401), ("Basic sécret", 401), ("sécret", 401),
                              ("Bearer ", 401), ("Bearer sécret", 200), ("bearer  sécret ", 200)):
            headers = {} if given is None else {"Authorization": given.encode().decode("latin-1")}
            for path in ("/v1/models", "/v1/models/tiny", "/openapi.json"):
                with self.subTest(path=path, given=given):
                    reply = self.ask("GET", path, headers=headers)
                    self.assertEqual(reply.status, status)
                    if status == 401:
                        self.assertEqual((self.error_of(reply)["code"], reply.headers["www-authenticate"]),
                                         ("invalid_api_key", "Bearer"))
                        self.assertNotIn("sécret", reply.body.decode())
        self.assertEqual(self.ask("GET", "/health").status, 200)
        self.assertEqual(self.ask("GET", "/nowhere").status, 404)

    def test_origins(self) -> None:
        reply = self.ask("OPTIONS", "/v1/completions", headers={
            "Origin": "https://page.example", "Access-Control-Request-Method": "POST"})
        self.assertEqual((reply.status, reply.headers["access-control-allow-origin"], reply.headers["vary"]),
                         (204, "https://page.example", "Origin"))
        self.assertIn("Authorization", reply.headers["access-control-allow-headers"])
        reply = self.ask("POST", "/v1/completions", {}, {"Origin": "https://page.example"})
        self.assertEqual((reply.status, reply.headers["access-control-allow-origin"]), (401, "https://page.example"))
        for origin in ("https://other.example", "null", ""):
            reply = self.ask("GET", "/health", headers={"Origin": origin})
            self.assertNotIn("access-control-allow-origin", reply.headers)

    def test_any_origin(self) -> None:
        self.server.api.settings = replace(self.settings, origins=("*",))
        reply = self.ask("GET", "/health", headers={"Origin": "https://other.example"})
        self.assertEqual(reply.headers["access-control-allow-origin"], "*")

    def test_a_stream_may_be_read_as_well(self) -> None:
        key = {"Authorization": "Bearer " + "sécret".encode().decode("latin-1"), "Origin": "https://page.example"}
        reply = self.ask("POST", "/v1/completions", {"prompt": "a", "stream": True}, key)
        self.assertEqual(reply.headers["access-control-allow-origin"], "https://page.example")


class DocumentTest(unittest.TestCase):
    """The OpenAPI document, without a socket."""

    def document(self, key: str | None = None) -> Any:
        with engine_of() as engine:
            engine.start()
            answer = Api(engine, Settings("tiny", key=key)).handle(HttpRequest(
                "GET", "/openapi.json", {"authorization": f"Bearer {key}"}))
            self.assertIsInstance(answer, Answer)
            return json.loads(answer.body)  # type: ignore[union-attr]

    def test_every_field_is_in_it(self) -> None:
        document = self.document()
        self.assertEqual(document["openapi"], "3.1.0")
        self.assertEqual(set(document["paths"]), {"/health", "/v1/models", "/v1/models/{model}", "/v1/completions",
                                                  "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize",
                                                  "/metrics", "/openapi.json", "/", "/live"})
        schema = document["components"]["schemas"]["CompletionBody"]
        self.assertEqual(schema["required"], ["prompt"])
        self.assertLessEqual({"max_tokens", "logit_bias", "stream_options", *IGNORED}, set(schema["properties"]))
        self.assertEqual(schema["properties"]["temperature"]["default"], 1.0)
        self.assertNotIn("security", document)

    def test_keys(self) -> None:
        document = self.document("k")
        self.assertEqual((document["security"], document["paths"]["/health"]["get"]["security"]), ([{"key": []}], []))


class DocsTest(unittest.TestCase):
    def test_every_field_is_in_the_manual(self) -> None:
        text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
        for name in (*COMPLETION.fields, *StreamOptions.__match_args__, *IGNORED):
            if name != "include_obfuscation":
                self.assertIn(f"`{name}`", text)


@needs("dev", "jsonschema")
class SchemaTest(unittest.TestCase):
    def test_it_accepts_what_is_accepted(self) -> None:
        """An independent validator agrees, on bodies that are right and on bodies that are wrong."""
        import jsonschema

        from tests.serving.test_bad_input import WRONG
        validator = jsonschema.Draft202012Validator(body_schema(COMPLETION))
        for body in ({"prompt": "a"}, {"prompt": ["a", "b"], "n": 2}, {"prompt": [1, 2]}, {"prompt": [[1], [2]]},
                     {"prompt": "a", "stop": None, "user": "me", "logit_bias": {"5": -100}},
                     {"prompt": "a", "stop": "x", "stream": True, "stream_options": {"include_usage": True}}):
            self.assertTrue(validator.is_valid(body), body)
        of_the_model = ("prompt", "max_tokens", "logprobs", "logit_bias", "stop_token_ids")  # a schema cannot know it
        for name in WRONG.keys() - set(of_the_model):
            for value in WRONG[name]:
                if isinstance(value, float) and value.is_integer():
                    continue  # 2.0 is an integer to JSON Schema
                self.assertFalse(validator.is_valid({"prompt": "a", name: value}), (name, value))


if __name__ == "__main__":
    unittest.main()
