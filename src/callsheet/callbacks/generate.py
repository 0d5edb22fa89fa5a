"""Lets a language model write texts while it trains, and logs them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from callsheet.callbacks.support.continuations import Prompt, Prompts, generate_continuations
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.time import Interval, Time, Timestamp, elapsed_fraction
from callsheet.errors import ConfigError, NonFiniteError

logger = logging.getLogger("callsheet")


class Generate(Callback):
    """Let the model continue a few prompts, regularly and when training ends, and log the texts as the table `generations`.

    The columns are `prompt` and `continuation`, with one row per prompt. If the callback has a `name`, the table has that name.
    Texts are generated at most once per step, and not when the run is preempted. The model is a Hugging Face model, or any with a
    method `generate(ids, ...)` that returns the ids followed by their continuation. Only those of the arguments `max_new_tokens`,
    `do_sample`, `temperature`, `attention_mask`, ... that the method accepts are passed.

    Every rank generates the same texts by itself without waiting for other ranks, and those of rank 0 are logged. But if the
    model was sharded with `fully_shard`, all ranks gather its weights at every token, until the last rank has finished.
    Texts are generated with the uncompiled model, even if training uses a compiled one. If the model's outputs are NaN or
    infinite, no table is logged; a warning says so once, and training continues.

    Weights, gradients, random states and the modules' modes are left as they were. Sampling uses the same seed every time, so two
    tables differ only because of the weights. Training waits while texts are generated. The
    logged speed includes this time, except at evaluations.

    Args:
        prompts: texts, or lists of token ids; with none there is nothing to do, and a warning says so.
        interval: how often to generate, such as `"500ba"`, in addition to the end of training; a whole number means batches; None
            means never.
        at_evaluation: whether to generate also after each evaluation during training, with the weights that were evaluated (such
            as those of an `EMA`).
        tokenizer: an object with `encode` and `decode`, or the name or folder of a transformers tokenizer. None uses the bytes of
            a text as its ids; prompts that are ids are shown as ids.
        max_new_tokens: the maximum length of a continuation.
        do_sample: whether to sample each token; False chooses the most likely one.
        temperature: the temperature of the sampling; below 1, likely tokens become more likely.
        batch_size: how many prompts, of equal length, are continued together.
        seed: the seed of the sampling.
        options: further arguments of `model.generate`.

    Raises:
        ConfigError: an argument is invalid; or, when training starts, the model has no `generate`, or a prompt has no tokens.
    """

    collective = True  # all ranks must call the handlers, since a sharded model's forward pass runs collectives
    required_fields = ("model",)
    # `draws_random` is not set, because it makes the manager save and restore the random states at every step.
    # Only the function `generate_continuations` draws random numbers, and this function restores the random states itself.

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt] = (),
        interval: str | int | Time | None = "1ep",
        at_evaluation: bool = False,
        tokenizer: Any = None,
        max_new_tokens: int = 64,
        do_sample: bool = True,
        temperature: float = 1.0,
        batch_size: int = 8,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(prompts, str):
            raise ConfigError(f"prompts={prompts!r} is a single text; give a list of texts")
        if interval is None and not at_evaluation:
            raise ConfigError("interval=None without at_evaluation would never generate anything; give one of them")
        if max_new_tokens < 1 or batch_size < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens}, batch_size={batch_size}: give at least one of each")
        if not 0 < temperature < math.inf:
            raise ConfigError(
                f"temperature={temperature}: give a finite number above 0; do_sample=False takes the likeliest token"
            )
        self._given = list(prompts)
        self._tokenizer = tokenizer
        self._interval = Interval.of("interval", interval) if interval is not None else None
        self._at_evaluation = at_evaluation
        self._words: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": do_sample}
        if do_sample:
            self._words["temperature"] = temperature
        self._batch_size = batch_size
        self._seed = seed
        self._options = dict(options or {})
        self._begin()

    def _begin(self) -> None:
        self._prompts: Prompts | None = None
        self._seen: Timestamp | None = None  # the run's timestamp when the interval was last checked
        self._drawn_at = -1
        self._is_training = self._is_leaving = self._has_warned = False

    def on_run_start(self, ctx: Context) -> None:
        """Warn if there are no prompts."""
        if not self._given:
            logger.warning("%s has no prompts and generates nothing; give it prompts=", label_of(self))

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self._begin()

    def on_train_start(self, ctx: Context) -> None:
        """Check the model and the prompts before the first step."""
        self._is_training = True
        self._seen = self._seen or ctx.state.timestamp
        if self._given and not callable(getattr(ctx.model, "generate", None)):
            label = label_of(self)
            raise ConfigError(f"{label}: {type(ctx.model).__name__} has no generate(); give it one, or leave {label} out")
        if self._given and self._prompts is None:
            self._prompts = Prompts(self._given, self._tokenizer)

    def on_train_step_end(self, ctx: Context) -> None:
        """Generate texts if an interval (see the argument `interval`) has ended since the last check."""
        if self._interval is None or self._seen is None:
            return
        state, before = ctx.state, self._seen
        self._seen = state.timestamp
        if self._interval.is_due(before, state.timestamp, elapsed_fraction(before, state.max_duration), state.elapsed):
            self._draw(ctx)

    on_epoch_end = on_round_end = on_train_step_end

    def on_eval_all_end(self, ctx: Context) -> None:
        """Generate texts with the weights that were evaluated, if `at_evaluation` is True."""
        if self._at_evaluation and self._is_training and not ctx.standalone:
            self._draw(ctx)

    def on_preempt(self, ctx: Context) -> None:
        """Set a flag, so that no texts are generated at the end of training, because a preempted run has no time for them."""
        self._is_leaving = True

    def on_train_end(self, ctx: Context) -> None:
        """Generate texts with the final weights."""
        if self._interval is not None:
            self._draw(ctx)
        self._is_training = False

    def _draw(self, ctx: Context) -> None:
        if self._prompts is None or self._is_leaving or self._drawn_at == ctx.step:
            return
        self._drawn_at = ctx.step
        try:
            rows = generate_continuations(
                ctx.model,
                self._prompts,
                ctx.run.device,
                world_size=ctx.run.world_size,
                seed=self._seed,
                batch_size=self._batch_size,
                words=self._words,
                options=self._options,
            )
        except NonFiniteError as error:
            if ctx.run.is_world_process_zero and not self._has_warned:
                self._has_warned = True
                logger.warning("%s generates nothing at step %d: %s (this is said once)", label_of(self), ctx.step, error)
            return
        if ctx.run.is_world_process_zero:
            ctx.log_table(self.name or "generations", ["prompt", "continuation"], rows)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the timestamp at which the interval was last checked, and the last step at which texts were generated."""
        return {"seen": self._seen.to_dict() if self._seen is not None else None, "drawn_at": self._drawn_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = Timestamp.from_dict(state["seen"]) if state["seen"] is not None else None
        self._drawn_at = state["drawn_at"]
