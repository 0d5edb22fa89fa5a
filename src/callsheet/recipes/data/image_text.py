"""Converts rows of images and text to input for a processor: the rendered text, its parts that count in the loss, and the images."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callsheet.errors import ConfigError
from callsheet.recipes.data.images import open_image
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.data.tables import check_columns, reject

if TYPE_CHECKING:
    from PIL.Image import Image

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TargetSpan:
    """A part of a text that counts in the loss: the characters from `start` to `end`. The number of images before this part is `images_before`."""

    start: int
    end: int
    images_before: int


@dataclass(frozen=True, slots=True)
class Example:
    """One row of images and text, as input for the processor."""

    place: str
    text: str
    images: tuple[Image, ...]
    targets: tuple[TargetSpan, ...]
    completion: str
    """The text of the last answer."""

    def question(self) -> Example:
        """Return the example without its last answer."""
        if not self.targets:
            return self
        last = self.targets[-1]
        return Example(self.place, self.text[: last.start], self.images[: last.images_before], (), self.completion)


class ImageText:
    """Converts rows of images and text to examples, with the processor's chat template if it has one.

    A row has `messages` and `images`, or it has `image` (or `images`), `prompt` and `completion`. The content of a message is a
    text, or a list of parts of the types `image` and `text`. The row's images are used for the parts of the type `image` in order;
    such a part may instead contain its image, as `image` or `path`. All messages of the assistant are targets (they count in the
    loss).

    Args:
        processor: the model's processor.
        rows: the source of the rows; paths of images are relative to the row's file.
        image_folder: if given, the folder to which paths of images are relative instead.
    """

    def __init__(self, processor: Any, rows: Rows | None, image_folder: str | None = None) -> None:
        self._processor = processor
        self._has_template = getattr(processor, "chat_template", None) is not None
        self._folder = Path(image_folder) if image_folder is not None else None
        self._rows = rows

    def __call__(self, row: Mapping[str, Any], place: str) -> Example:
        """Convert a row to an example: its rendered text, the parts of the text that count in the loss, and its images.

        Raises:
            ConfigError: the row cannot be used; the message has its place and a hint.
        """
        return self._example(row, place, pixels=True, is_question=False)

    def look(self, row: Mapping[str, Any], place: str) -> Example:
        """Convert a row like `__call__`, but read only the headers of its image files."""
        return self._example(row, place, pixels=False, is_question=False)

    def make_question(self, row: Mapping[str, Any], place: str) -> Example:
        """Convert a row without its last answer, which a model will then generate. The row need not have an answer."""
        return self._example(row, place, pixels=True, is_question=True)

    def completion(self, row: Mapping[str, Any], place: str) -> str:
        """Return the text of the row's last answer. The row's images are not checked."""
        messages, _ = self._messages(row, place, is_question=False)
        return _text_of(messages[-1])

    def _example(self, row: Mapping[str, Any], place: str, *, pixels: bool, is_question: bool) -> Example:
        messages, values = self._messages(row, place, is_question)
        folder = self._folder_of(place)
        images = tuple(open_image(value, folder, place, pixels=pixels) for value in values)
        if not images:
            reject(place, "there is no image in this row; give it one, or train on text alone with another recipe")
        if is_question:
            return Example(place, self._render(messages, place, asks=True), images, (), "")
        return Example(place, *self._answers(messages, place, images), _text_of(messages[-1]))

    def _messages(self, row: Mapping[str, Any], place: str, is_question: bool) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return a row's messages, split into text and image parts, and the row's images in the order of the image parts."""
        given = row.get("images") if row.get("images") is not None else row.get("image")
        loose = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
        if row.get("messages") is not None:
            messages = [_message(message, f"{place}: messages[{i}]") for i, message in enumerate(_list(row["messages"], place))]
        else:
            if "images" not in row:
                check_columns(place, row, ["image"])
            check_columns(place, row, ["prompt"] if is_question else ["prompt", "completion"])
            parts = [*({"type": "image"} for _ in loose), {"type": "text", "text": _text(row["prompt"], "prompt", place)}]
            messages = [{"role": "user", "content": parts}]
            if not is_question:
                completion = _text(row["completion"], "completion", place)
                messages.append({"role": "assistant", "content": [{"type": "text", "text": completion}]})
        if is_question and messages[-1]["role"] == "assistant":
            messages.pop()
        _check_turns(messages, place, is_question)
        images, left = [], iter(loose)
        parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
        for part in parts:
            own = part.pop("image", None) or part.pop("path", None)
            images.append(own if own is not None else next(left, _MISSING_IMAGE))
        spare = len(list(left))
        if spare or any(image is _MISSING_IMAGE for image in images):
            reject(
                place,
                f"{len(parts)} parts of the messages are of the type image, but the row has {len(loose)} images; give one for each part",
            )
        return messages, images

    def _answers(
        self, messages: list[dict[str, Any]], place: str, images: tuple[Image, ...]
    ) -> tuple[str, tuple[Image, ...], tuple[TargetSpan, ...]]:
        text = self._render(messages, place)
        targets = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], place, asks=True)
            through = self._render(messages[: number + 1], place)
            if not (text.startswith(through) and through.startswith(before)):
                reject(
                    place,
                    f"messages[{number}]: its text cannot be located: the processor's chat template renders the messages before it "
                    "differently when more follow; split the row, so that the answer is its last message",
                )
            # Some templates add a line break after the token that ends a turn. This line break is not part of the answer.
            bare = through.rstrip("\n")
            end = len(bare) if bare.endswith(self._specials()) else len(through)
            targets.append(TargetSpan(len(before), max(end, len(before)), _count_images(messages[:number])))
        return text, images, tuple(targets)

    def _render(self, messages: list[dict[str, Any]], place: str, *, asks: bool = False) -> str:
        if not self._has_template:
            return self._plain(messages, place, asks)
        try:
            return str(self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))
        except Exception as error:  # chat templates raise many kinds of errors
            reject(place, f"the processor's chat template rejects these messages: {error}")

    def _plain(self, messages: list[dict[str, Any]], place: str, asks: bool) -> str:
        if len(messages) > 2:
            reject(
                place,
                "the processor has no chat template, so only a prompt and a completion can be used; give rows with these columns",
            )
        token = getattr(self._processor, "image_token", None) or ""
        asked = _text_of(messages[0])
        head = asked if token and token in asked else str(token) * _count_images(messages[:1]) + asked
        if asks or len(messages) == 1:
            return head
        return head + _text_of(messages[1]) + (self._processor.tokenizer.eos_token or "")

    def _specials(self) -> tuple[str, ...]:
        return tuple(self._processor.tokenizer.all_special_tokens)

    def _folder_of(self, place: str) -> Path:
        """Return the folder to which the row's image paths are relative."""
        if self._folder is not None:
            return self._folder
        file = Path(place.rpartition(":")[0])  # the place of a row in a file of JSON lines is `file:line`
        if file.is_file():
            return file.parent
        path = Path(self._rows.path if self._rows is not None else ".")
        # An existing file is no pattern, even if its name has brackets.
        is_pattern = glob.has_magic(str(path)) and not path.exists()
        return path if path.is_dir() else Path(glob.glob(str(path))[0]).parent if is_pattern else path.parent


_MISSING_IMAGE: Any = object()


def _list(value: Any, place: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)) or not value:
        reject(place, f"messages is {value!r:.60}; give a list of messages, each with a role and a content")
    return value


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        reject(place, f"it is a {type(message).__name__}; give an object with a role and a content")
    check_columns(place, message, ["role", "content"])
    if message["role"] not in ROLES:
        reject(place, f"its role is {message['role']!r}; give one of {', '.join(ROLES)}")
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, (list, tuple)):
        reject(place, f"its content is a {type(content).__name__}; give a text, or a list of parts")
    return {"role": message["role"], "content": [_part(part, f"{place}.content[{i}]") for i, part in enumerate(content)]}


def _part(part: Any, place: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "text"):
        reject(place, f"it is {part!r:.60}; give a part with the type image or text")
    if part["type"] == "text":
        return {"type": "text", "text": _text(part.get("text"), "text", place)}
    # In Parquet and Arrow files, all parts of messages have the same keys; a missing value is None. Remove the keys with None.
    return {name: value for name, value in part.items() if value is not None}


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        reject(place, f"its {name} is {value!r:.60}; give a text")
    return value


def _check_turns(messages: list[dict[str, Any]], place: str, is_question: bool) -> None:
    if not messages or messages[0]["role"] == "assistant":
        reject(place, "messages: the first message is the assistant's; give the message that it answers before it")
    if not is_question and messages[-1]["role"] != "assistant":
        reject(place, f"messages: the last one is the {messages[-1]['role']}'s; give an assistant's, which the loss needs")
    if not is_question and not _text_of(messages[-1]):
        reject(place, "the completion is empty; give the text that counts in the loss, or leave the row out")


def _text_of(message: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def _count_images(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(part["type"] == "image" for message in messages for part in message["content"])


def check_rows(rows: Any, form: ImageText, most: int | None) -> Iterator[Example]:
    """Yield the first `most` rows (None: all) of a table or stream as examples, to find errors in them before training.

    Raises:
        ConfigError: there are no rows, or a row cannot be used.
    """
    places = ((rows.place(i), rows[i]) for i in range(len(rows))) if hasattr(rows, "place") else rows.places()
    number = 0
    for number, (place, row) in enumerate(places, 1):
        if most is not None and number > most:
            return
        yield form.look(row, place)
    if not number:
        raise ConfigError("there are no rows")
