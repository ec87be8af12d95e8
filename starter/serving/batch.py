"""``python3 -m starter batch IN.jsonl OUT.jsonl``: many requests from a file, in OpenAI's batch format.

    python3 -m starter batch in.jsonl out.jsonl --fixture quatrains
    python3 -m starter batch in.jsonl out.jsonl --checkpoint MODEL --processes 2

A line of IN, and the line of OUT that answers it:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "春", "max_tokens": 20}}
    {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

The bodies are those that the server takes, and are answered as it would; ``vllm run-batch`` reads the same file. IN is
checked whole before anything is computed. Lines of OUT come as they are ready, in no order; they are written for good,
so a run that was stopped goes on where it stopped when it is started again: nothing is lost, and nothing done twice. A
request is known by its custom_id: one that was answered stays as it is, even if its body has changed since.
What a request without a seed samples depends on its custom_id alone, not on where or when it runs.

``--processes N`` computes in N processes, each with the model; ``--cluster ADDRESS`` on the workers of a Dask scheduler
(extra ``cluster``), which need the same files. If a worker dies, its requests are given to another one.

Exit code 0: every answer is a success. 1: some are errors, or the work could not be finished. 2: bad input.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, started
from starter.base.strict_json import describe, parse_json
from starter.command.options import add_engine_options, add_model_options, check_engine_options
from starter.command.run import load_model
from starter.engine import InferenceEngine
from starter.errors import EngineError, RequestError, SchemaError
from starter.serving.answers import Answer, HttpRequest
from starter.serving.api import Api, Settings

URLS = ("/v1/completions", "/v1/chat/completions")
LINE_BYTES = 16 * 1024 * 1024
PART = 32  # requests that a worker is given at a time, and serves together
AHEAD = 2  # parts for each worker: one that it computes, and the next
TRIES = 3  # of a part whose worker died
BEGINNING = b'{"id": "batch_req_'  # of each line of the answers


class Line(NamedTuple):
    """A request of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]


def make_parser() -> argparse.ArgumentParser:
    """The options of ``batch``."""
    parser = argparse.ArgumentParser(prog=started("python3 -m starter batch"), description=started(__doc__),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN.jsonl", help="requests, one a line")
    parser.add_argument("target", metavar="OUT.jsonl", help="answers; if there are some already, the rest is added")
    add_model_options(parser, "scenario whose model answers (JSON); its own requests are not run")
    add_engine_options(parser)
    group = parser.add_argument_group("batch")
    group.add_argument("--model-name", metavar="NAME", help="what the bodies call the model (default: its own name)")
    place = group.add_mutually_exclusive_group()
    place.add_argument("--processes", type=int, default=1, metavar="N", help="1 (the default): this one")
    place.add_argument("--cluster", metavar="ADDRESS", help="of a Dask scheduler, such as tcp://10.0.0.1:8786")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return parser


def batch(arguments: Sequence[str]) -> int:
    """Answer the file; returns the exit code."""
    options = make_parser().parse_args(arguments)
    options.clock = "real"
    check_engine_options(options)
    if not 1 <= options.processes <= 64:
        raise RequestError(f"--processes must be from 1 to 64, not {options.processes}")
    source, target = Path(options.source), Path(options.target)
    if source.absolute() == target.absolute() or (target.exists() and source.exists() and source.samefile(target)):
        raise RequestError(f"{source} is given twice; the answers must not replace the requests")
    if source.exists() and not source.is_file():  # it is read twice
        raise RequestError(f"{source} is not a file; write the requests to one")
    total = sum(1 for _ in read_lines(source))  # so that whatever is wrong with the file is said now
    console = Console(sys.stdout, options.quiet)
    with open_answers(target) as file:
        lock(file, target)
        done = answered(file, target)
        if done:
            console.line(f"{len(done)} of {total} requests were answered before")
        left = (line for line in read_lines(source) if line.custom_id not in done)
        counts = {True: 0, False: 0}
        try:
            with console.working() as progress:
                for text in compute(parts(left), options):
                    file.write(text.encode())
                    file.flush()
                    for answer in text.splitlines():
                        counts[json.loads(answer)["response"]["status_code"] == 200] += 1
                    progress(f"{len(done) + sum(counts.values())} of {total} requests")
        finally:
            os.fsync(file.fileno())
            close_engines()
    console.line(f"{counts[True]} answers and {counts[False]} errors were added to {target}")
    if (missing := total - sum(counts.values()) - sum(1 for line in read_lines(source) if line.custom_id in done)) > 0:
        raise EngineError(f"{missing} requests of {source} are not answered: it has changed meanwhile; start again")
    return EXIT_DIFFERS if counts[False] or not all(done.values()) else EXIT_OK


# --------------------------------------------------------------------------------------------------- the two files


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a file; empty lines are left out. SchemaError names the line that is malformed."""
    seen: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
                where = f"{path}, line {number}"
                if len(raw) > LINE_BYTES:
                    raise SchemaError(f"{where} has more than {LINE_BYTES} bytes")
                if raw.strip():
                    line = _parse(raw, where)
                    if line.custom_id in seen:
                        raise SchemaError(f"{where}: line {seen[line.custom_id]} has the custom_id {line.custom_id!r}, "
                                          f"too; each must have its own")
                    seen[line.custom_id] = number
                    yield line
    except OSError as error:
        raise SchemaError(f"cannot read {path}: {error.strerror or error}") from None


def _parse(raw: bytes, where: str) -> Line:
    try:
        document = parse_json(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise SchemaError(f"{where} is not UTF-8 text") from None
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from None
    if not isinstance(document, dict):
        raise SchemaError(f"{where} must be an object, not {describe(document)}")
    custom_id, body = document.get("custom_id"), document.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise SchemaError(f"{where}: custom_id must be a text that is not empty, not {describe(custom_id)}")
    if document.get("method") != "POST":
        raise SchemaError(f"{where}: method must be 'POST', not {describe(document.get('method'))}")
    if document.get("url") not in URLS:
        raise SchemaError(f"{where}: url must be one of {', '.join(URLS)}, not {describe(document.get('url'))}")
    if not isinstance(body, dict):
        raise SchemaError(f"{where}: body must be an object, not {describe(body)}")
    if body.get("stream"):
        raise SchemaError(f"{where}: an answer in a file is not streamed; leave stream out of the body")
    return Line(custom_id, document["url"], body)


def open_answers(path: Path) -> BinaryIO:
    """The file of answers, to be read and added to. SchemaError if that cannot be done."""
    if path.exists() and not path.is_file():
        raise SchemaError(f"{path} is not a file, to which answers could be added; give another path")
    try:
        path.touch()
        return open(path, "r+b")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SchemaError(f"cannot write {path}: {error}") from None


def lock(file: BinaryIO, path: Path) -> None:
    """Until the file is closed no other run adds to it. SchemaError if another one does so now."""
    try:
        if os.name == "nt":
            msvcrt = import_module("msvcrt")
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            return
        fcntl = import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SchemaError(f"another run is adding to {path}; wait for its end, or give another file") from None


def answered(file: BinaryIO, path: Path) -> dict[str, bool]:
    """The requests that the file answers, and whether with a success. A last line that was cut off, where a run was
    killed while it wrote, is removed, and the file is left at its end. SchemaError for a file that is no such file."""
    done: dict[str, bool] = {}
    end = 0
    for number, raw in enumerate(file, start=1):
        if not raw.endswith(b"\n") and (raw.startswith(BEGINNING) or BEGINNING.startswith(raw)):
            break
        try:
            document = json.loads(raw)
            custom_id, status = document["custom_id"], document["response"]["status_code"]
            if not isinstance(custom_id, str):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):  # not JSON, or something else
            raise SchemaError(f"{path}, line {number} is no answer of a batch; give another file, or remove this one"
                              ) from None
        done[custom_id] = status == 200
        end += len(raw)
    file.seek(end)
    file.truncate()
    return done


# ------------------------------------------------------------------------------------------------------ computing


def parts(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """The lines, PART at a time."""
    part: list[Line] = []
    for line in lines:
        part.append(line)
        if len(part) == PART:
            yield part
            part = []
    if part:
        yield part


def compute(left: Iterator[list[Line]], options: argparse.Namespace) -> Iterator[str]:
    """The answers to each part, as lines of JSON. EngineError if a part's workers keep dying."""
    given = {name: value for name, value in vars(options).items() if name not in ("source", "target", "quiet")}
    again: deque[tuple[list[Line], int]] = deque()  # parts whose worker died, and how often
    running: dict[Future[str], tuple[list[Line], int]] = {}
    more = True
    while more:
        more = False
        with _place(options) as (executor, workers):
            while not more:
                while len(running) < workers * AHEAD and (entry := _next(again, left)):
                    try:
                        running[executor.submit(answer_part, given, entry[0])] = entry
                    except BrokenProcessPool:
                        again.appendleft(entry)
                        more = True
                        break
                if not running and not more:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    if isinstance(future.exception(), BrokenProcessPool):
                        more = True  # in another pool, as this one is lost
                    else:
                        del running[future]
                        yield future.result()
        for future, (lines, tries) in list(running.items()):
            del running[future]
            if future.done() and not future.exception():  # it was ready before the pool broke
                yield future.result()
            elif tries + 1 == TRIES:
                raise EngineError(f"{TRIES} workers died while they answered {lines[0].custom_id!r} and the next "
                                  f"requests; what was answered is in the file: start again to go on")
            else:
                again.append((lines, tries + 1))


def _next(again: deque[tuple[list[Line], int]], left: Iterator[list[Line]]) -> tuple[list[Line], int] | None:
    if again:
        return again.popleft()
    part = next(left, None)
    return None if part is None else (part, 0)


@contextmanager
def _place(options: argparse.Namespace) -> Iterator[tuple[Executor, int]]:
    """Where parts are computed, and how many at a time."""
    if options.cluster is not None:
        with _cluster(options.cluster) as client, client.get_executor(retries=TRIES) as executor:
            yield executor, max(len(client.scheduler_info()["workers"]), 1)
    elif options.processes > 1:
        with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as executor:
            yield executor, options.processes
    else:
        with ThreadPoolExecutor(AHEAD) as threads:
            yield threads, 1


def _cluster(address: str) -> Any:
    """A client of Dask's."""
    try:
        distributed = import_module("distributed")
    except ImportError:
        raise EngineError("--cluster needs the package distributed, which is not installed: pip install '.[cluster]'"
                          ) from None
    try:
        return distributed.Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        raise RequestError(f"--cluster {address}: {error}") from None


_APIS: dict[str, Api] = {}  # in each process one, kept from part to part
_MAKING = Lock()


def answer_part(options: Mapping[str, Any], lines: Sequence[Line]) -> str:
    """The answers to some requests, which are served together: lines of JSON."""
    api = _api(options)
    with ThreadPoolExecutor(len(lines)) as pool:
        return "".join(pool.map(partial(_answer, api), lines))


def close_engines() -> None:
    """End those of this process."""
    while _APIS:
        _APIS.popitem()[1].engine.close()


def _api(options: Mapping[str, Any]) -> Api:
    key = json.dumps(options, sort_keys=True, default=str)
    with _MAKING:
        if key not in _APIS:
            _APIS[key] = _make(argparse.Namespace(**options))
        return _APIS[key]


def _make(options: argparse.Namespace) -> Api:
    silent = Console(None)
    loaded, settings = load_model(options, silent, silent)
    engine = InferenceEngine(loaded, replace(settings, max_waiting=max(settings.max_waiting, AHEAD * PART * 1_024),
                                             keep_events=0), time.monotonic)
    engine.start()
    return Api(engine, Settings(options.model_name or Path(engine.metrics().model_name).name or "model", seconds=None))


def _answer(api: Api, line: Line) -> str:
    """One line of the answers. The request's id, on which samples without a seed depend, is made of its custom_id."""
    name = hashlib.sha256(line.custom_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    raw = json.dumps({**line.body, "request_id": name}).encode()
    work = api.handle(HttpRequest("POST", line.url, {"content-type": "application/json"}, raw))
    if not isinstance(work, Answer):
        with work.source:
            work = work.whole()
    response = {"status_code": work.status, "request_id": name, "body": json.loads(work.body)}
    return json.dumps({"id": f"batch_req_{name}", "custom_id": line.custom_id, "response": response,
                       "error": None}) + "\n"
