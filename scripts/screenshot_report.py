"""Draw docs/report.png, the README's picture of a report: the fixture's run, opened in headless Chromium.

    pip install '.[browser]'          and Chromium with its driver (Debian: apt-get install chromium chromium-driver)
    python3 scripts/screenshot_report.py [--output docs/report.png]

``Browser`` is also what tests/observe/test_report_browser.py looks through.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from starter.base.console import Console, guarded, run_program
from starter.base.wings import wing
from starter.command.play import play
from starter.engine import InferenceEngine
from starter.schema import load_scenario
from starter.timeline import VirtualClock

PROGRAMS = (("chromium", "chromium-browser", "google-chrome", "chrome"), ("chromedriver", "chromium.chromedriver"))
PICTURE = "step=10"  # what the picture shows
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")


def programs() -> list[str | None]:
    """Where Chromium and its driver are, None for what is not on the PATH."""
    return [next(filter(None, map(shutil.which, names)), None) for names in PROGRAMS]


class Browser:
    """Headless Chromium on one page, with a profile of its own; a context manager. ``driver`` is selenium's."""

    def __init__(self, width: int = 1400, height: int = 1000) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        chromium, driver = programs()
        if not chromium or not driver:
            raise FileNotFoundError("chromium and chromedriver are not on the PATH; install them (Debian: apt-get "
                                    "install chromium chromium-driver)")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={self._profile.name}", "--lang=en"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver: Any = webdriver.Chrome(options=options, service=Service(driver))
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self.driver.quit()
        self._profile.cleanup()

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        """The size of the page in CSS pixels, without window borders."""
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile})

    def prefer(self, scheme: str) -> None:
        """What the system prefers: "light" or "dark"."""
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def open(self, path: Path, place: str = "") -> None:
        """Open a report from disk and wait until it is painted."""
        self.driver.get("about:blank")  # else another place in the same file would load nothing
        self.driver.get(path.resolve().as_uri() + (f"#{place}" if place else ""))
        self.settle()

    def settle(self) -> None:
        """Wait for two frames: layout, then what observes it."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def troubles(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


def main() -> int:
    """Run the fixture, write its report, photograph it."""
    parser = argparse.ArgumentParser(description="Draw the README's picture of a report.")
    parser.add_argument("--output", default=str(ROOT / "docs" / "report.png"))
    options = parser.parse_args()
    if find_spec("selenium") is None:
        parser.error("selenium is not installed: pip install '.[browser]'")
    return guarded(lambda: draw(options.output))


def draw(output: str) -> int:
    """FileNotFoundError where there is no Chromium."""
    report = wing("observe.report", "the picture of a report")
    scenario = load_scenario(ROOT / "fixtures" / "tiny_model.json")
    working = Console(sys.stderr).working("drawing ...")
    with working, tempfile.TemporaryDirectory() as folder, Browser() as browser:
        path = Path(folder) / "report.html"
        with InferenceEngine.from_scenario(scenario, clock=VirtualClock()) as engine:
            for _ in play(engine, scenario):
                pass
            report.write_report(engine.timeline.events, path)
        browser.open(path, PICTURE)
        browser.resize(1400, browser.driver.execute_script("return document.documentElement.scrollHeight"))
        browser.settle()
        browser.driver.save_screenshot(output)
    print(f"{output}: {Path(output).stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    run_program(main)
