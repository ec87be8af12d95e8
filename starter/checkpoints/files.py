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


def float16_array(raw: bytes | bytearray | memoryview) -> array[float]:
    """Little-endian float16 as float32. Piece by piece, because as Python floats they take 16 times as many bytes."""
    values = array("f")
    for start in range(0, len(raw), _PIECE):
        part = raw[start:start + _PIECE]
        values.extend(struct.unpack(f"<{len(part) // 2}e", part))
    return values


@contextmanager
def open_checkpoint(path: str | Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file open for reading, and its size. SchemaError that names the file if it cannot be opened or read, or if the
    block raises one."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; a failed open and a failed read have different sentences
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SchemaError(f"cannot open {path}: {error}") from None
    with file:
        try:
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
