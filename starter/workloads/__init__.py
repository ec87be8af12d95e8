"""Wing: requests to run, and trouble to run them through.

    draw.py     a scenario drawn from a seed (``python3 -m starter draw``)
    traces.py   arrival times and lengths from public traces
    faults.py   makes the faults happen that a scenario asks for
"""
