from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.image_visualizer import ImageVisualizer, Mode
from callsheet.callbacks.support.pictures import PALETTE
from callsheet.errors import ConfigError
from callsheet.loggers import Logger
from callsheet.loggers.support.pixels import as_pixels
from callsheet.testing import run_ranks
from callsheet.trainer import Task

SAMPLES, HEIGHT, WIDTH, CLASSES = 5, 8, 6, 3


class RecordsImages(Logger):
    """Records the images that are logged, with their step."""

    on_error = "raise"

    def __init__(self) -> None:
        self.pages: list[tuple[int, str, list[Any]]] = []

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        assert all(as_pixels(image).ndim == 3 for image in images)
        self.pages.append((ctx.step, name, list(images)))

    @property
    def recorded(self) -> list[tuple[int, str]]:
        return [(step, name) for step, name, _ in self.pages]


class Segments(nn.Module):
    """Returns a score for every class and pixel; with `stride=2`, for every second pixel."""

    def __init__(self, *, stride: int = 1, named: bool = False, classes: int = CLASSES) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, classes, 1, stride=stride)
        self.named = named

    def forward(self, inputs: Tensor) -> Any:
        scores = self.layer(inputs)
        return {"out": scores, "other": scores[:, :, :1]} if self.named else scores


class TaskWithImages(Task):
    """Trains on batches of any form: the function `images` returns their images."""

    def __init__(self, images: Callable[[Any], Tensor]) -> None:
        self.images = images

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(self.images(batch))

    def loss(self, outputs: Any, batch: Any) -> Any:
        return (outputs["out"] if isinstance(outputs, dict) else outputs).mean()


def batches(number: int, channels: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.rand(SAMPLES, channels, HEIGHT, WIDTH, generator=generator),
            torch.randint(0, CLASSES, (SAMPLES, HEIGHT, WIDTH), generator=generator),
        )
        for _ in range(number)
    ]


def fit(
    folder: Path | str,
    *callbacks: Callback,
    data: Sequence[Any] | None = None,
    model: nn.Module | None = None,
    images: Callable[[Any], Tensor] = lambda batch: batch[0],
    **options: Any,
) -> tuple[RecordsImages, dict[str, Any]]:
    album = RecordsImages()
    torch.manual_seed(0)
    model = model if model is not None else Segments()
    with Trainer(
        model,
        TaskWithImages(images),
        data if data is not None else batches(12),
        **{
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "callbacks": callbacks,
            "loggers": [album],
            "runs_folder": folder,
            "run_name": "run",
            "log_interval": "4ba",
            "eval_interval": None,
            "device": "cpu",
            **options,
        },
    ) as trainer:
        trainer.fit()
    return album, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_images_of_the_first_step_and_each_interval_are_logged_with_the_next_record(tmp_path: Path) -> None:
    data = batches(12)
    album, _ = fit(tmp_path, ImageVisualizer(interval="5ba", num_images=2), data=data)
    assert album.recorded == [(4, "images/train"), (8, "images/train"), (12, "images/train")]
    for (_, _, images), step in zip(album.pages, (1, 5, 10), strict=True):
        assert len(images) == 2
        for image, given in zip(images, data[step - 1][0], strict=False):
            assert torch.equal(image, given.movedim(0, -1))


def test_the_interval_can_be_in_epochs(tmp_path: Path) -> None:
    data = batches(3)
    album, _ = fit(tmp_path, ImageVisualizer(interval="1ep"), data=data, max_duration="3ep", log_interval=1)
    assert [step for step, _ in album.recorded] == [1, 4, 7]  # the first step of each epoch
    assert [len(images) for _, _, images in album.pages] == [SAMPLES] * 3  # fewer than the default of eight


def test_the_first_batch_of_each_evaluation_is_logged_by_the_datasets_name(tmp_path: Path) -> None:
    one, other = batches(4)[:2], batches(4)[2:]
    album, _ = fit(
        tmp_path,
        ImageVisualizer(interval="100ba"),
        eval_dataloader={"one": one, "other": other},
        eval_interval="6ba",
        max_duration="12ba",
    )
    assert album.recorded == [
        (4, "images/train"),
        (6, "images/one"),
        (6, "images/other"),
        (12, "images/one"),
        (12, "images/other"),
    ]
    assert torch.equal(album.pages[2][2][0], other[0][0][0].movedim(0, -1))


def test_the_microbatch_is_shown_as_the_model_received_it(tmp_path: Path) -> None:
    class Darkens(Callback):
        phase = "change"

        def on_microbatch_start(self, ctx: Context) -> None:
            ctx.microbatch = [ctx.microbatch[0] / 2, ctx.microbatch[1]]

    data = batches(1)
    album, _ = fit(tmp_path, Darkens(), ImageVisualizer(), data=data, microbatch_size=2)
    ((_, _, images),) = album.pages
    assert len(images) == 2
    assert torch.equal(images[1], data[0][0][1].movedim(0, -1) / 2)


FIRST = batches(1)[0][0]
FOUND: dict[str, tuple[Any, Callable[[Any], Tensor], dict[str, Any]]] = {
    "a tensor": (FIRST, lambda batch: batch, {}),
    "a dictionary": (
        {"ids": torch.zeros(SAMPLES, 3, HEIGHT, WIDTH, dtype=torch.long), "pixel_values": FIRST},
        lambda batch: batch["pixel_values"],
        {},
    ),
    "deep inside": (({"x": [torch.ones(SAMPLES), FIRST]},), lambda batch: batch[0]["x"][1], {}),
    "by its key": ({"other": FIRST + 1, "images": FIRST}, lambda batch: batch["images"], {"input_key": "images"}),
    "by its index": ((FIRST + 1, FIRST), lambda batch: batch[1], {"input_key": 1}),
    "channels last": ((FIRST.movedim(1, -1),), lambda batch: batch[0].movedim(-1, 1), {}),
    "channels that are said to be last": (
        (FIRST.movedim(1, -1),),
        lambda batch: batch[0].movedim(-1, 1),
        {"channels_last": True},
    ),
    "more channels than can be shown": ((torch.cat([FIRST, FIRST[:, :1]], 1),), lambda batch: batch[0][:, :3], {}),
    "many channels": (
        (torch.cat([FIRST, FIRST], 1),),
        lambda batch: batch[0][:, :3],
        {"input_key": 0, "channels_last": False},
    ),
    "in 16 bits": ((FIRST.bfloat16(),), lambda batch: batch[0].float(), {}),
}


@pytest.mark.parametrize("case", FOUND)
def test_images_are_found_in_batches_of_any_form(case: str, tmp_path: Path) -> None:
    batch, images, options = FOUND[case]
    album, _ = fit(tmp_path, ImageVisualizer(**options), data=[batch], images=images)
    ((_, _, shown),) = album.pages
    expected = FIRST.bfloat16().float() if "16" in case else FIRST
    assert torch.equal(torch.stack(shown), expected.movedim(1, -1))


@pytest.mark.parametrize(
    "batch",
    [(torch.rand(SAMPLES, 1, HEIGHT, WIDTH),), (torch.rand(SAMPLES, 2, HEIGHT, WIDTH),), (torch.rand(SAMPLES, HEIGHT, WIDTH),)],
)
def test_one_channel_is_shown_in_gray(batch: tuple[Tensor], tmp_path: Path) -> None:
    def three(given: Any) -> Tensor:
        images: Tensor = given[0] if given[0].dim() == 4 else given[0][:, None]
        return images[:, :1].expand(-1, 3, -1, -1)

    album, _ = fit(tmp_path, ImageVisualizer(input_key=0, channels_last=False), data=[batch], images=three)
    ((_, _, shown),) = album.pages
    assert torch.equal(torch.stack(shown), three(batch)[:, 0])


def test_only_images_that_are_shown_are_kept(tmp_path: Path) -> None:
    class Sizes(Callback):
        phase = "report"
        sizes: list[int] = []

        def on_train_step_end(self, ctx: Context) -> None:
            self.sizes += [kept.images.untyped_storage().nbytes() for kept in visualizer._kept.values()]

    visualizer = ImageVisualizer(num_images=2)
    fit(tmp_path, visualizer, Sizes(), log_interval="1ep")
    assert set(Sizes.sizes) == {2 * 3 * HEIGHT * WIDTH * 4}


# --- segmentation ---


def parts_of(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert image.shape == (HEIGHT, 3 * WIDTH, 3)
    first, second, third = image.split(WIDTH, dim=1)
    return first, second, third


@pytest.mark.parametrize("named", [False, True])
def test_input_prediction_and_label_are_side_by_side(named: bool, tmp_path: Path) -> None:
    data = batches(1)
    model = Segments(named=named)
    with torch.no_grad():
        scores = nn.functional.conv2d(data[0][0], model.layer.weight, model.layer.bias)
    album, _ = fit(tmp_path, ImageVisualizer(mode="segmentation", num_images=3), data=data, model=model)
    ((_, _, images),) = album.pages
    assert len(images) == 3
    for image, given, score, true in zip(images, data[0][0], scores, data[0][1], strict=False):
        shown, predicted, label = parts_of(image)
        assert torch.equal(shown, given.movedim(0, -1))
        assert torch.equal(predicted, PALETTE[score.argmax(0)])
        assert torch.equal(label, PALETTE[true])


def test_segmentations_of_evaluations_are_shown_in_the_same_way(tmp_path: Path) -> None:
    album, _ = fit(
        tmp_path, ImageVisualizer(mode="segmentation"), data=batches(4), eval_dataloader=batches(2), eval_interval="4ba"
    )
    assert album.recorded == [(4, "images/train"), (4, "images/validation")]
    assert album.pages[1][2][0].shape == (HEIGHT, 3 * WIDTH, 3)


def test_a_smaller_prediction_is_enlarged(tmp_path: Path) -> None:
    data = batches(1)
    model = Segments(stride=2)
    with torch.no_grad():
        scores = nn.functional.conv2d(data[0][0], model.layer.weight, model.layer.bias, stride=2)
    album, _ = fit(tmp_path, ImageVisualizer(mode="segmentation"), data=data, model=model)
    _, predicted, _ = parts_of(album.pages[0][2][0])
    expected = scores[0].argmax(0).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(predicted, PALETTE[expected])


def test_with_one_class_the_sign_of_the_score_decides(tmp_path: Path) -> None:
    data = [(image, (label > 0).float()[:, None]) for image, label in batches(1)]
    model = Segments(classes=1)
    with torch.no_grad():
        model.layer.weight[:] = torch.randn(1, 3, 1, 1, generator=torch.Generator().manual_seed(2))
        scores = nn.functional.conv2d(data[0][0], model.layer.weight, model.layer.bias)
    album, _ = fit(tmp_path, ImageVisualizer(mode="segmentation"), data=data, model=model)
    _, predicted, label = parts_of(album.pages[0][2][0])
    assert torch.equal(predicted, PALETTE[(scores[0, 0] > 0).long()])
    assert torch.equal(label, PALETTE[data[0][1][0, 0].long()])


def test_ignored_labels_are_gray_and_the_batch_is_not_changed(tmp_path: Path) -> None:
    images, labels = batches(1)[0]
    labels[0, 0, 0], labels[0, 1, 1] = 255, -100
    before = labels.clone()
    album, _ = fit(tmp_path, ImageVisualizer(mode="segmentation"), data=[(images, labels)])
    _, _, label = parts_of(album.pages[0][2][0])
    grey = (label == 0.5).all(-1)
    assert {tuple(place) for place in grey.nonzero().tolist()} == {(0, 0), (1, 1)}
    assert torch.equal(labels, before)


def test_labels_by_key_may_be_one_hot(tmp_path: Path) -> None:
    images, labels = batches(1)[0]
    hot = nn.functional.one_hot(labels, CLASSES).movedim(-1, 1)
    data = [{"image": images, "weights": torch.ones(SAMPLES, HEIGHT, WIDTH), "hot": hot}]
    album, _ = fit(
        tmp_path,
        ImageVisualizer(mode="segmentation", target_key="hot", input_key="image"),
        data=data,
        images=lambda batch: batch["image"],
    )
    _, _, label = parts_of(album.pages[0][2][0])
    assert torch.equal(label, PALETTE[labels[0]])


def test_inputs_are_scaled_as_loggers_scale_them(tmp_path: Path) -> None:
    images, labels = batches(1)[0]
    data = [(images * 5 - 2, labels)]
    album, _ = fit(tmp_path, ImageVisualizer(mode="segmentation"), data=data)
    shown, _, _ = parts_of(album.pages[0][2][0])
    assert numpy.array_equal(as_pixels(shown), as_pixels(data[0][0][0]))


def test_every_class_has_its_own_color() -> None:
    assert len({tuple(colour) for colour in PALETTE.tolist()}) == len(PALETTE)
    assert (PALETTE[1:20] - PALETTE[2:21]).abs().sum(1).min() > 0.5  # consecutive colors can be distinguished


# --- nothing to show ---


@pytest.mark.parametrize(
    ("options", "data", "why"),
    [
        ({}, [torch.ones(4, 3)] * 4, "the batch has no images"),
        ({}, [torch.ones(4, 7, 3, dtype=torch.long)] * 4, "the batch has no images"),
        ({"mode": "segmentation"}, [(FIRST,)] * 4, "the batch has no labels of the images' size"),
    ],
)
def test_it_warns_once_with_the_reason_if_there_is_nothing_to_show(
    options: dict[str, Any], data: list[Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def images(batch: Any) -> Tensor:
        return FIRST

    album, _ = fit(
        tmp_path, ImageVisualizer(interval=1, **options), data=data, images=images, eval_dataloader=data, eval_interval=1
    )
    assert album.pages == []
    (message,) = [record.getMessage() for record in caplog.records if "nothing to show" in record.getMessage()]
    assert why in message


def test_outputs_without_scores_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Classifies(Segments):
        def forward(self, inputs: Tensor) -> Any:
            return super().forward(inputs).mean((2, 3))

    album, _ = fit(tmp_path, ImageVisualizer(mode="segmentation"), model=Classifies())
    assert album.pages == []
    assert "no scores" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_images": 0}, "num_images=0"),
        ({"interval": "0ba"}, "must be more than 0"),
        ({"mode": "segmentations"}, "did you mean 'segmentation'"),
    ],
)
def test_rejects_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImageVisualizer(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_key": "pixels"}, "input_key='pixels': the batch, a tuple of 2, does not have it"),
        ({"input_key": 7}, "does not have it"),
        ({"mode": "segmentation", "target_key": 2}, "target_key=2: the batch"),
    ],
)
def test_a_key_that_the_batch_does_not_have_is_rejected(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, ImageVisualizer(**options))


def test_a_key_whose_value_is_not_an_image_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"input_key=0: a Tensor of \(5,\) is not images"):
        fit(tmp_path, ImageVisualizer(input_key=0), data=[(torch.ones(5), FIRST)], images=lambda batch: batch[1])


# --- resuming and neutrality ---


class SavesAt(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 6:
            ctx.control.save("to resume", replicated=True)


def test_a_resumed_run_logs_the_same_as_an_uninterrupted_one(tmp_path: Path) -> None:
    unbroken, _ = fit(tmp_path, ImageVisualizer(interval="5ba"), SavesAt(), log_interval=1)
    resumed, _ = fit(tmp_path, ImageVisualizer(interval="5ba"), log_interval=1, resume="auto")
    assert unbroken.recorded == [(step, "images/train") for step in (1, 5, 10)]
    assert resumed.recorded == [(10, "images/train")]
    assert all(torch.equal(one, other) for one, other in zip(unbroken.pages[-1][2], resumed.pages[0][2], strict=True))


def test_images_that_were_not_logged_are_collected_again(tmp_path: Path) -> None:
    data = batches(12)
    fit(tmp_path, ImageVisualizer(interval="5ba"), SavesAt(), data=data, log_interval="4ba")
    resumed, _ = fit(tmp_path, ImageVisualizer(interval="5ba"), data=data, log_interval="4ba", resume="auto")
    assert [step for step, _ in resumed.recorded] == [8, 12]
    assert torch.equal(resumed.pages[0][2][0], data[6][0][0].movedim(0, -1))  # the images of step 5 had not been logged at step 6


def test_a_new_run_starts_from_scratch(tmp_path: Path) -> None:
    visualizer = ImageVisualizer()
    assert fit(tmp_path / "one", visualizer)[0].recorded == fit(tmp_path / "two", visualizer)[0].recorded == [(4, "images/train")]


@pytest.mark.parametrize("mode", ["input", "segmentation"])
def test_training_is_not_affected(mode: Mode, tmp_path: Path) -> None:
    _, watched = fit(tmp_path / "watched", ImageVisualizer(mode=mode, interval=1))
    _, bare = fit(tmp_path / "bare")
    assert watched == bare


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    other = ImageVisualizer(mode="segmentation")
    other.name = "segments"
    album, _ = fit(tmp_path, ImageVisualizer(), other)
    assert album.recorded == [(4, "images/train"), (4, "segments/train")]


def on_ranks(folder: str) -> tuple[list[tuple[int, str]], dict[str, Any]]:
    torch.manual_seed(0)
    album, weights = fit(folder, ImageVisualizer(mode="segmentation", interval=1), log_interval=2, parallel="ddp")
    return album.recorded, weights


def test_only_the_first_of_several_ranks_logs(tmp_path: Path) -> None:
    (first, weights), (second, others) = run_ranks(on_ranks, 2, str(tmp_path))
    assert first == [(step, "images/train") for step in (2, 4, 6)]
    assert second == []
    assert weights == others


def test_a_run_without_images_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, ImageVisualizer(), data=[torch.ones(4, 3)], images=lambda batch: FIRST)
    (record,) = [record for record in caplog.records if "nothing to show" in record.getMessage()]
    assert record.levelno == logging.WARNING


def test_a_state_of_an_earlier_version_is_loaded() -> None:
    visualizer = ImageVisualizer()
    visualizer.load_state_dict({"told": 3})
    assert visualizer.state_dict() == {"logged": 3}
