"""Other people's decoders agree with ours: transformers' LlamaForCausalLM (extra ``oracle``), llama2-py (``peers``).

    pip install '.[oracle]' '.[peers]'        without them these tests skip; with P07_REQUIRE_EXTRAS=1 they fail

transformers confirms the fixture's golden tokens, every logit on the way there, and the margin that is recorded with
them. Its q_proj and k_proj keep the pairs of the rotary embedding as two halves of a head, ours as neighbours.
"""

from __future__ import annotations

import random
import struct
import tempfile
import unittest
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from starter.batch import Batch, Piece
from starter.cpu_backend import CpuBackend
from starter.engine import InferenceEngine
from starter.llama2c import UNSAID, read_llama2c, write_llama2c
from starter.loading import scenario_weights
from starter.model import Model, reference_generate
from starter.play import play
from starter.schema import ModelConfig, load_scenario
from starter.weights import Tensor, seeded_weights
from tests.extras import needs
from tests.models import random_config
from tests.paths import FIXTURE, ROOT

STORIES = ROOT.parent / "shared" / "models" / "stories260K"
needs_stories = unittest.skipUnless(STORIES.is_dir(), f"SKIPPED: needs {STORIES.name} in ../shared/models")
TOLERANCE = 1e-4  # transformers computes in float32


def our_logits(config: ModelConfig, weights: Mapping[str, Tensor], tokens: Sequence[int]) -> list[list[float]]:
    """Logits after every position: [len(tokens), vocab_size]."""
    model = Model(config, weights, CpuBackend())
    batch = Batch.of([Piece(tokens, 0, (0,), wants_logits=True)], len(tokens))
    batch.logit_rows = list(range(len(tokens)))
    return model.forward(batch, model.new_store(1, len(tokens)))


def greedy(config: ModelConfig, weights: Mapping[str, Tensor], prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Our engine's tokens, the prompt in chunks of five."""
    with tempfile.TemporaryDirectory():
        model = Model(config, weights, CpuBackend())
    return reference_generate(model, prompt, max_tokens)


@needs("oracle", "torch", "transformers")
class TransformersTest(unittest.TestCase):
    def llama(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> Any:
        """The same model as a LlamaForCausalLM."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        theirs = LlamaForCausalLM(LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.ffn_width,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_context, rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_output, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            attn_implementation="eager")).to(torch.float32).eval()
        state = {}
        for name, tensor in weights.items():
            state[name] = torch.tensor(tensor.values, dtype=torch.float32).reshape(tensor.shape)
            if "q_proj" in name or "k_proj" in name:  # rows of a head: pairs (d/2, 2) -> halves (2, d/2)
                pairs = state[name].reshape(-1, config.head_width // 2, 2, config.width)
                state[name] = pairs.transpose(1, 2).reshape(tensor.shape)
        left_out = theirs.load_state_dict(state, strict=False)
        tied = ["lm_head.weight"] if config.tied_output else []
        self.assertEqual((left_out.missing_keys, left_out.unexpected_keys), (tied, []))
        theirs.tie_weights()
        return theirs

    def their_logits(self, theirs: Any, tokens: Sequence[int]) -> list[list[float]]:
        import torch
        with torch.no_grad():
            return theirs(torch.tensor([list(tokens)]), use_cache=False).logits[0].tolist()

    def check_close(self, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> None:
        self.assertEqual(len(ours), len(theirs))
        for mine, other in zip(ours, theirs):
            self.assertLess(max(abs(a - b) for a, b in zip(mine, other, strict=True)), TOLERANCE)
