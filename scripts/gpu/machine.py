"""What machine is this: system, packages, NVIDIA cards, and which code; and what a run on the target card needs of it.

    machine = look()
    for name, need in NEEDS.items():
        print(name, need(machine) or "met")        one sentence with what is wanted, what was found, and what to do

Standard library alone; Warp is asked where it is installed, and NVIDIA's own ``nvidia-smi`` where it is there. What
nobody tells is None, "unknown" in the summary. The target: an RTX 4060 Ti with 16 GB under Windows.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("numpy", "warp-lang")
CARD, CAPABILITY, MEMORY = "RTX 4060 Ti", "8.9", 15 * 2**30  # of the target; a card of 16 GB shows a little less
BANDWIDTH = {CARD: 288e9}  # bytes a second by the makers' data sheets
INSTALL = "pip install .[cuda]"
SMI_FIELDS = {"driver": "driver_version", "power_limit_w": "power.limit", "memory_clock_mhz": "clocks.max.memory"}


@dataclass(frozen=True)
class Card:
    """A CUDA device as Warp reports it; ``name`` is "NVIDIA GeForce RTX 4060 Ti", ``device`` "cuda:0"."""

    device: str
    name: str
    capability: str
    memory_bytes: int
    uuid: str

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second that its memory moves at most, where that is known."""
        return next((rate for name, rate in BANDWIDTH.items() if name in self.name), None)


@dataclass(frozen=True)
class Machine:
    """``windows_build`` and so on are None where there is no such thing, or nobody tells."""

    system: str
    system_version: str
    windows_build: int | None
    processor: str
    python: str
    packages: dict[str, str | None]
    cuda_driver: str | None  # the CUDA version that the driver offers
    cuda_toolkit: str | None  # the one that Warp was built with
    cards: tuple[Card, ...]

    def card(self) -> Card | None:
        """The target card, or else the first one."""
        return next((card for card in self.cards if CARD in card.name), self.cards[0] if self.cards else None)


def look() -> Machine:
    """This machine."""
    driver, toolkit, cards = _ask_warp() if not missing_packages(packages := _packages()) else (None, None, ())
    build = sys.getwindowsversion().build if sys.platform == "win32" else None  # type: ignore[attr-defined,unused-ignore]
    return Machine(platform.system(), platform.version(), build, platform.processor() or platform.machine(),
                   platform.python_version(), packages, driver, toolkit, cards)


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def missing_packages(packages: dict[str, str | None]) -> list[str]:
    return [name for name, found in packages.items() if found is None]


def _ask_warp() -> tuple[str | None, str | None, tuple[Card, ...]]:
    """CUDA of the driver, CUDA of Warp, cards."""
    import warp as wp
    wp.config.log_level = wp.LOG_ERROR  # that there is no driver is said by ``NEEDS``
    wp.init()
    cards = tuple(Card(f"cuda:{i}", gpu.name, f"{gpu.arch // 10}.{gpu.arch % 10}", int(gpu.total_memory), gpu.uuid)
                  for i, gpu in enumerate(wp.get_cuda_devices()))
    driver, toolkit = (numbers and ".".join(map(str, numbers))
                       for numbers in (wp.get_cuda_driver_version(), wp.get_cuda_toolkit_version()))
    return driver or None, toolkit or None, cards


def ask_smi(card: Card | None) -> dict[str, str | float | None]:
    """The driver's version, the power limit in watts and the memory's clock, by ``nvidia-smi``."""
    program, told = shutil.which("nvidia-smi"), [""] * len(SMI_FIELDS)
    if program and card:
        done = subprocess.run([program, f"--query-gpu={','.join(SMI_FIELDS.values())}", f"--id={card.uuid}",
                               "--format=csv,noheader,nounits"], capture_output=True, encoding="utf-8",
                              errors="replace", check=False, timeout=60)
        parts = done.stdout.strip().split(", ")
        told = parts if done.returncode == 0 and len(parts) == len(told) else told
    driver, *numbers = told
    return dict(zip(SMI_FIELDS, (driver or None, *map(_number, numbers))))


def _number(text: str) -> float | None:
    """165.00 -> 165.0; [N/A] -> None."""
    try:
        return float(text)
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------------- needs


def _windows(machine: Machine) -> str | None:
    return None if machine.system == "Windows" else (
        f"Windows is wanted, and this is {machine.system}; run it on Windows, or set P07_GPU=1 instead of "
        f"P07_WIN_4060TI=1 for any other NVIDIA card")


def _packages_needed(machine: Machine) -> str | None:
    missing = missing_packages(machine.packages)
    return f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed: {INSTALL}" if missing else None


def _cuda(machine: Machine) -> str | None:
    if missing_packages(machine.packages):
        return f"no CUDA device can be looked for without Warp and NumPy: {INSTALL}"
    return None if machine.cuda_driver and machine.cards else (
        f"Warp finds no CUDA device: it was built with CUDA {machine.cuda_toolkit or 'unknown'}, and the driver offers "
        f"{machine.cuda_driver or 'none'}; install NVIDIA's driver, or a newer one (nvidia.com/drivers)")


def _card(machine: Machine) -> str | None:
    names = ", ".join(card.name for card in machine.cards)
    return None if any(CARD in card.name for card in machine.cards) else (
        f"a GeForce {CARD} is wanted, and Warp finds {names}; set P07_GPU=1 instead of P07_WIN_4060TI=1 to run on it"
        if names else f"a GeForce {CARD} is wanted, and there is no card")


def _capability(machine: Machine) -> str | None:
    card = machine.card()
    return None if card and card.capability == CAPABILITY else (
        f"compute capability {CAPABILITY} (sm_89) is wanted, and {_of(card, card.capability if card else None)}; every "
        f"{CARD} has it, so look which card Warp found, and at the driver")


def _memory(machine: Machine) -> str | None:
    card = machine.card()
    found = f"{card.memory_bytes / 2**30:.1f} GiB" if card else None
    return None if card and card.memory_bytes >= MEMORY else (
        f"15 GiB of memory are wanted, and {_of(card, found)}; there are "
        f"cards of this name with 8 GB, set P07_GPU=1 instead of P07_WIN_4060TI=1 to run on one")


def _of(card: Card | None, found: str | None) -> str:
    return f"{card.name} has {found}" if card else "there is no card"


def _driver(machine: Machine) -> str | None:
    return None if ask_smi(machine.card())["driver"] else (
        "nvidia-smi does not tell the driver's version, which the record must state; install NVIDIA's driver with it, "
        "and see that nvidia-smi runs in a terminal")


NEEDS: dict[str, Callable[[Machine], str | None]] = {
    "windows": _windows, "packages": _packages_needed, "cuda": _cuda, "card": _card, "capability": _capability,
    "memory": _memory, "driver": _driver}
NEEDED = {"target": tuple(NEEDS), "gpu": ("packages", "cuda"), "cpu": ("packages",)}  # by the kind of run


# -------------------------------------------------------------------------------------------------------- code


def commit(root: Path = ROOT) -> str | None:
    """The commit that is checked out, read from git's own files: 40 digits, or None outside a checkout."""
    try:
        folder = root / ".git"
        if folder.is_file():  # of a second working tree
            folder = root / folder.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (folder / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        name, common = head.removeprefix("ref: "), folder / "commondir"
        if common.is_file():
            folder = folder / common.read_text(encoding="utf-8").strip()
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8").strip()
        packed = (line.split(" ") for line in (folder / "packed-refs").read_text(encoding="utf-8").splitlines())
        return next((words[0] for words in packed if words[1:] == [name]), None)
    except OSError:
        return None


def digest(paths: Sequence[Path]) -> str:
    """SHA-256 of files, one after the other, line ends as on Linux."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return found.hexdigest()


def code() -> dict[str, str | None]:
    """Which code ran: the commit, and hashes that tell whether files differ from it."""
    starter = ROOT / "starter"
    return {"commit": commit(), "kernels_sha256": digest(sorted(starter.glob("warp_*.py"))),
            "engine_sha256": digest(sorted(starter.glob("*.py")))}
