"""`composer.models.HuggingFaceModel`: wraps a model of the library transformers as a ComposerModel."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from callsheet.compat.composer.models import ComposerModel
from callsheet.compat.composer.rejections import reject
from callsheet.errors import ConfigError, NotSupported


class HuggingFaceModel(ComposerModel):
    """Makes a ComposerModel from a model of the library transformers. Batches are dictionaries, with `labels` for the loss.

    Args:
        metrics: torchmetrics for training, and for evaluation unless `eval_metrics` are given.
        use_logits: whether the metrics get the logits and the labels; otherwise they get the model's outputs.
        shift_labels: whether the labels are shifted by one for the metrics. None: they are shifted if the model is a causal
            language model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        use_logits: bool | None = False,
        metrics: Sequence[Any] | None = None,
        eval_metrics: Sequence[Any] | None = None,
        shift_labels: bool | None = None,
        allow_embedding_resizing: bool = False,
        peft_config: Any = None,
        should_save_peft_only: bool = True,
    ) -> None:
        super().__init__()
        reject(
            "HuggingFaceModel",
            {
                "peft_config": (peft_config, None, "give the model as peft.get_peft_model(model, peft_config) returns it"),
                "should_save_peft_only": (
                    should_save_peft_only,
                    True,
                    "a checkpoint has all weights that the Trainer saves; leave it out",
                ),
            },
        )
        self.model: nn.Module = model
        self.config: Any = model.config
        self.tokenizer = tokenizer
        self.use_logits = bool(use_logits)
        self.labels: Tensor | None = None
        self.train_metrics = _by_name(metrics)
        self.val_metrics = _by_name(eval_metrics) if eval_metrics is not None else copy.deepcopy(self.train_metrics)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.model_forward_args = set(inspect.signature(inner.forward).parameters)
        self.shift_labels = _is_causal(inner) if shift_labels is None else shift_labels
        if tokenizer is not None and self.config.vocab_size < len(tokenizer):
            if not allow_embedding_resizing:
                raise ConfigError(
                    f"The number of tokens in the tokenizer is greater than the number of tokens in the model ({len(tokenizer)} and "
                    f"{self.config.vocab_size}): call model.resize_token_embeddings(len(tokenizer)) first, or pass allow_embedding_resizing=True"
                )
            model.resize_token_embeddings(len(tokenizer))

    def forward(self, batch: Any) -> Any:
        """Call the model with those entries of the batch that the model accepts."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                "Unexpected batch type. Expected a dictionary with keys corresponding to the inputs to the forward function of the Huggingface "
                f"model, not {type(batch).__name__}"
            )
        return self.model(**{name: value for name, value in batch.items() if name in self.model_forward_args})

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return the loss that the model computed itself."""
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        if loss is None:
            raise ConfigError(f"the model computed no loss: the batch needs 'labels' (it has {', '.join(map(str, batch))})")
        return loss

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the values with which metrics are updated: the logits if `use_logits` is set, otherwise all outputs."""
        if batch.get("mode") is not None:
            raise NotSupported(
                f"a batch with mode={batch['mode']!r} is not supported, unlike in Composer: generate in a callback, such as callsheet.callbacks.Generate"
            )
        if not self.use_logits:
            return self(batch) if outputs is None else outputs
        labels: Tensor = batch["labels"]
        if outputs is None:
            outputs = self(batch)
        if self.shift_labels:
            labels = labels.roll(-1, dims=1)
            labels[:, -1] = -100
        self.labels = labels
        logits: Tensor = outputs["logits"] if isinstance(outputs, Mapping) else next(each for each in outputs if each.dim() > 0)
        return logits.squeeze(1) if logits.dim() == 2 and logits.shape[1] == 1 else logits

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        """Return a dict of torchmetrics by class name: those for training if `is_train`, otherwise those for evaluation."""
        return (self.train_metrics if is_train else self.val_metrics) or {}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Update a metric with the model's outputs and the batch's labels."""
        labels = self.labels
        if labels is not None and metric.device.type == "cpu":
            labels = labels.cpu()
        if getattr(metric, "needs_batch", False):
            metric.update(batch=batch, outputs=outputs, labels=labels)
        else:
            metric.update(outputs, labels)

    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        """Generate text with the model. Shorter texts are padded with the tokenizer's padding token."""
        if self.tokenizer is not None:
            options.setdefault("pad_token_id", self.tokenizer.pad_token_id)
        model: Any = self.model
        return model.generate(input_ids=input_ids, **options)

    @staticmethod
    def hf_from_composer_checkpoint(*args: Any, **options: Any) -> NoReturn:
        """Raise NotSupported, because this method of Composer reads Composer's format, and callsheet's checkpoints have another format."""
        raise NotSupported(
            "HuggingFaceModel.hf_from_composer_checkpoint() is not supported, unlike in Composer: make the model from its configuration, and give "
            "the checkpoint to Trainer(load_path=...)"
        )


def _by_name(metrics: Sequence[Any] | None) -> dict[str, Any] | None:
    return None if metrics is None else {type(metric).__name__: metric for metric in metrics}


def _is_causal(model: Any) -> bool:
    """Return whether transformers' list of causal language models has the model's class or one of the class's bases."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(kind.__name__ in names for kind in type(model).__mro__)
