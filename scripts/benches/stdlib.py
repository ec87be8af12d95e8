"""The default backend, which needs no package, in the two shapes of llama2.c (260,000 and 15 million parameters) with
random weights, beside the same weights in llama2-py (pure Python) and in transformers on PyTorch. Everybody decodes
greedily at positions around 128."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from operator import mul
from time import perf_counter
from typing import Any

from scripts.benches.engines import SHAPES, Ours, with_characters
from scripts.benches.peer_engines import llama2_py, transformers
from scripts.benches.rounds import Run, cores, like_ours, machine, measure, quartiles, ratio
from scripts.benches.tables import chart
from scripts.charts import one_below_another
from starter.backend import load_backend
from starter.base.console import Console
from starter.base.weights import seeded_weights
from starter.base.wings import wing
from starter.model import Model
from starter.quantization import quantize
from starter.schema import QuantizationConfig

INT8 = QuantizationConfig(bits=8, group_size=None)  # a scale a row: the codes go into lanes as they are
TOKENS = {"260K": 32, "15M": 8}  # that a contestant decodes in a round


def run(shapes: Sequence[str], rounds: int) -> dict[str, Any]:
    """Products, then every contestant in each shape."""
    with Console(sys.stderr).working("matrix products ..."):
        report: dict[str, Any] = {"suite": "stdlib", "machine": machine(), "products_ns": products(rounds),
                                  "shapes": {}}
    missing = [name for name, module in (("llama2-py", "llama2_py"), ("transformers", "transformers"))
               if not find_spec(module)]
    report["missing"] = missing
    for shape in shapes:
        config, tokens = SHAPES[shape], TOKENS[shape]
        weights = seeded_weights(config, 1)

        def model(quantization: QuantizationConfig | None, backend: str = "cpu") -> Any:
            return with_characters(Model(config, weights, load_backend(backend), quantization))  # noqa: B023

        start = perf_counter()
        floats = model(None)
        loading = perf_counter() - start
        codes = model(INT8)
        ours = {"float, batch 1": Ours(floats, 1, tokens), "int8, batch 1": Ours(codes, 1, tokens),
                "float, batch 8": Ours(floats, 8, tokens // 4), "int8, batch 8": Ours(codes, 8, tokens // 4)}
        if cores() > 1:
            ours["int8, batch 8, two processes"] = Ours(codes, 8, tokens // 4, workers=2)
        if shape == "260K":
            ours["reference, batch 1"] = Ours(model(None, "reference"), 1, 8)
        contestants: dict[str, Run] = dict(ours)
        if "llama2-py" not in missing:
            contestants["llama2-py"] = llama2_py(config, weights, max(2, tokens // 8))
        if "transformers" not in missing:
            contestants["transformers, batch 1"] = transformers(config, weights, 1, tokens)
            contestants["transformers, batch 8"] = transformers(config, weights, 8, tokens)
        results = measure(contestants, rounds)
        report["shapes"][shape] = {
            "load_seconds": loading,
            "bytes_per_weight": (floats.model.weight_bytes + floats.model.working_bytes)
            / sum(len(tensor.values) for tensor in weights.values()),
            "plan": floats.model.backend.plan(),
            "tokens_per_second": results,
            "overhead": {name: one.overhead for name, one in ours.items()}}
        for one in ours.values():
            one.engine.close()
    return report


def products(rounds: int) -> list[dict[str, Any]]:
    """Nanoseconds of one multiply-accumulate of a matrix times a vector, in a loop over rows and in lanes."""
    table = []
    for rows, columns in ((128, 64), (344, 64), (864, 288), (1536, 288), (2048, 288)):
        dice = random.Random(rows)
        matrix = [[dice.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]
        x = [dice.gauss(0, 1) for _ in range(columns)]
        lane_matrix = wing("backends.lanes.lanes", "--suite stdlib").LaneMatrix
        lanes = lane_matrix.of_floats(matrix)
        forms: dict[str, Callable[[], object]] = {
            "loop": lambda: [sum(map(mul, row, x)) for row in matrix],  # noqa: B023 - called before the next turn
            "14-bit lanes": lambda: lanes.times(x),  # noqa: B023
        }
        for bits, name in ((8, "int8 lanes"), (4, "int4 lanes")):
            packed = lane_matrix.of_codes(quantize(matrix, QuantizationConfig(bits, None)))
            forms[name] = lambda packed=packed: packed.times(x)  # type: ignore[misc]  # noqa: B023
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(max(5, rounds)):
            for name, form in forms.items():
                repeats = max(1, 400_000 // (rows * columns))
                start = perf_counter()
                for _ in range(repeats):
                    form()
                times[name].append((perf_counter() - start) / repeats / rows / columns * 1e9)
        table.append({"rows": rows, "columns": columns,
                      **{name: statistics.median(values) for name, values in times.items()}})
    return table


def show(report: dict[str, Any], console: Console) -> None:
    """The tables."""
    for name in report["missing"]:
        extra = {"llama2-py": "peers", "transformers": "oracle"}[name]
        console.line(f"{name} is not installed: pip install '.[{extra}]'")
    console.line("\nns a multiply-accumulate   loop   14-bit lanes   int8 lanes   int4 lanes")
    for row in report["products_ns"]:
        size = f"{row['rows']} x {row['columns']}"
        console.line(f"{size:24} {row['loop']:6.1f} {row['14-bit lanes']:14.2f} {row['int8 lanes']:12.2f} "
                     f"{row['int4 lanes']:12.2f}")
    for shape, found in report["shapes"].items():
        results = found["tokens_per_second"]
        console.line(f"\n{shape} shape: loaded in {found['load_seconds']:.1f} s, "
                     f"{found['bytes_per_weight']:.1f} bytes a weight")
        console.line(f"{'':32} tokens/s   (middle half)      x llama2-py   x transformers   engine's own time")
        for name, values in results.items():
            low, middle, high = quartiles(values)
            own = found["overhead"].get(name)
            peers = [ratio(values, results.get(peer)) for peer in ("llama2-py", like_ours(name))]
            console.line(f"{name:32} {middle:8.1f}   ({low:8.1f} to {high:8.1f}) {peers[0]:>9} {peers[1]:>14} "
                         f"{'' if own is None else f'{own:14.1%}'}".rstrip())


def picture(report: dict[str, Any]) -> str:
    """Bars for each shape, as SVG."""
    results = {shape: found["tokens_per_second"] for shape, found in report["shapes"].items()}
    return one_below_another([
        chart(f"{shape} shape, tokens/s", {name: quartiles(values) for name, values in found.items()})
        for shape, found in results.items()])
