"""Use one thread: the models here are too small to gain from several."""

import torch

torch.set_num_threads(1)
