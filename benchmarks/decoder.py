"""A decoder like GPT-2 in plain torch, for machines without transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder and of its batches."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequences: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}, {self.sequences} x {self.tokens} tokens a step"


SHAPES = {
    "cpu": Shape(layers=2, width=64, heads=4, vocabulary=256, sequences=4, tokens=64),
    "cuda": Shape(layers=12, width=768, heads=12, vocabulary=50304, sequences=8, tokens=1024),
}
"""By device: a shape that is small enough for a CPU, and the shape of GPT-2 small for CUDA."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(self.norm_attention(x)).unflatten(-1, (3, self._heads, -1)).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        output: Tensor = x + self.feed_forward(self.norm_feed_forward(x))
        return output


class Decoder(nn.Module):
    """Computes logits from token ids."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Parameter(torch.zeros(shape.tokens, shape.width))
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.token(ids) + self.position[: ids.shape[1]])))
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RandomTokens:
    """Batches of random tokens and, as targets, the tokens that follow them. All are on the device from the start."""

    def __init__(self, shape: Shape, steps: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, shape.vocabulary, (shape.sequences, shape.tokens + 1), generator=generator) for _ in range(8)]
        self._batches = [(each[:, :-1].contiguous().to(device), each[:, 1:].contiguous().to(device)) for each in tokens]
        self._steps = steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(self._steps):
            yield self._batches[step % len(self._batches)]

    def __len__(self) -> int:
        return self._steps
