"""Send notifications of a run to a webhook: its start, its progress, when it reaches a goal, and its end or failure.

    NOTIFY_URL=https://example.org/hook python examples/notifications.py [FOLDER]
    NOTIFY_URL=https://example.org/hook torchrun --nproc_per_node 2 examples/notifications.py [FOLDER]

The URL of a webhook is often a secret. It is read from the environment, and no record of the run contains it. With `to="slack"` the messages
go to Slack, and `Notify(to="mailto:me@example.org", server="smtp+starttls://...")` sends mail.
"""

from __future__ import annotations

import sys

from callsheet.callbacks import Notify
from callsheet.recipes import ByteFiles, LanguageModel, PretrainConfig, pretrain


def main(folder: str = "runs") -> None:
    config = PretrainConfig(
        run_name="notifications",
        runs_folder=folder,
        max_duration="40ba",
        eval_interval="10ba",
        log_interval=10,
        batch_size=8,
        model=LanguageModel(hidden_size=32, layers=1, heads=2, intermediate_size=64),
        data=ByteFiles(sequence_length=64, validation_windows=32),
        prompts=[],
        threads=1,
    )
    notify = Notify(
        url_env="NOTIFY_URL",
        on=["start", "end", "failure", "preemption"],
        every="20ba",
        when="validation/loss < 4.5",  # sent once, when it becomes true
    )
    pretrain(config, callbacks=notify)


if __name__ == "__main__":
    main(*sys.argv[1:])
