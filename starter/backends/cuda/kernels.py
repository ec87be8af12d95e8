"""Optional · The decoder's arithmetic as GPU kernels, written in Python with NVIDIA Warp (extra ``cuda``).

A *kernel* is a function that runs many times at once. Each run, a *thread*, asks ``wp.tid()`` which one it is and
computes its part of the result. Threads come in *blocks* (``block_dim`` of them, 128 on a GPU), and only those of one
block can work together. Two shapes occur here:

    one number a thread                          one block a result
    swiglu, add, rotate, write_pages ...         norm, products, attend, best_tokens
    thread (row, column) writes out[row, column] the threads of a block share a sum, here over 9 columns by 4 threads:

                                                     column   0 1 2 3 4 5 6 7 8
                                                     thread   0 1 2 3 0 1 2 3 0     neighbours read neighbours
                                                     ``tile_sum`` adds up the four sums, and gives all the total

``wp.tile(number)`` lays the threads' numbers side by side, so that the block can add them up or read each other's.
Every element of a result is written by one thread, and threads exchange numbers only through tiles, so there are no
races.

How fast can it be? A GPU reads memory at a fixed rate (an RTX 4060 Ti: 288 GB/s) and multiplies far faster than that,
so a kernel takes at least *bytes / rate*. Each docstring gives the bytes that must be moved, however the kernel is
written, and the arithmetic: T rows of the batch, D columns, R rows of the matrix, H heads of d numbers, n positions
seen. Example: an int8 matrix [2048, 2048] and one row of x are 4.2 MB and 12.6 million operations: 15 microseconds for
the bytes.

Written for Warp, so: ``wp.float32(0.0)`` is a variable that a loop may change, where ``0.0`` would be a constant.

Executed on the CPU, compiled for sm_89 (``scripts/compile_kernels.py``), not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import warp as wp

wp.config.enable_cpu_blocks = True  # blocks of real threads on the CPU, too, so that tests meet them
wp.config.log_level = wp.LOG_WARNING  # nothing on standard output
wp.set_module_options({"enable_backward": False})  # no training: compiles ten times faster

ROWS = 8  # of a batch that a block multiplies by the same weights
EightRows = wp.types.vector(length=ROWS, dtype=wp.float32)

# ----------------------------------------------------------------------------------------------- one number a thread


@wp.kernel
def add(x: wp.array2d[float], y: wp.array2d[float], out: wp.array2d[float]) -> None:
    """out = x + y, [T, D]. 12 T D bytes; T D additions."""
    row, column = wp.tid()
    out[row, column] = x[row, column] + y[row, column]


@wp.kernel
def add_bias(x: wp.array2d[float], bias: wp.array1d[float]) -> None:
    """x += bias in every row, [T, D]. 8 T D bytes; T D additions."""
    row, column = wp.tid()
    x[row, column] = x[row, column] + bias[column]


@wp.kernel
def swiglu(gate: wp.array2d[float], up: wp.array2d[float], out: wp.array2d[float]) -> None:
    """out = gate / (1 + exp(-gate)) * up, [T, D]. 12 T D bytes; 4 T D operations."""
    row, column = wp.tid()
    z = gate[row, column]
    out[row, column] = z / (1.0 + wp.exp(-z)) * up[row, column]


@wp.kernel
def gather(table: wp.array2d[Any], rows: wp.array1d[int], out: wp.array2d[float]) -> None:
    """out[i] = table[rows[i]], [T, D]: embedding, and picking rows. (4 + size of a number) T D bytes; no arithmetic."""
    i, column = wp.tid()
    out[i, column] = float(table[rows[i], column])


@wp.kernel
def turns(positions: wp.array1d[int], frequencies: wp.array1d[wp.float64], out: wp.array2d[wp.vec2]) -> None:
    """The cosine and sine of every pair's angle, [T, d / 2], once a step. In double, as float32 has lost the angle's
    last digits at position 100,000. 4 T d bytes."""
    row, pair = wp.tid()
    angle = wp.float64(positions[row]) * frequencies[pair]
    out[row, pair] = wp.vec2(float(wp.cos(angle)), float(wp.sin(angle)))


@wp.kernel
def rotate(x: wp.array2d[float], turned: wp.array2d[wp.vec2], out: wp.array2d[float]) -> None:
    """Turn the pair (2i, 2i + 1) of each head by its angle, [T, D]; a thread turns a pair, and all heads use the same
    angles. 8 T D bytes; 3 T D operations."""
    row, pair = wp.tid()
    turn = turned[row, pair % turned.shape[1]]
    a, b = x[row, 2 * pair], x[row, 2 * pair + 1]
    out[row, 2 * pair] = a * turn[0] - b * turn[1]
    out[row, 2 * pair + 1] = a * turn[1] + b * turn[0]


# ----------------------------------------------------------------------------------------------- one block a row


@wp.kernel
def norm(x: wp.array2d[float], gain: wp.array1d[float], epsilon: float, out: wp.array2d[float]) -> None:
    """out = x / sqrt(mean(x^2) + epsilon) * gain, [T, D], over each part of a row that is as long as the gain: a whole
    row, or a head. In double, as the square of 1.8e19 is beyond float32. 8 T D bytes; 4 T D operations."""
    row, part, thread = wp.tid()
    width = gain.shape[0]
    first = part * width
    squares = wp.float64(0.0)
    for column in range(thread, width, wp.block_dim()):
        number = wp.float64(x[row, first + column])
        squares += number * number
    mean = wp.tile_sum(wp.tile(squares))[0] / wp.float64(width)
    scale = wp.float64(1.0) / wp.sqrt(mean + wp.float64(epsilon))
    for column in range(thread, width, wp.block_dim()):
        out[row, first + column] = float(wp.float64(x[row, first + column]) * scale) * gain[column]


@wp.kernel
def best_tokens(logits: wp.array2d[float], out: wp.array1d[wp.vec2d]) -> None:
    """The likeliest token of each row (of equals, the lowest number) and the logarithm of its probability: all that
    greedy sampling sends to the host. 4 T D bytes; 3 T D operations."""
    row, thread = wp.tid()
    width = logits.shape[1]
    best = wp.float32(-wp.inf)
    token = wp.int32(width)
    for column in range(thread, width, wp.block_dim()):
        if logits[row, column] > best:  # the first of this thread's, as columns go up
            best = logits[row, column]
            token = column
    highest = wp.tile_max(wp.tile(best))[0]
    if best < highest:
        token = width
    first = wp.tile_min(wp.tile(token))[0]
    odds = wp.float64(0.0)  # a thread may add a hundred thousand
    for column in range(thread, width, wp.block_dim()):
        odds += wp.float64(wp.exp(logits[row, column] - highest))
    total = wp.tile_sum(wp.tile(odds))[0]
    if thread == 0:
        out[row] = wp.vec2d(wp.float64(first), -wp.log(total))


# ----------------------------------------------------------------------------------------------- products


@wp.kernel
def times_floats(weights: wp.array2d[Any], x: wp.array2d[float], out: wp.array2d[float]) -> None:
    """out = x @ weights.T for one row of x or a few, [T, R]: a block for each number of the result.
    (size of a weight) R D + 4 T (D + R) bytes; 2 T R D operations."""
    row, i, thread = wp.tid()
    total = wp.float32(0.0)
    for column in range(thread, weights.shape[1], wp.block_dim()):
        total += float(weights[row, column]) * x[i, column]
    total = wp.tile_sum(wp.tile(total))[0]
    if thread == 0:
        out[i, row] = total


@wp.kernel
def times_floats_8(weights: wp.array2d[Any], x: wp.array2d[float], out: wp.array2d[float]) -> None:
    """The same for many rows of x: a weight that was read serves eight of them, so the matrix moves T / 8 times instead
    of T times. (size of a weight) R D ceil(T / 8) + 4 T (D + R) bytes; 2 T R D operations."""
    row, eight, thread = wp.tid()
    totals = EightRows()
    for column in range(thread, weights.shape[1], wp.block_dim()):
        weight = float(weights[row, column])
        for r in range(ROWS):
            totals[r] += weight * x[row_of(eight, r, x.shape[0]), column]
    write_8(totals, row, eight, thread, out)


@wp.func
def row_of(eight: int, r: int, rows: int) -> int:
    """Row r of the eight; where the batch has ended, its last row, whose sum is then found again and not written."""
    return wp.min(eight * ROWS + r, rows - 1)


@wp.func
def write_8(totals: Any, row: int, eight: int, thread: int, out: wp.array2d[float]) -> None:
    """Add up what the threads found for each of the eight rows, and write it: a thread a row, as far as there are."""
    sums = wp.tile_sum(wp.tile(totals, preserve_type=True))[0]
    for r in range(ROWS):
        if thread == r % wp.block_dim() and eight * ROWS + r < out.shape[0]:
            out[eight * ROWS + r, row] = sums[r]


@wp.struct
class Codes:
    """A quantized matrix [R, D]. A group of a row begins with a fresh word, its first code in the word's lowest bits:

        bits 8, group_size 5    word 0: codes 3 2 1 0   word 1: - - - 4   word 2: codes 8 7 6 5   ...
        weight = scale of the group * (code - zero point of the group), code 0 .. 2**bits - 1
    """

    words: wp.array2d[wp.uint32]  # [R, words]
    scales: wp.array2d[float]  # [R, groups]
    zeros: wp.array2d[float]  # [R, groups]; of symmetric codes all are one number in memory
    columns: int
    group_size: int
    group_words: int  # words of a group
    word_codes: int  # codes in a word: 4 of 8 bits, 8 of 4 bits
    bits: wp.uint32
    mask: wp.uint32  # the lowest ``bits`` bits


@wp.func
def first_column(m: Codes, word: int) -> int:
    """Of the codes in a word."""
    group = word // m.group_words
    return group * m.group_size + (word - group * m.group_words) * m.word_codes


@wp.func
def end_column(m: Codes, word: int) -> int:
    """One after the last column in a word: it is full, or its group or the row has ended."""
    group_end = (word // m.group_words + 1) * m.group_size
    return wp.min(first_column(m, word) + m.word_codes, wp.min(group_end, m.columns))


@wp.kernel
def times_codes(m: Codes, x: wp.array2d[float], out: wp.array2d[float]) -> None:
    """out = x @ weights.T for one row of x or a few, [T, R], straight from the codes: a thread reads a word of four or
    eight codes, and no float of the matrix ever lies in memory.
    bits / 8 R D + 4 R groups (asymmetric: 8) + 4 T (D + R) bytes; 3 T R D operations."""
    row, i, thread = wp.tid()
    total = wp.float32(0.0)
    for word in range(thread, m.words.shape[1], wp.block_dim()):
        group = word // m.group_words
        zero = m.zeros[row, group]
        codes = m.words[row, word]
        part = wp.float32(0.0)
        for column in range(first_column(m, word), end_column(m, word)):
            part += (float(codes & m.mask) - zero) * x[i, column]
            codes = codes >> m.bits
        total += part * m.scales[row, group]
    total = wp.tile_sum(wp.tile(total))[0]
    if thread == 0:
        out[i, row] = total


@wp.kernel
def times_codes_8(m: Codes, x: wp.array2d[float], out: wp.array2d[float]) -> None:
    """The same for many rows of x, each code being unpacked for eight of them.
    (bits / 8 R D + 4 R groups (asymmetric: 8)) ceil(T / 8) + 4 T (D + R) bytes; 2 T R D operations, and
    3 R D ceil(T / 8) to unpack."""
    row, eight, thread = wp.tid()
    totals = EightRows()
    for word in range(thread, m.words.shape[1], wp.block_dim()):
        group = word // m.group_words
        zero, scale = m.zeros[row, group], m.scales[row, group]
        codes = m.words[row, word]
        for column in range(first_column(m, word), end_column(m, word)):
            weight = scale * (float(codes & m.mask) - zero)
            for r in range(ROWS):
                totals[r] += weight * x[row_of(eight, r, x.shape[0]), column]
            codes = codes >> m.bits
    write_8(totals, row, eight, thread, out)


@wp.kernel
def gather_codes(m: Codes, rows: wp.array1d[int], out: wp.array2d[float]) -> None:
    """out[i] = row rows[i] of a quantized table, [T, D]. (4 + bits / 8) T D + 8 T groups bytes; 2 T D operations."""
    i, word = wp.tid()
    row, group = rows[i], word // m.group_words
    codes = m.words[row, word]
    for column in range(first_column(m, word), end_column(m, word)):
        out[i, column] = m.scales[row, group] * (float(codes & m.mask) - m.zeros[row, group])
        codes = codes >> m.bits


# ----------------------------------------------------------------------------------------------- pages


@wp.struct
class Pages:
    """Which slot of the pool holds a position of a row's request. ``tables`` are the block tables of the batch's
    requests, one below the other; row i of the batch belongs to request ``spans[i]`` and is at ``positions[i]``."""

    tables: wp.array2d[int]  # [requests, pages]
    spans: wp.array1d[int]  # [T]
    positions: wp.array1d[int]  # [T]
    page_size: int
    layers: int
    layer: int


@wp.func
def slot(p: Pages, row: int, position: int) -> int:
    """Where a position of a row's request lies in the pool, which holds page after page, and in a page layer after
    layer, ``page_size`` rows of numbers each."""
    page = p.tables[p.spans[row], position // p.page_size]
    return (page * p.layers + p.layer) * p.page_size + position % p.page_size


@wp.kernel
def write_pages(p: Pages, k: wp.array2d[float], v: wp.array2d[float], keys: wp.array2d[Any],
                values: wp.array2d[Any]) -> None:
    """The keys and values of the batch into their slots, [T, kv_width] each.
    2 (4 + size of a number) T kv_width bytes; no arithmetic."""
    row, column = wp.tid()
    place = slot(p, row, p.positions[row])
    keys[place, column] = keys.dtype(k[row, column])
    values[place, column] = values.dtype(v[row, column])


@wp.func
def dot(q: wp.array2d[float], row: int, mine: int, keys: wp.array2d[Any], place: int, shared: int, width: int) -> float:
    """Inner product of a head's numbers in a row of q with those in a slot of the keys."""
    total = wp.float32(0.0)
    for column in range(width):
        total += q[row, mine + column] * float(keys[place, shared + column])
    return total


@wp.kernel
def attend(p: Pages, q: wp.array2d[float], keys: wp.array2d[Any], values: wp.array2d[Any], head_width: int, group: int,
           out: wp.array2d[float]) -> None:
    """softmax(q . k / sqrt(d)) . v of each row and head over the row's own positions, [T, H d]: a block for each.

    Positions are looked at a block at a time, and the softmax is *online* (Milakov and Gimelshein 2018): when a higher
    score turns up, what has been added until now shrinks by exp(old highest - new highest). So no list of scores is
    ever stored, and a context may be of any length.

        positions  0 1 2 3 | 4 5 6 7 | 8           block_dim 4
                   a score by each thread; the block's highest; weight = exp(score - highest)
                   then each thread adds up some columns of the values, over the four positions

    (size of a number) 2 n kv_width bytes for each row, the heads of a ``group`` sharing what the first of them has
    brought into the cache; 4 n H d operations for each row.
    """
    row, head, thread = wp.tid()
    length = p.positions[row] + 1
    mine, shared = head * head_width, head // group * head_width  # first column of this head in q, and in a slot
    scale = 1.0 / wp.sqrt(float(head_width))
    highest = wp.float32(-wp.inf)
    total = wp.float32(0.0)
    for column in range(thread, head_width, wp.block_dim()):
        out[row, mine + column] = 0.0
    for start in range(0, length, wp.block_dim()):
        place = wp.int32(0)
        score = wp.float32(-wp.inf)
        if start + thread < length:
            place = slot(p, row, start + thread)
            score = scale * dot(q, row, mine, keys, place, shared, head_width)
        higher = wp.max(highest, wp.tile_max(wp.tile(score))[0])
        shrink = wp.exp(highest - higher)  # the first time exp(-inf): 0
        highest = higher
        weights = wp.tile(wp.exp(score - higher))  # 0 where a thread has no position
        places = wp.tile(place)
        total = total * shrink + wp.tile_sum(weights)[0]
        for column in range(thread, head_width, wp.block_dim()):
            mixed = out[row, mine + column] * shrink
            for i in range(wp.min(wp.block_dim(), length - start)):
                mixed += weights[i] * float(values[places[i], shared + column])
            out[row, mine + column] = mixed
    for column in range(thread, head_width, wp.block_dim()):
        out[row, mine + column] = out[row, mine + column] / total


# ----------------------------------------------------------------------------------------------- number formats

# A kernel with ``Any`` is compiled once for each of these: forms[attend, wp.float16] reads pages of float16. All are
# made here, before the first compilation, and chosen by their callers, which spares Warp a search at every launch.
forms: dict[tuple[Any, Any], Any] = {
    (kernel, number): wp.overload(kernel, dict.fromkeys(names, wp.array2d(dtype=number)))
    for number in (wp.float32, wp.float16)
    for kernel, names in ((gather, ("table",)), (times_floats, ("weights",)), (times_floats_8, ("weights",)),
                          (write_pages, ("keys", "values")), (attend, ("keys", "values")))}
