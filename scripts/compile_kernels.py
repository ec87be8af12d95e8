"""Compile the CUDA backend's kernels ahead of time for one GPU architecture (extra cuda). Needs no GPU and no compiler.

    python3 scripts/compile_kernels.py                          sm_89 (RTX 40xx), to a table
    python3 scripts/compile_kernels.py --arch 90 --out kernels  another one; keep the PTX, the cubin and a JSON record

The compiler is NVIDIA's own (NVRTC, inside the package warp-lang). The figures are read from the cubin that it wrote,
where the driver finds them, too:

    registers   of a thread; a multiprocessor has 65,536 of them for all that run at a time
    stack       bytes of a thread. What does not fit in registers is spilled there, so 0 means that nothing is spilled;
                above 0 it may also hold an array of the kernel's own
    shared      bytes of static shared memory of a block
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

REGISTERS, FRAME = 0x2F, 0x11  # attributes in .nv.info: for a symbol, a number
BLOCK = 128
Section = tuple[str, int, int]  # its name, offset and size


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=89, help="compute capability without its dot (89)")
    parser.add_argument("--block", type=int, default=BLOCK, help="threads of a block")
    parser.add_argument("--out", type=Path, help="folder to keep PTX, cubin and kernels.json in")
    options = parser.parse_args(arguments)
    if not find_spec("warp"):
        parser.error("the compiler is in the package warp-lang: pip install '.[cuda]'")
    with tempfile.TemporaryDirectory() as folder:
        record = compile_kernels(options.arch, options.block, options.out or Path(folder))
    print(f"sm_{options.arch}, blocks of {options.block}, Warp {record['warp']}: PTX {record['ptx_bytes']:,} bytes, "
          f"cubin {record['cubin_bytes']:,} bytes\n\nkernel                      registers   stack  shared")
    for kernel in record["kernels"]:
        print(f"{kernel['name']:26} {kernel['registers']:10} {kernel['stack']:7} {kernel['shared']:7}")
    return 0


def compile_kernels(arch: int, block: int, folder: Path) -> dict[str, Any]:
    """PTX and cubin of all kernels in ``folder``, with kernels.json beside them; returns what that says."""
    import warp as wp

    from starter.backends.cuda import int8_kernels as warp_int8_kernels
    from starter.backends.cuda import kernels as warp_kernels
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"arch": f"sm_{arch}", "block": block, "warp": wp.config.version, "ptx_bytes": 0,
                              "cubin_bytes": 0, "kernels": []}
    for module in (warp_kernels, warp_int8_kernels):
        wp.set_module_options({"block_dim": block}, module=module)
        ptx, cubin = (wp.compile_aot_module(module, arch=arch, module_dir=folder, use_ptx=use_ptx)[0]
                      for use_ptx in (True, False))
        record["ptx_bytes"] += ptx.stat().st_size
        record["cubin_bytes"] += cubin.stat().st_size
        record["kernels"] += usage(cubin.read_bytes())
    (folder / "kernels.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def usage(cubin: bytes) -> list[dict[str, Any]]:
    """Registers, stack and shared bytes of every kernel in a cubin, an ELF file of 64 bits."""
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    found: dict[str, dict[int, int]] = {}
    offset, size = next((offset, size) for name, offset, size in sections if name == ".nv.info")
    for attribute, number, value in _attributes(offset, size, cubin):
        found.setdefault(symbols[number], {})[attribute] = value
    shared = {name.removeprefix(".nv.shared."): size for name, _, size in sections if name.startswith(".nv.shared.")}
    return [{"name": name.removesuffix("_cuda_kernel_forward"), "registers": numbers[REGISTERS],
             "stack": numbers.get(FRAME, 0), "shared": shared.get(name, 0)}
            for name, numbers in sorted(found.items()) if REGISTERS in numbers]


def _sections(cubin: bytes) -> list[Section]:
    """(name, offset, size) of each section."""
    if cubin[:5] != b"\x7fELF\x02":
        raise SystemExit("error: the compiled kernels are no ELF file of 64 bits")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    return [(_text(cubin, headers[names][4] + name), offset, length) for name, _, _, _, offset, length in headers]


def _symbols(cubin: bytes, sections: Sequence[Section]) -> list[str]:
    """Names by number."""
    places = {name: (offset, size) for name, offset, size in sections}
    (start, size), (names, _) = places[".symtab"], places[".strtab"]
    return [_text(cubin, names + struct.unpack_from("<I", cubin, place)[0]) for place in range(start, start + size, 24)]


def _attributes(offset: int, size: int, cubin: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, number of the symbol, value) of a section of attributes, as far as they are of this form."""
    end = offset + size
    while offset < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, offset)
        if form == 4 and length == 8:
            yield (attribute, *struct.unpack_from("<II", cubin, offset + 4))
        offset += 4 + (length if form == 4 else 0)


def _text(data: bytes, offset: int) -> str:
    return data[offset:data.index(b"\0", offset)].decode("ascii")


if __name__ == "__main__":
    sys.exit(main())
