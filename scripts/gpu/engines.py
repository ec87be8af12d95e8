"""The engine on a device: what it says, how far from the oracle, how much memory, what when memory ends, how fast.

Forms are those in which weights and K/V pages are kept on the device. The oracles run on the processor: backend
"reference" in double precision for logits (and, in the fixtures, for the golden tokens), "cpu" for the loss, with the
same quantization. How many outputs are token for token those of backend "numpy" is told and not judged: where two
tokens are nearly as likely, a last bit decides.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from scripts import quatrains
from scripts.gpu.timing import summary
from scripts.quant_report import mean_loss, root_mean_square
from starter import InferenceEngine, load_backend, load_scenario
from starter.backend import Backend
from starter.command.play import play, tokens_of
from starter.errors import BackendError, RequestError
from starter.model import Loaded, load_scenario_model
from starter.schema import EngineSettings, Scenario

ROOT = Path(__file__).resolve().parent.parent.parent
TINY, QUATRAINS = ROOT / "fixtures" / "tiny_model.json", ROOT / "fixtures" / "quatrains.json"


@dataclass(frozen=True)
class Form:
    """``pages``: "int8", or None for those of ``dtype``. ``largest`` distance of a logit from the oracle's that is
    allowed (the logits of these models reach about 15), and of the loss from backend cpu's, in nats. On int8 pages a
    last bit can decide between two codes of a key, so a logit may be farther off there than on floats."""

    name: str
    dtype: str
    quantization: str | None
    largest: float
    loss: float
    pages: str | None = None


FORMS = (Form("float32", "float32", None, 1e-4, 1e-3), Form("float16", "float16", None, 0.03, 5e-3),
         Form("int8", "float32", "int8", 1e-4, 1e-3), Form("int4", "float32", "int4", 1e-4, 1e-3),
         Form("int4 and float16 pages", "float16", "int4", 0.03, 5e-3),
         Form("int8 pages", "float32", None, 0.03, 1e-3, "int8"),
         Form("int4 and int8 pages", "float32", "int4", 0.03, 1e-3, "int8"))

PAGES = 100_000  # of a pool that is too large

MakeBackend = Callable[..., Any]  # options of cuda_backend.CudaBackend -> one


def serve(backend: str | Backend, scenario: Scenario, **options: Any) -> tuple[dict[str, list[int]], list[str], Any]:
    """Tokens by request, errors, and the statistics of the page manager."""
    with InferenceEngine.from_scenario(scenario, backend, **options) as engine:
        events = [event for played in play(engine, scenario) for event in played.events]
        return tokens_of(events), [str(event.error) for event in events if event.error], engine.kv.stats()


def run_forms(make: MakeBackend, forms: Iterable[Form], poems: int, oracle_poems: int) -> Iterator[dict[str, Any]]:
    """Both fixtures in these forms."""
    for form in forms:
        for path in (TINY, QUATRAINS):
            yield run_form(make, load_scenario(path), form, poems, oracle_poems)


def run_form(make: MakeBackend, scenario: Scenario, form: Form, poems: int, oracle_poems: int) -> dict[str, Any]:
    """One fixture in one form: all requests together, then held-out poems where the fixture has the words for them."""
    backend = make(dtype=form.dtype)
    options = {"quantization": form.quantization, "kv_quantization": form.pages}
    tokens, errors, stats = serve(backend, scenario, **options)
    beside, _, _ = serve("numpy", scenario, **options)
    golden = scenario.golden.tokens if scenario.golden and not any(options.values()) else {}
    cut = {event.cancel for event in scenario.events}  # cancelled at a step: these have the first of their tokens
    right = [tokens[name] == list(wanted)[:len(tokens[name]) if name in cut else None]
             for name, wanted in golden.items()]
    row: dict[str, Any] = {
        "fixture": scenario.name, "form": form.name, "requests": len(tokens), "errors": errors,
        "golden": len(right), "as_golden": sum(right), "as_numpy": sum(tokens[name] == beside[name] for name in tokens),
        "kv_peak_pages": stats.peak_pages, "kv_peak_bytes": stats.peak_bytes,
        "kv_peak_tail_bytes": stats.peak_tail_bytes, "planned_bytes": backend.memory.planned,
        "peak_bytes": backend.memory.peak, "driver_peak_bytes": backend.device.driver_peak(),
        "logits": None, "loss": None, "loss_of_backend_cpu": None}
    if scenario.name == "quatrains":
        row |= distances(make(dtype=form.dtype), form, poems, oracle_poems)
    return row


def distances(backend: Backend, form: Form, poems: int, oracle_poems: int) -> dict[str, Any]:
    """Of the logits from the oracle's, and the loss, on poems that training never saw."""
    logits = foretold(backend, form.quantization, form.pages, poems)
    exact = oracle(form.quantization, form.pages, oracle_poems)
    off = [a - b for rows, known in zip(logits, exact) for row, other in zip(rows, known) for a, b in zip(row, other)]
    return {"logits": {"largest": max(map(abs, off)), "rms": root_mean_square(off), "compared": len(off)},
            "loss": mean_loss(logits, held_out(poems)),
            "loss_of_backend_cpu": loss_of_cpu(form.quantization, form.pages, poems)}


def held_out(poems: int) -> list[list[int]]:
    """The first of them, as tokens."""
    vocabulary = load_scenario(QUATRAINS).tokenizer
    return [quatrains.poem_tokens(vocabulary, poem) for poem in quatrains.read_held_out()[:poems]]


def foretold(backend: Backend, quantization: str | None, pages: str | None, poems: int) -> list[list[list[float]]]:
    """Logits after every token of the poems."""
    model = load_scenario_model(load_scenario(QUATRAINS), backend, quantization).model
    return [[list(row) for row in quatrains.poem_logits(model, poem, pages)] for poem in held_out(poems)]


@cache
def oracle(quantization: str | None, pages: str | None, poems: int) -> list[list[list[float]]]:
    """The same in double precision."""
    return foretold(load_backend("reference"), quantization, pages, poems)


@cache
def loss_of_cpu(quantization: str | None, pages: str | None, poems: int) -> float:
    """Of the default backend, which needs no package."""
    return mean_loss(foretold(load_backend("cpu"), quantization, pages, poems), held_out(poems))


# ------------------------------------------------------------------------------------------------------ memory


def refusals(make: MakeBackend, free_bytes: int | None) -> dict[str, Any]:
    """A pool of pages larger than the memory, then a request longer than the context: each refused with the engine's
    own error, and the next served as ever. ``free_bytes`` stands in for the memory of a device that does not tell."""
    scenario = load_scenario(TINY)
    backend = make() if free_bytes is None else make(free_bytes=free_bytes)
    wanted, _, _ = serve("cpu", scenario)
    token = 2 * 4 * scenario.model.layers * scenario.model.kv_width  # bytes
    page_size = int(backend.memory.limit) // (PAGES * token) + 1
    try:
        serve(backend, scenario, num_pages=PAGES, page_size=page_size)
        pages = None
    except BackendError as error:
        pages = str(error)
    gc.collect()
    after_pages = serve(backend, scenario)[0] == wanted
    with InferenceEngine.from_scenario(scenario, backend) as engine:
        before = engine.generate([[1, 2, 3]], 6)
        try:
            engine.submit([1] * scenario.model.max_context, 6)
            request = None
        except RequestError as error:
            request = str(error)
        after_request = engine.generate([[1, 2, 3]], 6) == before
    return {"limit_bytes": int(backend.memory.limit), "pages_error": pages, "served_after_pages": after_pages,
            "request_error": request, "served_after_request": after_request}


def out_of_memory(make: MakeBackend, more_than_all: int) -> dict[str, Any]:
    """In one step a long prompt and a short one, and memory for the short one alone: the long one ends with an error,
    the other goes on. Then the driver is asked for ``more_than_all`` bytes; one that gives them has taken the
    computer's own memory (``given``). After each, all are served as before."""
    long, short, backend = [1] * 60, [2, 3], make()
    with InferenceEngine.from_scenario(load_scenario(TINY), backend, budget_tokens=64, num_pages=40,
                                       prefix_sharing=False) as engine:
        wanted = engine.generate([long, short], 6)
        limit, backend.memory.limit = backend.memory.limit, backend.memory.live + 30_000
        for request_id, prompt in (("long", long), ("short", short)):
            engine.submit(prompt, 6, request_id=request_id)
        events = {name: list(engine.stream(name)) for name in ("short", "long")}
        backend.memory.limit = limit
        again = engine.generate([long, short], 6)
        backend.memory.limit, error, given = inf, None, False
        try:
            backend.device.empty((more_than_all // 2**22, 2**20))  # numbers of four bytes
            given = True
        except BackendError as refusal:
            error = str(refusal)
        gc.collect()
        backend.memory.limit = limit
        return {"injected": {"ended": events["long"][-1].finish_reason, "error": str(events["long"][-1].error),
                             "other_request_same": [event.token for event in events["short"]] == wanted[1],
                             "served_after": again == wanted},
                "real": {"asked_bytes": more_than_all, "given": given, "error": error,
                         "served_after": engine.generate([long, short], 6) == wanted}}


# ------------------------------------------------------------------------------------------------------- speed


def speeds(loaded: Loaded, pages: str | None, batches: Iterable[int], prompt: int, repeats: int, warm_up: int
           ) -> Iterator[dict[str, Any]]:
    """Tokens a second of prefill and of decode, by batch: one step at a time, every request in each."""
    model = loaded.model
    config = replace(model.config, eos_tokens=())  # nobody ends early
    model.config = config
    for batch in batches:
        steps, length = warm_up + repeats, prompt + warm_up + repeats + 1
        settings = EngineSettings(num_pages=batch * -(-length // 16), budget_tokens=batch * prompt, max_running=batch,
                                  kv_quantization=pages)
        with InferenceEngine(loaded, settings) as engine:
            prefill = [_step(engine, batch, prompt, 1, seed) for seed in range(steps)]
            _step(engine, batch, prompt, steps + 1, steps)
            decode = [_timed(engine) for _ in range(steps)]
            held = engine.kv.stats().peak_bytes
        for phase, seconds, tokens in (("prefill", prefill, batch * prompt), ("decode", decode, batch)):
            times = summary(seconds[warm_up:])
            yield {"phase": phase, "batch": batch, "tokens": tokens, **times,
                   "tokens_per_s": tokens / times["median_s"],
                   "bytes_per_s": (model.weight_bytes + held) / times["median_s"] if phase == "decode" else None}


def _step(engine: InferenceEngine, batch: int, prompt: int, max_tokens: int, seed: int) -> float:
    """Seconds of the step that computes these prompts."""
    vocabulary = engine.model.config.vocab_size
    for row in range(batch):
        engine.submit([(7 * row + 3 * seed + i) % vocabulary for i in range(prompt)], max_tokens)
    return _timed(engine)


def _timed(engine: InferenceEngine) -> float:
    started = perf_counter()
    engine.step()
    return perf_counter() - started
