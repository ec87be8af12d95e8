"""M6 · What can be done with a timeline that is on disk.

    python3 -m starter replay  RUN.jsonl                   run it again: does the same happen, event for event?
    python3 -m starter check   RUN.jsonl                   does it keep the promises V1 to V4? proven from it alone
    python3 -m starter metrics RUN.jsonl                   what it adds up to, as JSON or for Prometheus
    python3 -m starter trace   RUN.jsonl -o trace.json     for Perfetto (ui.perfetto.dev) or chrome://tracing
    python3 -m starter report  RUN.jsonl -o report.html    a page that replays it, step by step

The driver's ``--timeline RUN.jsonl`` and ``engine.timeline.write`` write timelines; ``timeline.py`` says what is in
them. Exit code 0: all is well. 1: the replay differs, or a promise is broken. 2: bad input, said in one line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, guarded, run_program
from starter.errors import RequestError
from starter.metrics import Metrics
from starter.observe.audit import Audit
from starter.observe.perfetto import write_chrome_trace
from starter.observe.prometheus import to_prometheus
from starter.observe.replay import Replay, load_recorded
from starter.observe.report import write_report
from starter.observe.timeline_file import read_timeline
from starter.timeline import Event

SHOWN = 20  # broken promises that are printed; of more, the number


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    work = {"replay": replay, "check": check, "metrics": metrics, "trace": trace, "report": report}[options.command]
    return guarded(lambda: work(options, Console(sys.stdout)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m starter", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.add_argument("timeline", metavar="RUN.jsonl")
        return added

    again = command("replay", "run it again and compare event for event")
    again.add_argument("--checkpoint", metavar="PATH",
                       help="where the checkpoint, or the scenario's safetensors file, is now")
    again.add_argument("--device", metavar="NAME", help="of backend cuda: cuda:0 (the default), or cpu, without a GPU")
    command("check", "prove V1 to V4 from the file alone")
    command("metrics", "print its metrics as JSON").add_argument(
        "--prometheus", action="store_true", help="as text for Prometheus, under vLLM's names")
    command("trace", "write it as a Chrome trace, for Perfetto").add_argument(
        "-o", "--output", metavar="FILE", default="trace.json", help="default: %(default)s")
    command("report", "write it as one HTML page").add_argument(
        "-o", "--output", metavar="FILE", default="report.html", help="default: %(default)s")
    return parser


def _read(options: argparse.Namespace) -> list[Event]:
    with Console(sys.stderr).working(f"reading {options.timeline} ..."):
        return read_timeline(options.timeline)


def replay(options: argparse.Namespace, console: Console) -> int:
    """Run it again."""
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


def check(options: argparse.Namespace, console: Console) -> int:
    """Prove what it promises."""
    events = _read(options)
    with Console(sys.stderr).working("checking ..."):
        audit = Audit.of(events)
    for violation in audit.violations[:SHOWN]:
        console.line(str(violation))
    if audit.violations:
        number = len(audit.violations)
        console.line(("1 promise is broken" if number == 1 else f"{number} promises are broken")
                     + (f"; these are the first {SHOWN}" if number > SHOWN else ""))
        return EXIT_DIFFERS
    seen, (waited, bound) = audit.proven, audit.longest_wait
    for promise, sentence in (
        ("V1", f"{seen['chunks']} chunks and {seen['page accesses']} page accesses, each to pages of its own request; "
               f"{seen['tokens']} tokens, each from all that was known"),
        ("V2", f"{seen['page changes']} changes of block tables; every page accounted for after each"),
        ("V3", f"{seen['requests']} requests and samples, {seen['ends']} ends; tokens without gaps, none after a "
               f"cancel"),
        ("V4", f"{seen['steps']} steps within their budgets; the longest wait was {waited} steps, of {bound} promised"),
    ):
        console.line(f"{promise}  {sentence}")
    return EXIT_OK


def metrics(options: argparse.Namespace, console: Console) -> int:
    """Print what it adds up to."""
    figures = Metrics.of(_read(options))
    console.write(to_prometheus(figures) if options.prometheus else figures.to_json() + "\n")
    return EXIT_OK


def trace(options: argparse.Namespace, console: Console) -> int:
    """Write it for Perfetto."""
    return _write(options, console, write_chrome_trace, "ui.perfetto.dev or chrome://tracing")


def report(options: argparse.Namespace, console: Console) -> int:
    """Write it as a page."""
    return _write(options, console, write_report, "a browser")


def _write(options: argparse.Namespace, console: Console, write: Callable[[list[Event], str], None],
           viewer: str) -> int:
    if Path(options.output).absolute() == Path(options.timeline).absolute():
        raise RequestError(f"{options.output} is the timeline itself; write to another file with -o FILE")
    events = _read(options)
    with Console(sys.stderr).working(f"writing {options.output} ..."):
        write(events, options.output)
    console.line(f"{options.output}: open it in {viewer}")
    return EXIT_OK


if __name__ == "__main__":
    run_program(main)
