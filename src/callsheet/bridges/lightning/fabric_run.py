"""Runs callsheet's callbacks in loops written with Lightning's Fabric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from callsheet.bridges.attached_run import AttachedRun
from callsheet.bridges.bare import attach
from callsheet.bridges.lightning.internals import PACKAGE
from callsheet.bridges.lightning.parts import Methods
from callsheet.bridges.versions import check_versions
from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager


@contextmanager
def fabric(
    loop: Any, *, model: Any, optimizer: Any, callbacks: CallbackManager | Callback | Iterable[Callback], **options: Any
) -> Iterator[AttachedRun]:
    """Attach callbacks to a Fabric loop: `with fabric(fabric_, model=model, optimizer=optimizer, callbacks=[...]) as run`.

    The loop has to iterate over `run.steps`. The loss is the one on which the loop calls `fabric.backward`, without the scale of
    a loss scaler. Values that the loop logs with `fabric.log` and `fabric.log_dict` are also in the metrics records, as
    `fabric/<name>`. In all other respects, `fabric` does the same as `callsheet.attach`.

    Args:
        loop: a `lightning.fabric.Fabric` whose `launch` was called.
        model, optimizer: the return values of `fabric.setup`. Callbacks see the objects inside these wrappers.
        callbacks: a manager, a callback, or any iterable of callbacks.
        options: more arguments of `callsheet.attach`, such as `gradient_accumulation_steps`, `max_duration`, `run_name`,
            `resume`.

    Yields:
        The run, whose `steps` the loop iterates over.

    Raises:
        ConfigError, NotSupported: as `callsheet.attach` does.
    """
    check_versions(PACKAGE)
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
