"""Converts rows of text to tokens, and marks the tokens that count in the loss (target tokens).

Rows are chats (with a template), prompts with completions, or plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from callsheet.errors import ConfigError
from callsheet.recipes.data.tables import Row, reject

_GENERATION_PATTERN = re.compile(r"\{%-?\s*generation\s*-?%\}")
_COLUMNS_HINT = "`messages`, or `prompt` and `completion`, or `text`"

PLAIN_TEMPLATE = "plain"
"""The value of `chat_template` for which no chat template is used."""

Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized row: its token ids, and for each token whether it counts in the loss."""

    ids: list[int]
    is_target: list[bool]


class Conversations:
    """Converts rows to tokens, and marks the tokens that count in the loss (target tokens).

    A row has a column `messages`, a list of messages with `role` and `content`, and optionally a column `tools`; or `prompt` and
    `completion`, which are texts or lists of messages; or `text`. With a chat template, a text `prompt` becomes a user's message
    and `completion` its answer. Without a template, the two texts are concatenated.

    The assistant's messages count in the loss, including the tokens with which the template ends a message. If the template has
    blocks `{% generation %}`, only the text inside the blocks counts. Otherwise, each of the
    assistant's messages counts with the text that it adds when it is rendered after the messages before it; if the chat begins with
    one, this message counts from where the template starts an answer. A plain text counts as a whole.

    Args:
        tokenizer: a tokenizer of transformers.
        template: None for the tokenizer's own chat template, `plain` for no template, or the path of a template file, which
            replaces the tokenizer's.
        completion_only: whether only the answers count in the loss; if False, the prompts do too.

    Raises:
        ConfigError: the template does not exist, or the tokenizer cannot return the offsets of its tokens in a text.
    """

    def __init__(self, tokenizer: Any, *, template: str | None = None, completion_only: bool = True) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} cannot return the offsets of its tokens in a text; give one with a tokenizer.json"
            )
        if template not in (None, PLAIN_TEMPLATE):
            try:
                tokenizer.chat_template = Path(str(template)).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat_template={template!r}: {error}; give a Jinja file, or `{PLAIN_TEMPLATE}`") from None
        self._tokenizer = tokenizer
        self._has_template = template != PLAIN_TEMPLATE and tokenizer.chat_template is not None
        self._completion_only = completion_only

    def example(self, row: Row, place: str) -> Example:
        """Return the tokens of a row, and which of them count in the loss.

        Raises:
            ConfigError: the row has none of the expected columns, or a column has a wrong type; the message names the row's place.
        """
        row = _without_none(row)
        if "messages" in row or _is_chat(row.get("prompt")):
            return self._of_chat(*_conversation(row, place), place)
        if "prompt" in row:
            prompt, completion = _text(row, "prompt", place), _text(row, "completion", place)
            if self._has_template:
                return self._of_chat([_user(prompt), {"role": "assistant", "content": completion}], None, place)
            question, answer = self._ids(prompt, special=True), self._append_end_token(self._ids(completion))
            return Example(question + answer, [not self._completion_only] * len(question) + [True] * len(answer))
        if "text" not in row:
            reject(place, f"there is nothing to learn from in the columns {', '.join(row) or '(none)'}; give {_COLUMNS_HINT}")
        ids = self._append_end_token(self._ids(_text(row, "text", place), special=True))
        return Example(ids, [True] * len(ids))

    def prompt(self, row: Row, place: str) -> list[int]:
        """Return the tokens of a row without its last answer, for the model to continue with an answer.

        If there is a chat template, the tokens end with the template's start of an answer.

        Raises:
            ConfigError: the row has no prompt, or a column has a wrong type; the message names the row's place.
        """
        row = _without_none(row)
        if "messages" in row or _is_chat(row.get("prompt")):
            given, tools = _conversation({**row, "completion": []}, place)
            messages = given
            while messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if not messages:  # all messages are answers, so the model begins the chat
                return self._ids(self._before_first(self._render(given[:1], tools, place), given[0], tools, place))
            return self._ids(self._render(messages, tools, place, add_generation_prompt=True))
        if "prompt" not in row:
            reject(place, f"there is no prompt in the columns {', '.join(row) or '(none)'}; give `messages` or `prompt`")
        text = _text(row, "prompt", place)
        if self._has_template:
            return self._ids(self._render([_user(text)], None, place, add_generation_prompt=True))
        return self._ids(text, special=True)

    def _of_chat(self, messages: Sequence[Message], tools: Any, place: str) -> Example:
        if not any(message["role"] == "assistant" for message in messages):
            reject(place, "it has no message of the assistant, so there is nothing to learn; give one with the role `assistant`")
        # The answers are located only if they are needed: some templates render chats whose answers cannot be located.
        is_whole = not self._completion_only
        text, spans = (self._render(messages, tools, place), []) if is_whole else self._answers(messages, tools, place)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = encoded["input_ids"]
        if is_whole:
            return Example(ids, [True] * len(ids))
        is_target = [False] * len(ids)
        token = iter(enumerate(start for start, _ in encoded["offset_mapping"]))
        i, at = next(token, (0, len(text)))
        for start, end in spans:
            while at < end:
                is_target[i] = at >= start
                i, at = next(token, (0, len(text)))
        return Example(ids, is_target)

    def _answers(self, messages: Sequence[Message], tools: Any, place: str) -> tuple[str, list[Span]]:
        """Return the messages as rendered text, and the spans of the assistant's messages in this text."""
        if self._has_template and _GENERATION_PATTERN.search(
            template := str(self._tokenizer.get_chat_template(None, tools=tools))
        ):
            return self._render_with_spans(messages, tools, template, place)
        text = self._render(messages, tools, place)
        found: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            after = self._render(messages[: i + 1], tools, place) if i + 1 < len(messages) else text
            before = (
                self._render(messages[:i], tools, place, add_generation_prompt=True)
                if i
                else self._before_first(after, message, tools, place)
            )
            if not (before and text.startswith(before) and text.startswith(after) and len(before) < len(after)):
                reject(
                    place,
                    f"the chat template renders the messages up to message {i + 1} differently when more follow, so that the "
                    "answer in it cannot be located; put {% generation %} around the "
                    "assistant's messages in the template (chat_template), or give one answer in each row",
                )
            found.append((len(before), len(after)))
        return text, found

    def _before_first(self, text: str, message: Message, tools: Any, place: str) -> str:
        """Return the beginning of `text`, up to the content of `message`. `text` is a rendered chat that has only this message.

        Many templates cannot render an empty list of messages. Therefore, search for the start of an answer, as the template renders
        it after a user's message.
        """
        asked = [_user("?")]
        begun = self._render(asked, tools, place, add_generation_prompt=True)
        start = begun.removeprefix(self._render(asked, tools, place))
        content = message["content"]
        # The template may add a system message that contains `start` too, so take the last `start` before the content.
        end = text.rfind(content.strip()) if isinstance(content, str) and content.strip() else len(text)
        begins = text.rfind(start, 0, end) if start else -1
        if begins < 0:
            reject(
                place,
                "its first message is the assistant's, and the chat template does not mark where this answer starts; begin with a "
                "user's message, or put {% generation %} around the assistant's messages in the template (chat_template) to train on it",
            )
        return text[: begins + len(start)]

    def _render_with_spans(self, messages: Sequence[Message], tools: Any, template: str, place: str) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        def render() -> Any:
            return render_jinja_template(
                conversations=[_without_none_in_each(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )

        (text,), (spans,) = _render_or_reject(render, place)
        return text, sorted((start, end) for start, end in spans)

    def _render(self, messages: Sequence[Message], tools: Any, place: str, *, add_generation_prompt: bool = False) -> str:
        if not self._has_template:
            reject(
                place,
                "the tokenizer has no chat template for these messages; name a file with one in chat_template, or give `text`",
            )
        text: str = _render_or_reject(
            lambda: self._tokenizer.apply_chat_template(
                _without_none_in_each(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            ),
            place,
        )
        return text

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text. With `special`, add special tokens. A rendered chat template already contains them."""
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _append_end_token(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _render_or_reject(render: Callable[[], Any], place: str) -> Any:
    """Return the result of `render`, which renders a chat template. Raise ConfigError for the row at `place` if the rendering fails."""
    from jinja2 import TemplateError

    try:
        return render()
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        reject(place, f"the chat template does not take these messages: {error}")


def _conversation(row: Row, place: str) -> tuple[list[Message], Any]:
    """Return the chat messages of a row, and the tools that the model may call (None if the row has no tools)."""
    parts = [("messages", row["messages"])] if "messages" in row else [(name, row.get(name)) for name in ("prompt", "completion")]
    messages: list[Message] = []
    for column, value in parts:
        if not isinstance(value, (list, tuple)) or not all(
            isinstance(message, Mapping) and "role" in message for message in value
        ):
            reject(place, f"{column} is {_short(value)}; give a list of messages, each with `role` and `content`")
        for number, message in enumerate(value, 1):
            if message.get("content") is None and not message.get("tool_calls"):
                reject(place, f"message {number} of {column} has no `content`; give a text, an empty one if it has none")
        messages += value
    if not messages:
        reject(place, "there are no messages; give a list of them, each with `role` and `content`")
    return messages, row.get("tools") or None


def _without_none(row: Row) -> Row:
    """Return the row without keys whose value is None.

    In a Parquet file, every row has every column, and every message has every key; None means that there is no value.
    """
    return {name: value for name, value in row.items() if value is not None}


def _is_chat(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _text(row: Row, column: str, place: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value:
        missing = f"there is no column {column!r} (it has {', '.join(row)}); give a text"
        reject(place, missing if column not in row else f"{column} is {_short(value)}; give a text")
    return value


def _without_none_in_each(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages without keys whose value is None, because a chat template may check only whether a key exists."""
    return [dict(_without_none(message)) for message in messages]


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


Encode = Callable[["Row", str], Example]
