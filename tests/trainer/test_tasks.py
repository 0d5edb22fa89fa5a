"""Tasks: one function for a whole step, metrics over uneven shares, and rejected input."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from torchmetrics.text import Perplexity

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import History
from callsheet.core.ranks import read_ranks
from callsheet.errors import ConfigError
from callsheet.testing.ranks import run_ranks
from callsheet.trainer import ForwardStepTask, HuggingFaceTask, SupervisedTask, Task


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


DATA = [(torch.randn(n, 3, generator=torch.Generator().manual_seed(n)), torch.ones(n, 1)) for n in (5, 2)]


class RecordsLosses(Callback):
    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.losses.append({name: float(loss) for name, loss in ctx.loss_dict.items()})


# --- ForwardStepTask ---


def one_loss(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]), lambda outputs: mse_loss(outputs, batch[1])


def with_second_loss(model: nn.Module, batch: Any) -> Any:
    def loss(outputs: Tensor) -> Any:
        error = outputs - batch[1]
        return error.square().mean(), {"absolute": error.abs().mean()}

    return model(batch[0]), loss


@pytest.mark.parametrize("step", [one_loss, with_second_loss])
@pytest.mark.parametrize("parts", [{}, {"microbatch_size": 2}, {"gradient_accumulation_steps": 2}])
def test_one_function_trains_as_a_loss_function_does(step: Any, parts: dict[str, int]) -> None:
    models = [linear(), linear()]
    results, named = [], RecordsLosses()
    for model, task in zip(models, (mse_loss, ForwardStepTask(step)), strict=True):
        with Trainer(model, task, DATA, DATA, optimizer=sgd, callbacks=named, **parts) as trainer:  # type: ignore[arg-type]
            trainer.fit("2ep")
            results.append(trainer.eval_results["validation"])
    torch.testing.assert_close(models[0].weight, models[1].weight)
    assert results[1]["loss"] == pytest.approx(results[0]["loss"])
    assert ("absolute" in results[1]) == ("absolute" in named.losses[-1]) == (step is with_second_loss)


def test_a_second_loss_is_the_mean_over_the_step() -> None:
    model, named = linear(), RecordsLosses()
    inputs, targets = DATA[0]
    expected = (model(inputs) - targets).abs().mean().item()
    with Trainer(
        model, ForwardStepTask(with_second_loss), DATA[:1], optimizer=sgd, callbacks=named, microbatch_size=2
    ) as trainer:
        trainer.fit("1ba")
    assert named.losses[0]["absolute"] == pytest.approx(expected)


@pytest.mark.parametrize("given", [lambda model, batch: model(batch[0]), lambda model, batch: (model(batch[0]), 1.0)])
def test_a_function_that_returns_something_else_is_rejected(given: Any) -> None:
    with Trainer(linear(), ForwardStepTask(given), DATA, optimizer=sgd) as trainer:
        with pytest.raises(ConfigError, match=r"forward_step returned (Tensor|tuple); let it return \(outputs, a function"):
            trainer.fit()


def test_a_loss_that_is_not_a_scalar_is_rejected_with_its_shape() -> None:
    task = ForwardStepTask(lambda model, batch: (model(batch[0]), lambda outputs: outputs))
    with Trainer(linear(), task, DATA, optimizer=sgd) as trainer:
        with pytest.raises(ConfigError, match=r"loss has the shape \(5, 1\)"):
            trainer.fit()


def test_metrics_of_a_forward_step_task_need_predictions_and_targets() -> None:
    with pytest.raises(ConfigError, match=r"override predictions_and_targets\(outputs, batch\)"):
        ForwardStepTask(one_loss, metrics={"mean": MeanMetric()})

    class WithPredictionsAndTargets(ForwardStepTask):
        def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
            return (outputs - batch[1]).abs(), torch.ones_like(outputs)

    model = linear()
    with Trainer(model, WithPredictionsAndTargets(one_loss, metrics={"absolute": MeanMetric()}), eval_dataloader=DATA) as trainer:
        found = trainer.evaluate()["validation"]["absolute"]
    errors = torch.cat([(model(inputs) - targets).abs() for inputs, targets in DATA])
    assert found == pytest.approx(errors.mean().item())


# --- arguments ---


def test_metrics_passed_to_the_wrong_object_or_of_a_wrong_type_are_rejected() -> None:
    with pytest.raises(ConfigError, match="set the metrics of a Task on the task"):
        Trainer(linear(), SupervisedTask(mse_loss), DATA, metrics={"mean": MeanMetric()})
    metrics: dict[str, Any] = {"accuracy": lambda outputs, targets: 1.0}
    with pytest.raises(ConfigError, match=r"metrics\['accuracy'\] is function, not a torchmetrics Metric"):
        Trainer(linear(), mse_loss, DATA, metrics=metrics)


@pytest.mark.parametrize("task", [None, nn.MSELoss, "mse"])
def test_an_object_that_is_not_a_task_is_rejected(task: Any) -> None:
    with pytest.raises(ConfigError, match=r"give a loss function of \(outputs, targets\)"):
        Trainer(linear(), task, DATA)


class BatchWithoutLength:
    """A batch whose number of samples cannot be determined."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.inputs, self.targets = (torch.stack(parts) for parts in zip(*samples, strict=True))


class TaskForBatchWithoutLength(Task):
    def forward(self, model: nn.Module, batch: BatchWithoutLength) -> Any:
        return model(batch.inputs)

    def loss(self, outputs: Any, batch: BatchWithoutLength) -> Tensor:
        return mse_loss(outputs, batch.targets)


def train_on_batches_without_length(kind: str) -> list[float]:
    torch.manual_seed(0)
    data: Any = DataLoader(
        TensorDataset(torch.arange(24.0).reshape(8, 3) / 24, torch.ones(8, 1)), 4, collate_fn=BatchWithoutLength
    )
    if kind == "list":
        data = list(data)
    model = linear()
    with Trainer(model, TaskForBatchWithoutLength(), data, data, optimizer=sgd) as trainer:
        trainer.fit("1ba")
        assert trainer.evaluate()["validation"]["loss"] > 0
    return model.weight.flatten().tolist()


@pytest.mark.test_all
@pytest.mark.parametrize("kind", ["samples", pytest.param("list", marks=pytest.mark.slow)])
def test_batches_of_any_kind_are_trained_on(kind: str) -> None:
    model = linear()
    inputs = torch.arange(24.0).reshape(8, 3) / 24
    mse_loss(model(inputs), torch.ones(8, 1)).backward()
    sgd(model.parameters()).step()
    for found in run_ranks(train_on_batches_without_length, 2, kind):
        assert found == pytest.approx(model.weight.flatten().tolist())


# --- metrics over ranks ---


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


def labelled_samples(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(number)
    return TensorDataset(torch.randn(number, 3, generator=generator), torch.randint(0, 3, (number,), generator=generator))


class Positive(SupervisedTask):
    """Evaluates a binary metric: is the first class the right one?"""

    def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        return outputs[:, 0].sigmoid(), (batch[1] == 0).long()


def evaluate_metrics(numbers: list[int]) -> list[dict[str, dict[str, float]]]:
    """Evaluate the accuracy, twice."""
    data = {str(number): DataLoader(labelled_samples(number), batch_size=2) for number in numbers}
    metrics = {"accuracy": MulticlassAccuracy(3, average="micro")}
    with Trainer(Same(), cross_entropy, metrics=metrics) as trainer:
        return [trainer.evaluate(data), trainer.evaluate(data)]


def evaluate_list_states(numbers: list[int]) -> list[dict[str, dict[str, float]]]:
    data = {str(number): DataLoader(labelled_samples(number), batch_size=2) for number in numbers}
    with Trainer(Same(), Positive(cross_entropy, {"auroc": BinaryAUROC()})) as trainer:
        return [trainer.evaluate(data), {"test": trainer.test(data[str(numbers[0])])}]


@pytest.mark.test_all
@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (evaluate_metrics, [9, 1, 4]),
        (evaluate_list_states, [9, 5]),
        pytest.param(evaluate_list_states, [1], marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:No (positive|negative) samples", "ignore:The ``compute`` method")
def test_metrics_over_ranks_equal_those_of_one_process(function: Any, numbers: list[int]) -> None:
    """9 samples give shares of 5 and 4. With 1 sample, rank 1 has only a filler."""
    whole = function(numbers)
    for found in run_ranks(function, 2, numbers):
        for one, other in zip(found, whole, strict=True):
            assert one.keys() == other.keys()
            for name, results in other.items():
                assert one[name] == pytest.approx(results, rel=1e-6)


# --- Hugging Face ---


def hugging_face(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "causal":
        config = transformers.LlamaConfig(
            vocab_size=7,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
        return transformers.LlamaForCausalLM(config)
    if kind == "seq2seq":
        config = transformers.T5Config(
            vocab_size=7, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.BertConfig(
        vocab_size=7,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=1 if kind == "regression" else 3,
    )
    kinds = {
        "masked": transformers.BertForMaskedLM,
        "tokens": transformers.BertForTokenClassification,
        "sequences": transformers.BertForSequenceClassification,
        "regression": transformers.BertForSequenceClassification,
    }
    return kinds[kind](config)


def labelled(kind: str, rows: int = 4) -> dict[str, Tensor]:
    """Return rows with different numbers of labels; in the last row, only the first token has one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 7, (rows, 5), generator=generator)
    if kind == "regression":
        return {"input_ids": ids, "labels": torch.randn(rows, 1, generator=generator)}
    if kind == "sequences":
        return {"input_ids": ids, "labels": torch.randint(0, 3, (rows,), generator=generator)}
    labels = torch.randint(0, 3, (rows, 5), generator=generator)
    for row in range(rows):
        labels[row, rows - row :] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("kind", ["causal", "seq2seq", "masked", "tokens", "sequences", "regression"])
def test_every_kind_of_model_s_microbatches_give_the_whole_batch(kind: str) -> None:
    batch, results = labelled(kind), []
    for size in (None, 1):
        model = hugging_face(kind)
        with Trainer(model, None, [batch], optimizer=sgd, microbatch_size=size) as trainer:
            trainer.fit("2ba")
            parts = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(4)]
            results.append((model.state_dict(), trainer.evaluate([batch]), trainer.evaluate(parts)))
    (whole, evaluated, in_parts), (other, _, _) = results
    torch.testing.assert_close(other, whole, rtol=1e-4, atol=1e-6)
    assert in_parts["validation"]["loss"] == pytest.approx(evaluated["validation"]["loss"], rel=1e-5)


def test_a_language_model_s_metrics_compare_predictions_with_the_next_token() -> None:
    """If they do, perplexity is the exponential of the loss."""
    batch = labelled("causal")
    with Trainer(hugging_face("causal"), metrics={"perplexity": Perplexity(ignore_index=-100)}) as trainer:
        found = trainer.evaluate([batch])["validation"]
    assert found["perplexity"] == pytest.approx(torch.tensor(found["loss"]).exp().item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["tokens", "sequences"])
def test_other_models_metrics_compare_logits_and_labels(kind: str) -> None:
    model, batch = hugging_face(kind), labelled(kind)
    model.eval()
    logits = model(**batch).logits.argmax(-1)
    counts = batch["labels"] != -100
    expected = (logits == batch["labels"])[counts].float().mean().item()

    class Flat(HuggingFaceTask):
        def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
            logits, labels = super().predictions_and_targets(outputs, batch)
            return logits.reshape(-1, 3), labels.reshape(-1)

    metric = MulticlassAccuracy(3, average="micro", ignore_index=-100)
    with Trainer(model, Flat({"accuracy": metric}, shifts_labels=False)) as trainer:
        assert trainer.evaluate([batch])["validation"]["accuracy"] == pytest.approx(expected)
    if kind == "sequences":
        with Trainer(model, metrics={"accuracy": metric}) as trainer:
            assert trainer.evaluate([batch])["validation"]["accuracy"] == pytest.approx(expected)


def test_a_model_without_a_loss_raises_an_error_that_says_what_the_batch_needs() -> None:
    with Trainer(hugging_face("causal"), None, [{"input_ids": torch.ones(1, 3, dtype=torch.long)}], optimizer=sgd) as trainer:
        with pytest.raises(ConfigError, match=r"the batch needs `labels` \(it has input_ids\)"):
            trainer.fit()


def label_tokens(kind: str, options: dict[str, Any], *, listens: bool = True) -> list[float | None]:
    """Return `train/label_tokens` of each record. Rank 0 has the first two of five rows, rank 1 the last three.

    Without `listens`, only rank 0 listens to the records.
    """
    batch = labelled(kind, rows=5)
    ranks = read_ranks()
    mine = slice(None) if ranks.world_size == 1 else slice(2, 5) if ranks.rank else slice(0, 2)
    data = [{name: value[mine] for name, value in batch.items()}] * 3
    history = History()
    callbacks = [history] if listens or not ranks.rank else []
    with Trainer(
        hugging_face(kind), None, data, optimizer=sgd, log_interval=1, callbacks=callbacks, shard_data=False, **options
    ) as trainer:
        trainer.fit("1ep")
    return [record.get("train/label_tokens") for _, record in history.records]


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}])
def test_labels_of_a_step_are_counted(options: dict[str, Any]) -> None:
    """After the shift, rows with 5, 4, 3, 2 and 1 labels count 4 + 3 + 2 + 1 labels."""
    assert label_tokens("causal", options) == [10.0, 10.0, 10.0]
    assert label_tokens("sequences", options) == [None, None, None]


@pytest.mark.test_all
def test_labels_of_all_ranks_are_counted() -> None:
    assert run_ranks(label_tokens, 2, "causal", {}) == [[10.0] * 3] * 2
    assert run_ranks(partial(label_tokens, listens=False), 2, "causal", {}) == [[10.0] * 3, []]
    assert label_tokens("causal", {"gradient_accumulation_steps": 3}) == [30.0]
