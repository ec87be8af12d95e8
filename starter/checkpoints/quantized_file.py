"""M5 · Quantized matrices in a safetensors file, so that they can be loaded without the floats they were made from.

A matrix "w" of R rows, with G groups and B packed bytes in a row, is two or three tensors and a note in the metadata:

    w                U8               [R, B]     the packed codes (``quantization.py``)
    w.scales         F32, F64         [R, G]
    w.zero_points    I16, I64, F32    [R, G]     only if asymmetric
    __metadata__     "quantized": {"w": {"shape": [R, columns], "bits": 4, "group_size": 32, "symmetric": true}}

    write_quantized("tiny.int4.safetensors", {"w": quantize(rows, QuantizationConfig(4))})
    read_quantized("tiny.int4.safetensors")["w"]

Any safetensors library reads such a file. Nothing in it is trusted: ``safetensors.py`` checks the sizes, and
``QuantizedTensor`` checks that the parts of a matrix fit together.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starter.base.strict_json import Boolean, Integer, ListOf, MapOf, Nullable, Record, parse_json
from starter.base.tensor_json import ZERO_POINT_FORMAT
from starter.base.weights import little_endian
from starter.checkpoints.safetensors import RawTensor, read_raw, write_raw
from starter.errors import QuantizationError, SchemaError
from starter.quantization import QuantizedTensor

_NOTE = "quantized"
_DTYPES = {"f": "F32", "d": "F64", "h": "I16", "q": "I64"}
_TYPECODES = {dtype: typecode for typecode, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class _Form:
    """What the tensors of the file do not say about a matrix."""

    shape: tuple[int, int]
    bits: int
    group_size: int | None
    symmetric: bool


_FORMS = MapOf(Record(_Form, {
    "shape": ListOf(Integer(1), 2, 2),
    "bits": Integer(4, 8),
    "group_size": Nullable(Integer(1, 2**63 - 1)),
    "symmetric": Boolean(),
}))


def write_quantized(path: str | Path, tensors: Mapping[str, QuantizedTensor],
                    metadata: Mapping[str, str] | None = None) -> None:
    """Write matrices by name, and further ``metadata``. O(bytes). SchemaError, and no file, if two tensors would have
    the same name, as with a matrix "w" and another one called "w.scales"."""
    parts: dict[str, RawTensor] = {}
    for name, q in tensors.items():
        for part, raw in _parts(name, q):
            if part in parts:
                raise SchemaError(f"two tensors would have the name {part}; rename one of the matrices")
            parts[part] = raw
    forms = {name: _Form(q.shape, q.bits, q.group_size, q.symmetric) for name, q in tensors.items()}
    write_raw(path, parts, {**(metadata or {}), _NOTE: json.dumps(_FORMS.dump(forms))})


def read_quantized(path: str | Path) -> dict[str, QuantizedTensor]:
    """All matrices of a file. O(bytes). SchemaError that names the file and the matrix if anything is malformed,
    missing, contradictory or superfluous."""
    metadata, parts = read_raw(path)
    if _NOTE not in metadata:
        raise SchemaError(f"{path}: the metadata have no note {_NOTE!r}; read_safetensors reads files of floats")
    try:
        forms: dict[str, _Form] = _FORMS.parse(parse_json(metadata[_NOTE]), "")
    except SchemaError as error:
        raise SchemaError(f"{path}: the note {_NOTE!r}: {error.problem}", error.path) from None
    found: dict[str, QuantizedTensor] = {}
    for name, form in forms.items():
        try:
            found[name] = _tensor(name, form, parts)
        except QuantizationError as error:
            raise SchemaError(f"{path}: {name}: {error}") from None
    if unexpected := set(parts).difference(*(dict(_parts(name, q)) for name, q in found.items())):
        raise SchemaError(f"{path}: {min(unexpected)} belongs to no quantized matrix")
    return found


def _parts(name: str, q: QuantizedTensor) -> Iterator[tuple[str, RawTensor]]:
    rows = q.shape[0]
    yield name, RawTensor("U8", (rows, q.row_bytes), q.packed)
    for part, numbers in (("scales", q.scales), ("zero_points", q.zero_points)):
        if numbers:
            data = little_endian(numbers)
            yield f"{name}.{part}", RawTensor(_DTYPES[numbers.typecode], (rows, q.groups_per_row), data)


def _tensor(name: str, form: _Form, parts: Mapping[str, RawTensor]) -> QuantizedTensor:
    scales = _numbers(f"{name}.scales", parts)
    zero_points = (array(ZERO_POINT_FORMAT.get(scales.typecode, "h")) if form.symmetric
                   else _numbers(f"{name}.zero_points", parts))
    q = QuantizedTensor(form.shape, form.bits, form.group_size, form.symmetric, scales, zero_points,
                        _part(name, parts).data)
    for part, raw in _parts(name, q):
        given = parts[part]
        if (given.dtype, given.shape) != (raw.dtype, raw.shape):
            raise QuantizationError(f"{part} must be {raw.dtype} of shape {list(raw.shape)}, "
                                    f"not {given.dtype} of shape {list(given.shape)}")
    return q


def _part(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
    if name not in parts:
        raise QuantizationError(f"the tensor {name} is missing")
    return parts[name]


def _numbers(name: str, parts: Mapping[str, RawTensor]) -> array[Any]:
    dtype, _, data = _part(name, parts)
    if dtype not in _TYPECODES:
        raise QuantizationError(f"{name} must be one of {', '.join(_TYPECODES)}, not {dtype}")
    numbers = array(_TYPECODES[dtype], data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
