"""Run by its path in a fresh interpreter, with the name of one of callsheet's modules: calls that module's `main`.

It is run by its path, not as a module, so that it is found wherever the starting process found callsheet. Later imports use the
payload's `sys.path`.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module(sys.argv[1]).main()
