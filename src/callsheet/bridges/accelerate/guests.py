"""Makes Accelerate's trackers usable as loggers of callsheet. Accelerate has no callbacks that could be wrapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy
from accelerate.tracking import GeneralTracker
from torch import Tensor

from callsheet.bridges.accelerate.internals import PACKAGE
from callsheet.bridges.guest_base import Guest
from callsheet.core.callback import Callback, Phase
from callsheet.core.context import Context
from callsheet.core.wrappers import Handler
from callsheet.loggers import Logger
from callsheet.loggers.support.pixels import as_pixels
from callsheet.loggers.support.tracker import flatten


def guest(tracker: Any, *, name: str = "", phase: Phase = "report", strict: bool = True) -> Callback:
    """Return a logger of callsheet that wraps a tracker of Accelerate: `guest(TensorBoardTracker("run", "logs"))`.

    The tracker may also be of a class of your own. It is started at the run's start and finished at the run's end. It receives
    the settings and every metrics record, and also images and tables, if it has methods for them.

    Args:
        tracker: an instance of `accelerate.tracking.GeneralTracker` that has not been started.
        name: the tracker's name in messages. Empty: the name of its class.
        phase: the tracker's place in the order of each event.
        strict: has no effect on a tracker.

    Raises:
        RegistrationError: `tracker` is not an instance of `GeneralTracker`.
    """
    return TrackerGuest(tracker, name=name, phase=phase, strict=strict)


class TrackerGuest(Guest, Logger):
    """The logger that `guest` returns: it passes what callsheet logs to a tracker of Accelerate.

    The arguments are those of `guest`; `foreign` is the tracker.
    """

    FRAMEWORK: ClassVar[str] = "Accelerate"
    PACKAGE = PACKAGE
    BASE: ClassVar[type | None] = GeneralTracker
    EVENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {"on_log": ("log",), "on_run_end": ("finish",)}
    OWN_HANDLERS: ClassVar[Mapping[str, str]] = {"on_run_start": "begin"}

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """Return a handler that calls `method`, which is the tracker's `log` or `finish`. Only `log` gets a metrics record's values and step."""
        if theirs == "log":
            return lambda ctx: method(ctx.record.values, step=ctx.record.step)
        return lambda ctx: method()

    def begin(self, ctx: Context) -> None:
        """Start the tracker when the run starts."""
        # Trackers of earlier Accelerate versions have no `start` method, because they start when they are created.
        if hasattr(self.foreign, "start"):
            self.foreign.start()

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Pass the run's settings to the tracker.

        Nested settings get dotted names, and lists become text, because most trackers accept nothing else.
        """
        plain = (bool, int, float, str)
        self.foreign.store_init_configuration(
            {name: value if isinstance(value, plain) else str(value) for name, value in flatten(values).items()}
        )

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Pass the images to the tracker as one array of shape (images, 3, height, width), as TensorBoard expects it.

        If the sizes of the images differ, pass one array for each image.
        """
        if hasattr(self.foreign, "log_images"):
            arrays = [numpy.moveaxis(as_pixels(image), 2, 0) for image in images]
            for group in [arrays] if len({array.shape for array in arrays}) == 1 else [[array] for array in arrays]:
                self.foreign.log_images({name: numpy.stack(group)}, step=ctx.step)

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Pass the table to the tracker, if it has a method `log_table`."""
        if hasattr(self.foreign, "log_table"):
            self.foreign.log_table(name, columns=list(columns), data=[list(row) for row in rows], step=ctx.step)


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return only those values that are a single number: an `int`, a `float` or a tensor with one element."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }
