from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from callsheet.errors import ConfigError
from callsheet.loggers.support.image_writer import ImageWriter


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ImageWriter]:
    writer = ImageWriter("Test", tmp_path)
    yield writer
    writer.close()


def values(path: Path) -> list[int]:
    return sorted(set(numpy.asarray(Image.open(path)).flatten().tolist()))


def test_images_are_written_on_another_thread_in_order_and_unchanged(writer: ImageWriter, tmp_path: Path) -> None:
    recorded: list[tuple[str, list[int], str]] = []

    def record(name: str) -> None:
        recorded.append((name, values(tmp_path / name), threading.current_thread().name))

    tensor, array = torch.zeros(4, 4), numpy.zeros((4, 4), dtype=numpy.uint8)
    for number in range(20):
        for name, image in ((f"tensor/{number}.png", tensor), (f"array/{number}.png", array)):
            writer.write([name], [image], lambda name=name: record(name))  # type: ignore[misc]  # mypy does not see the default
        tensor += 1 / 51
        array += 5
    writer.flush()
    names = [f"{kind}/{number}.png" for number in range(20) for kind in ("tensor", "array")]
    assert [name for name, _, _ in recorded] == names  # each is reported after it is written
    assert [seen for _, seen, _ in recorded] == [[5 * number] for number in range(20) for _ in range(2)]
    assert {thread for _, _, thread in recorded} == {"callsheet-lane-Test's images"}


def test_failures_are_reported_once_and_other_images_are_written(writer: ImageWriter, tmp_path: Path) -> None:
    recorded: list[str] = []
    writer.write(["odd.png"], [torch.zeros(2, 2, 2, 2)], lambda: recorded.append("odd"))
    with pytest.raises(ConfigError, match="an image has the shape"):
        writer.flush()
    writer.write(["fine.png"], [torch.zeros(2, 2)], lambda: recorded.append("fine"))
    writer.flush()
    assert recorded == ["fine"]
    (tmp_path / "folder").write_text("a file")
    writer.write(["folder/image.png"], [torch.zeros(2, 2)], lambda: recorded.append("none"))
    with pytest.raises(OSError, match="folder"):
        writer.flush()
    writer.flush()
    assert recorded == ["fine"]


def test_closing_writes_pending_images(tmp_path: Path) -> None:
    writer = ImageWriter("Test", tmp_path)
    for number in range(10):
        writer.write([f"{number}.png"], [torch.ones(64, 64)], lambda: None)
    writer.close()
    assert len(list(tmp_path.glob("*.png"))) == 10
