"""Equal weights, equal prompts, greedy: our engine beside transformers and llama2-py, in the 260K shape of llama2.c.

    batch 1, 8, 32     requests of equal length, in the middle of decoding (positions 112 and up)
    mixed stream       64 requests that come and end at different times (``mixed.py``), prompts and waits included

The targets are those that were set for the NumPy backend on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from scripts.benches.engines import PAGE_SIZE, SHAPES, Ours, with_characters
from scripts.benches.mixed import LIMIT, WORKLOAD, ContinuousServer, OurServer, Server, StaticServer, stream
from scripts.benches.peer_engines import COMMANDS, generating, llama2_py
from scripts.benches.rounds import Run, measure
from scripts.benches.tables import Table
from scripts.peers import Transformers
from starter.backend import Backend
from starter.base.weights import seeded_weights
from starter.model import Model

TARGETS = {1: 4.0, 8: 3.0, 32: 1.5}  # times transformers, by batch
MIXED_TARGET = 3.0
OVERHEAD_TARGET = 0.10  # of a step, at most, at batch 32
TOKENS = PAGE_SIZE  # that everybody decodes in a round: with ours, every request begins one page


def run(backends: Mapping[str, Backend], rounds: int) -> list[Table]:
    """Measure everybody who is there."""
    config = SHAPES["260K"]
    weights = seeded_weights(config, 1)
    models = {name: with_characters(Model(config, weights, backend)) for name, backend in backends.items()}
    peer = Transformers(config, weights, "sdpa") if find_spec("transformers") else None
    python = llama2_py(config, weights, 4) if find_spec("llama2_py") else None
    return [*(equal_lengths(batch, models, peer, python if batch == 1 else None, rounds) for batch in TARGETS),
            mixed(models, peer, rounds)]


def equal_lengths(batch: int, models: Mapping[str, Any], peer: Transformers | None, python: Run | None,
                  rounds: int) -> Table:
    """One batch size."""
    ours = {f"ours, {name}": Ours(loaded, batch, TOKENS) for name, loaded in models.items()}
    contestants: dict[str, Run] = dict(ours)
    if peer:
        contestants["transformers, static"] = generating(peer, batch, TOKENS)
    if python:
        contestants["llama2-py"] = python
    results = measure(contestants, rounds)
    table = Table(f"batch {batch}", against="transformers", columns={"engine's own time": ".1%"})
    theirs = results.get("transformers, static")
    for name, values in results.items():
        own = {"engine's own time": ours[name].overhead} if name in ours else {}
        target = TARGETS[batch] if name == "ours, numpy" else None
        table.add(name, values, theirs if name in ours else None, target, **own)
    for one in ours.values():
        one.engine.close()
    if not peer:
        table.missing("transformers", COMMANDS["transformers"])
    if batch == 1 and not python:
        table.missing("llama2-py", COMMANDS["llama2-py"])
    if batch == 32 and "ours, numpy" in ours:
        share = ours["ours, numpy"].overhead
        table.notes.append(f"Engine's own time, all but the decoder: {share:.1%} of a step with numpy; target < "
                           f"{OVERHEAD_TARGET:.0%}{'' if share < OVERHEAD_TARGET else ', missed'}")
    return table


def mixed(models: Mapping[str, Any], peer: Transformers | None, rounds: int) -> Table:
    """The stream; and does everybody give the same tokens?"""
    arrivals = stream(SHAPES["260K"])
    servers: dict[str, Server] = {f"ours, {name}, {batching}": OurServer(arrivals, loaded, batching)
                                  for batching in ("continuous", "static") for name, loaded in models.items()}
    if peer:
        servers["transformers, static"] = StaticServer(arrivals, peer)
        servers["transformers, continuous"] = ContinuousServer(arrivals, peer)
    try:
        results = measure(servers, rounds, patience=40.0)
    finally:
        for server in servers.values():
            server.close()
    table = Table("mixed stream", against="transformers, static", columns={"latency, s": ".2f"})
    theirs = results.get("transformers, static")
    for name, values in results.items():
        table.add(name, values, theirs if name != "transformers, static" else None,
                  MIXED_TARGET if name == "ours, numpy, continuous" else None,
                  **{"latency, s": servers[name].latency})
    if not peer:
        table.missing("transformers", COMMANDS["transformers"])
    wanted = sum(arrival.wanted for arrival in arrivals)
    table.notes += [f"{len(arrivals)} requests drawn from seed {WORKLOAD.seed} want {wanted:,} tokens; all are "
                    f"there after {arrivals[-1].seconds:.2f} s, at most {LIMIT} run; latency: arrival to end, median",
                    *agreement({name: server.tokens for name, server in servers.items()})]
    return table


def agreement(tokens: Mapping[str, Mapping[int, list[int]]]) -> list[str]:
    """A sentence for each that differs from the first; or one for all."""
    (first, wanted), *others = tokens.items()
    differ = {name: sum(found[i] != wanted[i] for i in wanted) for name, found in others}
    said = [f"{name}: the tokens of {number} of {len(wanted)} requests differ from those of {first}"
            for name, number in differ.items() if number]
    return said or ["The tokens of all are the same" if others else f"{first} had nobody to be compared with"]
