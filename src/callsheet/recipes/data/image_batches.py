"""Makes batches of images and text: the output of the model's processor, and labels for the target tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from callsheet.recipes.data.image_text import Example
from callsheet.recipes.data.tables import reject
from callsheet.recipes.models.vision_language_model import image_token_id
from callsheet.trainer.tasks import IGNORED_LABEL

TooLong = Literal["reject", "truncate"]
TOO_LONG: tuple[TooLong, ...] = get_args(TooLong)


class ImageBatches:
    """A DataLoader's `collate_fn` that makes a batch of examples with images.

    The batch has the processor's output (such as `input_ids`, `attention_mask` and `pixel_values`), padded to its longest row, and
    `labels`: the ids of the target tokens, and -100 elsewhere.

    Args:
        processor: the model's processor.
        sequence_length: the maximum number of tokens of a row, including those of its images.
        too_long: `reject` a row with more tokens, or `truncate` it, which never cuts an image.
    """

    def __init__(self, processor: Any, sequence_length: int, too_long: TooLong) -> None:
        self._processor = processor
        self._longest = sequence_length
        self._truncates = too_long == "truncate"

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Return the processor's output for the examples as one batch, with labels for the target tokens.

        Raises:
            ConfigError: a row is too long, or the processor rejects it; the message names its place.
        """
        batch = self.encode(examples, side="right")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        labels = torch.full_like(ids, IGNORED_LABEL)
        for row, example in enumerate(examples):
            length = int(mask[row].sum())
            for start, end in self._spans(example, length):
                labels[row, start:end] = ids[row, start:end]
        if (token := image_token_id(self._processor)) is not None:
            labels[ids == token] = IGNORED_LABEL
        batch["labels"] = labels
        return self._shorten(batch, examples) if ids.shape[1] > self._longest else batch

    def check_length(self, example: Example) -> None:
        """Raise ConfigError if a row is too long even without the tokens of its images. No image is read.

        Raises:
            ConfigError: the row is too long; the message names its place.
        """
        length = len(self._plain(example.text, example.text))
        if length > self._longest and not self._truncates:
            reject(
                example.place,
                f"this row has {length} tokens without those of its images, and sequence_length is {self._longest}; shorten the row, "
                "give a longer sequence_length, or too_long=truncate",
            )

    def encode(self, examples: Sequence[Example], *, side: str) -> dict[str, Any]:
        """Return the processor's output for the examples, padded on the given side."""
        try:
            with _padding_on(self._processor.tokenizer, side):
                made = self._call_processor(examples)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            for example in examples if len(examples) > 1 else ():
                self.encode([example], side=side)  # process each row alone, to find the row that fails
            reject(examples[0].place, f"the processor rejects this row: {error}")
        return dict(made)

    def _call_processor(self, examples: Sequence[Example]) -> Any:
        return self._processor(
            text=[example.text for example in examples],
            images=[list(example.images) for example in examples],
            padding=True,
            return_tensors="pt",
            **self._tokens(examples[0].text),
        )

    def _tokens(self, text: str) -> dict[str, Any]:
        """Return tokenizer arguments that prevent a second start token if the text already begins with a start token.

        A chat template may have added the start token.
        """
        begin = self._processor.tokenizer.bos_token
        return {"add_special_tokens": False} if begin is not None and text.startswith(begin) else {}

    def _spans(self, example: Example, length: int) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each span of target tokens in a row of `length` token ids.

        The processor inserts many ids for each image, so a span is shifted by the number of ids that the images before it add.
        """
        whole = self._plain(example.text, example.text)
        for part in example.targets:
            start, end = (_common(self._plain(example.text[:place], example.text), whole) for place in (part.start, part.end))
            if part.images_before == len(example.images):
                more = length - len(whole)
            else:
                before = Example(example.place, example.text[: part.start], example.images[: part.images_before], (), "")
                more = self._length(before) - len(self._plain(before.text, example.text))
            yield start + more, end + more

    def _length(self, example: Example) -> int:
        """Return how many token ids an example has without padding."""
        if not example.images:
            return len(self._plain(example.text, example.text))
        return int(self.encode([example], side="right")["input_ids"].shape[1])

    def _plain(self, text: str, whole: str) -> list[int]:
        ids: list[int] = self._processor.tokenizer(text, **self._tokens(whole))["input_ids"]
        return ids

    def _shorten(self, batch: dict[str, Any], examples: Sequence[Example]) -> dict[str, Any]:
        ids, lengths = batch["input_ids"], batch["attention_mask"].sum(dim=1).tolist()
        token = image_token_id(self._processor)
        for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
            if length <= self._longest:
                continue
            if not self._truncates:
                reject(
                    example.place,
                    f"this row has {length} tokens, those of its {len(example.images)} images included, and sequence_length is "
                    f"{self._longest}; shorten the row, give a longer sequence_length, or too_long=truncate",
                )
            if token is not None and (ids[row, self._longest :] == token).any():
                reject(
                    example.place,
                    f"this row has {length} tokens, and cutting it to sequence_length={self._longest} would cut an image, which "
                    "is impossible; give a longer sequence_length, or leave the row out",
                )
        shape = ids.shape
        return {
            name: value[:, : self._longest] if isinstance(value, Tensor) and value.shape == shape else value
            for name, value in batch.items()
        }


@contextmanager
def _padding_on(tokenizer: Any, side: str) -> Iterator[None]:
    before, tokenizer.padding_side = tokenizer.padding_side, side
    try:
        yield
    finally:
        tokenizer.padding_side = before


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many token ids two sequences have in common at their start.

    If `one` encodes the beginning of a text, and `other` the whole text, the rest of the text begins at this index. A token that
    crosses the border belongs to the rest.
    """
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
