"""Checkpoints as transformers writes them, and its logits: llama, qwen2, qwen3, made on the spot (extra ``oracle``)."""

from __future__ import annotations

import random
import tempfile
import unittest
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from starter.backend import Batch, Piece
from starter.checkpoints.gguf_model import read_gguf_checkpoint
from starter.checkpoints.hf_model import read_hf_checkpoint
from starter.checkpoints.load import load_checkpoint_model
from starter.model import Model
from tests.extras import needs

TOLERANCE = {"reference": 1e-4, "numpy": 1e-4, "cpu": 3e-2}  # the default backend's weights have 14 bits
VOCABULARY, LENGTH, PAGE = 300, 72, 5
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 24}
SHAPES: Sequence[tuple[str, dict[str, Any]]] = (  # GQA of 1, 2 and 4; tied or not; what each architecture adds
    ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("Llama", {"num_key_value_heads": 2, "rope_parameters": LINEAR}),
    ("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3, "head_dim": 12}),
    ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("Qwen2", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True}),
    ("Qwen3", {"num_key_value_heads": 2, "head_dim": 10, "rope_parameters": LINEAR}),
)


def make_checkpoint(folder: Path, family: str, seed: int, **changes: Any) -> Any:
    """A random model of transformers, saved in a folder with a tokenizer of bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    torch.manual_seed(seed)
    rope = {"rope_theta": 500.0, **changes.pop("rope_parameters", {"rope_type": "default"})}
    config = getattr(transformers, f"{family}Config")(**{
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 4 * LENGTH, "rms_norm_eps": 1e-5, "bos_token_id": 1,
        "eos_token_id": [2, 7], "tie_word_embeddings": False, "rope_parameters": rope, "attn_implementation": "eager",
        **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # larger than transformers draws them: faults show
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.25
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, spread)
            parameter.copy_(parameter.bfloat16())
    if seed % 2:  # as most folders are: bfloat16, in several files
        deepcopy(model).bfloat16().save_pretrained(folder, max_shard_size="20KB")
    else:
        model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces())}, [("Ġ", "t")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def pieces() -> list[str]:
    """The tokens: all bytes, and one merge."""
    from tokenizers import pre_tokenizers
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt"]


def write_gguf(path: Path, model: Any) -> None:
    """The same model as llama.cpp's converter writes it: names by its own table, llama's queries and keys permuted."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
    config, architecture = model.config, model.config.model_type
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    if config.rope_parameters["rope_type"] == "linear":
        from gguf import RopeScalingType
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces())
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = values.reshape(-1, 2, width // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), values)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def their_logits(model: Any, tokens: Sequence[int]) -> list[list[float]]:
    """After every position."""
    import torch
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].tolist()


def our_logits(model: Model, tokens: Sequence[int], cuts: Sequence[int]) -> list[list[float]]:
    """After every position, the tokens cut into pieces."""
    store = model.new_store(-(-len(tokens) // PAGE), PAGE)
    logits = []
    for start, end in pairwise([0, *cuts, len(tokens)]):
        batch = Batch.of([Piece(tokens[start:end], start, range(-(-end // PAGE)), wants_logits=end - start)], PAGE)
        logits += model.forward(batch, store)
    return logits


@needs("oracle", "torch", "transformers", "tokenizers", "numpy", "gguf")
class Oracle(unittest.TestCase):
    def test_every_logit_of_every_architecture(self) -> None:
        for seed, (family, changes) in enumerate(SHAPES):
            with tempfile.TemporaryDirectory() as folder, self.subTest(family=family, changes=changes):
                theirs = make_checkpoint(Path(folder), family, seed, **changes)
                tokens = random.Random(seed).choices(range(VOCABULARY), k=LENGTH)
                wanted = their_logits(theirs, tokens)
                self.assertGreater(max(map(max, wanted)), 1.0)
                for backend, tolerance in TOLERANCE.items():
                    self.check(load_checkpoint_model(folder, backend).model, tokens, wanted, tolerance)

    def test_gguf_files_hold_the_same_models(self) -> None:
        for seed, (family, changes) in enumerate(SHAPES):
            if changes.get("rope_parameters") == LLAMA3:
                continue  # which the converter writes as a tensor of factors: tests/test_reference.py
            with tempfile.TemporaryDirectory() as folder, self.subTest(family=family, changes=changes):
                write_gguf(Path(folder) / "model.gguf", make_checkpoint(Path(folder), family, seed, **changes))
                ours, theirs = read_gguf_checkpoint(Path(folder) / "model.gguf"), read_hf_checkpoint(folder)
                self.assertEqual(ours.weights, theirs.weights)
                single = replace(ours.config, norm_eps=theirs.config.norm_eps, head_dim=theirs.config.head_dim)
                self.assertEqual(single, theirs.config)
                self.assertAlmostEqual(ours.config.norm_eps, theirs.config.norm_eps, places=12)  # float32 in the file
                self.assertEqual(ours.config.head_width, theirs.config.head_width)
                for text in ("the cat, 世界", " t"):
                    self.assertEqual(ours.tokenizer.encode(text), theirs.tokenizer.encode(text))

    def check(self, model: Model, tokens: Sequence[int], wanted: Sequence[Sequence[float]], tolerance: float) -> None:
        self.assertEqual(model.config.eos_tokens, (2, 7))
        for way, cuts in (("prefill", ()), ("chunks", (3, 11, 12, 40)), ("decode", range(LENGTH - 12, LENGTH))):
            with self.subTest(backend=model.backend.name, way=way):
                worst = max(abs(a - b) for mine, row in zip(our_logits(model, tokens, cuts), wanted, strict=True)
                            for a, b in zip(mine, row, strict=True))
                self.assertLess(worst, tolerance)


if __name__ == "__main__":
    unittest.main()
