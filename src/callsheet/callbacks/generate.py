"""What a language model writes while it learns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from callsheet.callback import Callback, label_of
from callsheet.callbacks.continuations import Prompt, Prompts, written
from callsheet.context import Context
from callsheet.errors import ConfigError
from callsheet.time import Interval, Time, Timestamp, elapsed_fraction

logger = logging.getLogger("callsheet")


class Generate(Callback):
    """Have the model go on from a few prompts, regularly and when training ends, and give the loggers the table `generations`.

    Its columns are `prompt` and `continuation`, one row a prompt; with a `name` of its own the table is called by that. Once a step
    at most, and not when the run is to make way. The model is a Hugging Face model, or any with a method `generate(ids, ...)` that
    returns the ids with those that follow; of `max_new_tokens`, `do_sample`, `temperature`, `attention_mask`, ... it is given those
    that it takes.

    All ranks write the same, each for itself, and rank 0's is logged: nobody waits for another rank. Only where `fully_shard` has
    sharded the model, its weights are gathered by all ranks at every token, until the last has finished. What is compiled is the
    training alone.

    Weights, gradients, random states and the modules' modes are left as they were. What is drawn at random is drawn from the same
    seed every time: what differs between two tables is the weights. Training stands still meanwhile, and its speeds show it.

    Args:
        prompts: texts, or lists of token ids; with none there is nothing to do, which is said once.
        interval: how often, such as `"500ba"`, and when training ends; a whole number means batches; None is never.
        at_evaluation: also after each evaluation in training, while the model is still as it was evaluated (such as with an `EMA`).
        tokenizer: an object with `encode` and `decode`, or the name or folder of one that transformers loads; None takes the bytes
            of a text for ids, and the ids of a prompt for themselves.
        max_new_tokens: how far each prompt is continued.
        do_sample: draw each token; False takes the likeliest.
        temperature: of the drawing: below 1 likely tokens become likelier.
        batch_size: how many prompts, of equal length, are continued together.
        seed: of the drawing.
        options: passed to `model.generate` as they are.

    Raises:
        ConfigError: an argument that cannot work; where training starts, a model without `generate`, or a prompt without a token.
    """

    collective = True  # sharded, every forward is one
    # It does not set `draws_random`: the random states would be read at every step, and are wanted when it is time alone.

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
            raise ConfigError(f"prompts={prompts!r} is one text; give a list of them")
        if interval is None and not at_evaluation:
            raise ConfigError("interval=None without at_evaluation would never write; give one of them")
        if max_new_tokens < 1 or batch_size < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens}, batch_size={batch_size}: give at least one of each")
        if not temperature > 0:
            raise ConfigError(f"temperature={temperature}: give more than 0; do_sample=False takes the likeliest token")
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
        self._seen: Timestamp | None = None  # when it was last asked whether it is time
        self._drawn_at = -1
        self._is_training = self._is_leaving = False

    def on_run_start(self, ctx: Context) -> None:
        """Say so where there is nothing to do."""
        if not self._given:
            logger.warning("%s has no prompts, and writes nothing; give it prompts=", label_of(self))

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Forget an earlier run."""
        self._begin()

    def on_train_start(self, ctx: Context) -> None:
        """Check the model and the prompts, before any step is lost."""
        self._is_training = True
        self._seen = self._seen or ctx.state.timestamp
        if self._given and not callable(getattr(ctx.model, "generate", None)):
            label = label_of(self)
            raise ConfigError(f"{label}: {type(ctx.model).__name__} has no generate(); give it one, or leave {label} out")
        if self._given and self._prompts is None:
            self._prompts = Prompts(self._given, self._tokenizer)

    def on_train_step_end(self, ctx: Context) -> None:
        """Look whether an interval is over."""
        if self._interval is None or self._seen is None:
            return
        state, before = ctx.state, self._seen
        self._seen = state.timestamp
        if self._interval.is_due(before, state.timestamp, elapsed_fraction(before, state.max_duration), state.elapsed):
            self._draw(ctx)

    on_epoch_end = on_round_end = on_train_step_end

    def on_eval_all_end(self, ctx: Context) -> None:
        """Write with the weights that were evaluated."""
        if self._at_evaluation and self._is_training and not ctx.standalone:
            self._draw(ctx)

    def on_preempt(self, ctx: Context) -> None:
        """There is no time to lose."""
        self._is_leaving = True

    def on_train_end(self, ctx: Context) -> None:
        """Write with the last weights."""
        if self._interval is not None:
            self._draw(ctx)
        self._is_training = False

    def _draw(self, ctx: Context) -> None:
        if self._prompts is None or self._is_leaving or self._drawn_at == ctx.step:
            return
        self._drawn_at = ctx.step
        rows = written(
            ctx.model,
            self._prompts,
            ctx.run.device,
            world_size=ctx.run.world_size,
            seed=self._seed,
            batch_size=self._batch_size,
            words=self._words,
            options=self._options,
        )
        if ctx.run.is_world_process_zero:
            ctx.log_table(self.name or "generations", ["prompt", "continuation"], rows)

    def state_dict(self) -> Mapping[str, Any]:
        """When it last looked, and the last step at which it wrote."""
        return {"seen": self._seen.to_dict() if self._seen is not None else None, "drawn_at": self._drawn_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._seen = Timestamp.from_dict(state["seen"]) if state["seen"] is not None else None
        self._drawn_at = state["drawn_at"]
