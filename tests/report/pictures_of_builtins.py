"""Makes the pictures of docs/builtins: `python tests/report/pictures_of_builtins.py docs/images`.

The page of memory loads torch's script from the network.
"""

from __future__ import annotations

import logging
import pickle
import shutil
import sys
import tempfile
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import BrowserContext, sync_playwright
from torch import Tensor, nn
from torch.cuda import _memory_viz
from torch.profiler import profile

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import ImageVisualizer
from callsheet.callbacks.support.memory_pages import render_memory
from callsheet.loggers import JSONLLogger

SIDE, ZOOM = 48, 3


def shapes(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of a disc and a square that may cover it, and the label of each pixel: 0 neither, 1 disc, 2 square."""
    along = torch.arange(SIDE)
    y, x = along[:, None].expand(SIDE, SIDE), along[None, :].expand(SIDE, SIDE)
    pictures, labels = [], []
    for _ in range(count):
        (disc_y, disc_x, square_y, square_x), (radius, half) = torch.randint(8, 40, (4,)), torch.randint(5, 11, (2,))
        label = torch.zeros(SIDE, SIDE, dtype=torch.long)
        label[(y - disc_y) ** 2 + (x - disc_x) ** 2 < radius**2] = 1
        label[((y - square_y).abs() < half) & ((x - square_x).abs() < half)] = 2
        ground = torch.rand(3) * 0.4
        colours = torch.stack([ground, ground + 0.5, ground + 0.5])  # the two differ only in shape
        pictures.append((colours[label].permute(2, 0, 1) + torch.randn(3, SIDE, SIDE) * 0.06).clamp(0, 1))
        labels.append(label)
    return torch.stack(pictures), torch.stack(labels)


def segmentation(scratch: Path) -> list[Path]:
    """Return the images that ImageVisualizer logs at the last evaluation of a short training."""
    torch.manual_seed(5)
    inputs, labels = shapes(640)
    seen, seen_labels = shapes(6)
    widths = [3, 16, 32, 32, 16]
    layers: list[nn.Module] = []
    for i, (one, next_one) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(one, next_one, 5, padding=2 * 2**i, dilation=2**i), nn.BatchNorm2d(next_one), nn.ReLU()]
    with Trainer(
        nn.Sequential(*layers, nn.Conv2d(widths[-1], 3, 1)),
        nn.functional.cross_entropy,
        list(zip(inputs.split(16), labels.split(16), strict=True)),
        [(seen, seen_labels)],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        max_duration="10ep",
        callbacks=[ImageVisualizer(mode="segmentation", num_images=6)],
        loggers=[JSONLLogger()],
        runs_folder=scratch,
        run_name="shapes",
        device="cpu",
        seed=5,
    ) as trainer:
        trainer.fit()
    written = (scratch / "shapes" / "images").glob("**/validation/*.png")
    return sorted(written, key=lambda path: [int(number) for number in path.stem.split("-")])[-6:]


def sheet(pictures: list[Path], path: Path) -> None:
    """Save the enlarged images as one sheet with three in a row."""
    opened = [Image.open(picture).convert("RGB") for picture in pictures]
    width, height = (ZOOM * side for side in opened[0].size)
    whole = Image.new("RGB", (3 * width + 24, 2 * height + 12), "white")
    for i, picture in enumerate(opened):
        whole.paste(picture.resize((width, height), Image.Resampling.NEAREST), (i % 3 * (width + 12), i // 3 * (height + 12)))
    whole.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


class Profiles(Callback):
    """Lets torch's profiler record the allocations of steps 2 to 4, which works on the CPU too."""

    def __init__(self) -> None:
        self.profile = profile(record_shapes=True, profile_memory=True, with_stack=True)

    def on_train_step_start(self, ctx: Context) -> None:
        if ctx.step == 2:
            self.profile.start()

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 4:
            self.profile.stop()


def snapshot(scratch: Path) -> Path:
    """Render the memory of three steps as MemorySnapshot does, and return the page."""
    torch.manual_seed(0)
    profiles = Profiles()
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)) for _ in range(6)]
    with Trainer(
        nn.Sequential(*blocks),
        nn.functional.mse_loss,
        [(torch.randn(1024, 256), torch.randn(1024, 256))] * 5,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        callbacks=[profiles],
        runs_folder=scratch,
        run_name="memory",
        device="cpu",
    ) as trainer:
        trainer.fit()
    path = scratch / "MemorySnapshot-step4-rank0.pickle"
    path.write_bytes(pickle.dumps(_memory_viz._profile_to_snapshot(profiles.profile)))
    return render_memory(path)[0]


def photograph(browser: BrowserContext, address: Path, path: Path) -> None:
    """Save a screenshot of the page with the description of the allocation under the pointer."""
    page = browser.new_page()
    page.goto(address.as_uri())
    page.wait_for_selector("polygon", timeout=60_000)
    page.mouse.move(508, 230)
    page.wait_for_timeout(500)
    picture = Image.open(BytesIO(page.screenshot(clip={"x": 0, "y": 0, "width": 1280, "height": 640})))
    picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main(out: Path) -> None:
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        sheet(segmentation(Path(scratch)), out / "image-visualizer.png")
        arguments = ["--no-sandbox", "--disable-gpu", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        photograph(
            browser.new_context(viewport={"width": 1280, "height": 800}), snapshot(Path(scratch)), out / "memory-snapshot.png"
        )
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
