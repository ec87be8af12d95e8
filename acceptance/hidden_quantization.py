"""Hidden tests of M5: shapes, numbers and formats drawn at random; engines on quantized weights and pages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from harness import SkipPart
from hidden_case import Hidden, drawn, model, tokens
from m5_quantization import M5Quantization, explain, groups

import starter

NATURES = {  # of a group's numbers: x is uniform in [-1, 1], s a size of the group's own
    "normal": lambda x, s, i: x * s, "zeros": lambda x, s, i: 0.0, "constant": lambda x, s, i: s,
    "negative constant": lambda x, s, i: -s, "positive": lambda x, s, i: s * (2 + x),
    "negative": lambda x, s, i: -s * (2 + x), "far away": lambda x, s, i: 1e6 + x, "tiny": lambda x, s, i: x * 1e-30,
    "subnormal": lambda x, s, i: x * 1e-310, "huge": lambda x, s, i: x * 1e308,
    "one": lambda x, s, i: 0.0 if i else s, "outlier": lambda x, s, i: x * 1e-3 if i else -1e4 * s}
ORDINARY = ("normal", "positive", "negative", "one")


def config(rng, columns):
    """A format, as keywords."""
    return {"bits": rng.choice([8, 4]), "symmetric": rng.random() < 0.5,
            "group_size": rng.choice([1, 2, 7, 16, 32, columns + 3, None])}


def matrix(rng, natures, rows, columns, group_size):
    """Numbers, group by group, each group of another nature."""
    made, pick = [], list(natures)
    for _ in range(rows):
        row: list[float] = []
        while len(row) < columns:
            nature, size = NATURES[rng.choice(pick)], 10 ** rng.uniform(-3, 3)
            row += [nature(rng.uniform(-1, 1), size, i) for i in range(group_size or columns)]
        made.append(row[:columns])
    return made


def strange_groups(rng):
    """Matrices of groups of every nature."""
    drawn = []
    for _ in range(12):
        rows, columns = rng.randint(1, 5), rng.randint(1, 70)
        how = config(rng, columns)
        drawn.append({"config": how, "rows": matrix(rng, NATURES, rows, columns, how["group_size"])})
    for bits in (8, 4):
        for symmetric in (True, False):  # each format meets each nature, in groups that a row's end cuts short
            how = {"bits": bits, "symmetric": symmetric, "group_size": rng.randint(6, 9)}
            drawn.append({"config": how, "rows": [row for nature in NATURES for row in matrix(
                rng, [nature], 1, rng.randint(20, 30) // 2 * 2, how["group_size"])]})
    for each in drawn[12:]:
        shortest = min(map(len, each["rows"]))
        each["rows"] = [row[:shortest] for row in each["rows"]]
    return drawn


def formats(rng):
    """Ordinary matrices in every format, and what is no format."""
    drawn = []
    for bits in (8, 4):
        for symmetric in (True, False):
            rows, columns = rng.randint(3, 6), 2 * rng.randint(8, 20)
            made = matrix(rng, ORDINARY, rows, columns, 8)
            at = [rng.randrange(rows), 8 * rng.randrange(columns // 8)]
            made[at[0]][at[1]:at[1] + 3] = [0.0, -1.0, 1.0]  # its code has neighbours in every format
            drawn.append({"config": {"bits": bits, "symmetric": symmetric, "group_size": 8}, "rows": made, "at": at,
                          "spoiled": [rng.randrange(rows), rng.randrange(columns)]})
    return {"tensors": drawn, "bits": rng.sample([0, 1, 2, 3, 5, 16, -8, 8.0, True, "8", None], 6),
            "group_sizes": rng.sample([0, -1, -9, 2.0, True, "32"], 4),
            "not_finite": rng.choice(["nan", "inf", "-inf"])}


def quantized_engine(rng):
    """A model, a format for its weights, and prompts."""
    made = model(rng)
    how = rng.choice(["int8", "int4", {"bits": 8, "group_size": rng.choice([5, 16, None]), "symmetric": False},
                      {"bits": 4, "group_size": rng.choice([4, 8]), "symmetric": rng.random() < 0.5}])
    return {**made, "quantization": how, "prompts": [tokens(rng, made, rng.randint(1, 12)) for _ in range(3)]}


def quantized_pages(rng):
    """A prompt and its neighbours."""
    made = model(rng)
    return {**made, "prompt": tokens(rng, made, rng.randint(9, 20)), "settings": {"page_size": rng.randint(2, 8)}}


def searched(rng):
    """Normal weights, and how much each column counts."""
    return {"rows": [[rng.gauss(0, 1) for _ in range(96)] for _ in range(12)],
            "importance": [rng.choice([0.0, 0.1, 1.0, 30.0]) for _ in range(96)], "symmetric": rng.random() < 0.5}


def in_format(how):
    """The quantization setting that a drawn one stands for."""
    return starter.QuantizationConfig(**how) if isinstance(how, dict) else how


class HiddenQuantization(Hidden):
    check_error: Callable[..., None] = M5Quantization.check_error

    @drawn("B12", "M5", strange_groups, times=3)
    def test_strange_groups(self, scenario):
        """B12: whatever a group holds, each number is within half a step, and explained by the metadata alone."""
        for each in scenario:
            rows, how = each["rows"], each["config"]
            columns, size = len(rows[0]), how["group_size"]
            self.case = f"{len(rows)} x {columns} numbers, {how}"
            self.check_error(rows, how["bits"], how["symmetric"], size)
            q = starter.quantize(rows, in_format(how))
            back = [list(row) for row in starter.dequantize(q)]
            most = 2 ** how["bits"]
            self.that(all(len(set(group)) <= most for group in groups(back, size)),
                      f"more than {most} different numbers in a group", "codes have to be rounded")
            exact = len(rows) * columns * how["bits"] / 8
            self.that(exact <= len(q.packed) <= exact + len(rows), f"{len(q.packed)} packed bytes, not {exact}",
                      "int8 takes a byte a number, int4 half of one")
            self.same(len(q.scales), len(rows) * -(-columns // (size or columns)), "a scale for each group")
            if how["bits"] == 8 or columns % 2 == 0:
                self.that(any(all(map(self.close, groups(back, size), groups(explain(q, signed), size)))
                              for signed in (True, False)), "dequantize differs from its metadata",
                          "number = scale * (code - zero point)")
            self.round_trip(q, back)

    def close(self, group, other):
        room = 1e-9 * max(map(abs, group)) + 1e-320
        return all(abs(a / 2 - b / 2) <= room for a, b in zip(group, other))

    def round_trip(self, q, back):
        again = starter.QuantizedTensor.from_dict(json.loads(json.dumps(q.to_dict())))
        self.same([list(row) for row in starter.dequantize(again)], back, "to_dict, JSON and from_dict")

    @drawn("B13", "M5", formats, times=2)
    def test_formats(self, scenario):
        """B13: what is no format, no number, or contradicts itself is refused; the packed codes are what counts."""
        for each in scenario["tensors"]:
            self.case = f"{len(each['rows'])} x {len(each['rows'][0])} numbers, {each['config']}"
            self.one_format(each, scenario["not_finite"])
        self.case = "what is no format"
        for bits in scenario["bits"]:
            self.refuses(starter.QuantizationError, lambda b=bits: starter.QuantizationConfig(bits=b), f"bits {bits!r}")
        for size in scenario["group_sizes"]:
            self.refuses(starter.QuantizationError, lambda s=size: starter.QuantizationConfig(group_size=s),
                         f"group_size {size!r}")

    def one_format(self, each, not_finite):
        rows, how, (r, c) = each["rows"], in_format(each["config"]), each["at"]
        q, columns = starter.quantize(rows, how), len(rows[0])
        back = [list(row) for row in starter.dequantize(q)]
        off = [a - b for before, after in zip(rows, back) for a, b in zip(before, after)]
        norm = math.sqrt(sum(x * x for row in rows for x in row))
        size = math.sqrt(sum(x * x for x in off))
        told = q.error(rows)
        for name, got, wanted in (("max_abs", told.max_abs, max(map(abs, off))),
                                  ("rmse", told.rmse, size / math.sqrt(len(off))),
                                  ("relative", told.relative, size / norm)):
            self.that(abs(got - wanted) <= 1e-9 * max(1, wanted), f"error().{name} is {got}, recomputed {wanted}",
                      "measure, do not guess")

        document: Any = q.to_dict()
        index = r * columns + c
        place = 2 * index + 1 if how.bits == 8 else index + 1 - 2 * (index % 2)  # the low nibble is the second digit
        digits = list(document["packed"])
        digits[place] = f"{int(digits[place], 16) ^ 1:x}"
        changed = starter.dequantize(starter.QuantizedTensor.from_dict({**document, "packed": "".join(digits)}))
        moved = [(i, j) for i, row in enumerate(changed) for j, x in enumerate(row) if x != back[i][j]]
        step = q.scales[r * -(-columns // 8) + c // 8]
        self.that(moved == [(r, c)] and abs(abs(changed[r][c] - back[r][c]) - step) < 1e-6 * step,
                  f"after one code was changed by 1, at {r, c}, these numbers differ: {moved[:5]}, scale {step}",
                  "dequantize from the packed codes every time")
        for change in ({"shape": [len(rows), columns + 8]}, {"shape": [len(rows) + 1, columns]}, {"group_size": 1},
                       {"bits": 12 - how.bits}, {"bits": 3}, {"scales": document["scales"][:-1]},
                       {"packed": document["packed"][:-2]}):
            self.refuses(starter.QuantizationError,
                         lambda change=change: starter.QuantizedTensor.from_dict({**document, **change}), f"{change}")

        r, c = each["spoiled"]
        spoiled = [list(row) for row in rows]
        spoiled[r][c] = 1e6 * (1 + max(map(abs, rows[r])))
        mine = r * -(-columns // 8) + c // 8
        clean, dirty = groups(back, 8), groups(starter.dequantize(starter.quantize(spoiled, how)), 8)
        self.same(dirty[:mine] + dirty[mine + 1:], clean[:mine] + clean[mine + 1:],
                  "an outlier spoils its own group alone: a scale for each group")
        spoiled[r][c] = float(not_finite)
        for wrong in (spoiled, [*rows, rows[0][:-1]]):
            self.refuses(starter.QuantizationError, lambda wrong=wrong: starter.quantize(wrong, how),
                         "a number that is not finite, or rows of two lengths")

    @drawn("M5", "M5", quantized_engine, times=3)
    def test_engines(self, scenario):
        """V6: an engine with quantized weights gives the tokens that these say, which are not the float ones."""
        from starter.reference import reference_generate
        how = scenario["quantization"]
        run, apart = self.make(scenario, quantization=in_format(how)), []
        for prompt in scenario["prompts"]:
            events = list(run.engine.stream(run.engine.submit(prompt, 9)))
            self.same([event.token for event in events], list(reference_generate(run.engine.model, prompt, 9)),
                      f"{how}: engine and reference must use the same quantized weights")
            apart.append(abs(events[0].logprob - run.oracle.generate(prompt, 1)[0].logprob))
        eight = how == "int8" or (isinstance(how, dict) and how["bits"] == 8)
        self.that(max(apart) > 1e-6, f"{how}: log-probabilities equal the float model's",
                  "compute with the quantized weights, not with a float copy of the originals")
        self.that(max(apart) < (0.3 if eight else 3.0), f"{how}: log-probabilities are off by {max(apart)}",
                  "quantization should cost little accuracy")

    @drawn("M5", "M5", quantized_pages)
    def test_pages(self, scenario):
        """M5: kv_quantization="int8", where offered, makes pages smaller at little cost; it is never ignored."""
        tokens, firsts, peaks, prompt = [], [], [], scenario["prompt"]
        for mode, neighbours in ((None, 0), ("int8", 0), ("int8", 3)):
            try:
                run = self.make(scenario, kv_quantization=mode)
                for i in range(neighbours):
                    run.engine.submit(prompt[i:], 8)
                events = list(run.engine.stream(run.engine.submit(prompt, 8)))
            except starter.EngineError as error:
                raise SkipPart(f"optional: {error}") from None
            tokens.append([event.token for event in events])
            firsts.append(events[0].logprob)
            peaks.append(run.engine.kv.stats().peak_bytes)
        self.that(peaks[1] < 0.7 * peaks[0], f"peak bytes {peaks[0]} without, {peaks[1]} with kv_quantization",
                  "store int8 numbers with their scales, or refuse the setting")
        self.that(0 < abs(firsts[0] - firsts[1]) < 0.3, f"log-probabilities {firsts[:2]}",
                  "compute with the int8 numbers")
        self.same(tokens[2], tokens[1], "int8 pages, too, give the same tokens in a batch as alone")

    @drawn("M5", "M5", searched)
    def test_search(self, scenario):
        """M5: method="search", where offered, has in no group a larger weighted error than "nearest", and gains."""
        rows, weights, total = scenario["rows"], scenario["importance"], []
        for method in ("nearest", "search"):
            try:
                q = starter.quantize(rows, starter.QuantizationConfig(
                    bits=4, group_size=32, symmetric=scenario["symmetric"], method=method),
                    *[weights] * (method == "search"))
            except (starter.EngineError, TypeError) as error:
                raise SkipPart(f"optional: {error}") from None
            total.append([sum(group) for group in groups([[w * (a - b) ** 2 for a, b, w in zip(
                row, back, weights)] for row, back in zip(rows, starter.dequantize(q))], 32)])
        worse = [i for i, (near, best) in enumerate(zip(*total)) if best > near * (1 + 1e-9)]
        self.that(not worse, f"groups {worse} are worse", "keep the grid of 'nearest' where nothing better is found")
        gain = 1 - sum(total[1]) / sum(total[0])
        self.that(gain > 0.1, f"the weighted squared error falls by {gain:.1%}", "normal weights allow more than 10%")
