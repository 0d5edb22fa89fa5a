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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bridges.loops import instructlab as own_loop  # type: ignore[import-not-found]  # pytest has its folder on the path
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
from callsheet.errors import ConfigError, NotSupported
from callsheet.loggers import JSONLLogger, read_metrics
from callsheet.transport import TransportError
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path


@pytest.fixture
def manager() -> Any:
    made = CallbackManager()
    yield made
    made.close()


def test_the_names_alone_need_no_torch() -> None:
    code = "import sys; from callsheet.compat.instructlab import TrainerCallback, TrainingArgs; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


# --- the manager ---


def test_thirteen_hooks_that_do_nothing() -> None:
    assert len(HOOK_NAMES) == 13
    for hook in HOOK_NAMES:
        getattr(TrainerCallback(), hook)(TrainingContext())


def test_a_context_knows_nothing_at_first() -> None:
    context = TrainingContext()
    assert (context.step, context.epoch, context.total_samples, context.world_size) == (0, 0, 0, 1)
    assert (context.loss, context.learning_rate, context.checkpoint_path) == (None, None, None)
    assert context.batch_metrics == context.val_metrics == {}
    assert context.is_local_process_zero
    assert context.is_world_process_zero


def test_it_fires(manager: CallbackManager) -> None:
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


def test_each_callback_receives_what_it_overrides(manager: CallbackManager) -> None:
    class OnlySaves(TrainerCallback):
        def on_save(self, context: TrainingContext) -> None: ...

    assert not manager.has_callbacks("on_save")
    manager.add_callback(OnlySaves())
    assert manager.has_callbacks("on_save")
    assert not manager.has_callbacks("on_log")
    with pytest.raises(AttributeError):
        manager.has_callbacks("on_nonsense")


@pytest.mark.parametrize("thing", ["a string", 42, object(), TrainerCallback])
def test_what_is_no_callback_is_a_type_error(manager: CallbackManager, thing: Any) -> None:
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
    manager.remove_callback(first)  # which is not there any more


def test_unknown_hooks_and_fields(manager: CallbackManager) -> None:
    class ListensToIt(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None: ...

    with pytest.raises(ValueError, match=r"^Unknown hook: 'on_step_finish'"):
        manager.fire("on_step_finish")
    manager.fire("on_log", nonsense=1)  # without listeners
    manager.add_callback(ListensToIt())
    with pytest.raises(ValueError, match=r"^Unknown TrainingContext field: 'nonsense'"):
        manager.fire("on_log", nonsense=1)


def _package(name: str) -> Any:
    """A module of the package itself; the test is skipped where that is not installed."""
    if own_loop.REAL is None:
        pytest.skip("InstructLab is not installed: pip install --no-deps instructlab-training")
    return importlib.import_module(f"instructlab.training.{name}")


def rejections_of(interface: Any) -> dict[str, str]:
    """The errors of wrong calls, by what was wrong: of our names, or of the package's."""

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
            with pytest.raises(Exception) as caught:  # noqa: PT011  # which error, is compared
                call()
            found[what] = f"{caught.type.__name__}: {caught.value}"
    finally:
        manager.close()
    return found


def test_error_messages_begin_as_the_package_s() -> None:
    """Users' tests match them; a hint may follow."""
    theirs = rejections_of(_package("callbacks"))
    for what, message in rejections_of(importlib.import_module("callsheet.compat.instructlab.callbacks")).items():
        assert message.startswith(theirs[what].partition(". Pass an instance")[0]), what


def test_arguments_are_rejected_in_the_package_s_words(tmp_path: Path) -> None:
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


def test_events_are_delivered_without_waiting_for_a_look(manager: CallbackManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fire` wakes the thread: with a minute between two looks an event still arrives, also while the thread sleeps."""
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


def test_the_package_s_modules_and_names_are_found() -> None:
    """Each module of the original that users import from, with all that it exports; what has no counterpart says so when it is used."""
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


def test_fields_are_described_without_pydantic(tmp_path: Path) -> None:
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


def test_fields_are_those_of_the_package() -> None:
    theirs = _package("config").TrainingArgs.model_fields
    ours = TrainingArgs.model_fields
    assert set(theirs) <= set(ours)
    for name in ("default", "exclude"):
        assert getattr(ours["callbacks"], name) == getattr(theirs["callbacks"], name)


def test_closing_twice_does_nothing_and_no_event_is_delivered_afterwards(manager: CallbackManager) -> None:
    recorded: list[str] = []

    class ListensToIt(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            recorded.append(context.hook_name)

    manager.add_callback(ListensToIt())
    manager.close()
    manager.close()
    manager.fire("on_log")
    with pytest.raises(ValueError, match="Unknown hook"):
        manager.fire("on_nonsense")
    assert recorded == []


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_fired_and_closed_at_once_is_delivered_in_order(manager: CallbackManager, is_async: bool) -> None:
    """There 1 of 50, and of async ones none."""
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


def test_firing_does_not_wait_but_at_the_end(manager: CallbackManager) -> None:
    may_go = threading.Event()
    recorded: list[str] = []

    class Waits(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            assert may_go.wait(60)
            recorded.append("log")

        async def on_train_end(self, context: TrainingContext) -> None:
            await asyncio.sleep(0.05)
            recorded.append("end")

    manager.add_callback(Waits())
    manager.fire("on_log")
    assert recorded == []
    may_go.set()
    manager.fire("on_train_end")
    assert recorded == ["log", "end"]


def test_errors_are_logged_and_exits_too(manager: CallbackManager, caplog: pytest.LogCaptureFixture) -> None:
    recorded: list[int] = []

    class Fails(TrainerCallback):
        def on_step_begin(self, context: TrainingContext) -> None:
            raise SystemExit(3)  # there it ends the thread, and with it everything

        async def on_step_end(self, context: TrainingContext) -> None:
            raise SystemExit(4) if context.step % 2 else ValueError("broken")

    class Goes(TrainerCallback):
        def on_step_end(self, context: TrainingContext) -> None:
            recorded.append(context.step)

    for callback in (Fails(), Goes()):
        manager.add_callback(callback)
    for step in range(5):
        manager.fire("on_step_begin", step=step)
        manager.fire("on_step_end", step=step)
    manager.fire("on_train_end")
    manager.close()
    assert recorded == [0, 1, 2, 3, 4]
    assert caplog.text.count("Fails failed at on_step_begin") == 5
    assert "Fails failed at on_step_end, step 2; training continues: ValueError: broken" in caplog.text


def test_each_callback_has_a_copy_of_its_own(manager: CallbackManager) -> None:
    seen: list[Any] = []

    class Vandal(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            context.step = -1
            context.batch_metrics["nested"].append("spoilt")

    class Reads(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            seen.append((context.step, context.batch_metrics))

    for callback in (Vandal(), Reads()):
        manager.add_callback(callback)
    manager.context.step, manager.context.batch_metrics = 7, {"nested": [1]}
    manager.fire("on_log")
    manager.context.batch_metrics["nested"].append("later")
    manager.close()
    assert seen == [(7, {"nested": [1]})]


def test_a_hook_that_never_returns_is_given_up_and_named(
    manager: CallbackManager, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = threading.Event()

    class Hangs(TrainerCallback):
        def on_log(self, context: TrainingContext) -> None:
            may_go.wait(60)

    monkeypatch.setattr("callsheet.bridges.instructlab.names._PATIENCE_SECONDS", 0.1)
    manager.add_callback(Hangs())
    for _ in range(3):
        manager.fire("on_log")
    manager.close()
    may_go.set()
    assert "stopped waiting for InstructLab's callbacks: 2 waiting, and one has not returned" in caplog.text


# --- what is rejected by name ---


def test_source_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_arguments_that_are_not_supported(changes: dict[str, Any], error: type[Exception], why: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=why):
        arguments(tmp_path, **changes)


def test_arguments_may_be_given_as_they_are_there(tmp_path: Path) -> None:
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
def test_launches_that_cannot_be_made(given: dict[str, Any], why: str) -> None:
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
    """A model's folder, and rows to learn from."""
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


@pytest.mark.slow
def test_on_one_process(base: Path, tmp_path: Path) -> None:
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
    assert logs[0]["batch_metrics"]["num_minibatches"] == 2  # of two examples of up to 64 tokens
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


def test_on_two_processes_from_a_script_as_it_is_written_there(base: Path, tmp_path: Path) -> None:
    """At its top level, with a callback of the script's own."""
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
    assert recorded[0] == recorded[1]  # everything else is the same on both
    assert recorded[0][-1]["world_size"] == 2
    assert recorded[0][-1]["total_samples"] == 16


def test_what_would_be_lost_on_the_way_is_named(base: Path, tmp_path: Path) -> None:
    """There it is lost: a class is sent as source, and made without arguments."""
    changed = WritesEvents("x", hooks=[])
    changed.folder = "y"
    with pytest.raises(TransportError, match=r"\(WritesEvents\)\.foreign.*\.folder: a str with another value there"):
        run_training(TorchrunArgs(nproc_per_node=1), arguments(base, callbacks=[changed]))

    class Local(TrainerCallback):
        """A local class, which a rank cannot import."""

    with pytest.raises(TransportError, match="is made inside a function"):
        run_training(TorchrunArgs(nproc_per_node=1), arguments(base, callbacks=[Local()]))


def test_rows_and_ranks_that_do_not_fit(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="effective_batch_size=4 does not divide over 3 ranks"):
        run_training(TorchrunArgs(nproc_per_node=3), arguments(base))
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}], "unmask": true}\n')
    with pytest.raises(ConfigError, match="row 1 has `unmask: true`"):
        run_training(TorchrunArgs(nproc_per_node=1), arguments(base, data_path=str(tmp_path / "rows.jsonl")))
