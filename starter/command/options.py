"""The options of ``starter/driver.py``, and which of them go together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from starter.base.console import check_writable
from starter.errors import RequestError

STORED = "stored"  # --quantization: a checkpoint's matrices as the codes that its file holds
PROMPT_OPTIONS: dict[str, Any] = {  # those that go with --checkpoint, and their defaults
    "prompt": None, "chat": None, "max_tokens": 64, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "n": 1, "stop": []}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The driver's parser; ``description`` heads its ``--help``."""
    parser = argparse.ArgumentParser(prog="driver.py", description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--fixture", metavar="FILE", help="scenario to run (JSON)")
    source.add_argument("--checkpoint", metavar="PATH", help="GGUF file, folder from Hugging Face, or llama2.c model")
    _add_prompt_options(parser.add_argument_group("with --checkpoint"))
    _add_engine_options(parser.add_argument_group("engine (the default is what the scenario says)"))
    output = parser.add_argument_group("output")
    output.add_argument("--manifest-only", action="store_true", help="print the scenario's manifest and stop")
    output.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    output.add_argument("--timeline", metavar="OUT.jsonl", help="write every event, a line each")
    output.add_argument("--trace", metavar="OUT.json", help="write a Chrome trace, for ui.perfetto.dev")
    output.add_argument("--report", metavar="OUT.html", help="write a page that replays the run, step by step")
    output.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(**PROMPT_OPTIONS)
    return parser


def _add_prompt_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt", action="append", metavar="TEXT", help="continue this; may be given several times")
    group.add_argument("--chat", action="append", metavar="TEXT", help="answer this; may be given several times")
    group.add_argument("--max-tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, help="0 (the default) is greedy")
    group.add_argument("--top-k", type=int, help="sample among the K likeliest; 0: among all")
    group.add_argument("--top-p", type=float, help="sample among the likeliest that add up to P")
    group.add_argument("--n", type=int, help="samples of each prompt; they share its pages")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the text before this")


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", default="cpu", help="cpu, reference, numpy, cuda or auto")
    group.add_argument("--device", metavar="NAME", help="of backend cuda: cuda:0 (the default), or cpu, without a GPU")
    group.add_argument("--dtype", choices=("float32", "float16"), help="of weights and pages of backend cuda")
    group.add_argument("--quantization", choices=("none", "int8", "int4", "int4-search", STORED),
                       help="of the weights; stored: as a GGUF file holds them")
    group.add_argument("--kv-quantization", choices=("none", "int8"), help="of the KV pages")
    group.add_argument("--page-size", type=int, metavar="TOKENS")
    group.add_argument("--num-pages", type=int, metavar="N")
    group.add_argument("--budget", type=int, metavar="TOKENS", dest="budget_tokens", help="tokens computed in a step")
    group.add_argument("--max-running", type=int, metavar="N", help="requests admitted at a time")
    group.add_argument("--policy", help="fcfs, priority, shortest or prefill-first")
    group.add_argument("--batching", help="continuous, static or none")
    group.add_argument("--preemption", help="recompute or swap")
    group.add_argument("--host-pages", type=int, metavar="N", help="pages to swap to")
    group.add_argument("--prefix-sharing", action="store_const", const=True, help="share pages of equal beginnings")
    group.add_argument("--workers", type=int, metavar="N", help="processes that compute, this one included")
    group.add_argument("--no-cache", action="store_const", const=False, dest="use_cache",
                       help="recompute the whole context for every token")
    group.add_argument("--seed", type=int, help="of the sampling generators")
    group.add_argument("--clock", choices=("real", "virtual"), default="real", help="virtual: a step lasts one second")


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored, and files that would be lost. RequestError, or SchemaError for a file that
    cannot be written."""
    given = [f"--{name.replace('_', '-')}" for name, default in PROMPT_OPTIONS.items()
             if getattr(options, name) != default]
    _check_outputs(options)
    if options.fixture is not None and given:
        raise RequestError(f"{', '.join(given)} cannot be used here: --prompt and --chat go with --checkpoint, and so "
                           f"do their options; a fixture brings its own requests")
    if options.prompt and options.chat:
        raise RequestError("give --prompt, to go on from a text, or --chat, to have a message answered; not both")
    if options.checkpoint is not None and options.manifest_only:
        raise RequestError("--manifest-only goes with --fixture; a checkpoint has no manifest")


def _check_outputs(options: argparse.Namespace) -> None:
    outputs = [path for path in (options.timeline, options.trace, options.report) if path is not None]
    places = [Path(path).absolute() for path in (options.fixture, options.checkpoint, *outputs) if path is not None]
    for i, place in enumerate(places):
        if place in places[:i]:
            raise RequestError(f"{place.name} is given twice; what is written must not replace what is read or written")
    if options.manifest_only and outputs:
        raise RequestError("--manifest-only runs nothing, so there is no timeline, trace or report to write")
    for path in outputs:
        check_writable(path)
