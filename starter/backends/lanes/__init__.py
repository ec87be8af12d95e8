"""Backend "cpu": plain Python that multiplies hundreds of weights at a time.

It packs many small integers into one long integer, each into a *lane* of 16 to 32 bits, and multiplies them all at
once.

    lanes.py        a column of a matrix as one long integer, a weight in each lane; read this first
    pages.py        attention over KV pages in lanes
    int8_pages.py   the same over pages of 8-bit codes
    backend.py      the backend that joins them
"""
