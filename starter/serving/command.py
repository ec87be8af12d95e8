"""``python3 -m starter serve``: a model behind an OpenAI-compatible API.

    python3 -m starter serve --fixture quatrains
    python3 -m starter serve --checkpoint MODEL --backend numpy --port 8080 --api-key SECRET

Then:

    curl -N http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"prompt": "春", "max_tokens": 40, "temperature": 0.8, "stream": true}'

SIGTERM and Ctrl-C end it: it accepts no more, ends what runs, and exits with code 0. The second of them cancels what
still runs. Exit code 2: bad input, said in one line.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

from starter.base.console import EXIT_OK, Console, started
from starter.command.options import add_engine_options, add_model_options, check_engine_options
from starter.command.run import load_model
from starter.engine import InferenceEngine
from starter.errors import RequestError
from starter.serving.api import Api, Settings
from starter.serving.server import Server
from starter.serving.wire import Limits

KEY_VARIABLE = "P07_API_KEY"
SWITCH_SECONDS = 0.0005  # see _quick_switches


def make_parser() -> argparse.ArgumentParser:
    """The options of ``serve``."""
    parser = argparse.ArgumentParser(prog=started("python3 -m starter serve"), description=started(__doc__),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "scenario whose model is served (JSON); its own requests are not run")
    add_engine_options(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets other machines in")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0: any free one (default: %(default)s)")
    group.add_argument("--model-name", metavar="NAME", help="what clients call the model (default: its own name)")
    group.add_argument("--api-key", metavar="KEY", help=f"needed for all but /health; better in the environment, as "
                                                        f"{KEY_VARIABLE}, since options can be seen by others")
    group.add_argument("--allow-origin", action="append", metavar="ORIGIN",
                       help="web pages of this origin may call; may be given several times; '*': all may")
    group.add_argument("--log-prompts", action="store_true",
                       help="log the bodies of requests, too, and show texts on the live page")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-connections", type=int, default=512, metavar="N",
                        help="clients at a time; others get 503 (default: %(default)s)")
    limits.add_argument("--max-waiting", type=int, default=512, metavar="N",
                        help="requests that wait for the engine; others get 429 (default: %(default)s)")
    limits.add_argument("--max-body", type=int, default=Limits.body, metavar="BYTES",
                        help="of a request; larger ones get 413 (default: %(default)s)")
    limits.add_argument("--max-seconds", type=float, default=600.0, metavar="S",
                        help="of a generation, which is then cancelled (default: %(default)s)")
    limits.add_argument("--drain-seconds", type=float, default=30.0, metavar="S",
                        help="at the end, for what runs (default: %(default)s)")
    return parser


def serve(arguments: Sequence[str]) -> int:
    """Serve until a signal; returns the exit code."""
    options = make_parser().parse_args(arguments)
    options.clock = "real"
    _check(options)
    console, notes = Console(sys.stdout, options.quiet), Console(sys.stderr, options.quiet)
    loaded, settings = load_model(options, console, notes)
    engine = InferenceEngine(loaded, replace(settings, max_waiting=options.max_waiting, keep_events=0), time.monotonic)
    name = options.model_name or Path(engine.metrics().model_name).name or "model"
    key = options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE) or None
    api = Api(engine, Settings(name, key, options.max_seconds, options.allow_origin or (), options.log_prompts))
    limits = Limits(body=options.max_body)
    with engine, _bound(options, api, limits, notes) as server, _signals() as ends, _quick_switches():
        engine.start()
        server.start()
        host = f"[{options.host}]" if ":" in options.host else options.host
        console.line(f"{name} is served at http://{host}:{server.port}/v1 (Ctrl-C ends it)")
        while not ends.first.wait(0.5):  # a wait without an end would keep Windows from seeing Ctrl-C
            pass
        console.line(f"draining: {len(engine.active)} requests run or wait")
        cancelled = server.drain(options.drain_seconds, ends.second)
        console.line(f"ended; {cancelled} were cancelled" if cancelled else "ended")
    return EXIT_OK


def _check(options: argparse.Namespace) -> None:
    """RequestError names the option that is out of range."""
    check_engine_options(options)
    for name, low, high in (("port", 0, 65_535), ("max_connections", 1, 65_536), ("max_waiting", 1, 1_000_000),
                            ("max_body", 1, 16 * 1024 * 1024), ("max_seconds", 0.001, 1e6), ("drain_seconds", 0, 1e6)):
        value = getattr(options, name)
        if not low <= value <= high:
            raise RequestError(f"--{name.replace('_', '-')} must be from {low:g} to {high:g}, not {value}")
    if options.api_key == "":
        raise RequestError("--api-key is empty, with which no client could call; give a key, or leave the option out")


def _bound(options: argparse.Namespace, api: Api, limits: Limits, notes: Console) -> Server:
    """The server, listening. RequestError names the address that cannot be had."""
    try:
        return Server((options.host, options.port), api, limits, max_connections=options.max_connections,
                      log=notes.line, log_prompts=options.log_prompts)
    except OSError as error:
        raise RequestError(f"cannot listen at --host {options.host} --port {options.port}: {error.strerror or error}; "
                           f"choose another, or --port 0 for any free one") from None


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Within the block, the engine's thread lets others run after half a millisecond instead of five: a token that is
    ready is not held back while the next one is computed."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Ends:
    """Set by the first and by the second signal."""

    def __init__(self) -> None:
        self.first, self.second = Event(), Event()

    def __call__(self, number: int, frame: object) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def _signals() -> Iterator[_Ends]:
    """Within the block, SIGTERM and Ctrl-C do not interrupt the program, they set events."""
    ends = _Ends()
    before = {number: signal.signal(number, ends) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ends
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
