"""A processor for vision-language models that needs no download: a byte tokenizer, and an image processor that uses Pillow."""

from __future__ import annotations

from typing import Any

from callsheet.recipes.models.byte_tokenizer import IMAGE, byte_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<|image|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The processor's chat template. The content of a message is a list of parts: texts and images. An image becomes the image token."""


def byte_processor(image_size: int, patch_size: int) -> Any:
    """Return a `LlavaProcessor` for square images of `image_size` pixels, cut into patches of `patch_size`.

    The processor fits a vision tower that is shaped like CLIP's.
    """
    import transformers

    # Choose the class that uses Pillow. In newer versions of transformers, `CLIPImageProcessor` uses torchvision.
    images = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    square = {"height": image_size, "width": image_size}
    return transformers.LlavaProcessor(
        image_processor=images(size=square, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=byte_tokenizer(),
        patch_size=patch_size,
        # Give the language model the vision tower's outputs for the patches, without the class token.
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # besides the patches, the vision tower has one token: its class token
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )
