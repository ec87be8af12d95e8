"""Optional · Read GGUF files, the container of llama.cpp: one file with everything that a model needs.

    magic "GGUF", version (u32), number of tensors (u64), number of metadata (u64)
    metadata    key, type, value          "llama.block_count" -> 30, "tokenizer.ggml.tokens" -> [...]
    tensors     name, dimensions, format, offset          "blk.0.attn_q.weight", [576, 576], Q4_1, 28_311_552
    padding up to a multiple of ``general.alignment`` (32 unless it says otherwise)
    data        the tensors in the same order, each padded likewise; offsets count from here

    with open_gguf("model.gguf") as gguf:
        gguf.metadata["general.architecture"]           # "llama"
        gguf.tensor("token_embd.weight")                # float32, whatever its format in the file (gguf_blocks.py)

Everything is little-endian; a text is its length (u64) and then UTF-8. Nothing in a file is trusted: its head is read
in one piece of bounded size, every count is compared with the bytes that are left before memory is allocated for it,
and the tensors must cover the data in order, without overlap or gap. Any error is one SchemaError that names the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from starter.base.weights import Tensor, float32_array
from starter.checkpoints.files import open_checkpoint
from starter.checkpoints.gguf_blocks import FORMATS, BlockFormat, as_quantized_tensor
from starter.errors import QuantizationError, SchemaError
from starter.quantization import QuantizedTensor

MAX_HEAD_BYTES = 32 * 1024 * 1024  # everything before the data; a vocabulary of 250,000 tokens takes half
MAX_NAME_BYTES = 65_535
MAX_ALIGNMENT = 65_536
_DEFAULT_ALIGNMENT = 32
MAX_THINGS = 65_536  # metadata, or tensors
MAX_ITEMS = 2_000_000  # of all lists of the metadata; a vocabulary of 250,000 tokens with its merges takes half
_BIG_ENDIAN = "a big-endian GGUF file; only little-endian ones are read, so download or convert to one of these"
_SMALLEST_TENSOR, _SMALLEST_ENTRY = 33, 14  # least bytes of a tensor's entry, and of a key with its value

_ALL_FORMATS = {"F32": BlockFormat(1, 4), **FORMATS}
_KINDS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}
_OTHER_KINDS = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
                15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
                22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
                34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}  # codes of ``struct``
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is, in bytes from the start of the file. ``shape`` is rows first; the file has it backwards."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Gguf:
    """An open file: its metadata by key, and where its tensors are, by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    file: BinaryIO

    def tensor(self, name: str) -> Tensor:
        """A tensor as float32. O(numbers)."""
        entry, raw = self._raw(name)
        return Tensor(entry.shape, float32_array(raw) if entry.kind == "F32" else _dequantized(entry, raw))

    def quantized(self, name: str) -> QuantizedTensor:
        """A Q8_0, Q4_0 or Q4_1 matrix with the codes of the file. QuantizationError for another format or for a tensor
        that is not a matrix. O(numbers)."""
        entry, raw = self._raw(name)
        if len(entry.shape) != 2:
            raise QuantizationError(f"{name} has the shape {list(entry.shape)}; only a matrix stays quantized")
        return as_quantized_tensor(entry.kind, raw, *entry.shape)

    def _raw(self, name: str) -> tuple[GgufTensor, bytes]:
        if name not in self.tensors:
            raise SchemaError(f"there is no tensor {name}")
        entry = self.tensors[name]
        self.file.seek(entry.start)
        raw = self.file.read(entry.nbytes)
        if len(raw) != entry.nbytes:
            raise SchemaError(f"{name} ends after {len(raw)} of {entry.nbytes} bytes: the file was cut short meanwhile")
        return entry, raw


def _dequantized(entry: GgufTensor, raw: bytes) -> array[float]:
    """The numbers of a tensor of blocks, computed with NumPy if it is installed: models are large."""
    module = import_module(f"{__package__}.{'gguf_blocks_numpy' if find_spec('numpy') else 'gguf_blocks'}")
    values: array[float] = module.dequantize_blocks(entry.kind, raw, prod(entry.shape))
    return values


@contextmanager
def open_gguf(path: str | Path) -> Iterator[Gguf]:
    """Open a file, read its head and check it. SchemaError that names the file for anything malformed. O(head)."""
    with open_checkpoint(path) as (file, size):
        head = _Head(file.read(min(size, MAX_HEAD_BYTES)), size)
        tensor_count, entry_count = head.preamble()
        metadata = head.metadata(entry_count)
        yield Gguf(metadata, head.tensors(tensor_count, _alignment(metadata)), file)


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise SchemaError(f"general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}, not {alignment!r}")
    return alignment


class _Head:
    """Parses the head of a file from front to back."""

    def __init__(self, raw: bytes, file_size: int) -> None:
        self._raw, self._file_size, self._at = raw, file_size, 0
        self._items = 0  # read so far, of lists

    def preamble(self) -> tuple[int, int]:
        """The number of tensors and the number of metadata."""
        if self._raw[:4] == b"FUGG":
            raise SchemaError(_BIG_ENDIAN)
        if self._raw[:4] != b"GGUF":
            raise SchemaError(f"not a GGUF file: it begins with {self._raw[:4]!r}, not with b'GGUF'")
        self._at = 4
        version = self._number("I", "the version")
        if version not in (2, 3):
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            raise SchemaError(_BIG_ENDIAN if big_endian else
                              f"GGUF of version {version}; versions 2 and 3 are read")
        counts = (self._count(_SMALLEST_TENSOR, "tensors", "the number of tensors"),
                  self._count(_SMALLEST_ENTRY, "metadata", "the number of metadata"))
        for count, things in zip(counts, ("tensors", "metadata")):
            if count > MAX_THINGS:
                raise SchemaError(f"the file has {count} {things}; at most {MAX_THINGS} are read")
        return counts

    def metadata(self, count: int) -> dict[str, Any]:
        """Key -> number, boolean, text, or list of these."""
        found: dict[str, Any] = {}
        for i in range(count):
            key = self._name(f"the key of metadata {i}", found)
            kind = self._number("I", f"the type of {key}")
            found[key] = self._array(key) if kind == _ARRAY else self._reader(kind, key)()
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Name -> where the tensor is. The data begin after the last entry."""
        found: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for i in range(count):
            name = self._name(f"the name of tensor {i}", found)
            found[name] = self._tensor(name)
        data = -(-self._at // alignment) * alignment
        return self._placed(found, data, alignment)

    def _tensor(self, name: str) -> tuple[str, tuple[int, ...], int]:
        dimensions = self._number("I", f"the number of dimensions of {name}")
        if not 1 <= dimensions <= 4:
            raise SchemaError(f"{name} has {dimensions} dimensions; 1 to 4 are allowed")
        shape = tuple(self._number("Q", f"the dimensions of {name}") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise SchemaError(f"{name} has the shape {list(shape)}; no dimension can be 0")
        number = self._number("I", f"the format of {name}")
        if number not in _KINDS:
            known = f"{number} ({_OTHER_KINDS[number]})" if number in _OTHER_KINDS else f"{number}, which is unknown"
            raise SchemaError(f"{name} is of format {known}; {', '.join(_KINDS.values())} are read")
        return _KINDS[number], shape, self._number("Q", f"the offset of {name}")

    def _placed(self, found: dict[str, tuple[str, tuple[int, ...], int]], data: int,
                alignment: int) -> dict[str, GgufTensor]:
        """Positions in the file, from offsets into the data. SchemaError unless the tensors cover the data in their
        order, each padded to the alignment."""
        placed, end = {}, 0
        for name, (kind, shape, offset) in found.items():
            start = -(-end // alignment) * alignment
            if offset != start:
                raise SchemaError(f"the data of {name} start at {offset}, not at {start}, where those before it end")
            if shape[-1] % _ALL_FORMATS[kind].numbers:
                raise SchemaError(f"{name} has rows of {shape[-1]} numbers, which are not whole blocks of {kind}")
            nbytes = _ALL_FORMATS[kind].bytes_of(prod(shape))
            end = start + nbytes
            if data + end > self._file_size:
                raise SchemaError(f"{name} of shape {list(shape)} in {kind} ends at byte {data + end} of a file of "
                                  f"{self._file_size}: the file is cut short, or the shape is wrong")
            placed[name] = GgufTensor(kind, shape, data + start, nbytes)
        if self._file_size >= data + end + alignment:
            raise SchemaError(f"{self._file_size - data - end} bytes at the end belong to no tensor")
        return placed

    # ------------------------------------------------------------------------------------------ values

    def _take(self, size: int, what: str) -> bytes:
        if size > len(self._raw) - self._at:
            self._too_long(what)
        self._at += size
        return self._raw[self._at - size:self._at]

    def _too_long(self, what: str) -> NoReturn:
        if len(self._raw) < self._file_size:
            raise SchemaError(f"the head takes more than {MAX_HEAD_BYTES} bytes, up to {what}: too long to be read")
        raise SchemaError(f"the file is cut short: it ends in {what}, at byte {len(self._raw)}")

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))[0]

    def _count(self, smallest: int, things: str, what: str) -> int:
        """A number of things that take at least ``smallest`` bytes each."""
        count: int = self._number("Q", what)
        if count * smallest > self._file_size - self._at:
            raise SchemaError(f"the file claims {count} {things}, for which its {self._file_size} bytes do not suffice")
        return count

    def _text(self, what: str) -> str:
        raw = self._take(self._count(1, f"bytes in {what}", f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SchemaError(f"{what} is not UTF-8: {error.reason} at its byte {error.start}") from None

    def _name(self, what: str, taken: dict[str, Any]) -> str:
        name = self._text(what)
        if not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
            raise SchemaError(f"{what} has {len(name.encode())} bytes; 1 to {MAX_NAME_BYTES} are allowed")
        if name in taken:
            raise SchemaError(f"{what}, {name}, occurs twice")
        return name

    def _boolean(self, what: str) -> bool:
        value = self._number("B", what)
        if value > 1:
            raise SchemaError(f"{what} must be the byte 0 or 1, not {value}")
        return bool(value)

    def _reader(self, kind: int, key: str) -> Callable[[], Any]:
        """The function that reads one value of a type."""
        if kind == _STRING:
            return lambda: self._text(key)
        if kind == _BOOL:
            return lambda: self._boolean(key)
        if kind not in _NUMBERS:
            raise SchemaError(f"{key} is of type {kind}; 0 to 12 are allowed, and no list inside a list")
        return lambda: self._number(_NUMBERS[kind], key)

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I", f"the type of the items of {key}")
        read = self._reader(kind, key)
        size = struct.calcsize("<" + _NUMBERS[kind]) if kind in _NUMBERS else 8 if kind == _STRING else 1
        count = self._count(size, f"items in {key}", f"the length of {key}")
        self._items += count
        if self._items > MAX_ITEMS:
            raise SchemaError(f"with the {count} items of {key} the lists of the metadata have {self._items}; at most "
                              f"{MAX_ITEMS} are read")
        if kind in _NUMBERS:
            return list(struct.unpack(f"<{count}{_NUMBERS[kind]}", self._take(count * size, key)))
        return [read() for _ in range(count)]
