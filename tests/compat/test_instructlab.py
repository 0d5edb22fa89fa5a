"""Code that was written for InstructLab Training's callbacks, with only the import line changed."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bridges.loops import instructlab as own_loop  # type: ignore[import-not-found]  # pytest has its folder on the path
from callsheet.callbacks import History
from callsheet.compat.instructlab import (
    HOOK_NAMES,
    CallbackManager,
    DistributedBackend,
    LoraOptions,
    TorchrunArgs,
    TrainerCallback,
    TrainingArgs,
    TrainingContext,
    deserialize_callback,
    run_training,
    serialize_callback,
)
from callsheet.compat.instructlab.job import job_of, rows_of
from callsheet.errors import ConfigError, NotSupported
from callsheet.loggers import JSONLLogger, read_metrics
from callsheet.transport import TransportError
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path


@pytest.fixture
def manager() -> Any:
    made = CallbackManager()
    yield made
    made.close()


def test_importing_the_names_does_not_import_torch() -> None:
    code = "import sys; from callsheet.compat.instructlab import TrainerCallback, TrainingArgs; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


# --- the manager ---


def test_the_thirteen_hooks_of_the_base_class_do_nothing() -> None:
    assert len(HOOK_NAMES) == 13
    for hook in HOOK_NAMES:
        getattr(TrainerCallback(), hook)(TrainingContext())


def test_a_new_context_has_default_values() -> None:
    context = TrainingContext()
    assert (context.step, context.epoch, context.total_samples, context.world_size) == (0, 0, 0, 1)
    assert (context.loss, context.learning_rate, context.checkpoint_path) == (None, None, None)
    assert context.batch_metrics == context.val_metrics == {}
    assert context.is_local_process_zero
    assert context.is_world_process_zero


def test_fire_passes_the_context_and_the_fields_of_this_event_only(manager: CallbackManager) -> None:
    recorded: list[TrainingContext] = []

    class MyCallback(TrainerCallback):
        def on_step_end(self, context: TrainingContext) -> None:
            recorded.append(context)

    manager.add_callback(MyCallback())
    manager.context.step = 42
    manager.context.output_dir = "/out"
    manager.fire("on_step_end", loss=0.5)
    manager.fire("on_step_begin")
    manager.close()
    assert [(each.hook_name, each.step, each.loss, each.output_dir) for each in recorded] == [("on_step_end", 42, 0.5, "/out")]
    assert manager.context.loss is None


def test_has_callbacks_is_true_only_for_overridden_hooks(manager: CallbackManager) -> None:
    class OnlySaves(TrainerCallback):
        def on_save(self, context: TrainingContext) -> None: ...

    assert not manager.has_callbacks("on_save")
    manager.add_callback(OnlySaves())
    assert manager.has_callbacks("on_save")
    assert not manager.has_callbacks("on_log")
    with pytest.raises(AttributeError):
        manager.has_callbacks("on_nonsense")


@pytest.mark.parametrize("thing", ["a string", 42, object(), TrainerCallback])
def test_adding_an_object_that_is_not_a_callback_is_a_type_error(manager: CallbackManager, thing: Any) -> None:
    with pytest.raises(TypeError):
        manager.add_callback(thing)


def test_callbacks_are_removed_by_instance_and_by_type(manager: CallbackManager) -> None:
    class A(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None: ...

    class B(A): ...

    class C(TrainerCallback):
        def on_save(self, context: TrainingContext) -> None: ...

    first, second = A(), A()
    for callback in (first, second, B(), C()):
        manager.add_callback(callback)
    manager.remove_callback(first)
    assert manager.has_callbacks("on_log")
    manager.remove_callback(A)
    assert not manager.has_callbacks("on_log")
    assert manager.has_callbacks("on_save")
    manager.remove_callback(first)  # it was removed already


def test_unknown_hooks_and_fields_are_rejected(manager: CallbackManager) -> None:
    class ListensToLog(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None: ...

    with pytest.raises(ValueError, match=r"^Unknown hook: 'on_step_finish'"):
        manager.fire("on_step_finish")
    manager.fire("on_log", nonsense=1)  # not checked without a listener
    manager.add_callback(ListensToLog())
    with pytest.raises(ValueError, match=r"^Unknown TrainingContext field: 'nonsense'"):
        manager.fire("on_log", nonsense=1)


def _package(name: str) -> Any:
    """Return a module of the installed package, or skip the test if it is not installed."""
    if own_loop.REAL is None:
        pytest.skip("InstructLab is not installed: pip install --no-deps instructlab-training")
    return importlib.import_module(f"instructlab.training.{name}")


def rejections_of(interface: Any) -> dict[str, str]:
    """Return the error messages of wrong calls, to our interface or to the package's."""

    class Listens(interface.TrainerCallback):  # type: ignore[misc]
        def on_log(self, context: Any) -> None: ...

    manager = interface.CallbackManager()
    found: dict[str, str] = {}
    try:
        manager.add_callback(Listens())
        calls: dict[str, Callable[[], object]] = {
            "hook": lambda: manager.fire("on_step_finish"),
            "field": lambda: manager.fire("on_log", nonsense=1, another=2),
            "a string": lambda: manager.add_callback("a string"),
            "a class": lambda: manager.add_callback(Listens),
            "has no hook": lambda: manager.has_callbacks("on_nonsense"),
        }
        for what, call in calls.items():
            with pytest.raises(Exception) as caught:  # noqa: PT011  # the caller compares the errors
                call()
            found[what] = f"{caught.type.__name__}: {caught.value}"
    finally:
        manager.close()
    return found


def test_error_messages_start_like_those_of_the_package() -> None:
    """Users match these messages in their tests. A hint may follow."""
    theirs = rejections_of(_package("callbacks"))
    for what, message in rejections_of(importlib.import_module("callsheet.compat.instructlab.callbacks")).items():
        assert message.startswith(theirs[what].partition(". Pass an instance")[0]), what


def test_arguments_are_rejected_with_the_same_message_as_in_the_package(tmp_path: Path) -> None:
    theirs = _package("config")
    needed = vars(arguments(tmp_path))
    for changes in ({"validation_split": 1.5}, {"validation_split": 0.5}):
        with pytest.raises(ValueError, match="validation_") as original:
            theirs.TrainingArgs(
                **{name: needed[name] for name, each in theirs.TrainingArgs.model_fields.items() if each.is_required()}, **changes
            )
        words = original.value.errors()[0]["msg"].removeprefix("Value error, ")  # type: ignore[attr-defined]  # pydantic's
        with pytest.raises(ValueError, match=re.escape(words)):
            arguments(tmp_path, **changes)


def test_fire_wakes_the_delivering_thread_at_once(manager: CallbackManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a polling interval of one minute, an event still arrives within seconds, also while the thread sleeps."""
    for name in ("_LOOK_SECONDS", "_IDLE_LOOK_SECONDS"):
        monkeypatch.setattr(f"callsheet.lanes.queue.{name}", 60.0)
    arrived = threading.Semaphore(0)

    class Listens(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            arrived.release()

    manager.add_callback(Listens())
    for _ in range(50):
        manager.fire("on_log")
        assert arrived.acquire(timeout=10)


def test_the_modules_and_exported_names_of_the_package_can_be_imported() -> None:
    """All names that the package exports exist. A name without a counterpart raises an error when it is used."""
    tree = ast.parse(Path(_package("callbacks").__file__).with_name("__init__.py").read_text())
    (exported,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    here = importlib.import_module("callsheet.compat.instructlab")
    inner = importlib.import_module("callsheet.compat.instructlab.training")
    for name in ast.literal_eval(exported):
        assert getattr(here, name) is not None
        assert getattr(inner, name) is not None
    assert here.TrainerCallback is inner.TrainerCallback is TrainerCallback
    settings = importlib.import_module("callsheet.compat.instructlab.config")
    uses: list[Callable[[], object]] = [
        lambda: settings.DeepSpeedOptions(),
        lambda: here.ShardingStrategies.HYBRID_SHARD,
        lambda: inner.FSDPOptions(),
    ]
    for use in uses:
        with pytest.raises(NotSupported, match=r"is not supported, unlike in InstructLab: .* leave it out"):
            use()


def test_model_fields_and_model_dump_work_without_pydantic(tmp_path: Path) -> None:
    code = (
        "import sys; from callsheet.compat.instructlab import TrainingArgs; field = TrainingArgs.model_fields['callbacks'];"
        "print(field.default, field.exclude, field.is_required(), 'pydantic' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "None True False False\n"
    given = arguments(tmp_path, callbacks=[TrainerCallback()], lora=LoraOptions(rank=2))
    assert TrainingArgs.model_fields["model_path"].is_required()
    dumped = given.model_dump()
    assert "callbacks" not in dumped
    assert dumped["lora"]["rank"] == 2


def test_model_fields_include_those_of_the_package() -> None:
    theirs = _package("config").TrainingArgs.model_fields
    ours = TrainingArgs.model_fields
    assert set(theirs) <= set(ours)
    for name in ("default", "exclude"):
        assert getattr(ours["callbacks"], name) == getattr(theirs["callbacks"], name)


def test_after_close_no_event_is_delivered_and_a_second_close_does_nothing(manager: CallbackManager) -> None:
    recorded: list[str] = []

    class ListensToLog(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            recorded.append(context.hook_name)

    manager.add_callback(ListensToLog())
    manager.close()
    manager.close()
    manager.fire("on_log")
    with pytest.raises(ValueError, match="Unknown hook"):
        manager.fire("on_nonsense")
    assert recorded == []


@pytest.mark.parametrize("is_async", [False, True])
def test_events_fired_right_before_close_are_delivered_in_order(manager: CallbackManager, is_async: bool) -> None:
    """InstructLab delivers 1 of these 50 events, or none if the hook is async."""
    recorded: list[int] = []

    class Sync(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            recorded.append(context.step)

    class Async(TrainerCallback):
        async def on_log(self, context: TrainingContext) -> None:
            await asyncio.sleep(0.001 * (context.step % 3))
            recorded.append(context.step)

    manager.add_callback(Async() if is_async else Sync())
    for step in range(50):
        manager.fire("on_log", step=step)
    manager.close()
    assert recorded == list(range(50))


@pytest.mark.parametrize("is_async", [False, True])
def test_hooks_run_in_an_event_loop_and_close_waits_for_their_tasks(manager: CallbackManager, is_async: bool) -> None:
    recorded: list[str] = []

    async def yield_often(name: str) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        recorded.append(name)

    async def start_another() -> None:
        await yield_often("first")
        asyncio.get_running_loop().create_task(yield_often("second"))

    class Sync(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            asyncio.get_running_loop().create_task(start_another())

    class Async(TrainerCallback):
        async def on_log(self, context: TrainingContext) -> None:
            asyncio.get_running_loop().create_task(start_another())

    manager.add_callback(Async() if is_async else Sync())
    manager.fire("on_log")
    manager.close()
    assert recorded == ["first", "second"]


def test_close_stops_waiting_for_a_task_that_does_not_end_and_logs_it(
    manager: CallbackManager, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits_forever() -> None:
        await asyncio.Event().wait()

    class Starts(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            self.tasks = [asyncio.get_running_loop().create_task(waits_forever()) for _ in range(3)]

    monkeypatch.setattr("callsheet.bridges.instructlab.names.TASKS_SECONDS", 0.05)
    manager.add_callback(Starts())
    manager.fire("on_log")
    manager.close()
    assert "are not done after 0.05 s, and are cancelled" in caplog.text
    assert caplog.text.count("waits_forever") == 1
    assert "waits_forever (3 tasks)" in caplog.text


def test_fire_waits_for_the_hooks_only_at_on_train_end(manager: CallbackManager) -> None:
    may_return = threading.Event()
    recorded: list[str] = []

    class Waits(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            assert may_return.wait(60)
            recorded.append("log")

        async def on_train_end(self, context: TrainingContext) -> None:
            await asyncio.sleep(0.05)
            recorded.append("end")

    manager.add_callback(Waits())
    manager.fire("on_log")
    assert recorded == []
    may_return.set()
    manager.fire("on_train_end")
    assert recorded == ["log", "end"]


def test_errors_and_system_exit_in_hooks_are_logged_and_training_continues(
    manager: CallbackManager, caplog: pytest.LogCaptureFixture
) -> None:
    recorded: list[int] = []

    class Fails(TrainerCallback):
        def on_step_begin(self, context: TrainingContext) -> None:
            raise SystemExit(3)  # in InstructLab, it ends the thread that calls all hooks

        async def on_step_end(self, context: TrainingContext) -> None:
            raise SystemExit(4) if context.step % 2 else ValueError("broken")

    class Works(TrainerCallback):
        def on_step_end(self, context: TrainingContext) -> None:
            recorded.append(context.step)

    for callback in (Fails(), Works()):
        manager.add_callback(callback)
    for step in range(5):
        manager.fire("on_step_begin", step=step)
        manager.fire("on_step_end", step=step)
    manager.fire("on_train_end")
    manager.close()
    assert recorded == [0, 1, 2, 3, 4]
    assert caplog.text.count("Fails failed at on_step_begin") == 5
    assert "Fails failed at on_step_end, step 2; training continues: ValueError: broken" in caplog.text


def test_each_callback_receives_its_own_copy_of_the_context(manager: CallbackManager) -> None:
    seen: list[Any] = []

    class ModifiesContext(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            context.step = -1
            context.batch_metrics["nested"].append("changed")

    class Reads(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            seen.append((context.step, context.batch_metrics))

    for callback in (ModifiesContext(), Reads()):
        manager.add_callback(callback)
    manager.context.step, manager.context.batch_metrics = 7, {"nested": [1]}
    manager.fire("on_log")
    manager.context.batch_metrics["nested"].append("later")
    manager.close()
    assert seen == [(7, {"nested": [1]})]


def test_close_stops_waiting_for_a_hook_that_does_not_return_and_logs_it(
    manager: CallbackManager, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_return = threading.Event()

    class Hangs(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            may_return.wait(60)

    monkeypatch.setattr("callsheet.bridges.instructlab.names._PATIENCE_SECONDS", 0.5)
    manager.add_callback(Hangs())
    for _ in range(3):
        manager.fire("on_log")
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < 0.9  # one wait, not two
    may_return.set()
    assert "stopped waiting for InstructLab's callbacks: 2 waiting, and one has not returned" in caplog.text


# --- what is rejected by name ---


def test_sending_source_code_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotSupported, match=r"^serialize_callback\(\).*callsheet\.transport"):
        serialize_callback(TrainerCallback())
    with pytest.raises(NotSupported, match=r"^deserialize_callback\(\).*callsheet\.transport"):
        deserialize_callback("eA==")
    monkeypatch.setattr(sys, "argv", ["main_ds.py", "--callbacks=eA=="])
    with pytest.raises(SystemExit, match=r"^--callbacks: source is sent to nobody here.*callsheet\.transport"):
        runpy.run_module("callsheet.compat.instructlab", run_name="__main__")


def arguments(folder: Path, **changes: Any) -> TrainingArgs:
    given: dict[str, Any] = {
        "model_path": str(folder / "model"),
        "data_path": str(folder / "data.jsonl"),
        "ckpt_output_dir": str(folder / "out"),
        "data_output_dir": str(folder / "data"),
        "max_seq_len": 64,
        "max_batch_len": 128,
        "num_epochs": 2,
        "effective_batch_size": 4,
        "learning_rate": 1e-3,
    }
    return TrainingArgs(**given | changes)


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"use_liger": True}, ConfigError, "use_liger=True is not supported"),
        ({"wandb_project": "mine"}, ConfigError, "wandb_project='mine' is not supported; give callsheet.loggers.WandBLogger"),
        ({"distributed_backend": DistributedBackend.DEEPSPEED}, ConfigError, "distributed_backend"),
        ({"nonsense": 1}, TypeError, "nonsense"),
        ({"callbacks": ["a string"]}, TypeError, "^Expected a TrainerCallback instance, got str"),
        ({"callbacks": [TrainerCallback]}, TypeError, "^Expected a TrainerCallback instance, got type. Pass an instance"),
        ({"max_batch_len": 32}, ValueError, "max_batch_len=32 is less than max_seq_len=64"),
        ({"validation_split": 0.2}, ValueError, "validation_frequency"),
        ({"validation_split": 1.0}, ValueError, r"validation_split must be in \[0.0, 1.0\), got 1.0"),
        ({"chat_tmpl_path": "template.py"}, ConfigError, "chat_tmpl_path"),
    ],
)
def test_unsupported_or_invalid_arguments_are_rejected(
    changes: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        arguments(tmp_path, **changes)


def test_values_are_converted_to_the_types_of_the_fields_as_with_pydantic(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "learning_rate": "2e-5", "num_epochs": "3", "effective_batch_size": " 8 ", "warmup_steps": 2.0, "adamw_betas": ["0.8", 0.9],
        "checkpoint_at_epoch": "no", "use_liger": "false", "validation_frequency": None, "model_path": tmp_path,
        "save_samples": False, "keep_last_checkpoint_only": None,
        "lora": {"rank": "2", "dropout": "0.5"},
    }  # fmt: skip
    args = arguments(tmp_path, **given)
    wanted = {"learning_rate": 2e-5, "num_epochs": 3, "effective_batch_size": 8, "warmup_steps": 2, "adamw_betas": (0.8, 0.9)}
    wanted |= {"checkpoint_at_epoch": False, "use_liger": False, "validation_frequency": None, "model_path": str(tmp_path)}
    wanted |= {"save_samples": 0, "keep_last_checkpoint_only": None}
    for name, value in {**wanted, "lora": LoraOptions(rank=2, dropout=0.5)}.items():
        assert (getattr(args, name), type(getattr(args, name))) == (value, type(value))
    args.num_epochs = "5"  # type: ignore[assignment]  # a later change is converted by `check`
    args.check()
    assert args.num_epochs == 5
    assert TorchrunArgs(nproc_per_node="2", nnodes="1").ranks == 2  # type: ignore[arg-type]
    assert TorchrunArgs(nproc_per_node=1.0).ranks == 1  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nproc_per_node='²': give a whole number above 0, or 'gpu'"):
        TorchrunArgs(nproc_per_node="²")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("learning_rate", "fast", "a number"),
        ("learning_rate", None, "a number"),
        ("num_epochs", "1.5", "a whole number"),
        ("adamw_betas", "12", "two numbers"),
        ("random_seed", "inf", "a whole number"),
        ("adamw_betas", (0.9, 0.95, 1.0), "two numbers"),
        ("checkpoint_at_epoch", "maybe", "True or False"),
        ("checkpoint_at_epoch", [], "True or False"),
        ("data_path", 3, "a string"),
        ("lora", 4, r"LoraOptions\(...\)"),
    ],
)
def test_values_of_a_wrong_type_are_rejected_by_name(name: str, value: Any, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.*: give {wanted}$"):
        arguments(tmp_path, **{name: value})


def test_supported_arguments_are_accepted_and_later_changes_are_checked(tmp_path: Path) -> None:
    arguments(
        tmp_path,
        use_liger=False,
        distributed_backend=DistributedBackend.FSDP,
        lora=LoraOptions(rank=2),
        on_demand_checkpointing=True,
    )
    changed = arguments(tmp_path)
    changed.mock_data = True
    with pytest.raises(ConfigError, match="mock_data=True is not supported"):
        run_training(TorchrunArgs(nproc_per_node=1), changed)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node=0"),
        ({"nproc_per_node": 2, "nnodes": 2}, "nnodes=2"),
        ({"nproc_per_node": 2, "rdzv_endpoint": "a:1", "master_addr": "b"}, "Provide either `rdzv_endpoint` OR both"),
    ],
)
def test_unsupported_launch_arguments_are_rejected(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TorchrunArgs(**given)


# --- run_training ---


class WritesEvents(TrainerCallback):
    """Writes the calls of some hooks to a file of its rank."""

    def __init__(self, folder: str, *, hooks: list[str]) -> None:
        self.folder, self.hooks = folder, hooks

    def write(self, context: TrainingContext) -> None:
        if context.hook_name in self.hooks:
            with open(f"{self.folder}/events-{os.environ['RANK']}.jsonl", "a") as file:
                file.write(json.dumps(vars(context)) + "\n")

    def on_log(self, context: TrainingContext) -> None:
        self.write(context)

    async def on_save(self, context: TrainingContext) -> None:
        assert context.checkpoint_path is not None
        assert (Path(context.checkpoint_path) / "model.safetensors").exists()
        self.write(context)

    def on_train_end(self, context: TrainingContext) -> None:
        self.write(context)


def written_in(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"events-{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and training data."""
    from transformers import AutoModelForCausalLM

    from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
    from callsheet.recipes.models.language_model import LanguageModel

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    tokenizer = byte_tokenizer()
    shape = LanguageModel(hidden_size=16, layers=1, heads=2, intermediate_size=32)
    model: Any = shape.build(AutoModelForCausalLM, vocabulary=len(tokenizer), longest=128)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"messages": [{"role": "user", "content": "a" * i}, {"role": "assistant", "content": "b" * i}]} for i in range(1, 17)]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_a_resume_with_other_values_says_which_argument_starts_a_new_run(base: Path, tmp_path: Path) -> None:
    for rate in (1e-3, 2e-3):
        args = arguments(base, ckpt_output_dir=str(tmp_path), num_epochs=1, learning_rate=rate, random_seed=int(1000 * rate))
        job = job_of(args, *rows_of(args), [])
        if rate == 1e-3:
            job.setup()
            job.run()
            continue
        with pytest.raises(
            ConfigError,
            match=r"learning_rate: 0\.001 in the run, .*random_seed: 1 in the run, 2 now\).*; another ckpt_output_dir starts a new run$",
        ) as found:
            job.setup()
        assert "--" not in str(found.value)


def test_a_resume_with_more_epochs_follows_the_new_schedule(base: Path, tmp_path: Path) -> None:
    def rates(epochs: int, folder: str) -> dict[int, float]:
        args = arguments(base, ckpt_output_dir=str(tmp_path / folder), num_epochs=epochs, learning_rate=1e-3, warmup_steps=1)
        history = History()
        job = job_of(args, *rows_of(args), [history])
        job.setup()
        job.run()
        return dict(zip(history.steps("train/learning_rate"), history["train/learning_rate"], strict=True))

    first, undisturbed, resumed = rates(1, "resumed"), rates(2, "undisturbed"), rates(2, "resumed")
    assert list(first) == [1, 2, 3, 4]
    assert resumed == pytest.approx(undisturbed | first)


@pytest.mark.slow
def test_run_training_on_one_process_logs_saves_and_validates(base: Path, tmp_path: Path) -> None:
    callbacks = [WritesEvents(str(tmp_path), hooks=["on_log", "on_save", "on_train_end"]), JSONLLogger()]
    out = tmp_path / "out"
    found = run_training(
        TorchrunArgs(nproc_per_node=1, nnodes=1, node_rank=0, rdzv_id=123),
        arguments(base, ckpt_output_dir=str(out), data_output_dir=str(tmp_path / "data"), validation_split=0.25,
                  validation_frequency=2, save_samples=8, warmup_steps=1, callbacks=callbacks),
    )  # fmt: skip
    recorded = written_in(tmp_path, 0)
    logs = [each for each in recorded if each["hook_name"] == "on_log"]
    assert [each["step"] for each in logs] == [1, 2, 3, 4, 5, 6]
    assert [each["total_samples"] for each in logs] == [4, 8, 12, 16, 20, 24]
    assert logs[0]["batch_metrics"]["num_minibatches"] == 2  # each has two examples of up to 64 tokens
    assert logs[0]["output_dir"] == str(out)
    assert logs[0]["model_name_or_path"] == str(base / "model")
    assert logs[0]["max_epochs"] == 2
    saved = [each["checkpoint_path"] for each in recorded if each["hook_name"] == "on_save"]
    assert list(dict.fromkeys(saved)) == [str(out / "hf_format" / f"samples_{samples}") for samples in (8, 12, 16, 24)]
    assert recorded[-1]["hook_name"] == "on_train_end"
    assert recorded[-1]["val_metrics"]["val_loss"] == pytest.approx(found["validation"])
    records = [record for record in read_metrics(out / "training") if "train/loss" in record.values]
    assert [record.values["train/loss"] for record in records] == [each["loss"] for each in logs]
    assert records[-1].values["train/learning_rate"] < records[1].values["train/learning_rate"] <= 1e-3


SCRIPT = """
import json, os, sys
from callsheet.compat.instructlab import TorchrunArgs, TrainerCallback, TrainingArgs, run_training

class LogCallback(TrainerCallback):
    def on_log(self, context):
        with open(f"{context.output_dir}/events-{os.environ['RANK']}.jsonl", "a") as file:
            file.write(json.dumps(vars(context)) + "\\n")

    def on_train_end(self, context):
        self.on_log(context)

base, out = sys.argv[1:]
run_training(
    torch_args=TorchrunArgs(nproc_per_node=2, nnodes=1, node_rank=0, rdzv_id=123, rdzv_endpoint="127.0.0.1:12345"),
    train_args=TrainingArgs(
        model_path=f"{base}/model", data_path=f"{base}/data.jsonl", ckpt_output_dir=out, data_output_dir=f"{out}/data",
        max_seq_len=64, max_batch_len=64, num_epochs=1, effective_batch_size=4, learning_rate=1e-3, checkpoint_at_epoch=False,
        callbacks=[LogCallback()],
    ),
)
"""


def test_an_instructlab_script_runs_on_two_processes(base: Path, tmp_path: Path) -> None:
    """The script calls `run_training` at its top level, and defines its own callback."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run(
        [python(), str(script), str(base), str(tmp_path)], capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    recorded = [written_in(tmp_path, rank) for rank in (0, 1)]
    assert [(each["hook_name"], each["step"]) for each in recorded[0]] == [
        *(("on_log", step) for step in range(1, 5)), ("on_train_end", 4),
    ]  # fmt: skip
    assert [each.pop("is_world_process_zero") for each in recorded[1]] == [False] * 5
    assert [each.pop("is_world_process_zero") for each in recorded[0]] == [True] * 5
    for each in (*recorded[0], *recorded[1]):
        each.pop("is_local_process_zero")
    assert recorded[0] == recorded[1]  # everything else is the same on both ranks
    assert recorded[0][-1]["world_size"] == 2
    assert recorded[0][-1]["total_samples"] == 16


def test_a_callback_that_cannot_be_sent_to_the_ranks_is_rejected(base: Path, tmp_path: Path) -> None:
    """InstructLab sends the source of a class and creates the callback without arguments, which loses its state."""
    changed = WritesEvents("x", hooks=[])
    changed.folder = "y"
    with pytest.raises(TransportError, match=r"\(WritesEvents\)\.foreign.*\.folder: a str with another value there"):
        run_training(TorchrunArgs(nproc_per_node=1), arguments(base, callbacks=[changed]))

    class Local(TrainerCallback):
        """A local class, which a rank cannot import."""

    with pytest.raises(TransportError, match="is made inside a function"):
        run_training(TorchrunArgs(nproc_per_node=1), arguments(base, callbacks=[Local()]))


def test_an_indivisible_batch_size_and_unsupported_rows_are_rejected(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="effective_batch_size=4 does not divide over 3 ranks"):
        run_training(TorchrunArgs(nproc_per_node=3), arguments(base))
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}], "unmask": true}\n')
    with pytest.raises(ConfigError, match="row 1 has `unmask: true`"):
        run_training(TorchrunArgs(nproc_per_node=1), arguments(base, data_path=str(tmp_path / "rows.jsonl")))
