"""Megatron Bridge's API, implemented by callsheet: code written for it runs on callsheet after its import lines are changed.

`VALID_EVENTS`, `Callback`, `CallbackContext`, `CallbackManager`, `normalize_callbacks` and `should_fire` behave as in Megatron
Bridge. `pretrain`, `forward_step` and `qwen25_500m_pretrain_config` do not need Megatron Bridge to be installed.
"""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.megatron_bridge.names import (
        VALID_EVENTS,
        Callback,
        CallbackContext,
        CallbackManager,
        normalize_callbacks,
        should_fire,
    )
    from callsheet.compat.megatron_bridge.config import ConfigContainer, qwen25_500m_pretrain_config
    from callsheet.compat.megatron_bridge.gpt import forward_step
    from callsheet.compat.megatron_bridge.pretrain import pretrain

__all__ = [
    "VALID_EVENTS",
    "Callback",
    "CallbackContext",
    "CallbackManager",
    "ConfigContainer",
    "forward_step",
    "normalize_callbacks",
    "pretrain",
    "qwen25_500m_pretrain_config",
    "should_fire",
]
