"""A processor that needs no download: the byte tokenizer beside an image processor that Pillow is enough for."""

from __future__ import annotations

from typing import Any

from callsheet.recipes.byte_tokenizer import IMAGE, byte_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<|image|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As that of the byte tokenizer, with contents in parts: text, or an image's token."""


def byte_processor(image_size: int, patch_size: int) -> Any:
    """A `LlavaProcessor` for square images of `image_size` pixels, cut into patches of `patch_size`, for a vision tower shaped like CLIP's."""
    import transformers

    # Named for Pillow since a version of its own; the plain name is that of Pillow's before, and of torchvision's after.
    images = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    square = {"height": image_size, "width": image_size}
    return transformers.LlavaProcessor(
        image_processor=images(size=square, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=byte_tokenizer(),
        patch_size=patch_size,
        vision_feature_select_strategy="default",  # the patches, without the tower's class token,
        num_additional_image_tokens=1,  # which is this one
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )
