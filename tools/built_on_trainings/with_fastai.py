"""Train with fastai and an optimizer of torch."""

from __future__ import annotations

from functools import partial

import fastai.callback.progress  # noqa: F401  # adds `no_bar` to the Learner
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from job import write
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(24, 4)
rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loaders = DataLoaders(DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows, batch_size=8))
learner = Learner(
    loaders, torch.nn.Linear(4, 1), loss_func=torch.nn.functional.mse_loss, opt_func=partial(OptimWrapper, opt=torch.optim.Adam)
)
learner.recorder.smooth_loss.beta = 0.0  # so that it records each loss, not a moving average
with learner.no_bar(), learner.no_logging():
    learner.fit(2, 0.01)
write([float(loss) for loss in learner.recorder.losses], learner.model)
