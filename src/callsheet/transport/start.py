"""Calls `main` of one of callsheet's modules, whose name is the argument. It is run by its path in a fresh interpreter.

It is run by its path and not as a module, so that it is found in the same place as by the starting process. Later imports use the
payload's `sys.path`.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module(sys.argv[1]).main()
