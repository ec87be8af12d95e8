"""M6 · Commands that read a timeline from disk; ``starter/__main__.py`` calls them with the arguments that follow.

    python3 -m starter replay  RUN.jsonl                   run it again: does the same happen, event for event?
    python3 -m starter check   RUN.jsonl                   prove from it alone that it keeps the promises V1 to V4
    python3 -m starter metrics RUN.jsonl                   its metrics, as JSON or for Prometheus
    python3 -m starter trace   RUN.jsonl -o trace.json     for Perfetto (ui.perfetto.dev) or chrome://tracing
    python3 -m starter report  RUN.jsonl -o report.html    a page that replays it, step by step

The driver's ``--timeline RUN.jsonl`` and ``engine.timeline.write`` write timelines; ``timeline.py`` says what they
hold. Exit code 0: all is well. 1: the replay differs, or a promise is broken. 2: bad input, said in one line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, started
from starter.errors import RequestError
from starter.metrics import Metrics
from starter.observe.audit import Audit
from starter.observe.perfetto import write_chrome_trace
from starter.observe.prometheus import to_prometheus
from starter.observe.replay import Replay, load_recorded
from starter.observe.report import write_report
from starter.observe.timeline_file import read_timeline
from starter.timeline import Event

SHOWN = 20  # broken promises that are printed; the others are only counted


def replay(arguments: Sequence[str]) -> int:
    """Run a timeline again and compare event for event."""
    parser = _parser("replay", replay.__doc__)
    parser.add_argument("--checkpoint", metavar="PATH",
                        help="where the checkpoint, or the scenario's safetensors file, is now")
    parser.add_argument("--device", metavar="NAME", help="of backend cuda: cuda:0 (the default), or cpu, without a GPU")
    options, console = parser.parse_args(arguments), Console(sys.stdout)
    events = _read(options)
    with Console(sys.stderr).working("loading the model ...") as progress:
        loaded = load_recorded(events[0], Path(options.timeline).parent, options.checkpoint, options.device)
        outcome = Replay(events, loaded, progress).run()
    if outcome.difference:
        console.line(f"The replay differs after {outcome.compared} equal events.\n{outcome.difference}")
        return EXIT_DIFFERS
    times = "" if events[0]["step_seconds"] is not None else ", times aside: they are those of a real clock"
    console.line(f"All {outcome.compared} events are the same{times}.")
    if outcome.surplus:
        console.line(f"The timeline breaks off within a step, which brings {outcome.surplus} more.")
    return EXIT_OK


def check(arguments: Sequence[str]) -> int:
    """Prove from a timeline alone that it keeps the promises V1 to V4."""
    events = _read(_parser("check", check.__doc__).parse_args(arguments))
    with Console(sys.stderr).working("checking ..."):
        audit = Audit.of(events)
    console = Console(sys.stdout)
    for violation in audit.violations[:SHOWN]:
        console.line(str(violation))
    if number := len(audit.violations):
        console.line(("1 promise is broken" if number == 1 else f"{number} promises are broken")
                     + (f"; these are the first {SHOWN}" if number > SHOWN else ""))
        return EXIT_DIFFERS
    seen, (waited, work, bound) = audit.proven, audit.longest_wait
    for promise, sentence in (
        ("V1", f"{seen['chunks']} chunks and {seen['page accesses']} page accesses, each to pages of its own request; "
               f"{seen['tokens']} tokens, each from all that was known"),
        ("V2", f"{seen['page changes']} changes of block tables; every page accounted for after each"),
        ("V3", f"{seen['requests']} requests and samples, {seen['ends']} ends; tokens without gaps, none after a "
               f"cancel"),
        ("V4", f"{seen['steps']} steps within their budgets; the longest wait was {waited} steps, of at most {work}: "
               f"the tokens that those who ran meanwhile had to compute (the scheduler's promise: {bound})"),
    ):
        console.line(f"{promise}  {sentence}")
    return EXIT_OK


def metrics(arguments: Sequence[str]) -> int:
    """Print a timeline's metrics as JSON."""
    parser = _parser("metrics", metrics.__doc__)
    parser.add_argument("--prometheus", action="store_true", help="as text for Prometheus, under vLLM's names")
    options = parser.parse_args(arguments)
    figures = Metrics.of(_read(options))
    Console(sys.stdout).write(to_prometheus(figures) if options.prometheus else figures.to_json() + "\n")
    return EXIT_OK


def trace(arguments: Sequence[str]) -> int:
    """Write a timeline as a Chrome trace, for Perfetto."""
    return _write(_parser("trace", trace.__doc__, output="trace.json").parse_args(arguments), write_chrome_trace,
                  "ui.perfetto.dev or chrome://tracing")


def report(arguments: Sequence[str]) -> int:
    """Write a timeline as one HTML page that replays it."""
    return _write(_parser("report", report.__doc__, output="report.html").parse_args(arguments), write_report,
                  "a browser")


def _parser(command: str, summary: str | None, output: str = "") -> argparse.ArgumentParser:
    """The options of a command on a timeline; with ``output``, the default, those of one that writes a file."""
    parser = argparse.ArgumentParser(prog=started(f"python3 -m starter {command}"), description=summary,
                                     allow_abbrev=False)
    parser.add_argument("timeline", metavar="RUN.jsonl")
    if output:
        parser.add_argument("-o", "--output", metavar="FILE", default=output, help="default: %(default)s")
    return parser


def _read(options: argparse.Namespace) -> list[Event]:
    with Console(sys.stderr).working(f"reading {options.timeline} ..."):
        return read_timeline(options.timeline)


def _write(options: argparse.Namespace, write: Callable[[list[Event], str], None], viewer: str) -> int:
    if Path(options.output).absolute() == Path(options.timeline).absolute():
        raise RequestError(f"{options.output} is the timeline itself; write to another file with -o FILE")
    events = _read(options)
    with Console(sys.stderr).working(f"writing {options.output} ..."):
        write(events, options.output)
    Console(sys.stdout).line(f"{options.output}: open it in {viewer}")
    return EXIT_OK
