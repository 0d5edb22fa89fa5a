"""A facade: the object that takes the place of the LightningModule for Lightning's callbacks in callsheet's loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.bridges.lightning.facades import LoggerFacade, OfGuest, TrainerFacade


class ModuleFacade(OfGuest):
    """Takes the place of the LightningModule for Lightning callbacks in callsheet's loop.

    Methods such as `parameters` are those of the model. For `isinstance`, the facade is a LightningModule that overrides no hook.
    """

    REPLACED_OBJECT = "a LightningModule"

    automatic_optimization = True
    example_input_array = None

    @property  # type: ignore[misc]  # `object.__class__` has a setter, and this property has none
    def __class__(self) -> Any:
        """The class LightningModule, so that the facade passes Lightning's `isinstance` checks for a LightningModule."""
        return self._guest.package.LightningModule

    @property
    def configure_model(self) -> Any:
        """LightningModule's own `configure_model`, so that Lightning does not consider this method overridden."""
        return self._inherited_method("configure_model")

    @property
    def optimizer_step(self) -> Any:
        """LightningModule's own `optimizer_step`, so that Lightning does not consider this method overridden."""
        return self._inherited_method("optimizer_step")

    @property
    def optimizer_zero_grad(self) -> Any:
        """LightningModule's own `optimizer_zero_grad`, so that Lightning does not consider this method overridden."""
        return self._inherited_method("optimizer_zero_grad")

    @property
    def configure_gradient_clipping(self) -> Any:
        """LightningModule's own `configure_gradient_clipping`, so that Lightning does not consider this method overridden."""
        return self._inherited_method("configure_gradient_clipping")

    def _inherited_method(self, name: str) -> Any:
        return getattr(self._guest.package.LightningModule, name).__get__(self)

    @property
    def trainer(self) -> TrainerFacade:
        """The object that represents Lightning's Trainer."""
        return self._guest.trainer

    _trainer = trainer

    @property
    def logger(self) -> LoggerFacade:
        """The only logger, which represents all of callsheet's loggers."""
        return self._guest.logger

    @property
    def current_epoch(self) -> int:
        """The index of the current epoch; see `TrainerFacade.current_epoch`."""
        return self._guest.trainer.current_epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps so far; see `TrainerFacade.global_step`."""
        return self._guest.trainer.global_step

    @property
    def global_rank(self) -> int:
        """The rank of this process; see `TrainerFacade.global_rank`."""
        return self._ctx.run.rank

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self._ctx.run.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's first parameter."""
        return next((parameter.dtype for parameter in self._model.parameters()), torch.get_default_dtype())

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._model.training

    @property
    def hparams(self) -> dict[str, Any]:
        """The run's settings."""
        return dict(self._ctx.run.config)

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **_: Any) -> None:
        """Log a number to `callback_metrics` as `<name>`, and (unless `logger=False`) to the next metrics record as `lightning/<name>`."""
        self._guest.log(name, value, prog_bar=prog_bar, logger=logger is not False)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several numbers by name; see `log`."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the run's optimizer."""
        return self._ctx.optimizer

    def lr_schedulers(self) -> Any:
        """Return the run's scheduler, or None."""
        return self._ctx.scheduler

    # --- the model itself ---

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._ctx.model
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        # Callbacks that average weights copy this object. They need only a copy of the model.
        return copy.deepcopy(self._model, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the model\'s parameters."""
        return self._model.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the model\'s parameters with their names."""
        return self._model.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Return the model\'s buffers."""
        return self._model.buffers(recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the model\'s buffers with their names."""
        return self._model.named_buffers(*args, **kwargs)

    def modules(self) -> Iterator[nn.Module]:
        """Return the model's modules."""
        return self._model.modules()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return the model's modules with their names."""
        named: Iterator[tuple[str, nn.Module]] = self._model.named_modules(*args, **kwargs)
        return named

    def children(self) -> Iterator[nn.Module]:
        """Return the model's child modules."""
        return self._model.children()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the model's child modules with their names."""
        return self._model.named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the model's state dict."""
        state: dict[str, Any] = self._model.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict into the model."""
        return self._model.load_state_dict(state_dict, strict=strict, assign=assign)
