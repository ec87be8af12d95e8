"""Backend "cpu": plain Python that multiplies hundreds of weights at a time.

    lanes.py        a column of a matrix as one long integer, a weight in each lane; read this first
    pages.py        attention over KV pages in lanes
    int8_pages.py   the same over pages of 8-bit codes
    backend.py      the backend that joins them
"""
