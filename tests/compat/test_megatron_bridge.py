"""Megatron Bridge's interface, compared with that of the package, and code in its style with only the imports changed."""

from __future__ import annotations

import os
import re
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bridges.loops.megatron_bridge import interface  # type: ignore[import-not-found]  # pytest has its folder on the path
from callsheet.bridges.megatron_bridge import names as ours
from callsheet.callbacks import History
from callsheet.compat.megatron_bridge import (
    VALID_EVENTS,
    Callback,
    CallbackContext,
    CallbackManager,
    ConfigContainer,
    forward_step,
    normalize_callbacks,
    pretrain,
    qwen25_500m_pretrain_config,
    should_fire,
)
from callsheet.compat.megatron_bridge.pretrain import job_of
from callsheet.errors import ConfigError, NotSupported
from callsheet.recipes.pretrain import Pretrain
from callsheet.testing import run_ranks

real = interface()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    assert not dist.is_initialized()


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(120):
        (folder / f"{number}.py").write_text(f"def number_{number}(x):\n    return x + {number}\n" * 40)
    return folder


def shrunk(folder: Path, texts: Path) -> ConfigContainer:
    """Return the configuration reduced to the size of a test."""
    config = qwen25_500m_pretrain_config()
    config.model.num_layers, config.model.hidden_size, config.model.ffn_hidden_size = 1, 16, 32
    config.model.num_attention_heads, config.model.num_query_groups = 2, 1
    config.model.seq_length, config.model.vocab_size = 32, 300
    config.train.train_iters, config.train.global_batch_size = 6, 4
    config.train.eval_interval, config.train.eval_iters = 3, 2
    config.checkpoint.save = config.checkpoint.load = str(folder / "run" / "checkpoints")
    config.checkpoint.save_interval = 4
    config.dataset.folder = str(texts)
    config.optimizer.lr, config.scheduler.lr_warmup_iters = 1e-2, 2
    config.mixed_precision, config.logger.log_interval = None, 1
    return config


@pytest.fixture
def config(tmp_path: Path, texts: Path) -> ConfigContainer:
    return shrunk(tmp_path, texts)


# --- our interface and that of the package ---


@pytest.fixture(params=[ours, real] if real is not None else [ours], ids=lambda names: names.__name__.rpartition(".")[2])
def names(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_there_are_fourteen_events() -> None:
    assert len(VALID_EVENTS) == 14
    assert isinstance(VALID_EVENTS, frozenset)
    if real is not None:
        assert real.VALID_EVENTS <= VALID_EVENTS
    assert all(callable(getattr(Callback, event)) for event in VALID_EVENTS)


def test_a_context_takes_its_fields_by_position(names: ModuleType) -> None:
    context = names.CallbackContext("state", ["model"], {"a": 1}, "optimizer", "scheduler", {"l": 1}, 2.0, False, {"t": 3})
    assert vars(context) == {
        "state": "state",
        "model": ["model"],
        "user_state": {"a": 1},
        "optimizer": "optimizer",
        "scheduler": "scheduler",
        "loss_dict": {"l": 1},
        "grad_norm": 2.0,
        "skipped_iter": False,
        "total_loss_dict": {"t": 3},
    }
    bare = names.CallbackContext("state", [])
    assert bare.user_state == {}
    assert bare.user_state is not names.CallbackContext("state", []).user_state
    assert bare == names.CallbackContext("state", [])
    bare.mine = 1
    with pytest.raises(TypeError):
        names.CallbackContext()


def test_a_manager_calls_callbacks_in_the_order_of_registration(names: ModuleType) -> None:
    recorded: list[str] = []

    class Named(names.Callback):  # type: ignore[misc, name-defined]  # `names` is a fixture
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_start(self, context: Any) -> None:
            recorded.append(self.name)

    manager, twice = names.CallbackManager(), Named("twice")
    manager.register("on_train_start", lambda context: recorded.append("function"))
    assert manager.add(twice) is None
    manager.add([Named("one"), twice])
    manager.register("on_train_start", recorded.append)
    assert manager.fire("on_train_start", "context") is None
    assert recorded == ["function", "twice", "one", "twice", "context"]
    manager.fire("on_train_end", "context")  # without listeners


def test_the_methods_of_a_manager_behave_as_in_the_package(names: ModuleType) -> None:
    manager = names.CallbackManager()
    assert manager.events == names.VALID_EVENTS
    assert manager.list_callbacks("on_eval_end") == []
    manager.register("on_eval_end", print)
    listed = manager.list_callbacks("on_eval_end")
    listed.clear()
    assert manager.list_callbacks("on_eval_end") == [print]
    assert manager.has_callbacks("on_eval_end")
    assert not manager.has_callbacks("on_eval_start")
    assert not manager.has_callbacks("no such event")
    for call in (manager.list_callbacks, lambda event: manager.register(event, print)):
        with pytest.raises(ValueError, match="nknown event"):
            call("on_eval_ends")
    with pytest.raises(KeyError):
        manager.fire("on_eval_ends", None)
    assert manager.user_state == {}
    manager.user_state["a"] = 1
    assert manager.user_state is manager.user_state
    with pytest.raises(AttributeError):
        manager.user_state = {}


def rejections_of(interface: ModuleType) -> dict[str, str]:
    """Return the error messages of wrong calls, to our interface or to the package's."""
    manager = interface.CallbackManager()
    calls: dict[str, Callable[[], object]] = {
        "register": lambda: manager.register("on_train_stepend", print),
        "list": lambda: manager.list_callbacks("on_nothing"),
        "fire": lambda: manager.fire("on_nothing", None),
        "a class": lambda: manager.add(interface.Callback),
    }
    found = {}
    for what, call in calls.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011  # the caller compares the errors
            call()
        found[what] = f"{caught.type.__name__}: {caught.value}"
    return found


@pytest.mark.skipif(real is None, reason="Megatron Bridge is not installed")
def test_error_messages_start_like_those_of_the_package() -> None:
    """Users match these messages in their tests. A hint may follow. The package ends with its events as a frozenset, in no order."""
    theirs = rejections_of(real)
    for what, message in rejections_of(ours).items():
        assert message.startswith(theirs[what].partition("frozenset(")[0]), what


def test_normalize_callbacks_and_should_fire_behave_as_in_the_package(names: ModuleType) -> None:
    assert names.normalize_callbacks(None) is None
    manager = names.CallbackManager()
    assert names.normalize_callbacks(manager) is manager
    made = names.normalize_callbacks([])
    assert isinstance(made, names.CallbackManager)
    assert not names.should_fire(None, "on_train_start")
    assert not names.should_fire(made, "on_train_start")
    made.register("on_train_start", print)
    assert names.should_fire(made, "on_train_start")
    assert not names.should_fire(made, "no such event")


def test_an_error_is_raised_and_later_callbacks_are_not_called(names: ModuleType) -> None:
    manager, recorded = names.CallbackManager(), list[Any]()
    manager.register("on_train_start", lambda context: 1 // 0)
    manager.register("on_train_start", recorded.append)
    with pytest.raises(ZeroDivisionError):
        manager.fire("on_train_start", "context")
    assert recorded == []


def test_a_handler_added_while_its_event_is_fired_is_called(names: ModuleType) -> None:
    manager, recorded = names.CallbackManager(), list[Any]()
    manager.register("on_train_start", lambda context: manager.register("on_train_start", recorded.append))
    manager.fire("on_train_start", "context")
    assert recorded == ["context"]


def test_unusual_callbacks_are_ignored_or_rejected_as_in_the_package(names: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    class Misspelt(names.Callback):  # type: ignore[misc, name-defined]  # `names` is a fixture
        def on_train_stepend(self, context: Any) -> None: ...

    class Static(names.Callback):  # type: ignore[misc, name-defined]  # `names` is a fixture
        @staticmethod
        def on_train_start(context: Any) -> None: ...

    class Duck:
        def on_train_start(self, context: Any) -> None: ...

    manager = names.CallbackManager()
    manager.add(Misspelt())
    manager.add((Duck(),))
    manager.add(None)
    assert not any(manager.has_callbacks(event) for event in names.VALID_EVENTS)
    if names is ours:  # the package logs no warning
        assert "Misspelt.on_train_stepend" in caplog.text
        assert "is never called; did you mean 'on_train_step_end'?" in caplog.text
        assert caplog.text.count("registers nothing") == 2
    on_instance = names.Callback()
    on_instance.on_train_start = lambda context: None
    for wrong in (Static(), names.Callback, on_instance):
        with pytest.raises(AttributeError):
            names.CallbackManager().add(wrong)
    manager.add(Duck())
    assert manager.has_callbacks("on_train_start")


# --- code in the style of the package's docs ---


def test_a_class_measures_the_time_with_user_state(config: ConfigContainer, capsys: pytest.CaptureFixture[str]) -> None:
    class Clock(Callback):
        def on_train_start(self, context: CallbackContext) -> None:
            context.user_state["began"] = time.perf_counter()
            print(f"from step {context.state.train_state.step}")

        def on_train_step_end(self, context: CallbackContext) -> None:
            if context.loss_dict:
                print(f"{context.state.train_state.step} {context.loss_dict}")

        def on_train_end(self, context: CallbackContext) -> None:
            print(f"{time.perf_counter() - context.user_state['began']:.2f} s in all")

    pretrain(config, forward_step, callbacks=[Clock()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "from step 0"
    assert [line.split("{")[0] for line in lines[1:-1]] == [f"{step} " for step in range(6)]
    assert "'lm loss': tensor(" in lines[1]
    assert lines[-1].endswith(" s in all")


def test_functions_classes_and_lists_can_be_mixed(config: ConfigContainer) -> None:
    recorded: list[str] = []

    class TimingCallback(Callback):
        def on_eval_end(self, context: CallbackContext) -> None:
            recorded.append("timing")

    class MetricsCallback(Callback):
        def on_eval_end(self, context: CallbackContext) -> None:
            assert context.total_loss_dict is not None
            recorded.append(f"metrics {list(context.total_loss_dict)}")

    def log_step(context: CallbackContext) -> None:
        if context.loss_dict:
            recorded.append(f"step {context.state.train_state.step}")

    manager = CallbackManager()
    manager.register("on_train_step_end", log_step)
    manager.add(TimingCallback())
    manager.add([MetricsCallback()])
    manager.register("on_eval_end", lambda ctx: recorded.append("complete"))
    config.train.train_iters = 3
    pretrain(config, forward_step, callbacks=manager)
    evaluation = ["timing", "metrics ['lm loss']", "complete"]
    assert recorded == ["step 0", "step 1", "step 2", *evaluation, *evaluation]


def test_callbacks_can_check_the_rank_and_catch_their_own_errors(config: ConfigContainer) -> None:
    ranks: list[int] = []

    class RankZeroCallback(Callback):
        def on_train_start(self, context: CallbackContext) -> None:
            context.user_state["steps"] = 0

        def on_train_step_end(self, context: CallbackContext) -> None:
            context.user_state["steps"] += 1
            if dist.get_rank() == 0:
                ranks.append(dist.get_world_size())

    def safe_callback(context: CallbackContext) -> None:
        try:
            raise ConnectionError("the service is down")
        except Exception as e:
            context.user_state.setdefault("kept", []).append(e)

    manager = normalize_callbacks([RankZeroCallback()])
    assert manager is not None
    manager.register("on_train_step_end", safe_callback)
    assert should_fire(manager, "on_train_step_end")
    pretrain(config, forward_step, callbacks=manager)
    assert ranks == [1] * 6
    assert manager.user_state["steps"] == len(manager.user_state["kept"]) == 6


def test_a_callback_can_send_the_metrics_of_each_step(config: ConfigContainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICH_CLUSTER", "blue")
    sent: list[dict[str, Any]] = []

    class SendsMetrics(Callback):
        def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
            self.send = send

        def on_train_step_end(self, context: CallbackContext) -> None:
            if context.loss_dict:
                self.send(
                    {
                        "step": context.state.train_state.step,
                        "loss": context.loss_dict.get("lm loss"),
                        "grad_norm": context.grad_norm,
                        "cluster": os.environ.get("WHICH_CLUSTER"),
                    }
                )

    pretrain(config, forward_step, callbacks=[SendsMetrics(sent.append)])
    assert [each["step"] for each in sent] == list(range(6))
    assert all(isinstance(each["loss"], Tensor) and isinstance(each["grad_norm"], float) for each in sent)
    assert sent[-1]["loss"] < sent[0]["loss"]
    assert {each["cluster"] for each in sent} == {"blue"}


# --- pretrain ---


def recording_manager() -> tuple[CallbackManager, list[tuple[str, int]]]:
    """Return a manager that records every event with its step, and the list of its records."""
    recorded: list[tuple[str, int]] = []
    manager = CallbackManager()
    for event in VALID_EVENTS:

        def record(context: CallbackContext, event: str = event) -> None:
            recorded.append((event.removeprefix("on_"), context.state.train_state.step))

        manager.register(event, record)
    return manager, recorded


def evaluation(kind: str, step: int) -> list[tuple[str, int]]:
    steps = [(f"{kind}_step_start", step), (f"{kind}_step_end", step)] * 2
    return [(f"{kind}_start", step), *steps, (f"{kind}_end", step)]


def steps(first: int, last: int) -> list[tuple[str, int]]:
    return [(f"train_step_{edge}", step) for step in range(first, last) for edge in ("start", "end")]


def test_pretrain_fires_its_events_in_order(config: ConfigContainer) -> None:
    manager, recorded = recording_manager()
    pretrain(config, forward_step, callbacks=manager)
    assert recorded == [
        ("data_init_start", 0),
        ("train_start", 0),
        *steps(0, 3),
        *evaluation("eval", 3),
        *steps(3, 4),
        ("checkpoint_save", 4),
        *steps(4, 6),
        *evaluation("eval", 6),
        ("checkpoint_save", 6),
        ("train_end", 6),
        *evaluation("eval", 6),
        *evaluation("test", 6),
    ]


def test_pretrain_resumes_from_its_checkpoint(config: ConfigContainer) -> None:
    config.train.train_iters = 4
    config.scheduler.lr_decay_iters = 6
    pretrain(config, forward_step)
    config.train.train_iters = 6
    manager, recorded = recording_manager()
    again = pretrain(config, forward_step, callbacks=manager)
    assert recorded[:3] == [("data_init_start", 4), ("train_start", 4), ("train_step_start", 4)]
    assert again.trainer.state.timestamp.batch == 6
    manager, recorded = recording_manager()
    pretrain(config, forward_step, callbacks=manager)  # training is complete: it is only evaluated and tested
    assert recorded == [("data_init_start", 6), *evaluation("eval", 6), *evaluation("test", 6)]


@pytest.mark.parametrize(("save_interval", "saved"), [(None, [6]), (0, [])])
def test_without_a_save_interval_only_a_final_checkpoint_is_written(
    save_interval: int | None, saved: list[int], config: ConfigContainer
) -> None:
    config.checkpoint.save_interval = save_interval
    manager, recorded = recording_manager()
    pretrain(config, forward_step, callbacks=manager)
    assert [step for event, step in recorded if event == "checkpoint_save"] == saved


def test_a_callback_can_turn_off_the_validations(config: ConfigContainer) -> None:
    class TurnsOff(Callback):
        def on_train_step_end(self, context: Any) -> None:
            if context.state.train_state.step == 3:  # after the first of two validations
                context.state.train_state.do_valid = False

    manager, recorded = recording_manager()
    manager.add(TurnsOff())
    pretrain(config, forward_step, callbacks=manager)
    assert [step for event, step in recorded if event == "eval_start"] == [3]


def test_without_iterations_nothing_is_trained(config: ConfigContainer) -> None:
    """As in Megatron, the model is validated and tested."""
    config.train.train_iters = 0
    manager, recorded = recording_manager()
    pretrain(config, forward_step, callbacks=manager)
    assert recorded == [("data_init_start", 0), *evaluation("eval", 0), *evaluation("test", 0)]


def test_pretrain_saves_the_states_of_its_callbacks(config: ConfigContainer) -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.steps = 0

        def on_train_step_end(self, context: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.steps = state["steps"]

    config.train.train_iters, config.scheduler.lr_decay_iters = 4, 6
    pretrain(config, forward_step, callbacks=[Counts(), Counts()])
    config.train.train_iters = 6
    first, second = Counts(), Counts()
    pretrain(config, forward_step, callbacks=[first, second])
    assert (first.steps, second.steps) == (6, 6)


def test_a_resume_with_other_values_says_what_to_set_in_the_configuration(config: ConfigContainer) -> None:
    pretrain(config, forward_step)
    config.optimizer.weight_decay = 0.5
    config.model.num_layers += 1
    with pytest.raises(
        ConfigError,
        match=r"\(model\.num_layers: \d+ in the run, .*optimizer\.weight_decay: .*; checkpoint\.load=None sets .*; another checkpoint\.save starts",
    ) as found:
        pretrain(config, forward_step)
    assert "--" not in str(found.value)
    config.checkpoint.load = None
    assert pretrain(config, forward_step).trainer.state.timestamp.batch == 6


def test_pretrain_resumes_from_the_checkpoint_of_another_run(
    config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config.train.train_iters = 4
    pretrain(config, forward_step)
    config.checkpoint.save = str(tmp_path / "other" / "checkpoints")
    config.train.train_iters = 6
    manager, recorded = recording_manager()
    pretrain(config, forward_step, callbacks=manager)
    assert recorded[1] == ("train_start", 4)
    config.checkpoint.save, config.checkpoint.load = None, str(tmp_path / "nowhere")
    manager, recorded = recording_manager()
    pretrain(config, forward_step, callbacks=manager)
    assert recorded[1] == ("train_start", 0)
    assert "checkpoint_save" not in dict(recorded)
    assert "there is no checkpoint in" in caplog.text


def test_without_a_save_folder_no_checkpoint_is_written(
    config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config.checkpoint.save = config.checkpoint.load = None
    config.train.eval_iters = 0
    manager, recorded = recording_manager()
    pretrain(config, forward_step, callbacks=manager)
    assert recorded == [("data_init_start", 0), ("train_start", 0), *steps(0, 6), ("train_end", 6)]
    assert not list(tmp_path.rglob("manifest.json"))


def test_skip_train_only_evaluates_and_tests(config: ConfigContainer) -> None:
    config.train.skip_train = True
    manager, recorded = recording_manager()
    recipe = pretrain(config, forward_step, callbacks=manager)
    assert recorded == [("data_init_start", 0), *evaluation("eval", 0), *evaluation("test", 0)]
    assert set(recipe.evaluated) == {"validation", "test"}


def test_a_callback_ends_training_by_changing_train_state(config: ConfigContainer) -> None:
    class Target(Callback):
        def on_eval_end(self, context: CallbackContext) -> None:
            state = context.state.train_state
            state.step = context.state.cfg.train.train_iters + 1
            state.do_valid = state.do_test = False

    manager, recorded = recording_manager()
    manager.add(Target())
    pretrain(config, forward_step, callbacks=manager)
    assert recorded[-3:] == [("eval_end", 3), ("checkpoint_save", 3), ("train_end", 3)]


def test_the_fields_of_state_have_values_during_training(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.tensorboard_dir = str(tmp_path / "tensorboard")
    seen: list[Any] = []

    def look(context: CallbackContext) -> None:
        state = context.state
        seen.append(state)
        train = state.train_state
        assert state.cfg is config
        assert (train.step, train.consumed_train_samples, train.consumed_valid_samples) == (5, 20, 8)
        assert train.floating_point_operations_so_far > 0
        assert (train.do_train, train.do_valid, train.do_test) == (True, True, True)
        assert state.timers("interval-time").active_time() > 0
        assert state.tokenizer.decode([100, 101]) == "de"
        assert state.wandb_logger is None
        assert state.start_time <= time.time()
        state.tensorboard_logger.add_scalar("mine", 1.5, train.step)

    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: look(context) if context.state.train_state.step == 5 else None)
    pretrain(config, forward_step, callbacks=manager)
    assert len(seen) == 1

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = EventAccumulator(str(tmp_path / "tensorboard"))
    written.Reload()
    names = set(written.Tags()["scalars"])
    assert names >= {"lm loss", "learning-rate", "grad-norm", "lm loss validation", "mine"}
    assert [event.step for event in written.Scalars("lm loss")] == [1, 2, 3, 4, 5, 6]


def test_a_callback_can_log_to_mlflow_through_state(
    config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # creating a database takes seconds
    config.logger.mlflow_experiment, config.logger.mlflow_run_name = "small", "one"
    config.logger.mlflow_tracking_uri = (tmp_path / "mlruns").as_uri()
    config.train.eval_iters = 0
    config.checkpoint.save = str(tmp_path / "run")
    manager = CallbackManager()
    manager.register("on_train_end", lambda context: context.state.mlflow_logger.log_metric("mine", 2.0))
    pretrain(config, forward_step, callbacks=manager)
    assert mlflow.active_run() is None
    (run,) = mlflow.search_runs(experiment_names=["small"], output_format="list")
    assert run.data.metrics["mine"] == 2.0
    assert run.data.metrics["lm-loss"] > 0
    assert run.data.params["model.num_layers"] == "1"


def test_a_callback_can_use_wandb_through_state(config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config.logger.wandb_project, config.logger.wandb_exp_name = "small", "one"
    config.logger.wandb_save_dir = str(tmp_path / "tracked")
    config.train.eval_iters = 0
    seen: list[Any] = []
    manager = CallbackManager()
    manager.register(
        "on_train_end", lambda context: seen.append((context.state.wandb_logger.run.name, context.state.wandb_logger.run.step))
    )
    pretrain(config, forward_step, callbacks=manager)
    assert seen[0][0] == "one"
    assert list((tmp_path / "tracked").rglob("*.wandb"))


def test_losses_and_weights_equal_those_of_the_pretrain_recipe(config: ConfigContainer) -> None:
    losses: list[float] = []
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: losses.append(context.loss_dict["lm loss"].item()))  # type: ignore[index]  # not None at this event
    mine = pretrain(config, forward_step, callbacks=manager)
    job = job_of(config)
    job.run_name = "again"
    again = Pretrain(job, callbacks=[history := History()])
    again.setup()
    again.run()
    assert losses == pytest.approx(history["train/loss"], rel=1e-4)
    assert mine.evaluated["validation"]["lm loss"] == pytest.approx(again.evaluated["validation"]["loss"], rel=1e-4)
    assert mine.evaluated["test"]["lm loss"] == pytest.approx(again.evaluated["test"]["loss"], rel=1e-4)
    for one, other in zip(mine.trainer.model.parameters(), again.trainer.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_custom_forward_step_is_used_and_an_invalid_one_is_rejected(config: ConfigContainer) -> None:
    """This forward step takes no state, and reports a second value."""
    seen: list[set[str]] = []

    def custom_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
        batch = next(data_iterator)
        logits = model(batch["tokens"], batch["position_ids"], batch["attention_mask"])

        def loss(logits: Tensor) -> Any:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            return loss, {"lm loss": loss, "z": logits.square().mean()}

        return logits, loss

    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: seen.append(set(context.loss_dict or {})))
    pretrain(config, custom_step, callbacks=manager)
    assert seen == [{"lm loss", "z"}] * 6
    config.checkpoint.load = None
    for wrong, message in [
        (None, "give a function such as"),
        (lambda data_iterator, model: (model(next(data_iterator)["tokens"]), lambda outputs: outputs.mean()), "has to give"),
        (lambda data_iterator, model: (model(next(data_iterator)["tokens"]), lambda outputs: (outputs.mean(), {"l": torch.ones(3)})), "3 numbers"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            pretrain(config, wrong)  # type: ignore[arg-type]  # the mistake that is tested
    with pytest.raises(NotSupported, match="schedule plan"):
        forward_step(None, iter([]), None, return_schedule_plan=True)  # type: ignore[arg-type]  # both are ignored


def test_an_error_in_a_callback_is_raised_and_the_process_group_is_destroyed(config: ConfigContainer) -> None:
    manager, recorded = recording_manager()
    manager.register("on_train_step_end", lambda context: 1 // 0)
    manager.register("on_train_step_end", lambda context: recorded.append(("after", 0)))
    with pytest.raises(ZeroDivisionError):
        pretrain(config, forward_step, callbacks=manager)
    assert recorded[-1] == ("train_step_end", 0)


def test_an_existing_process_group_is_not_destroyed(config: ConfigContainer) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # missing in the stubs
    try:
        config.train.eval_iters = 0
        pretrain(config, forward_step)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_settings_that_are_not_supported_are_rejected_by_name(config: ConfigContainer) -> None:
    with pytest.raises(NotSupported, match=r"TrainingConfig\.manual_gc is not supported"):
        config.train.manual_gc = True  # type: ignore[attr-defined]  # the mistake that is tested
    with pytest.raises(NotSupported, match=r"ConfigContainer\.ddp is not supported"):
        _ = config.ddp  # type: ignore[attr-defined]  # the mistake that is tested
    assert not hasattr(config.model, "fp8")
    for section, name, value in [
        ("model", "tensor_model_parallel_size", 2),
        ("model", "pipeline_model_parallel_size", 2),
        ("model", "context_parallel_size", 2),
        ("model", "sequence_parallel", True),
        ("dataset", "blend", ["a"]),
        ("scheduler", "lr_decay_style", "WSD"),
    ]:
        before = getattr(getattr(config, section), name)
        setattr(getattr(config, section), name, value)
        with pytest.raises(NotSupported, match=name):
            job_of(config)
        setattr(getattr(config, section), name, before)
    config.mixed_precision = "fp8"
    with pytest.raises(NotSupported, match="mixed_precision"):
        job_of(config)
    config.mixed_precision = "bf16_mixed"
    assert job_of(config).precision == "bf16"
    config.train.micro_batch_size = 3
    with pytest.raises(ConfigError, match="does not divide into microbatches of 3"):
        job_of(config)


def test_the_full_configuration_describes_qwen_2_5_500m() -> None:
    config = qwen25_500m_pretrain_config()
    config.dataset.folder = None
    job = job_of(config)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = job.model.build(AutoModelForCausalLM, vocabulary=262, longest=4096)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 494
    assert job.microbatch_size == 2
    assert job.max_duration == "300000ba"
    assert config.to_dict()["model"]["num_layers"] == 24


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "megatron_bridge_style.py"
    monkeypatch.setattr("sys.argv", [example.name, str(tmp_path)])
    runpy.run_path(str(example), run_name="__main__")
    output = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"lm loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    assert re.findall(r"saved step (\d+)", output) == ["10", "20"]
    assert output.count("validation:") == 3


@pytest.mark.parametrize("async_save", [False, True])
def test_every_checkpoint_is_complete_before_training_ends(async_save: bool, config: ConfigContainer) -> None:
    config.checkpoint.async_save = async_save
    manager, recorded = recording_manager()
    pretrain(config, forward_step, callbacks=manager)
    events = [event for event, _ in recorded]
    assert events[: events.index("train_end")].count("checkpoint_save") == events.count("checkpoint_save") == 2


def on_ranks(folder: str, texts: str) -> tuple[int, int, list[tuple[str, int]], list[float]]:
    config = shrunk(Path(folder), Path(texts))
    manager, recorded = recording_manager()
    ranks: list[int] = []
    manager.register("on_train_start", lambda context: ranks.append(dist.get_world_size()))
    recipe = pretrain(config, forward_step, callbacks=manager)
    return ranks[0], recipe.trainer.state.timestamp.batch, recorded, [recipe.evaluated["test"]["lm loss"]]


def test_two_ranks_receive_the_same_events_and_losses(tmp_path: Path, texts: Path, config: ConfigContainer) -> None:
    one, other = run_ranks(on_ranks, 2, str(tmp_path / "two"), str(texts))
    assert one == other
    assert one[:2] == (2, 6)
    manager, recorded = recording_manager()
    alone = pretrain(config, forward_step, callbacks=manager)
    assert one[2] == recorded
    assert one[3] == pytest.approx(
        [alone.evaluated["test"]["lm loss"]], rel=0.02
    )  # the data order differs; the loss starts at 5.7
