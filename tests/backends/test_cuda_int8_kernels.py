"""The kernels of int8 pages: the same codes, lows and scales as the plain store's, attention as in float64 (extra
``cuda``; no GPU needed)."""

from __future__ import annotations

import unittest
from typing import Any

from starter.backends import int8_pages
from tests.backends.test_cuda_kernels import LENGTHS, PAGE, KernelCase
from tests.extras import needs

HEADS = (1, 1), (2, 2), (3, 7), (1, 33), (2, 129)  # key/value heads, and their width
LAYERS = 2  # the batch's is layer 1


@needs("cuda", "warp")
class Int8KernelTest(KernelCase):
    """What a kernel must not touch holds a number of its own before, and must do so after."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        from starter.backends.cuda import int8_kernels as warp_int8_kernels
        cls.int8 = warp_int8_kernels

    int8: Any

    def cells(self, device: Any, pages: int, size: int, tails: int, own: list[int], heads: int, width: int) -> Any:
        """Arrays for so many pages and tails, full of what no test writes."""
        np, wp = self.np, self.wp
        cells, slots, row = self.int8.Int8Pages(), pages * LAYERS * size, heads * width
        cells.key_codes = device.put(np.full((slots, row), 99), wp.uint8)
        cells.value_codes = device.put(np.full((slots, row), -128), wp.int8)
        cells.key_lows, cells.key_scales = (device.put(np.full((pages * LAYERS, row), -9.0)) for _ in range(2))
        cells.value_scales = device.put(np.full((slots, heads), -9.0))
        cells.tails = device.put(np.full((tails * LAYERS * size, row), -9.0))
        cells.own = device.put(own, wp.int32)
        return cells

    def kept(self, tail: int, size: int) -> Any:
        """Where layer 1 of a tail has its slots."""
        return (tail * LAYERS + 1) * size + self.np.arange(size)

    def numbers(self, rows: int, columns: int) -> Any:
        """Of every kind, by column: normal, constant, far away, tiny, huge; and what is no number in one place each."""
        np = self.np
        x = self.draw(rows, columns)
        kinds = (lambda c: c, lambda c: 0 * c, lambda c: 0 * c - 7.25, lambda c: 1000 + c, lambda c: c * 1e-40,
                 lambda c: c * 5e37, lambda c: np.where(np.arange(rows) == rows // 2, np.nan, c),
                 lambda c: np.where(np.arange(rows) == rows - 1, -np.inf, c))
        for column in range(columns):
            x[:, column] = kinds[column % len(kinds)](x[:, column])
        return x

    def test_values_become_codes_and_keys_go_to_their_tails(self) -> None:
        """The very numbers of ``int8_pages.encode_value``; nothing else changes."""
        np, size, spans, positions, own = self.np, 3, [0, 1, 1, 1], [9, 2, 3, 4], [4, 0, 2, 2]
        tables = self.rng.permutation(8).reshape(2, 4)
        for heads, width in HEADS:
            k, v = self.draw(4, heads * width), self.numbers(heads * width, 4).T.copy()
            for device in self.devices:
                with self.subTest(heads=heads, width=width, block=device.block):
                    cells = self.cells(device, 8, size, 5, own, heads, width)
                    before = {name: getattr(cells, name).numpy().copy() for name in ("tails", *self.arrays)}
                    pages = self.pages(device, tables, spans, positions, size)
                    device.blocks(self.int8.write_int8, (4, heads), pages, device.put(k), device.put(v), cells, width)
                    for i, (span, position) in enumerate(zip(spans, positions)):
                        slot = self.slots(tables[span], position + 1, size)[-1]
                        before["tails"][self.kept(own[i], size)[position % size]] = k[i]
                        for head in range(heads):
                            part = slice(head * width, (head + 1) * width)
                            before["value_codes"][slot, part], before["value_scales"][slot, head] = (
                                int8_pages.encode_value(v[i, part].tolist()))
                    for name, wanted in before.items():
                        np.testing.assert_array_equal(getattr(cells, name).numpy(), wanted, name)

    arrays = ("key_codes", "key_lows", "key_scales", "value_codes", "value_scales")

    def test_full_pages_get_a_grid_for_every_channel(self) -> None:
        """The very numbers of ``int8_pages.encode_keys``, of two of the batch's four rows; nothing else changes."""
        np, own, full = self.np, [1, 0, 3, 2], [1, 3]
        for size in (1, 3, 16):
            tables = self.rng.permutation(12).reshape(4, 3)
            positions = [0, 2 * size - 1, size, size - 1]
            for heads, width in HEADS:
                for device in self.devices:
                    with self.subTest(size=size, heads=heads, width=width, block=device.block):
                        cells = self.cells(device, 12, size, 5, own, heads, width)
                        tails = cells.tails.numpy().copy()
                        for row in full:
                            tails[self.kept(own[row], size)] = self.numbers(size, heads * width)
                        cells.tails = device.put(tails)
                        before = {name: getattr(cells, name).numpy().copy() for name in self.arrays}
                        device.threads(self.int8.encode_keys, (2, heads * width),
                                       self.pages(device, tables, [0, 1, 2, 3], positions, size),
                                       device.put(full, self.wp.int32), cells)
                        for row in full:
                            slots = self.slots(tables[row], positions[row] + 1, size)[-size:]
                            grid = slots[0] // size
                            for c, channel in enumerate(tails[self.kept(own[row], size)].T):
                                codes, low, scale = int8_pages.encode_keys(channel.tolist())
                                before["key_codes"][slots, c] = [*codes]
                                before["key_lows"][grid, c], before["key_scales"][grid, c] = low, scale
                        for name, wanted in before.items():
                            np.testing.assert_array_equal(getattr(cells, name).numpy(), wanted, name)

    def stored(self, device: Any, tables: Any, lengths: list[int], heads: int, width: int) -> tuple[Any, Any, Any]:
        """Requests of these lengths in pages of 16, each with a tail of its own; and what they dequantize to. What
        nobody has written are scales and floats that are NaN."""
        np, wp, row = self.np, self.wp, heads * width
        slots, rng = tables.size * LAYERS * PAGE, np.random.default_rng(7)
        cells = self.cells(device, tables.size, PAGE, len(lengths), [*range(len(lengths))][::-1], heads, width)
        key_codes, value_codes = rng.integers(0, 256, (slots, row)), rng.integers(-127, 128, (slots, row))
        lows, scales = (np.full((tables.size * LAYERS, row), np.nan, np.float32) for _ in range(2))
        value_scales = np.full((slots, heads), np.nan, np.float32)
        tails = np.full(cells.tails.shape, np.nan, np.float32)
        keys, values = (np.full((slots, row), np.nan) for _ in range(2))
        for i, (table, length) in enumerate(zip(tables, lengths)):
            mine = self.slots(table, length, PAGE)
            whole = (length - 1) // PAGE  # pages before the last row's own
            grids = mine[:whole * PAGE:PAGE] // PAGE
            lows[grids], scales[grids] = self.draw(whole, row) - 2, rng.random((whole, row)) / 64
            value_scales[mine] = rng.random((length, heads)) / 64
            keys[mine] = lows[mine // PAGE].astype(float) + scales[mine // PAGE].astype(float) * key_codes[mine]
            values[mine] = np.repeat(value_scales[mine].astype(float), width, axis=1) * value_codes[mine]
            own = self.draw(length - whole * PAGE, row)
            tails[self.kept(len(lengths) - 1 - i, PAGE)[:len(own)]] = keys[mine[whole * PAGE:]] = own
        cells.key_codes, cells.value_codes = device.put(key_codes, wp.uint8), device.put(value_codes, wp.int8)
        cells.key_lows, cells.key_scales = device.put(lows), device.put(scales)
        cells.value_scales, cells.tails = device.put(value_scales), device.put(tails)
        return cells, keys, values

    def test_attention_of_every_length_over_permuted_pages(self) -> None:
        """Earlier pages by their codes, the row's own by its floats. Groups of 1 and 4 query heads."""
        np, most = self.np, -(-max(LENGTHS) // PAGE)
        tables = self.rng.permutation(most * len(LENGTHS)).reshape(len(LENGTHS), most)
        for heads, group, width in ((2, 1, 6), (1, 4, 33), (2, 4, 1)):
            q = self.draw(len(LENGTHS), heads * group * width)
            for device in self.devices:
                cells, keys, values = self.stored(device, tables, [*LENGTHS], heads, width)
                wanted = np.concatenate([self.attention(
                    q[i:i + 1], *(x[self.slots(tables[i], length, PAGE)] for x in (keys, values)), width)
                    for i, length in enumerate(LENGTHS)])
                pages = self.pages(device, tables, [*range(len(LENGTHS))], [n - 1 for n in LENGTHS], PAGE)
                self.check(device, "blocks", self.int8.attend_int8, (len(q), heads * group),
                           [pages, device.put(q), cells, width, group], wanted)

    def test_rows_of_a_chunk_see_their_own_page_as_floats_and_earlier_ones_as_codes(self) -> None:
        """Rows at positions 1 .. 5 of a request, in pages of 2 whose codes stand for other numbers than their tails."""
        np, size, width = self.np, 2, 3
        tables, positions, own = self.rng.permutation(4)[:3].reshape(1, 3), [1, 2, 3, 4, 5], [2, 0, 0, 1, 1]
        exact, coded, values = self.draw(6, width), self.draw(6, width), self.draw(6, width)
        q = self.draw(5, 2 * width)
        for device in self.devices:
            cells = self.cells(device, 4, size, 3, own, 1, width)
            arrays = {name: getattr(cells, name).numpy().copy() for name in ("tails", *self.arrays)}
            for position, slot in enumerate(self.slots(tables[0], 6, size)):
                tail = own[position - 1] if position else own[0]
                arrays["tails"][self.kept(tail, size)[position % size]] = exact[position]
                arrays["key_codes"][slot], arrays["value_codes"][slot] = 100 * (1 + position % size), 50
                if position % size == 0:  # low + 100 * scale and low + 200 * scale are the two keys of a page
                    two = coded[position:position + 2]
                    arrays["key_scales"][slot // size] = (two[1] - two[0]) / 100
                    arrays["key_lows"][slot // size] = 2 * two[0] - two[1]
                values[position] = values[position, 0]  # a scale for all of a head
                arrays["value_scales"][slot] = values[position, 0] / 50
            for name, numbers in arrays.items():
                setattr(cells, name, device.put(numbers, getattr(cells, name).dtype))
            wanted = []
            for row, position in enumerate(positions):
                first = position // size * size
                keys = np.concatenate([coded[:first], exact[first:position + 1]])
                wanted.append(self.attention(q[row:row + 1], keys, values[:position + 1], width))
            self.check(device, "blocks", self.int8.attend_int8, (5, 2),
                       [self.pages(device, tables, [0] * 5, positions, size), device.put(q), cells, width, 2],
                       np.concatenate(wanted))


if __name__ == "__main__":
    unittest.main()
