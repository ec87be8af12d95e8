"""The command line: what ``p07``, ``python3 starter/driver.py`` and ``python3 -m starter`` do.

    options.py    the options of a run, and which of them go together
    play.py       a scenario's requests and cancels, at their steps: also for notebooks and benchmarks
    run.py        a scenario or prompts, run as the options say
    printing.py   what is printed of a run: manifest, steps, results, metrics

It uses the engine as any other program does, and the engine does not know it.
"""
