"""Wing: faster ways to compute the same decoder, and smaller pages.

    lanes/          standard library: products in lanes of long integers (backend "cpu")
    numpy/          the top-level ``numpy_backend.py`` made fast: batched attention, packed weights, int8 pages
    cuda/           kernels for an NVIDIA GPU in NVIDIA Warp; they run on the processor, too (backend "cuda")
    workers/        several processes that share the work of a step (``workers=2``)
    int8_pages.py   KV pages of 8-bit codes, in plain Python: the format that all backends keep

Each implements ``starter.backend.Backend``; ``starter.backend.load_backend`` finds it by name. Without this package "cpu"
is the plain backend of ``backend.py``.
"""
