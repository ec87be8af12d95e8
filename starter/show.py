"""What the driver prints of a scenario: its manifest, a line for each step, the results, the metrics."""

from __future__ import annotations

from starter.console import Console, Table
from starter.decisions import counted
from starter.engine import InferenceEngine
from starter.metrics import Metrics, Summary
from starter.play import Played, tokens_of
from starter.schema import EngineSettings, Request, Scenario, SeededWeights, TokenEvent
from starter.tokenizer import CharacterTokenizer


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
