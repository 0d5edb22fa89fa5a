"""The host that callsheet's plugins for axolotl and ms-swift create. `tools/built_on.py` trains with the programs themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from callsheet.core.spec import import_path
from callsheet.plugins.hosts import host_of

BROKEN = """
from callsheet import Callback

class Broken(Callback):
    collective = {collective}

    def on_train_step_end(self, ctx):
        raise RuntimeError("broken")

    def on_predict_end(self, ctx):
        ...  # an event that the Trainer never fires
"""


@pytest.mark.parametrize("is_default", [False, True])
def test_errors_of_callbacks_do_not_end_or_change_training_in_a_plugin_s_host(
    is_default: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a callback file, errors of callbacks are isolated. With the default callbacks, not even errors of collective callbacks end training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"broken_{is_default}"
    (tmp_path / f"{module}.py").write_text(BROKEN.format(collective=is_default))
    (tmp_path / "callbacks.yaml").write_text(f"- {module}.Broken\n")
    hosted = host_of(None if is_default else "callbacks.yaml")
    if is_default:
        hosted.manager.add(import_path(f"{module}.Broken")())
    rows = [{"x": torch.tensor([float(number)]), "labels": torch.ones(1)} for number in range(8)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x) - labels).square().mean()}

    def trained(callbacks: list[Any]) -> list[torch.Tensor]:
        arguments = TrainingArguments("out", max_steps=3, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
        trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=callbacks)
        trainer.train()
        return list(trainer.model.parameters())

    assert all(torch.equal(one, other) for one, other in zip(trained([hosted]), trained([]), strict=True))
    assert "broken" in caplog.text
