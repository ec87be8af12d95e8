"""How long something takes: warmed up, repeated, with its spread; launches of a kernel without what a launch costs.

    times_of(step, repeats=20, warm_up=3)          {"repeats": 20, "median_s": ..., "lowest_s": ..., "highest_s": ...,
                                                    "spread": the middle half's width over the median}
    kernel_times(device, launch, 20, 3)            of one launch, out of a recorded row of them
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter
from typing import Any

LAUNCHES = 50  # in a row, at most: what starting the row costs is shared by so many
ROW_SECONDS = 0.1  # of a row, about: Windows ends what keeps its screen's card for two seconds


def times_of(work: Callable[[], object], repeats: int, warm_up: int, share: int = 1) -> dict[str, float]:
    """Times of ``work``, which does the same ``share`` times. Its last act must wait for the device."""
    for _ in range(warm_up):
        work()
    seconds = []
    for _ in range(repeats):
        started = perf_counter()
        work()
        seconds.append((perf_counter() - started) / share)
    return summary(seconds)


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and spread of at least two times."""
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return {"repeats": len(seconds), "median_s": median(seconds), "lowest_s": min(seconds), "highest_s": max(seconds),
            "spread": (high - low) / middle}


def kernel_times(device: Any, launch: Callable[[], None], repeats: int, warm_up: int) -> dict[str, float]:
    """Seconds of a launch. Python needs longer to start a kernel than a small one runs, so a row of launches is
    recorded once as a graph, and the device plays it alone."""
    import warp as wp

    def single() -> None:
        launch()
        wp.synchronize_device(device.wp)

    single()  # compiles and loads it, which a recording must not
    launches = max(1, min(LAUNCHES, int(ROW_SECONDS / times_of(single, 2, 0)["median_s"])))
    with wp.ScopedCapture(device=device.wp) as capture:
        for _ in range(launches):
            launch()

    def play() -> None:
        wp.capture_launch(capture.graph)
        wp.synchronize_device(device.wp)

    return times_of(play, repeats, warm_up, launches)
