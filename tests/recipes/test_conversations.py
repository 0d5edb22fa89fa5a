"""Rows become tokens, and exactly the assistant's messages are targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from callsheet.errors import ConfigError
from callsheet.recipes.data.conversations import Conversations
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer

CHATML = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template without `{% generation %}`, as most are."""

FORGETFUL = (
    "{% for message in messages %}{% if message.role == 'user' or loop.last %}"
    "{{ message.role + ': ' + message.content + ';' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""A template that leaves out earlier answers, as some leave out thoughts."""

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Wie heißt du?"},
    {"role": "assistant", "content": "Zoë, 你好"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "That is all."},
]


def target_texts(tokenizer: Any, conversations: Conversations, row: dict[str, Any]) -> list[str]:
    """Return the targets of the row as texts: one for each sequence of adjacent tokens."""
    example = conversations.example(row, "here:1")
    parts: list[list[int]] = []
    for i, (token, is_target) in enumerate(zip(example.ids, example.is_target, strict=True)):
        if is_target:
            if not i or not example.is_target[i - 1]:
                parts.append([])
            parts[-1].append(token)
    return [tokenizer.decode(part) for part in parts]


def test_exactly_the_tokens_that_the_template_marks_are_targets() -> None:
    tokenizer = byte_tokenizer()
    assert target_texts(tokenizer, Conversations(tokenizer), {"messages": TALK}) == ["Zoë, 你好<|end|>", "That is all.<|end|>"]


def test_without_marks_the_tokens_that_each_answer_adds_are_targets(tmp_path: Path) -> None:
    (tmp_path / "chatml.jinja").write_text(CHATML)
    tokenizer = byte_tokenizer()
    conversations = Conversations(tokenizer, template=str(tmp_path / "chatml.jinja"))
    assert target_texts(tokenizer, conversations, {"messages": TALK}) == ["Zoë, 你好<|im_end|>\n", "That is all.<|im_end|>\n"]
    prompt = tokenizer.decode(conversations.prompt({"messages": TALK}, "here:1"))
    assert prompt.endswith("And?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(conversations.example({"messages": TALK}, "here:1").ids).startswith(prompt)


STRICT = "{% if messages[0].role == 'system' %}{% else %}{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}" + CHATML
"""A template with a default system message, which cannot render an empty list of messages."""


@pytest.mark.parametrize("template", [CHATML, STRICT])
def test_a_chat_may_begin_with_an_answer(template: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(template)
    tokenizer = byte_tokenizer()
    conversations = Conversations(tokenizer, template=str(tmp_path / "own.jinja"))
    opening = {"role": "assistant", "content": "Hello!"}
    assert target_texts(tokenizer, conversations, {"messages": [opening, *TALK[1:3]]}) == [
        "Hello!<|im_end|>\n",
        "Zoë, 你好<|im_end|>\n",
    ]
    prompt = tokenizer.decode(conversations.prompt({"messages": [opening]}, "here:1"))
    assert prompt.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(conversations.example({"messages": [opening]}, "here:1").ids) == prompt + "Hello!<|im_end|>\n"


def test_a_default_message_of_the_system_that_contains_the_start_of_an_answer_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(
        "Q: is a question, A: an answer;{% for message in messages %}{{ 'A: ' if message.role == 'assistant' else 'Q: ' }}"
        "{{ message.content + ';' }}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    )
    tokenizer, row = byte_tokenizer(), {"messages": [{"role": "assistant", "content": "Hi, A: B"}]}
    conversations = Conversations(tokenizer, template=str(tmp_path / "own.jinja"))
    assert target_texts(tokenizer, conversations, row) == ["Hi, A: B;"]
    assert tokenizer.decode(conversations.prompt(row, "here:1")) == "Q: is a question, A: an answer;A: "


def test_a_first_answer_whose_start_the_template_does_not_mark_is_rejected_if_it_must_be_located(tmp_path: Path) -> None:
    (tmp_path / "bare.jinja").write_text(
        "{% for message in messages %}{{ message.role + ': ' + message.content + ';' }}{% endfor %}"
    )
    tokenizer, row = byte_tokenizer(), {"messages": [TALK[2], *TALK[1:3]]}
    with pytest.raises(ConfigError, match=r"here:1: its first message is the assistant's, .* begin with a user's message"):
        Conversations(tokenizer, template=str(tmp_path / "bare.jinja")).example(row, "here:1")
    whole = Conversations(tokenizer, template=str(tmp_path / "bare.jinja"), completion_only=False)
    assert target_texts(tokenizer, whole, row) == ["assistant: Zoë, 你好;user: Wie heißt du?;assistant: Zoë, 你好;"]


def test_a_template_that_changes_earlier_messages_is_rejected_if_targets_depend_on_them(tmp_path: Path) -> None:
    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)
    tokenizer = byte_tokenizer()
    conversations = Conversations(tokenizer, template=str(tmp_path / "forgetful.jinja"))
    assert target_texts(tokenizer, conversations, {"messages": TALK[:3]}) == ["Zoë, 你好;"]
    with pytest.raises(ConfigError, match=r"here:1: the chat template renders .* differently .* generation"):
        conversations.example({"messages": TALK}, "here:1")


def test_prompt_and_completion_become_a_chat_if_there_is_a_template() -> None:
    tokenizer = byte_tokenizer()
    conversations = Conversations(tokenizer)
    question, answer = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
    of_messages = conversations.example({"messages": [question, answer]}, "here:1")
    assert conversations.example({"prompt": "2+2", "completion": "4"}, "here:1") == of_messages
    assert conversations.example({"prompt": [question], "completion": [answer]}, "here:1") == of_messages
    assert conversations.prompt({"prompt": "2+2"}, "here:1") == conversations.prompt({"prompt": [question]}, "here:1")


def test_prompt_and_completion_are_concatenated_without_a_template() -> None:
    tokenizer = byte_tokenizer()
    conversations = Conversations(tokenizer, template="plain")
    row = {"prompt": "2+2=", "completion": "4"}
    assert tokenizer.decode(conversations.example(row, "here:1").ids) == "2+2=4<|end|>"
    assert target_texts(tokenizer, conversations, row) == ["4<|end|>"]
    assert tokenizer.decode(conversations.prompt(row, "here:1")) == "2+2="


def test_all_tokens_of_a_text_and_of_a_chat_without_completion_only_are_targets() -> None:
    tokenizer = byte_tokenizer()
    assert target_texts(tokenizer, Conversations(tokenizer), {"text": "abc"}) == ["abc<|end|>"]
    assert target_texts(tokenizer, Conversations(tokenizer, completion_only=False), {"messages": TALK[1:3]}) == [
        "<|user|>Wie heißt du?<|assistant|>Zoë, 你好<|end|>"
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "columns question; give `messages`"),
        ({"messages": "hello"}, "messages is 'hello'; give a list of messages"),
        ({"messages": []}, "there are no messages"),
        ({"messages": [{"content": "hello"}]}, "with `role` and `content`"),
        (
            {"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]},
            "message 1 of messages has no `content`",
        ),
        ({"messages": [{"role": "user", "content": "hello"}]}, "no message of the assistant"),
        ({"prompt": "hello"}, "there is no column 'completion'"),
        ({"prompt": "hello", "completion": 3}, "completion is 3; give a text"),
        ({"text": ""}, "text is ''; give a text"),
        ({"text": None}, "columns (none); give `messages`"),
    ],
)
def test_an_invalid_row_is_rejected_with_its_file_and_line(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^data\.jsonl:7: ") as caught:
        Conversations(byte_tokenizer()).example(row, "data.jsonl:7")
    assert message in str(caught.value)


def test_messages_without_a_template_and_a_missing_template_are_rejected() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Conversations(byte_tokenizer(), template="plain").example({"messages": TALK}, "here:1")
    with pytest.raises(ConfigError, match=r"chat_template='nowhere\.jinja'"):
        Conversations(byte_tokenizer(), template="nowhere.jinja")
