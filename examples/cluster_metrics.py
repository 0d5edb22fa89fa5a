"""Send metrics to the monitoring of a cluster: every rank reports to the agent of its machine, with the cluster's id.

    CLUSTER_ID=blue python examples/cluster_metrics.py HOST:PORT [FOLDER]
    CLUSTER_ID=blue torchrun --nproc_per_node 2 examples/cluster_metrics.py HOST:PORT [FOLDER]

The agent listens for UDP packets at this address. Replace `MetricsClient` with the client of your monitoring system.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from callsheet import Callback, Context, every
from callsheet.recipes import ByteFiles, LanguageModel, PretrainConfig, pretrain


class MetricsClient:
    """Sends each message as JSON in one UDP packet."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def send(self, facts: dict[str, Any]) -> None:
        self._socket.sendto(json.dumps(facts).encode(), self._address)

    def close(self) -> None:
        self._socket.close()


class ClusterMetrics(Callback):
    """Send this rank's loss and gradient norm every few steps, from a background thread.

    The loss is that of this rank, before it is averaged, so that differences between machines are visible.
    """

    phase = "report"
    lane = "background"
    snapshot_fields = ("loss", "grad_norm", "learning_rate")  # the fields to copy; training does not wait for the device

    def __init__(self, address: str, *, cluster_id: str) -> None:
        self.address = address
        self.cluster_id = cluster_id

    def on_run_start(self, ctx: Context) -> None:
        self.client = MetricsClient(self.address)  # not in the constructor, because each process opens its own socket

    @every("5ba")
    def on_train_step_end(self, ctx: Context) -> None:
        self.client.send(
            {
                "cluster_id": self.cluster_id,
                "run": ctx.run.name,
                "rank": ctx.run.rank,
                "step": ctx.step,
                "loss": ctx.loss.item(),
                "grad_norm": ctx.grad_norm.item() if ctx.grad_norm is not None else None,
                "learning_rate": ctx.learning_rate,
            }
        )

    def on_run_end(self, ctx: Context) -> None:
        self.client.send({"cluster_id": self.cluster_id, "run": ctx.run.name, "rank": ctx.run.rank, "outcome": ctx.run.outcome})
        self.client.close()


def main(address: str, folder: str = "runs") -> None:
    config = PretrainConfig(
        run_name="cluster-metrics",
        runs_folder=folder,
        max_duration="20ba",
        eval_interval="20ba",
        batch_size=8,
        model=LanguageModel(hidden_size=32, layers=1, heads=2, intermediate_size=64),
        data=ByteFiles(sequence_length=64, validation_windows=32),
        prompts=[],
        threads=1,
    )
    pretrain(config, callbacks=ClusterMetrics(address, cluster_id=os.environ.get("CLUSTER_ID", "unknown")))


if __name__ == "__main__":
    main(*sys.argv[1:])
