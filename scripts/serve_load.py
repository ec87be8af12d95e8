"""Load the server with many clients, with clients that leave, and with one: what does HTTP add to the first token?

    python3 scripts/serve_load.py                              all three; minutes; exit code 1 if one fails
    python3 scripts/serve_load.py streams --clients 256        that many streams at once: each gets all of its tokens
    python3 scripts/serve_load.py leave --clients 10000        clients that leave at any moment: nothing may be kept
    python3 scripts/serve_load.py first-token --requests 300   one client: time to first token, in process and by HTTP
    python3 scripts/serve_load.py --backend numpy --json       options of all three

streams, leave   The server runs in this process, so that pages and threads are counted and not asked for.
first-token      The server is a process of its own, as in use; the same prompts also go to an engine in this process.
                 Requests alternate between the two, and differ in their seeds only. What HTTP adds is the difference
                 of the medians: reading and parsing, a wake-up, two writes, and switches between processes and threads,
                 which take longer where other programs run; the fastest tenths show how much of it that is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, guarded, run_program
from starter.base.wings import wing
from starter.engine import InferenceEngine
from starter.errors import BackendError
from starter.schema import load_scenario

FIXTURE = ROOT / "fixtures" / "quatrains.json"
PROMPT = "春"
TOKENS = 8  # of a request whose first token is timed
CLIENTS_AT_ONCE = 24  # of those that leave


def request_bytes(**fields: object) -> bytes:
    """A POST /v1/completions for a stream, as bytes."""
    body = json.dumps({"prompt": PROMPT, "stream": True, "ignore_eos": True, **fields}).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body))


@contextmanager
def serving(backend: str) -> Iterator[tuple[InferenceEngine, Any]]:
    """A server in this process, and its engine."""
    api, listening = (wing(f"serving.{module}", "a server") for module in ("api", "server"))
    engine = InferenceEngine.from_scenario(load_scenario(FIXTURE), backend, clock=time.monotonic, keep_events=0,
                                           num_pages=256, max_running=64, budget_tokens=128)
    with engine, listening.Server(("127.0.0.1", 0), api.Api(engine, api.Settings("load"))) as server:
        engine.start()
        server.start()
        yield engine, server
        server.drain(10.0)


def settled(engine: InferenceEngine, server: Any, threads: int) -> dict[str, int]:
    """What is left once all clients are gone, or after ten seconds: pages in use, requests, threads."""
    deadline = time.monotonic() + 10.0
    while True:
        left = {"pages": engine.kv.total_pages - engine.kv.free_pages, "requests": len(engine.active),
                "threads": threading.active_count() - threads}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------ many streams


async def read_stream(port: int, fields: dict[str, object]) -> tuple[int, bool]:
    """Tokens of a stream, and whether it ended as it should."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(**fields))
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        data = await reader.read(65_536)
        if not data:
            break
        received += data
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return received.count(b'"finish_reason"'), received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def streams(options: argparse.Namespace) -> dict[str, Any]:
    """Clients at once, each with a stream of 40 tokens."""
    clients = options.clients or 256

    async def everyone(port: int) -> list[tuple[int, bool]]:
        return await asyncio.gather(*(read_stream(port, {"max_tokens": 40, "seed": i}) for i in range(clients)))

    with serving(options.backend) as (engine, server):
        threads, started = threading.active_count(), time.monotonic()
        results = asyncio.run(everyone(server.port))
        seconds = time.monotonic() - started
        left = settled(engine, server, threads)
    whole = sum(done and tokens == 40 for tokens, done in results)
    return {"clients": clients, "complete": whole, "seconds": round(seconds, 2),
            "tokens_per_second": round(40 * clients / seconds), "left": left,
            "ok": whole == clients and not any(left.values())}


# ------------------------------------------------------------------------------------------------ clients that leave


def leave_once(port: int, dice: random.Random) -> None:
    """Connect, send a request or a part of it, read for a while, and go."""
    data = request_bytes(max_tokens=dice.randint(1, 60), n=dice.randint(1, 3), stream=dice.random() < 0.6)
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    with client, suppress(OSError):  # it may have been told to go
        client.sendall(data[:dice.choice((0, 30, len(data) - 2, len(data), len(data), len(data)))])
        if dice.random() < 0.5:
            client.settimeout(0.001 + dice.random() * 0.03)
            client.recv(dice.randint(1, 2_000))
        if dice.random() < 0.5:  # a reset instead of a polite end
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def leave(options: argparse.Namespace) -> dict[str, Any]:
    """Clients, some at a time, that leave at random moments."""
    clients = options.clients or 10_000

    def some(number: int) -> None:
        dice = random.Random(number)
        for _ in range(number, clients, CLIENTS_AT_ONCE):
            leave_once(server.port, dice)

    with serving(options.backend) as (engine, server):
        threads, started = threading.active_count(), time.monotonic()
        workers = [threading.Thread(target=some, args=(number,)) for number in range(CLIENTS_AT_ONCE)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.monotonic() - started
        left = settled(engine, server, threads)
        finished = engine.metrics().finished
        alive = len(engine.generate(PROMPT, 5, ignore_eos=True).tokens) == 5
    return {"clients": clients, "seconds": round(seconds, 1), "cancelled": finished.get("cancelled", 0),
            "left": left, "ok": alive and not any(left.values())}


# ------------------------------------------------------------------------------------------------ the first token


@contextmanager
def server_process(backend: str) -> Iterator[int]:
    """``python3 -m starter serve`` in a process of its own; its port."""
    command = [sys.executable, "-m", "starter", "serve", "--fixture", str(FIXTURE), "--backend", backend, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8") as it:
        try:
            found = re.search(r"127\.0\.0\.1:(\d+)", it.stdout.readline() if it.stdout else "")
            if found is None:
                raise BackendError("the server did not start; run python3 -m starter serve to see why")
            yield int(found[1])
        finally:
            it.terminate()


def first_token(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token, of one client on a connection that stays open."""
    scenario = load_scenario(FIXTURE)
    engine = InferenceEngine.from_scenario(scenario, options.backend, clock=time.monotonic, keep_events=0)
    with engine, server_process(options.backend) as port:
        client = socket.create_connection(("127.0.0.1", port), timeout=30)

        def by_http(seed: int) -> float:
            started, received = time.perf_counter(), b""
            client.sendall(request_bytes(max_tokens=TOKENS, seed=seed))
            while b"data: " not in received:
                received += client.recv(65_536)
            seconds = time.perf_counter() - started
            while not received.endswith(b"0\r\n\r\n"):
                received += client.recv(65_536)
            return seconds

        def in_process(seed: int) -> float:
            started = time.perf_counter()
            events = engine.stream(engine.submit(PROMPT, TOKENS, temperature=1.0, seed=seed, ignore_eos=True))
            next(events)
            seconds = time.perf_counter() - started
            for _ in events:
                pass
            return seconds

        for seed in range(20):  # to warm up
            by_http(seed), in_process(seed)
        pairs = [(by_http(seed), in_process(seed)) for seed in range(options.requests)]
        client.close()
    by_http_ms, in_process_ms = ([1000 * seconds for seconds in sorted(times)] for times in zip(*pairs))
    added = median(by_http_ms) - median(in_process_ms)
    tenth = options.requests // 10
    return {"requests": options.requests, "http_ms": round(median(by_http_ms), 3),
            "in_process_ms": round(median(in_process_ms), 3), "added_ms": round(added, 3),
            "added_ms_of_fastest_tenths": round(by_http_ms[tenth] - in_process_ms[tenth], 3), "ok": added < 1.0}


# -------------------------------------------------------------------------------------------------------- program


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "streams": streams, "leave": leave, "first-token": first_token}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="one of the three; none: all")
    parser.add_argument("--clients", type=int, metavar="N", help="of streams (256) or leave (10,000)")
    parser.add_argument("--requests", type=int, default=300, metavar="N", help="of first-token (default: %(default)s)")
    parser.add_argument("--backend", default="cpu", help="of the engine (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    options = parser.parse_args(arguments)

    def work() -> int:
        console, results = Console(sys.stdout, quiet=options.json), {}
        for name in [options.part] if options.part else PARTS:
            results[name] = result = PARTS[name](options)
            shown = ", ".join(f"{key} {value}" for key, value in result.items() if key != "ok")
            console.line(f"{'ok  ' if result['ok'] else 'FAIL'}  {name}: {shown}")
        if options.json:
            Console(sys.stdout).line(json.dumps(results, indent=1))
        return EXIT_OK if all(result["ok"] for result in results.values()) else EXIT_DIFFERS

    return guarded(work)


if __name__ == "__main__":
    run_program(main)
