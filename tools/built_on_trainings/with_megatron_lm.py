"""Import what a training with Megatron-LM needs. No training was written, because the import fails with the package."""

from __future__ import annotations

import megatron.training.callbacks  # noqa: F401
