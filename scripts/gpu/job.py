"""All that is tried on a GPU, part by part; what comes out goes into a record, and what fails is named in it.

    job = Job("gpu", look())
    for part in PARTS:
        problems = job.run(part)          sentences; none if all is well
    job.write(folder)

The same runs with kind "cpu" and ``Effort.rehearsal()`` on the processor: so the job itself has been run before a GPU
sees it.
"""

from __future__ import annotations

import io
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts.gpu import record as records
from scripts.gpu.machine import Machine, ask_smi, code
from starter import load_backend, load_scenario
from starter.model import Loaded

PARTS = ("kernel_checks", "kernels", "engine", "memory", "speed")
TOLERANCE = 5e-6  # of the kernels' own tests, of a result's largest number; on the CPU they hold 2e-6
NUMPY_REPEATS = 5
PROMPT = 128  # tokens, where the context has room for three times as many
ONE_TERABYTE = 2**40


@dataclass(frozen=True)
class Effort:
    """How large and how often. ``small``: matrices, pages and a model for a processor, not for a card."""

    blocks: tuple[int, ...] = (32, 128, 256)
    small: bool = False
    equal_runs: int = 50
    repeats: int = 20
    warm_up: int = 3
    poems: int = 40
    oracle_poems: int = 4
    batches: tuple[int, ...] = (1, 8)
    forms: tuple[str, ...] | None = None  # all of engines.FORMS

    @classmethod
    def rehearsal(cls) -> Effort:
        """On the processor, in minutes."""
        return cls(blocks=(1, 32), small=True, repeats=5, poems=10, oracle_poems=2)


class Job:
    """``kind``: "target", "gpu" or "cpu"."""

    def __init__(self, kind: str, machine: Machine, effort: Effort | None = None) -> None:
        self.effort = effort or (Effort.rehearsal() if kind == "cpu" else Effort())
        self.machine, self.card = machine, None if kind == "cpu" else machine.card()
        self.device_name = self.card.device if self.card else "cpu"
        self._began = time.monotonic()
        told = ask_smi(self.card)
        about = asdict(machine)
        del about["cards"]
        packages = about.pop("packages")
        self.record: dict[str, Any] = {
            "version": 1, "kind": records.KINDS[kind],
            "began": datetime.now(timezone.utc).isoformat(timespec="seconds"), "seconds": 0.0, "code": code(),
            "machine": {**about, "numpy": packages["numpy"], "warp": packages["warp-lang"],
                        "driver": told["driver"]},
            "card": None, "kernel_checks": {"blocks": [], "tests": 0, "cases": {}, "tolerance": 0.0}, "kernels": [],
            "engine": [], "refused": None, "out_of_memory": {"in_the_runs": False, "injected": None, "real": None},
            "speed": [], "errors": []}
        if self.card:
            self.record["card"] = {
                "device": self.card.device, "name": self.card.name, "capability": self.card.capability,
                "memory_bytes": self.card.memory_bytes, "free_bytes": self._backend().memory.free,
                "power_limit_w": told["power_limit_w"], "memory_clock_mhz": told["memory_clock_mhz"],
                "bandwidth": self.card.bandwidth}

    def run(self, part: str) -> list[str]:
        """A part; what it finds wrong, also in the record. An exception is recorded, too, and raised."""
        problems = []
        try:
            for problem in getattr(self, part)():
                problems.append(problem)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.record["errors"] += [{"part": part, "error": problem} for problem in problems]
            self.record["out_of_memory"]["in_the_runs"] |= any("out of memory" in problem for problem in problems)
        return problems

    def write(self, folder: Path) -> Path:
        """Both files of the record."""
        self.record["seconds"] = time.monotonic() - self._began
        return records.write(self.record, folder)

    def _backend(self, **options: Any) -> Any:
        return load_backend("cuda", device=self.device_name, **options)

    def _forms(self) -> list[Any]:
        from scripts.gpu.engines import FORMS
        return [form for form in FORMS if self.effort.forms is None or form.name in self.effort.forms]

    # ------------------------------------------------------------------------------------------------- parts

    def kernel_checks(self) -> Iterator[str]:
        """The kernels' own tests (tests/backends/test_cuda_kernels.py and test_cuda_int8_kernels.py) on this device:
        lengths, odd widths, permuted pages."""
        from starter.backends.cuda.device import Device
        from tests.backends.test_cuda_int8_kernels import Int8KernelTest
        from tests.backends.test_cuda_kernels import KernelTest
        cases: Counter[str] = Counter()
        name, blocks = self.device_name, self.effort.blocks

        def on_device(case: Any) -> Any:
            class OnDevice(case):  # type: ignore[misc]  # one of the two below
                @classmethod
                def setUpClass(cls) -> None:
                    super().setUpClass()
                    cls.devices = [Device(name, block) for block in blocks]

                def check(self, device: Any, launch: str, kernel: Any, grid: Any, arguments: Any, wanted: Any,
                          tolerance: float = TOLERANCE) -> None:
                    super().check(device, launch, kernel, grid, arguments, wanted, tolerance)
                    cases[kernel.key.rpartition(".")[2]] += 1

            return OnDevice

        suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(on_device(case))
                                   for case in (KernelTest, Int8KernelTest))
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
        self.record["kernel_checks"] = {"blocks": list(blocks), "tests": result.testsRun, "cases": dict(cases),
                                        "tolerance": TOLERANCE}
        for test, traceback in (*result.failures, *result.errors):
            yield f"{test}: {traceback.strip().splitlines()[-1]}"

    def kernels(self) -> Iterator[str]:
        """Each kernel at size: the right numbers, the same bits every time, and how fast."""
        from scripts.gpu import workload, workloads
        from scripts.gpu.timing import kernel_times, times_of
        from starter.backends.cuda.device import Device
        device, effort = Device(self.device_name), self.effort
        for work in workloads.workloads(device, workload.SMALL if effort.small else workload.Size()):
            error, first = work.error(), work.bits()
            equal = all(work.bits() == first for _ in range(effort.equal_runs - 1))
            times = kernel_times(device, work.launch, effort.repeats, effort.warm_up)
            rate = work.nbytes / times["median_s"]
            self.record["kernels"].append({
                "kernel": work.kernel, "case": work.case, "error": records.finite(error),
                "tolerance": workload.TOLERANCE,
                "runs": effort.equal_runs, "runs_equal": equal, "time": times, "bytes": work.nbytes,
                "operations": work.operations, "bytes_per_s": rate,
                "of_bandwidth": rate / self.card.bandwidth if self.card and self.card.bandwidth else None,
                "numpy": times_of(work.numpy, min(NUMPY_REPEATS, effort.repeats), 1) if work.numpy else None})
            if not error <= workload.TOLERANCE:  # NaN is no number to be content with
                yield f"{work.kernel}, {work.case}: {error:.1e} off; at most {workload.TOLERANCE} is allowed"
            if not equal:
                yield f"{work.kernel}, {work.case}: not the same bits in {effort.equal_runs} runs"

    def engine(self) -> Iterator[str]:
        """The fixtures in every form."""
        from scripts.gpu.engines import run_forms
        forms = {form.name: form for form in self._forms()}
        for row in run_forms(self._backend, forms.values(), self.effort.poems, self.effort.oracle_poems):
            logits = row["logits"] and {name: records.finite(number) for name, number in row["logits"].items()}
            loss = row["loss"] and records.finite(row["loss"])
            self.record["engine"].append({**row, "logits": logits, "loss": loss})
            form, where = forms[row["form"]], f"{row['fixture']}, {row['form']}"
            yield from (f"{where}: {error}" for error in row["errors"])
            if form.name == "float32" and row["as_golden"] != row["golden"]:
                yield f"{where}: {row['as_golden']} of {row['golden']} outputs are the golden tokens"
            if row["peak_bytes"] > row["planned_bytes"]:
                yield f"{where}: {row['peak_bytes']:,} bytes were held, {row['planned_bytes']:,} planned"
            if row["logits"] and not row["logits"]["largest"] <= form.largest:
                yield f"{where}: a logit is {row['logits']['largest']:.1e} off; at most {form.largest} is allowed"
            if row["logits"] and not abs(row["loss"] - row["loss_of_backend_cpu"]) <= form.loss:
                yield (f"{where}: the loss is {row['loss']:.5f}, on backend cpu {row['loss_of_backend_cpu']:.5f}; at "
                       f"most {form.loss} between them is allowed")

    def memory(self) -> Iterator[str]:
        """What is too much is refused, and what comes next is served."""
        from scripts.gpu.engines import out_of_memory, refusals
        refused = self.record["refused"] = refusals(self._backend, None if self.card else 2_000_000)
        if not refused["pages_error"] or not refused["served_after_pages"]:
            yield "a pool of pages larger than the memory was not refused, or the next engine did not serve"
        if not refused["request_error"] or not refused["served_after_request"]:
            yield "a request longer than the context was not refused, or the next one not served"
        found = out_of_memory(self._backend, ONE_TERABYTE if self.card else 1_000 * ONE_TERABYTE)
        self.record["out_of_memory"] |= found
        injected, real = found["injected"], found["real"]
        if injected["ended"] != "error" or not injected["other_request_same"] or not injected["served_after"]:
            yield "out of memory for one request did not end that one alone"
        if real["given"] or not real["served_after"]:
            yield f"the driver gave {real['asked_bytes']:,} bytes, or nothing was served after its refusal"

    def speed(self) -> Iterator[str]:
        """Tokens a second, beside the other backends of the project. Nothing is judged here."""
        from scripts.gpu.drawn_model import LITTLE, MIDDLE, drawn_model, parameters
        from scripts.gpu.engines import QUATRAINS
        from starter.model import load_scenario_model
        scenario, drawn = load_scenario(QUATRAINS), LITTLE if self.effort.small else MIDDLE
        name, forms = f"{parameters(drawn):,} drawn parameters", self._forms()
        for form in forms:
            backend = self._backend(dtype=form.dtype)
            self._measure("quatrains", form.name, load_scenario_model(scenario, backend, form.quantization), form.pages)
            self._measure(name, form.name, drawn_model(drawn, backend, form.quantization), form.pages)
        for backend in (load_backend("numpy"), load_backend("cpu")):
            for quantization, pages in dict.fromkeys((form.quantization, form.pages) for form in forms):
                loaded = load_scenario_model(scenario, backend, quantization)
                self._measure("quatrains", (quantization or "float") + " and int8 pages" * bool(pages), loaded, pages)
        self._measure(name, "float", drawn_model(drawn, load_backend("numpy"), None), None)
        return iter(())

    def _measure(self, model: str, form: str, loaded: Loaded, pages: str | None) -> None:
        from scripts.gpu.engines import speeds
        prompt = min(PROMPT, loaded.model.config.max_context // 3)
        for row in speeds(loaded, pages, self.effort.batches, prompt, self.effort.repeats, self.effort.warm_up):
            self.record["speed"].append({"model": model, "backend": loaded.model.backend.name, "form": form, **row})
