"""The commands of ``p07``, which is also ``python3 -m starter``. Most of them belong to wings.

    p07                    what can be done
    p07 demo               watch a trained model write eight poems at once
    p07 run --help         run a scenario, or continue prompts; ``starter/driver.py`` is the same
    p07 COMMAND --help     the options of any command

Options without a command are those of ``run``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from starter.base.bundled import SCENARIOS, bundled
from starter.base.console import EXIT_BAD_INPUT, EXIT_OK, Console, complain, guarded, run_program, started
from starter.base.version import __version__
from starter.base.wings import wing
from starter.errors import RequestError

COMMANDS = {  # name: where its function is, and what it does
    "demo": ("__main__:demo", "watch a trained model write eight poems at once, step by step"),
    "run": ("driver:main", "run a scenario, or continue prompts"),
    "chat": ("command.chat:main", "talk with a checkpoint"),
    "serve": ("serving.command:serve", "answer OpenAI's clients over HTTP"),
    "batch": ("serving.batch:batch", "answer a file of requests, in OpenAI's batch format"),
    "bench": ("serving.bench:bench", "send a scenario to any OpenAI-compatible server, and measure"),
    "check": ("observe.commands:check", "prove from a timeline alone that it keeps the promises V1 to V4"),
    "replay": ("observe.commands:replay", "run a timeline again and compare event for event"),
    "report": ("observe.commands:report", "write a timeline as one HTML page that replays it"),
    "metrics": ("observe.commands:metrics", "print a timeline's metrics, as JSON or for Prometheus"),
    "trace": ("observe.commands:trace", "write a timeline as a Chrome trace, for Perfetto"),
    "draw": ("workloads.draw:main", "print a scenario with requests drawn from a seed"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand the arguments that follow a command to the command's function; returns the exit code."""
    command, *further = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    return guarded(lambda: _run(command, further))


def _run(command: str, arguments: Sequence[str]) -> int:
    if command in ("-h", "--help", "--version"):
        Console(sys.stdout).line(_usage() if command != "--version" else f"p07 {__version__}, Python "
                                 f"{'.'.join(map(str, sys.version_info[:3]))}")
        return EXIT_OK
    if command.startswith("-"):
        return _function("run")([command, *arguments])
    if command not in COMMANDS:
        complain(f"{_usage()}\nerror: there is no command {command!r}")
        return EXIT_BAD_INPUT
    return _function(command)(arguments)


def _function(command: str) -> Callable[[Sequence[str]], int]:
    module, name = COMMANDS[command][0].split(":")
    place = sys.modules[__name__] if module == "__main__" else wing(module, started(f"python3 -m starter {command}"))
    function: Callable[[Sequence[str]], int] = getattr(place, name)
    return function


def demo(arguments: Sequence[str]) -> int:
    """A scenario that comes with the project; further options are those of ``run``."""
    if {"-h", "--help"} & set(arguments):
        Console(sys.stdout).line(started(f"usage: python3 -m starter demo [{'|'.join(SCENARIOS)}] [options]\n\nPlays a "
                                         "scenario that comes with the project; python3 -m starter run --help lists "
                                         "the options."))
        return EXIT_OK
    name, *options = arguments if arguments and not arguments[0].startswith("-") else ["quatrains", *arguments]
    path = bundled(f"{name}.json") if name in SCENARIOS else None
    if path is None:
        raise RequestError(f"there is no demo {name!r}; there are {' and '.join(SCENARIOS)}")
    return _function("run")(["--fixture", str(path), *options])


def _usage() -> str:
    lines = [f"  {name:8}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return started("\n".join(["A mini LLM inference engine: KV cache, continuous batching, paged KV, quantization.", "",
                              "usage: python3 -m starter COMMAND ...", "", *lines, "",
                              "Begin with: python3 -m starter demo. Each command has a --help of its own."]))


def entry() -> None:
    """Console script."""
    run_program(main)


if __name__ == "__main__":
    entry()
