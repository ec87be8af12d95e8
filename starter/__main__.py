"""``python3 -m starter COMMAND ...``: the commands, most of which belong to wings."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from starter.base.console import EXIT_BAD_INPUT, EXIT_OK, Console, complain, guarded, run_program
from starter.base.wings import wing

COMMANDS = {  # name: where its function is, and what it does
    "chat": ("command.chat:main", "talk with a checkpoint"),
    "replay": ("observe.commands:replay", "run a timeline again and compare event for event"),
    "check": ("observe.commands:check", "prove from a timeline alone that it keeps the promises V1 to V4"),
    "metrics": ("observe.commands:metrics", "print a timeline's metrics, as JSON or for Prometheus"),
    "trace": ("observe.commands:trace", "write a timeline as a Chrome trace, for Perfetto"),
    "report": ("observe.commands:report", "write a timeline as one HTML page that replays it"),
    "serve": ("serving.command:serve", "answer OpenAI's clients over HTTP"),
    "batch": ("serving.batch:batch", "answer a file of requests, in OpenAI's batch format"),
    "draw": ("workloads.draw:main", "print a scenario with requests drawn from a seed"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand the arguments that follow a command to the command's function; returns the exit code."""
    command, *further = (sys.argv[1:] if arguments is None else arguments) or [""]
    return guarded(lambda: _run(command, further))


def _run(command: str, arguments: Sequence[str]) -> int:
    if command in ("-h", "--help"):
        Console(sys.stdout).line(_usage())
        return EXIT_OK
    if command not in COMMANDS:
        complain(f"{_usage()}\nerror: {f'there is no command {command!r}' if command else 'which command?'}")
        return EXIT_BAD_INPUT
    module, function = COMMANDS[command][0].split(":")
    code: int = getattr(wing(module, f"python3 -m starter {command}"), function)(arguments)
    return code


def _usage() -> str:
    lines = [f"  {name:8}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: python3 -m starter COMMAND ...", "", *lines, "",
                      "Each has a --help of its own. python3 starter/driver.py runs scenarios and prompts."])


if __name__ == "__main__":
    run_program(main)
