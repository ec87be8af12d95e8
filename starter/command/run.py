"""A scenario or prompts, run as the options say."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from starter.backend import Backend, load_backend
from starter.base.bundled import SCENARIOS, bundled
from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, complain
from starter.base.wings import wing
from starter.command.options import STORED, engine_settings, sampling_params
from starter.command.play import play, tokens_of
from starter.command.printing import (
    StepPrinter,
    print_json,
    print_manifest,
    print_metrics,
    print_results,
    print_verdict,
)
from starter.engine import InferenceEngine
from starter.errors import BackendError, SchemaError
from starter.model import Loaded, load_scenario_model, quantization_config
from starter.schema import EngineSettings, QuantizationConfig, Scenario, TokenEvent, load_scenario, sample_id
from starter.timeline import VirtualClock


def _backend(options: argparse.Namespace, default: str) -> Backend:
    """BackendError names the option."""
    given = {name: getattr(options, name) for name in ("device", "dtype") if getattr(options, name) is not None}
    name = options.backend or default
    try:
        return load_backend(name, **given)
    except BackendError as error:
        option = "--backend" if options.backend or not given else f"--{min(given)}"
        raise BackendError(f"{option}: {error}") from None


def _quantization(options: argparse.Namespace, default: QuantizationConfig | None) -> QuantizationConfig | None:
    if options.quantization is None:
        return default
    config = quantization_config(None if options.quantization == "none" else options.quantization)
    assert not callable(config)  # an option is a name
    return config


def _clock(options: argparse.Namespace) -> Callable[[], float]:
    return VirtualClock() if options.clock == "virtual" else time.perf_counter


def _load_scenario(path: str) -> Scenario:
    """A name without a folder may also be that of a scenario that comes with the project. SchemaError names the file,
    and those scenarios where there is no such file."""
    try:
        return load_scenario(path if Path(path).exists() else bundled(path) or path)
    except SchemaError as error:
        if not Path(path).exists():
            raise SchemaError(f"{error}; by name there are {' and '.join(SCENARIOS)}") from None
        raise SchemaError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


# --------------------------------------------------------------------------------------------------------- the two runs


def run_scenario(options: argparse.Namespace, console: Console) -> int:
    """Print the manifest, run the requests, compare with the golden tokens, print the metrics."""
    given = _load_scenario(options.fixture)
    scenario = replace(given, engine=engine_settings(options, given.engine),
                       quantization=_quantization(options, given.quantization))
    backend = _backend(options, "cpu")
    print_manifest(scenario, console, options.steps)
    if options.manifest_only:
        if options.json:
            print_json(scenario.to_dict())
        return EXIT_OK
    aside = Console(sys.stderr, quiet=options.quiet or not options.json)  # progress, when stdout is kept for JSON
    with console.working(f"loading {scenario.name}"), aside.working(f"loading {scenario.name}"):
        engine = InferenceEngine.from_scenario(scenario, backend, clock=_clock(options))
    with _recorded(engine, options, console), engine, aside.working() as progress:
        events, refused = _play(engine, scenario, console, progress, options.steps)
        metrics = engine.metrics()
    verdicts = compare(scenario, tokens_of(events))
    if options.json:
        print_json({"scenario": scenario.name, "backend": engine.model.backend.name,
                    "tokens": tokens_of(events), "refused": refused, "golden": verdicts, "metrics": metrics.to_dict()})
    else:
        print_results(events, refused, verdicts, console, options.steps)
        print_metrics(metrics, options.clock, console)
    return print_verdict(given, scenario, verdicts, console)


@contextmanager
def _recorded(engine: InferenceEngine, options: argparse.Namespace, console: Console) -> Iterator[None]:
    """Write the timeline while the block runs, and at its end the trace and the report, where asked for, and say so.
    The engine is closed within the block, so that the ends of an interrupted run are on record, too."""
    writers = []
    if options.trace is not None:
        writers.append((wing("observe.perfetto", "--trace").write_chrome_trace, options.trace))
    if options.report is not None:
        writers.append((wing("observe.report", "--report").write_report, options.report))
    events = list(engine.timeline.events)
    if writers:
        engine.timeline.listen(events.append)
    with engine.timeline.written_to(options.timeline) if options.timeline is not None else nullcontext():
        yield
    for write, path in writers:
        write(events, path)
    for what, path in (("timeline", options.timeline), ("trace", options.trace), ("report", options.report)):
        if path is not None:
            console.line(f"The {what} is in {path}")


def _play(engine: InferenceEngine, scenario: Scenario, console: Console, progress: Callable[[str], None],
          amount: str) -> tuple[list[TokenEvent], dict[str, str]]:
    """Run the scenario and print each step. Returns all events, and by request id why requests were refused."""
    console.line()
    events: list[TokenEvent] = []
    refused: dict[str, str] = {}
    steps = StepPrinter(engine, console, amount)
    for played in play(engine, scenario):
        events += played.events
        refused.update(played.refused)
        steps.show(played)
        progress(f"step {engine.steps}, {len(engine.active)} requests")
    steps.end()
    return events, refused


def compare(scenario: Scenario, tokens: dict[str, list[int]]) -> dict[str, str]:
    """"equal" or "differs" for each request with golden tokens; of a cancelled one, a prefix of them is enough."""
    cancelled = {event.cancel for event in scenario.events}
    verdicts = {}
    for request_id, golden in (scenario.golden.tokens if scenario.golden else {}).items():
        got = tokens.get(request_id)
        expected = list(golden)[:len(got)] if got is not None and request_id in cancelled else list(golden)
        verdicts[request_id] = "equal" if got == expected else "differs"
    return verdicts


def load_model(options: argparse.Namespace, console: Console, notes: Console) -> tuple[Loaded, EngineSettings]:
    """The model of a fixture or a checkpoint, and the settings that the options ask for. ``console`` shows progress,
    ``notes`` which backend was chosen."""
    if options.fixture is not None:
        scenario = _load_scenario(options.fixture)
        settings = engine_settings(options, scenario.engine)
        quantized = _quantization(options, scenario.quantization)
        return load_scenario_model(scenario, _backend(options, "cpu"), quantized), settings
    reader = wing("checkpoints.load", "--checkpoint")
    settings = engine_settings(options, EngineSettings(budget_tokens=64))
    quantization = STORED if options.quantization == STORED else _quantization(options, None)
    backend = _backend(options, "auto")
    with console.working(f"loading {options.checkpoint}") as progress:
        loaded: Loaded = reader.load_checkpoint_model(options.checkpoint, backend, quantization, progress)
    if options.backend is None:
        notes.line(_why(backend.name))
    return loaded, settings


def run_prompts(options: argparse.Namespace, console: Console) -> int:
    """Continue one or several prompts, or answer messages, streaming."""
    sampling = sampling_params(options)
    loaded, settings = load_model(options, console, Console(sys.stderr, options.quiet or options.json))
    engine = InferenceEngine(loaded, settings, _clock(options))
    with _recorded(engine, options, console), engine:
        samples: dict[str, _Shown] = {}
        for i, prompt in enumerate(options.chat or options.prompt or [""], start=1):
            tokens, ends = _prompt_tokens(engine, prompt, bool(options.chat))
            room = max(engine.model.config.max_context - len(tokens), 1)
            max_tokens = min(64, room) if options.max_tokens is None else options.max_tokens
            request_id = engine.submit(tokens, max_tokens, request_id=f"prompt-{i}", sampling=sampling,
                                       stop_tokens=ends)
            heading = f"> {prompt}\n" if options.chat else prompt
            samples |= {sample_id(request_id, number): _Shown(prompt, number, heading) for number in range(sampling.n)}
        _stream(engine, samples, console)
        metrics = engine.metrics()
    if options.json:
        print_json({"samples": [shown.to_dict() for shown in samples.values()], "metrics": metrics.to_dict()})
    else:
        print_metrics(metrics, options.clock, console)
    failed = {name: shown.error for name, shown in samples.items() if shown.error is not None}
    for name, error in failed.items():
        complain(f"error: {name} did not finish: {error}")
    return EXIT_DIFFERS if failed else EXIT_OK


def _why(backend: str) -> str:
    """Which backend "auto" chose, and what would be faster."""
    if backend == "numpy":
        return "backend numpy: the fastest that is installed (--backend chooses another)"
    return f"backend {backend}: NumPy is not installed, which is some ten times faster: pip install numpy"


def _prompt_tokens(engine: InferenceEngine, prompt: str, chat: bool) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens of a prompt or message, and those that end an answer."""
    if chat:
        tokens, ends = wing("checkpoints.chat", "--chat").chat_prompt(engine.tokenizer, prompt)
        return tokens, ends
    return engine.tokenizer.encode(prompt, bos=True), ()


@dataclass
class _Shown:
    """A sample as it grows."""

    prompt: str
    sample: int
    heading: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def add(self, event: TokenEvent) -> None:
        self.text += event.text
        if event.token is not None and event.logprob is not None:
            self.tokens.append(event.token)
            self.logprobs.append(event.logprob)
        self.finish_reason, self.error = event.finish_reason, event.error

    def to_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {"prompt": self.prompt, "sample": self.sample, "text": self.text, "tokens": self.tokens,
                "logprobs": self.logprobs, "finish_reason": self.finish_reason, "error": self.error}


def _stream(engine: InferenceEngine, samples: dict[str, _Shown], console: Console) -> None:
    """Generate all texts at once, but print them one after another: the first as it comes, then the second, starting
    with what it has produced by then, and so on."""
    for name, shown in samples.items():
        if len(samples) > 1:
            console.line(f"--- {name}")
        console.write(shown.heading)
        length = 0
        while shown.finish_reason is None:
            console.write(shown.text[length:])
            length = len(shown.text)
            live = engine.active
            engine.step()
            for event in [event for request_id in live for event in engine.poll(request_id)]:
                samples[event.sequence_id].add(event)
        console.write(shown.text[length:] + "\n")
