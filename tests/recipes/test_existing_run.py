"""All ranks receive a decision of rank 0 before there is a process group, also if no launcher provides a store."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from callsheet.errors import ConfigError
from callsheet.recipes.existing_run import reject_another_job
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

PROGRAM = """
import json, sys, time
from callsheet.core.ranks import read_ranks
from callsheet.recipes.existing_run import of_rank_zero

def decide():
    time.sleep(1.0)
    if sys.argv[1] == "fails":
        raise OSError("the folder is read-only")
    return ["a", None]

try:
    print(json.dumps(of_rank_zero(read_ranks(), decide, timeout=60)))
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.mark.parametrize("how", ["decides", pytest.param("fails", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_ranks_that_no_launcher_started_receive_the_decision_of_rank_0(how: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [python(), "-c", PROGRAM, how],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")},
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    if how == "decides":
        assert printed == [["a", None]] * 2
    else:
        assert printed == ["OSError: the folder is read-only", "ConfigError: the folder is read-only"]


def test_a_run_with_old_key_names_is_accepted_and_another_value_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("accumulate: 2\ntoo_long: refuse\n")
    reject_another_job(tmp_path / "config.yaml", "gradient_accumulation_steps: 2\ntoo_long: reject\n", ())
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: 2 in the run, 4 now"):
        reject_another_job(tmp_path / "config.yaml", "gradient_accumulation_steps: 4\ntoo_long: reject\n", ())
