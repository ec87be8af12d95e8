"""A scenario or prompts, run as the options say."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from starter.backend import Backend, load_backend
from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, complain
from starter.base.wings import wing
from starter.command.options import STORED
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
from starter.model import quantization_config
from starter.schema import (
    EngineSettings,
    QuantizationConfig,
    SamplingParams,
    Scenario,
    TokenEvent,
    load_scenario,
    sample_id,
)
from starter.timeline import VirtualClock

# --------------------------------------------------------------------------------------------- what the options ask for


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Engine settings that were given on the command line."""
    names = ("page_size", "num_pages", "budget_tokens", "max_running", "policy", "batching", "preemption", "host_pages",
             "prefix_sharing", "workers", "use_cache", "seed")
    settings = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.kv_quantization is not None:
        settings["kv_quantization"] = None if options.kv_quantization == "none" else options.kv_quantization
    return settings


def _backend(options: argparse.Namespace) -> Backend:
    given = {name: getattr(options, name) for name in ("device", "dtype") if getattr(options, name) is not None}
    return load_backend(options.backend, **given)


def _quantization(options: argparse.Namespace, default: QuantizationConfig | None) -> QuantizationConfig | None:
    if options.quantization is None:
        return default
    config = quantization_config(None if options.quantization == "none" else options.quantization)
    assert not callable(config)  # an option is a name
    return config


def _clock(options: argparse.Namespace) -> Callable[[], float]:
    return VirtualClock() if options.clock == "virtual" else time.perf_counter


# --------------------------------------------------------------------------------------------------------- the two runs


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
    aside = Console(sys.stderr, quiet=options.quiet or not options.json)  # progress, when stdout is kept for JSON
    with console.working(f"loading {scenario.name}"), aside.working(f"loading {scenario.name}"):
        engine = InferenceEngine.from_scenario(scenario, _backend(options), clock=_clock(options))
    with _recorded(engine, options), engine, aside.working() as progress:
        events, refused = _play(engine, scenario, console, progress)
        metrics = engine.metrics()
    verdicts = compare(scenario, tokens_of(events))
    if options.json:
        print_json({"scenario": scenario.name, "backend": engine.model.backend.name,
                    "tokens": tokens_of(events), "refused": refused, "golden": verdicts, "metrics": metrics.to_dict()})
    else:
        print_results(events, refused, verdicts, console)
        print_metrics(metrics, options.clock, console)
    return print_verdict(given, scenario, verdicts, console)


@contextmanager
def _recorded(engine: InferenceEngine, options: argparse.Namespace) -> Iterator[None]:
    """Write the timeline while the block runs, and at its end the trace and the report, where asked for. The engine is
    closed within the block, so that the ends of an interrupted run are on record, too."""
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


def _play(engine: InferenceEngine, scenario: Scenario, console: Console,
          progress: Callable[[str], None]) -> tuple[list[TokenEvent], dict[str, str]]:
    """Run the scenario and print each step. Returns all events, and by request id why requests were refused."""
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
    """"equal" or "differs" for each request with golden tokens; of a cancelled one, a prefix of them is enough."""
    cancelled = {event.cancel for event in scenario.events}
    verdicts = {}
    for request_id, golden in (scenario.golden.tokens if scenario.golden else {}).items():
        got = tokens.get(request_id)
        expected = list(golden)[:len(got)] if got is not None and request_id in cancelled else list(golden)
        verdicts[request_id] = "equal" if got == expected else "differs"
    return verdicts


def run_prompts(options: argparse.Namespace, console: Console) -> int:
    """Continue one or several prompts, or answer messages, with a checkpoint, streaming."""
    reader, chat = wing("checkpoints.load", "--checkpoint"), wing("checkpoints.chat", "--chat")
    settings = EngineSettings().override({"budget_tokens": 64, "page_size": 16, **_settings(options)})
    quantization = STORED if options.quantization == STORED else _quantization(options, None)
    with console.working(f"loading {options.checkpoint}") as progress:
        loaded = reader.load_checkpoint_model(options.checkpoint, _backend(options), quantization, progress)
    engine = InferenceEngine(loaded, settings, _clock(options))
    with _recorded(engine, options), engine:
        sampling = SamplingParams(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
                                  n=options.n, stop=options.stop)
        texts: dict[str, str] = {}
        for i, prompt in enumerate(options.chat or options.prompt or [""], start=1):
            tokens, ends = (chat.chat_prompt(engine.tokenizer, prompt) if options.chat
                            else (engine.tokenizer.encode(prompt, bos=True), ()))
            request_id = engine.submit(tokens, options.max_tokens, request_id=f"prompt-{i}", sampling=sampling,
                                       stop_tokens=ends)
            texts |= dict.fromkeys((sample_id(request_id, number) for number in range(options.n)),
                                   f"> {prompt}\n" if options.chat else prompt)
        failures = _stream(engine, texts, console)
        metrics = engine.metrics()
    if options.json:
        print_json({"texts": texts, "failures": failures, "metrics": metrics.to_dict()})
    else:
        print_metrics(metrics, options.clock, console)
    for name, failure in failures.items():
        complain(f"error: {name} did not finish: {failure}")
    return EXIT_DIFFERS if failures else EXIT_OK


def _stream(engine: InferenceEngine, texts: dict[str, str], console: Console) -> dict[str, str]:
    """Generate all texts at once, but print them one after another: the first as it comes, then the second, starting
    with what it has produced by then, and so on. ``texts`` holds the prompts and grows; returns failures by name."""
    failures, ended = {}, set()
    for shown in texts:
        if len(texts) > 1:
            console.line(f"--- {shown}")
        length = 0
        while shown not in ended and (live := engine.active):
            console.write(texts[shown][length:])
            length = len(texts[shown])
            engine.step()
            for event in [event for request_id in live for event in engine.poll(request_id)]:
                name = event.sequence_id
                texts[name] += event.text
                if event.finish_reason:
                    ended.add(name)
                if event.error:
                    failures[name] = event.error
        console.line(texts[shown][length:])
    return failures
