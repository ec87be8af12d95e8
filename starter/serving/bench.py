"""``python3 -m starter bench --target URL SCENARIO``: how a server keeps up with a scenario's requests.

    python3 -m starter bench --target http://127.0.0.1:8000/v1 quatrains
    python3 -m starter bench --target http://gpu:8000/v1 load.json --step-seconds 0.02 --ttft 0.5 --tpot 0.05

The target is any OpenAI-compatible server: this project's, vLLM, llama.cpp. Each request of the scenario is sent as a
streamed completion when it arrives; a step of its arrival is ``--step-seconds`` long. Requests that are late for want
of a free connection are counted, as their figures say less. What is reported:

    ttft      from sending a request to the first text of its answer
    tpot      between that and the last, for each further token
    latency   from sending to the end
    goodput   requests a second that kept to the limits of --ttft and --tpot, where these are given
    errors    by what was wrong; each is counted, none is tried again

Sampled requests get the scenario's options that every server knows: temperature, top_p, seed and stop. A scenario's
prompts are sent as text, or, with ``--send tokens``, as the numbers of their tokens, which only a server with the same
vocabulary understands.

Exit code 0: all requests were answered. 1: some were not. 2: bad input, or no server at the target.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from starter.base.bundled import bundled
from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, Table, started
from starter.base.statistics import Summary, duration
from starter.base.tokenizer import CharacterTokenizer
from starter.errors import RequestError
from starter.schema import Request, Scenario, load_scenario

KEY_VARIABLE = "OPENAI_API_KEY"
LATE = 0.05  # seconds after its arrival from which on a request counts as late


class BadAnswer(Exception):
    """What was wrong with an answer, in a few words."""


@dataclass(frozen=True)
class Answered:
    """One request: seconds, counted from when it was sent."""

    late: float
    first: float | None = None
    last: float | None = None
    end: float = 0.0
    tokens: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    def within(self, ttft: float | None, tpot: float | None) -> bool:
        """It was answered, and kept to the limits."""
        return self.error is None and all(limit is None or measured is None or measured <= limit
                                          for limit, measured in ((ttft, self.first), (tpot, self.tpot)))


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    secure: bool
    host: str
    port: int | None
    path: str
    key: str | None
    timeout: float

    @classmethod
    def of(cls, url: str, key: str | None, timeout: float) -> Target:
        """RequestError for what is no address of a server."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise RequestError(f"--target {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise RequestError(f"--target must be such as http://127.0.0.1:8000/v1, not {url!r}")
        return cls(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/"), key, timeout)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[HTTPConnection, Any]:
        """A connection and the answer that begins on it."""
        connection = (HTTPSConnection if self.secure else HTTPConnection)(self.host, self.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        try:
            connection.request(method, self.path + path, None if body is None else json.dumps(body), headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise


# ------------------------------------------------------------------------------------------------------ one request


def body_of(request: Request, prompt: str | list[int], model: str) -> dict[str, Any]:
    """What is sent. Options at their defaults are left out, so that any server takes it."""
    sampling = request.sampling
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": request.max_tokens, "stream": True,
                            "stream_options": {"include_usage": True}, "temperature": sampling.temperature}
    given = {"top_p": sampling.top_p if sampling.top_p != 1.0 else None, "seed": sampling.seed,
             "stop": list(sampling.stop) or None}
    return body | {name: value for name, value in given.items() if value is not None}


def send(target: Target, body: dict[str, Any], late: float) -> Answered:
    """Send it and read its answer to the end; whatever goes wrong is its ``error``."""
    began = time.perf_counter()
    first = last = None
    tokens = pieces = 0
    error = None
    try:
        for chunk in chunks(target, body):
            text = "".join(choice.get("text") or "" for choice in chunk.get("choices") or ())
            if text:
                last = time.perf_counter() - began
                first = last if first is None else first
                pieces += 1
            tokens = (chunk.get("usage") or {}).get("completion_tokens") or tokens
        if not pieces and not tokens:
            error = "an answer without a token"
    except BadAnswer as problem:
        error = str(problem)
    except TimeoutError:
        error = f"no news for {target.timeout:g} seconds"
    except (OSError, HTTPException) as problem:
        error = f"{type(problem).__name__}: {problem}"
    return Answered(late, first, last, time.perf_counter() - began, tokens or pieces, error)


def chunks(target: Target, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer. BadAnswer for an error, and for a stream that does not end as it should."""
    connection, answer = target.ask("POST", "/completions", body)
    try:
        if answer.status != 200:
            raise BadAnswer(f"{answer.status}: {_message(answer.read(65_536))}")
        for line in answer:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = _parsed(data)
                if "error" in chunk:
                    raise BadAnswer(f"in the stream: {_message(data)}")
                yield chunk
        raise BadAnswer("the stream ended without [DONE]")
    finally:
        connection.close()


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        raise BadAnswer("an event that is not JSON") from None
    if not isinstance(document, dict):
        raise BadAnswer("an event that is no object")
    return document


def _message(raw: bytes) -> str:
    """What an error says, in one line."""
    try:
        text = str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = raw.decode("utf-8", "replace")
    return " ".join(text.split())[:200]


# ------------------------------------------------------------------------------------------------------- all of them


def prompts_of(scenario: Scenario, send_tokens: bool) -> list[tuple[Request, str | list[int]]]:
    """Requests in the order of their arrival, with what is sent of each. RequestError for prompts that are no text."""
    tokenizer = CharacterTokenizer(scenario.tokenizer, scenario.model.bos_token, scenario.model.eos_tokens)
    found: list[tuple[Request, str | list[int]]] = []
    for request in sorted(scenario.requests, key=lambda request: request.arrival):
        if request.sampling.n == 1 and request.max_tokens:
            text = tokenizer.decode(request.prompt_tokens)
            if not text and not send_tokens:
                raise RequestError(f"the prompt of {request.request_id} is no text; give --send tokens")
            found.append((request, list(request.prompt_tokens) if send_tokens else text))
    return found


def run(target: Target, entries: Sequence[tuple[Request, str | list[int]]], model: str, step_seconds: float,
        connections: int, progress: Callable[[str], None] = lambda text: None) -> tuple[list[Answered], float]:
    """Send each request when it arrives; the answers, and how long all of it took. A request that finds no free
    connection waits for one."""
    began = time.perf_counter()

    def one(request: Request, prompt: str | list[int]) -> Answered:
        return send(target, body_of(request, prompt, model),
                    time.perf_counter() - began - request.arrival * step_seconds)

    with ThreadPoolExecutor(connections) as pool:
        futures = []
        for request, prompt in entries:
            time.sleep(max(began + request.arrival * step_seconds - time.perf_counter(), 0.0))
            futures.append(pool.submit(one, request, prompt))
            progress(f"{len(futures)} of {len(entries)} requests were sent")
        for number, _ in enumerate(as_completed(futures), start=1):
            progress(f"{number} of {len(entries)} requests were answered")
        answers = [future.result() for future in futures]
    return answers, time.perf_counter() - began


def report(answers: Sequence[Answered], seconds: float, ttft: float | None, tpot: float | None) -> dict[str, Any]:
    """The figures of a run; durations in seconds."""
    good = [answer for answer in answers if answer.error is None]
    tokens = sum(answer.tokens for answer in good)
    return {
        "requests": len(answers), "answered": len(good), "seconds": seconds,
        "late": sum(answer.late > LATE for answer in answers), "output_tokens": tokens,
        "tokens_per_second": tokens / seconds, "requests_per_second": len(good) / seconds,
        "ttft": asdict(Summary.of([answer.first for answer in good if answer.first is not None])),
        "tpot": asdict(Summary.of([answer.tpot for answer in good if answer.tpot is not None])),
        "latency": asdict(Summary.of([answer.end for answer in good])),
        "goodput": (None if ttft is None and tpot is None
                    else sum(answer.within(ttft, tpot) for answer in answers) / seconds),
        "errors": dict(Counter(answer.error for answer in answers if answer.error))}


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table("", "median", "p90", "p99", "largest", "mean")
    for name in ("ttft", "tpot", "latency"):
        table.add(name, *(duration(figures[name][key]) for key in ("p50", "p90", "p99", "max", "mean")))
    table.show(console)
    console.line(f"{figures['answered']} of {figures['requests']} requests were answered in {figures['seconds']:.2f} "
                 f"s: {figures['tokens_per_second']:.1f} tokens/s, {figures['requests_per_second']:.2f} requests/s")
    if figures["goodput"] is not None:
        console.line(f"goodput {figures['goodput']:.2f} requests/s within the limits")
    if figures["late"]:
        console.line(f"{figures['late']} requests were sent more than {LATE * 1000:g} ms after their arrival; give "
                     f"more --connections, or a longer --step-seconds")
    for error, number in figures["errors"].items():
        console.line(f"{number} x {error}", colour="red")


# ----------------------------------------------------------------------------------------------------------- program


def make_parser() -> argparse.ArgumentParser:
    """The options of ``bench``."""
    parser = argparse.ArgumentParser(prog=started("python3 -m starter bench"), description=started(__doc__),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", metavar="SCENARIO", help=started("JSON; `python3 -m starter draw` makes some"))
    parser.add_argument("--target", required=True, metavar="URL", help="of the server, up to and with /v1")
    parser.add_argument("--model", metavar="NAME", help="what the server calls its model (default: its only one)")
    parser.add_argument("--api-key", metavar="KEY", help=f"better in the environment, as {KEY_VARIABLE}")
    parser.add_argument("--send", choices=("text", "tokens"), default="text", help="prompts as (default: text)")
    parser.add_argument("--step-seconds", type=float, default=0.05, metavar="S",
                        help="how long a step of an arrival is (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=256, metavar="N", help="at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="without news (default: %(default)s)")
    parser.add_argument("--ttft", type=float, metavar="S", help="limit that counts for goodput")
    parser.add_argument("--tpot", type=float, metavar="S", help="limit that counts for goodput")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    return parser


def bench(arguments: Sequence[str]) -> int:
    """Run a scenario against a server; returns the exit code."""
    options = make_parser().parse_args(arguments)
    for name, low, high in (("step_seconds", 0.0, 1e6), ("connections", 1, 4_096), ("timeout", 0.001, 1e6),
                            ("ttft", 0.0, 1e6), ("tpot", 0.0, 1e6)):
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise RequestError(f"--{name.replace('_', '-')} must be from {low:g} to {high:g}, not {value}")
    target = Target.of(options.target, options.api_key or os.environ.get(KEY_VARIABLE), options.timeout)
    path = options.scenario
    scenario = load_scenario(path if os.path.exists(path) else bundled(path) or path)
    entries = prompts_of(scenario, options.send == "tokens")
    if not entries:
        raise RequestError(f"{path} has no request that can be sent: one sample, and a token or more to generate")
    model = options.model or model_of(target)
    console = Console(sys.stdout, quiet=options.json)
    with Console(sys.stderr, quiet=options.json).working() as progress:
        answers, seconds = run(target, entries, model, options.step_seconds, options.connections, progress)
    figures = {"target": options.target, "model": model, **report(answers, seconds, options.ttft, options.tpot)}
    if options.json:
        print(json.dumps(figures, allow_nan=False))
    else:
        _show(figures, console)
    return EXIT_DIFFERS if figures["errors"] else EXIT_OK


def model_of(target: Target) -> str:
    """The name of the server's only model. RequestError where there is no server, or not one model."""
    try:
        connection, answer = target.ask("GET", "/models")
        raw = answer.read(1_048_576)
        connection.close()
    except (OSError, HTTPException) as error:
        raise RequestError(f"--target: no answer from {target.host}: {error}; is the server running?") from None
    try:
        names = [entry["id"] for entry in json.loads(raw)["data"]]
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"--target: GET /models was answered with {answer.status}: {_message(raw)}") from None
    if len(names) != 1:
        raise RequestError(f"the server has the models {', '.join(names) or '(none)'}; say which by --model")
    return str(names[0])
