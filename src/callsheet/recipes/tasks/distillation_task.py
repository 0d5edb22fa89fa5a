"""Distillation as a task: a model learns from the labels, and from a teacher's logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from callsheet.recipes.finetune import CausalTask
from callsheet.trainer.tasks import IGNORED_LABEL, Losses


class DistillationTask(CausalTask):
    """A task with the loss `mix * ce_loss + (1 - mix) * kd_loss`, computed from the labels and a teacher's logits.

    All three are means over the labeled tokens (Hinton, Vinyals and Dean 2015).

    `ce_loss` is the model's own loss, in nats. `kd_loss` is the Kullback-Leibler divergence KL(teacher || model),
    where the logits of both are divided by the temperature. It is multiplied by the square of the temperature, so that the size of
    its gradients does not depend on the temperature. In evaluation, `teacher_loss` is the teacher's cross entropy.

    Args:
        teacher: a causal language model over the same tokens.
        temperature: the temperature by which both logits are divided before the softmax.
        mix: the fraction of the loss that comes from the labels, from 0 to 1.
        vocabulary: the number of tokens. Additional logits, which some models have as padding, are ignored.
    """

    def __init__(self, teacher: nn.Module, *, temperature: float, mix: float, vocabulary: int) -> None:
        super().__init__()
        self.frozen_models = (teacher,)
        self._temperature, self._mix, self._vocabulary = temperature, mix, vocabulary

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs, with the teacher's logits as `teacher_logits`."""
        outputs = super().forward(model, batch)
        with torch.no_grad():
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            outputs["teacher_logits"] = super().forward(self.frozen_models[0], inputs).logits
        return outputs

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """Return the total loss and its parts by name."""
        own = super().loss(outputs, batch)
        assert isinstance(own, Tensor)  # a model of transformers returns a single tensor as its own loss
        labels = batch["labels"][:, 1:]  # no logits predict the first token, so leave it out
        says, teaches = (logits[:, :-1, : self._vocabulary].float() for logits in (outputs.logits, outputs.teacher_logits))
        says_softly, teaches_softly = (log_softmax(logits / self._temperature, dim=-1) for logits in (says, teaches))
        apart = kl_div(says_softly, teaches_softly, reduction="none", log_target=True).sum(-1)
        counts = labels != IGNORED_LABEL
        of_teacher = self._temperature**2 * apart.where(counts, 0.0).sum() / counts.sum().clamp(min=1)
        losses = {"loss": self._mix * own + (1 - self._mix) * of_teacher, "ce_loss": own, "kd_loss": of_teacher}
        if not torch.is_grad_enabled():
            sums = cross_entropy(teaches.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
            losses["teacher_loss"] = sums / counts.sum().clamp(min=1)
        return losses
