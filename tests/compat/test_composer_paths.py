"""Composer's submodule paths and remaining names. A name without a counterpart raises an error that says what to use instead."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callsheet.compat import composer
from callsheet.compat.composer import DataSpec, Evaluator, Trainer
from callsheet.compat.composer.models import ComposerClassifier, ComposerModel, HuggingFaceModel
from callsheet.compat.composer.precision import Precision
from callsheet.errors import ConfigError, NotSupported

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _new_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class LinearModel(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        self.sums: list[float] = []

    def forward(self, batch: Any) -> Tensor:
        self.sums.append(float(batch[0].sum()))
        outputs: Tensor = self.net(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


def data(rows: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, torch.arange(rows) % 3), batch_size=4)


def trained(**given: Any) -> Trainer:
    options: dict[str, Any] = {
        "model": LinearModel(),
        "train_dataloader": data(),
        "max_duration": "1ep",
        "progress_bar": False,
    } | given
    options.setdefault("optimizers", torch.optim.SGD(options["model"].parameters(), lr=0.1))
    with Trainer(**options) as trainer:
        trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("core.time", "Timestamp"),
        ("core.state", "State"),
        ("core.types", "Batch"),
        ("callbacks.early_stopper", "EarlyStopper"),
        ("callbacks.checkpoint_saver", "CheckpointSaver"),
        ("loggers.logger_destination", "LoggerDestination"),
        ("models.tasks.classification", "ComposerClassifier"),
        ("models.huggingface", "HuggingFaceModel"),
        ("trainer.trainer", "Trainer"),
    ],
)
def test_a_submodule_can_be_imported_first(path: str, name: str) -> None:
    """Runs in a new interpreter, so that nothing else has imported the parent packages."""
    module_path = f"callsheet.compat.composer.{path}"
    code = f"from {module_path} import {name}; import {module_path} as module; assert module.{name} is {name}; import pydoc; pydoc.render_doc(module)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("path", "name", "instead"),
    [
        ("optim", "DecoupledAdamW", "torch.optim"),
        ("optim.scheduler", "CosineAnnealingScheduler", "torch.optim"),
        ("algorithms", "MixUp", "apply them to model and data yourself"),
        ("core.algorithm", "Algorithm", "apply them to model and data yourself"),
        ("callbacks.generate", "Generate", "use callsheet.callbacks.Generate"),
        ("utils.reproducibility", "seed_all", r"Trainer\(seed=...\)"),
    ],
)
def test_a_name_without_a_counterpart_raises_an_error_with_a_hint(path: str, name: str, instead: str) -> None:
    found = getattr(importlib.import_module(f"callsheet.compat.composer.{path}"), name)
    with pytest.raises(NotSupported, match=rf"^{name} is not supported, unlike in Composer: .*{instead}"):
        found()
    with pytest.raises(NotSupported, match=r"^get_world_size is not supported, unlike"):
        importlib.import_module("callsheet.compat.composer.utils").dist.get_world_size()


def test_each_dataloader_of_a_list_is_evaluated_under_its_own_name() -> None:
    model = ComposerClassifier(nn.Linear(4, 3), num_classes=3)
    trainer = trained(model=model, eval_dataloader=[data(), DataSpec(data(4))])
    assert set(trainer.state.eval_metrics) == {"eval", "eval-2"}
    assert set(trainer.state.eval_metrics["eval"]) == {"CrossEntropy", "MulticlassAccuracy"}
    alone = trained(model=model, eval_dataloader=[(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))])
    assert set(alone.state.eval_metrics) == {"eval"}  # a list of batches is one dataloader
    with pytest.raises(ConfigError, match=r"^Mixing Evaluator with other classes is not allowed"):
        trained(eval_dataloader=[Evaluator(label="a", dataloader=data()), data()])


@pytest.mark.parametrize("kind", ["DataSpec", "dictionary", "iterable"])
def test_batch_transforms_are_applied(kind: str) -> None:
    def halved(batch: Any) -> Any:
        return batch[0] / 2, batch[1]

    loader: Any = data()
    given: dict[str, Any] = {"dataloader": list(loader) if kind == "iterable" else loader, "batch_transforms": halved}
    model = LinearModel()
    trained(model=model, train_dataloader=given if kind == "dictionary" else DataSpec(**given))
    # The caller's own loader is unchanged.
    assert model.sums == pytest.approx([float(batch[0].sum()) / 2 for batch in loader])


def test_a_classifier_without_a_number_of_classes_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^Please specify the number of output classes"):
        ComposerClassifier(nn.Linear(4, 3))


def test_a_precision_is_given_by_name_and_unsupported_ones_are_rejected() -> None:
    assert Precision("AMP_BF16") is composer.core.Precision.AMP_BF16
    assert str(Precision.AMP_BF16) == "amp_bf16"
    trained(precision=Precision.FP32)
    with pytest.raises(NotSupported, match="precision='amp_fp8'"):
        trained(precision=Precision.AMP_FP8)


def test_a_transformers_model_is_trained_and_evaluated() -> None:
    transformers = pytest.importorskip("transformers")
    metrics = pytest.importorskip("torchmetrics.text")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    ids = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "another": ids}]
    perplexity = metrics.Perplexity(ignore_index=-100)
    model = HuggingFaceModel(transformers.LlamaForCausalLM(config), use_logits=True, eval_metrics=[perplexity])
    assert model.shift_labels
    trainer = trained(
        model=model, train_dataloader=batches, eval_dataloader=batches, optimizers=torch.optim.SGD(model.parameters(), 0.0)
    )
    with torch.no_grad():
        loss = model.loss(model(batches[0]), batches[0])
    assert float(trainer.state.eval_metrics["eval"]["Perplexity"].compute().log()) == pytest.approx(float(loss), rel=1e-4)
    with pytest.raises(NotSupported, match=r"peft\.get_peft_model"):
        HuggingFaceModel(model.model, peft_config=object())
    with pytest.raises(NotSupported, match="load_path"):
        HuggingFaceModel.hf_from_composer_checkpoint("x.pt")
    with pytest.raises(ValueError, match=r"^Unexpected batch type"):
        model((ids, ids))


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"save_filename": "a.pt"}, "autoresume=True"),
        ({"save_overwrite": True}, "run_name"),
        ({"save_weights_only": True}, "state_dict()"),
    ],
)
def test_unsupported_checkpoint_arguments_are_rejected_by_name(given: dict[str, Any], instead: str) -> None:
    (name,) = given
    with pytest.raises(NotSupported, match=rf"^Trainer\({name}=.* is not supported, unlike in Composer: .*{re.escape(instead)}"):
        trained(**given)


def test_unsupported_arguments_of_data_spec_are_rejected_by_name() -> None:
    with pytest.raises(NotSupported, match=r"^DataSpec\(split_batch=.* is not supported, unlike in Composer"):
        DataSpec(data(), split_batch=lambda batch, size: [batch])


PACKAGE = next((Path(__file__).parents[2] / ".venv-composer").glob("lib/python*/site-packages/composer"), Path("nowhere"))

INTERNAL = {
    *("core.precision._validate_precision", "callbacks.mlperf.get_system_description", "loggers.logger.format_log_data_value"),
    *("loggers.mosaicml_logger.MOSAICML_PLATFORM_ENV_VAR", "loggers.mosaicml_logger.MOSAICML_ACCESS_TOKEN_ENV_VAR"),
    "models.huggingface.peft_installed",
}
"""Helpers of Composer's own modules, which its docs do not use."""


def exported() -> list[str]:
    """Return every name in the `__all__` of the package's public modules, with its path."""
    found = []
    for top in ("core", "callbacks", "loggers", "models", "trainer", "optim"):
        for file in sorted((PACKAGE / top).rglob("*.py")):
            parts = file.relative_to(PACKAGE).with_suffix("").parts
            path = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and not parts[-1].startswith("_"):
                    found += [f"{path}.{name}" for name in ast.literal_eval(node.value)]
    return found


@pytest.mark.skipif(not PACKAGE.is_dir(), reason="Composer is not installed: python tools/composer_venv.py")
def test_every_public_name_of_composer_can_be_imported_from_compat() -> None:
    missing = set()
    for name in exported():
        path, _, last = name.rpartition(".")
        try:
            getattr(importlib.import_module(f"callsheet.compat.composer.{path}"), last)
        except (ImportError, AttributeError):
            missing.add(name)
    assert missing == INTERNAL
