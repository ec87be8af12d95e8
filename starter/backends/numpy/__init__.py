"""Backend "numpy", made fast: what ``starter/numpy_backend.py`` does in the plainest way, in few and large array operations.

    attention.py    requests of like length side by side
    contexts.py     what a decode gathered is kept for the next one
    matrices.py     quantized weights that stay packed
    int8_pages.py   KV pages of 8-bit codes
    backend.py      the backend that joins them
"""
