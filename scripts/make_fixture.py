"""Make fixtures/tiny_model.json, its public timeline and the JSON Schema; or check that they are current.

    python3 scripts/make_fixture.py            write them (a minute or two)
    python3 scripts/make_fixture.py --check    compute them again and compare, write nothing

Golden tokens come from ``reference_generate``, which has no cache, no batch and no pages; tests/test_oracle.py
confirms them with transformers' LlamaForCausalLM. The weights' seed is the first whose run is a fair test:
- every step's best logit leads by at least MARGIN, so that the rounding of no backend decides a token;
- every output of ten tokens or more has at least VARIETY different ones, so that a wrong position shows;
- one request ends by an end-of-sequence token before its length is reached, and no other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from starter.backend import Batch, Piece, load_backend
from starter.base.console import Console
from starter.base.tokenizer import CharacterTokenizer
from starter.base.weights import seeded_weights, weights_digest
from starter.command.play import play
from starter.engine import InferenceEngine
from starter.model import Model
from starter.reference import reference_generate
from starter.schema import (
    SCENARIO_VERSION,
    CharacterVocabulary,
    EngineSettings,
    Golden,
    ModelConfig,
    Request,
    Scenario,
    ScenarioEvent,
    SeededWeights,
    load_scenario,
    scenario_json_schema,
)
from starter.timeline import VirtualClock

FIXTURE = ROOT / "fixtures" / "tiny_model.json"
TIMELINE = ROOT / "fixtures" / "tiny_model.timeline.jsonl"
SCHEMA = ROOT / "fixtures" / "scenario.schema.json"
MARGIN = 5e-3
VARIETY = 4
VOCABULARY = CharacterVocabulary("\n !',-.?abcdefghijklmnopqrstuvwxyz", ("<bos>", "<eos>"))
MODEL = ModelConfig(vocab_size=36, width=48, layers=3, heads=6, kv_heads=2, ffn_width=128, max_context=128,
                    tied_output=False, bos_token=0, eos_tokens=(1,))
ENGINE = EngineSettings(page_size=8, num_pages=20, budget_tokens=16, max_running=6, prefix_sharing=True)

# (id, arrival step, prompt, max_tokens). Page size 8: "exact" prompts fill their pages, "across" ends one past a page.
REQUESTS = (
    ("exact", 0, "once upon a time", 24),
    ("across", 0, "a cat sat by the fire, waiting for the rain to end", 20),
    ("single", 0, "k", 12),
    ("cancelled", 1, "tell me a story", 60),
    ("long", 2, "it was the best of times, it was the worst of times, it was", 40),
    ("none", 2, "nothing is asked of this one", 0),
    ("short", 3, "why not?", 1),
    ("middle", 5, "the pages of a cache are like the pages of a book", 30),
    ("late", 10, "it was the best of times for the fox", 36),
    ("tail", 12, "and then", 60),
)
EVENTS = (ScenarioEvent(step=7, cancel="cancelled"),)


def scenario(seed: int, digest: str | None = None, golden: Golden | None = None) -> Scenario:
    """The fixture with the weights of a seed."""
    tokenizer = CharacterTokenizer(VOCABULARY, MODEL.bos_token, MODEL.eos_tokens)
    requests = tuple(Request(name, tokenizer.encode(prompt), max_tokens, arrival)
                     for name, arrival, prompt, max_tokens in REQUESTS)
    return Scenario(
        SCENARIO_VERSION, "tiny_model", MODEL, SeededWeights(seed, digest), VOCABULARY, requests,
        description="ten requests share too small a pool of pages; the weights are seeded, so the text is babble",
        engine=ENGINE, events=EVENTS, golden=golden)


def greedy_run(model: Model, request: Request) -> tuple[list[int], float]:
    """A request alone, with a cache: its tokens, and the least lead of the best logit over the second."""
    prompt_length = len(request.prompt_tokens)
    length = prompt_length + request.max_tokens
    store, tokens, computed, margin = model.new_store(1, length), list(request.prompt_tokens), 0, float("inf")
    while len(tokens) < length and tokens[prompt_length:][-1:] != [*MODEL.eos_tokens]:
        batch = Batch.of([Piece(tokens[computed:], computed, pages=(0,), wants_logits=True)], page_size=length)
        computed = len(tokens)
        [logits] = model.forward(batch, store)
        second, best = sorted(logits)[-2:]
        margin = min(margin, best - second)
        tokens.append(logits.index(best))
    return tokens[prompt_length:], margin


def fair_margin(seed: int) -> float | None:
    """The smallest margin of a seed's run, or None where the run is no fair test."""
    model = Model(MODEL, seeded_weights(MODEL, seed), load_backend("reference"))
    margins, ended_early = [], 0
    for request in scenario(seed).requests:
        tokens, margin = greedy_run(model, request)
        margins.append(margin)
        if margin < MARGIN or (len(tokens) >= 10 and len(set(tokens)) < VARIETY):
            return None
        ended_early += len(tokens) < request.max_tokens
    return min(margins) if ended_early == 1 else None


def with_golden(seed: int, progress: Callable[[str], None]) -> Scenario | None:
    """The fixture with golden tokens from the cache-less reference, or None where the seed is no fair test."""
    progress(f"seed {seed}: is its run a fair test?")
    margin = fair_margin(seed)
    if margin is None:
        return None
    weights = seeded_weights(MODEL, seed)
    model = Model(MODEL, weights, load_backend("reference"))
    tokens = {}
    for request in scenario(seed).requests:
        progress(f"seed {seed}: golden tokens of {request.request_id}")
        tokens[request.request_id] = tuple(reference_generate(model, request.prompt_tokens, request.max_tokens))
    golden = Golden(tokens, round(margin, 6), made_by="scripts/make_fixture.py with starter.model.reference_generate")
    return scenario(seed, weights_digest(weights), golden)


def timeline_of(fixture: Scenario) -> str:
    """Run the fixture on the virtual clock; every event, as a file holds it."""
    with InferenceEngine.from_scenario(fixture, clock=VirtualClock()) as engine, TemporaryDirectory() as folder:
        for _ in play(engine, fixture):
            pass
        engine.timeline.write(path := Path(folder, TIMELINE.name))
        return path.read_text(encoding="utf-8")


def recorded_seed() -> int:
    """The seed that the fixture now holds."""
    source = load_scenario(FIXTURE).weights
    assert isinstance(source, SeededWeights)
    return source.seed


def main() -> int:
    """Write or check; exit code 1 names the first file that is not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    seeds = [recorded_seed()] if check else count()
    with Console(sys.stderr).working() as progress:
        fixture = next(filter(None, (with_golden(seed, progress) for seed in seeds)), None)
    if fixture is None:
        print(f"the seed in {FIXTURE.name} is no fair test: run python3 scripts/make_fixture.py", file=sys.stderr)
        return 1
    schema = json.dumps(scenario_json_schema(), indent=1) + "\n"
    made = {FIXTURE: fixture.to_json(), TIMELINE: timeline_of(fixture), SCHEMA: schema}
    for path, text in made.items():
        if not check:
            path.write_text(text, encoding="utf-8", newline="\n")
        elif path.read_text(encoding="utf-8") != text:
            print(f"{path.relative_to(ROOT)} is not current: run python3 scripts/make_fixture.py", file=sys.stderr)
            return 1
    print(f"{', '.join(path.name for path in made)}: {'current' if check else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
