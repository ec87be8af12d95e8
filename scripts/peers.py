"""Other people's decoders with our weights in them: oracles of the tests, and peers of ``bench.py``.

    transformers    its LlamaForCausalLM in float32 on PyTorch      pip install '.[oracle]'
    llama2-py       llama2.c in pure Python                         pip install '.[peers]'
    llama.cpp       a GGUF file as it is, through its C functions    pip install llama-cpp-python

Each is imported when an object is made, so that this module loads without them.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from starter.base.weights import Tensor
from starter.errors import BackendError
from starter.schema import ModelConfig

Weights = Mapping[str, Tensor]


class Transformers:
    """A model of ours as a LlamaForCausalLM. Its q_proj and k_proj keep the pairs of the rotary embedding as two halves
    of a head, ours as neighbours."""

    def __init__(self, config: ModelConfig, weights: Weights, attention: str = "eager") -> None:
        """``attention`` is one of its implementations: "eager" is the plain one, "sdpa" the default, and faster."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        self.torch = torch
        self.model = LlamaForCausalLM(LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.ffn_width,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_context, rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_output, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            attn_implementation=attention)).float().eval()  # type: ignore[call-arg,unused-ignore]
        state = {}
        for name, tensor in weights.items():
            values = torch.frombuffer(tensor.values, dtype=torch.float32).reshape(tensor.shape)
            if "q_proj" in name or "k_proj" in name:  # rows of a head: pairs [d/2, 2] -> halves [2, d/2]
                pairs = values.reshape(-1, config.head_width // 2, 2, config.width)
                values = pairs.transpose(1, 2).reshape(tensor.shape)
            state[name] = values
        if config.tied_output:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self.model.load_state_dict(state)  # strict: every tensor has its place, and every place a tensor

    def logits(self, tokens: Sequence[int]) -> list[list[float]]:
        """After every position."""
        with self.torch.no_grad():
            rows: list[list[float]] = self.model(self.torch.tensor([list(tokens)]), use_cache=False).logits[0].tolist()
        return rows

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(max_tokens):
            last = self.logits(tokens)[-1]
            tokens.append(last.index(max(last)))
        return tokens[len(prompt):]

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """A static batch, greedy: ``count`` new tokens for everybody, shorter prompts padded on the left."""
        longest = max(map(len, prompts))
        padded = self.torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        seen = self.torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with self.torch.inference_mode():
            tokens = self.model.generate(padded, attention_mask=seen, max_new_tokens=count, min_new_tokens=count,
                                         do_sample=False, use_cache=True)
        new: list[list[int]] = tokens[:, longest:].tolist()
        return new


class Llama2Py:
    """llama2-py reads the file itself. It knows no grouped attention, so there must be a KV head for every head."""

    def __init__(self, path: Path) -> None:
        import llama2_py
        self.module, self.weights = llama2_py, llama2_py.TransformerWeights()
        with open(path, "rb") as file:
            sizes = struct.unpack("<7i", file.read(28))
            tied = sizes[5] > 0
            self.config = llama2_py.Config(*sizes[:5], abs(sizes[5]), sizes[6])
            llama2_py.checkpoint_init_weights(self.weights, self.config, file, tied, path.stat().st_size)

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        state, tokens = self.module.RunState(), list(prompt)
        self.module.init_run_state(state, self.config)
        for position in range(len(prompt) + max_tokens - 1):
            self.module.transformer(tokens[position], position, self.config, state, self.weights)
            if position >= len(prompt) - 1:
                tokens.append(self.module.argmax(state.logits))
        return tokens[len(prompt):]


class LlamaCpp:
    """A GGUF file in llama.cpp, computed as it is stored: several sequences in one context, greedy."""

    def __init__(self, path: Path, sequences: int, context: int, threads: int) -> None:
        import llama_cpp
        self.cpp = llama_cpp
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = sequences * context, sequences
        settings.n_batch = max(sequences, context)
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._batch = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def forget(self) -> None:
        """Empty the cache."""
        self.cpp.llama_memory_clear(self.cpp.llama_get_memory(self._context), True)

    def prefill(self, sequence: int, prompt: Sequence[int]) -> int:
        """Compute a prompt; its next token."""
        rows = [(token, position, sequence) for position, token in enumerate(prompt)]
        return self._decode(rows, [len(rows) - 1])[0]

    def step(self, tokens: Sequence[int], position: int) -> list[int]:
        """A token of each sequence, all at the same position; the next one of each."""
        return self._decode([(token, position, i) for i, token in enumerate(tokens)], range(len(tokens)))

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        self.forget()
        tokens = [self.prefill(0, prompt)]
        while len(tokens) < max_tokens:
            tokens += self.step(tokens[-1:], len(prompt) + len(tokens) - 1)
        return tokens

    def _decode(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> list[int]:
        """Rows of (token, position, sequence); the likeliest next token of the wanted ones."""
        import numpy
        self._batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            self._batch.token[i], self._batch.pos[i] = token, position
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, sequence
            self._batch.logits[i] = i in wanted
        if self.cpp.llama_decode(self._context, self._batch):
            raise BackendError("llama.cpp could not compute a batch")
        logits = (self.cpp.llama_get_logits_ith(self._context, i) for i in wanted)
        return [int(numpy.ctypeslib.as_array(row, (self._vocabulary,)).argmax()) for row in logits]

    def close(self) -> None:
        self.cpp.llama_batch_free(self._batch)
        self.cpp.llama_free(self._context)
        self.cpp.llama_model_free(self._model)


def ungrouped(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    """The same model with a key/value head of its own for each query head: each is repeated."""
    group, size = config.heads // config.kv_heads, config.head_width * config.width
    spread = dict(weights)
    for name, tensor in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = [tensor.values[i:i + size] for i in range(0, len(tensor.values), size)]
            values = array("f", [number for head in heads for number in head * group])
            spread[name] = Tensor((config.width, config.width), values)
    return replace(config, kv_heads=config.heads), spread
