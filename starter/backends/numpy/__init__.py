"""Backend "numpy", made fast: what ``starter/numpy_backend.py`` does plainly, in few and large array operations.

    attention.py    requests of similar length side by side
    contexts.py     what a decode gathered, kept for the next one
    matrices.py     quantized weights that stay packed
    int8_pages.py   KV pages of 8-bit codes
    backend.py      the backend that joins them
"""
