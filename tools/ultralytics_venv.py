"""Make `.venv-ultralytics`, in which Ultralytics' bridge is tested.

The venv has ultralytics, and can import all packages of this environment too. ultralytics requires the OpenCV package that needs
the libraries of a display. So it is installed without its dependencies, and with the OpenCV package for servers. If the venv
exists with these versions, nothing is done.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import composer_venv

FOLDER = Path(__file__).parent.parent / ".venv-ultralytics"

VERSIONS = {
    "ultralytics": "8.4.190",
    "opencv-python-headless": "5.0.0.93",
    "torchvision": composer_venv.VERSIONS["torchvision"],
    "ultralytics-thop": "2.2.3",
    "polars": "2.1.0",
    "polars-runtime-32": "2.1.0",
    "matplotlib": "3.11.2",
    "contourpy": "1.3.3",  # from here on: needed to import matplotlib
    "cycler": "0.12.1",
    "fonttools": "4.68.0",
    "kiwisolver": "1.5.1",
    "pyparsing": "3.3.3",
}

_DECLARED = """\
import torch
if torch.version.cuda is None:  # torchvision's build for CUDA cannot be loaded here: without it, it lacks the operators that it registers
    _operators = torch.library.Library("torchvision", "DEF")
    _operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""


def make() -> Path:
    """Make the venv if it does not exist, and return its interpreter."""
    python = composer_venv.make(FOLDER, VERSIONS)
    for file in FOLDER.glob("lib*/**/site-packages/torchvision/__init__.py"):
        text = file.read_text()
        if (
            _DECLARED not in text
            and subprocess.run([python, "-c", "import torchvision"], capture_output=True, check=False).returncode
        ):
            file.write_text(_DECLARED + text)
    return python


if __name__ == "__main__":
    print(make())
