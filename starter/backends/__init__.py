"""Wing: faster ways to compute the same decoder, and smaller pages.

    lanes/          standard library only: hundreds of products in one long integer (backend "cpu")
    numpy/          ``numpy_backend.py`` made fast: batched attention, packed weights, int8 pages (backend "numpy")
    cuda/           kernels for an NVIDIA GPU, in NVIDIA Warp; they run on the processor, too (backend "cuda")
    workers/        several processes that share the work of a step (``workers=2``)
    int8_pages.py   KV pages of 8-bit codes: the format and the rule that all backends follow, in plain Python

``starter.backend.load_backend`` finds them by name. Without this package "cpu" is ``backend.ReferenceBackend``, "numpy"
is ``numpy_backend.NumpyBackend``, and the rest is refused in one sentence.
"""
