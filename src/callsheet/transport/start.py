"""Run by its path in a fresh interpreter, with the name of one of callsheet's modules: calls its `main`.

By its path, and not as a module, so that it is found wherever the starting process found callsheet; what is imported after that is looked
for where the payload says.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module(sys.argv[1]).main()
