"""The options of a run, which of them go together, and the settings that they ask for.

An option that would have no effect is refused, since a person who gives one expects an effect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from starter.base.bundled import SCENARIOS
from starter.base.console import check_writable, started
from starter.errors import RequestError, SchemaError
from starter.schema import EngineSettings, SamplingParams

STORED = "stored"  # --quantization: a checkpoint's matrices as the codes that its file holds
PROMPT_OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "n", "stop")  # of prompts, not of a scenario's run
SAMPLED_OPTIONS = ("top_k", "top_p", "seed")  # without effect where every token is the likeliest
ENGINE_OPTIONS = {  # fields of EngineSettings, and their options
    "page_size": "--page-size", "num_pages": "--num-pages", "budget_tokens": "--budget", "max_running": "--max-running",
    "policy": "--policy", "batching": "--batching", "preemption": "--preemption", "host_pages": "--host-pages",
    "prefix_sharing": "--prefix-sharing", "workers": "--workers", "use_cache": "--no-cache", "seed": "--seed",
    "kv_quantization": "--kv-quantization"}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of a run; ``description``, the driver's, heads its ``--help``, which names the program started."""
    program, file = "driver.py", Path(sys.argv[0])
    if file.stem == "p07" or file.parts[-2:] == ("starter", "__main__.py"):
        program = started("python3 -m starter run")
        description = (description or "").replace("python3 starter/driver.py", program).replace("fixtures/", "")
    parser = argparse.ArgumentParser(prog=program, description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "scenario to run (JSON), or whose model continues a --prompt")
    _add_prompt_options(parser.add_argument_group("prompts"))
    add_engine_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--manifest-only", action="store_true", help="print the scenario's manifest and stop")
    output.add_argument("--steps", choices=("few", "all", "none"), default="few",
                        help="how much is printed of the steps and requests of a scenario; few (the default): at most "
                             "some 200 lines")
    output.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    output.add_argument("--timeline", metavar="OUT.jsonl", help="write every event, a line each")
    output.add_argument("--trace", metavar="OUT.json", help="write a Chrome trace, for ui.perfetto.dev")
    output.add_argument("--report", metavar="OUT.html", help="write a page that replays the run, step by step")
    output.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return parser


def add_model_options(parser: argparse.ArgumentParser, of_fixture: str) -> None:
    """Which model; one of them must be given."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--fixture", metavar="FILE",
                        help=f"{of_fixture}; {' and '.join(SCENARIOS)} come with the project")
    source.add_argument("--checkpoint", metavar="PATH", help="GGUF file, folder from Hugging Face, or llama2.c model")


def _add_prompt_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt", action="append", metavar="TEXT", help="continue this; may be given several times")
    group.add_argument("--chat", action="append", metavar="TEXT",
                       help="answer this, with a checkpoint that can chat; may be given several times")
    add_sampling_options(group)
    group.add_argument("--n", type=int, help="samples of each prompt; they share its pages")


def add_sampling_options(group: argparse._ArgumentGroup) -> None:
    """How tokens are chosen, and how many."""
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    group.add_argument("--temperature", type=float, help="0 (the default) is greedy")
    group.add_argument("--top-k", type=int, help="sample among the K likeliest; 0: among all")
    group.add_argument("--top-p", type=float, help="sample among the likeliest that add up to P")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the text before this")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How the model is served: backend, weights, pages, scheduling."""
    group = parser.add_argument_group("engine (the default is what the scenario says)")
    group.add_argument("--backend", help="cpu, reference, numpy, cuda or auto; the default is cpu for a scenario, auto "
                                         "for a checkpoint")
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


# -------------------------------------------------------------------------------------------------- what goes together


def plays_scenario(options: argparse.Namespace) -> bool:
    """Do the options ask for a scenario's own requests? Otherwise they ask for prompts."""
    return options.fixture is not None and options.prompt is None


def check_options(options: argparse.Namespace) -> None:
    """RequestError for options that contradict each other or would have no effect, and for files that would be lost;
    SchemaError for a file that cannot be written."""
    for problem in _contradictions(options):
        raise RequestError(problem)
    _check_outputs(options)


def _contradictions(options: argparse.Namespace) -> Iterator[str]:
    prompts = [f"--{name.replace('_', '-')}" for name in PROMPT_OPTIONS if getattr(options, name) is not None]
    plays = plays_scenario(options)
    if options.fixture is not None and options.chat:
        yield ("--chat goes with --checkpoint: the model of a scenario has no chat template; give --prompt to have it "
               "continue a text")
    if plays and prompts:
        yield (f"{', '.join(prompts)} cannot be used here: the requests of a fixture say these things themselves; give "
               f"--prompt to have its model continue a text")
    if options.prompt and options.chat:
        yield "give --prompt, to go on from a text, or --chat, to have a message answered; not both"
    if options.manifest_only and not plays:
        yield "--manifest-only goes with --fixture and no --prompt: there is no other manifest"
    if not plays and options.steps != "few":
        yield "--steps goes with --fixture and no --prompt: of a prompt the text is printed, not the steps"
    if not plays and not options.temperature:
        for name in SAMPLED_OPTIONS:
            if getattr(options, name) is not None:
                yield (f"--{name.replace('_', '-')} has no effect on greedy decoding, which takes the likeliest token; "
                       f"give --temperature above 0, too")
    yield from _engine_contradictions(options)


def check_engine_options(options: argparse.Namespace) -> None:
    """The same for a program that has the options of model and engine alone."""
    for problem in _engine_contradictions(options):
        raise RequestError(problem)


def _engine_contradictions(options: argparse.Namespace) -> Iterator[str]:
    if options.quantization == STORED and options.fixture is not None:
        yield "--quantization stored goes with --checkpoint: it keeps the codes that a GGUF file holds"
    if options.use_cache is False:
        for name in ("prefix_sharing", "kv_quantization", "host_pages", "workers"):
            if getattr(options, name) not in (None, "none"):
                yield (f"{ENGINE_OPTIONS[name]} has no effect with --no-cache, which keeps no keys and values; leave "
                       f"one out")
        if options.preemption == "swap":
            yield "--preemption swap has no effect with --no-cache, which keeps no keys and values; leave one out"
    if options.batching == "none" and options.max_running not in (None, 1):
        yield "--max-running has no effect with --batching none, which runs one request at a time; leave one out"


def _check_outputs(options: argparse.Namespace) -> None:
    outputs = {"--timeline": options.timeline, "--trace": options.trace, "--report": options.report}
    outputs = {option: path for option, path in outputs.items() if path is not None}
    sources = [Path(path).absolute() for path in (options.fixture, options.checkpoint) if path is not None]
    for option, path in outputs.items():
        if path == "-":
            raise RequestError(f"{option} - would write a file of that name; give a path, or --json for one document "
                               f"on standard output")
        place = Path(path).absolute()
        if place in sources:
            raise RequestError(f"{place.name} is given twice; what is written must not replace what is read or written")
        sources.append(place)
    if options.manifest_only and outputs:
        raise RequestError("--manifest-only runs nothing, so there is no timeline, trace or report to write")
    for path in outputs.values():
        check_writable(path)


# ------------------------------------------------------------------------------------------------- what is asked for


def engine_settings(options: argparse.Namespace, default: EngineSettings) -> EngineSettings:
    """``default`` with what the options say; RequestError names the option that is out of range."""
    given = {name: getattr(options, name) for name in ENGINE_OPTIONS if getattr(options, name) is not None}
    if given.get("kv_quantization") == "none":
        given["kv_quantization"] = None
    if "num_pages" in given:  # which a budget in bytes would replace
        given["kv_budget_bytes"] = None
    try:
        settings = default.override(given)
    except SchemaError as error:
        name = error.path.rpartition("/")[2]
        if name not in given:
            raise
        raise RequestError(f"{ENGINE_OPTIONS[name]}: {error.problem}") from None
    if options.host_pages is not None and settings.preemption != "swap":
        raise RequestError("--host-pages has no effect without --preemption swap, which uses them; give both or "
                           "neither")
    if options.preemption == "swap" and not settings.host_pages:
        raise RequestError("--preemption swap needs pages to swap to, and there are 0; give --host-pages")
    return settings


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """What the options say of sampling; RequestError names the option that is out of range."""
    params = SamplingParams()
    for name in ("temperature", "top_k", "top_p", "n", "stop"):
        if (value := getattr(options, name)) is not None:
            changed: dict[str, Any] = {name: value}
            try:
                params = replace(params, **changed)
            except RequestError as error:
                option = f"--{name.replace('_', '-')}"
                raise RequestError(str(error).replace(name, option, 1) if name in str(error) else f"{option}: {error}"
                                   ) from None
    return params
