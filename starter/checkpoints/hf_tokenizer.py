"""Optional · Byte-pair tokenizers of Hugging Face folders and GGUF files, on the package ``tokenizers``.

    text  --normalize-->  --split into words-->  --bytes as letters: " a" = "Ġa"-->  --merge pairs-->  tokens

Folders may also hold SentencePiece, the kind of Llama 2, which writes its pieces differently: " a" = "▁a", and a byte
as "<0x0A>".

The package encodes. Decoding is done here, by a table of the bytes of each token, so that ``TextStream`` can show whole
characters as they come. Text never becomes a control token: "<|im_end|>" in a text ends no turn. To build a prompt,
``chat.py`` looks control tokens up in ``control_names``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from starter.base.strict_json import describe
from starter.base.tokenizer import TextStream, Tokenizer, text_or_bytes, text_start
from starter.checkpoints.files import open_checkpoint
from starter.errors import EngineError, RequestError, SchemaError
from starter.schema import ModelConfig

MAX_TOKENIZER_BYTES = 32 * 1024 * 1024  # of a tokenizer.json; Llama 3's takes half

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type

_DIGIT_RUNS = {"llama-bpe": "{1,3}", "qwen2": ""}
_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
_BYTE_LEVEL, _SENTENCEPIECE = ["ByteLevel"], ["Replace", "ByteFallback", "Fuse", "Strip"]  # tokenizer.json's decoders
PRE_TOKENIZERS = ("gpt-2", "smollm", *_DIGIT_RUNS)  # tokenizer.ggml.pre


def _package() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError:
        raise EngineError("this checkpoint's tokenizer needs the package tokenizers, which is not installed: "
                          "pip install '.[checkpoints]'") from None


class Control(NamedTuple):
    """A control token: its number, and whether it takes the white space before and behind it."""

    token: int
    lstrip: bool
    rstrip: bool


class HfTokenizer(Tokenizer):
    """A tokenizer of the package ``tokenizers``."""

    def __init__(self, package_tokenizer: Any, config: ModelConfig, wants_bos: bool, chat_template: object = None,
                 sentencepiece: bool = False, template_names: Mapping[str, str] | None = None,
                 unknown: int | None = None) -> None:
        """``wants_bos``: a text may begin with the model's beginning-of-sequence token. ``chat_template`` as the
        checkpoint has it, and ``template_names``, the names of tokens that it may use (bos_token, eos_token ...): see
        ``chat.py``. ``sentencepiece``: its pieces are written in SentencePiece's way. ``unknown``: the
        token that the package puts for what it cannot write. SchemaError if there are more tokens than the model
        has."""
        self.vocab_size, self.eos_tokens = config.vocab_size, config.eos_tokens
        self.bos_token = config.bos_token if wants_bos else None
        self.chat_template, self.template_names = chat_template, dict(template_names or {})
        self._tokenizer = package_tokenizer
        self._before_text = (None, config.bos_token) if sentencepiece else ()  # a space after these was added by encode
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_names = {token.content: Control(number, token.lstrip, token.rstrip)
                              for number, token in added.items() if token.special}
        self._unknown = unknown
        shown = [b""] * self.vocab_size
        single = set()  # bytes that have a token of their own
        for text, token in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token >= self.vocab_size:
                raise SchemaError(f"the tokenizer has a token {token}; the model has {self.vocab_size} tokens")
            if token not in added:
                shown[token] = _sentencepiece_bytes(text) if sentencepiece else _bytes_of(text)
                if len(shown[token]) == 1 and (sentencepiece or text in _BYTES):
                    single.add(shown[token][0])
            elif not added[token].special:
                shown[token] = text.encode()
        self._lacking = frozenset(range(256)) - single  # the package leaves these out of its tokens without a word
        self._bytes = shown
        self._shown = list(map(text_or_bytes, shown))
        self._opening = [text_or_bytes(added.removeprefix(b" ")) for added in shown] if self._before_text else ()
        self._bos_name = next((name for name, control in self.control_names.items() if control.token == self.bos_token),
                              "")

    def ordinary(self, text: str) -> list[int]:
        """Text -> tokens, names of control tokens as text like any other. RequestError for half of a surrogate pair,
        and for a character that this vocabulary cannot write."""
        text_start(text, "")
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        tokens: list[int] = encoding.ids
        if self._unknown is not None and self._unknown in tokens:
            start, end = encoding.offsets[tokens.index(self._unknown)]
            raise RequestError(f"the text has {text[start:end][:20]!r} at its character {start}, for which this "
                               "vocabulary has no token")
        if not self._lacking.isdisjoint(text.encode()):
            self._check_complete(text, tokens)
        return tokens

    def _check_complete(self, text: str, tokens: list[int]) -> None:
        """RequestError if a byte without a token of its own is not in the tokens. A longer token may hold it."""
        normalizer = self._tokenizer.normalizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        wanted = (normal.replace("▁", " ") if self._before_text else normal).encode()
        written = b"".join(map(self._bytes.__getitem__, tokens))
        for byte in self._lacking.intersection(wanted):
            if written.count(byte) < wanted.count(byte):
                at, character = next(((i, c) for i, c in enumerate(text) if byte in c.encode()), (0, text[:1]))
                raise RequestError(f"the text has {character!r} at its character {at}, which this vocabulary cannot "
                                   f"write: it has no token for the byte 0x{byte:02X}")

    def encode(self, text: str, bos: bool = False) -> list[int]:
        start = text_start(text, self._bos_name)
        tokens = self.ordinary(text[start:])
        return [self.bos_token, *tokens] if self.bos_token is not None and (bos or start) else tokens

    def stream(self) -> TextStream:
        return TextStream(self._shown, self._opening, self._before_text)


def _letters_of_bytes() -> dict[str, int]:
    """GPT-2's letter for each byte: the byte's own character if it can be printed, else the next one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    further = count(256)
    return {chr(byte if byte in printable else next(further)): byte for byte in range(256)}


_BYTES = _letters_of_bytes()


def _bytes_of(piece: str) -> bytes:
    """The bytes that a token's letters stand for; a token that is not written in these letters is its own text."""
    try:
        return bytes([_BYTES[letter] for letter in piece])
    except KeyError:
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece token."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()


# ------------------------------------------------------------------------------------------------ GGUF files


def read_gguf_tokenizer(metadata: Mapping[str, Any], config: ModelConfig) -> HfTokenizer:
    """The tokenizer that a GGUF file's metadata describe. SchemaError for a kind that is unknown here."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise SchemaError(f"tokenizer.ggml.model is {kind!r}; only 'gpt2', byte-pair encoding of bytes, is known")
    if pre not in PRE_TOKENIZERS:
        raise SchemaError(f"tokenizer.ggml.pre is {pre!r}; {', '.join(map(repr, PRE_TOKENIZERS))} are known")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        raise SchemaError("tokenizer.ggml.add_eos_token is set, and prompts do not end a sequence here")
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int) if "tokenizer.ggml.token_type" in metadata else [NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise SchemaError(f"tokenizer.ggml.tokens must be {len(types)} different texts, one for each of token_type")
    merges = _pairs(_list(metadata, "merges", str), set(tokens), "tokenizer.ggml.merges")
    if len(tokens) > config.vocab_size:
        raise SchemaError(f"tokenizer.ggml.tokens has {len(tokens)} tokens; the model has {config.vocab_size} tokens")
    made = _byte_pair(tokens, merges, pre)
    added = {CONTROL: made.add_special_tokens, USER_DEFINED: made.add_tokens}
    for kind_of_token, add in added.items():
        add([_package().AddedToken(text, normalized=False, special=kind_of_token == CONTROL)
             for text, given in zip(tokens, types) if given == kind_of_token])
    wants_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    names = {f"{name}_token": tokens[number] for name, key in _NAMED.items()
             if isinstance(number := metadata.get(f"tokenizer.ggml.{key}_token_id"), int) and 0 <= number < len(tokens)}
    return HfTokenizer(made, config, wants_bos, metadata.get("tokenizer.chat_template"), template_names=names)


_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # what templates may name


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
        raise SchemaError(f"tokenizer.ggml.{name} must be a list of {'texts' if kind is str else 'integers'}")
    return found


def _pairs(merges: Sequence[object], vocabulary: Collection[str], where: str) -> list[tuple[str, str]]:
    """Merges, checked: each a pair of tokens whose union is a token, written "a b" or ["a", "b"]. SchemaError that
    quotes an entry with its place."""
    if not merges:
        raise SchemaError(f"{where} is empty, and without merges every text falls apart into single characters")
    pairs = []
    for i, merge in enumerate(merges):
        parts: list[Any] = merge.split(" ") if isinstance(merge, str) else merge if isinstance(merge, list) else []
        if len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
            raise SchemaError(f"{where}: entry {i} is {_quoted(merge)}, which is not a pair of tokens")
        for text in (*parts, parts[0] + parts[1]):
            if text not in vocabulary:
                raise SchemaError(f"{where}: entry {i} is {_quoted(merge)}, but {_quoted(text)} is no token of the "
                                  "vocabulary")
        pairs.append((parts[0], parts[1]))
    return pairs


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _byte_pair(tokens: Sequence[str], merges: Iterable[tuple[str, str]], pre: str) -> Any:
    """The package's tokenizer of a vocabulary and its merges, in the order of their priority."""
    package = _package()
    split = package.pre_tokenizers
    vocabulary = {text: token for token, text in enumerate(tokens)}
    try:
        made = package.Tokenizer(package.models.BPE(vocabulary, list(merges), ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the package raises bare exceptions
        raise SchemaError(f"tokenizer.ggml.merges: {error}") from None
    if pre == "gpt-2":
        made.pre_tokenizer = split.ByteLevel(add_prefix_space=False)
    elif pre == "smollm":
        made.pre_tokenizer = split.Sequence([split.Digits(individual_digits=True),
                                             split.ByteLevel(add_prefix_space=False)])
    else:
        words = package.Regex(_SPLIT.replace("DIGITS", _DIGIT_RUNS[pre]))
        made.pre_tokenizer = split.Sequence([split.Split(words, "isolated"),
                                             split.ByteLevel(add_prefix_space=False, use_regex=False)])
    if pre == "qwen2":
        made.normalizer = package.normalizers.NFC()
    return made


# ------------------------------------------------------------------------------------------------- folders


def read_folder_tokenizer(folder: Path, config: ModelConfig, chat_template: object = None,
                          template_names: Mapping[str, str] | None = None) -> HfTokenizer:
    """The tokenizer in a folder's tokenizer.json, without truncation and padding. SchemaError for a kind that is
    unknown here."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        older = (folder / "tokenizer.model").is_file()
        raise SchemaError(f"{folder} has no tokenizer.json" + (
            " but tokenizer.model, which is not read; AutoTokenizer.from_pretrained(...).save_pretrained(...) of "
            "transformers makes the other" if older else "; download it, too"))
    package = _package()
    with open_checkpoint(path) as (file, size):
        if size > MAX_TOKENIZER_BYTES:
            raise SchemaError(f"has {size} bytes; at most {MAX_TOKENIZER_BYTES} are read")
        raw = file.read()
        document = _parsed(raw)
        _check_tokenizer(document, config.vocab_size)  # before the package, which makes room for the largest id
        try:
            made = package.Tokenizer.from_str(raw.decode())
        except Exception as error:  # the package raises bare exceptions
            raise SchemaError(str(error)) from None
    made.no_truncation()
    made.no_padding()
    decoder, model = document.get("decoder") or {}, document["model"]
    steps = [step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step]
    if steps not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise SchemaError(f"{path}: the decoder is {' and '.join(steps) or None}; {' and '.join(_BYTE_LEVEL)}, or "
                          f"{' and '.join(_SENTENCEPIECE)}, are known")
    around = made.encode("").ids
    if around not in ([], [config.bos_token]):
        raise SchemaError(f"{path}: around every text it puts the tokens {around}; only the model's beginning of a "
                          f"sequence, {config.bos_token}, is known")
    unknown = model.get("unk_id") if model.get("unk_token") is None else made.token_to_id(model["unk_token"])
    return HfTokenizer(made, config, bool(around), chat_template, steps == _SENTENCEPIECE, template_names,
                       unknown)


def _parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object in a tokenizer.json. SchemaError also for a key that an object has twice."""
    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise SchemaError(f"the key {_quoted(twice)} appears twice in one object")
        return found

    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=members)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise SchemaError(f"must hold an object, not {describe(document)}")
    return document


def _check_tokenizer(document: Mapping[str, Any], vocab_size: int) -> None:
    """SchemaError unless each token has an id of its own in the model's vocabulary, without a gap, and every merge is
    a pair of tokens. Whatever else is wrong in the document is left to the package."""
    model = document.get("model")
    model = model if isinstance(model, dict) else {}
    vocabulary, added = model.get("vocab"), document.get("added_tokens")
    if isinstance(vocabulary, list):  # of pairs of text and score; the id is the place
        vocabulary = {item[0]: i for i, item in enumerate(vocabulary)
                      if isinstance(item, list) and item and isinstance(item[0], str)}
    if not isinstance(vocabulary, dict):
        return
    texts: dict[int, str] = {}
    named = [(text, token, "/model/vocab") for text, token in vocabulary.items()]
    for i, item in enumerate(added if isinstance(added, list) else []):
        if isinstance(item, dict) and isinstance(item.get("content"), str):
            named.append((item["content"], item.get("id"), f"/added_tokens/{i}"))
    for text, token, path in named:
        if type(token) is not int or token < 0:
            raise SchemaError(f"the token {_quoted(text)} has the id {_quoted(token)}, which is no number from 0 on",
                              path)
        if token >= vocab_size:
            raise SchemaError(f"the tokenizer has a token {token}, {_quoted(text)}; the model has {vocab_size} tokens",
                              path)
        if texts.setdefault(token, text) != text:
            raise SchemaError(f"the tokens {_quoted(texts[token])} and {_quoted(text)} have the same id, {token}", path)
    ids = {text: token for text, token, _ in named}
    if moved := next((text for text, token, _ in named if ids[text] != token), None):
        raise SchemaError(f"the token {_quoted(moved)} has two ids", "/added_tokens")
    if len(texts) != max(texts, default=-1) + 1:
        gone = next(token for token in range(len(texts)) if token not in texts)
        raise SchemaError(f"no token has the id {gone}, although there are higher ones", "/model/vocab")
    if isinstance(model.get("merges"), list) and not model.get("continuing_subword_prefix"):
        _pairs(model["merges"], vocabulary, "/model/merges")
