"""How far each fast or small form is from double precision, on any checkpoint: the measurements behind DESIGN.md.

    python3 scripts/accuracy.py [--checkpoint MODEL] [--texts 4] [--tokens 256] [--json OUT.json]

Without a checkpoint it measures the quatrain model. The texts are drawn from the model itself (temperature 1, fixed
seeds), so that everybody measures on the same ones. Forms of the weights run on the default backend, as they are used;
formats of 8-bit keys and values on the reference backend, which rounds them as it stores them and changes nothing else:

    one scale a token        of each head, 127 steps to its largest number
    ... less the mean        the same, after subtracting each channel's mean over the first 64 tokens of a text
    a grid fixed in advance  for each channel, from those but the first; what lies beyond it is cut off
    by channel, page of 16   a grid for each channel of 16 tokens (KIVI; int8 pages also keep the newest exact)

    logits    mean and largest change;   argmax   positions whose likeliest token changes
    loss      change of the mean -ln p of the text's tokens, in nats
    greedy    how many tokens from nothing agree, of so many as a text has
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp, fsum, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.quatrains import SCENARIO
from starter.backend import Batch, Piece, ReferenceKVStore, Rows, load_backend
from starter.base.console import Console, check_writable, guarded, run_program
from starter.base.model_config import ModelConfig, QuantizationConfig
from starter.base.weights import Weights
from starter.base.wings import wing
from starter.model import Model, scenario_weights
from starter.schema import load_scenario

PAGE, SEEN = 16, 64  # tokens of a page; tokens that a mean and a fixed grid come from
Logits = Sequence[Sequence[float]]
Format = Callable[[Rows], Rows]  # numbers of one head, token after token -> the same, rounded

WEIGHTS = {  # backend, quantization, calibrated
    "float": ("cpu", None, False),
    "int8, a scale a row": ("cpu", QuantizationConfig(bits=8, group_size=None), False),
    "int4, a scale a row": ("cpu", QuantizationConfig(bits=4, group_size=None), False),
    "int8": ("cpu", QuantizationConfig(bits=8), False),
    "int4": ("cpu", QuantizationConfig(bits=4), False),
    "int4, searched": ("cpu", QuantizationConfig(bits=4, symmetric=False, method="search"), False),
    "int4, searched, calibrated": ("cpu", QuantizationConfig(bits=4, symmetric=False, method="search"), True),
}


# ------------------------------------------------------------------------------------- formats of keys and values


def exact(rows: Rows) -> Rows:
    """Doubles."""
    return rows


def by_token(rows: Rows) -> Rows:
    """One scale a token."""
    encode = wing("backends.int8_pages", "a format of int8 pages").encode_value
    return [[scale * code for code in codes] for codes, scale in map(encode, rows)]


def centred(rows: Rows) -> Rows:
    """One scale a token, less each channel's mean."""
    means = [fsum(channel) / len(channel) for channel in zip(*rows[:SEEN])]
    moved = by_token([[number - mean for number, mean in zip(row, means)] for row in rows])
    return [[number + mean for number, mean in zip(row, means)] for row in moved]


def fixed(rows: Rows) -> Rows:
    """For each channel the mean and the largest distance from it, of the tokens after the first; 127 steps to it."""
    grids = []
    for channel in zip(*rows[1:SEEN]):
        mean = fsum(channel) / len(channel)
        grids.append((mean, max(abs(number - mean) for number in channel) / 127 or 1.0))
    return [[mean + scale * max(-127, min(127, round((number - mean) / scale)))
             for number, (mean, scale) in zip(row, grids)] for row in rows]


def by_channel(rows: Rows) -> Rows:
    """A grid for each channel of a page."""
    pages = [rows[i:i + PAGE] for i in range(0, len(rows), PAGE)]
    return [list(row) for page in pages for row in zip(*map(_decoded, zip(*page)))]


def _decoded(channel: Sequence[float]) -> list[float]:
    codes, low, scale = wing("backends.int8_pages", "a format of int8 pages").encode_keys(channel)
    return [low + scale * code for code in codes]


PAGES = {  # keys, values
    "keys: one scale a token": (by_token, exact), "keys: ... less the mean": (centred, exact),
    "keys: a grid fixed in advance": (fixed, exact), "keys: by channel, page of 16": (by_channel, exact),
    "values: one scale a token": (exact, by_token),
}


class RoundingStore(ReferenceKVStore):
    """Doubles, rounded by a format for keys and one for values as they are stored; a whole text at once."""

    def __init__(self, config: ModelConfig, tokens: int, keys: Format, values: Format) -> None:
        super().__init__(config.layers, config.kv_heads, config.head_width, 1, tokens)
        self._formats = keys, values

    def write_layer(self, layer: int, slots: Sequence[int], k: Rows, v: Rows) -> None:
        super().write_layer(layer, slots, *(self._rounded(rows, form) for rows, form in zip((k, v), self._formats)))

    def _rounded(self, rows: Rows, form: Format) -> Rows:
        width = self.head_width
        heads = [form([list(row[i:i + width]) for row in rows]) for i in range(0, self.row_width, width)]
        return [[number for head in token for number in head] for token in zip(*heads)]


# ---------------------------------------------------------------------------------------------------- measuring


@dataclass
class Row:
    """What was measured of a form."""

    name: str
    mean_logit: float
    largest_logit: float
    flips: int
    positions: int
    loss_change: float
    greedy_agree: int | None


class Measurement:
    """A model's texts, and what the reference makes of them."""

    def __init__(self, config: ModelConfig, weights: Weights, texts: int, tokens: int) -> None:
        self.config, self.weights = config, weights
        self.tokens = min(tokens, config.max_context)
        self.reference = Model(config, weights, load_backend("reference"))
        drawn = [self._drawn(seed) for seed in range(texts + 1)]
        self.texts, self._calibration = drawn[:texts], drawn[texts:]
        self._exact = [self._logits(self.reference, text) for text in self.texts]
        self._greedy = self._continued(self.reference)

    def weights_in(self, name: str) -> Row:
        """A form of the weights, on the backend that uses it."""
        backend, quantization, calibrated = WEIGHTS[name]
        importance = wing("calibration.importance", f"the form {name!r}").column_importance(
            self.reference, self._calibration) if calibrated else None
        model = Model(self.config, self.weights, load_backend(backend), quantization, importance)
        greedy = self._continued(model)
        agree = next((i for i, (a, b) in enumerate(zip(greedy, self._greedy)) if a != b), len(greedy))
        return self._row(name, [self._logits(model, text) for text in self.texts], agree)

    def pages_in(self, name: str) -> Row:
        """A format of keys or values, all else exact."""
        store = RoundingStore(self.config, self.tokens, *PAGES[name])
        return self._row(name, [self._logits(self.reference, text, store) for text in self.texts], None)

    def _row(self, name: str, logits: list[Logits], agree: int | None) -> Row:
        changes, flips, loss = [], 0, []
        for rows, exact_rows, text in zip(logits, self._exact, self.texts):
            for row, known, target in zip(rows, exact_rows, text[1:]):
                changes += [abs(a - b) for a, b in zip(row, known)]
                flips += row.index(max(row)) != known.index(max(known))
                loss.append(surprise(row, target) - surprise(known, target))
        return Row(name, fsum(changes) / len(changes), max(changes), flips, len(loss), fsum(loss) / len(loss), agree)

    def _logits(self, model: Model, text: Sequence[int], store: ReferenceKVStore | None = None) -> Logits:
        """After every token but the last."""
        batch = Batch.of([Piece(text[:-1], 0, (0,), wants_logits=len(text) - 1)], self.tokens)
        return model.forward(batch, store or model.new_store(1, self.tokens))

    def _drawn(self, seed: int) -> list[int]:
        """A text from the model itself, past any end of sequence."""
        dice = random.Random(seed)
        return self._generated(self.reference, lambda row: dice.choices(range(len(row)), _odds(row))[0])

    def _continued(self, model: Model) -> list[int]:
        return self._generated(model, lambda row: row.index(max(row)))

    def _generated(self, model: Model, choose: Callable[[Sequence[float]], int]) -> list[int]:
        store = model.new_store(1, self.tokens)
        text = [self.config.bos_token or 0]
        while len(text) < self.tokens:
            batch = Batch.of([Piece(text[-1:], len(text) - 1, (0,), wants_logits=True)], self.tokens)
            text.append(choose(model.forward(batch, store)[0]))
        return text


def _odds(logits: Sequence[float]) -> list[float]:
    highest = max(logits)
    return [exp(logit - highest) for logit in logits]


def surprise(logits: Sequence[float], target: int) -> float:
    """-ln p of a token."""
    return max(logits) - logits[target] + log(fsum(_odds(logits)))


def show(rows: Sequence[Row]) -> None:
    """The table."""
    print(f"{'':32} logits: mean  largest   argmax differs   loss change   greedy tokens equal")
    for row in rows:
        greedy = "" if row.greedy_agree is None else f"{row.greedy_agree:12}"
        print(f"{row.name:32} {row.mean_logit:12.5f} {row.largest_logit:8.3f} {row.flips:6} of {row.positions:5,} "
              f"{row.loss_change:+13.5f} {greedy}".rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", metavar="MODEL", help="default: the quatrain model")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of a text, if the model's context has room for them")
    parser.add_argument("--json", metavar="OUT.json")
    options = parser.parse_args(arguments)
    for name, least in (("texts", 1), ("tokens", 3)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, not {getattr(options, name)}")
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.json is not None:
        check_writable(options.json)
    with Console(sys.stderr).working("drawing texts") as progress:
        if options.checkpoint is None:
            scenario = load_scenario(SCENARIO)
            config, weights = scenario.model, scenario_weights(scenario, scenario.weights)
        else:
            reader = wing("checkpoints.load", "--checkpoint")
            checkpoint = reader.read_checkpoint(Path(options.checkpoint), progress)
            config, weights = checkpoint.config, checkpoint.weights
        measurement = Measurement(config, weights, options.texts, options.tokens)
        rows = []
        for measure, names in ((measurement.weights_in, WEIGHTS), (measurement.pages_in, PAGES)):
            for name in names:
                progress(name)
                rows.append(measure(name))
    show(rows)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(list(map(asdict, rows)), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_program(main)
