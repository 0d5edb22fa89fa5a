"""Megatron Bridge's configuration classes, with the settings that callsheet's recipe supports. Other settings raise an error."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

from callsheet.bridges.guest_base import NotOnTheList
from callsheet.recipes.data.text_rows import TextRows

Section = TypeVar("Section")


@dataclass_transform()
def _section(kind: type[Section]) -> type[Section]:
    """A class decorator that makes a dataclass. Reading or setting an unknown field of the dataclass raises an error."""
    made = dataclass(kind)
    names = [each.name for each in fields(made)]  # type: ignore[arg-type]  # `made` is a dataclass

    def reject(name: str) -> NotOnTheList:
        return NotOnTheList(f"{kind.__name__}.{name} is not supported; the supported fields are {', '.join(names)}")

    def read(self: Any, name: str) -> Any:  # used as `__getattr__`, which Python calls only for unknown attributes
        raise AttributeError(name) if name.startswith("__") else reject(name)

    def write(self: Any, name: str, value: Any) -> None:
        if name not in names:
            raise reject(name)
        object.__setattr__(self, name, value)

    made.__getattr__ = read  # type: ignore[attr-defined]
    made.__setattr__ = write  # type: ignore[method-assign]
    return made


@_section
class ModelConfig:
    """The configuration of the model, which has Qwen 2's architecture and random weights.

    The parallel sizes must be 1, because only the data is divided among the ranks.
    """

    num_layers: int = 24
    hidden_size: int = 896
    ffn_hidden_size: int = 4864
    num_attention_heads: int = 14
    num_query_groups: int = 2
    vocab_size: int = 151936
    seq_length: int = 4096
    rotary_base: float = 1e6
    layernorm_epsilon: float = 1e-6
    share_embeddings_and_output_weights: bool = True
    init_method_std: float = 0.02
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False


@_section
class TrainingConfig:
    """The duration of training, the batch size, and the evaluation interval. `eval_iters` counts global batches; 0 means no evaluation."""

    train_iters: int = 300_000
    global_batch_size: int = 32
    micro_batch_size: int = 2
    eval_interval: int | None = 500
    eval_iters: int = 32
    skip_train: bool = False


@_section
class OptimizerConfig:
    """The settings of the optimizer, AdamW."""

    lr: float = 3e-4
    min_lr: float = 3e-5
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-5
    clip_grad: float = 1.0


@_section
class SchedulerConfig:
    """The schedule of the learning rate: `cosine`, `linear` or `constant`. By default, the schedule is as long as training."""

    lr_decay_style: str = "cosine"
    lr_warmup_iters: int = 500
    lr_decay_iters: int | None = None


@_section
class DatasetConfig:
    """The files of the training data, and how they are read.

    `blend` must be None. Megatron Bridge would then generate data. callsheet reads the text files in `folder`, byte by byte; if
    `folder` is None, it reads the files of Python's standard library.

    If `rows` is given, its texts are used instead of files. `cfg.tokenizer.tokenizer_model` is the tokenizer's folder or name.
    """

    blend: None = None
    folder: str | None = None
    pattern: str = "*.py"
    rows: TextRows | None = None
    num_workers: int = 0


@_section
class TokenizerConfig:
    """The folder or name of a tokenizer; with None, the tokens are the bytes of the text."""

    tokenizer_model: str | None = None


@_section
class CheckpointConfig:
    """The folders of checkpoints. If `save` is None, no checkpoints are saved. If `load` is None, training starts from the beginning.

    If `save` ends with `checkpoints`, the folder that contains it is the run's folder.
    """

    save: str | None = "nemo_experiments/default/checkpoints"
    load: str | None = "nemo_experiments/default/checkpoints"
    save_interval: int | None = 500
    async_save: bool = False


@_section
class LoggerConfig:
    """The log interval and the experiment trackers. Callbacks can use each configured tracker through `context.state`."""

    log_interval: int = 10
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_entity: str | None = None
    wandb_save_dir: str | None = None
    mlflow_experiment: str | None = None
    mlflow_run_name: str | None = None
    mlflow_tracking_uri: str | None = None


@_section
class RNGConfig:
    """The random seed."""

    seed: int = 1234


@_section
class ConfigContainer:
    """The whole configuration. Reading or changing an unsupported setting raises `NotSupported`.

    Args:
        model: the shape of the model, which has Qwen 2's architecture and random weights.
        train: the number of steps, the batch sizes, and the evaluation interval in steps.
        optimizer: the options of AdamW, and the gradient norm above which gradients are scaled down.
        scheduler: the learning-rate schedule.
        dataset: the files of the training data.
        tokenizer: the tokenizer's folder or name.
        checkpoint: where to save checkpoints, and where to resume from.
        logger: the log interval in steps, and the trackers.
        rng: the random seed.
        mixed_precision: `bf16_mixed`, `fp16_mixed`, or None for fp32.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    mixed_precision: str | None = "bf16_mixed"

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as nested dictionaries of plain data."""
        return asdict(self)


def qwen25_500m_pretrain_config() -> ConfigContainer:
    """Return the configuration for pretraining Qwen 2.5 with half a billion parameters on one device.

    For a trial, set fewer and narrower layers:

    Examples:
        >>> config = qwen25_500m_pretrain_config()
        >>> config.model.num_layers, config.model.hidden_size, config.model.ffn_hidden_size = 2, 64, 128
        >>> config.model.num_attention_heads, config.model.num_query_groups = 2, 1
        >>> config.model.seq_length, config.model.vocab_size = 64, 512
        >>> config.train.train_iters, config.train.global_batch_size = 20, 4
        >>> config.train.eval_interval, config.train.eval_iters = 10, 2
        >>> config.mixed_precision, config.checkpoint.save, config.checkpoint.load = None, None, None
    """
    return ConfigContainer()
