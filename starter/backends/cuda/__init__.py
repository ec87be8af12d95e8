"""Backend "cuda": the decoder's operations as GPU kernels, written in Python with NVIDIA Warp.

    kernels.py, int8_kernels.py   the kernels
    matrices.py                   weights on the device
    pages.py, int8_pages.py       KV pages on the device
    device.py, memory.py          arrays, and an account of memory that refuses what does not fit
    backend.py                    the backend that joins them

Executed on the processor (``device="cpu"``) and compiled for an RTX 4060 Ti; no GPU has run it yet.
"""
