"""Train with skorch."""

from __future__ import annotations

import numpy as np
import torch
from job import write
from skorch import NeuralNetRegressor

torch.manual_seed(0)
inputs = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
targets = inputs.sum(1, keepdims=True)
net = NeuralNetRegressor(
    torch.nn.Linear(4, 1), max_epochs=2, batch_size=8, lr=0.01, optimizer=torch.optim.Adam, train_split=None, verbose=0
)
net.fit(inputs, targets)
write([batch["train_loss"] for epoch in net.history for batch in epoch["batches"]], net.module_)
