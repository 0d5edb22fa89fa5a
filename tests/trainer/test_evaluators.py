"""Several evaluators with their own schedules, on one and two ranks; tests, predictions, and interrupted evaluations."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, Outcome, Trainer
from callsheet.core.ranks import read_ranks
from callsheet.errors import ConfigError
from callsheet.testing import Recorder, check_events
from callsheet.testing.ranks import run_ranks
from callsheet.trainer import Evaluator
from callsheet.trainer.tasks import counts_of

STEPS = 12


def samples(number: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 2, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loader(number: int, seed: int, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(samples(number, seed), batch_size=batch_size)


class Evaluated(Callback):
    """Records which datasets were evaluated after which step, and the results."""

    def __init__(self) -> None:
        self.names: list[tuple[int, str]] = []
        self.results: list[dict[str, dict[str, float]]] = []

    def on_eval_end(self, ctx: Context) -> None:
        self.names.append((ctx.step, ctx.eval_name))

    def on_eval_all_end(self, ctx: Context) -> None:
        self.results.append(ctx.eval_results)


class RequestsEvaluation(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            ctx.control.evaluate("the test", replicated=True)


def trainer_of(*callbacks: Callback, world_size: int = 1, **changes: Any) -> Trainer:
    """Return a trainer with 12 steps an epoch; the global batches do not depend on the number of ranks."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        "eval_dataloader": {
            "often": Evaluator(loader(7, 1, 4 // world_size), "4ba"),
            "seldom": Evaluator(loader(3, 2, 4 // world_size), "6ba"),
            "default": loader(5, 3, 4 // world_size),
            "at_epochs": Evaluator(loader(4, 4, 4 // world_size), "1ep"),
        },
        "eval_interval": "5ba",
        "timeout_seconds": 20,
    }
    data = loader(4 * STEPS, 0, 4 // world_size)
    return Trainer(nn.Linear(2, 1), mse_loss, data, callbacks=callbacks, **(arguments | changes))


SCHEDULE = [
    (4, "often"),
    (5, "default"),
    (6, "seldom"),
    (8, "often"),
    (10, "default"),
    *((12, name) for name in ("often", "seldom", "default", "at_epochs")),  # all evaluators run at the end of training
]


def test_each_evaluator_has_its_own_schedule() -> None:
    evaluated, recorder = Evaluated(), Recorder()
    with trainer_of(evaluated, recorder) as trainer:
        trainer.fit("1ep")
        assert set(trainer.eval_results) == {"often", "seldom", "default", "at_epochs"}  # the last results of each evaluator
    assert evaluated.names == SCHEDULE
    check_events(recorder.events)


def test_a_request_runs_all_evaluators_and_counts_for_their_schedules() -> None:
    evaluated = Evaluated()
    with trainer_of(evaluated, RequestsEvaluation(7)) as trainer:
        trainer.fit("11ba")
    names = ["often", "seldom", "default", "at_epochs"]
    assert evaluated.names == [
        *SCHEDULE[:3],
        *((7, name) for name in names),
        *SCHEDULE[3:5],
        *((11, name) for name in names),
    ]


@pytest.mark.parametrize("step", [3, 4, 5, 6, 7, 10])
def test_each_evaluator_continues_its_schedule_after_a_resume(step: int, tmp_path: Path) -> None:
    class SavesAndStops(Callback):
        def on_checkpoint_due(self, ctx: Context) -> None:
            if ctx.step == step:
                ctx.control.save("the test")

        def on_train_step_start(self, ctx: Context) -> None:
            if ctx.step == step + 1:
                raise InterruptedError

    keep: dict[str, Any] = {"run_name": "run", "runs_folder": tmp_path, "resume": "auto"}
    first, rest = Evaluated(), Evaluated()
    with pytest.raises(InterruptedError), trainer_of(first, SavesAndStops(), **keep) as trainer:
        trainer.fit("1ep")
    with trainer_of(rest, **keep) as trainer:
        assert trainer.state.timestamp.batch == step
        trainer.fit("1ep")
    assert first.names + rest.names == SCHEDULE


def test_without_an_interval_an_evaluator_runs_only_on_request() -> None:
    evaluated = Evaluated()
    with trainer_of(evaluated, RequestsEvaluation(2), eval_dataloader={"asked": loader(2, 1)}, eval_interval=None) as trainer:
        trainer.fit("1ep")
    assert evaluated.names == [(2, "asked")]


def test_a_bad_interval_is_rejected_with_the_evaluator_s_name() -> None:
    with pytest.raises(ConfigError, match="the interval of 'often'='4 batches'"):
        trainer_of(eval_dataloader={"often": Evaluator(loader(1, 1), "4 batches")})


# --- on two ranks ---


def evaluate_on(world_size: int) -> dict[str, Any]:
    if world_size > 1:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    evaluated, recorder = Evaluated(), Recorder()
    whole = loader(9, 8, 4 // world_size)
    with trainer_of(evaluated, RequestsEvaluation(7), recorder, world_size=world_size) as trainer:
        trainer.fit("1ep")
        tested = trainer.test(whole)
        by_hand = trainer.evaluate({"whole": whole})
        predicted = [outputs.flatten().tolist() for outputs in trainer.predict(whole)]
        predicted_one = [outputs.flatten().tolist() for outputs in trainer.predict(loader(1, 9, 1))]
    check_events(recorder.events)
    return {
        "names": evaluated.names,
        "results": evaluated.results,
        "tested": tested,
        "by_hand": by_hand["whole"],
        "predicted": predicted,
        "predicted_one": predicted_one,
        "steps": recorder.events.count("on_predict_step_end"),
    }


def test_two_ranks_compute_the_results_of_one() -> None:
    """9 samples are shared as 2 and 2, 2 and 2, 1 and a filler; predictions leave the filler out."""
    alone = evaluate_on(1)
    ranks = run_ranks(evaluate_on, 2, 2)
    for found in ranks:
        assert found["names"] == alone["names"]
        assert len(found["results"]) == len(alone["results"])
        for one, other in zip(found["results"], alone["results"], strict=True):
            assert {name: values["loss"] for name, values in one.items()} == pytest.approx(
                {name: values["loss"] for name, values in other.items()}, rel=1e-4
            )
        assert found["tested"] == pytest.approx(alone["tested"], rel=1e-4)
        assert found["tested"] == found["by_hand"]
        assert found["steps"] == 3 + 1
    assert [found["results"] for found in ranks] == [ranks[0]["results"]] * 2
    everything = sorted(value for found in ranks for outputs in found["predicted"] for value in outputs)
    assert everything == pytest.approx(sorted(value for outputs in alone["predicted"] for value in outputs), rel=1e-4)
    assert [[len(outputs) for outputs in found["predicted"]] for found in ranks] == [[2, 2, 1], [2, 2]]
    assert [len(found["predicted_one"]) for found in ranks] == [1, 0]


# --- interrupted by a signal ---


class Signals(Callback):
    """Sends the process SIGTERM at the second step of the second dataset."""

    def __init__(self, rank: int = 0) -> None:
        self.seen = 0
        self.rank = rank

    def on_eval_step_start(self, ctx: Context) -> None:
        if ctx.eval_name == "b":
            self.seen += 1
            if self.seen == 2 and ctx.run.rank == self.rank:
                signal.raise_signal(signal.SIGTERM)


def train_until_the_signal(folder: Path) -> dict[str, Any]:
    """Evaluate three datasets after step 3, while only the last rank receives the signal. Then resume the run."""
    if read_ranks().world_size > 1:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    found: dict[str, Any] = {}
    # Ranks agree about every 0.25 s, estimated from the time of the last step.
    data = {
        "a": loader(4, 1),
        "b": loader(8000, 1),
        "c": loader(4, 1),
    }
    keep: dict[str, Any] = {
        "run_name": "run",
        "runs_folder": folder,
        "resume": "auto",
        "eval_dataloader": data,
        "eval_interval": "3ba",
        "grace_seconds": 60.0,
    }
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        for name in ("first", "second"):
            evaluated, recorder = Evaluated(), Recorder(fields=("eval_results",))
            is_last = 1 if distributed.is_initialized() else 0
            callbacks = [evaluated, recorder, *([Signals(is_last)] if name == "first" else [])]
            with trainer_of(*callbacks, **keep) as trainer:
                trainer.fit("4ba")
            check_events(recorder.events)
            found[name] = {
                "names": evaluated.names,
                "results": [sorted(results) for results in evaluated.results],
                "outcome": str(trainer.run.outcome),
                "steps": trainer.state.timestamp.batch,
                "eval_steps": recorder.events.count("on_eval_step_end"),
                "events": [event for event in recorder.events if event in _ORDER],
            }
    finally:
        signal.signal(signal.SIGTERM, earlier)
    return found


_ORDER = ("on_eval_all_start", "on_eval_start", "on_eval_end", "on_eval_all_end", "on_preempt", "on_checkpoint_save_end")


@pytest.mark.test_all
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_that_a_signal_interrupts_is_repeated_on_resume(world_size: int, tmp_path: Path) -> None:
    ranks = run_ranks(train_until_the_signal, world_size, tmp_path)
    assert all(found == ranks[0] for found in ranks)
    first, second = ranks[0]["first"], ranks[0]["second"]
    assert (first["outcome"], first["steps"]) == (str(Outcome.PREEMPTED), 3)
    assert first["names"] == [(3, "a"), (3, "b")]
    assert first["results"] == [[]]  # results of an interrupted evaluation are discarded, and it is repeated
    assert first["eval_steps"] < 4000 // world_size  # the evaluation of the second dataset was interrupted
    assert first["events"] == [
        "on_eval_all_start",
        *("on_eval_start", "on_eval_end") * 2,
        "on_eval_all_end",
        "on_preempt",
        "on_checkpoint_save_end",
    ]
    assert (second["outcome"], second["steps"]) == (str(Outcome.FINISHED), 4)
    assert {name for step, name in second["names"] if step == 3} == {"a", "b", "c"}  # with the weights for which it was due
    assert second["results"][0] == ["a", "b", "c"]


@pytest.mark.parametrize("ids", [[torch.tensor([1.0, 2.0]), torch.tensor([3.0])], "text", torch.tensor(1.0)])
def test_batches_whose_input_ids_are_no_tensor_of_samples_have_no_known_tokens(ids: Any) -> None:
    samples, tokens = counts_of({"input_ids": ids, "labels": torch.ones(3, 1)})
    assert samples
    assert tokens == 0
