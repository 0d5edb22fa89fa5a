"""Logging to Weights & Biases."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from callsheet.core.callback import one_of
from callsheet.core.context import Context
from callsheet.core.lane_options import LaneOptions
from callsheet.core.run_state import Outcome
from callsheet.errors import ConfigError
from callsheet.loggers.support.pixels import as_pixels
from callsheet.loggers.support.tracker import Opened, Tracker, check_no_secret, plain, unflatten

Mode = Literal["online", "offline", "shared", "disabled"]
_MODES: tuple[Mode, ...] = get_args(Mode)
_SECRET_SETTINGS = {"api_key", "x_extra_http_headers", "x_stats_open_metrics_http_headers"}
# W&B shows the exit code 255 as "killed".
_EXIT_CODES = {Outcome.PREEMPTED: 143, Outcome.INTERRUPTED: 255, Outcome.FAILED: 1}


class WandBLogger(Tracker):
    """Log metrics records, hyperparameters, images, tables and files to Weights & Biases. Metrics are plotted over `step`.

    All calls of W&B are made from a background thread (a lane), so training does not wait for them, and `wandb.run` exists
    shortly after training has begun. The end of the run takes at most 5 seconds more than `timeout`.

    A resume continues the same W&B run; if the run is offline, `wandb sync` joins the parts. Steps that are trained again appear
    twice, because W&B numbers its rows itself. NaN and infinite values are sent unchanged. If `wandb.run` is a run that no logger
    opened, the logger uses it and leaves it open. The run's summary has `outcome`, and `exception` if there was one; W&B shows
    the run as finished, failed, killed (interrupted) or preempted. W&B reads the API key from its usual places: `WANDB_API_KEY`,
    or what `wandb login` wrote.

    Args:
        project, entity, group, job_type, tags: the run's place in W&B; None leaves it to W&B's own settings.
        run_name: the name in W&B; None means the run's name.
        mode: `online`, `offline`, `shared` or `disabled`; None: `WANDB_MODE`, or online.
        folder: where W&B writes its folder `wandb`; None means `WANDB_DIR`, or else the run's folder.
        timeout: seconds to wait for the server when the run is opened, and to upload the rest when it ends. What is not uploaded in time
            stays in the folder, for `wandb sync`. `WANDB_INIT_TIMEOUT`, `WANDB_LOGIN_TIMEOUT` and `WANDB_FINISH_TIMEOUT` override
            `timeout`.
        settings: further fields of `wandb.Settings`, by name, such as `{"console": "off"}`.

    Raises:
        ConfigError: the mode is unknown, the timeout is not above zero, or the settings contain a secret.
        MissingPackage: wandb is not installed.
    """

    package = "wandb"
    extra = "wandb"
    writes_to_run_folder = True

    def __init__(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        run_name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] = (),
        mode: Mode | None = None,
        folder: str | Path | None = None,
        timeout: float = 60.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if mode is not None:
            one_of("mode", mode, _MODES)
        if not timeout > 0:
            raise ConfigError(f"timeout={timeout!r} must be above zero, because W&B treats 0 as no limit")
        if secret := _SECRET_SETTINGS & (settings or {}).keys():
            raise ConfigError(
                f"{secret.pop()} is a secret, and options are written to the run's folder; set it in the environment"
            )
        for name, value in (settings or {}).items():
            if isinstance(value, str):
                check_no_secret(f"settings[{name!r}]", value, f"WANDB_{name.upper()} in the environment")
        super().__init__()
        self.run: Any = None  # the open W&B run; None if there is none
        self.timeout = timeout
        self.lane_options = LaneOptions(deadline=timeout + 5.0)
        self.folder = Path(folder) if folder is not None else None
        self.settings = dict(settings or {})
        self.run_name = run_name
        self._where = {"project": project, "entity": entity, "group": group, "job_type": job_type, "mode": mode}
        self._tags = list(tags)
        self._defined: set[str] = set()  # names of metrics that were defined in W&B with `step` as the x-axis
        self._hyperparameters: dict[str, Any] = {}  # hyperparameters logged so far, by dotted name

    def on_preempt(self, ctx: Context) -> None:
        """Mark the W&B run as preempted at once, because the process may be killed soon."""
        if self.is_open and self._is_ours:
            self.run.mark_preempting()

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table to W&B, which shows the latest table of each name."""
        if self.is_open:
            cells = [[plain(cell) for cell in row] for row in rows]
            table = self._module().Table(columns=list(columns), data=cells, allow_mixed_types=True)
            self.run.log({name: table, "step": ctx.step})

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Log images to W&B, which shows them side by side."""
        if self.is_open:
            image = self._module().Image
            self.run.log({name: [image(as_pixels(each)) for each in images], "step": ctx.step})

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """Upload the file to W&B in the background, with its present content."""
        if self.is_open:
            path, parts = path.absolute(), Path(name).parts
            base = path.parents[len(parts) - 1] if path.parts[-len(parts) :] == parts else path.parent
            self.run.save(glob.escape(str(path)), base_path=base, policy="now")

    # --- methods of the base class `Tracker` that a logger must implement ---

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        wandb = self._module()
        is_ours = wandb.run is None or wandb.run.id in self._opened
        self.run = self._begin(ctx, run_id) if is_ours else wandb.run
        if is_ours:
            self.run.define_metric("*", step_metric="step")
        self._hyperparameters = {}
        self._defined = {"*"} if is_ours else set()
        return Opened(self.run.id, is_ours)

    def _begin(self, ctx: Context, run_id: str | None) -> Any:
        wandb = self._module()
        folder = self.folder or (ctx.run.folder if "WANDB_DIR" not in os.environ else None)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)  # if this folder does not exist, W&B writes to another one
        waits = {f"{what}_timeout": self.timeout for what in ("init", "login", "finish")}
        settings = {name: value for name, value in waits.items() if f"WANDB_{name.upper()}" not in os.environ} | self.settings
        hook = sys.excepthook
        try:
            return self._init(wandb, ctx, folder, run_id, settings)
        finally:
            sys.excepthook = hook  # remove W&B's hook that detects failures, because this logger itself reports the outcome

    def _init(self, wandb: Any, ctx: Context, folder: Path | None, run_id: str | None, settings: Mapping[str, Any]) -> Any:
        return wandb.init(
            **self._where,
            dir=folder,
            name=self.run_name or ctx.run.name,
            tags=self._tags or None,
            id=run_id,
            resume="allow" if run_id is not None else None,
            # If another run is active, such as that of another logger, create a separate run.
            reinit="create_new" if wandb.setup().most_recent_active_run is not None else None,
            settings=wandb.Settings(**settings),
        )

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        if not self._is_ours:  # the user's program opened the W&B run: set the x-axis of this logger's metrics only
            for name in values.keys() - self._defined:
                self.run.define_metric(name, step_metric="step")
                self._defined.add(name)
        self.run.log({**values, "step": ctx.record.step})

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        self._hyperparameters |= values
        self.run.config.update(unflatten(self._hyperparameters), allow_val_change=True)

    def _fail(self, ctx: Context, error: str) -> None:
        self.run.summary["exception"] = error

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        run, self.run = self.run, None
        run.summary["outcome"] = outcome.value
        run.finish(exit_code=_EXIT_CODES.get(outcome, 0))
