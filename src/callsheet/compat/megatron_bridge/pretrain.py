"""Megatron Bridge's function `pretrain`, implemented by callsheet's recipe `pretrain`.

The function takes Megatron Bridge's configuration, and fires the same events in the same order as Megatron Bridge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # missing in torch's annotations

from callsheet.bridges.megatron_bridge.guests import MegatronBridgeGuest
from callsheet.bridges.megatron_bridge.names import Callback, CallbackManager, normalize_callbacks
from callsheet.bridges.megatron_bridge.state import GlobalState
from callsheet.checkpoint import newest
from callsheet.compat.megatron_bridge.config import ConfigContainer
from callsheet.compat.megatron_bridge.gpt import GPTModel, as_recipe_step
from callsheet.compat.megatron_bridge.trackers import Trackers
from callsheet.core.callback import Callback as OwnCallback
from callsheet.core.context import Context
from callsheet.core.ranks import initialized_distributed, read_ranks
from callsheet.errors import ConfigError, NotSupported
from callsheet.recipes.data.byte_files import ByteFiles
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.pretrain import Pretrain, PretrainConfig
from callsheet.recipes.schedules import Warmup, WarmupCosine, WarmupLinear
from callsheet.trainer.precision import PrecisionName

logger = logging.getLogger("callsheet")

_NAMES = {
    "seed": "rng.seed",
    "batch_size": "train.global_batch_size / ranks",
    "microbatch_size": "train.micro_batch_size",
    "clip_grad_norm": "optimizer.clip_grad",
    "optimizer.betas": "optimizer.adam_beta1, adam_beta2",
    "optimizer.eps": "optimizer.adam_eps",
    "scheduler": "scheduler.lr_decay_style",
    "scheduler.total_steps": "scheduler.lr_decay_iters (by default train.train_iters)",
    "scheduler.warmup_steps": "scheduler.lr_warmup_iters",
    "scheduler.final": "optimizer.min_lr / optimizer.lr",
    "precision": "mixed_precision",
    "model.tokenizer": "tokenizer.tokenizer_model",
    "model.config": "model",
    "model.config.intermediate_size": "model.ffn_hidden_size",
    "model.config.num_hidden_layers": "model.num_layers",
    "model.config.num_key_value_heads": "model.num_query_groups",
    "model.config.max_position_embeddings": "model.seq_length",
    "model.config.rope_theta": "model.rotary_base",
    "model.config.rms_norm_eps": "model.layernorm_epsilon",
    "model.config.tie_word_embeddings": "model.share_embeddings_and_output_weights",
    "model.config.initializer_range": "model.init_method_std",
    "data": "dataset",
    "data.sequence_length": "model.seq_length",
    "data.validation_windows": "train.eval_iters * train.global_batch_size",
    "rows": "dataset.rows",
}
"""Megatron Bridge's names of the keys of callsheet's recipe. For a value that is converted, the name is the expression that gives it."""

PRECISIONS: dict[Any, PrecisionName] = {None: "fp32", "bf16_mixed": "bf16", "fp16_mixed": "fp16"}


def pretrain(
    config: ConfigContainer,
    forward_step_func: Callable[..., Any],
    callbacks: list[Callback] | CallbackManager | None = None,
) -> Pretrain:
    """Train, validate and test as `config` specifies, and call the callbacks as Megatron Bridge does.

    If a validation and a checkpoint are due after the same step, the validation runs first. After training come `on_train_end`,
    another validation, and the test. If there is only one process and no process group, a temporary process group is made, so that
    `torch.distributed.get_rank()` works.

    Args:
        config: see `qwen25_500m_pretrain_config`.
        forward_step_func: `forward_step`, or another function with the arguments `(state, data_iterator, model)` or
            `(data_iterator, model)`.
        callbacks: a list, or a manager.

    Returns:
        The recipe. Its attribute `trainer` is the trainer, and `evaluated` holds the losses of the last validation and of the test.
        Megatron Bridge returns nothing.

    Raises:
        NotSupported: a setting is not supported.
        ConfigError: two settings contradict each other.
        BaseException: the exception of a callback, unchanged; the callbacks after it are not called.
    """
    state = GlobalState(config)
    step = as_recipe_step(forward_step_func, state)
    job = job_of(config)
    trackers = Trackers(config, state)
    is_alone = initialized_distributed() is None and read_ranks().world_size == 1
    try:
        if is_alone:
            distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        guest = MegatronBridgeGuest(normalize_callbacks(callbacks) or CallbackManager(), state=state)
        recipe = BridgePretrain(job, [guest, _Plan(config, state), trackers], forward_step=step)
        recipe.state = state
        recipe.setup()
        with recipe.trainer:
            _run(recipe, config, state)
        return recipe
    finally:
        trackers.close()
        if is_alone and initialized_distributed() is not None:
            distributed.destroy_process_group()


def _run(recipe: Pretrain, config: ConfigContainer, state: GlobalState) -> None:
    trainer = recipe.trainer
    if state.train_state.do_train and not trainer.state.is_complete:
        trainer.fit()
        if trainer.preempted:
            return
    if state.train_state.do_valid:
        recipe.evaluated = dict(trainer.evaluate())
    if state.train_state.do_test and (test := recipe.test_data()) is not None:
        recipe.evaluated["test"] = trainer.test(test)


class BridgePretrain(Pretrain):
    """callsheet's recipe `pretrain`, with a model that has the call signature of Megatron's `GPTModel`."""

    new_run_hint = "checkpoint.load=None sets the run aside and starts a new one; another checkpoint.save starts one beside it"
    setting_names = _NAMES
    state: GlobalState

    def make_model(self) -> nn.Module:
        model = GPTModel(super().make_model())
        size = sum(parameter.numel() for parameter in model.parameters())
        length = (self.config.rows or self.config.data).sequence_length
        # FLOPs per sample for forward and backward pass: 6 per parameter and token (Kaplan et al. 2020).
        self.state.train_state.__dict__["flops_per_sample"] = 6.0 * size * length
        self.state.__dict__["tokenizer"] = self.tokenizer
        return model


class _Plan(OwnCallback):
    """A callback that requests the configured validations and checkpoints, and starts and stops Megatron's timers."""

    phase = "save"

    def __init__(self, config: ConfigContainer, state: GlobalState) -> None:
        train, checkpoint = config.train, config.checkpoint
        self._eval_interval = train.eval_interval if train.eval_iters else None
        # As in Megatron, an interval of 0 means no checkpoints, and None only a final one.
        self._saves = checkpoint.save is not None and checkpoint.save_interval != 0
        self._save_interval = checkpoint.save_interval
        self._timers, self._progress = state.timers, state.train_state
        state.train_state.__dict__.update(
            do_train=not train.skip_train and train.train_iters > 0, do_valid=train.eval_iters > 0, do_test=train.eval_iters > 0
        )

    def on_train_start(self, ctx: Context) -> None:
        self._timers("interval-time").start()

    def on_train_step_end(self, ctx: Context) -> None:
        if self._eval_interval and ctx.step % self._eval_interval == 0 and self._progress.do_valid:
            ctx.control.evaluate("eval_interval", replicated=True)

    def on_eval_all_start(self, ctx: Context) -> None:
        self._timers("interval-time").stop()
        self._timers("eval-time").start()

    def on_eval_all_end(self, ctx: Context) -> None:
        self._timers("eval-time").stop()
        if not ctx.standalone:
            self._timers("interval-time").start()

    def on_checkpoint_due(self, ctx: Context) -> None:
        if not self._saves or ctx.boundary != "step":
            return
        if ctx.state.is_complete or ctx.control.stop_requested is not None:
            ctx.control.save("training is over", kind="final", replicated=True)
        elif self._save_interval and ctx.step % self._save_interval == 0:
            ctx.control.save("save_interval", kind="periodic", replicated=True)

    def on_train_end(self, ctx: Context) -> None:
        self._timers("interval-time").stop()


def job_of(config: ConfigContainer) -> PretrainConfig:
    """Convert Megatron Bridge's `config` to the configuration of callsheet's recipe `pretrain`.

    Raises:
        NotSupported: a parallel size other than 1, `sequence_parallel`, a `blend`, an unknown precision or schedule.
        ConfigError: the global batch size is no multiple of the microbatch size times the number of ranks.
    """
    model, train, dataset, optimizer = config.model, config.train, config.dataset, config.optimizer
    ranks = read_ranks().world_size
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if getattr(model, name) != 1:
            raise NotSupported(f"model.{name}={getattr(model, name)}: here ranks share the data alone; leave it at 1")
    if model.sequence_parallel:
        raise NotSupported("model.sequence_parallel: here ranks share the data alone; leave it off")
    if dataset.blend is not None:
        raise NotSupported("dataset.blend: Megatron's indexed files are not read here; give dataset.folder, or dataset.rows")
    if config.mixed_precision not in PRECISIONS:
        raise NotSupported(f"mixed_precision={config.mixed_precision!r}: here it is one of {', '.join(map(str, PRECISIONS))}")
    if train.global_batch_size % (train.micro_batch_size * ranks):
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size} does not divide into microbatches of {train.micro_batch_size} on {ranks} rank(s)"
        )
    runs_folder, run_name = _place(config.checkpoint.save)
    return PretrainConfig(
        runs_folder=runs_folder,
        run_name=run_name,
        resume=_resume(config.checkpoint.load, Path(runs_folder) / run_name),
        seed=config.rng.seed,
        max_duration=f"{train.train_iters or 1}ba",  # if `train_iters` is 0, `do_train` is False, and nothing is trained
        eval_interval=None,
        log_interval=config.logger.log_interval,
        stop_on_nan=False,  # leave out callsheet's NaNMonitor, because Megatron Bridge does not have it
        batch_size=train.global_batch_size // ranks,
        microbatch_size=train.micro_batch_size,
        clip_grad_norm=optimizer.clip_grad or None,
        optimizer=partial(
            torch.optim.AdamW,
            lr=optimizer.lr,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            weight_decay=optimizer.weight_decay,
        ),
        scheduler=_scheduler(config),
        precision=PRECISIONS[config.mixed_precision],
        save_in_background=config.checkpoint.async_save,
        workers=dataset.num_workers,
        model=LanguageModel(config=_architecture(config), tokenizer=config.tokenizer.tokenizer_model),
        data=ByteFiles(
            folder=dataset.folder,
            pattern=dataset.pattern,
            sequence_length=model.seq_length,
            validation_windows=max(1, train.eval_iters * train.global_batch_size),
        ),
        rows=dataset.rows,
        prompts=[],
    )


def _architecture(config: ConfigContainer) -> dict[str, Any]:
    model = config.model
    return {
        "model_type": "qwen2",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "max_position_embeddings": max(model.seq_length, 32768),
        "rope_theta": model.rotary_base,
        "rms_norm_eps": model.layernorm_epsilon,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "initializer_range": model.init_method_std,
        "use_cache": False,
    }


def _scheduler(config: ConfigContainer) -> Any:
    scheduler, optimizer = config.scheduler, config.optimizer
    length = scheduler.lr_decay_iters or config.train.train_iters or 1
    warmup = min(scheduler.lr_warmup_iters, length - 1)
    if warmup < scheduler.lr_warmup_iters:
        logger.warning("scheduler.lr_warmup_iters=%d in a run of %d: it is %d here", scheduler.lr_warmup_iters, length, warmup)
    falls = {"cosine": WarmupCosine, "linear": WarmupLinear}
    if scheduler.lr_decay_style in falls:
        return partial(
            falls[scheduler.lr_decay_style], total_steps=length, warmup_steps=warmup, final=optimizer.min_lr / optimizer.lr
        )
    if scheduler.lr_decay_style != "constant":
        raise NotSupported(f"scheduler.lr_decay_style={scheduler.lr_decay_style!r}: here it is one of cosine, linear, constant")
    return partial(Warmup, warmup_steps=warmup)


def _place(save: str | None) -> tuple[str, str]:
    """Split Megatron's path `save` into the parent folder and the run's name. A final `checkpoints` in the path is left out."""
    folder = Path(save if save is not None else "nemo_experiments/default")
    folder = folder.parent if folder.name == "checkpoints" else folder
    return str(folder.parent), folder.name


def _resume(load: str | None, folder: Path) -> str:
    """Convert `load`, Megatron's path to resume from, to the recipe's `resume` option (`new`, `auto` or a checkpoint's path)."""
    if load is None:
        return "new"
    if Path(load).absolute() in (folder.absolute(), (folder / "checkpoints").absolute()):
        return "auto"
    found = newest(Path(load) / "checkpoints") or newest(load)
    if found is None:
        logger.warning("checkpoint.load: there is no checkpoint in %s; training begins from the start", load)
        return "new"
    return str(found.path)
