"""Makes the pictures of docs/runs.md: `python tests/report/pictures.py docs/images`."""

from __future__ import annotations

import logging
import math
import shutil
import sys
import tempfile
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import torch
import torchmetrics
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from torch import Tensor, nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver, LRMonitor, MemoryMonitor, OptimizerMonitor, SaveOnTrigger, SpeedMonitor
from callsheet.loggers import JSONLLogger
from callsheet.report import write_report

STEPS = 1600


def spirals(count: int) -> tuple[Tensor, Tensor]:
    """Return points on three spiral arms, and the arm of each point."""
    arm = torch.randint(3, (count,))
    radius = torch.rand(count).sqrt()
    angle = 4.5 * radius + arm * (2 * math.pi / 3) + torch.randn(count) * 0.18
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm


class DecisionMap(Callback):
    """Logs an image of the predicted arm at every position, at every evaluation."""

    def on_eval_all_end(self, ctx: Context) -> None:
        side = torch.linspace(-1, 1, 96)
        grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).reshape(-1, 2)
        was_training = ctx.model.training
        with torch.no_grad():
            seen = ctx.model.eval()(grid).softmax(1).reshape(96, 96, 3)
        ctx.model.train(was_training)
        ctx.log_images("which arm", [seen])


class WeightNorms(Callback):
    """Reads every weight at every step, which is slow on purpose."""

    def on_train_step_end(self, ctx: Context) -> None:
        self.norms = [float(parameter.detach().norm(power)) for parameter in ctx.model.parameters() for power in range(1, 40)]


class FailsOnce(Callback):
    """Ends the first attempt with an error."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 735:
            raise ConnectionError("the node went down for maintenance")


def train(folder: Path, *more: Callback, resume: str | None = None) -> Path:
    torch.manual_seed(3)
    points, arms = spirals(6000)
    batches = list(zip(points.split(64), arms.split(64), strict=True))
    layers = [nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Dropout(0.05), nn.Linear(48, 3)]
    with Trainer(
        nn.Sequential(*layers),
        nn.functional.cross_entropy,
        lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points, arms), 64, shuffle=True),
        batches[:12],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=8e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, STEPS + 1),
        metrics={"accuracy": torchmetrics.classification.MulticlassAccuracy(3)},
        callbacks=[
            SpeedMonitor(),
            LRMonitor(),
            MemoryMonitor(),
            OptimizerMonitor(batch_log_interval=5),
            CheckpointSaver(save_interval="200ba", monitor="validation/loss"),
            SaveOnTrigger(),
            DecisionMap(),
            WeightNorms(),
            *more,
        ],
        loggers=[JSONLLogger()],
        runs_folder=folder,
        run_name="three-arms",
        resume=resume,
        max_duration=f"{STEPS}ba",
        eval_interval="100ba",
        log_interval="5ba",
        clip_grad_norm=1.0,
        device="cpu",
        seed=3,
        config={"batch_size": 64, "width": 48, "lr": 8e-3},
    ) as trainer:
        trainer.fit()
        (folder / "three-arms" / "call_sheet.txt").write_text(f"{trainer.callbacks.call_sheet()}\n")
    return folder / "three-arms"


def take(page: Page, path: Path, height: int, top: str | None = None) -> None:
    """Save a screenshot of the given height that starts at the element `top`."""
    page.evaluate("place => scrollTo(0, place ? document.querySelector(place).offsetTop - 56 : 0)", top)
    page.wait_for_timeout(700)
    picture = Image.open(BytesIO(page.screenshot(clip={"x": 0, "y": 0, "width": page.evaluate("innerWidth"), "height": height})))
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main(out: Path) -> None:
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        with suppress(ConnectionError):
            train(Path(scratch), FailsOnce())
        report = write_report(train(Path(scratch), resume="auto"))
        arguments = ["--no-sandbox", "--disable-gpu", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        wide = browser.new_context(viewport={"width": 1280, "height": 1600}, offline=True)
        page = wide.new_page()
        page.goto(report.as_uri())
        page.locator("#smooth").fill("0.6")
        page.evaluate("document.activeElement.blur()")
        take(page, out / "report.png", 1000)
        dark = browser.new_context(viewport={"width": 1280, "height": 1600}, offline=True, color_scheme="dark")
        page = dark.new_page()
        page.goto(report.as_uri())
        page.locator("#timeline").scroll_into_view_if_needed()
        take(page, out / "report-timeline.png", 880, "#timeline")
        narrow = browser.new_context(viewport={"width": 390, "height": 1600}, offline=True)
        page = narrow.new_page()
        page.goto(report.as_uri())
        take(page, out / "report-narrow.png", 1000)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
