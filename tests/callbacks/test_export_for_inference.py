from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import EMA, CheckpointSaver
from callsheet.callbacks.export_for_inference import ExportForInferenceCallback
from callsheet.callbacks.support.inference_files import Format
from callsheet.errors import CheckpointError, ConfigError, MissingPackage
from callsheet.loggers.logger import Logger
from callsheet.testing import run_ranks
from callsheet.trainer import ForwardStepTask

torch.set_num_threads(1)


class Net(nn.Module):
    """A model with dropout and running statistics (which depend on the mode), a tied weight and a user's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 3))
        self.head = nn.Linear(3, 3)
        self.tied = self.head
        self.body.register_forward_hook(doubled)

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        return self.tied(self.head(self.body(inputs))) * scale  # type: ignore[no-any-return]


def doubled(module: nn.Module, args: Any, outputs: Tensor) -> Tensor:
    return outputs * 2


class RecordsFiles(Logger):
    """Records the files that are logged, and checks that they exist."""

    ranks = "all"

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        assert path.is_file()
        self.files[name] = path


def inputs(samples: int = 5) -> Tensor:
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(samples))


def data(size: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(part, part * 2) for part in inputs(12).split(size)]


def trainer(folder: Path | str, *callbacks: Callback, model: nn.Module | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"train_dataloader": data(), "task": nn.functional.mse_loss, "max_duration": "2ep", "seed": 3}
    return Trainer(
        Net() if model is None else model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        callbacks=CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        run_name="run",
        device="cpu",
        **(arguments | options),
    )


def whole(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in state.items()}


@torch.no_grad()
def outputs_of(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the trained model's outputs in evaluation mode."""
    return model.eval()(*args, **kwargs)


def loaded(path: Path) -> Any:
    return torch.export.load(path).module()


def run_onnx(path: Path, *arrays: Tensor) -> list[Tensor]:
    import onnx
    from onnx.reference import ReferenceEvaluator

    onnx.checker.check_model(str(path))
    model = onnx.load(path)
    names = [value.name for value in model.graph.input]
    fed = {name: array.numpy() for name, array in zip(names, arrays, strict=True)}
    return [torch.from_numpy(each) for each in ReferenceEvaluator(model).run(None, fed)]


def test_an_exported_program_returns_the_trained_model_s_outputs(tmp_path: Path) -> None:
    files = RecordsFiles()
    with trainer(tmp_path, ExportForInferenceCallback(), files) as trained:
        trained.fit()
    path = tmp_path / "run" / "export" / "model.pt2"
    assert files.files == {"export/model.pt2": path}
    assert [entry.name for entry in path.parent.iterdir()] == ["model.pt2"]
    program = loaded(path)
    for samples in (1, 2, 7):
        assert torch.equal(program(inputs(samples)), outputs_of(trained.model, inputs(samples)))
    assert not torch.equal(program(inputs()), outputs_of(Net(), inputs()))


@pytest.mark.test_all
def test_an_onnx_model_returns_the_trained_model_s_outputs(tmp_path: Path) -> None:
    files = RecordsFiles()
    path = tmp_path / "there" / "net.onnx"
    export = ExportForInferenceCallback(save_format="onnx", save_path=path, input_names=["x"], output_names=["y"])
    with trainer(tmp_path, export, files) as trained:
        trained.fit()
    assert "export/net.onnx" in files.files
    assert all(file.parent == path.parent for file in files.files.values())
    for samples in (1, 6):
        (recorded,) = run_onnx(path, inputs(samples))
        torch.testing.assert_close(recorded, outputs_of(trained.model, inputs(samples)))
    import onnx

    graph = onnx.load(path).graph
    assert ([value.name for value in graph.input], [value.name for value in graph.output]) == (["x"], ["y"])
    assert not (tmp_path / "run").exists()


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, tie_word_embeddings=True, **changes))


def tokens(samples: int = 2, length: int = 7) -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (samples, length), generator=torch.Generator().manual_seed(samples * length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def texts() -> list[dict[str, Tensor]]:
    return [{**batch, "labels": batch["input_ids"]} for batch in (tokens(3), tokens(4))]


def train_llama(folder: Path | str, *callbacks: Callback, **options: Any) -> Trainer:
    with trainer(folder, *callbacks, model=llama(), train_dataloader=texts(), task=None, **options) as trained:
        trained.fit()
    return trained


def llama_of(trained: Trainer) -> Any:
    return trained.model


def made_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"one": 0, "two": 1}, "one")))


def test_the_huggingface_format_writes_a_folder_for_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = RecordsFiles()
    trained = train_llama(tmp_path, ExportForInferenceCallback(save_format="huggingface", processor=made_tokenizer()), files)
    folder = tmp_path / "run" / "export" / "model"
    assert {"export/model/config.json", "export/model/model.safetensors"} <= files.files.keys()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(outputs_of(model, **tokens()).logits, outputs_of(trained.model, **tokens()).logits)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(folder).vocab == {"one": 0, "two": 1}


@pytest.mark.test_all
def test_an_exported_language_model_accepts_sequences_of_any_length(tmp_path: Path) -> None:
    trained = train_llama(tmp_path, ExportForInferenceCallback(dynamic_shapes="all"))
    assert llama_of(trained).config.use_cache
    program = loaded(tmp_path / "run" / "export" / "model.pt2")
    for samples, length in ((1, 5), (3, 7), (2, 20)):
        recorded = program(**tokens(samples, length))
        assert type(recorded) is dict
        assert list(recorded) == ["logits"]  # neither the loss nor the cache
        assert torch.equal(recorded["logits"], outputs_of(trained.model, **tokens(samples, length)).logits)


@pytest.mark.test_all
def test_a_language_model_is_exported_to_onnx(tmp_path: Path) -> None:
    trained = train_llama(tmp_path, ExportForInferenceCallback(save_format="onnx", dynamic_shapes="all", output_names=["logits"]))
    batch = tokens(3, 11)
    (logits,) = run_onnx(tmp_path / "run" / "export" / "model.onnx", *batch.values())
    torch.testing.assert_close(logits, outputs_of(trained.model, **batch).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "call"),
    [
        (inputs(2), (inputs(4),)),
        ((inputs(2), 3.0), (inputs(4), 3.0)),
        ({"inputs": inputs(2), "scale": 3.0}, {"inputs": inputs(4), "scale": 3.0}),
    ],
)
def test_the_model_is_exported_with_the_given_sample_input(tmp_path: Path, given: Any, call: Any) -> None:
    with trainer(tmp_path, ExportForInferenceCallback(sample_input=given)) as trained:
        trained.fit()
    args, kwargs = ((), call) if isinstance(call, dict) else (call, {})
    program = loaded(tmp_path / "run" / "export" / "model.pt2")
    assert torch.equal(program(*args, **kwargs), outputs_of(trained.model, *args, **kwargs))


def test_the_model_is_exported_with_the_arguments_of_a_custom_task(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"] + 1, scale=0.5), lambda outputs: outputs.square().mean()

    batches = [{"x": inputs(1)}] * 3
    export = ExportForInferenceCallback()
    with trainer(tmp_path, export, model=Scaled(3, 3), task=ForwardStepTask(step), train_dataloader=batches) as trained:
        trained.fit()
    program = loaded(tmp_path / "run" / "export" / "model.pt2")  # traced with one sample, works with any number
    assert torch.equal(program(inputs(5), scale=0.5), outputs_of(trained.model, inputs(5), scale=0.5))


class Scaled(nn.Linear):
    def forward(self, x: Tensor, *, scale: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


def test_fixed_shapes_are_those_of_the_first_batch(tmp_path: Path) -> None:
    with trainer(tmp_path, ExportForInferenceCallback(dynamic_shapes="none")) as trained:
        trained.fit()
    program = loaded(tmp_path / "run" / "export" / "model.pt2")
    assert torch.equal(program(inputs(4)), outputs_of(trained.model, inputs(4)))
    with pytest.raises(Exception, match=r"size|shape|[Gg]uard"):
        program(inputs(2))


def test_dynamic_shapes_are_accepted_in_the_format_of_torch(tmp_path: Path) -> None:
    shapes = {"inputs": {0: torch.export.Dim("samples", max=8)}, "scale": None}
    export = ExportForInferenceCallback(dynamic_shapes=shapes, sample_input=(inputs(2), 1.0))
    with trainer(tmp_path, export) as trained:
        trained.fit()
    program = loaded(tmp_path / "run" / "export" / "model.pt2")
    assert torch.equal(program(inputs(8), 1.0), outputs_of(trained.model, inputs(8)))
    with pytest.raises(Exception, match=r"size|shape|[Gg]uard"):
        program(inputs(9), 1.0)


def test_the_average_is_exported_if_there_is_one(tmp_path: Path) -> None:
    with trainer(tmp_path, EMA(decay=0.9), ExportForInferenceCallback()) as trained:
        trained.fit()
    recorded = loaded(tmp_path / "run" / "export" / "model.pt2")(inputs())
    assert torch.equal(recorded, outputs_of(trained.model, inputs()))  # from then on, the model contains the average
    with trainer(tmp_path / "plain") as plain:
        plain.fit()
    assert not torch.equal(recorded, outputs_of(plain.model, inputs()))


@pytest.mark.test_all
def test_the_trained_model_is_not_changed(tmp_path: Path) -> None:
    ends = []
    for exporting in (False, True):
        export = [ExportForInferenceCallback(save_format="onnx")] if exporting else []
        with trainer(tmp_path / str(exporting), *export) as trained:
            trained.fit()
            modes = [module.training for module in trained.model.modules()]
            chance = random.getstate(), torch.get_rng_state().tolist()
            hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in trained.model.modules()]
            devices = {(tensor.device.type, tensor.requires_grad) for tensor in trained.model.parameters()}
            trained.fit("3ep")  # and training can continue
        ends.append((modes, chance, hooks, devices, whole(trained.model.state_dict())))
    assert ends[0][:4] == ends[1][:4]
    assert all(ends[1][0])
    assert all(torch.equal(ends[0][4][name], ends[1][4][name]) for name in ends[0][4])


def test_a_further_fit_exports_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "export" / "model.pt2"
    with trainer(tmp_path, ExportForInferenceCallback()) as trained:
        trained.fit("1ep")
        first = loaded(path)(inputs())
        trained.fit("3ep")
    assert torch.equal(loaded(path)(inputs()), outputs_of(trained.model, inputs()))
    assert not torch.equal(first, loaded(path)(inputs()))
    assert [entry.name for entry in path.parent.iterdir()] == ["model.pt2"]


def test_other_files_in_an_existing_folder_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    (folder / "config.json").write_text("old")
    files = RecordsFiles()
    train_llama(tmp_path, ExportForInferenceCallback(save_format="huggingface", save_path=folder), files)
    assert (folder / "precious.txt").read_text() == "mine"
    assert (folder / "config.json").read_text() != "old"
    assert folder / "precious.txt" not in files.files.values()


class Untraceable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return super().forward(x)
        return super().forward(-x)


def test_a_model_that_cannot_be_exported_is_named_and_no_files_are_left(tmp_path: Path) -> None:
    path = tmp_path / "models" / "model.pt2"
    path.parent.mkdir()
    path.write_bytes(b"an earlier one")
    export = ExportForInferenceCallback(save_path=path)
    with trainer(tmp_path, export, CheckpointSaver(), model=Untraceable(3, 3)) as trained:
        with pytest.raises(CheckpointError, match=r"could not be exported as torch_export: torch\.export cannot") as caught:
            trained.fit()
    assert "training is complete, and its checkpoints are intact" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert path.read_bytes() == b"an earlier one"
    assert [entry.name for entry in path.parent.iterdir()] == ["model.pt2"]
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    again = trainer(tmp_path, model=Untraceable(3, 3), resume="auto")
    assert again.state.timestamp.batch == 6
    again.close()


class NoOnnx(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = torch.linalg.eigvals(super().forward(x).T @ x)
        return values.real


@pytest.mark.test_all
def test_an_operation_without_an_onnx_equivalent_is_an_error(tmp_path: Path) -> None:
    export = ExportForInferenceCallback(save_format="onnx")

    def step(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]), lambda values: values.sum()

    with trainer(tmp_path, export, model=NoOnnx(3, 3), task=ForwardStepTask(step)) as trained:
        with pytest.raises(CheckpointError, match=r"as onnx: the model cannot be expressed in ONNX: .*linalg_eig"):
            trained.fit()
    assert not list((tmp_path / "run" / "export").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_input": inputs()[:, :2]}, "the model does not accept the sample input: RuntimeError"),
        ({"sample_input": (inputs(), 1.0, 2.0)}, "the model does not accept the sample input: TypeError"),
        ({"dynamic_shapes": {"other": None}}, "torch.export cannot trace the model"),
    ],
)
def test_a_sample_input_or_shapes_that_do_not_fit_are_an_error(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with trainer(tmp_path, ExportForInferenceCallback(**options)) as trained, pytest.raises(CheckpointError, match=message):
        trained.fit()


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    export = ExportForInferenceCallback(save_path=tmp_path / "file" / "model.pt2")
    with (
        trainer(tmp_path, export) as trained,
        pytest.raises(CheckpointError, match=r"could not be exported .*(NotADirectory|FileExists)"),
    ):
        trained.fit()


class Stops(Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            if self.how == "preempted":
                os.kill(os.getpid(), signal.SIGTERM)
            elif self.how == "failed":
                raise RuntimeError("on purpose")
            elif self.how == "stopped":
                ctx.control.stop("enough")


@pytest.mark.parametrize(("how", "is_written"), [("preempted", False), ("failed", False), ("stopped", True)])
def test_the_outcome_decides_whether_the_model_is_exported(tmp_path: Path, how: str, is_written: bool) -> None:
    with trainer(tmp_path, ExportForInferenceCallback(), Stops(how)) as trained:
        if how == "failed":
            with pytest.raises(RuntimeError, match="on purpose"):
                trained.fit()
        else:
            trained.fit()
    assert trained.run.outcome == how
    assert (tmp_path / "run" / "export").exists() == is_written
    assert not trained.model._forward_pre_hooks


def test_without_a_trained_step_it_warns_unless_a_sample_input_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with trainer(tmp_path, CheckpointSaver()) as trained:
        trained.fit()
    with caplog.at_level(logging.WARNING, "callsheet"):
        with trainer(tmp_path, ExportForInferenceCallback(), resume="auto") as again:
            again.fit()
    assert any("no step was trained, so it has seen no input" in message for message in caplog.messages)
    with trainer(tmp_path, ExportForInferenceCallback(sample_input=inputs(2)), resume="auto") as given:
        given.fit()
    recorded = loaded(tmp_path / "run" / "export" / "model.pt2")(inputs())
    assert torch.equal(recorded, outputs_of(trained.model, inputs()))


def test_a_compiled_model_needs_a_sample_input(tmp_path: Path) -> None:
    plain = nn.Linear(3, 3)
    compiled = {"compile": {"backend": "eager"}, "log_interval": "1ba"}
    with trainer(tmp_path, ExportForInferenceCallback(), model=plain, **compiled) as trained:
        with pytest.raises(ConfigError, match="compiled model is called with; give it a sample_input="):
            trained.fit()
    assert trained.state.timestamp.batch == 1
    assert not plain._forward_pre_hooks
    export = ExportForInferenceCallback(sample_input=inputs(2))
    with trainer(tmp_path, export, model=nn.Linear(3, 3), **compiled) as trained:
        trained.fit()
    recorded = loaded(tmp_path / "run" / "export" / "model.pt2")(inputs())
    assert torch.equal(recorded, outputs_of(trained.model, inputs()))


def test_the_huggingface_format_rejects_other_models(tmp_path: Path) -> None:
    with trainer(tmp_path, ExportForInferenceCallback(save_format="huggingface")) as trained:
        with pytest.raises(ConfigError, match="Net is not a transformers model"):
            trained.fit()
    assert trained.state.timestamp.batch == 0


def test_a_missing_package_is_named_before_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with trainer(tmp_path, ExportForInferenceCallback(save_format="onnx")) as trained:
        with pytest.raises(MissingPackage, match=r"pip install 'callsheet\[onnx\]'"):
            trained.fit()
    assert trained.state.timestamp.batch == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_format": "torchscript"}, "unknown save_format 'torchscript'"),
        ({"dynamic_shapes": "some"}, "unknown dynamic_shapes"),
        ({"input_names": ["x"]}, "are for save_format='onnx'"),
        ({"save_format": "onnx", "processor": object()}, "processor= is for"),
        ({"save_path": "s3://bucket/model.pt2"}, "give a local path"),
    ],
)
def test_rejects_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportForInferenceCallback(**options)


def on_ranks(folder: str, parallel: str, save_format: Format, exports: bool) -> Any:
    files = RecordsFiles()
    averaged: Sequence[Callback] = [EMA(decay=0.9)] if parallel == "fsdp" else []
    export = [ExportForInferenceCallback(save_format=save_format, dynamic_shapes="all")] if exports else []
    if save_format == "huggingface":
        options: dict[str, Any] = {"model": llama(), "train_dataloader": texts(), "task": None}
    else:
        options = {"train_dataloader": data(2)}
    with trainer(folder, *averaged, *export, files, parallel=parallel, **options) as trained:
        trained.fit()
        shards = {isinstance(parameter, DTensor) for parameter in trained.model.parameters()}
        weights = {name: tensor.tolist() for name, tensor in whole(trained.model.state_dict()).items()}
        return {"shards": shards, "weights": weights, "files": sorted(files.files), "modes": trained.model.training}


@pytest.mark.test_all
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
@pytest.mark.parametrize("save_format", ["torch_export", "huggingface"])
def test_two_ranks_export_one_model_and_training_is_not_changed(parallel: str, save_format: str, tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path), parallel, save_format, True)
    assert not second["files"]
    assert first["files"]
    assert first["weights"] == run_ranks(on_ranks, 2, str(tmp_path / "bare"), parallel, save_format, False)[0]["weights"]
    assert (first["shards"], first["modes"]) == ({parallel == "fsdp"}, True)
    weights = {name: torch.tensor(value) for name, value in first["weights"].items()}
    if save_format == "huggingface":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export" / "model")
        expected = llama()
        expected.load_state_dict(weights)
        assert torch.equal(outputs_of(model, **tokens()).logits, outputs_of(expected, **tokens()).logits)
    else:
        net = Net()
        net.load_state_dict(weights)
        program = loaded(tmp_path / "run" / "export" / "model.pt2")
        assert torch.equal(program(inputs()), outputs_of(net, inputs()))


def failing_export(folder: str) -> str:
    logging.disable(logging.CRITICAL)
    try:
        with trainer(folder, ExportForInferenceCallback(), model=Untraceable(3, 3), parallel="fsdp") as trained:
            trained.fit()
    except CheckpointError as error:
        return str(error)
    return "nothing"


@pytest.mark.test_all
def test_a_failure_on_rank_zero_fails_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(failing_export, 2, str(tmp_path))
    assert first == second
    assert "torch.export cannot trace the model" in first
