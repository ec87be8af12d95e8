"""What quantization costs and saves on a trained model: bytes, error, held-out loss, and poems to read.

    python3 scripts/quant_report.py [--json OUT.json] [--svg OUT.svg]
    python3 scripts/quant_report.py --backend cuda --device cpu      the same by another backend

The poems and the prompts belong to fixtures/quatrains.json: another ``--fixture`` must have its vocabulary.

For each variant of weights and KV pages:

    weights, KV      bytes of the stored weight matrices beside float32's, and of a token's keys and values
    rms, max error   of the dequantized weights, relative to their root mean square
    logits           root mean square of the change of every logit on the held-out poems
    loss             mean -ln p of a character of poems that training never saw, and its change
    form             share of sampled poems that keep it: four lines of five or of seven characters, ，。，。
    differs at       first position where the greedy continuation leaves the float model's (- never in 28 tokens)
    tokens/s         of the samples, all in one batch

Standard library alone, on the default backend. A backend without int8 pages (cuda) leaves those variants out. The
status is 1 if a threshold of ``THRESHOLDS`` is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import fsum, sqrt
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.quatrains import (
    BOS,
    PAGE_SIZE,
    SCENARIO,
    UNKNOWN,
    keeps_form,
    poem_logits,
    poem_tokens,
    read_held_out,
    surprises,
)
from starter.backend import Backend, load_backend
from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, check_writable, guarded, run_program
from starter.base.tokenizer import CharacterTokenizer
from starter.base.weights import Weights
from starter.base.wings import wing
from starter.engine import InferenceEngine
from starter.errors import SchemaError
from starter.model import Loaded, Model, scenario_weights
from starter.schema import QuantizationConfig, SamplingParams, Scenario, load_scenario

POEM_TOKENS = 39  # at most: four lines of seven with their marks, and the end
GREEDY = ("春眠不觉晓，", "白日依山尽，")  # beginnings that are continued greedily
CALIBRATION_POEMS = 40  # the last of the held-out ones, never the measured ones


@dataclass(frozen=True)
class Variant:
    """How the weights and the KV pages are stored."""

    name: str
    weights: QuantizationConfig | None = None
    calibrated: bool = False
    kv: str | None = None


INT8, INT4 = QuantizationConfig(bits=8), QuantizationConfig(bits=4)
SEARCH = QuantizationConfig(bits=4, symmetric=False, method="search")
VARIANTS = (
    Variant("float"),
    Variant("int8", INT8),
    Variant("int8, a scale a row", QuantizationConfig(bits=8, group_size=None)),
    Variant("int4", INT4),
    Variant("int4, searched", SEARCH),
    Variant("int4, searched, calibrated", SEARCH, calibrated=True),
    Variant("KV int8", kv="int8"),
    Variant("int8 and KV int8", INT8, kv="int8"),
)
THRESHOLDS = {  # variant: (largest rise of the loss in nats, largest share of float32's bytes), form may drop 2 points
    "int8": (0.003, 0.30), "int4, searched, calibrated": (0.03, 0.18), "KV int8": (0.003, 1.1),
}
FORM_DROP = 0.02
WIDER = {"cuda": 0.01}  # backend: so much more of float32's bytes; here zero points are float32, not int16


@dataclass
class Row:
    """What was measured of a variant."""

    name: str
    weight_bytes: int
    weight_share: float  # of float32
    kv_token_bytes: float
    weight_rms: float
    weight_max: float
    layers: dict[str, tuple[float, float]]  # by matrix: rms and max error, relative
    logit_rms: float
    loss: float
    loss_change: float
    form: float
    differs_at: int | None
    tokens_per_second: float
    poem: str


class Report:
    """Measures one variant after another; the first one is what the others are compared with."""

    def __init__(self, scenario: Scenario, poems: int, samples: int,
                 make_backend: Callable[[], Backend] = lambda: load_backend("cpu")) -> None:
        self.scenario, self.samples, self.make_backend = scenario, samples, make_backend
        if lacking := {"□", *GREEDY[0], *GREEDY[1]}.difference(scenario.tokenizer.characters):
            raise SchemaError(f"{scenario.name} cannot write the poems that are measured, its vocabulary lacks "
                              f"{''.join(sorted(lacking))}; take fixtures/quatrains.json, or a model of its vocabulary")
        self.tensors: Weights = scenario_weights(scenario, scenario.weights)
        self.tokenizer = CharacterTokenizer(scenario.tokenizer, scenario.model.bos_token, scenario.model.eos_tokens)
        held_out = [poem_tokens(scenario.tokenizer, poem) for poem in read_held_out()]
        self.poems, self._calibration = held_out[:poems], held_out[-CALIBRATION_POEMS:]
        self._float: tuple[list[list[list[float]]], float, list[list[int]]] | None = None

    def measure(self, variant: Variant) -> Row:
        """Load the model in this form, and everything that is asked of it."""
        importance = self.importance if variant.calibrated else None
        model = Model(self.scenario.model, self.tensors, self.make_backend(), variant.weights, importance)
        logits = [[list(row) for row in poem_logits(model, poem, variant.kv)] for poem in self.poems]
        loss = mean_loss(logits, self.poems)
        greedy = self._greedy(model, variant)
        if self._float is None:
            self._float = logits, loss, greedy
        layers = self._errors(model)
        started = time.perf_counter()
        sampled = list(self._sample(model, variant))
        seconds = time.perf_counter() - started
        numbers = sum(len(tensor.values) for tensor in self.tensors.values() if len(tensor.shape) == 2)
        return Row(
            variant.name, model.weight_bytes, model.weight_bytes / 4 / numbers,
            model.new_store(1, PAGE_SIZE, variant.kv).page_bytes / PAGE_SIZE,
            sqrt(fsum(rms**2 for rms, _ in layers.values()) / len(layers)), max(most for _, most in layers.values()),
            layers, change(logits, self._float[0]), loss, loss - self._float[1],
            sum(keeps_form(text) for text, _ in sampled) / len(sampled), first_difference(greedy, self._float[2]),
            sum(count for _, count in sampled) / seconds, next((text for text, _ in sampled if keeps_form(text)), ""))

    @cached_property
    def importance(self) -> dict[str, list[float]]:
        """How much each column counts, by the float model's inputs on poems that are not measured."""
        model = Model(self.scenario.model, self.tensors, load_backend("cpu"))  # columns meet the same on any
        calibration = wing("calibration.importance", "a calibrated form")
        return dict(calibration.column_importance(model, self._calibration))

    def _errors(self, model: Model) -> dict[str, tuple[float, float]]:
        """By matrix: rms and largest error of the quantized numbers, relative to the matrix's root mean square."""
        errors = {}
        for name, rows in model.parameters().items():
            tensor = self.tensors[name]
            if len(tensor.shape) == 2:
                size = root_mean_square(tensor.values) or 1.0
                off = [abs(a - b) for row, stored in zip(tensor.rows(), rows) for a, b in zip(row, stored)]
                errors[name] = (root_mean_square(off) / size, max(off) / size) if model.quantization else (0.0, 0.0)
        return errors

    def _engine(self, model: Model, variant: Variant) -> InferenceEngine:
        settings = self.scenario.engine.override({
            "page_size": PAGE_SIZE, "num_pages": 4 * self.samples + 8, "max_running": self.samples,
            "budget_tokens": 256, "kv_quantization": variant.kv})
        return InferenceEngine(Loaded(model, self.tokenizer, {}), settings)

    def _greedy(self, model: Model, variant: Variant) -> list[list[int]]:
        masked = SamplingParams(logit_bias={UNKNOWN: -1e6})
        with self._engine(model, variant) as engine:
            return engine.generate([self.tokenizer.encode(text, bos=True) for text in GREEDY], 28, masked)

    def _sample(self, model: Model, variant: Variant) -> Iterator[tuple[str, int]]:
        """(text, tokens) of each poem sampled at temperature 0.8 from nothing; seeds are the same for all variants."""
        with self._engine(model, variant) as engine:
            ids = [engine.submit([BOS], POEM_TOKENS, request_id=str(seed), sampling=SamplingParams(
                temperature=0.8, seed=seed, logit_bias={UNKNOWN: -1e6})) for seed in range(self.samples)]
            engine.run()
            for request_id in ids:
                events = list(engine.stream(request_id))
                yield "".join(event.text for event in events), len(events)


def mean_loss(logits: Iterable[Sequence[Sequence[float]]], poems: Iterable[Sequence[int]]) -> float:
    """Mean -ln p of the poems' tokens after the first; □ is no target."""
    losses = [loss for rows, poem in zip(logits, poems) for loss in surprises(rows, poem)]
    return fsum(losses) / len(losses)


def change(logits: Sequence[Sequence[Sequence[float]]], others: Sequence[Sequence[Sequence[float]]]) -> float:
    """Root mean square of the difference of all logits."""
    return root_mean_square([a - b for rows, known in zip(logits, others) for row, other in zip(rows, known)
                             for a, b in zip(row, other)])


def root_mean_square(numbers: Sequence[float]) -> float:
    return sqrt(fsum(number * number for number in numbers) / len(numbers))


def first_difference(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int | None:
    """The smallest position at which a continuation leaves its other one."""
    positions = [i for tokens, known in zip(texts, others) for i, (a, b) in enumerate(zip(tokens, known)) if a != b]
    return min(positions, default=None)


def missed(rows: Sequence[Row], wider: float = 0.0) -> list[str]:
    """A sentence for each threshold that does not hold; those of the bytes are ``wider``."""
    found, plain = [], rows[0]
    for row in rows:
        if row.name not in THRESHOLDS:
            continue
        most, share = THRESHOLDS[row.name]
        share += wider
        if row.loss_change > most:
            found.append(f"{row.name}: the loss rises by {row.loss_change:.4f} nats; at most {most} is allowed")
        if row.weight_share > share:
            found.append(f"{row.name}: {row.weight_share:.3f} of float32's bytes; at most {share:.2f} are allowed")
        if row.form < plain.form - FORM_DROP - 1e-9:
            found.append(f"{row.name}: {row.form:.0%} of the samples keep the form, {plain.form:.0%} in float")
    return found


def show(rows: Sequence[Row]) -> None:
    """The table, the first sample of three variants beside each other, and what depends on the machine."""
    print(f"{'':27} weights of f32    KV/token   rms err  max err  logits     loss   change   form  differs")
    for row in rows:
        differs = "-" if row.differs_at is None else row.differs_at
        print(f"{row.name:27} {row.weight_bytes:9,} {row.weight_share:5.2f} {row.kv_token_bytes:8,.0f} B "
              f"{row.weight_rms:8.4f} {row.weight_max:8.3f} {row.logit_rms:7.4f} {row.loss:8.4f} "
              f"{row.loss_change:+8.4f} {row.form:6.0%} {differs!s:>8}")
    print("\nThe same seed's poem:")
    for row in rows:
        if row.name in ("float", "int8", "int4, searched, calibrated"):
            print(f"{row.name:27} {row.poem}")
    print("\nTokens a second: " + "; ".join(f"{row.name} {row.tokens_per_second:.0f}" for row in rows))


def drawing(rows: Sequence[Row]) -> str:
    """An SVG figure: bytes of the weights against the rise of the loss, a dot for each variant of the weights."""
    shown = [row for row in rows if "KV" not in row.name]
    highest = max([row.loss_change for row in shown] + [0.001]) * 1.15
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 360" font-family="sans-serif" font-size="13">',
             '<rect width="640" height="360" fill="#fff"/>',
             '<path d="M70 20V300H620" fill="none" stroke="#888"/>',
             '<text x="345" y="345" text-anchor="middle">weight bytes, share of float32</text>',
             '<text transform="translate(20 160) rotate(-90)" text-anchor="middle">rise of the loss, nats</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = 70 + 520 * tick
        parts.append(f'<text x="{x:.0f}" y="318" text-anchor="middle" fill="#555">{tick:g}</text>')
    for tick in (0.0, 0.5, 1.0):
        y = 300 - 270 * tick / 1.15
        parts.append(f'<text x="64" y="{y + 4:.0f}" text-anchor="end" fill="#555">{highest * tick / 1.15:.3f}</text>')
    for i, row in enumerate(shown):
        x, y = 70 + 520 * row.weight_share, 300 - 270 * max(row.loss_change, 0.0) / highest
        anchor, text_x = ("end", x - 9) if row.weight_share > 0.6 else ("start", x + 9)
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#2166ac"/>',
                  f'<text x="{text_x:.1f}" y="{y - 6 - 14 * (i % 2):.1f}" text-anchor="{anchor}">{row.name}</text>']
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixture", default=str(SCENARIO), metavar="FILE",
                        help="a scenario with the vocabulary of fixtures/quatrains.json, the default")
    parser.add_argument("--poems", type=int, default=40, help="held-out poems that the loss is measured on")
    parser.add_argument("--samples", type=int, default=50, help="poems that are sampled for the form")
    parser.add_argument("--backend", default="cpu", metavar="NAME", help="cpu (the default), reference, numpy or cuda")
    parser.add_argument("--device", metavar="NAME", help="of backend cuda: cuda:0 (the default), or cpu, without a GPU")
    parser.add_argument("--json", metavar="OUT.json")
    parser.add_argument("--svg", metavar="OUT.svg")
    options = parser.parse_args(arguments)
    for name in ("poems", "samples"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    return guarded(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Measure, show, write, judge."""
    for path in filter(None, (options.json, options.svg)):
        check_writable(path)
    device = {"device": options.device} if options.device is not None else {}
    make_backend = partial(load_backend, options.backend, **device)
    make_backend()  # one that is not there is told before the work
    variants = [variant for variant in VARIANTS if options.backend != "cuda" or variant.kv is None]
    report = Report(load_scenario(options.fixture), options.poems, options.samples, make_backend)
    rows: list[Row] = []
    with Console(sys.stderr).working() as progress:
        for variant in variants:
            progress(f"{len(rows) + 1} of {len(variants)}: {variant.name}")
            rows.append(report.measure(variant))
    show(rows)
    if options.json:
        document = {"backend": options.backend, "device": options.device, "poems": options.poems,
                    "samples": options.samples, "rows": list(map(asdict, rows))}
        Path(options.json).write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    if options.svg:
        Path(options.svg).write_text(drawing(rows), encoding="utf-8")
    sentences = missed(rows, WIDER.get(options.backend, 0.0))
    for sentence in sentences:
        print(f"missed: {sentence}")
    return EXIT_DIFFERS if sentences else EXIT_OK


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    run_program(main)
