"""Wing: look at a run, while it goes on or when it is over.

    timeline_file.py                read a timeline from disk, strictly
    replay.py                       run it again: does the same happen, event for event?
    audit.py                        prove its promises from the file alone (request_ledger.py, page_ledger.py)
    report.py, viewer/              one HTML page that replays it
    perfetto.py, prometheus.py      for other tools
    notebook.py                     pictures in notebooks
    commands.py                     what ``python3 -m starter`` calls: replay, check, metrics, trace, report
"""
