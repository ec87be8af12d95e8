"""The ``openai`` package, as it is: completions whole and streamed, errors as its own classes, cancelling, asyncio."""

from __future__ import annotations

import asyncio
import unittest
import unittest.mock
from typing import TYPE_CHECKING, ClassVar

from starter.serving.api import Api, Settings
from starter.serving.server import Server
from tests.extras import needs
from tests.serving.support import ServerCase, engine_of, eventually

if TYPE_CHECKING:
    import openai


@needs("clients", "openai")
class ClientTest(ServerCase):
    settings = Settings("tiny", key="secret")
    engine_settings: ClassVar = {"max_running": 1, "max_waiting": 2}

    def client(self, **options: object) -> openai.OpenAI:
        import openai
        url = f"http://127.0.0.1:{self.server.port}/v1"
        return openai.OpenAI(**{"base_url": url, "api_key": "secret", "max_retries": 0, "timeout": 20.0, **options})

    def test_whole(self) -> None:
        expected = self.engine.result(self.engine.submit("abc", 9, temperature=0.9, seed=4, n=2, logprobs=2))
        with self.client() as client:
            answer = client.completions.create(model="tiny", prompt="abc", max_tokens=9, temperature=0.9, seed=4, n=2,
                                               logprobs=2, user="me", extra_body={"top_k": 0})
        self.assertEqual([choice.text for choice in answer.choices], [sample.text for sample in expected.samples])
        self.assertEqual([choice.finish_reason for choice in answer.choices], ["length", "length"])
        self.assertEqual(answer.choices[1].logprobs.token_logprobs, list(expected.samples[1].logprobs))
        self.assertEqual((answer.usage.prompt_tokens, answer.usage.completion_tokens), (3, 18))
        self.assertTrue(answer.id.startswith("cmpl-"))
        self.assertEqual(answer._request_id, answer.id)

    def test_streamed(self) -> None:
        with self.client() as client:
            whole = client.completions.create(model="tiny", prompt=[[1, 2], [3]], max_tokens=7, seed=1)
            texts, usage = ["", ""], None
            for chunk in client.completions.create(model="tiny", prompt=[[1, 2], [3]], max_tokens=7, seed=1,
                                                   stream=True, stream_options={"include_usage": True}):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                usage = chunk.usage
        self.assertEqual(texts, [choice.text for choice in whole.choices])
        self.assertEqual(usage, whole.usage)

    def test_leaving_a_stream(self) -> None:
        with self.client() as client:
            stream = client.completions.create(model="tiny", prompt="a", max_tokens=120, stream=True)
            next(iter(stream))
            self.gate.open.clear()
            stream.close()
            self.gate.open.set()
        self.assertTrue(eventually(self.all_free))

    def test_models(self) -> None:
        with self.client() as client:
            self.assertEqual([model.id for model in client.models.list()], ["tiny"])
            self.assertEqual(client.models.retrieve("tiny").owned_by, "starter")

    def test_errors(self) -> None:
        """Each status becomes the class that the package has for it; param and code arrive."""
        import openai
        with self.client() as client, self.client(api_key="wrong") as stranger:
            with self.assertRaises(openai.AuthenticationError) as caught:
                stranger.models.list()
            self.assertEqual(caught.exception.code, "invalid_api_key")
            with self.assertRaises(openai.NotFoundError) as caught:
                client.completions.create(model="gpt-4", prompt="a")
            self.assertEqual((caught.exception.param, caught.exception.code), ("model", "model_not_found"))
            with self.assertRaises(openai.BadRequestError) as caught:
                client.completions.create(model="tiny", prompt="a", temperature=-1)
            self.assertEqual((caught.exception.param, caught.exception.code), ("temperature", "invalid_value"))
            with self.assertRaises(openai.BadRequestError) as caught:
                client.completions.create(model="tiny", prompt="a", suffix="b")
            self.assertEqual(caught.exception.param, "suffix")
            self.gate.open.clear()
            running = self.engine.submit("abc", 2)
            self.gate.allowed.release()
            self.assertTrue(eventually(lambda: self.engine.status(running).state == "running"))
            waiting = [self.engine.submit("abc", 2) for _ in range(2)]
            with self.assertRaises(openai.RateLimitError):
                client.completions.create(model="tiny", prompt="a")
            self.gate.open.set()
            for request_id in (running, *waiting):
                self.engine.result(request_id)

    def test_an_error_within_a_stream(self) -> None:
        import openai
        with self.client() as client:
            self.gate.open.clear()
            stream = client.completions.create(model="tiny", prompt="a", max_tokens=120, stream=True)
            with unittest.mock.patch.object(self.engine._core, "settle", side_effect=SystemExit("half recorded")):
                self.gate.open.set()
                with self.assertRaisesRegex(openai.APIError, "the engine has stopped"):
                    list(stream)

    def test_asyncio(self) -> None:
        """Eight at once; one task is cancelled, the others do not notice."""
        import openai

        async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
            stream = await client.completions.create(model="tiny", prompt="abc", max_tokens=20, seed=seed, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def all_of_them(url: str) -> list[str | BaseException]:
            async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
                tasks = [asyncio.create_task(ask(client, seed)) for seed in range(8)]
                await asyncio.sleep(0.01)
                tasks[3].cancel()
                return await asyncio.gather(*tasks, return_exceptions=True)

        with engine_of() as engine:
            engine.start()
            with Server(("127.0.0.1", 0), Api(engine, self.settings)) as server:
                server.start()
                texts = asyncio.run(all_of_them(f"http://127.0.0.1:{server.port}/v1"))
                server.drain(5.0)
            expected = [engine.result(engine.submit("abc", 20, temperature=1.0, seed=seed)).text for seed in range(8)]
        self.assertIsInstance(texts.pop(3), asyncio.CancelledError)
        expected.pop(3)
        self.assertEqual(texts, expected)


if __name__ == "__main__":
    unittest.main()
