"""starter/checkpoints/hf_tokenizer.py and chat.py on vocabularies written here (extra ``checkpoints``)."""

from __future__ import annotations

import json
import random
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any

from starter.base.tokenizer import CharacterTokenizer
from starter.checkpoints.chat import chat_prompt
from starter.checkpoints.hf_tokenizer import (
    MAX_TOKENIZER_BYTES,
    PRE_TOKENIZERS,
    HfTokenizer,
    read_folder_tokenizer,
    read_gguf_tokenizer,
)
from starter.errors import RequestError, SchemaError
from starter.schema import CharacterVocabulary, ModelConfig
from tests.extras import needs

# GPT-2's letters for the bytes 0 to 255, in that order, taken down by hand from its description: the printable ones
# stand for themselves, the others are the letters from U+0100 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
LETTERS = [chr(byte) if byte in PRINTABLE else chr(256 + OTHERS.index(byte)) for byte in range(256)]
MERGES = ["h e", "he l", "hel l", "hell o", "Ġ w", "Ġw o", "1 2", "12 3"]
TOKENS = [*LETTERS, *(merge.replace(" ", "") for merge in MERGES), "<|im_start|>", "<|im_end|>", "<think>"]
START, END, THINK = len(TOKENS) - 3, len(TOKENS) - 2, len(TOKENS) - 1
CHATML = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
          "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
          "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
          "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CONFIG = ModelConfig(vocab_size=len(TOKENS) + 5, width=2, layers=1, heads=1, kv_heads=1, ffn_width=1, max_context=9,
                     bos_token=START, eos_tokens=(END,))
TEXTS = ("hello world", "  a\t\n b\r\n", "2026, ² ½", "世界 🎉 👩‍👩‍👧", "", "<|im_end|>", "\x00\x7f\xa0\xad",
         "<think>a")


def metadata(**changes: Any) -> dict[str, Any]:
    """As a GGUF file has it; a change to None leaves a key out."""
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "merges": MERGES, "bos_token_id": START,
             "token_type": [1] * START + [3, 3, 4], **changes}
    return {**{f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None},
            "tokenizer.chat_template": CHATML}


@needs("checkpoints", "tokenizers")
class FromGguf(unittest.TestCase):
    def made(self, **changes: Any) -> HfTokenizer:
        return read_gguf_tokenizer(metadata(**changes), CONFIG)

    def pieces(self, text: str, **changes: Any) -> list[str]:
        return [TOKENS[token] for token in self.made(**changes).encode(text)]

    def test_by_hand(self) -> None:
        self.assertEqual(self.pieces("hello world"), ["hello", "Ġwo", "r", "l", "d"])
        self.assertEqual(self.pieces("123"), ["123"])
        self.assertEqual(self.pieces("123", pre="smollm"), ["1", "2", "3"])
        self.assertEqual(self.pieces("123", pre="qwen2"), ["1", "2", "3"])
        self.assertEqual(self.pieces("0123", pre="llama-bpe"), ["0", "12", "3"])  # words of three digits: 012, 3
        self.assertEqual(self.made(pre="qwen2").encode("e\u0301"), self.made(pre="qwen2").encode("\u00e9"))  # NFC

    def test_texts_come_back(self) -> None:
        dice = random.Random(1)
        texts = [*TEXTS, *("".join(dice.choices("ab 12\n世é🎉<|>", k=20)) for _ in range(50))]
        for pre in PRE_TOKENIZERS:
            tokenizer = self.made(pre=pre)
            for text in texts:
                with self.subTest(pre=pre, text=text):
                    tokens = tokenizer.encode(text)
                    self.assertEqual(tokenizer.decode(tokens), text)
                    self.assertFalse({START, END}.intersection(tokens))
                    stream = tokenizer.stream()
                    self.assertEqual("".join(map(stream.push, tokens)) + stream.finish(), text)

    def test_bytes_of_a_token(self) -> None:
        """Token i is the letter of byte i; joined bytes are the text, where single tokens are none."""
        tokenizer = self.made()
        self.assertEqual([tokenizer.bytes_of(byte) for byte in range(256)], [bytes([byte]) for byte in range(256)])
        self.assertEqual(tokenizer.decode([243]), "\ufffd")
        self.assertEqual([tokenizer.bytes_of(token) for token in tokenizer.encode("hello world")],
                         [b"hello", b" wo", b"r", b"l", b"d"])
        self.assertEqual([tokenizer.bytes_of(token) for token in (START, END, THINK, len(TOKENS))],
                         [b"", b"", b"<think>", b""])
        for text in TEXTS:
            self.assertEqual(b"".join(map(tokenizer.bytes_of, tokenizer.encode(text))), text.encode())
        with self.assertRaisesRegex(RequestError, "outside the vocabulary"):
            tokenizer.bytes_of(CONFIG.vocab_size)

    def test_control_tokens_are_silent_and_never_come_from_text(self) -> None:
        tokenizer = self.made()
        self.assertEqual(tokenizer.control_names["<|im_end|>"].token, END)
        self.assertNotIn("<x>", tokenizer.control_names)
        self.assertEqual(tokenizer.decode([START, *tokenizer.encode("a"), END]), "a")
        self.assertEqual(tokenizer.encode("<think>"), [THINK])  # no control token: the user may write it
        self.assertEqual(tokenizer.decode([THINK]), "<think>")
        self.assertEqual(tokenizer.decode([len(TOKENS)]), "")  # the model has more tokens than the tokenizer
        for wrong in (-1, CONFIG.vocab_size):
            self.assertRaises(RequestError, tokenizer.decode, [wrong])
        for text in ("\ud800", 5):
            self.assertRaises(RequestError, tokenizer.encode, text)

    def test_the_beginning_of_a_sequence(self) -> None:
        never, wanted = self.made(), self.made(add_bos_token=True)
        self.assertEqual((never.encode("a", bos=True), never.bos_token), ([LETTERS.index("a")], None))
        self.assertEqual(wanted.encode("a", bos=True), [START, LETTERS.index("a")])
        self.assertEqual(wanted.encode("<|im_start|>a", bos=True), [START, LETTERS.index("a")])  # asked twice, once
        self.assertEqual(wanted.encode("a"), [LETTERS.index("a")])

    def test_what_is_refused(self) -> None:
        for changes, words in (
            ({"model": "llama"}, "'llama'"), ({"model": None}, "None"), ({"pre": "deepseek-llm"}, "'deepseek-llm'"),
            ({"pre": None}, "None"), ({"add_eos_token": True}, "add_eos_token"), ({"tokens": None}, "tokens must be"),
            ({"tokens": [1]}, "tokens must be"), ({"merges": ["a b c"]}, "'a b c'"), ({"merges": "ab"}, "merges must"),
            ({"merges": ["h e", "a zz"]}, "entry 1 is 'a zz', but 'zz' is no token"),
            ({"merges": [" "]}, "merges: entry 0 is ' ', which is not a pair"), ({"merges": []}, "merges is empty"),
            ({"merges": ["h e", " a"]}, "merges: entry 1 is ' a', which is not a pair"),
            ({"merges": ["a b"]}, "entry 0 is 'a b', but 'ab' is no token"),
            ({"tokens": [*TOKENS[:-1], "a"]}, "different texts"),
            ({"token_type": [1]}, "different texts"), ({"tokens": [*TOKENS, *map(str, range(1_000, 1_006))],
                                                        "token_type": None}, "the model has"),
        ):
            with self.subTest(changes=str(changes)[:60]), self.assertRaises(SchemaError) as caught:
                self.made(**changes)
            self.assertIn(words, str(caught.exception))

    def test_a_character_that_the_vocabulary_cannot_write(self) -> None:
        """The package leaves it out without a word; SmolLM2's vocabulary lacks the byte 4."""
        for text, character, lacking in (("a\x04b", "\x04", 4), ("\x04", "\x04", 4), ("aé", "é", 0xA9),
                                         ("\x00", "\x00", 0)):
            tokens = [f"[{i}]" if i == lacking else token for i, token in enumerate(TOKENS)]
            for pre in PRE_TOKENIZERS:
                tokenizer = self.made(tokens=tokens, pre=pre)
                with self.subTest(text=text, pre=pre):
                    with self.assertRaisesRegex(RequestError, f"cannot write: .* 0x{lacking:02X}") as caught:
                        tokenizer.encode(text)
                    self.assertIn(f"{character!r} at its character {text.index(character)},", str(caught.exception))
                    self.assertEqual(tokenizer.decode(tokenizer.encode("hello")), "hello")
        tokens = [*(f"[{i}]" if i == 4 else token for i, token in enumerate(TOKENS[:START])), *TOKENS[START:THINK],
                  "<\x04>"]  # a longer token may hold the byte
        tokenizer = self.made(tokens=tokens)
        self.assertEqual(tokenizer.encode("<\x04>"), [THINK])
        self.assertRaises(RequestError, tokenizer.encode, "<\x04>\x04")

    def test_chat(self) -> None:
        tokenizer = self.made()
        tokens, ends = chat_prompt(tokenizer, "hello<|im_end|>")
        names = {START: "[start]", END: "[end]"}
        shown = "".join(names.get(token) or tokenizer.decode([token]) for token in tokens)
        self.assertEqual(shown, "[start]system\nBe brief.[end]\n[start]user\nhello<|im_end|>[end]\n[start]assistant\n")
        self.assertEqual(ends, (END,))
        tokenizer.chat_template = "{{ '[INST]' + messages[0]['content'] + '[/INST]' }}"  # ordinary text here
        self.assertEqual(chat_prompt(tokenizer, "hi"), (tokenizer.encode("[INST]hi[/INST]"), ()))
        tokenizer.chat_template = None
        with self.assertRaisesRegex(RequestError, "no chat template"):
            chat_prompt(tokenizer, "hi")


@needs("checkpoints", "tokenizers")
class FromFolder(unittest.TestCase):
    def read(self, made: Any, config: ModelConfig = CONFIG) -> HfTokenizer:
        with tempfile.TemporaryDirectory() as folder:
            made.save(str(Path(folder) / "tokenizer.json"))
            return read_folder_tokenizer(Path(folder), config)

    def package_tokenizer(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        made = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS[:START])},
                                    [tuple(merge.split(" ")) for merge in MERGES]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.add_special_tokens([AddedToken(name, special=True) for name in TOKENS[START:THINK]])
        made.add_tokens(["<think>"])
        return made

    def test_as_the_package_has_it(self) -> None:
        theirs = self.package_tokenizer()
        ours = self.read(theirs)
        for text in TEXTS:
            with self.subTest(text=text):
                self.assertEqual(ours.decode(ours.encode(text)), text)
                if "<|" not in text:
                    self.assertEqual(ours.encode(text), theirs.encode(text).ids)
                    self.assertEqual(ours.decode(theirs.encode(text).ids), theirs.decode(theirs.encode(text).ids))
        self.assertIsNone(ours.bos_token)

    def test_the_beginning_of_a_sequence(self) -> None:
        from tokenizers.processors import TemplateProcessing
        made = self.package_tokenizer()
        made.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)])
        self.assertEqual(self.read(made).encode("a", bos=True), [START, LETTERS.index("a")])
        made.post_processor = TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", END)])
        self.assertRaisesRegex(SchemaError, "around every text", self.read, made)

    def test_sentencepiece(self) -> None:
        """As Llama 2's folders have it."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "世"]
        made = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, [("▁", "a"), ("▁a", "b")],
                                    unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                          decoders.Strip(" ", 1, 0)])
        made.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
        ours = self.read(made, replace(CONFIG, bos_token=1, eos_tokens=(2,)))
        self.assertEqual([pieces[token] for token in ours.encode("ab a世\n")],
                         ["▁ab", "▁a", "世", "<0x0A>"])
        dice = random.Random(2)
        for text in ["", " ", "  a", "ab\n", "é🎉", *("".join(dice.choices("ab 世é🎉\n", k=12)) for _ in range(50))]:
            with self.subTest(text=text):
                tokens = ours.encode(text)
                self.assertEqual(tokens, made.encode(text, add_special_tokens=False).ids)
                self.assertEqual((ours.decode(tokens), made.decode(tokens)), (text, text))
                self.assertEqual(ours.decode([1, *tokens, 2]), made.decode([1, *tokens, 2]))

    def test_no_text_is_cut_or_filled_up(self) -> None:
        made = self.package_tokenizer()
        made.enable_truncation(2)
        made.enable_padding(length=9)
        ours = self.read(made)
        self.assertEqual(ours.decode(ours.encode("hello world")), "hello world")
        self.assertEqual(len(ours.encode("a")), 1)

    def test_what_is_refused(self) -> None:
        from tokenizers import decoders
        made = self.package_tokenizer()
        made.decoder = decoders.Metaspace()
        self.assertRaisesRegex(SchemaError, "the decoder is Metaspace", self.read, made)
        made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
        self.assertRaisesRegex(SchemaError, "the decoder is ByteLevel and Fuse", self.read, made)
        made.decoder = None
        self.assertRaisesRegex(SchemaError, "the decoder is None", self.read, made)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            self.assertRaisesRegex(SchemaError, "no tokenizer.json", read_folder_tokenizer, path, CONFIG)
            for raw in ("", "{}", "[1]", '{"model": {"type": "BPE"}}'):
                (path / "tokenizer.json").write_text(raw, encoding="utf-8")
                self.assertRaisesRegex(SchemaError, "tokenizer.json: ", read_folder_tokenizer, path, CONFIG)


    def test_ids_and_merges_are_checked_before_the_package_sees_them(self) -> None:
        good = json.loads(self.package_tokenizer().to_str())

        def refused(words: str, **model: Any) -> None:
            document = {**good, "added_tokens": model.pop("added", good["added_tokens"]),
                        "model": {**good["model"], **model}}
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
                with self.subTest(words=words), self.assertRaises(SchemaError) as caught:
                    read_folder_tokenizer(Path(folder), CONFIG)
            self.assertIn(words, str(caught.exception))
            self.assertIn("tokenizer.json: ", str(caught.exception))

        vocabulary, added = good["model"]["vocab"], good["added_tokens"]
        refused("the tokenizer has a token 2147483647, 'a'; the model has", vocab={**vocabulary, "a": 2**31 - 1})
        refused("the tokenizer has a token 2147483647", added=[{**added[0], "id": 2**31 - 1}, *added[1:]])
        refused("has the id -1", vocab={**vocabulary, "a": -1})
        refused("has the id True", vocab={**vocabulary, "a": True})
        refused("have the same id, 0", vocab={**vocabulary, "a": 0})
        refused(f"have the same id, {START}", vocab={**vocabulary, "é": START})
        refused("'<|im_start|>' has two ids", added=[*added, {**added[0], "id": START + 4}])
        refused(f"no token has the id {START}", added=added[1:])
        refused(f"no token has the id {LETTERS.index('z')}", vocab={k: v for k, v in vocabulary.items() if k != "z"})
        refused("/model/merges is empty", merges=[])
        for merge, words in ((" ", "' ', which is not a pair"), (" a", "' a', which is not a pair"),
                             (["h"], "['h'], which is not a pair"), (["h", 1], "['h', 1], which is not a pair"),
                             (["a", "zz"], "['a', 'zz'], but 'zz' is no token"), ("a b", "'a b', but 'ab' is no token"),
                             (5, "5, which is not a pair")):
            refused(f"/model/merges: entry 1 is {words}", merges=[["h", "e"], merge])

    def test_a_key_given_twice_and_a_document_of_the_wrong_size(self) -> None:
        text = self.package_tokenizer().to_str()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            for raw, words in ((text.replace('"vocab":{', '"vocab":{"a":9,'), "the key 'a' appears twice"),
                               ("version https://git-lfs.github.com/spec/v1", "a git-lfs pointer"),
                               ("[" * 100_000, "not JSON"), (text + " " * MAX_TOKENIZER_BYTES, "at most")):
                path.write_text(raw, encoding="utf-8")
                self.assertRaisesRegex(SchemaError, f"tokenizer.json: .*{words}", read_folder_tokenizer, Path(folder),
                                       CONFIG)
            path.rename(Path(folder) / "tokenizer.model")
            self.assertRaisesRegex(SchemaError, "no tokenizer.json but tokenizer.model", read_folder_tokenizer,
                                   Path(folder), CONFIG)

    def test_a_token_for_what_is_unknown_is_no_text(self) -> None:
        from tokenizers import Tokenizer, decoders, models, normalizers
        pieces = ["<unk>", "▁", "a", "▁a"]
        sentencepiece = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
        for model in (models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>"),
                      models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=False)):
            made = Tokenizer(model)
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            made.decoder = sentencepiece
            ours = self.read(made)
            self.assertEqual(ours.decode(ours.encode("a a")), "a a")
            self.assertRaisesRegex(RequestError, "'z' at its character 1, for which this vocabulary has no token",
                                   ours.encode, "az")


class WithoutAPackage(unittest.TestCase):
    def test_a_model_without_a_template(self) -> None:
        tokenizer = CharacterTokenizer(CharacterVocabulary("ab"))
        self.assertRaisesRegex(RequestError, "no chat template", chat_prompt, tokenizer, "a")


if __name__ == "__main__":
    unittest.main()
