"""Where things are, from the tests' point of view."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "fixtures" / "tiny_model.json"
TIMELINE = ROOT / "fixtures" / "tiny_model.timeline.jsonl"
