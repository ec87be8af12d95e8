"""GGUF files for tests, byte by byte as the format's description has them: right ones, and wrong ones on purpose."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}
Entry = tuple[str, Sequence[int], Any, bytes]  # name, shape with rows first, kind by name or number, data


def text(value: str | bytes, size: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if size is None else size) + raw


def value(given: Any) -> bytes:
    """Type and value: bool, int (u32), float (f32), text, list of one of them; bytes are taken as they are."""
    if isinstance(given, bytes):
        return given
    if isinstance(given, list):
        items = [value(item) for item in given] or [struct.pack("<I", 4)]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(given)) + b"".join(i[4:] for i in items)
    if isinstance(given, bool):
        return struct.pack("<IB", 7, given)
    if isinstance(given, str):
        return struct.pack("<I", 8) + text(given)
    return struct.pack("<If", 6, given) if isinstance(given, float) else struct.pack("<II", 4, given)


def metadata_bytes(entries: Mapping[str, Any] | Sequence[tuple[Any, Any]]) -> bytes:
    pairs = entries.items() if isinstance(entries, Mapping) else entries
    return b"".join(text(key) + value(given) for key, given in pairs)


def gguf_file(metadata: Mapping[str, Any] | Sequence[tuple[Any, Any]] = (), tensors: Sequence[Entry] = (), *,
              magic: bytes = b"GGUF", version: int = 3, counts: tuple[int | None, int | None] = (None, None),
              offsets: Mapping[str, int] | None = None, alignment: int = 32, tail: bytes = b"") -> bytes:
    """A whole file; the keywords make it a wrong one."""
    entries, data = b"", b""
    for name, shape, kind, raw in tensors:
        data += bytes(-len(data) % alignment)
        offset = (offsets or {}).get(name, len(data))
        entries += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entries += struct.pack("<IQ", KINDS.get(kind, kind), offset)
        data += raw
    n_tensors, n_metadata = (len(given) if count is None else count
                             for given, count in zip((tensors, metadata), counts))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_metadata) + metadata_bytes(metadata) + entries
    return head + bytes(-len(head) % alignment) + data + tail


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)
