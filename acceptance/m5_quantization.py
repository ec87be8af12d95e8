"""M5 · Quantization: a stated error, metadata that explain every number, and memory that really falls."""

from __future__ import annotations

import gc
import json
import math
import sys
import tracemalloc
from contextlib import contextmanager
from random import Random

from harness import Case, SkipPart, tiny_scenario
from observed import Run

import starter

ASKED = (("is_tracing", False), ("get_traced_memory", (0, 0)), ("get_tracemalloc_memory", 0))
FORMATS = [(bits, symmetric) for bits in (8, 4) for symmetric in (True, False)]


def quantize(rows, bits, symmetric=True, group_size=None):
    return starter.quantize(rows, starter.QuantizationConfig(bits=bits, group_size=group_size, symmetric=symmetric))


def groups(rows, group_size):
    """The groups of all rows, row after row."""
    return [list(row[i:i + (group_size or len(row))]) for row in rows for i in range(0, len(row),
                                                                                     group_size or len(row))]


def explain(q, signed):
    """Dequantize from the public parts alone: packed codes (int4: low nibble first), scales, zero points."""
    half = 2 ** (q.bits - 1)
    codes = list(q.packed) if q.bits == 8 else [nibble for byte in q.packed for nibble in (byte & 15, byte >> 4)]
    codes = [code - 2 * half if signed and code >= half else code for code in codes]
    rows, columns = q.shape
    size = q.group_size or columns
    per_row = -(-columns // size)
    zeros = list(q.zero_points) or [0] * len(q.scales)
    return [[q.scales[r * per_row + c // size] * (codes[r * columns + c] - zeros[r * per_row + c // size])
             for c in range(columns)] for r in range(rows)]


@contextmanager
def untold():
    """Memory is traced, and whoever asks in this process is told that it is not: an engine that holds less while it is
    watched is found out."""
    modules, answers = (sys.modules["tracemalloc"], sys.modules["_tracemalloc"]), dict(ASKED)
    saved = [(module, name, getattr(module, name)) for module in modules for name in answers]
    for module, name, _ in saved:
        setattr(module, name, lambda *more, name=name: answers[name])
    try:
        yield
    finally:
        for module, name, right in saved:
            setattr(module, name, right)


class M5Quantization(Case):
    def rows(self, count, columns, spread=1.0, centre=0.0):
        return [[centre + self.rng.gauss(0, spread) for _ in range(columns)] for _ in range(count)]

    # -------------------------------------------------------------------------------------------------- the format

    def check_error(self, rows, bits, symmetric, group_size):
        """Every number is within half a step of its group, and the step is as fine as the group's range allows."""
        q = quantize(rows, bits, symmetric, group_size)
        back = [list(row) for row in starter.dequantize(q)]
        for scale, before, after in zip(q.scales, groups(rows, group_size), groups(back, group_size)):
            worst = max(abs(a / 2 - b / 2) * 2 for a, b in zip(before, after))
            room = scale / 2 * (1 + 1e-6) + 1e-14 * max(map(abs, before))
            self.that(worst <= room, f"int{bits}, symmetric {symmetric}: {before[:4]}... became {after[:4]}..., "
                      f"off by {worst}, scale {scale}", "|x - x'| <= scale / 2 for every element")
            largest = max(map(abs, before))
            reach = largest / (2 ** (bits - 1) - 1) if symmetric else (
                max(*before, 0.0) / (2**bits - 1) - min(*before, 0.0) / (2**bits - 1))
            constant = len(set(before)) == 1
            self.that(scale <= reach * 1.01 + 1e-300 or (constant and scale <= (largest or 1.0) * 1.01),
                      f"scale {scale} for a group with the largest magnitude {largest}", "use the whole range of codes")

    def test_error_bound(self):
        """M5: the error of every element of every group is at most half of the group's scale."""
        for bits, symmetric in FORMATS:
            for group_size in (1, 7, 32, None):
                self.check_error(self.rows(4, 40), bits, symmetric, group_size)

    def test_extreme_groups(self):
        """B12: constant, zero, one-sided, far-away, subnormal and huge groups keep the error bound; zero stays zero."""
        step = [i / 31 for i in range(32)]
        cases = {"zeros": [0.0] * 32, "constant": [0.3] * 32, "negative constant": [-7.25] * 32,
                 "positive": [1 + x for x in step], "negative": [-3 - x for x in step],
                 "far away": [1e6 + x for x in step],
                 "tiny": [x * 1e-30 for x in step], "subnormal": [x * 5e-320 for x in step],
                 "huge": [x * 1e308 for x in step],
                 "both huge": [(2 * x - 1) * 1.7e308 for x in step], "one": [0.0] * 31 + [5.0],
                 "outlier": [1e-3] * 31 + [1e4]}
        for bits, symmetric in FORMATS:
            for name, row in cases.items():
                self.case = f"{name}, int{bits}, symmetric {symmetric}"
                self.check_error([row], bits, symmetric, None)
            self.same([list(map(abs, row)) for row in starter.dequantize(quantize([[0.0] * 5], bits, symmetric))],
                      [[0.0] * 5],
                      "zeros come back as zeros, not as NaN")

    def test_bad_input(self):
        """B13: unsupported bits or group sizes, non-finite numbers and ragged rows raise QuantizationError."""
        for bits in (0, 1, 2, 3, 5, 16, -8, 8.0, True, "8", None):
            self.refuses(starter.QuantizationError, lambda b=bits: starter.QuantizationConfig(bits=b), f"bits {bits!r}")
        for size in (0, -1, 2.0, True, "32"):
            self.refuses(starter.QuantizationError, lambda s=size: starter.QuantizationConfig(group_size=s),
                         f"group_size {size!r}")
        for rows in ([[1.0, math.nan]], [[math.inf, 1.0]], [[-math.inf]], [[1.0, 2.0], [1.0]]):
            self.refuses(starter.QuantizationError, lambda rows=rows: quantize(rows, 8), f"{rows}")

    def test_distinct_values(self):
        """M5: a group of b bits holds at most 2**b different numbers; more means that it was not quantized."""
        for bits, symmetric in FORMATS:
            row = list(starter.dequantize(quantize(self.rows(1, 2_000), bits, symmetric))[0])
            self.that(2**bits // 4 < len(set(row)) <= 2**bits, f"{len(set(row))} different numbers with {bits} bits",
                      "codes have to be rounded, and use their range")

    def test_packed_size(self):
        """M5: int8 takes a byte a number, int4 half a byte, and nbytes counts all of it, far below float32."""
        for bits, symmetric in FORMATS:
            for columns in (64, 33):
                q = quantize(self.rows(20, columns), bits, symmetric, 32)
                exact = 20 * columns * bits / 8
                self.that(isinstance(q.packed, (bytes, bytearray)) and exact <= len(q.packed) <= exact + 20,
                          f"{len(q.packed)} packed bytes for 20 x {columns} numbers of {bits} bits",
                          "two nibbles a byte")
                self.same(len(q.scales), 20 * -(-columns // 32),
                          "a scale for each group, the shorter last one included")
                self.that(len(q.packed) + 2 * len(q.scales) <= q.nbytes < 0.6 * 4 * 20 * columns, f"nbytes {q.nbytes}",
                          "count codes, scales and zero points")

    def test_metadata_explain_every_number(self):
        """V5: scale * (code - zero_point), from the packed bytes, scales and zero points alone, gives every number."""
        for bits, symmetric in FORMATS:
            q = quantize(self.rows(3, 40, centre=0.0 if symmetric else 2.0), bits, symmetric, 16)
            back = [list(row) for row in starter.dequantize(q)]
            off = min(max(abs(a - b) for wanted, row in zip(back, explain(q, signed)) for a, b in zip(wanted, row))
                      for signed in (True, False))
            self.that(off < 1e-6, f"int{bits}, symmetric {symmetric}: dequantize is off by {off} from its metadata",
                      "codes are two's complement or unsigned; int4 has two a byte, the low nibble first")

    def test_nibbles(self):
        """M5: int4 codes are two a byte, the low nibble first; odd rows and negative numbers survive."""
        packed = bytes(quantize([[float(x) for x in range(16)]], 4, symmetric=False).packed).hex()
        self.that(packed in ("1032547698badcfe", "98badcfe10325476"), f"0..15 packed as {packed}", "low nibble first")
        for length in (1, 2, 15, 16):
            ramp = [float(x - 7) for x in range(length - 1)] + [7.0]
            self.same([list(row) for row in starter.dequantize(quantize([ramp, ramp[::-1]], 4))], [ramp, ramp[::-1]],
                      f"{length} whole numbers from -7 to 7 have scale 1 and come back exactly")

    def test_outliers_stay_local(self):
        """M5: an outlier spoils its own group alone, not other groups and not other rows."""
        rows = self.rows(4, 64)
        for bits, symmetric in FORMATS:
            spoiled = [list(row) for row in rows]
            spoiled[1][40] = 1e6
            clean, dirty = (starter.dequantize(quantize(r, bits, symmetric, 32)) for r in (rows, spoiled))
            self.same(groups(dirty, 32)[:3] + groups(dirty, 32)[4:], groups(clean, 32)[:3] + groups(clean, 32)[4:],
                      "a scale for each group, not one for the whole matrix")

    def test_round_trip(self):
        """V5: to_dict, JSON and from_dict give the same tensor back; metadata that contradict the data are refused."""
        for bits, symmetric in FORMATS:
            q = quantize(self.rows(3, 21), bits, symmetric, 8)
            document = json.loads(json.dumps(q.to_dict()))
            again = starter.QuantizedTensor.from_dict(document)
            self.same([list(row) for row in starter.dequantize(again)], [list(row) for row in starter.dequantize(q)],
                      "to_dict")
            for change in ({"shape": [3, 29]}, {"shape": [4, 21]}, {"bits": 12 - bits}, {"group_size": 5}, {"bits": 3},
                           {"scales": document["scales"][:-1]}, {"packed": document["packed"][:-2]}):
                self.refuses(starter.QuantizationError,
                             lambda c=change, d=document: starter.QuantizedTensor.from_dict({**d, **c}), f"{change}")

    def test_packed_bytes_are_what_counts(self):
        """M5: one changed code changes one number, by one step: the packed bytes are used, not a copy beside them."""
        for bits, symmetric in FORMATS:
            rows = self.rows(3, 21)
            rows[1][0] = 0.0  # its code has a neighbour in every format
            q = quantize(rows, bits, symmetric, 8)
            before = [x for row in starter.dequantize(q) for x in row]
            document = q.to_dict()
            row_bytes = len(q.packed) // 3
            digits = list(document["packed"])
            place = 2 * row_bytes + 1  # the second digit is the low nibble: the first code of the middle row
            digits[place] = f"{int(digits[place], 16) ^ 1:x}"
            changed = starter.QuantizedTensor.from_dict({**document, "packed": "".join(digits)})
            moved = [(i, abs(a - b)) for i, (a, b) in enumerate(zip(before, [
                x for row in starter.dequantize(changed) for x in row])) if a != b]
            self.that(len(moved) == 1 and moved[0][0] == 21 and abs(moved[0][1] - q.scales[3]) < 1e-6,
                      f"int{bits}, symmetric {symmetric}: (index, change) {moved}, scale {q.scales[3]}",
                      "dequantize from the packed codes every time")

    def test_search(self):
        """M5: method="search", where offered, has in no group a larger weighted error than "nearest", and gains."""
        weights = [self.rng.choice([0.0, 0.1, 1.0, 30.0]) for _ in range(96)]
        rows = self.rows(12, 96)
        for symmetric in (True, False):
            total = {}
            for importance in (None, weights):
                try:
                    config = starter.QuantizationConfig(bits=4, group_size=32, symmetric=symmetric, method="search")
                    searched = starter.quantize(rows, config, importance)
                except (starter.EngineError, TypeError) as error:
                    raise SkipPart(f"optional: {error}") from None
                nearest = quantize(rows, 4, symmetric, 32)
                for name, q in (("search", searched), ("nearest", nearest)):
                    off = [[w * (a - b) ** 2 for a, b, w in zip(row, back, importance or [1.0] * 96)]
                           for row, back in zip(rows, starter.dequantize(q))]
                    total[name] = [sum(group) for group in groups(off, 32)]
                worse = [i for i, (a, b) in enumerate(zip(total["search"], total["nearest"])) if a > b * (1 + 1e-9)]
                self.that(not worse, f"symmetric {symmetric}, importance {importance is not None}: groups {worse} "
                          "are worse", "keep the grid of 'nearest' where nothing better is found")
                gain = 1 - sum(total["search"]) / sum(total["nearest"])
                least = 0.03 if importance is None else 0.10
                self.that(gain > least, f"symmetric {symmetric}, importance {importance is not None}: the squared "
                          f"error falls by {gain:.1%}", f"normal weights allow more than {least:.0%}")

    def test_reported_error(self):
        """P: error(rows) reports the largest, the root mean square, and the relative error as they are."""
        rows = self.rows(5, 30)
        for bits, symmetric in FORMATS:
            q = quantize(rows, bits, symmetric, 8)
            off = [a - b for before, after in zip(rows, starter.dequantize(q)) for a, b in zip(before, after)]
            size = math.sqrt(sum(x * x for row in rows for x in row))
            wanted = (max(map(abs, off)), math.sqrt(sum(x * x for x in off) / 150),
                      math.sqrt(sum(x * x for x in off)) / size)
            got = (q.error(rows).max_abs, q.error(rows).rmse, q.error(rows).relative)
            self.that(all(abs(a - b) <= 1e-9 for a, b in zip(got, wanted)), f"reported {got}, is {wanted}",
                      "measure, do not guess")
            self.that(got[2] < (0.01 if bits == 8 else 0.15), f"relative error {got[2]}",
                      "threshold for normal weights")

    # -------------------------------------------------------------------------------------------------- the engine

    def test_engine_computes_with_quantized_weights(self):
        """V6: an int8 or int4 engine gives the tokens that its quantized weights say, which are not the float ones."""
        from starter.reference import reference_generate
        for quantization in ("int8", "int4", starter.QuantizationConfig(bits=4, group_size=8, symmetric=False)):
            run = Run(self, quantization=quantization)
            firsts, floats = [], []
            for length in (1, 6, 11):
                prompt = run.prompt(length)
                events = list(run.engine.stream(run.engine.submit(prompt, 10)))
                self.same([event.token for event in events], list(reference_generate(run.engine.model, prompt, 10)),
                          f"{quantization}: engine and reference must use the same quantized weights")
                firsts.append(events[0].logprob)
                floats.append(run.oracle.generate(prompt, 1)[0].logprob)
            apart = [abs(a - b) for a, b in zip(firsts, floats)]
            self.that(max(apart) > 1e-6, f"{quantization}: log-probabilities equal the float model's",
                      "compute with the quantized weights, not with a float copy of the originals")
            self.that(max(apart) < (0.3 if quantization == "int8" else 3.0), f"{quantization}: off by {max(apart)}",
                      "quantization should cost little accuracy")

    def test_memory_really_falls(self):
        """M5: a quantized engine holds less memory than float32 weights would, by its report and by the allocator's."""
        scenario = tiny_scenario(self.rng, width=64, ffn_width=160, layers=1)

        def used_engine(quantization):
            run = Run(self, scenario, quantization=quantization, num_pages=1)
            list(run.engine.stream(run.engine.submit([1, 2], 3)))  # an engine could unpack its weights at first use
            return run.engine

        reported = {}
        for quantization, share in ((None, None), ("int8", 0.7), ("int4", 0.55)):
            used_engine(quantization)  # what is imported or made once and for all is not counted
            gc.collect()
            tracemalloc.start()
            with untold():
                engine = used_engine(quantization)
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            reported[quantization] = engine.model.weight_bytes
            self.that(share is None or held < share * reported[None],
                      f"{quantization}: the engine holds {held} bytes, float32 "
                      f"weights alone {reported[None]}", "keep the packed codes only; no float copy beside them")
        self.that(reported["int4"] < 0.7 * reported["int8"] < 0.4 * reported[None], f"weight_bytes {reported}",
                  "int8 is about a quarter of float32, int4 about an eighth, plus scales")

    def test_quantized_cache(self):
        """M5: kv_quantization="int8", where offered, makes pages smaller at little cost; it is never ignored."""
        scenario, peaks, firsts, tokens = tiny_scenario(Random(self.rng.random())), [], [], []
        weights_seed, prompt = self.rng.randrange(2**31), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        for mode, neighbours in ((None, 0), ("int8", 0), ("int8", 3)):
            try:
                run = Run(self, scenario, weights_seed, kv_quantization=mode)
                for i in range(neighbours):
                    run.engine.submit(prompt[i:], 8)
                name = run.engine.submit(prompt, 8)
            except starter.EngineError as error:
                raise SkipPart(f"optional: {error}") from None
            events = list(run.engine.stream(name))
            firsts.append(events[0].logprob or 0.0)
            tokens.append([event.token for event in events])
            peaks.append(run.engine.kv.stats().peak_bytes)
        self.that(peaks[1] < 0.6 * peaks[0], f"peak bytes {peaks[0]} without, {peaks[1]} with kv_quantization",
                  "store int8 numbers with their scales, or refuse the setting")
        self.that(0 < abs(firsts[0] - firsts[1]) < 0.3, f"log-probabilities {firsts[:2]}",
                  "compute with the int8 numbers; keys want a scale a channel, values one a token and head")
        self.same(tokens[2], tokens[1], "int8 pages, too, give the same tokens in a batch as alone")
