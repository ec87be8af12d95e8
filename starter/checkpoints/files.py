"""Opening, reading and replacing files, for all formats of checkpoints."""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from starter.errors import SchemaError

_PIECE = 65_536  # bytes of float16 unpacked at a time
_PREFIX = 512  # bytes by which a file is recognized
_TEXT_CONTROLS = frozenset(range(32)) - set(b"\t\n\r\f\x1b")


def float16_array(raw: bytes | bytearray | memoryview) -> array[float]:
    """Little-endian float16 as float32. Piece by piece, because as Python floats they take 16 times as many bytes."""
    values = array("f")
    for start in range(0, len(raw), _PIECE):
        part = raw[start:start + _PIECE]
        values.extend(struct.unpack(f"<{len(part) // 2}e", part))
    return values


def not_the_file(start: bytes) -> str:
    """What a file is that a download left in place of the file that was meant, from its first bytes; "" if it does not
    look like one."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the file itself; fetch it with git lfs pull, or download it again"
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page, not the file itself; download it again, perhaps after signing in"
    return ""


def kind_of_file(path: Path) -> str:
    """What kind of file this is, from its first bytes; "" if it looks like none of those that are known here."""
    with open_checkpoint(path, checked=False) as (file, _):
        start = file.read(_PREFIX)
    if not start:
        return "an empty file"
    if found := not_the_file(start):
        return found
    for magic, kind in ((b"GGUF", "a GGUF file"), (b"FUGG", "a big-endian GGUF file"),
                        (b"PK\x03\x04", "a zip archive, as PyTorch writes weights"),
                        (b"\x80", "a pickle, as older PyTorch writes weights"), (b"\x1f\x8b", "a gzip archive")):
        if start.startswith(magic) and (len(magic) > 1 or start[1:2] in b"\x02\x03\x04\x05"):
            return kind
    if start[8:9] == b"{" and start[5:8] == bytes(3):
        return "a safetensors file"
    if start.startswith(b"{"):
        return "a JSON file"
    return "" if _TEXT_CONTROLS.intersection(start) else "a text file"


@contextmanager
def open_checkpoint(path: str | Path, checked: bool = True) -> Iterator[tuple[BinaryIO, int]]:
    """A file open for reading, and its size. SchemaError that names the file if it cannot be opened or read, if the
    block raises one or, where ``checked``, if a download left a pointer or a web page in its place."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; a failed open and a failed read have different sentences
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SchemaError(f"cannot open {path}: {error}") from None
    with file:
        try:
            if checked:
                start = file.read(_PREFIX)
                if found := not_the_file(start):
                    raise SchemaError(f"this is {found}")
                file.seek(0)
            yield file, os.fstat(file.fileno()).st_size
        except SchemaError as error:
            raise SchemaError(f"{path}: {error.problem}", error.path) from None
        except OSError as error:
            raise SchemaError(f"cannot read {path}: {error}") from None


def replace_file(path: str | Path, chunks: Iterable[bytes]) -> None:
    """Write a file completely or not at all: readers see the old file or the new one, and a failure leaves the old."""
    temporary = Path(f"{path}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(chunks)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
