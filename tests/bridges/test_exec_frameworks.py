"""`callsheet exec` runs scripts of frameworks and adds a host to their trainers, on one rank and on two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from callsheet.report import RunFolder
from forked import python, run_forked  # type: ignore[import-not-found]  # pytest has its folder on the path

DATA = """
import hashlib, os, sys, torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
def end(model):
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.state_dict().values())
    if os.environ.get("RANK", "0") == "0":
        print("weights", hashlib.sha256(weights).hexdigest())
"""

HUGGINGFACE = f"""{DATA}
from transformers import Trainer, TrainingArguments
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, inputs, labels):
        out = self.layer(inputs)
        return {{"loss": nn.functional.mse_loss(out, labels), "logits": out}}
rows = [{{"inputs": each, "labels": label}} for each, label in zip(x, y)]
model = Net()
for number in range(int(sys.argv[1])):
    Trainer(model, TrainingArguments(f"out-{{number}}", max_steps=8, per_device_train_batch_size=8, logging_steps=2, report_to=[], disable_tqdm=True,
            use_cpu=True, save_strategy="no"), train_dataset=rows).train()
end(model)
"""

LIGHTNING = f"""{DATA}
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def training_step(self, batch, number):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
model = Module()
for number in range(int(sys.argv[1])):
    trainer = pl.Trainer(max_steps=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                         log_every_n_steps=2)
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=8))
end(model)
"""

KERAS = f"""
import os
os.environ["KERAS_BACKEND"] = "torch"
{DATA}
import keras
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
for number in range(int(sys.argv[1])):
    model.fit(x.numpy(), y.numpy(), 8, 1, 0, [], shuffle=False)  # by position
end(model)
"""

IGNITE = f"""{DATA}
from ignite.engine import create_supervised_trainer
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(4, 1)
trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
trainer.run(DataLoader(TensorDataset(x, y), batch_size=8), max_epochs=1)
end(model)
"""

ACCELERATE = f"""{DATA}
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x, y), batch_size=8))
for inputs, targets in loader:
    accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(model)
"""

TORCHTNT = f"""{DATA}
from torch.utils.data import DataLoader, TensorDataset
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.fit import fit
from torchtnt.framework.train import train
class Unit(AutoUnit):
    def compute_loss(self, state, data):
        outputs = self.module(data[0])
        return nn.functional.mse_loss(outputs, data[1]), outputs
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1), None
unit = Unit(module=nn.Linear(4, 1), device=torch.device("cpu"))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
for number in range(int(sys.argv[1])):
    if number:
        unit = Unit(module=unit.module, device=torch.device("cpu"))
    fit(unit, loader, loader, max_epochs=1) if number else train(unit, loader, max_epochs=1)
end(unit.module)
"""

SCRIPTS = {
    "huggingface": HUGGINGFACE,
    "lightning": LIGHTNING,
    "pytorch_lightning": LIGHTNING.replace("lightning.pytorch", "pytorch_lightning"),
    "keras": KERAS,
    "torchtnt": TORCHTNT,
    "ignite": IGNITE,
    "accelerate": ACCELERATE,
}

DDP = f"""{DATA}
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
data = TensorDataset(x, y)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
end(model.module)
dist.destroy_process_group()
"""

FSDP2 = DDP.replace(
    "model = DistributedDataParallel(nn.Linear(4, 1))",
    """from torch.distributed.fsdp import fully_shard
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
for layer in model:
    fully_shard(layer)
fully_shard(model)""",
).replace(
    "end(model.module)",
    "whole = nn.Module()\nwhole.state_dict = lambda: {name: each.full_tensor() for name, each in model.state_dict().items()}\nend(whole)",
)


def run(folder: Path, *command: str, program: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [program, *command], cwd=folder, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def weights(found: subprocess.CompletedProcess[str]) -> str:
    return next(line for line in found.stdout.splitlines() if line.startswith("weights "))


@pytest.fixture(scope="module")
def huggingface_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the weights that the script HUGGINGFACE trains without callsheet."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(HUGGINGFACE)
    return weights(run_forked(folder, "train.py", "1"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_trainer_of_a_framework_is_observed_and_trains_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    times = 1 if name in ("ignite", "accelerate") else 2
    alone = run_forked(tmp_path, "train.py", str(times))
    interval = "1" if name == "accelerate" else "2"
    observed = run_forked(tmp_path, "train.py", str(times), exec_words=["--run_name", "a", "--log_interval", interval])
    assert (alone.returncode, observed.returncode) == (0, 0), alone.stderr + observed.stderr
    assert weights(alone) == weights(observed)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")) == ["a", "a-2"][:times], (
        observed.stderr
    )
    for folder in ["a", "a-2"][:times]:
        found = RunFolder.read(tmp_path / "runs" / folder)
        assert (found.outcome, found.last_step) == ("finished", 8), observed.stderr
        with_loss = [record.step for record in found.records if "train/loss" in record.values]
        assert with_loss[0] == int(interval) or name != "accelerate"
        assert {"forward", "backward", "optimizer_step"} <= {each.name for window in found.windows for each in window.slices}
        assert (tmp_path / "runs" / folder / "report.html").exists()


def test_a_failing_callback_does_not_end_a_trainer(tmp_path: Path, huggingface_weights: str) -> None:
    (tmp_path / "train.py").write_text(HUGGINGFACE)
    (tmp_path / "broken.py").write_text(
        "from callsheet import Callback\n\nclass Broken(Callback):\n    collective = True\n\n"
        "    def on_train_step_end(self, ctx):\n        raise RuntimeError('broken')\n"
    )
    (tmp_path / "callbacks.yaml").write_text("- class_path: broken.Broken\n")
    observed = run_forked(tmp_path, "train.py", "1", exec_words=["--run_name", "a", "--callbacks", "callbacks.yaml"])
    assert observed.returncode == 0, observed.stderr
    assert weights(observed) == huggingface_weights
    assert "callsheet cannot follow the Hugging Face Trainer after step 1" in observed.stderr
    assert RunFolder.read(tmp_path / "runs" / "a").outcome == "failed"


def test_a_trainer_that_cannot_be_observed_trains_the_same(tmp_path: Path, huggingface_weights: str) -> None:
    (tmp_path / "train.py").write_text(HUGGINGFACE)
    entry = "- class_path: EarlyStopper\n  init_args: {monitor: validation/loss}\n"
    (tmp_path / "callbacks.yaml").write_text(entry + entry)  # a run rejects two callbacks of the same name
    observed = run_forked(tmp_path, "train.py", "1", exec_words=["--callbacks", "callbacks.yaml"])
    assert observed.returncode == 0, observed.stderr
    assert weights(observed) == huggingface_weights
    assert "the trainer cannot be observed" in observed.stderr
    assert "no training was recognized" not in observed.stderr


def test_a_script_that_uses_callsheet_itself_is_not_observed(tmp_path: Path) -> None:
    given = HUGGINGFACE.replace("train_dataset=rows)", "train_dataset=rows, callbacks=[host([], strict=False)])")
    (tmp_path / "train.py").write_text(f"from callsheet.bridges.huggingface import host\n{given}")
    observed = run(tmp_path, "-m", "callsheet.exec", "--run_name", "a", "train.py", "1")
    assert observed.returncode == 0, observed.stderr
    assert observed.stderr.count("this script uses callsheet itself") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "text",
    [DDP, FSDP2, LIGHTNING.replace("max_steps=8", 'max_steps=8, devices=2, strategy="ddp"')],
    ids=["ddp", "fsdp2", "lightning"],
)
def test_a_script_on_two_ranks_is_observed_and_trains_the_same(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m", "callsheet.exec")
    alone = run_forked(tmp_path, "train.py", "1", ranks=2)
    observed = run(tmp_path, *launch, "--run_name", "a", "--log_interval", "2", "train.py", "1", program=python())
    assert (alone.returncode, observed.returncode) == (0, 0), alone.stderr + observed.stderr
    assert weights(alone) == weights(observed)
    found = RunFolder.read(tmp_path / "runs" / "a")
    assert (found.outcome, found.last_step, found.start_event()["world_size"]) == ("finished", 8, 2), observed.stderr
    assert found.records[-1].values["time/sample"] in (64.0, 128.0)
    assert observed.stderr.count("report: ") == 1
