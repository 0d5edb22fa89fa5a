"""Loops that are written with Lightning's Fabric: callbacks are attached, as to any loop written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from callsheet.bridges.bare import AttachedRun, attach
from callsheet.bridges.lightning.parts import Methods
from callsheet.callback import Callback
from callsheet.manager import CallbackManager


@contextmanager
def fabric(
    loop: Any, *, model: Any, optimizer: Any, callbacks: CallbackManager | Callback | Iterable[Callback], **options: Any
) -> Iterator[AttachedRun]:
    """Have a loop of Fabric's tell the lifecycle: `with fabric(fabric_, model=model, optimizer=optimizer, callbacks=[...]) as run`.

    The loss is heard from `fabric.backward`, with its scale taken off. What the loop logs with `fabric.log` and `fabric.log_dict` is also
    in the records, as `fabric/<name>`. For the rest it is `callsheet.attach`, whose `run.steps` hands out the batches.

    Args:
        loop: the `lightning.fabric.Fabric`, launched.
        model, optimizer: what `fabric.setup` has given; callbacks see what is inside of them.
        options: as `callsheet.attach` takes them, such as `gradient_accumulation_steps`, `max_duration`, `run_name`, `resume`.

    Raises:
        ConfigError, NotSupported: as `callsheet.attach` does.
    """
    attached = attach(
        model=getattr(model, "module", model),
        optimizer=getattr(optimizer, "optimizer", optimizer),
        callbacks=callbacks,
        scaler=getattr(loop.strategy.precision, "scaler", None),
        **options,
    )
    methods = Methods(loop)
    with attached as run:

        def logs(log: Any, metrics: Mapping[str, Any], step: int | None = None) -> None:
            try:
                run.log(
                    {
                        f"fabric/{name}": value.detach() if isinstance(value, torch.Tensor) else value
                        for name, value in metrics.items()
                    }
                )
            except Exception as error:
                run._give_up(error)
            log(metrics, step)

        methods.replace("log_dict", logs)
        try:
            yield run
        finally:
            methods.put_back()
