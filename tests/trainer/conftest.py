"""The models here are tiny: more threads would only wait for each other."""

import torch

torch.set_num_threads(1)
