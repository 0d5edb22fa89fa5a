from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.trainer import Evaluator

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3


class Scores:
    """A loss function that returns the given scores in evaluation, one after the other."""

    def __init__(self, scores: Sequence[float]) -> None:
        self.remaining: Iterator[float] = iter(scores)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets) if torch.is_grad_enabled() else torch.tensor(next(self.remaining))


def trainer(folder: Path, *callbacks: Callback, scores: Sequence[float] | None = None, **options: Any) -> Trainer:
    options = {"max_duration": "3ep", "run_name": "run", **options}
    return Trainer(
        nn.Linear(2, 1),
        Scores(scores or []),
        DATA,
        DATA[:1] if scores is not None else None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=options.pop("manager", None) or CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        device="cpu",
        **options,
    )


def fit(folder: Path, *callbacks: Callback, **options: Any) -> dict[int, str]:
    """Train, and return the step and kind of every checkpoint that remains."""
    with trainer(folder, *callbacks, **options) as trained:
        trained.fit()
    return remaining(folder, options.get("run_name", "run"))


def remaining(folder: Path, name: str = "run") -> dict[int, str]:
    found = find_checkpoints(folder / name / "checkpoints").checkpoints
    assert len({checkpoint.step for checkpoint in found}) == len(found), "two checkpoints of one step"
    return {checkpoint.step: checkpoint.seal.info["kind"] for checkpoint in reversed(found)}


class RequestsAtStep(Callback):
    """Makes a request at the end of one step."""

    def __init__(self, step: int, what: str = "save") -> None:
        self.step = step
        self.what = what

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            getattr(ctx.control, self.what)("asked for")


class Preempt(Callback):
    """Preempts the run after the second step."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class PreemptsAtEpochEnd(Callback):
    """Preempts the run at the end of the second epoch, before its evaluation."""

    def on_epoch_end(self, ctx: Context) -> None:
        if ctx.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)


class MakesWeightsNaN(Callback):
    phase = "change"

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            nn.init.constant_(ctx.model.weight, math.nan)


# --- when checkpoints are saved ---


def test_saves_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    assert fit(tmp_path, CheckpointSaver(save_interval="2ba", keep=None), max_duration="7ba") == {
        2: "periodic",
        4: "periodic",
        6: "periodic",
        7: "final",
    }


def test_a_bare_number_means_batches(tmp_path: Path) -> None:
    assert fit(tmp_path, CheckpointSaver(save_interval=5, keep=None, save_at_end=False), max_duration="4ep") == {
        5: "periodic",
        10: "periodic",
    }


def test_a_stopped_run_saves_a_final_checkpoint(tmp_path: Path) -> None:
    assert fit(tmp_path, CheckpointSaver(), RequestsAtStep(2, "stop")) == {2: "final"}


def test_one_step_with_two_boundaries_is_saved_once(tmp_path: Path) -> None:
    assert fit(tmp_path, CheckpointSaver(save_interval="3ba", keep=None), max_duration="2ep") == {
        3: "periodic",
        6: "periodic",
    }
    assert fit(tmp_path, CheckpointSaver(save_interval="1ep"), max_duration="3ba", run_name="other") == {3: "final"}


def test_one_step_is_saved_once_across_a_resume(tmp_path: Path) -> None:
    assert fit(tmp_path, CheckpointSaver(), max_duration="3ba") == {3: "final"}  # training ends before the epoch's boundary
    assert fit(tmp_path, CheckpointSaver(), max_duration="2ep", resume="auto") == {3: "final", 6: "final"}


def test_the_end_is_saved_once_although_it_is_evaluated_twice(tmp_path: Path) -> None:
    assert fit(tmp_path, CheckpointSaver(), scores=[0.5, 0.4], max_duration="3ba") == {3: "final"}


def test_the_final_checkpoint_has_the_last_evaluation(tmp_path: Path) -> None:
    with trainer(tmp_path, CheckpointSaver(save_interval="3ba"), scores=[0.5, 0.25], max_duration="2ep") as trained:
        trained.fit()
    found = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert sorted((each.step, each.seal.info["kind"], each.seal.info["val_losses"].get("validation")) for each in found) == [
        (3, "periodic", None),
        (6, "final", 0.25),
        (6, "periodic", 0.5),
    ]


def test_a_saver_can_be_used_in_another_run(tmp_path: Path) -> None:
    saver = CheckpointSaver(save_interval="2ba", keep=1)
    assert fit(tmp_path, saver, max_duration="2ba") == {2: "final"}
    with trainer(tmp_path, saver, max_duration="3ba", run_name="other") as trained:
        trained.fit("2ba")
        assert remaining(tmp_path, "other") == {2: "final"}
        trained.fit("3ba")
    assert remaining(tmp_path, "other") == {3: "final"}
    assert remaining(tmp_path) == {2: "final"}


def test_requests_of_another_run_do_not_affect_this_one(tmp_path: Path) -> None:
    requester = RequestsAtStep(2)
    manager = CallbackManager([CheckpointSaver(save_interval="1ba", keep=1), requester])
    assert list(fit(tmp_path, manager=manager)) == [2, 9]
    requester.step = 3
    assert list(fit(tmp_path, manager=manager, run_name="other")) == [3, 9]


def test_all_reasons_at_one_boundary_make_one_checkpoint(tmp_path: Path) -> None:
    saver = CheckpointSaver(save_interval="1ep", monitor="validation/loss")
    assert fit(tmp_path, saver, scores=[0.5, 0.4], max_duration="2ep") == {3: "best", 6: "final"}


def test_with_before_eval_a_checkpoint_is_saved_before_an_evaluation_that_fails(tmp_path: Path) -> None:
    saver = CheckpointSaver(before_eval=True)
    with pytest.raises(StopIteration):  # the scores run out
        fit(tmp_path, saver, scores=[0.5])
    assert remaining(tmp_path) == {3: "periodic", 6: "periodic"}
    with pytest.raises(StopIteration):
        fit(tmp_path, CheckpointSaver(), scores=[0.5], run_name="other")
    assert remaining(tmp_path, "other") == {3: "periodic"}


def test_with_before_eval_the_best_is_saved_with_its_evaluation(tmp_path: Path) -> None:
    saver = CheckpointSaver(before_eval=True, monitor="validation/loss", save_at_end=False)
    with trainer(tmp_path, saver, scores=[0.5, 0.6], max_duration="2ep") as trained:
        trained.fit()
    found = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert sorted((each.step, each.seal.info["kind"], each.seal.info["val_losses"].get("validation")) for each in found) == [
        (3, "best", 0.5),
        (3, "periodic", None),
        (6, "periodic", 0.5),  # the newest losses at that time
    ]
    keys = {each.seal.info["kind"]: each.seal.info["best_metric_key"] for each in found}
    assert keys == {"best": "validation/loss", "periodic": None}


def test_a_checkpoint_names_its_requesters_also_when_it_is_loaded(tmp_path: Path) -> None:
    class RequestsTwice(Callback):
        def on_eval_all_end(self, ctx: Context) -> None:
            if ctx.step == 3:
                ctx.control.save("asked for", by="me")
                ctx.control.save("and again", by="me")

    manager = CallbackManager([CheckpointSaver(monitor="validation/loss"), RequestsTwice(), MakesWeightsNaN(5)])
    recorded: list[tuple[int, tuple[str, ...], bool]] = []

    @manager.register("on_checkpoint_published")
    @manager.register("on_checkpoint_load_end")
    def record(ctx: Context) -> None:
        if ctx.checkpoint is not None:
            recorded.append((ctx.checkpoint.step, ctx.checkpoint.requested_by, ctx.checkpoint.is_finite))

    with trainer(tmp_path, manager=manager, scores=[0.5, 0.6], max_duration="2ep") as trained:
        trained.fit()
        trained.save_checkpoint()
    good = (3, ("me", "CheckpointSaver", "CheckpointSaver/best"), True)
    assert recorded == [good, (6, ("CheckpointSaver",), False), (6, (), False)]
    recorded.clear()
    trainer(tmp_path, manager=manager, scores=[], resume="auto").close()
    assert recorded == [good]


# --- which checkpoints are kept ---


def test_keeps_the_newest(tmp_path: Path) -> None:
    assert list(fit(tmp_path, CheckpointSaver(save_interval="1ba", keep=2), max_duration="6ba")) == [5, 6]


def test_an_old_checkpoint_is_deleted_after_the_new_one_is_written(tmp_path: Path) -> None:
    manager = CallbackManager([CheckpointSaver(save_interval="1ba", keep=1)])
    at_end: list[list[int]] = []
    manager.register("on_checkpoint_save_end", lambda ctx: at_end.append(list(remaining(tmp_path))))
    fit(tmp_path, manager=manager, max_duration="3ba")
    assert at_end == [[1], [1, 2], [2, 3]]


def test_after_a_resume_only_checkpoints_of_the_saver_are_deleted(tmp_path: Path) -> None:
    def saver() -> CheckpointSaver:
        return CheckpointSaver(save_interval="1ep", keep=2)

    fit(tmp_path, saver(), RequestsAtStep(2), max_duration="3ep")
    shutil.copytree(tmp_path / "run" / "checkpoints" / "ep2-ba6", tmp_path / "run" / "checkpoints" / "copied")
    shutil.move(tmp_path / "run", tmp_path / "moved")  # the folder may be moved
    with trainer(tmp_path, saver(), run_name="moved", resume="auto", max_duration="5ep") as trained:
        trained.fit()
    assert {path.name for path in (tmp_path / "moved" / "checkpoints").iterdir() if path.is_dir()} == {
        "ep0-ba2",  # requested by another callback
        "copied",  # copied by the user
        "ep4-ba12",
        "ep5-ba15",
    }


def test_a_deleted_checkpoint_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CallbackManager([CheckpointSaver(save_interval="1ba", keep=2)])

    @manager.register("on_train_step_end", phase="report")
    def lose(ctx: Context) -> None:
        if ctx.step == 4:
            shutil.rmtree(tmp_path / "run" / "checkpoints" / "ep0-ba3")

    assert list(fit(tmp_path, manager=manager, max_duration="4ba")) == [2, 4]
    assert not caplog.records


def test_another_runs_checkpoints_are_not_deleted(tmp_path: Path) -> None:
    fit(tmp_path, CheckpointSaver(keep=2, monitor="validation/loss"), scores=[0.5, 0.6, 0.7])
    assert list(remaining(tmp_path)) == [3, 6, 9]
    parent = tmp_path / "run" / "checkpoints" / "ep2-ba6"
    saver = CheckpointSaver(keep=1, monitor="validation/loss")
    assert fit(tmp_path, saver, scores=[0.9], run_name="child", resume=parent) == {9: "final"}  # and the best is that of this run
    assert list(remaining(tmp_path)) == [3, 6, 9]


def test_a_checkpoint_that_another_callback_also_requested_is_kept(tmp_path: Path) -> None:
    assert list(fit(tmp_path, CheckpointSaver(save_interval="1ba", keep=1), RequestsAtStep(2), max_duration="5ba")) == [2, 5]
    assert list(fit(tmp_path, CheckpointSaver(save_interval="1ba", keep=1), max_duration="7ba", resume="auto")) == [2, 7]


def test_a_manually_saved_checkpoint_is_kept(tmp_path: Path) -> None:
    with trainer(tmp_path, CheckpointSaver(keep=1), max_duration="1ep") as trained:
        trained.fit("2ba")
        by_hand = trained.save_checkpoint()
        trained.fit("2ep")
    assert Path(by_hand.path).exists()
    assert remaining(tmp_path) == {2: "requested", 6: "final"}


def test_the_best_and_the_newest_are_kept_independently(tmp_path: Path) -> None:
    saver = CheckpointSaver(save_interval="1ep", keep=2, monitor="validation/loss")
    assert list(fit(tmp_path, saver, scores=[0.5, 0.4, 0.6, 0.7, 0.3], max_duration="4ep")) == [6, 9, 12]
    saver = CheckpointSaver(save_interval="1ep", keep=2, monitor="validation/loss")
    assert list(fit(tmp_path, saver, scores=[0.3], max_duration="5ep", resume="auto")) == [12, 15]


def test_the_saver_deletes_an_outdated_preemption_checkpoint(tmp_path: Path) -> None:
    assert fit(tmp_path, CheckpointSaver(save_interval="1ba", keep=1), Preempt()) == {2: "preempt"}
    assert list(fit(tmp_path, CheckpointSaver(keep=1), resume="auto")) == [9]
    assert list(fit(tmp_path, CheckpointSaver(keep=1), Preempt(), RequestsAtStep(2), run_name="other")) == [2]
    assert list(fit(tmp_path, CheckpointSaver(keep=1), run_name="other", resume="auto")) == [2, 9]


def test_a_preemption_checkpoint_without_a_saver_is_kept(tmp_path: Path) -> None:
    assert fit(tmp_path, Preempt()) == {2: "preempt"}
    assert list(fit(tmp_path, CheckpointSaver(keep=1), resume="auto")) == [2, 9]


def test_only_the_first_rank_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert list(fit(tmp_path, CheckpointSaver(save_interval="1ba", keep=1), max_duration="3ba")) == [1, 2, 3]


def test_checkpoints_with_nan_do_not_replace_good_ones(tmp_path: Path) -> None:
    def saver() -> CheckpointSaver:
        return CheckpointSaver(save_interval="1ba", keep=2)

    assert list(fit(tmp_path, saver(), MakesWeightsNaN(4), max_duration="6ba")) == [2, 3]
    with trainer(tmp_path, saver(), resume="auto", max_duration="6ba") as trained:
        assert trained.state.timestamp.batch == 3
    assert list(fit(tmp_path, saver(), MakesWeightsNaN(2), max_duration="4ba", run_name="other")) == [1, 4]


# --- the best ---


def test_the_best_is_kept_in_addition_to_the_newest(tmp_path: Path) -> None:
    saver = CheckpointSaver(keep=1, monitor="validation/loss")
    assert fit(tmp_path, saver, scores=[0.5, 0.1, math.nan, 0.9, 0.8], max_duration="5ep") == {6: "best", 15: "final"}


def test_the_mode_decides_which_is_best(tmp_path: Path) -> None:
    saver = CheckpointSaver(save_interval=None, save_at_end=False, monitor="validation/loss", mode="max")
    assert fit(tmp_path, saver, scores=[0.5, math.inf, 0.9, 0.8], max_duration="4ep") == {9: "best"}


def test_a_better_checkpoint_replaces_the_best_also_after_a_resume(tmp_path: Path) -> None:
    def saver() -> CheckpointSaver:
        return CheckpointSaver(save_interval=None, save_at_end=False, monitor="validation/loss")

    assert fit(tmp_path, saver(), scores=[0.5, 0.4], max_duration="2ep") == {6: "best"}
    assert fit(tmp_path, saver(), scores=[0.45, 0.42], max_duration="4ep", resume="auto") == {6: "best"}
    assert fit(tmp_path, saver(), scores=[0.45, 0.42, 0.3], max_duration="5ep", resume="auto") == {15: "best"}


def test_a_best_checkpoint_that_replaces_the_preempted_one_of_its_step_is_kept(tmp_path: Path) -> None:
    def saver() -> CheckpointSaver:
        return CheckpointSaver(keep=1, monitor="validation/loss")

    fit(tmp_path, saver(), PreemptsAtEpochEnd(), scores=[0.5], max_duration="4ep")
    assert fit(tmp_path, saver(), scores=[0.1, 0.6, 0.7], max_duration="4ep", resume="auto") == {6: "best", 12: "final"}


def test_a_best_whose_checkpoint_was_deleted_does_not_count(tmp_path: Path) -> None:
    def saver() -> CheckpointSaver:
        return CheckpointSaver(keep=1, monitor="validation/loss")

    fit(tmp_path, saver(), scores=[0.1, 0.5], max_duration="2ep")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "ep1-ba3")
    assert fit(tmp_path, saver(), scores=[0.4, 0.5], max_duration="4ep", resume="auto") == {9: "best", 12: "final"}


def test_a_manual_evaluation_does_not_count(tmp_path: Path) -> None:
    saver = CheckpointSaver(save_interval=None, save_at_end=False, monitor="validation/loss")
    with trainer(tmp_path, saver, scores=[0.1, 0.5], max_duration="1ep") as trained:
        trained.evaluate()
        trained.fit()
    assert remaining(tmp_path) == {3: "best"}


def test_a_metric_that_is_not_evaluated_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'validation/los'; did you mean 'validation/loss'"):
        fit(tmp_path, CheckpointSaver(monitor="validation/los"), scores=[0.5])


# --- several savers ---


def several() -> list[CheckpointSaver]:
    often, rarely = CheckpointSaver(save_interval="1ba", keep=1), CheckpointSaver(save_interval="2ba", keep=2)
    often.name, rarely.name = "often", "rarely"
    return [often, rarely]


@pytest.mark.parametrize("order", [1, -1])
def test_two_savers_do_not_delete_each_other_s_checkpoints(tmp_path: Path, order: int) -> None:
    assert list(fit(tmp_path, *several()[::order], max_duration="7ba", log_interval="1ba")) == [6, 7]
    assert list(fit(tmp_path, *several()[::order], max_duration="9ba", resume="auto")) == [8, 9]
    assert list(fit(tmp_path, *several()[::order], max_duration="8ba", run_name="even")) == [6, 8]


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"mode": "least"}, {"save_interval": None, "save_at_end": False}])
def test_rejects_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CheckpointSaver(**arguments)


def test_waits_for_a_monitored_evaluator_that_was_not_due(tmp_path: Path) -> None:
    data = [(torch.ones(2, 3), torch.ones(2, 1))] * 4
    with Trainer(
        torch.nn.Linear(3, 1),
        torch.nn.functional.mse_loss,
        data,
        {"often": Evaluator(data, "1ba"), "seldom": Evaluator(data, "2ba")},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=[CheckpointSaver(save_interval=None, save_at_end=False, monitor="seldom/loss")],
        run_name="run",
        runs_folder=tmp_path,
    ) as trainer:
        trainer.fit()
    [best] = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert (best.step, best.seal.info["kind"]) == (4, "best")


class GivesScores(Callback):
    """Gives the evaluation after each step a score. The training loss of step 2 is NaN, but the gradients are finite."""

    phase = "change"

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def on_loss_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            ctx.loss = ctx.loss - ctx.loss.detach() + float("nan")

    def on_eval_end(self, ctx: Context) -> None:
        ctx.log({"validation/score": self.scores[ctx.step - 1]}, across="same")


@pytest.mark.parametrize(("scores", "best"), [([5.0, 1.0, 4.0, 3.0, 2.0], 5), ([5.0, 1.0, 6.0, 4.0, 4.5], 4)])
def test_a_best_checkpoint_that_is_not_finite_does_not_count(scores: list[float], best: int, tmp_path: Path) -> None:
    data = [(torch.ones(2, 2), torch.zeros(2, 1))] * 5
    saver = CheckpointSaver(save_interval=None, save_at_end=False, monitor="validation/score")
    with Trainer(
        torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data, data[:1], max_duration="5ba", eval_interval="1ba", run_name="run",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3), runs_folder=tmp_path, callbacks=[GivesScores(scores), saver],
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert [each.step for each in find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints] == [best]
