"""InstructLab's argument classes. Some fields are supported; the other fields must keep their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from callsheet.bridges.instructlab.names import check
from callsheet.compat.instructlab.model_fields import HasModelFields, whole_number
from callsheet.core.callback import Callback
from callsheet.errors import ConfigError


class DistributedBackend(Enum):
    """The names of InstructLab's two backends that shard the model.

    `TrainingArgs` accepts only the default, `FSDP`, and ignores it: the recipe uses DDP, or FSDP if `parallel` is `fsdp`.
    """

    FSDP = "fsdp"
    DEEPSPEED = "deepspeed"


@dataclass(kw_only=True)
class LoraOptions(HasModelFields):
    """The options of low-rank adapters (LoRA).

    Args:
        rank: the rank of the adapters.
        alpha: the scale of the adapters: the product of the two matrices is multiplied by `alpha / rank`.
        dropout: the dropout probability of the adapters' input.
        target_modules: the names of the modules that get adapters; None: every linear layer except the last.
        quantize_data_type: must be None: adapters over quantized weights are not supported.

    Raises:
        ConfigError: `quantize_data_type` is given.
    """

    rank: int = 4
    alpha: int = 32
    dropout: float = 0.1
    target_modules: list[str] | None = None
    quantize_data_type: Any = None

    def __post_init__(self) -> None:
        self.convert_fields()
        if getattr(self.quantize_data_type, "value", self.quantize_data_type) is not None:
            raise ConfigError("quantize_data_type: adapters over quantized weights are not supported; leave it out")


@dataclass(kw_only=True)
class TorchrunArgs(HasModelFields):
    """The number of ranks, which all run on this machine. The rendezvous arguments have no effect.

    The ranks meet on 127.0.0.1, at a free port.

    Args:
        nproc_per_node: the number of ranks, or `gpu` for one on each GPU.
        nnodes: must be 1.
        node_rank: must be 0.
        rdzv_id, rdzv_endpoint, master_addr, master_port: have no effect.

    Raises:
        ConfigError: several machines are given, or two addresses for the rendezvous, or `nproc_per_node` is invalid.
    """

    nproc_per_node: int | str
    nnodes: int = 1
    node_rank: int = 0
    rdzv_id: str | int = 0
    rdzv_endpoint: str | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        self.convert_fields()
        if self.nproc_per_node != "gpu" and not isinstance(self.nproc_per_node, bool):
            with suppress(TypeError, ValueError):  # the check of `is_number` below rejects such values
                self.nproc_per_node = whole_number(self.nproc_per_node)
        if self.rdzv_endpoint and self.master_addr:
            raise ConfigError("Provide either `rdzv_endpoint` OR both `master_addr` and `master_port`, not both.")
        if self.nnodes != 1 or self.node_rank != 0:
            raise ConfigError(
                f"nnodes={self.nnodes}, node_rank={self.node_rank}: run_training starts the ranks of this machine alone; on several "
                "start a recipe with torchrun on each"
            )
        is_number = isinstance(self.nproc_per_node, int) and not isinstance(self.nproc_per_node, bool) and self.nproc_per_node > 0
        if not is_number and self.nproc_per_node != "gpu":
            raise ConfigError(f"nproc_per_node={self.nproc_per_node!r}: give a whole number above 0, or 'gpu'")

    @property
    def ranks(self) -> int:
        """The number of ranks.

        Raises:
            ConfigError: `gpu` is given, and there is no GPU.
        """
        if isinstance(self.nproc_per_node, int):
            return self.nproc_per_node
        import torch

        if not (count := torch.cuda.device_count()):
            raise ConfigError("nproc_per_node='gpu', and there is none; give a number")
        return count


_UNSUPPORTED_DEFAULTS: dict[str, Any] = {
    "use_legacy_tmpl": False,
    "process_data": True,
    "pretraining_config": None,
    "mock_data": False,
    "mock_data_len": 0,
    "use_liger": False,
    "trust_remote_code": False,
    "use_dolomite": False,
    "is_padding_free": False,
    "accelerate_full_state_at_epoch": True,
    "distributed_backend": DistributedBackend.FSDP,
    "mlflow_tracking_uri": None,
    "mlflow_experiment_name": None,
    "mlflow_run_name": None,
    "wandb_project": None,
    "wandb_entity": None,
    "wandb_run_name": None,
    "tensorboard_log_dir": None,
    "deepspeed_options": None,
    "fsdp_options": None,
}
"""The fields of InstructLab's arguments that are not supported, with their default values. Other values are rejected."""

_HINTS: dict[str, str] = {
    "pretraining_config": "callsheet.recipes.pretrain does that",
    **dict.fromkeys(
        ("mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_run_name"),
        "give callsheet.loggers.MLflowLogger(...) among the callbacks",
    ),
    **dict.fromkeys(
        ("wandb_project", "wandb_entity", "wandb_run_name"), "give callsheet.loggers.WandBLogger(...) among the callbacks"
    ),
    "deepspeed_options": "DeepSpeed is not used; leave it out",
    "fsdp_options": "give TrainingArgs(parallel='fsdp') to shard the model",
    "tensorboard_log_dir": "give callsheet.loggers.TensorboardLogger() among the callbacks",
    "accelerate_full_state_at_epoch": "every checkpoint can be resumed from",
    "trust_remote_code": "no code that comes with a model is run",
}


@dataclass(kw_only=True)
class TrainingArgs(HasModelFields):
    """The model, the data and the training options, with InstructLab's names.

    Args:
        model_path: the folder of the model, or its name on the hub.
        data_path: a file of rows with the column `messages`, or with other columns that the recipe `finetune` accepts.
        ckpt_output_dir: the folder for the run and for the models in transformers' format.
        data_output_dir: with `validation_split`, the folder to which the two parts of the data are written.
        max_seq_len: the length of an example, in tokens; longer examples are dropped.
        max_batch_len: the largest number of tokens in a microbatch.
        effective_batch_size: the number of examples in a step, over all ranks. The number of ranks must divide it.
        learning_rate: the highest learning rate.
        num_epochs: how many epochs to train.
        chat_tmpl_path: a Jinja file with the chat template; None: the tokenizer's own.
        save_samples: save a checkpoint each time that so many samples were trained on; 0: never.
        adamw_weight_decay, adamw_betas, adamw_eps: the options of the optimizer AdamW.
        warmup_steps: for how many steps the learning rate rises, before it falls to zero along half a cosine.
        random_seed: the seed of the random numbers.
        checkpoint_at_epoch: whether to save a checkpoint after each epoch.
        keep_last_checkpoint_only: whether to delete each checkpoint when the next one is committed.
        disable_flash_attn: whether torch's own attention is used.
        lora: the options of low-rank adapters; None: all weights are trained.
        validation_split: the share of the rows that is kept for evaluation, from 0 to below 1.
        validation_frequency: the number of steps between two evaluations; needed with `validation_split`.
        data_process_num_cpu_procs, on_demand_checkpointing: have no effect.
        log_level: the level of the log on the ranks.
        callbacks: callbacks of InstructLab and of callsheet, which each rank constructs again.
        parallel: how the ranks share the work, as in the recipe `finetune`; InstructLab does not have this.
        allow_pickle: whether callbacks that are defined in a function or a notebook are sent as signed cloudpickle; InstructLab
            does not have this.
        use_legacy_tmpl, process_data, pretraining_config, mock_data, mock_data_len: must have their defaults.
        use_liger, trust_remote_code, use_dolomite, is_padding_free: must have their defaults.
        accelerate_full_state_at_epoch, distributed_backend, deepspeed_options, fsdp_options: must have their defaults.
        mlflow_tracking_uri, mlflow_experiment_name, mlflow_run_name: must have their defaults.
        wandb_project, wandb_entity, wandb_run_name, tensorboard_log_dir: must have their defaults.

    Raises:
        ConfigError: a field is not supported or cannot work; the message names it.
        TypeError: a field is unknown, or something is not a callback.
    """

    model_path: str
    data_path: str
    ckpt_output_dir: str
    data_output_dir: str
    max_seq_len: int
    max_batch_len: int
    effective_batch_size: int
    learning_rate: float
    num_epochs: int = 1
    chat_tmpl_path: str | None = None
    save_samples: int = 0
    adamw_weight_decay: float = 0.0
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    warmup_steps: int = 0
    random_seed: int = 42
    checkpoint_at_epoch: bool = True
    keep_last_checkpoint_only: bool | None = False
    disable_flash_attn: bool | None = False
    lora: LoraOptions | None = None
    validation_split: float = 0.0
    validation_frequency: int | None = None
    data_process_num_cpu_procs: int = 16
    on_demand_checkpointing: bool = False
    log_level: str = "INFO"
    callbacks: list[Any] | None = field(
        default=None,
        repr=False,
        metadata={"exclude": True, "description": "List of TrainerCallback instances, called on every rank."},
    )
    parallel: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    allow_pickle: bool = False
    # The following fields of InstructLab are not supported: they accept only their default.
    use_legacy_tmpl: bool = False
    process_data: bool | None = True
    pretraining_config: Any = None
    mock_data: bool | None = False
    mock_data_len: int = 0
    use_liger: bool = False
    trust_remote_code: bool = False
    use_dolomite: bool = False
    is_padding_free: bool = False
    accelerate_full_state_at_epoch: bool = True
    distributed_backend: Any = DistributedBackend.FSDP
    mlflow_tracking_uri: str | None = None
    mlflow_experiment_name: str | None = None
    mlflow_run_name: str | None = None
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_run_name: str | None = None
    tensorboard_log_dir: str | None = None
    deepspeed_options: Any = None
    fsdp_options: Any = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Convert all fields to their types, as pydantic does in InstructLab, and check that they are valid.

        The constructor calls this method. Callers must call it again after fields may have changed.

        Raises:
            ConfigError: a field is not supported or cannot work; the message names it.
            TypeError: something in `callbacks` is not a callback.
        """
        self.convert_fields()
        lora: Any = self.lora
        if isinstance(lora, Mapping):
            self.lora = LoraOptions(**lora)
        elif lora is not None and not isinstance(lora, LoraOptions):
            raise ConfigError(f"lora={lora!r}: give LoraOptions(...)")
        for name, value in _UNSUPPORTED_DEFAULTS.items():
            given = getattr(self, name)
            if getattr(given, "value", given) != getattr(value, "value", value):
                raise ConfigError(f"{name}={given!r} is not supported; {_HINTS.get(name, 'leave it out')}")
        for name in ("max_seq_len", "max_batch_len", "effective_batch_size", "num_epochs"):
            if (number := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={number!r}: give a whole number above 0")
        if self.max_batch_len < self.max_seq_len:
            raise ConfigError(
                f"max_batch_len={self.max_batch_len} is less than max_seq_len={self.max_seq_len}: an example must fit in"
            )
        if not 0.0 <= self.validation_split < 1.0:
            raise ConfigError(f"validation_split must be in [0.0, 1.0), got {self.validation_split}")
        if self.validation_split and not (self.validation_frequency and self.validation_frequency > 0):
            raise ConfigError(
                "validation_frequency must be provided and > 0 when validation_split > 0: give the number of steps between evaluations "
                f"(given: {self.validation_frequency})"
            )
        if self.chat_tmpl_path is not None and self.chat_tmpl_path.endswith(".py"):
            raise ConfigError("chat_tmpl_path: a Python file is not executed; give its template as a Jinja file")
        for callback in self.callbacks or ():
            if not isinstance(callback, Callback):
                check(callback)
