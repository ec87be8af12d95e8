"""Train the small model of Tang quatrains and write everything that fixtures/quatrains.* consists of.

    pip install '.[train]'
    npm pack chinese-poetry@2.0.1 && tar xf chinese-poetry-2.0.1.tgz     # the poems: a folder "package"
    python3 scripts/train_quatrains.py package                           # about 15 minutes
    python3 scripts/train_quatrains.py package --measure                 # the figures of the shipped weights again

The decoder is written here once more, in PyTorch, over the tensors that ``starter.weights`` names: so what is saved
is what the engine reads, and the golden tokens come from code that shares nothing with the engine's. All figures are
measured on the weights as they are saved, rounded to float16. The seed fixes the split, the batches and the samples;
the last bits of the weights depend on the processor and on PyTorch's version, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import chain
from math import cos, pi
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

try:
    import torch
    from opencc import OpenCC
    from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu
except ImportError as missing:
    if not {"-h", "--help"} & set(sys.argv):
        print(f"error: {missing.name} is not installed: pip install '.[train]'", file=sys.stderr)
        sys.exit(2)

from scripts.quatrains import (
    BOS,
    EOS,
    HELD_OUT,
    SCENARIO,
    UNKNOWN,
    bigram_loss,
    keeps_form,
    most_frequent,
    poem_tokens,
    split,
)
from starter.base.console import EXIT_OK, Console, guarded, run_program
from starter.base.tokenizer import CharacterTokenizer
from starter.base.weights import Tensor, tensor_shapes, weights_digest
from starter.base.wings import wing
from starter.schema import (
    SCENARIO_VERSION,
    CharacterVocabulary,
    EngineSettings,
    Golden,
    ModelConfig,
    Request,
    SafetensorsWeights,
    SamplingParams,
    Scenario,
)

WEIGHTS = SCENARIO.with_suffix(".safetensors")
LOG = SCENARIO.with_suffix(".log")
SEED = 618  # the year the dynasty began
CHARACTERS = 1024
MODEL = ModelConfig(vocab_size=CHARACTERS + 3, width=96, layers=5, heads=6, kv_heads=3, ffn_width=224, max_context=64,
                    bos_token=BOS, eos_tokens=(EOS,))
BATCH = 128                   # poems
MIXED_STEPS, MIXED_RATE = 2300, (3e-3, 3e-4)    # quatrains twice and the pieces of longer poems; cosine from, to
LAST_STEPS, LAST_RATE = 250, (5e-4, 0.0)        # quatrains alone
WARM_UP = 100                 # steps in which the learning rate rises to its first value
HELD_OUT_POEMS = 300
SAMPLES, TEMPERATURE = 200, 0.8
IGNORED = -100                # a target that does not count, as PyTorch marks it

Parameters: TypeAlias = "dict[str, torch.Tensor]"


# ----------------------------------------------------------------------------------------------------- poems


def read_poems(package: Path) -> list[str]:
    """All Tang poems of the package, in simplified characters, in the order of its files."""
    files = sorted((package / "dist" / "quantangshi").glob("poet.tang.*.json"), key=lambda f: int(f.name.split(".")[2]))
    if not files:
        raise SystemExit(f"{package} holds no dist/quantangshi/poet.tang.*.json: give the unpacked npm package")
    poems = ["".join(poem["paragraphs"]) for file in files for poem in json.loads(file.read_text(encoding="utf-8"))]
    simplified: str = OpenCC("t2s").convert("\n".join(poems))
    return simplified.split("\n")


# -------------------------------------------------------------------------------------------------- the decoder


def first_weights() -> Parameters:
    """Normal with variance 1 / columns, less for the embedding and for what is added to the residual stream."""
    weights = {}
    for name, shape in tensor_shapes(MODEL).items():
        scale = 0.02 if "embed" in name else shape[-1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            scale *= (2 * MODEL.layers) ** -0.5
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * scale
        weights[name] = values.requires_grad_()
    return weights


def hidden(weights: Parameters, tokens: torch.Tensor) -> torch.Tensor:
    """[poems, length] -> [poems, length, width], normed, ready for the output projection."""
    x = weights["model.embed_tokens.weight"][tokens]
    angles = torch.arange(tokens.shape[1])[:, None] * MODEL.rope_theta ** (
        -torch.arange(0, MODEL.head_width, 2, dtype=torch.float64) / MODEL.head_width)
    turn = torch.stack((angles.cos(), angles.sin())).to(x.dtype)                     # [2, length, head_width / 2]
    for i in range(MODEL.layers):
        w = {name.split(f"layers.{i}.")[1].removesuffix(".weight"): value
             for name, value in weights.items() if f"layers.{i}." in name}
        h = rms_norm(x, (MODEL.width,), w["input_layernorm"], MODEL.norm_eps)
        q, k, v = ((h @ w[f"self_attn.{part}_proj"].T).unflatten(-1, (-1, MODEL.head_width)).transpose(1, 2)
                   for part in "qkv")                                                # [poems, heads, length, ...]
        mixed = scaled_dot_product_attention(rotary(q, turn), rotary(k, turn), v, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ w["self_attn.o_proj"].T
        h = rms_norm(x, (MODEL.width,), w["post_attention_layernorm"], MODEL.norm_eps)
        x = x + (silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return rms_norm(x, (MODEL.width,), weights["model.norm.weight"], MODEL.norm_eps)


def rotary(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Turn the neighbours (2i, 2i + 1) of each head by their position's angle."""
    (a, b), (c, s) = x.unflatten(-1, (-1, 2)).unbind(-1), turn
    return torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)


def padded(poems: Sequence[Sequence[int]], ignored: Sequence[int] = (UNKNOWN,)) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [poems, length]: each token is the target of those before it, unless it is ignored."""
    length = max(map(len, poems)) - 1
    inputs = [[*poem[:-1], *[EOS] * (length + 1 - len(poem))] for poem in poems]
    targets = [[*(IGNORED if token in ignored else token for token in poem[1:]), *[IGNORED] * (length + 1 - len(poem))]
               for poem in poems]
    return torch.tensor(inputs), torch.tensor(targets)


def losses(weights: Parameters, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-ln p of every target that counts, flat."""
    counts = targets != IGNORED
    logits = hidden(weights, inputs)[counts] @ weights["model.embed_tokens.weight"].T
    return cross_entropy(logits, targets[counts], reduction="none")


# --------------------------------------------------------------------------------------------------- training


def train(weights: Parameters, poems: Sequence[Sequence[int]], steps: int, rates: tuple[float, float],
          held_out: tuple[torch.Tensor, torch.Tensor]) -> Iterator[str]:
    """Change the weights in place; yields a line of progress every 50 steps."""
    matrices, gains = ([w for w in weights.values() if w.dim() == dim] for dim in (2, 1))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
                                  betas=(0.9, 0.98))
    batches, started, tokens, recent = shuffled_batches(poems), time.perf_counter(), 0, []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, rates)
        batch = next(batches)
        loss = losses(weights, *padded(batch)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        tokens += sum(map(len, batch))
        recent.append(loss.item())
        if step % 50 == 0 or step == steps:
            speed = tokens / (time.perf_counter() - started)
            line = f"step {step:4}/{steps}  {tokens / 1e6:5.2f} M tokens  loss {sum(recent) / len(recent):.3f}"
            if step % 250 == 0 or step == steps:
                with torch.no_grad():
                    line += f"  held out {losses(weights, *held_out).mean():.3f}"
            yield f"{line}  {speed:,.0f} tokens/s, {(steps - step) * tokens / step / speed / 60:.1f} min to go"
            recent.clear()


def shuffled_batches(poems: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Batches without end, every poem once before any comes again."""
    dice, order = random.Random(SEED), list(poems)
    while True:
        dice.shuffle(order)
        for i in range(0, len(order) - BATCH + 1, BATCH):
            yield order[i:i + BATCH]


def learning_rate(step: int, steps: int, rates: tuple[float, float]) -> float:
    """Up in a straight line, then down along half a cosine."""
    first, last = rates
    wave = 0.5 * (1.0 + cos(pi * step / steps))
    return min(1.0, step / WARM_UP) * (last + (first - last) * wave)


# ----------------------------------------------------------------------------------------------- measuring


def safetensors() -> Any:
    """What reads and writes the weights."""
    return wing("checkpoints.safetensors", "the file of weights")


def save(weights: Parameters) -> None:
    """Write them in float16."""
    tensors = {name: Tensor(tuple(w.shape), array("f", w.detach().flatten().tolist())) for name, w in weights.items()}
    safetensors().write_safetensors(WEIGHTS, tensors, "F16", {"licence": "MIT", "about": "fixtures/quatrains.md"})


def saved() -> Parameters:
    """The weights as any reader gets them, in float64."""
    return {name: torch.tensor(tensor.values, dtype=torch.float64).reshape(tensor.shape)
            for name, tensor in safetensors().read_safetensors(WEIGHTS).items()}


def next_logits(weights: Parameters, tokens: torch.Tensor) -> torch.Tensor:
    """[samples, length] -> [samples, vocab], □ masked."""
    logits = hidden(weights, tokens)[:, -1] @ weights["model.embed_tokens.weight"].T
    logits[:, UNKNOWN] = -torch.inf
    return logits


def samples(weights: Parameters, number: int) -> list[list[int]]:
    """Poems from nothing, each as far as its end or the context."""
    dice = torch.Generator().manual_seed(SEED)
    tokens = torch.full((number, 1), BOS)
    while tokens.shape[1] < MODEL.max_context:
        chances = (next_logits(weights, tokens) / TEMPERATURE).softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(chances, 1, generator=dice)), dim=1)
    return [poem[1:poem.index(EOS)] if EOS in poem else poem[1:] for poem in tokens.tolist()]


def greedy(weights: Parameters, request: Request) -> tuple[tuple[int, ...], float]:
    """The likeliest continuation up to its end, and the least lead of a chosen token over the second."""
    tokens, margin, start = list(request.prompt_tokens), float("inf"), len(request.prompt_tokens)
    while len(tokens) < start + request.max_tokens and tokens[-1] != EOS:
        (best, second), (token, _) = (row.tolist() for row in next_logits(weights, torch.tensor([tokens]))[0].topk(2))
        margin = min(margin, best - second)
        tokens.append(token)
    return tuple(tokens[start:]), margin


# ------------------------------------------------------------------------------------------------ the scenario


# (id, arrival step, how the poem begins, sampling seed or None for greedy). Whole lines are those of held-out poems.
REQUESTS: tuple[tuple[str, int, str, int | None], ...] = (
    ("any-1", 0, "", 1),
    ("any-2", 0, "", 2),
    ("curtain", 0, "珠帘半床月，", None),
    ("mountains", 3, "十二山晴花尽开，", 3),
    ("wall", 6, "风吹城上树，", 4),
    ("clouds", 12, "阴云万里昼漫漫，", None),
    ("flute", 18, "蜀国僧吹芦一枝，", 5),
    ("moon", 24, "明月", 6),
)
ENGINE = EngineSettings(page_size=16, num_pages=16, budget_tokens=16, max_running=6)


def scenario(weights: Parameters, vocabulary: CharacterVocabulary) -> Scenario:
    """Poems begun by hand and finished by the model; golden tokens for the greedy ones."""
    tokenizer = CharacterTokenizer(vocabulary, BOS, (EOS,))
    requests = []
    for name, arrival, beginning, seed in REQUESTS:
        prompt = tokenizer.encode(beginning, bos=True)
        sampling = SamplingParams(0.0 if seed is None else TEMPERATURE, seed=seed, logit_bias=((UNKNOWN, -1e6),))
        requests.append(Request(name, prompt, 40 - len(prompt), arrival, sampling=sampling))
    goldens = {request.request_id: greedy(weights, request)
               for request in requests if request.sampling.temperature == 0.0}
    golden = Golden({name: tokens for name, (tokens, _) in goldens.items()},
                    round(min(margin for _, margin in goldens.values()), 6),
                    made_by="scripts/train_quatrains.py in PyTorch, float64; "
                            "tests/tools/test_quatrains.py asks transformers")
    return Scenario(
        SCENARIO_VERSION, "quatrains", MODEL,
        SafetensorsWeights(WEIGHTS.name, weights_digest(safetensors().read_safetensors(WEIGHTS))), vocabulary,
        tuple(requests),
        description="a small trained model writes Tang quatrains, several at once; about it: fixtures/quatrains.md",
        engine=ENGINE, golden=golden)


# ------------------------------------------------------------------------------------------------------ all of it


def report(weights: Parameters, vocabulary: CharacterVocabulary, quatrains: Sequence[Sequence[int]],
           pieces: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]], curve: Sequence[str] = ()) -> str:
    """The log: recipe, versions, curve and every figure, measured on the saved weights in float64."""
    trained_on = [*quatrains, *quatrains, *pieces]
    tokenizer = CharacterTokenizer(vocabulary, BOS, (EOS,))
    texts = [tokenizer.decode(poem) for poem in samples(weights, SAMPLES)]
    formed = [text for text in texts if keeps_form(text)]
    loss, loss_with_unknown = (losses(weights, *padded(held_out, ignored)).mean() for ignored in ((UNKNOWN,), ()))
    bigram, bigram_with_unknown = (bigram_loss(trained_on, held_out, MODEL.vocab_size, ignored)
                                   for ignored in ((UNKNOWN,), ()))
    unknown = sum(poem.count(UNKNOWN) for poem in held_out) / sum(len(poem) - 1 for poem in held_out)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "opencc-python-reimplemented"))
    return "\n".join((
        f"made by        scripts/train_quatrains.py, seed {SEED}; Python {platform.python_version()}, {versions}",
        f"data           {len(quatrains)} quatrains, {len(pieces)} pieces of longer poems, {len(held_out)} held out",
        f"model          {sum(w.numel() for w in weights.values())} parameters, {WEIGHTS.stat().st_size} bytes",
        f"training       AdamW, betas 0.9 and 0.98, weight decay 0.1, clip 1, batches of {BATCH} poems",
        f"               {MIXED_STEPS} steps on quatrains twice and pieces, rates {MIXED_RATE}",
        f"               {LAST_STEPS} steps on quatrains alone, rates {LAST_RATE}",
        *(f"               {line}" for line in curve),
        f"held out       {loss:.4f} nats a character; interpolated bigram {bigram:.4f}, {bigram - loss:.4f} above",
        f"  with □       {loss_with_unknown:.4f}, as the model was never taught it; interpolated bigram "
        f"{bigram_with_unknown:.4f}; {unknown:.1%} of the targets are □",
        f"{SAMPLES} samples    temperature {TEMPERATURE}: {len(formed) / SAMPLES:.1%} keep the form, "
        f"{sum(len(text) == 32 for text in formed) / SAMPLES:.1%} are quatrains of seven characters",
        *(f"               {text}" for text in texts[:10]))) + "\n"


def train_all(quatrains: Sequence[Sequence[int]], pieces: Sequence[Sequence[int]],
              held_out: Sequence[Sequence[int]]) -> tuple[Parameters, list[str]]:
    """The recipe from the first weights to the last; returns them and the curve's main points."""
    torch.manual_seed(SEED)
    weights, curve = first_weights(), []
    for line in chain(train(weights, [*quatrains, *quatrains, *pieces], MIXED_STEPS, MIXED_RATE, padded(held_out)),
                      train(weights, quatrains, LAST_STEPS, LAST_RATE, padded(held_out))):
        print(line, flush=True)
        curve += [line.rsplit("  ", 1)[0]] if "held out" in line else []  # without speed and time
    return weights, curve


def main() -> int:
    """Read, train, save, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the unpacked npm package chinese-poetry 2.0.1")
    parser.add_argument("--measure", action="store_true", help="train and write nothing: measure the shipped weights")
    options = parser.parse_args()
    groups = split(read_poems(options.package), HELD_OUT_POEMS, SEED)
    vocabulary = most_frequent(groups[0], CHARACTERS)
    quatrains, pieces, held_out = ([poem_tokens(vocabulary, poem) for poem in group] for group in groups)
    torch.set_num_threads(1)  # nearly as fast as two for so small a model, and the sums keep one order
    if options.measure:
        with Console(sys.stderr).working("measuring ..."):
            text = report(saved(), vocabulary, quatrains, pieces, held_out)
        print(text)
        return EXIT_OK
    weights, curve = train_all(quatrains, pieces, held_out)
    save(weights)
    for path, text in ((HELD_OUT, "\n".join(groups[2]) + "\n"),
                       (SCENARIO, scenario(saved(), vocabulary).to_json()),
                       (LOG, report(saved(), vocabulary, quatrains, pieces, held_out, curve))):
        path.write_text(text, encoding="utf-8", newline="\n")
    print(text)
    return EXIT_OK


if __name__ == "__main__":
    run_program(lambda: guarded(main))
