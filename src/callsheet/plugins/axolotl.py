"""The plugin for axolotl. It adds callsheet's callbacks to a training that axolotl's YAML file configures."""

from __future__ import annotations

from typing import Any

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel

    from callsheet.bridges.huggingface import HuggingFaceHost
    from callsheet.plugins.hosts import host_of


class Settings(BaseModel):
    """The keys that the plugin adds to axolotl's configuration."""

    callsheet_callbacks: str | None = None
    """A YAML file that lists the callbacks, as for `callsheet exec`. None: the default callbacks, which only observe."""


class CallsheetPlugin(BasePlugin):  # type: ignore[misc]  # axolotl's types are not read
    """Adds callsheet's callbacks to axolotl's trainer.

    Add these lines to axolotl's configuration. Leave out the last line to use the default callbacks:

        plugins:
          - callsheet.plugins.axolotl.CallsheetPlugin
        callsheet_callbacks: callbacks.yaml
    """

    def get_input_args(self) -> str:
        """Return the import path of `Settings`, the class of the configuration keys that the plugin adds."""
        return f"{__name__}.Settings"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[HuggingFaceHost]:
        """Return the callbacks that Axolotl adds to its trainer: one Hugging Face callback, which runs callsheet's callbacks."""
        return [host_of(cfg.callsheet_callbacks)]
