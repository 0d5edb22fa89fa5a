"""The job of `restarts`, started by `callsheet.launch`."""

import json
import sys

from callsheet import launch

from .restarts import train

if __name__ == "__main__":
    launch(
        train,
        (sys.argv[3], json.loads(sys.argv[4]), sys.argv[5] == "1"),
        nproc_per_node=int(sys.argv[1]),
        max_restarts=int(sys.argv[2]),
        grace_seconds=6,
    )
