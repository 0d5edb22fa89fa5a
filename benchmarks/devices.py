"""The device of a benchmark: its command-line option, waiting for it, timing, and counting its synchronizations."""

from __future__ import annotations

import argparse
import time
import warnings

import torch


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="the device of the models")


def check_device(device: str) -> None:
    """End the program with one line if there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"--device cuda: torch {torch.__version__} finds no CUDA device. Leave the option out to measure on the CPU."
        )


def wait_for(device: str) -> None:
    """Wait until the device has done everything that was enqueued."""
    if device == "cuda":
        torch.cuda.synchronize()


class Section:
    """Measures a section: its seconds until the device has finished or, with `counts`, the number of its device synchronizations.

    Synchronizations are counted by torch's warnings about synchronizing CUDA operations, such as `.item()`. torch does not warn
    about an explicit `torch.cuda.synchronize()`. If `counts` is true, other warnings in the section are not shown.
    """

    def __init__(self, device: str, *, counts: bool = False) -> None:
        self.figure = 0.0
        self._device = device
        self._counts = counts
        self._began = 0.0
        self._warnings = warnings.catch_warnings(record=True)
        self._raised: list[warnings.WarningMessage] = []

    def __enter__(self) -> Section:
        wait_for(self._device)
        if self._counts:
            raised = self._warnings.__enter__()
            assert raised is not None  # because of record=True
            self._raised = raised
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        wait_for(self._device)
        self.figure = time.perf_counter() - self._began
        if self._counts:
            torch.cuda.set_sync_debug_mode("default")
            self._warnings.__exit__(None, None, None)
            self.figure = sum("synchronizing CUDA operation" in str(each.message) for each in self._raised)
