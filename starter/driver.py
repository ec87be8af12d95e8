"""The command line: run a scenario or continue prompts, and show what the engine does.

    python3 starter/driver.py --fixture fixtures/tiny_model.json
    python3 starter/driver.py --checkpoint MODEL --prompt "Once upon a time" --max-tokens 64
    python3 starter/driver.py --checkpoint MODEL --backend numpy --chat "What is the capital of France?"

Exit code 0: all went well and the output equals the golden tokens. 1: it differs, or a prompt could not be finished.
2: bad input, said in one line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: make the package importable, and its modules not importable by bare names
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from starter.backend import Backend, load_backend
from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, Table, check_writable, complain, guarded, run_program
from starter.base.statistics import Summary
from starter.base.tokenizer import CharacterTokenizer
from starter.base.wings import wing
from starter.engine import InferenceEngine, Played, play, quantization_config, tokens_of
from starter.errors import RequestError
from starter.metrics import Metrics
from starter.scheduler import counted
from starter.schema import (
    EngineSettings,
    QuantizationConfig,
    Request,
    SamplingParams,
    Scenario,
    SeededWeights,
    TokenEvent,
    load_scenario,
    sample_id,
)
from starter.timeline import VirtualClock

# ------------------------------------------------------------------------------------------------------ what is printed

#: What the driver prints of a scenario: its manifest, a line for each step, the results, the metrics.


def print_manifest(scenario: Scenario, console: Console) -> None:
    """What the scenario is: model, engine, requests."""
    model, engine = scenario.model, scenario.engine
    console.line(f"Scenario {scenario.name!r}: {scenario.description}")
    console.line(f"  model      {model.layers} layers, width {model.width}, {model.heads} heads over {model.kv_heads} "
                 f"KV heads, ffn {model.ffn_width}, vocabulary {model.vocab_size}, context {model.max_context}")
    console.line(f"  weights    {_describe_weights(scenario)}")
    console.line(f"  engine     {_describe_settings(engine)}")
    table = Table("request", "arrives", "prompt", "max", "text")
    for request in scenario.requests:
        table.add(request.request_id, f"step {request.arrival:g}", len(request.prompt_tokens), request.max_tokens,
                  _prompt_text(scenario, request))
    console.line(f"  requests   {len(scenario.requests)}, and {len(scenario.events)} cancelled on the way")
    table.show(console, indent="    ")


def _describe_weights(scenario: Scenario) -> str:
    source = scenario.weights
    name = f"seed {source.seed}" if isinstance(source, SeededWeights) else source.path
    bits = f"int{scenario.quantization.bits}" if scenario.quantization else "float"
    return f"{name}, {bits}, sha256 {(source.sha256 or 'not recorded')[:16]}"


def _describe_settings(engine: EngineSettings) -> str:
    pages = f"{engine.kv_quantization} pages" if engine.kv_quantization else "pages"
    return (f"{engine.num_pages} {pages} of {engine.page_size} tokens, budget {engine.budget_tokens} tokens a step, "
            f"at most {engine.max_running} running, {engine.batching} batching, {engine.policy}")


def _prompt_text(scenario: Scenario, request: Request) -> str:
    tokenizer = CharacterTokenizer(scenario.tokenizer, scenario.model.bos_token, scenario.model.eos_tokens)
    text = tokenizer.decode(request.prompt_tokens)
    return repr(text if len(text) <= 34 else text[:31] + "...")


class StepPrinter:
    """The table of steps. Steps in which the same requests just decode become one line, as do their tokens.

        step    tokens  pages  prefill           tokens out
        0        16/16  10/20  exact+7 across+8  single'q'
        9-10      4/16  20/20                    exact'uz' across'..' single'r?' long'm'
                   . late waits: needs 4 pages, 1 free; long frees 8 at its end, at most 21 tokens away
    """

    LONGEST_RUN = 16  # steps a line may join

    def __init__(self, engine: InferenceEngine, console: Console) -> None:
        self._engine, self._console = engine, console
        self._first = self._last = 0
        self._joined = 0
        self._row = ""
        self._texts: dict[str, str] = {}
        self._explained: set[str] = set()
        console.line("step    tokens  pages  prefill, then tokens out")

    def show(self, played: Played) -> None:
        """Take one step into the table."""
        decision, engine = played.decision, self._engine
        prefills = [f"{chunk.request_id}+{chunk.count}" for chunk in decision.chunks if chunk.phase == "prefill"]
        texts = _texts(played.events)
        notes = self._notes(played)
        if self._joined and (prefills or notes or texts.keys() != self._texts.keys()
                             or self._joined == self.LONGEST_RUN):
            self.flush()
        if not self._joined:
            self._first, self._texts = decision.step, dict.fromkeys(texts, "")
        self._last, self._joined = decision.step, self._joined + 1
        self._texts = {request_id: self._texts[request_id] + text for request_id, text in texts.items()}
        used = engine.kv.total_pages - engine.kv.free_pages
        self._row = (f"{decision.scheduled_tokens:>4}/{decision.budget_tokens:<3} {used:>3}/{engine.kv.total_pages:<3} "
                     + " ".join(prefills))
        if prefills or notes:
            self.flush()
        else:
            self._console.progress(self._line())
        for note in notes:
            self._console.line(f"          . {note}")

    def flush(self) -> None:
        """Print the line of the steps joined so far."""
        if self._joined:
            self._console.progress("")
            self._console.line(self._line())
        self._joined = 0

    def _line(self) -> str:
        steps = f"{self._first}" if self._first == self._last else f"{self._first}-{self._last}"
        out = " ".join(f"{request_id}{text!r}" for request_id, text in self._texts.items())
        return f"{steps:7} {self._row} {out}".rstrip()

    def _notes(self, played: Played) -> list[str]:
        """What deserves a sentence: refusals, preemptions, endings, and why a request waits, once for each."""
        reasons, preempted = played.decision.reasons, played.decision.preempted
        notes = [f"{request_id} is refused: {reason}" for request_id, reason in played.refused.items()]
        notes += [f"{request_id} is {reasons[request_id]}" for request_id in preempted]
        new = [request_id for request_id in played.decision.waiting
               if request_id in reasons and request_id not in preempted and request_id not in self._explained]
        self._explained.update(new)
        notes += [f"{request_id} {reasons[request_id]}" for request_id in new]
        eos_tokens = self._engine.model.config.eos_tokens
        return notes + [f"{event.sequence_id} {_ending(event, event.token in eos_tokens)}"
                        for event in played.events if event.finish_reason]


def _texts(events: list[TokenEvent]) -> dict[str, str]:
    """What each sample's tokens spell; those without a token are left out."""
    texts: dict[str, str] = {}
    for event in events:
        if event.token is not None:
            sample = event.sequence_id
            texts[sample] = texts.get(sample, "") + event.text
    return texts


def _ending(event: TokenEvent, at_eos: bool) -> str:
    stop = "ends with an end-of-sequence token" if at_eos else "ends at a stop token or stop string"
    words = {"stop": stop, "length": "ends: it has all its tokens",
             "cancelled": "was cancelled", "error": f"ends with an error: {event.error}"}
    return words[event.finish_reason or "error"]


def print_results(events: list[TokenEvent], refused: dict[str, str], verdicts: dict[str, str],
                  console: Console) -> None:
    """A line for each request: tokens, how it ended, golden or not, its text, or why it was refused."""
    console.line()
    table = Table("request", "tokens", "ended", "golden", "text")
    texts = _texts(events)
    ends = {event.sequence_id: event.finish_reason for event in events}
    for sample, tokens in tokens_of(events).items():
        table.add(sample, len(tokens), ends[sample], verdicts.get(sample, "-"), repr(texts.get(sample, "")))
    for request_id, reason in refused.items():
        table.add(request_id, 0, "refused", verdicts.get(request_id, "-"), reason)
    table.show(console)


def print_metrics(metrics: Metrics, clock: str, console: Console) -> None:
    """The metric table."""
    unit, scale = ("steps", 1.0) if clock == "virtual" else ("ms", 1000.0)
    rate = f", {metrics.tokens_per_second:.1f} tokens/s" if metrics.tokens_per_second and clock == "real" else ""
    most = counted(max(metrics.active_requests, default=0), "request")
    empty = "-" if metrics.fragmentation_mean is None else (
        f"{metrics.fragmentation_mean:.1f} a step, at most {metrics.fragmentation_peak}")
    ended = ", ".join(f"{number} {reason}" for reason, number in metrics.finished.items())
    console.line()
    for label, text in (
        ("time to first token", _summary(metrics.ttft, scale, unit)),
        ("time per output token", _summary(metrics.tpot, scale, unit)),
        ("output", f"{metrics.output_tokens} tokens in {metrics.steps} steps{rate}"),
        ("computed", f"{metrics.computed_tokens} positions, prompts and recomputation included; "
                     f"{metrics.found_tokens} prompt tokens found in shared pages"),
        ("batch utilization", f"{_percent(metrics.batch_utilization)} of the budget, up to {most} in a step"),
        ("KV pages", f"peak {metrics.kv_peak_pages} ({metrics.kv_peak_bytes:,} bytes), {metrics.kv_pages} in use now"),
        ("empty slots in pages", empty),
        ("preemptions", str(metrics.preemptions)),
        ("weights", f"{metrics.weight_bytes:,} bytes"),
        ("ended", f"{ended}; {metrics.refused} refused"),
    ):
        console.line(f"{label:22} {text}")


def _summary(summary: Summary, scale: float, unit: str) -> str:
    if summary.mean is None or summary.p50 is None or summary.max is None:
        return "-"
    return (f"median {summary.p50 * scale:.1f} {unit}, mean {summary.mean * scale:.1f}, "
            f"largest {summary.max * scale:.1f}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


# ----------------------------------------------------------------------------------------------------- the command line



STORED = "stored"  # --quantization: a checkpoint's matrices as the codes that its file holds
PROMPT_OPTIONS: dict[str, Any] = {  # those that go with --checkpoint, and their defaults
    "prompt": None, "chat": None, "max_tokens": 64, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "n": 1, "stop": []}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``p07`` and of this file; returns the exit code."""
    options = _parser().parse_args(arguments)
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    _check(options)
    console = Console(sys.stdout, quiet=options.quiet or options.json)
    return run_scenario(options, console) if options.fixture is not None else run_prompts(options, console)


def _check(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored, and files that would be lost."""
    _check_outputs(options)
    asked = [f"--{name.replace('_', '-')}" for name, default in PROMPT_OPTIONS.items()
             if getattr(options, name) != default]
    if options.fixture is not None and asked:
        raise RequestError(f"{', '.join(asked)} cannot be used here: --prompt and --chat go with --checkpoint, and so "
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


def entry() -> None:
    """Console script."""
    run_program(main)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="driver.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--fixture", metavar="FILE", help="scenario to run (JSON)")
    source.add_argument("--checkpoint", metavar="PATH", help="GGUF file, folder from Hugging Face, or llama2.c model")
    prompts = parser.add_argument_group("with --checkpoint")
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="continue this; may be given several times")
    prompts.add_argument("--chat", action="append", metavar="TEXT", help="answer this; may be given several times")
    prompts.add_argument("--max-tokens", type=int, metavar="N")
    prompts.add_argument("--temperature", type=float, help="0 (the default) is greedy")
    prompts.add_argument("--top-k", type=int, help="sample among the K likeliest; 0: among all")
    prompts.add_argument("--top-p", type=float, help="sample among the likeliest that add up to P")
    prompts.add_argument("--n", type=int, help="samples of each prompt; they share its pages")
    prompts.add_argument("--stop", action="append", metavar="TEXT", help="end the text before this")
    engine = parser.add_argument_group("engine (the default is what the scenario says)")
    engine.add_argument("--backend", default="cpu", help="cpu, reference, numpy, cuda or auto")
    engine.add_argument("--device", metavar="NAME", help="of backend cuda: cuda:0 (the default), or cpu, without a GPU")
    engine.add_argument("--dtype", choices=("float32", "float16"), help="of weights and pages of backend cuda")
    engine.add_argument("--quantization", choices=("none", "int8", "int4", "int4-search", STORED),
                        help="of the weights; stored: as a GGUF file holds them")
    engine.add_argument("--kv-quantization", choices=("none", "int8"), help="of the KV pages")
    engine.add_argument("--page-size", type=int, metavar="TOKENS")
    engine.add_argument("--num-pages", type=int, metavar="N")
    engine.add_argument("--budget", type=int, metavar="TOKENS", dest="budget_tokens", help="tokens computed in a step")
    engine.add_argument("--max-running", type=int, metavar="N", help="requests admitted at a time")
    engine.add_argument("--policy", help="fcfs, priority, shortest or prefill-first")
    engine.add_argument("--batching", help="continuous, static or none")
    engine.add_argument("--preemption", help="recompute or swap")
    engine.add_argument("--host-pages", type=int, metavar="N", help="pages to swap to")
    engine.add_argument("--prefix-sharing", action="store_const", const=True, help="share pages of equal beginnings")
    engine.add_argument("--workers", type=int, metavar="N", help="processes that compute, this one included")
    engine.add_argument("--no-cache", action="store_true", help="recompute the whole context for every token")
    engine.add_argument("--seed", type=int, help="of the sampling generators")
    engine.add_argument("--clock", choices=("real", "virtual"), default="real", help="virtual: a step lasts one second")
    output = parser.add_argument_group("output")
    output.add_argument("--manifest-only", action="store_true", help="print the scenario's manifest and stop")
    output.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    output.add_argument("--timeline", metavar="OUT.jsonl", help="write every event, a line each")
    output.add_argument("--trace", metavar="OUT.json", help="write a Chrome trace, for ui.perfetto.dev")
    output.add_argument("--report", metavar="OUT.html", help="write a page that replays the run, step by step")
    output.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(**PROMPT_OPTIONS)
    return parser


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Engine settings that were given on the command line."""
    names = ("page_size", "num_pages", "budget_tokens", "max_running", "policy", "batching", "preemption", "host_pages",
             "prefix_sharing", "workers", "seed")
    settings = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.kv_quantization:
        settings["kv_quantization"] = None if options.kv_quantization == "none" else options.kv_quantization
    if options.no_cache:
        settings["use_cache"] = False
    return settings


def _backend(options: argparse.Namespace) -> Backend:
    """The backend that was asked for, on the device that was."""
    given = {name: getattr(options, name) for name in ("device", "dtype") if getattr(options, name) is not None}
    return load_backend(options.backend, **given)


def _quantization(options: argparse.Namespace, default: QuantizationConfig | None) -> QuantizationConfig | None:
    if options.quantization is None:
        return default
    return quantization_config(None if options.quantization == "none" else options.quantization)


def _beside(options: argparse.Namespace) -> Console:
    """For progress where standard output is kept for one JSON document."""
    return Console(sys.stderr, quiet=options.quiet or not options.json)


def _clock(options: argparse.Namespace) -> Callable[[], float]:
    return VirtualClock() if options.clock == "virtual" else time.perf_counter


# ---------------------------------------------------------------------------------------------- scenarios


def run_scenario(options: argparse.Namespace, console: Console) -> int:
    """Print the manifest, run the requests, compare with the golden tokens, print the metrics."""
    given = load_scenario(options.fixture)
    scenario = replace(given, engine=given.engine.override(_settings(options)),
                       quantization=_quantization(options, given.quantization))
    print_manifest(scenario, console)
    if options.manifest_only:
        if options.json:
            print_json(scenario.to_dict())
        return EXIT_OK
    with console.working(f"loading {scenario.name}"), _beside(options).working(f"loading {scenario.name}"):
        engine = InferenceEngine.from_scenario(scenario, _backend(options), clock=_clock(options))
    with engine:
        with _recorded(engine, options), _beside(options).working() as progress:
            events, refused = _play(engine, scenario, console, progress)
        verdicts = compare(scenario, tokens_of(events))
        metrics = engine.metrics()
    if options.json:
        print_json({"scenario": scenario.name, "backend": engine.model.backend.name,
                    "tokens": tokens_of(events), "refused": refused, "golden": verdicts, "metrics": metrics.to_dict()})
    else:
        print_results(events, refused, verdicts, console)
        print_metrics(metrics, options.clock, console)
    differing = [request_id for request_id, verdict in verdicts.items() if verdict == "differs"]
    console.line()
    if not scenario.golden:
        console.line("This scenario has no golden tokens to compare with.")
    elif differing and _quantized(scenario) == _quantized(given):
        console.line(f"The output DIFFERS from the golden tokens: {', '.join(differing)}")
        return EXIT_DIFFERS
    elif differing:
        agree = len(verdicts) - len(differing)
        console.line(f"The golden tokens belong to other numbers than these quantized ones; {agree} of {len(verdicts)} "
                     f"outputs agree all the same.")
    else:
        console.line(f"All {len(verdicts)} outputs equal the golden tokens.")
    return EXIT_OK


def _quantized(scenario: Scenario) -> tuple[object, object]:
    """How weights and KV pages are rounded."""
    return scenario.quantization, scenario.engine.kv_quantization


@contextmanager
def _recorded(engine: InferenceEngine, options: argparse.Namespace) -> Iterator[None]:
    """While it is open, events go to the timeline file that was asked for; at the end, to the trace and the report."""
    events = list(engine.timeline.events)
    if options.trace is not None or options.report is not None:
        engine.timeline.listen(events.append)
    with engine.timeline.written_to(options.timeline) if options.timeline is not None else nullcontext():
        yield
    if options.trace is not None:
        wing("observe.perfetto", "--trace").write_chrome_trace(events, options.trace)
    if options.report is not None:
        wing("observe.report", "--report").write_report(events, options.report)


def _play(engine: InferenceEngine, scenario: Scenario, console: Console,
          progress: Callable[[str], None]) -> tuple[list[TokenEvent], dict[str, str]]:
    """Run the scenario and show each step: all events, and why requests were refused."""
    console.line()
    events: list[TokenEvent] = []
    refused: dict[str, str] = {}
    steps = StepPrinter(engine, console)
    for played in play(engine, scenario):
        events += played.events
        refused.update(played.refused)
        steps.show(played)
        progress(f"step {engine.steps}, {len(engine.active)} requests")
    steps.flush()
    return events, refused


def compare(scenario: Scenario, tokens: dict[str, list[int]]) -> dict[str, str]:
    """"equal" or "differs" for each request with golden tokens; one that is cancelled must have delivered a prefix."""
    cancelled = {event.cancel for event in scenario.events}
    verdicts = {}
    for request_id, golden in (scenario.golden.tokens if scenario.golden else {}).items():
        got = tokens.get(request_id)
        wanted = list(golden)[:len(got)] if got is not None and request_id in cancelled else list(golden)
        verdicts[request_id] = "equal" if got == wanted else "differs"
    return verdicts


# -------------------------------------------------------------------------------------------- checkpoints


def run_prompts(options: argparse.Namespace, console: Console) -> int:
    """Continue one or several prompts, or answer messages, with a checkpoint, streaming."""
    reader, chat = wing("checkpoints.load", "--checkpoint"), wing("checkpoints.chat", "--chat")
    console.progress(f"loading {options.checkpoint}")
    settings = EngineSettings().override({"budget_tokens": 64, "page_size": 16, **_settings(options)})
    quantization = STORED if options.quantization == STORED else _quantization(options, None)
    try:
        loaded = reader.load_checkpoint_model(options.checkpoint, _backend(options), quantization, console.progress)
    finally:
        console.progress("")
    engine = InferenceEngine(loaded, settings, _clock(options))
    with engine, _recorded(engine, options):
        sampling = SamplingParams(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
                                  n=options.n, stop=options.stop)
        prompts = {f"prompt-{i}": prompt for i, prompt in enumerate(options.chat or options.prompt or [""], start=1)}
        for request_id, prompt in prompts.items():
            tokens, ends = (chat.chat_prompt(engine.tokenizer, prompt) if options.chat
                            else (engine.tokenizer.encode(prompt, bos=True), ()))
            engine.submit(tokens, options.max_tokens, request_id=request_id, sampling=sampling, stop_tokens=ends)
        texts = {sample_id(request_id, number): f"> {prompt}\n" if options.chat else prompt
                 for request_id, prompt in prompts.items() for number in range(options.n)}
        failures = _stream_one(engine, texts, console) if len(texts) == 1 else _stream_many(engine, texts, console)
        metrics = engine.metrics()
    if options.json:
        print_json({"texts": texts, "failures": failures, "metrics": metrics.to_dict()})
    else:
        print_metrics(metrics, options.clock, console)
    for name, failure in failures.items():
        complain(f"error: {name} did not finish: {failure}")
    return EXIT_DIFFERS if failures else EXIT_OK


def _stream_one(engine: InferenceEngine, texts: dict[str, str], console: Console) -> dict[str, str]:
    """The text as it comes; returns failures by name."""
    [(name, prompt)] = texts.items()
    console.write(prompt)
    failures = {}
    for event in engine.stream(name):
        texts[name] += event.text
        console.write(event.text)
        if event.error:
            failures[name] = event.error
    console.line()
    return failures


def _stream_many(engine: InferenceEngine, texts: dict[str, str], console: Console) -> dict[str, str]:
    """All at once. The first text is shown as it comes, then the second as far as it has come meanwhile, and so on:
    they do not mix. Returns failures by name."""
    failures, ended = {}, set()
    for shown in texts:
        console.line(f"--- {shown}")
        length = 0
        while shown not in ended and (live := engine.active):
            console.write(texts[shown][length:])
            length = len(texts[shown])
            engine.step()
            for request_id in live:
                for event in engine.poll(request_id):
                    name = event.sequence_id
                    texts[name] += event.text
                    if event.finish_reason:
                        ended.add(name)
                    if event.error:
                        failures[name] = event.error
        console.line(texts[shown][length:])
    return failures


def print_json(document: object) -> None:
    """The one document of ``--json``: ASCII, so that any console can show it."""
    print(json.dumps(document, allow_nan=False))


if __name__ == "__main__":
    entry()
