"""Train with LLaMA-Factory and callsheet's host. LLaMA-Factory reads its configuration file, whose path is the script's argument."""

from __future__ import annotations

from llamafactory.train.tuner import run_exp

from callsheet.bridges.huggingface import host
from callsheet.exec.log_pace import LogPace
from callsheet.exec.observers import observers_of

run_exp(callbacks=[host(observers_of("callbacks.yaml")(LogPace(1)))])
