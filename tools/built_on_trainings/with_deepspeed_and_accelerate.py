"""Train with DeepSpeed in a loop around an Accelerator."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from deepspeed.runtime.engine import DeepSpeedEngine
from job import callbacks, options, write
from torch.utils.data import DataLoader, TensorDataset

config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": options.stage}}
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
)  # without cpu=True, with which DeepSpeed is not used
torch.manual_seed(0)
inputs = torch.randn(48, 4)
plain = torch.nn.Linear(4, 1)
model, optimizer, data = accelerator.prepare(
    plain,
    torch.optim.Adam(plain.parameters(), lr=0.01),
    DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8),
)
if not isinstance(model, DeepSpeedEngine):
    raise SystemExit("Accelerate has not used DeepSpeed")
losses: list[float] = []


def step(batch: list[torch.Tensor]) -> None:
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())


if options.callbacks:
    from callsheet.bridges.accelerate import host

    with host(callbacks(), accelerator=accelerator, model=model, optimizer=optimizer, log_interval=1) as run:
        for batch in run.steps(data):
            step(batch)
else:
    for batch in data:
        step(batch)
write(losses, accelerator.unwrap_model(model))
