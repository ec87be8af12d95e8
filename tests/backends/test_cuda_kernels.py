"""Every kernel against the same formula in float64, in blocks of 1, 32 and 128 threads (extra ``cuda``; no GPU needed).

A block of one thread hides wrong strides, one of 128 runs out of columns; threads that race would not be seen here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from array import array
from typing import Any

from starter.quantization import QuantizedTensor, dequantize, quantize
from starter.schema import QuantizationConfig
from tests.extras import needs
from tests.paths import ROOT

PAGE = 16
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 100, 1000)
WIDTHS = (1, 2, 7, 33, 129, 300)  # of a row: less than a block, one more than a block, odd


class KernelCase(unittest.TestCase):
    """``out`` is always part of a larger array, whose rest must stay as it was; every element of it must be written."""

    blocks: tuple[int, ...] = (1, 32, 128)

    @classmethod
    def setUpClass(cls) -> None:
        import numpy as np
        import warp as wp

        from starter.backends.cuda import kernels as warp_kernels
        from starter.backends.cuda.device import Device
        cls.np, cls.wp, cls.kernels = np, wp, warp_kernels
        cls.devices = [Device("cpu", block) for block in cls.blocks]

    np: Any
    wp: Any
    kernels: Any
    devices: list[Any]

    def setUp(self) -> None:
        self.rng = self.np.random.default_rng(219)

    def draw(self, *shape: int) -> Any:
        """float32 normal numbers."""
        return self.rng.normal(size=shape).astype(self.np.float32)

    def check(self, device: Any, launch: str, kernel: Any, grid: tuple[int, ...], arguments: list[Any], wanted: Any,
              tolerance: float = 2e-6) -> None:
        """Run the kernel; its last argument, [rows, columns] in the middle of a larger array, must be ``wanted``, as
        close as the largest number of it allows."""
        rows, columns = wanted.shape
        whole = device.put(self.np.full((rows + 2, columns + 2), self.np.nan, self.np.float32))
        getattr(device, launch)(kernel, grid, *arguments, whole[1:rows + 1, 1:columns + 1])
        got = whole.numpy()
        where = f"{kernel.key}, block {device.block}, grid {grid}"
        self.assertEqual(int(self.np.isnan(got).sum()), got.size - wanted.size, where)  # the frame, and nothing in it
        error = abs(got[1:-1, 1:-1].astype(self.np.float64) - wanted).max() / max(1.0, abs(wanted).max())
        self.assertLess(error, tolerance, where)

    def pages(self, device: Any, tables: Any, spans: list[int], positions: list[int], page_size: int) -> Any:
        pages = self.kernels.Pages()
        pages.tables, pages.spans, pages.positions = (device.put(numbers, self.wp.int32)
                                                      for numbers in (tables, spans, positions))
        pages.page_size, pages.layers, pages.layer = page_size, 2, 1
        return pages

    def slots(self, table: Any, length: int, page_size: int) -> Any:
        """Where layer 1 of 2 has the positions 0 .. length - 1."""
        positions = self.np.arange(length)
        return (table[positions // page_size] * 2 + 1) * page_size + positions % page_size

    def attention(self, q: Any, keys: Any, values: Any, width: int) -> Any:
        """softmax(q . k / sqrt(d)) . v in float64: q [t, H * d], keys and values [n, K * d]."""
        np = self.np
        heads, kv_heads = q.shape[1] // width, keys.shape[1] // width
        mixed = []
        for head in range(heads):
            shared = head * kv_heads // heads
            k, v = (x.astype(float)[:, shared * width:(shared + 1) * width] for x in (keys, values))
            scores = q.astype(float)[:, head * width:(head + 1) * width] @ k.T / np.sqrt(width)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed.append(weights @ v / weights.sum(axis=1, keepdims=True))
        return np.concatenate(mixed, axis=1)


@needs("cuda", "warp")
class KernelTest(KernelCase):
    # ----------------------------------------------------------------------------------- one number a thread

    def test_element_by_element(self) -> None:
        for device in self.devices:
            for columns in WIDTHS:
                x, y, bias = self.draw(5, columns) * 20, self.draw(5, columns), self.draw(columns)
                a, b = device.put(x), device.put(y)
                self.check(device, "threads", self.kernels.add, x.shape, [a, b], x.astype(float) + y)
                gate = x.astype(float)
                self.check(device, "threads", self.kernels.swiglu, x.shape, [a, b], gate / (1 + self.np.exp(-gate)) * y)
                device.threads(self.kernels.add_bias, x.shape, a, device.put(bias))
                self.assertLess(abs(a.numpy() - (x.astype(float) + bias)).max(), 1e-5)

    def test_swiglu_of_the_largest_numbers(self) -> None:
        x = self.np.array([[-3e38, -200.0, -90.0, 0.0, 90.0, 3e38]], self.np.float32)
        for device in self.devices:
            self.check(device, "threads", self.kernels.swiglu, x.shape,
                       [device.put(x), device.put(self.np.ones_like(x))], self.np.maximum(x.astype(float), 0.0))

    def test_gather(self) -> None:
        for device in self.devices:
            for number in (self.np.float32, self.np.float16):
                table, rows = self.draw(9, 33).astype(number), [8, 0, 3, 3]
                sent = device.put(table, self.wp.float16 if number is self.np.float16 else self.wp.float32)
                self.check(device, "threads", self.kernels.gather, (4, 33), [sent, device.put(rows, self.wp.int32)],
                           table[rows].astype(float), 1e-9)

    def test_rotation_at_any_position(self) -> None:
        positions, frequencies = [0, 1, 77, 131_071], [1.0, 0.3, 1e-4]
        angles = self.np.outer(positions, frequencies)
        turn = self.np.exp(1j * angles)
        for device in self.devices:
            turned = device.empty(angles.shape, self.wp.vec2)
            device.threads(self.kernels.turns, angles.shape, device.put(positions, self.wp.int32),
                           device.put(frequencies, self.wp.float64), turned)
            for heads in (1, 5):
                x = self.draw(4, 6 * heads)
                pairs = x.astype(float)[:, 0::2] + 1j * x[:, 1::2]
                mixed = pairs * self.np.tile(turn, heads)
                wanted = self.np.stack((mixed.real, mixed.imag), axis=2).reshape(x.shape)
                wide = device.put(self.np.pad(x, 1))[1:5, 1:-1]  # as ``split`` leaves it
                self.check(device, "threads", self.kernels.rotate, pairs.shape, [wide, turned], wanted)

    # ----------------------------------------------------------------------------------- one block a row

    def test_norm_of_rows_and_of_heads(self) -> None:
        for device in self.devices:
            for width in WIDTHS:
                for heads in (1, 3):
                    x, gain = self.draw(4, heads * width) * 10, self.draw(width)
                    parts = x.astype(float).reshape(4, heads, width)
                    wanted = parts / self.np.sqrt((parts ** 2).mean(axis=2, keepdims=True) + 1e-3) * gain
                    wide = device.put(self.np.pad(x, 1))[1:5, 1:-1]
                    self.check(device, "blocks", self.kernels.norm, (4, heads), [wide, device.put(gain), 1e-3],
                               wanted.reshape(x.shape))

    def test_norm_of_numbers_whose_squares_are_no_float(self) -> None:
        x = self.np.array([[2e19, -3e19, 1e18], [3e38, 3e38, -3e38]], self.np.float32)
        gain = self.np.ones(3, self.np.float32)
        wanted = x / self.np.sqrt((x.astype(float) ** 2).mean(axis=1, keepdims=True))
        for device in self.devices:
            self.check(device, "blocks", self.kernels.norm, (2, 1), [device.put(x), device.put(gain), 1e-3], wanted)

    def test_best_tokens(self) -> None:
        """Of equals, the lowest number, wherever in a block's stride it is."""
        np = self.np
        for device in self.devices:
            for width in WIDTHS:
                x = self.draw(5, width) * 5
                x[1], x[2, width // 2:] = 1.0, 40.0
                x[3, :] = -1e30
                x[3, width - 1] = -1e29
                best = device.empty((5,), self.wp.vec2d)
                device.blocks(self.kernels.best_tokens, (5,), device.put(x), best)
                tokens, logprobs = best.numpy()[:, 0], best.numpy()[:, 1]
                self.assertEqual(tokens.tolist(), x.argmax(axis=1).tolist())
                exact = x.astype(float)
                wanted = -np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1))
                self.assertLess(abs(logprobs - wanted).max(), 2e-6)
            for bad in (np.nan, np.inf):
                best = device.empty((1,), self.wp.vec2d)
                device.blocks(self.kernels.best_tokens, (1,), device.put(np.array([[0, bad, 1]], np.float32)), best)
                self.assertFalse(np.isfinite(best.numpy()[0, 1]))  # which sends the host to the row itself

    # ----------------------------------------------------------------------------------- products

    def test_products_of_floats(self) -> None:
        for device in self.devices:
            for number in (self.np.float32, self.np.float16):
                for rows, columns, batch in ((1, 1, 1), (5, 33, 1), (7, 129, 3), (3, 300, 8), (4, 7, 9), (2, 64, 17)):
                    weights, x = self.draw(rows, columns).astype(number), self.draw(batch, columns)
                    wanted = x.astype(float) @ weights.astype(float).T
                    sent = device.put(weights, self.wp.float16 if number is self.np.float16 else self.wp.float32)
                    both = [sent, device.put(x)]
                    self.check(device, "blocks", self.kernels.times_floats, (rows, batch), both, wanted)
                    self.check(device, "blocks", self.kernels.times_floats_8, (rows, -(-batch // 8)), both, wanted)

    def test_products_of_codes(self) -> None:
        """Against the matrix that ``quantization.dequantize`` makes of the same codes."""
        from starter.backends.cuda.matrices import DeviceCodeMatrix
        for bits in (8, 4):
            for symmetric in (True, False):
                for group_size in (None, 1, 5, 32):
                    for columns, batch in ((1, 1), (7, 3), (33, 1), (100, 9), (300, 1)):
                        numbers = (self.draw(4, columns) + 0.5).tolist()
                        tensor = quantize(numbers, QuantizationConfig(bits, group_size, symmetric))
                        exact, x = self.np.array(dequantize(tensor)), self.draw(batch, columns)
                        with self.subTest(tensor=tensor, batch=batch):
                            for device in self.devices:
                                matrix, rows = DeviceCodeMatrix(device, tensor), device.put([3, 0, 3], self.wp.int32)
                                sent, eights = [matrix.codes, device.put(x)], -(-batch // 8)
                                wanted = x.astype(float) @ exact.T
                                self.check(device, "blocks", self.kernels.times_codes, (4, batch), sent, wanted)
                                self.check(device, "blocks", self.kernels.times_codes_8, (4, eights), sent, wanted)
                                grid = 3, matrix.codes.words.shape[1]
                                self.check(device, "threads", self.kernels.gather_codes, grid, [matrix.codes, rows],
                                           exact[[3, 0, 3]])

    def test_codes_with_zero_points_between_the_integers(self) -> None:
        """As llama.cpp's Q4_1 has them."""
        from starter.backends.cuda.matrices import DeviceCodeMatrix
        tensor = QuantizedTensor((2, 3), 4, 2, False, array("f", [0.5, 2.0, 1.0, 0.25]),
                                 array("f", [7.25, -3.5, 0.125, 8.0]), bytes([0x21, 0x0F, 0x43, 0x05]))
        weights = [[0.5 * (1 - 7.25), 0.5 * (2 - 7.25), 2.0 * (15 + 3.5)], [3 - 0.125, 4 - 0.125, 0.25 * (5 - 8)]]
        for device in self.devices:
            matrix, x = DeviceCodeMatrix(device, tensor), self.draw(1, 3)
            self.assertEqual(matrix.pick(device.put([0, 1], self.wp.int32)).numpy().tolist(), weights)
            self.check(device, "blocks", self.kernels.times_codes, (2, 1), [matrix.codes, device.put(x)],
                       x.astype(float) @ self.np.array(weights).T)

    # ----------------------------------------------------------------------------------- pages

    def test_writing_to_pages(self) -> None:
        tables = self.rng.permutation(8).reshape(2, 4)
        spans, positions = [0, 1, 1, 1], [9, 2, 3, 4]
        k, v = self.draw(4, 5), self.draw(4, 5)
        for device in self.devices:
            for number in (self.wp.float32, self.wp.float16):
                pages = self.pages(device, tables, spans, positions, 3)
                before = self.np.full((8 * 2 * 3, 5), -9.0, self.np.float32)
                keys, values = device.put(before, number), device.put(before, number)
                device.threads(self.kernels.write_pages, (4, 5), pages, device.put(k), device.put(v), keys, values)
                for got, rows in ((keys.numpy(), k), (values.numpy(), v)):
                    wanted = before.astype(got.dtype)
                    for row, span, position in zip(rows, spans, positions):
                        wanted[self.slots(tables[span], position + 1, 3)[-1]] = row
                    self.assertEqual(got.tolist(), wanted.tolist())

    def test_attention_of_every_length_over_permuted_pages(self) -> None:
        """Slots that no request has written hold NaN. Groups of 1 and 4 query heads, heads of 1, 6 and 33 numbers."""
        np = self.np
        for kv_heads, group, width, number in ((2, 1, 6, "float32"), (1, 4, 33, "float32"), (2, 4, 1, "float16")):
            most = -(-max(LENGTHS) // PAGE)
            tables = self.rng.permutation(most * len(LENGTHS)).reshape(len(LENGTHS), most)
            shape = (tables.size * 2 * PAGE, kv_heads * width)
            keys, values = np.full(shape, np.nan, number), np.full(shape, np.nan, number)
            for table, length in zip(tables, LENGTHS):
                mine = self.slots(table, length, PAGE)
                keys[mine], values[mine] = self.draw(length, shape[1]) * 3, self.draw(length, shape[1])
            q = self.draw(len(LENGTHS), kv_heads * group * width)
            wanted = np.concatenate([self.attention(q[i:i + 1], keys[self.slots(tables[i], length, PAGE)],
                                                    values[self.slots(tables[i], length, PAGE)], width)
                                     for i, length in enumerate(LENGTHS)])
            for device in self.devices:
                pages = self.pages(device, tables, [*range(len(LENGTHS))], [n - 1 for n in LENGTHS], PAGE)
                stored = [device.put(x, getattr(self.wp, number)) for x in (keys, values)]
                self.check(device, "blocks", self.kernels.attend, (len(q), kv_heads * group),
                           [pages, device.put(q), *stored, width, group], wanted)

    def test_attention_of_a_chunk_is_causal(self) -> None:
        """Three rows of one request at positions 5, 6, 7: what comes after a row, NaN here, does not reach it."""
        np = self.np
        tables = self.rng.permutation(4).reshape(1, 4)
        keys, values = (np.full((4 * 2 * 3, 4), np.nan, np.float32) for _ in range(2))
        mine = self.slots(tables[0], 8, 3)
        keys[mine], values[mine] = self.draw(8, 4), self.draw(8, 4)
        values[mine[6:]] = np.nan
        q = self.draw(3, 8)
        wanted = self.attention(q[:1], keys[mine[:6]], values[mine[:6]], 4)
        for device in self.devices:
            pages = self.pages(device, tables, [0, 0, 0], [5, 6, 7], 3)
            out = device.empty(q.shape)
            device.blocks(self.kernels.attend, (3, 2), pages, device.put(q), device.put(keys), device.put(values), 4, 2,
                          out)
            self.assertLess(abs(out.numpy()[0] - wanted[0]).max(), 1e-6)
            self.assertTrue(np.isnan(out.numpy()[1:]).all())


CHECKED = """
import sys, unittest
import warp as wp
wp.config.mode = "debug"  # every index is compared with the array's shape
from tests.backends.test_cuda_int8_kernels import Int8KernelTest
from tests.backends.test_cuda_kernels import KernelTest
KernelTest.blocks = Int8KernelTest.blocks = (32,)
"""
ALL = CHECKED + """
load = unittest.defaultTestLoader.loadTestsFromTestCase
result = unittest.TextTestRunner().run(unittest.TestSuite([load(KernelTest), load(Int8KernelTest)]))
sys.exit(not result.wasSuccessful())
"""
BEYOND = CHECKED + """
KernelTest.setUpClass()
device = KernelTest.devices[0]
table, rows, out = device.empty((3, 2)), device.put([3], wp.int32), device.empty((1, 2))
device.threads(KernelTest.kernels.gather, (1, 2), table, rows, out)  # row 3 of rows 0 .. 2
"""


@needs("cuda", "warp")
class BoundsTest(unittest.TestCase):
    def run_checked(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})

    def test_no_kernel_looks_beyond_an_array(self) -> None:
        """All of the above and of int8 pages once more, in Warp's checking mode; in a process of its own, which a fault
        would end."""
        done = self.run_checked(ALL)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_check_would_find_it(self) -> None:
        done = self.run_checked(BEYOND)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("arr.shape[0]", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
