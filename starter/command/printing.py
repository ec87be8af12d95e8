"""What is printed of a run: the manifest, a line for each step or several, results, metrics, the verdict.

``amount`` is what --steps says: "few" (at most STEP_LINES lines of steps and REQUEST_ROWS requests, and how many more
there are), "all", or "none" of the steps.
"""

from __future__ import annotations

import json
from math import inf

from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, Table
from starter.base.statistics import Summary
from starter.base.tokenizer import CharacterTokenizer
from starter.command.play import Played, tokens_of
from starter.engine import InferenceEngine
from starter.metrics import Metrics
from starter.scheduler import counted
from starter.schema import Scenario, SeededWeights, TokenEvent


def print_json(document: object) -> None:
    """The one document of ``--json``: ASCII, so that any console can show it."""
    print(json.dumps(document, allow_nan=False))


STEP_LINES = 120
REQUEST_ROWS = 40


def print_manifest(scenario: Scenario, console: Console, amount: str = "all") -> None:
    """What the scenario is: model, weights, engine settings, requests."""
    model, engine, weights = scenario.model, scenario.engine, scenario.weights
    source = f"seed {weights.seed}" if isinstance(weights, SeededWeights) else weights.path
    bits = f"int{scenario.quantization.bits}" if scenario.quantization else "float"
    pages = f"{engine.kv_quantization} pages" if engine.kv_quantization else "pages"
    console.line(f"Scenario {scenario.name!r}: {scenario.description}")
    console.line(f"  model      {model.layers} layers, width {model.width}, {model.heads} heads over {model.kv_heads} "
                 f"KV heads, ffn {model.ffn_width}, vocabulary {model.vocab_size}, context {model.max_context}")
    console.line(f"  weights    {source}, {bits}, sha256 {(weights.sha256 or 'not recorded')[:16]}")
    console.line(f"  engine     {engine.num_pages} {pages} of {engine.page_size} tokens, budget {engine.budget_tokens} "
                 f"tokens a step, at most {engine.max_running} running, {engine.batching} batching, {engine.policy}")
    console.line(f"  requests   {len(scenario.requests)}, and {len(scenario.events)} cancelled on the way")
    tokenizer = CharacterTokenizer(scenario.tokenizer, model.bos_token, model.eos_tokens)
    table = Table("request", "arrives", "prompt", "max", "text")
    shown = scenario.requests if amount == "all" else scenario.requests[:REQUEST_ROWS]
    for request in shown:
        text = tokenizer.decode(request.prompt_tokens)
        table.add(request.request_id, f"step {request.arrival:g}", len(request.prompt_tokens), request.max_tokens,
                  repr(text if len(text) <= 34 else text[:31] + "..."))
    table.show(console, indent="    ")
    if len(shown) < len(scenario.requests):
        console.line(f"    ... and {len(scenario.requests) - len(shown)} more (--steps all prints them)")


class StepPrinter:
    """The table of steps. Consecutive steps in which the same requests decode, and nothing else happens, share a line:

        step    tokens  pages  prefill           tokens out
        0        16/16  10/20  exact+7 across+8  single'q'
        9-10      4/16  20/20                    exact'uz' across'..' single'r?' long'm'
                   . late waits: needs 4 pages, 1 free; long frees 8 at its end, at most 21 tokens away
    """

    LONGEST_RUN = 16  # steps on one line

    def __init__(self, engine: InferenceEngine, console: Console, amount: str = "all") -> None:
        self._engine, self._console = engine, console
        self._room = {"all": inf, "few": STEP_LINES, "none": 0}[amount]  # lines that may still be printed
        self._left_out = 0
        self._steps: list[int] = []  # of the line in the making
        self._batch = ""  # tokens, pages and prefills of the last of them
        self._texts: dict[str, str] = {}
        self._explained: set[str] = set()
        if self._room:
            console.line("step    tokens  pages  prefill, then tokens out")

    def show(self, played: Played) -> None:
        """Take one step into the table."""
        decision, kv = played.decision, self._engine.kv
        prefills = [f"{chunk.request_id}+{chunk.count}" for chunk in decision.chunks if chunk.phase == "prefill"]
        texts, notes = _texts(played.events), self._notes(played)
        if prefills or notes or texts.keys() != self._texts.keys() or len(self._steps) == self.LONGEST_RUN:
            self.flush()
        self._steps.append(decision.step)
        self._texts = {name: self._texts.get(name, "") + text for name, text in texts.items()}
        self._batch = (f"{decision.scheduled_tokens:>4}/{decision.budget_tokens:<3} "
                       f"{kv.total_pages - kv.free_pages:>3}/{kv.total_pages:<3} {' '.join(prefills)}")
        if prefills or notes:
            self.flush()
        else:
            self._console.progress(self._line())
        for note in notes:
            self._print(f"          . {note}", indent=12)

    def flush(self) -> None:
        """Print the line in the making."""
        if self._steps:
            self._console.progress("")
            self._print(self._line(), indent=23)
        self._steps, self._texts = [], {}

    def end(self) -> None:
        """Print what is left, or how much was left out."""
        self.flush()
        if self._left_out:
            self._console.line(f"... and {self._left_out} more lines of steps (--steps all prints them)")

    def _print(self, line: str, indent: int) -> None:
        if self._room:
            self._room -= 1
            self._console.line(line, indent)
        else:
            self._left_out += 1

    def _line(self) -> str:
        first, last = self._steps[0], self._steps[-1]
        steps = f"{first}" if first == last else f"{first}-{last}"
        out = " ".join(f"{request_id}{text!r}" for request_id, text in self._texts.items())
        return f"{steps:7} {self._batch} {out}".rstrip()

    def _notes(self, played: Played) -> list[str]:
        """A sentence for each refusal, preemption and ending, and the first time for why a request waits."""
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
    """The text of each sample's tokens; samples without a token are left out."""
    texts: dict[str, str] = {}
    for event in events:
        if event.token is not None:
            texts[event.sequence_id] = texts.get(event.sequence_id, "") + event.text
    return texts


def _ending(event: TokenEvent, at_eos: bool) -> str:
    stop = "ends with an end-of-sequence token" if at_eos else "ends at a stop token or stop string"
    sentences = {"stop": stop, "length": "ends: it has all its tokens",
                 "cancelled": "was cancelled", "error": f"ends with an error: {event.error}"}
    return sentences[event.finish_reason or "error"]


def print_results(events: list[TokenEvent], refused: dict[str, str], verdicts: dict[str, str], console: Console,
                  amount: str = "all") -> None:
    """A line for each request: tokens, how it ended, golden or not, its text, or why it was refused. Of many, those
    that did not end as they should come first."""
    console.line()
    table = Table("request", "tokens", "ended", "golden", "text")
    texts = _texts(events)
    ends = {event.sequence_id: event.finish_reason for event in events}
    rows = [(sample, len(tokens), ends[sample] or "", verdicts.get(sample, "-"), repr(texts.get(sample, "")))
            for sample, tokens in tokens_of(events).items()]
    rows += [(request_id, 0, "refused", verdicts.get(request_id, "-"), reason)
             for request_id, reason in refused.items()]
    shown = rows
    if amount != "all" and len(rows) > REQUEST_ROWS:
        shown = sorted(rows, key=lambda row: row[2] not in ("error", "refused") and row[3] != "differs")[:REQUEST_ROWS]
    for row in shown:
        table.add(*row)
    table.show(console)
    if len(shown) < len(rows):
        console.line(f"... and {len(rows) - len(shown)} more (--steps all prints them)")


def print_metrics(metrics: Metrics, clock: str, console: Console) -> None:
    """The metric table."""
    unit, scale = ("steps", 1.0) if clock == "virtual" else ("ms", 1000.0)
    rate = f", {metrics.tokens_per_second:.1f} tokens/s" if metrics.tokens_per_second and clock == "real" else ""
    used = "-" if metrics.batch_utilization is None else f"{metrics.batch_utilization:.0%}"
    most = counted(metrics.active_peak, "request")
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
        ("batch utilization", f"{used} of the budget, up to {most} in a step"),
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


def print_verdict(given: Scenario, played: Scenario, verdicts: dict[str, str], console: Console) -> int:
    """Print whether the outputs equal the golden tokens, and return the exit code. Golden tokens belong to the weights
    and KV pages as the ``given`` scenario quantizes them; ``played`` has the options applied."""
    quantized, golden_quantized = ((one.quantization, one.engine.kv_quantization) for one in (played, given))
    differing = [request_id for request_id, verdict in verdicts.items() if verdict == "differs"]
    console.line()
    if played.golden is None:
        console.line("This scenario has no golden tokens to compare with.")
    elif not differing:
        others = len(played.requests) - len(verdicts)
        without = f"; {counted(others, 'request')} more without golden tokens" if others else ""
        console.line(f"All {len(verdicts)} outputs equal the golden tokens{without}.", colour="green")
    elif quantized == golden_quantized:
        console.line(f"The output DIFFERS from the golden tokens: {', '.join(differing)}", colour="red")
        return EXIT_DIFFERS
    else:
        console.line(f"The golden tokens belong to other numbers than these quantized ones; "
                     f"{len(verdicts) - len(differing)} of {len(verdicts)} outputs agree all the same.")
    return EXIT_OK
