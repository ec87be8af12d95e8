"""Where the scenarios are that come with the project: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE / "fixtures", _PACKAGE.parent / "fixtures")
SCENARIOS = ("quatrains", "tiny_model")


def bundled(name: str) -> Path | None:
    """The file of this name that comes with the project, such as "quatrains.json", or "quatrains", a scenario; None if
    there is none."""
    if Path(name).name != name:  # it names a folder, too
        return None
    name = f"{name}.json" if name in SCENARIOS else name
    return next((folder / name for folder in _FOLDERS if (folder / name).is_file()), None)
