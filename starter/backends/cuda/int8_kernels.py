"""Optional · KV pages of 8-bit integers as GPU kernels (extra ``cuda``).

Read ``kernels.py`` first, and ``backends/int8_pages.py`` for the format and the rule. In a step, layer by layer:

    write_int8   a block for each row and key/value head: the value becomes codes, the key goes to the page's tail
    encode_keys  a thread for each page that is full now and each of its channels: the channel gets its grid
    attend_int8  a block for each row and query head: the row's own page as floats from its tail, earlier ones as codes

Codes lie as floats would, slot after slot, so that all three find a number by ``kernels.slot``:

    page 0, layer 0                            page 0, layer 1        ...
    slot 0 [channel 0, channel 1, ...]         slot 0 [...]           key codes; value codes likewise
    slot 1 [channel 0, channel 1, ...]         slot 1 [...]
    grid   [low 0, low 1 ...] [scale 0 ...]    grid   [...]           of the keys: one for a page and layer

Grids and codes are computed in double precision. That is affordable, since each number is encoded once, and gives
exactly the codes, lows and scales of ``int8_pages.encode_keys`` and ``encode_value``. Attention adds up in float32.

Executed on the CPU, compiled for sm_89 (``scripts/compile_kernels.py``), not yet run on a GPU.
"""

from __future__ import annotations

import warp as wp

from starter.backends import int8_pages
from starter.backends.cuda.kernels import Pages, dot, slot

wp.set_module_options({"enable_backward": False})

SMALLEST_SCALE = wp.constant(wp.float64(int8_pages.SMALLEST_SCALE))


@wp.struct
class Int8Pages:
    """The arrays of a ``CudaInt8KVStore``. A *grid* is the number of a page and layer."""

    key_codes: wp.array2d[wp.uint8]  # [slots, kv_width]
    key_lows: wp.array2d[float]  # [grids, kv_width]
    key_scales: wp.array2d[float]  # [grids, kv_width]
    value_codes: wp.array2d[wp.int8]  # [slots, kv_width]
    value_scales: wp.array2d[float]  # [slots, kv_heads]
    tails: wp.array2d[float]  # [tails * layers * page_size, kv_width]: slots of their own
    own: wp.array1d[int]  # [T]: the number of the tail that the row's own page has


@wp.func
def tail_slot(p: Pages, own: wp.array1d[int], row: int, position: int) -> int:
    """Where the tail of a row's own page keeps the key of a position."""
    return (own[row] * p.layers + p.layer) * p.page_size + position % p.page_size


@wp.func
def scale_of(step: wp.float64) -> float:
    """The distance of two codes as it is stored."""
    return float(wp.max(step, SMALLEST_SCALE))


@wp.kernel
def write_int8(p: Pages, k: wp.array2d[float], v: wp.array2d[float], c: Int8Pages, head_width: int) -> None:
    """``int8_pages.encode_value`` of each head of the batch's values, and the keys into their tails, [T, kv_width]
    each: (8 + 5) T kv_width + 4 T kv_heads bytes; 4 T kv_width operations."""
    row, head, thread = wp.tid()
    position = p.positions[row]
    place, kept = slot(p, row, position), tail_slot(p, c.own, row, position)
    first = head * head_width
    largest = wp.float32(0.0)
    for column in range(first + thread, first + head_width, wp.block_dim()):
        c.tails[kept, column] = k[row, column]
        largest = wp.max(largest, wp.abs(v[row, column]))
        if not wp.isfinite(v[row, column]):
            largest = wp.float32(wp.inf)
    largest = wp.tile_max(wp.tile(largest))[0]
    scale = scale_of(wp.float64(largest) / wp.float64(127.0))
    if thread == 0:
        c.value_scales[place, head] = scale if wp.isfinite(largest) else wp.float32(wp.nan)
    for column in range(first + thread, first + head_width, wp.block_dim()):
        code = wp.int8(0)
        if wp.isfinite(largest):
            code = wp.int8(wp.rint(wp.float64(v[row, column]) / wp.float64(scale)))
        c.value_codes[place, column] = code


@wp.kernel
def encode_keys(p: Pages, full: wp.array1d[int], c: Int8Pages) -> None:
    """``int8_pages.encode_keys`` of every channel of the F pages whose last slot is written by a row of ``full``,
    [F, kv_width]. F kv_width ((4 + 1) page_size + 8) bytes; 6 F kv_width page_size operations."""
    i, column = wp.tid()
    row = full[i]
    place = slot(p, row, p.positions[row]) - p.page_size + 1  # the page's first slot
    kept = tail_slot(p, c.own, row, 0)
    low, high = wp.float32(wp.inf), wp.float32(-wp.inf)
    finite = wp.bool(True)
    for offset in range(p.page_size):
        key = c.tails[kept + offset, column]
        low = wp.min(low, key)
        high = wp.max(high, key)
        finite = finite and wp.isfinite(key)
    scale = scale_of((wp.float64(high) - wp.float64(low)) / wp.float64(255.0))
    grid = place // p.page_size
    c.key_lows[grid, column] = low if finite else wp.float32(0.0)
    c.key_scales[grid, column] = scale if finite else wp.float32(wp.nan)
    for offset in range(p.page_size):
        code = wp.uint8(0)
        if finite:
            above = wp.float64(c.tails[kept + offset, column]) - wp.float64(low)
            code = wp.uint8(wp.rint(above / wp.float64(scale)))
        c.key_codes[place + offset, column] = code


@wp.func
def dot_codes(q: wp.array2d[float], row: int, mine: int, c: Int8Pages, place: int, grid: int, shared: int,
              width: int) -> float:
    """Inner product of a head's numbers in a row of q with a key that is stored as codes."""
    total = wp.float32(0.0)
    for column in range(width):
        key = c.key_lows[grid, shared + column] + c.key_scales[grid, shared + column] * float(
            c.key_codes[place, shared + column])
        total += q[row, mine + column] * key
    return total


@wp.kernel
def attend_int8(p: Pages, q: wp.array2d[float], c: Int8Pages, head_width: int, group: int,
                out: wp.array2d[float]) -> None:
    """``kernels.attend`` over codes, [T, H d]: the same blocks and the same online softmax; the score of a
    position in the row's own page is of floats, and a value's scale is multiplied into its weight.

    n (2 kv_width + 4 kv_heads + 8 kv_width / page_size) bytes for each row, and 4 kv_width for each position in its
    own page; 6 n H d operations for each row.
    """
    row, head, thread = wp.tid()
    last = p.positions[row]
    own_page = last - last % p.page_size  # its first position
    kv_head = head // group
    mine, shared = head * head_width, kv_head * head_width
    scale = 1.0 / wp.sqrt(float(head_width))
    highest = wp.float32(-wp.inf)
    total = wp.float32(0.0)
    for column in range(thread, head_width, wp.block_dim()):
        out[row, mine + column] = 0.0
    for start in range(0, last + 1, wp.block_dim()):
        position = start + thread
        place = wp.int32(0)
        score = wp.float32(-wp.inf)
        value_scale = wp.float32(0.0)
        if position <= last:
            place = slot(p, row, position)
            value_scale = c.value_scales[place, kv_head]
            if position < own_page:
                score = scale * dot_codes(q, row, mine, c, place, place // p.page_size, shared, head_width)
            else:
                score = scale * dot(q, row, mine, c.tails, tail_slot(p, c.own, row, position), shared, head_width)
        higher = wp.max(highest, wp.tile_max(wp.tile(score))[0])
        shrink = wp.exp(highest - higher)  # the first time exp(-inf): 0
        highest = higher
        weight = wp.exp(score - higher)  # 0 where a thread has no position
        weights = wp.tile(weight * value_scale)
        places = wp.tile(place)
        total = total * shrink + wp.tile_sum(wp.tile(weight))[0]
        for column in range(thread, head_width, wp.block_dim()):
            mixed = out[row, mine + column] * shrink
            for i in range(wp.min(wp.block_dim(), last + 1 - start)):
                mixed += weights[i] * float(c.value_codes[places[i], shared + column])
            out[row, mine + column] = mixed
    for column in range(thread, head_width, wp.block_dim()):
        out[row, mine + column] = out[row, mine + column] / total
