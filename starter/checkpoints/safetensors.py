"""M1 · Read and write safetensors files, the simple container that most checkpoints come in.

    8 bytes   size of the header, unsigned, little-endian
    header    JSON: {"__metadata__": {"text": "text"},
                     "model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}, ...}
    data      the tensors, row after row, little-endian; offsets count from here

The tensors must cover the data exactly: no overlap, no gap, nothing after the last. Nothing in a file is trusted: every
size that it claims is compared with the file's real size before memory is allocated.

    weights = read_safetensors("model.safetensors")          # F32, F16 and BF16 all become float32
    write_safetensors("half.safetensors", weights, "BF16")   # rounded to nearest, ties to even

``read_raw`` and ``write_raw`` leave the numbers as bytes, whatever their format, for ``quantized_file.py``.

Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

from starter.base.strict_json import Integer, ListOf, MapOf, OneOf, Record, Text, parse_json, pointer
from starter.base.weights import Tensor, Weights, check_finite, float32_array, little_endian
from starter.checkpoints.files import float16_array, open_checkpoint, replace_file
from starter.errors import SchemaError

MAX_HEADER_BYTES = 1024 * 1024  # about 10,000 tensors


# -------------------------------------------------------------------------------------------- number formats


class _Dtype(NamedTuple):
    size: int     # bytes of a number
    limit: float  # numbers from here on round to infinity
    encode: Callable[[array[float]], bytes]
    decode: Callable[[bytes], array[float]]


def _encode_f16(values: array[float]) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)  # struct rounds to nearest, ties to even


def _encode_bf16(values: array[float]) -> bytes:
    # bfloat16 is the upper half of a float32. Adding half a unit (one bit less if the upper half is even) and cutting
    # off the lower half rounds to nearest, ties to even. A carry into the exponent is right, too.
    words = array("I", values.tobytes())
    return struct.pack(f"<{len(words)}H", *[(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words])


def _decode_bf16(raw: bytes) -> array[float]:
    wide = bytearray(2 * len(raw))
    wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
    return float32_array(wide)


_DTYPES = {
    "F32": _Dtype(4, inf, little_endian, float32_array),
    "F16": _Dtype(2, 65_520.0, _encode_f16, float16_array),
    "BF16": _Dtype(2, 2.0**128 - 2.0**119, _encode_bf16, _decode_bf16),
}
_SIZES = {**{name: form.size for name, form in _DTYPES.items()}, "F64": 8, "I64": 8, "I16": 2, "U8": 1}


# ------------------------------------------------------------------------------------------------- the header


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _SIZES[self.dtype]


_NAME = Text(longest=1_000)
_METADATA = MapOf(Text())
_ENTRY = Record(_Entry, {
    "dtype": OneOf(tuple(_SIZES)),
    "shape": ListOf(Integer(), longest=8),
    "data_offsets": ListOf(Integer(high=2**62), 2, 2),
})


def _layout(header: Mapping[str, object], data_size: int) -> list[tuple[str, _Entry]]:
    """The tensors in the order of their data, which they cover exactly; SchemaError otherwise."""
    _METADATA.parse(header.get("__metadata__", {}), "/__metadata__")
    entries: list[tuple[str, _Entry]] = [
        (_NAME.parse(name, pointer("", name)), _ENTRY.parse(value, pointer("", name)))
        for name, value in header.items() if name != "__metadata__"]
    entries.sort(key=lambda named: named[1].data_offsets)
    covered = 0
    for name, entry in entries:
        start, end = entry.data_offsets
        path = pointer("", name) + "/data_offsets"
        if start != covered:
            fault = "overlaps the tensor before it" if start < covered else "leaves a gap"
            raise SchemaError(f"starts at {start}, which {fault}; {covered} is expected", path)
        if end - start != entry.nbytes:
            raise SchemaError(f"has {end - start} bytes, but {entry.dtype} of shape {list(entry.shape)} takes "
                              f"{entry.nbytes}", path)
        covered = end
    if covered != data_size:
        fault = "is cut short" if covered > data_size else "holds bytes of no tensor"
        raise SchemaError(f"the data has {data_size} bytes where the header describes {covered}: the file {fault}")
    return entries


def _header_size(prefix: bytes, file_size: int) -> int:
    if len(prefix) < 8:
        raise SchemaError(f"not a safetensors file: it has {file_size} bytes, and the header's size alone takes 8")
    size = int.from_bytes(prefix, "little")
    allowed = min(MAX_HEADER_BYTES, file_size - 8)
    if not 2 <= size <= allowed:
        raise SchemaError(f"not a safetensors file, or one cut short: it claims a header of {size} bytes; "
                          f"2 to {allowed} are possible")
    return size


def _parse_header(raw: bytes) -> dict[str, object]:
    if not raw.startswith(b"{"):
        raise SchemaError(f"the header must begin with '{{', not with {raw[:1]!r}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SchemaError(f"the header is not UTF-8: {error.reason} at byte {error.start}") from None
    header = parse_json(text)
    assert isinstance(header, dict)  # nothing else begins with "{"
    return header


def _read_header(file: BinaryIO, file_size: int) -> tuple[dict[str, str], list[tuple[str, _Entry]]]:
    """The metadata, and where the tensors are. The file is left at the first byte of the data."""
    header_size = _header_size(file.read(8), file_size)
    header = _parse_header(file.read(header_size))
    entries = _layout(header, file_size - 8 - header_size)
    return _METADATA.parse(header.get("__metadata__", {}), "/__metadata__"), entries


# ----------------------------------------------------------------------------------------- reading and writing


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a file as float32. SchemaError that names the file for anything malformed. O(file)."""
    with open_checkpoint(path) as (file, size):
        _, entries = _read_header(file, size)
        for name, entry in entries:
            if entry.dtype not in _DTYPES:
                raise SchemaError(f"{entry.dtype} is no format of weights; {', '.join(_DTYPES)} are",
                                  pointer("", name) + "/dtype")
        return {name: Tensor(entry.shape, _DTYPES[entry.dtype].decode(file.read(entry.nbytes)))
                for name, entry in entries}


def write_safetensors(path: str | Path, weights: Weights, dtype: str = "F32",
                      metadata: Mapping[str, str] | None = None) -> None:
    """Write all tensors, in the order of their names, as ``dtype``: "F32", "F16" or "BF16". O(numbers).

    SchemaError, and no file, if a number is not finite or is beyond the range of the dtype.
    """
    form = _DTYPES[OneOf(tuple(_DTYPES)).parse(dtype, "/dtype")]
    if "__metadata__" in weights:
        raise SchemaError("no tensor can have the name __metadata__; the format keeps it for notes", "/__metadata__")
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(weights):
        start, end = end, end + len(weights[name].values) * form.size
        header[name] = {"dtype": dtype, "shape": list(weights[name].shape), "data_offsets": [start, end]}
    _layout(header, end)  # never writes what the reader would refuse
    replace_file(path, _chunks(header, weights, form))


def _chunks(header: Mapping[str, object], weights: Weights, form: _Dtype) -> Iterator[bytes]:
    yield _header_bytes(header)
    for name in sorted(weights):
        values = weights[name].values
        check_finite(name, weights[name])
        if max(map(abs, values), default=0.0) >= form.limit:
            index, value = next((i, value) for i, value in enumerate(values) if abs(value) >= form.limit)
            raise SchemaError(f"{name} holds {value:g} at index {index}, beyond the range of this dtype; "
                              "write F32 instead", "/dtype")
        yield form.encode(values)


def _header_bytes(header: Mapping[str, object]) -> bytes:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8
    if len(text) > MAX_HEADER_BYTES:
        raise SchemaError(f"the header takes {len(text)} bytes; at most {MAX_HEADER_BYTES} are read")
    return len(text).to_bytes(8, "little") + text


# ------------------------------------------------------------------------------------------------ as raw bytes


class RawTensor(NamedTuple):
    """A tensor's numbers as the bytes of the file: F32, F16, BF16, F64, I64, I16 or U8, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_raw(path: str | Path) -> tuple[dict[str, str], dict[str, RawTensor]]:
    """The metadata and all tensors of a file; SchemaError as ``read_safetensors``. O(file)."""
    with open_checkpoint(path) as (file, size):
        metadata, entries = _read_header(file, size)
        return metadata, {name: RawTensor(entry.dtype, entry.shape, file.read(entry.nbytes))
                          for name, entry in entries}


def write_raw(path: str | Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> None:
    """Write tensors in the order given. SchemaError, and no file, for what ``read_raw`` would refuse. O(bytes)."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        start, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    _layout(header, end)
    replace_file(path, [_header_bytes(header), *(tensor.data for tensor in tensors.values())])
