"""Optional · A device that runs the kernels of ``kernels.py``: an NVIDIA GPU, or the processor in its place.

    device = Device("cuda:0")
    x = device.empty((3, 64))                       an array [3, 64] of float32 there, not initialized
    device.blocks(kernels.norm, [3], ...)           3 blocks; the kernel's last thread number counts within a block
    device.threads(kernels.add, [3, 64], ...)       3 * 64 threads, in blocks that do not work together

Executed on the CPU, compiled for sm_89 (``scripts/compile_kernels.py``), not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from threading import RLock
from typing import Any

import numpy as np
import warp as wp

from starter.backends.cuda.memory import DeviceMemory
from starter.errors import BackendError

Array = Any  # warp.array

NUMBERS: dict[str, Any] = {"float32": wp.float32, "float16": wp.float16}  # how weights and pages can be stored
_PROCESSOR = RLock()  # two threads that launch on the processor at once share an arena there, and crash
BLOCKS = (1, 32, 64, 128, 256)  # threads of a block: one, or whole warps of 32


class Device:
    """``block``: threads of a block, by default 128 on a GPU and 1 on the CPU, which runs them one after the other.
    ``free_bytes``: the free memory that the account starts from; by default what the driver reports."""

    def __init__(self, name: str, block: int | None = None, free_bytes: int | None = None) -> None:
        self.wp = _find(name)
        self.name, self.is_cuda = name, bool(self.wp.is_cuda)
        self._one_at_a_time = nullcontext() if self.is_cuda else _PROCESSOR
        self.block = (128 if self.is_cuda else 1) if block is None else block
        if self.block not in BLOCKS:
            raise BackendError(f"a block has {', '.join(map(str, BLOCKS))} threads, not {block!r}")
        if free_bytes is None and self.is_cuda:
            free_bytes = int(self.wp.free_memory)
        self.memory = DeviceMemory(name, free_bytes)

    def empty(self, shape: Sequence[int], dtype: Any = wp.float32) -> Array:
        """A new array, not initialized. BackendError if there is no memory for it."""
        return self.memory.allocate(prod(shape) * wp.types.type_size_in_bytes(dtype),
                                    lambda: wp.empty(tuple(shape), dtype=dtype, device=self.wp))

    def put(self, numbers: Any, dtype: Any = wp.float32) -> Array:
        """Numbers of the host (a list, or a NumPy array) as an array of the device."""
        host = wp.array(np.ascontiguousarray(numbers, wp.dtype_to_numpy(dtype)), dtype=dtype, device="cpu", copy=False)
        array = self.empty(host.shape, dtype)
        wp.copy(array, host)
        return array

    def threads(self, kernel: Any, shape: Sequence[int], *arguments: Any) -> None:
        """Run the kernel for each index of a shape."""
        with self._one_at_a_time:
            wp.launch(kernel, dim=tuple(shape), inputs=arguments, device=self.wp, block_dim=self.block)

    def blocks(self, kernel: Any, shape: Sequence[int], *arguments: Any) -> None:
        """Run the kernel in a block of threads for each index of a shape."""
        with self._one_at_a_time:
            wp.launch_tiled(kernel, dim=list(shape), inputs=arguments, device=self.wp, block_dim=self.block)

    def driver_peak(self) -> int | None:
        """The most bytes that the driver's memory pool has given out, as the driver counts; None without a pool."""
        if not self.is_cuda or not self.wp.is_mempool_enabled:
            return None
        return int(wp.get_mempool_used_mem_high(self.wp))


def _find(name: object) -> Any:
    """Warp's device of this name, or BackendError."""
    if name != "cpu" and not (isinstance(name, str) and name.startswith("cuda:") and name[5:].isdecimal()):
        raise BackendError(f"device must be 'cuda:0' (or another number), or 'cpu', not {name!r}")
    try:
        return wp.get_device(name)
    except (ValueError, RuntimeError) as error:
        raise BackendError(f"there is no device {name!r} here: Warp finds {wp.get_cuda_device_count()} CUDA devices; "
                           f"device='cpu' runs the same kernels on the processor, slowly ({error})") from error
