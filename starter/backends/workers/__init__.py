"""Several processes compute one step (``workers=2``), bitwise equal to one.

    parallel.py   which process computes what, and where each page is
    process.py    a child process, and the pipe to it
"""
