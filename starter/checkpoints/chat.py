"""Optional · One turn of a chat as a prompt: ChatML, the template of SmolLM2 and Qwen.

    <|im_start|>system
    You are a helpful assistant.<|im_end|>          only if the template has such a sentence
    <|im_start|>user
    What is the capital of France?<|im_end|>
    <|im_start|>assistant
                                                    from here the model continues, up to <|im_end|>

Chat templates are programs in Jinja. None is run here: ChatML is recognized by its marks, any other is refused.
"""

from __future__ import annotations

import re

from starter.base.tokenizer import Tokenizer
from starter.checkpoints.hf_tokenizer import HfTokenizer
from starter.errors import RequestError

_START, _END = "<|im_start|>", "<|im_end|>"
_DEFAULT_SYSTEM = re.compile(re.escape(_START) + r"system(?:\n|\\n)([^'\"<{]+)" + re.escape(_END))


def chat_prompt(tokenizer: Tokenizer, message: str) -> tuple[list[int], tuple[int, ...]]:
    """The prompt that asks for an answer to ``message``, and the tokens that end the answer. RequestError for a model
    without a chat template, or with one other than ChatML. Marks inside the message are encoded as ordinary text."""
    if not isinstance(tokenizer, HfTokenizer) or not tokenizer.chat_template:
        raise RequestError("this checkpoint has no chat template; continue a text with --prompt instead")
    start, end = tokenizer.control_token(_START), tokenizer.control_token(_END)
    template = tokenizer.chat_template
    if start is None or end is None or _START not in template or _END not in template:
        raise RequestError("the chat template of this checkpoint is not ChatML (<|im_start|> ... <|im_end|>), the only "
                           f"one known; it begins {template[:60]!r}")
    turns = [("user", message)]
    if default := _DEFAULT_SYSTEM.search(template):
        turns.insert(0, ("system", default[1]))
    tokens = []
    for role, text in turns:
        tokens += [start, *tokenizer.encode(f"{role}\n{text}"), end, *tokenizer.encode("\n")]
    return [*tokens, start, *tokenizer.encode("assistant\n")], (end,)
