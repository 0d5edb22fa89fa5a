"""Callbacks in the style of Megatron Bridge. Only the import lines differ from Megatron Bridge's.

    python examples/megatron_bridge_style.py [FOLDER]

It trains a tiny model with Qwen's architecture on the source of Python's standard library, for a few seconds on a CPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from callsheet.compat.megatron_bridge import (
    Callback,
    CallbackContext,
    CallbackManager,
    ConfigContainer,
    forward_step,
    pretrain,
    qwen25_500m_pretrain_config,
)


class Clock(Callback):
    """Count the steps, and print how long training took."""

    def on_train_start(self, context: CallbackContext) -> None:
        context.user_state["began"] = time.perf_counter()

    def on_train_step_end(self, context: CallbackContext) -> None:
        context.user_state["steps"] = context.user_state.get("steps", 0) + 1

    def on_train_end(self, context: CallbackContext) -> None:
        seconds = time.perf_counter() - context.user_state["began"]
        print(f"{context.user_state['steps']} steps in {seconds:.1f} s")


def show_loss(context: CallbackContext) -> None:
    step = context.state.train_state.step + 1  # it is incremented after this event
    if context.loss_dict and step % context.state.cfg.logger.log_interval == 0:
        print(f"step {step}: lm loss {context.loss_dict['lm loss']:.3f}, gradient norm {context.grad_norm:.3f}")


def small(folder: Path) -> ConfigContainer:
    """Return the configuration of Qwen 2.5, made small enough to train on a CPU."""
    config = qwen25_500m_pretrain_config()
    config.model.num_layers, config.model.hidden_size, config.model.ffn_hidden_size = 1, 32, 64
    config.model.num_attention_heads, config.model.num_query_groups = 4, 2
    config.model.seq_length, config.model.vocab_size = 32, 300
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 20, 8, 4
    config.train.eval_interval, config.train.eval_iters = 10, 2
    config.optimizer.lr, config.optimizer.min_lr = 1e-2, 1e-3
    config.scheduler.lr_warmup_iters = 5
    config.checkpoint.save = config.checkpoint.load = str(folder / "checkpoints")
    config.checkpoint.save_interval = 10
    config.mixed_precision, config.logger.log_interval = None, 5
    return config


manager = CallbackManager()
manager.add(Clock())
manager.register("on_train_step_end", show_loss)
manager.register("on_eval_end", lambda context: print(f"validation: {context.total_loss_dict['lm loss']:.3f}"))  # type: ignore[index]  # set here
manager.register("on_checkpoint_save", lambda context: print(f"saved step {context.state.train_state.step}"))
pretrain(small(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/megatron-bridge-style")), forward_step, callbacks=manager)
