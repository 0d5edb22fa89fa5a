"""The names that messages use for the keys of callsheet's recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from callsheet.compat.automodel.configuration import setting_names
from callsheet.compat.instructlab.job import Training
from callsheet.compat.megatron_bridge.pretrain import BridgePretrain
from callsheet.errors import ConfigError
from callsheet.recipes.classify import ClassifyConfig
from callsheet.recipes.distill import DistillConfig
from callsheet.recipes.existing_run import reject_another_job
from callsheet.recipes.finetune import FinetuneConfig
from callsheet.recipes.finetune_vlm import FinetuneVLMConfig
from callsheet.recipes.job import JobConfig
from callsheet.recipes.pretrain import PretrainConfig

AUTOMODEL = (FinetuneConfig, ClassifyConfig, DistillConfig, FinetuneVLMConfig)


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (setting_names(FinetuneConfig), AUTOMODEL),
        (Training.setting_names, (FinetuneConfig,)),
        (BridgePretrain.setting_names, (PretrainConfig,)),
    ],
)
def test_only_existing_keys_have_names(names: Mapping[str, str], kinds: tuple[type[JobConfig], ...]) -> None:
    assert {key.partition(".")[0] for key in names} <= {field.name for kind in kinds for field in fields(kind)}


def test_a_key_that_automodel_does_not_have_is_named_in_the_section_callsheet() -> None:
    assert setting_names(ClassifyConfig)["class_weights"] == "callsheet.class_weights"


def test_the_name_of_a_key_applies_to_the_keys_inside_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("lora: {r: 1, alpha: 1}\nseed: 1\n")
    with pytest.raises(ConfigError, match=r"another peft, seed \(peft.dim: 1 in the run, 2 now; peft.alpha: 1 .*; seed: 1 "):
        reject_another_job(
            tmp_path / "config.yaml", "lora: {r: 2, alpha: 2}\nseed: 2\n", (), names={"lora": "peft", "lora.r": "peft.dim"}
        )
