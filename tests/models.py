"""Small models of random shapes, for the tests that compare decoders."""

from __future__ import annotations

import random
from dataclasses import replace

from starter.backend import Piece
from starter.base.rope import FactorScaling, LinearScaling, Llama3Scaling
from starter.schema import ModelConfig


def random_config(dice: random.Random, group: int | None = None, tied: bool | None = None,
                  plain: bool = True) -> ModelConfig:
    """``group`` query heads for each key/value head: 1 is plain, more is grouped attention. None: as the dice fall.
    Not ``plain``: also with what Llama's successors added."""
    config = _plain_config(dice, group, tied)
    if plain:
        return config
    head_dim = dice.choice((2, 4, 6))
    scalings = (None, LinearScaling(4.0), Llama3Scaling(8.0, 1.0, 4.0, 32),
                FactorScaling(tuple(dice.uniform(1.0, 8.0) for _ in range(head_dim // 2))))
    return replace(config, width=dice.randint(4, 12), head_dim=head_dim, attention_bias=dice.random() < 0.5,
                   qk_norm=dice.random() < 0.5, rope_scaling=dice.choice(scalings))


def _plain_config(dice: random.Random, group: int | None, tied: bool | None) -> ModelConfig:
    group = group or dice.choice((1, 2, 4))
    kv_heads, head_width = dice.choice((1, 2)), dice.choice((2, 4, 6))
    heads = kv_heads * group
    return ModelConfig(
        vocab_size=dice.randint(3, 20), width=heads * head_width, layers=dice.randint(1, 3), heads=heads,
        kv_heads=kv_heads, ffn_width=dice.randint(1, 20), max_context=64, rope_theta=dice.choice((100.0, 1e4)),
        norm_eps=dice.choice((1e-5, 1e-2)), tied_output=dice.random() < 0.5 if tied is None else tied)


def split_prompts(dice: random.Random, config: ModelConfig, page_size: int) -> tuple[list[Piece], list[Piece]]:
    """Three prompts on pages in any order, in two batches: nothing, a part, and all but the last token of one first;
    then the rest of each, whose next token is wanted. 60 pages are enough."""
    pages = dice.sample(range(60), 60)
    prompts = [[dice.randrange(config.vocab_size) for _ in range(dice.randint(2, 12))] for _ in range(3)]
    tables = [pages[20 * i:20 * i + -(-len(prompt) // page_size)] for i, prompt in enumerate(prompts)]
    cuts = [0, dice.randrange(1, len(prompts[1])), len(prompts[2]) - 1]
    return ([Piece(prompt[:cut], 0, table, wants_logits=False) for prompt, cut, table in zip(prompts, cuts, tables)
             if cut],
            [Piece(prompt[cut:], cut, table, wants_logits=True) for prompt, cut, table in zip(prompts, cuts, tables)])
