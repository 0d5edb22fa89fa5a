"""Imports the callsheet module that is named on the command line, and calls its function `main`.

A fresh interpreter runs this script by its path.

The path ensures that this process uses the same callsheet as the process that started it. A module name would not. Later imports
use the payload's `sys.path`.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module(sys.argv[1]).main()
