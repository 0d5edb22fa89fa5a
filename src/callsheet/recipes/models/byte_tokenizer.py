"""A tokenizer that needs no download. Its tokens are the 256 bytes, and a few special tokens for chats and images."""

from __future__ import annotations

from typing import Any

BYTE_COUNT = 256

END, PAD, USER, ASSISTANT, SYSTEM, IMAGE = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|image|>"
SPECIAL_TOKENS = (END, PAD, USER, ASSISTANT, SYSTEM, IMAGE)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The chat template of the byte tokenizer.

The token of a role precedes each message. The end token follows each of the assistant's messages, and counts in the loss too.
"""


def byte_tokenizer() -> Any:
    """Return a transformers tokenizer whose ids 0 to 255 are the bytes of a text in UTF-8.

    The ids after these are `SPECIAL_TOKENS`, in order.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _symbols() -> list[str]:
    """Return the printable character with which byte-level tokenizers represent each byte (Radford et al. 2019)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(rest)) for byte in range(BYTE_COUNT)]
