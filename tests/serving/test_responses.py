"""POST /v1/responses: the same tokens as chat, the events of its stream in their order, and the openai package."""

from __future__ import annotations

import json
from typing import Any

from starter.backend import ReferenceBackend
from starter.base.weights import seeded_weights
from starter.engine import InferenceEngine
from starter.model import Loaded, Model
from starter.schema import EngineSettings, ModelConfig
from tests.extras import needs
from tests.serving.support import Reply, ServerCase
from tests.wings import has_wing, needs_wing

if has_wing("checkpoints"):
    from starter.checkpoints.chat import chat_prompt
    from tests.checkpoints.test_chat import CHATML, ours

BEGINNING = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@needs_wing("checkpoints")
@needs("checkpoints", "tokenizers", "jinja2")
class ResponsesTest(ServerCase):
    def setUp(self) -> None:
        super().setUp()
        super().tearDown()
        tokenizer = ours(CHATML)
        config = ModelConfig(vocab_size=tokenizer.vocab_size, width=8, layers=1, heads=2, kv_heads=2, ffn_width=8,
                             max_context=200, bos_token=256, eos_tokens=(257,), tied_output=False)
        model = Model(config, seeded_weights(config, 3), ReferenceBackend())
        self.serve(InferenceEngine(Loaded(model, tokenizer, {}),
                                   EngineSettings(page_size=8, num_pages=60, budget_tokens=64)))

    def respond(self, given: object = "Hi", **fields: object) -> Reply:
        return self.ask("POST", "/v1/responses", {"input": given, "max_output_tokens": 8, **fields})

    def events(self, reply: Reply) -> list[Any]:
        found = []
        for block in reply.body.decode().split("\n\n")[:-1]:
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            self.assertEqual(name, f"event: {event['type']}")
            found.append(event)
        self.assertEqual([event["sequence_number"] for event in found], list(range(len(found))))
        return found

    def test_whole_and_streamed_are_what_the_engine_generates(self) -> None:
        conversation = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
        prompt, ends = chat_prompt(self.engine.tokenizer, conversation)
        expected = self.engine.result(self.engine.submit(prompt, 8, stop_tokens=ends, temperature=1.0, seed=5))
        for given, fields in (("Hi", {"instructions": "S"}), (conversation, {}),
                              ([conversation[0], {"type": "message", "role": "user",
                                                  "content": [{"type": "input_text", "text": "Hi"}]}], {})):
            whole = self.respond(given, seed=5, **fields).document
            (item,) = whole["output"]
            self.assertEqual((item["role"], item["content"][0]["text"]), ("assistant", expected.text))
            self.assertEqual((whole["status"], whole["incomplete_details"]),
                             ("incomplete", {"reason": "max_output_tokens"}))
            self.assertEqual((whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]), (len(prompt), 8))
            events = self.events(self.respond(given, seed=5, stream=True, **fields))
            deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
            kinds = [event["type"] for event in events if event["type"] != "response.output_text.delta"]
            self.assertEqual(kinds, [*BEGINNING, *END, "response.incomplete"])
            self.assertEqual("".join(deltas), expected.text)
            self.assertEqual(events[-1]["response"]["output"][0]["content"], item["content"])
            self.assertEqual(events[-1]["response"]["usage"], whole["usage"])
            self.assertEqual((events[0]["response"]["status"], events[0]["response"]["output"]), ("in_progress", []))

    def test_an_answer_that_ends_by_itself_is_completed(self) -> None:
        prompt, ends = chat_prompt(self.engine.tokenizer, "Hi")
        tokens = self.engine.result(self.engine.submit(prompt, 100, stop_tokens=ends, temperature=1.0, seed=3)).tokens
        self.assertLess(len(tokens), 100)  # it ends: a seed that was looked for
        document = self.respond(max_output_tokens=None, seed=3).document
        self.assertEqual((document["status"], document["incomplete_details"]), ("completed", None))

    def test_an_answer_can_be_sent_back(self) -> None:
        item = self.respond(temperature=0).document["output"][0]
        more = [{"role": "user", "content": "Hi"}, item, {"role": "user", "content": "Ho"}]
        self.assertEqual(self.respond(more).status, 200)

    def test_what_is_refused(self) -> None:
        for fields, param, words in (
            ({"input": []}, "input", "/input: expected a text or a list of messages"),
            ({"input": [{"type": "function_call_output"}]}, "input", "/input/0: expected a message"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "/input/0/content/0"),
            ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
            ({"tools": [{"type": "web_search"}]}, "tools", "not supported"), ({"n": 2}, "n", "/n: unknown field"),
            ({"text": {"format": {"type": "json_object"}}}, "text", "the output is text"),
            ({"input": "x" * 300}, "input", "has 3.. tokens"),
        ):
            reply = self.ask("POST", "/v1/responses", {"input": "Hi", **fields})
            error = self.error_of(reply)
            self.assertEqual((reply.status, error["param"]), (400, param), error)
            self.assertRegex(error["message"], words)
        neutral = {"store": True, "tools": [], "tool_choice": "auto", "truncation": "disabled", "include": [],
                   "metadata": {}, "text": {"format": {"type": "text"}}, "parallel_tool_calls": True,
                   "background": False}
        self.assertEqual(self.respond(**neutral).status, 200)

    def test_an_error_ends_the_stream(self) -> None:
        def fail(*arguments: object) -> None:
            raise OSError("no luck")

        self.engine.model.forward = fail  # type: ignore[method-assign]
        try:
            events = self.events(self.respond(stream=True))
        finally:
            del self.engine.model.forward
        self.assertEqual(events[-1]["type"], "response.failed")
        self.assertIn("no luck", events[-1]["response"]["error"]["message"])

    @needs("clients", "openai")
    def test_the_openai_package(self) -> None:
        import openai
        with openai.OpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="none", max_retries=0) as client:
            short = client.responses.create(model="tiny", input="Hi", max_output_tokens=8, instructions="S")
            self.assertEqual((short.status, short.usage.output_tokens), ("incomplete", 8))
            whole = client.responses.create(model="tiny", input="Hi", extra_body={"seed": 3})
            text = ""
            with client.responses.stream(model="tiny", input="Hi", extra_body={"seed": 3}) as stream:
                for event in stream:
                    text += event.delta if event.type == "response.output_text.delta" else ""
                final = stream.get_final_response()
        self.assertEqual(whole.status, "completed")
        self.assertEqual((text, final.output_text, final.usage), (whole.output_text, whole.output_text, whole.usage))
