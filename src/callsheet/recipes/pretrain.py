"""Pretraining: a small Llama-shaped language model on bytes, from nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from callsheet.callback import Callback
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.manager import CallbackManager, normalize_callbacks
from callsheet.recipes.byte_files import ByteFiles
from callsheet.time import TimeUnit
from callsheet.trainer import Trainer
from callsheet.trainer.arguments import duration, interval, positive
from callsheet.trainer.checkpoints import AUTO

logger = logging.getLogger("callsheet")

BYTES = 256  # the vocabulary
_MAY_CHANGE = frozenset(
    {
        "resume",
        "max_duration",
        "eval_interval",
        "log_interval",
        "threads",
        "prompts",
        "generated_bytes",
        "callbacks",
        "loggers",
        "runs_folder",
    }
    | {"recipe", "config"}
)
"""Keys that a run may go on with under other values: they do not change what is trained on what."""


@dataclass
class LlamaShape:
    """The shape of the model; a transformers `LlamaConfig` is made of it, and no weights are downloaded.

    Args:
        hidden_size: width of the residual stream.
        layers: how many blocks.
        heads: attention heads; they divide `hidden_size`.
        intermediate_size: width of the feed-forward layers.
    """

    hidden_size: int = 192
    layers: int = 4
    heads: int = 6
    intermediate_size: int = 512

    def build(self, longest: int) -> Any:
        """A model with random weights, for sequences of up to `longest` bytes."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=BYTES,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=longest,
            tie_word_embeddings=True,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        return LlamaForCausalLM(config)


@dataclass
class AdamWWithWarmup:
    """AdamW, with a learning rate that rises in a straight line and then stays.

    Args:
        learning_rate: after the warm-up.
        warmup_steps: how many steps it takes to get there.
        weight_decay: on every parameter.
    """

    learning_rate: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01

    def optimizer(self, parameters: list[torch.nn.Parameter]) -> Optimizer:
        """The optimizer, over these parameters."""
        return AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """The scheduler, stepped after every optimizer step."""
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, self.warmup_steps)))


@dataclass
class PretrainConfig:
    """What the recipe is made of.

    Args:
        run_name: of the run, and of its folder in `runs_folder`.
        runs_folder: where the folders of runs stand.
        resume: `auto` goes on with the run of this name, if there is one; `new` sets its folder aside and starts anew; or a checkpoint's path.
        seed: of the weights, the order of the data, and the generated text.
        max_duration: how long to train, such as `75s`, `1000ba` or `2ep`.
        eval_interval: how often to evaluate; also at the end.
        log_interval: how often to make a record, in batches.
        batch_size: sequences a step.
        microbatch_size: sequences a forward and backward; None is the whole batch.
        clip_grad_norm: the gradient norm above which gradients are scaled down.
        threads: of torch on the CPU; None leaves it to torch.
        prompts: what the trained model is asked to continue.
        generated_bytes: how far.
    """

    run_name: str = "pretrain"
    runs_folder: str = "runs"
    resume: str = "auto"
    seed: int = 17
    max_duration: str = "75s"
    eval_interval: str = "200ba"
    log_interval: int = 10
    batch_size: int = 16
    microbatch_size: int | None = None
    clip_grad_norm: float | None = 1.0
    threads: int | None = None
    model: LlamaShape = field(default_factory=LlamaShape)
    data: ByteFiles = field(default_factory=ByteFiles)
    optimizer: AdamWWithWarmup = field(default_factory=AdamWWithWarmup)
    prompts: list[str] = field(default_factory=lambda: ["def ", "import ", "class "])
    generated_bytes: int = 160

    def __post_init__(self) -> None:
        if not all(self.prompts):
            raise ConfigError("prompts: a prompt needs at least one character")
        duration(self.max_duration, None)
        interval("eval_interval", self.eval_interval, TimeUnit.EPOCH)
        for name in ("log_interval", "batch_size", "microbatch_size", "generated_bytes", "threads"):
            positive(name, getattr(self, name), int)


class Pretrain:
    """Pretraining: a small Llama-shaped language model on bytes, from nothing.

    `setup()` makes everything and finds out what there is to resume; `run()` trains, evaluates and generates; `report()` says what
    came of it.

    Args:
        config: what the job is made of.
        callbacks: a manager, a callback, or any iterable of callbacks.
        loggers: more callbacks, told after the others.
        resolved: the whole configuration as YAML, for the run's folder.
    """

    Config: ClassVar[type[PretrainConfig]] = PretrainConfig

    def __init__(
        self,
        config: PretrainConfig | None = None,
        callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
        loggers: Iterable[Callback] = (),
        *,
        resolved: str = "",
    ) -> None:
        self.config = config or PretrainConfig()
        self.callbacks = normalize_callbacks(callbacks) or CallbackManager()
        self.callbacks.add(loggers)
        self.resolved = resolved
        self.results: dict[str, float] = {}
        self.generations: list[list[str]] = []
        self.trainer: Trainer
        self._aside: Path | None = None

    def setup(self) -> None:
        """Make the model, the data and the trainer; a run that is there already is resumed or set aside."""
        config = self.config
        folder = Path(config.runs_folder) / config.run_name
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        model = config.model.build(config.data.sequence_length + config.generated_bytes)
        _ = config.data.files  # what cannot work should fail before the earlier run is touched
        resume = None if config.resume == "new" else config.resume
        if resume == AUTO and not find_checkpoints(folder / "checkpoints").checkpoints:
            resume = None  # there is nothing to go on from, or only half a record of it
        if resume is None:
            self._aside = set_aside(folder)
        elif resume == AUTO:
            self._refuse_another_job(folder / "config.yaml")
        try:
            self.trainer = self._trainer(model, resume)
        except BaseException:
            if self._aside is not None and not folder.exists():
                self._aside.rename(folder)
                logger.info("the run in %s is there again", folder)
            raise
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "call_sheet.txt").write_text(f"{self.callbacks.call_sheet()}\n")
        if self.resolved:
            (folder / "config.yaml").write_text(self.resolved)

    def _trainer(self, model: Any, resume: str | None) -> Trainer:
        config = self.config
        return Trainer(
            model,
            train_dataloader=lambda: config.data.train_dataloader(config.batch_size),
            eval_dataloader=lambda: config.data.validation_dataloader(config.batch_size),
            optimizer=config.optimizer.optimizer,
            scheduler=config.optimizer.scheduler,
            max_duration=config.max_duration,
            microbatch_size=config.microbatch_size,
            clip_grad_norm=config.clip_grad_norm,
            eval_interval=config.eval_interval,
            log_interval=config.log_interval,
            callbacks=self.callbacks,
            run_name=config.run_name,
            runs_folder=config.runs_folder,
            resume=resume,
            seed=config.seed,
            config=asdict(config),
        )

    def _refuse_another_job(self, path: Path) -> None:
        """Going on with a run means going on with its model, data and optimizer: half of one job and half of another is neither."""
        if not self.resolved or not path.exists():
            return
        before, now = yaml.safe_load(path.read_text()), yaml.safe_load(self.resolved)
        changed = sorted(key for key in now if key not in _MAY_CHANGE and now[key] != before.get(key))
        if changed:
            raise ConfigError(
                f"{path.parent} holds a run with another {', '.join(changed)}; --resume new sets it aside and starts anew, "
                "--run_name starts beside it"
            )

    def found(self) -> str:
        """What was there, and what will be done about it, in a sentence or two."""
        trainer, again = self.trainer, "--resume new sets it aside and starts anew"
        data = self.config.data
        size = f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f} million parameters on {trainer.device}"
        lines = [
            f"{size}; {len(data.train_bytes) / 1e6:.1f} MB of {data.pattern} in {data.root}, {len(data.validation_bytes) / 1e6:.1f} MB held out"
        ]
        step, elapsed = trainer.state.timestamp.batch, trainer.state.elapsed or 0.0
        if self._aside is not None:
            had = "" if self.config.resume == "new" else ", which had no checkpoint,"
            lines.append(f"The run that was there{had} is now {self._aside}; starting anew.")
        elif step and trainer.state.is_complete:
            longer = trainer.state.max_duration * 2 if trainer.state.max_duration is not None else ""
            lines.append(
                f"Found the run {trainer.run.name!r}, complete at step {step}; --max_duration {longer} goes on, {again}."
            )
        elif step:
            lines.append(
                f"Found the run {trainer.run.name!r} at step {step}, {elapsed:.0%} of {trainer.state.max_duration}; going on with it ({again})."
            )
        else:
            lines.append(f"Starting the run {trainer.run.name!r}, for {trainer.state.max_duration}.")
        return "\n".join(lines)

    def run(self) -> dict[str, float]:
        """Train, evaluate, and write a few lines; returns the validation loss and its baselines, in nats a byte."""
        with self.trainer as trainer:
            trainer.fit()
            if trainer.preempted:
                return self.results
            loss = (trainer.eval_results or trainer.evaluate())["validation"]["loss"]  # a run that was complete has not evaluated
            logger.info("writing %d bytes after each of %d prompts", self.config.generated_bytes, len(self.config.prompts))
            self.generations = [[prompt, self.generate(prompt)] for prompt in self.config.prompts]
            if self.generations:
                trainer.ctx.log_table("generations", ["prompt", "continuation"], self.generations)
            logger.info("counting bytes for the baselines")
            unigram, bigram = self.config.data.baselines()
            self.results = {"validation/loss": loss, "unigram": unigram, "bigram": bigram}
        return self.results

    def report(self) -> str:
        """What came of it: the loss beside its baselines, what the model writes, and where everything lies."""
        folder = self.trainer.run.folder
        lines = [f"--- {prompt!r} goes on ---\n{prompt}{written}\n" for prompt, written in self.generations]
        if self.results:
            lines.append("nats a byte, on validation files that the model has not seen:")
            lines += [f"  {name:<16}{value:6.3f}" for name, value in self.results.items()]
        checkpoints = folder / "checkpoints" if folder is not None else None
        lines.append(f"\nThe run ({self.trainer.run.outcome}, {self.trainer.state.timestamp.batch} steps) lies in {folder}: ")
        if folder is not None and folder.exists():
            lines[-1] += ", ".join(sorted(entry.name for entry in folder.iterdir()))
        if checkpoints is not None and checkpoints.exists():
            lines.append(f"Its checkpoints: {', '.join(sorted(entry.name for entry in checkpoints.iterdir() if entry.is_dir()))}")
        return "\n".join(lines)

    def generate(self, prompt: str, *, temperature: float = 0.7) -> str:
        """What the model writes after `prompt`: bytes drawn at `temperature`, decoded as UTF-8."""
        model: Any = self.trainer.model
        model.eval()
        ids = torch.tensor([list(prompt.encode())], device=self.trainer.device)
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.config.generated_bytes,
            do_sample=True,
            use_cache=True,
            temperature=temperature,
            pad_token_id=0,
        )
        return bytes(written[0, ids.shape[1] :].tolist()).decode(errors="replace")


def set_aside(folder: Path) -> Path | None:
    """Rename a run's folder to the first free `<name>.<number>`, so that a new run can have its name; None where there is none."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    logger.info("the run in %s is now %s", folder, aside)
    return aside
