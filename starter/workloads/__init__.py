"""Wing: requests to run, and faults to run them with.

    draw.py     a scenario drawn from a seed (``python3 -m starter draw``)
    traces.py   arrival times and lengths from public traces
    faults.py   fires the faults that a scenario asks for
"""
