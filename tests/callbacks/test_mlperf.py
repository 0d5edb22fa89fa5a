from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, CallbackManager, Context, RunInfo, Trainer
from callsheet.callbacks.checkpoint_saver import CheckpointSaver
from callsheet.callbacks.mlperf import MLPerfCallback
from callsheet.callbacks.support.mlperf_result import ResultFile, find_hyperparameters, now_ms, samples
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

DATA = [(torch.ones(4, 2), torch.ones(4, 1))] * 4
GIVEN = {"train_samples": 16, "eval_samples": 4} | {
    f"lowest_numerical_precision_in_{where}": "fp32" for where in ("linear", "attn", "comm")
}
RULESET = "6.1.0"
LOSSES = [0.9, 0.7, 0.5, 0.3, 0.1, 0.0]
"""Of one evaluation after the other, an epoch each."""


class LogsValues(Callback):
    """Logs the given numbers, one per evaluation."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_eval_end(self, ctx: Context) -> None:
        value = 0.0 if ctx.standalone else self.values[ctx.epoch - 1]
        ctx.log({"validation/measured": value, "validation/error": value}, across="same")


def mlperf(**options: Any) -> MLPerfCallback:
    return MLPerfCallback(
        **{
            "benchmark": "llama31_8b",
            "target": 0.5,
            "monitor": "validation/measured",
            "mode": "min",
            "submitter": "somebody",
            "ruleset": RULESET,
            "hyperparameters": GIVEN,
            **options,
        }
    )


def trainer(folder: Path, *callbacks: Callback, values: list[float] = LOSSES, **options: Any) -> Trainer:
    usual: dict[str, Any] = {
        "train_dataloader": DATA,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "max_duration": "6ep",
        "run_name": "run",
    }
    return Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        eval_dataloader=DATA[:1],
        callbacks=CallbackManager([LogsValues(values), *callbacks], checking=True),
        runs_folder=folder,
        device="cpu",
        **(usual | options),
    )


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    with trainer(folder, *callbacks, **options) as trained:
        trained.fit()
    return trained


def results(folder: Path) -> list[Path]:
    return sorted(folder.rglob("result_*.txt"))


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the only result under the folder."""
    (path,) = results(folder)
    assert all(line.startswith(":::MLLOG ") for line in path.read_text().splitlines())
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def keys(folder: Path) -> list[str]:
    return [line["key"] for line in lines(folder)]


def value_of(folder: Path, key: str) -> Any:
    (value,) = [line["value"] for line in lines(folder) if line["key"] == key]
    return value


def status(folder: Path) -> str:
    (stop,) = [line for line in lines(folder) if line["key"] == "run_stop"]
    return str(stop["metadata"]["status"])


def checked(folder: Path, *options: str, ruleset: str = RULESET) -> tuple[bool, list[str]]:
    """Run the package's checker on the only result, and return whether it accepts it, and its complaints."""
    options = ("--ruleset", ruleset, *options) if ruleset else options
    (path,) = results(folder)
    log = folder / "compliance.log"
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--log_output", str(log)]
    done = subprocess.run([*command, *options, str(path)], capture_output=True, text=True, check=False, cwd=folder)
    assert "Traceback" not in done.stderr
    recorded = [line for line in log.read_text().splitlines() if not line.startswith("INFO - ")]
    return done.returncode == 0, [line for line in recorded if line != "ERROR - FAILED"]


# --- the checker ---


def test_the_checker_accepts_a_run_that_reaches_its_target(tmp_path: Path) -> None:
    trained = fit(tmp_path, mlperf(ruleset=""))
    assert checked(tmp_path, ruleset="") == (True, [])  # with the newest rules, which are the checker's default too
    assert checked(tmp_path, "--werror") == (True, [])
    assert (trained.state.timestamp.epoch, trained.run.outcome) == (3, "stopped")
    assert status(tmp_path) == "success"
    assert [line["value"] for line in lines(tmp_path) if line["key"] == "eval_accuracy"] == [0.9, 0.7, 0.5]


def test_the_checker_reports_only_the_missed_target_of_a_run_that_does_not_reach_it(tmp_path: Path) -> None:
    trained = fit(tmp_path, mlperf(), values=[1.5] * 6)
    assert status(tmp_path) == "aborted"
    assert trained.run.outcome == "finished"
    accepted, complaints = checked(tmp_path)
    assert not accepted
    assert complaints == ["WARNING -  Failed checks for eval_accuracy : v['value'] < 1.0"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama2_70b_lora", {}),
        ("flux1", {}),
        (
            "gpt_oss_20b",
            {
                "max_sequence_length": 8192,
                "opt_end_learning_rate": 0.0,
                "opt_learning_rate_warmup_steps": 0,
                "opt_learning_rate_decay_steps": 24,
                "opt_learning_rate_decay_schedule": "constant",
                "opt_gradient_clip_norm": 1.0,
            },
        ),
        (
            "dlrmv4",  # its rules limit the learning rate by the batch size, which they read first
            {
                "train_samples": 2290835423,
                "eval_samples": 2058204,
                "max_sequence_length": 1,
                "opt_base_learning_rate": 1e-6 * 4 / 8192,
                "opt_adam_beta_1": 0.9,
                "opt_adam_beta_2": 0.999,
                "opt_adam_epsilon": 1e-8,
                "opt_weight_decay": 0.0,
                "opt_gradient_clip_norm": 1.0,
                "opt_sparse_name": "sgd",
                "opt_sparse_base_learning_rate": 1e-6 * 4 / 8192,
                "opt_learning_rate_warmup_steps": 0,
                "opt_learning_rate_warmup_start_lr": 0.0,
                "eval_every_data_pct": 1,
            },
        ),
    ],
)
def test_the_checker_accepts_other_benchmarks(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    rises = {"mode": "max", "target": 0.8} if name == "dlrmv4" else {}
    fit(
        tmp_path,
        mlperf(benchmark=name, hyperparameters=GIVEN | more, **rises),
        values=[0.6, 0.7, 0.85] if rises else LOSSES,
        max_duration="24ba",
    )
    assert checked(tmp_path) == (True, [])
    assert status(tmp_path) == "success"


def test_older_rules_are_accepted_and_the_closed_division_rejects_missing_values(tmp_path: Path) -> None:
    fit(tmp_path / "older", mlperf(ruleset="5.1.0"))
    assert checked(tmp_path / "older", ruleset="5.1.0") == (True, [])
    with pytest.raises(ConfigError, match="max_sequence_length"):
        fit(tmp_path / "closed", mlperf(division="closed"))
    with pytest.raises(ConfigError, match="opt_name"):
        fit(tmp_path / "sgd", mlperf(division="closed"), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({"hyperparameters": GIVEN | {"lowest_numerical_precision_in_linear": "bf16"}}, "bfloat16"),
        ({"hyperparameters": {"train_samples": 16}}, "eval_samples"),
        ({"target": 1.25}, r"v\['value'\] < 1.0"),
        ({"ruleset": "6.0.0", "benchmark": "dlrm_dcnv2", "target": 2.0}, r"<= 1.0"),
    ],
)
def test_a_run_that_the_checker_would_reject_ends_after_its_first_step(
    tmp_path: Path, options: dict[str, Any], recorded: str
) -> None:
    trained = trainer(tmp_path, mlperf(**options))
    with pytest.raises(ConfigError, match=recorded) as caught:
        trained.fit()
    assert trained.state.timestamp.batch == 1
    assert "current context" not in str(caught.value)
    assert status(tmp_path) == "aborted"


@pytest.mark.test_all
def test_the_checker_leaves_no_trace_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "import logging, pathlib, sys\n"
        "from callsheet.callbacks.support.mlperf_result import ResultFile\n"
        "complaints = ResultFile(pathlib.Path(sys.argv[1])).complaints([('submission_org', 'me')], '6.1.0')\n"
        "assert 'submission_org' not in str(complaints) and 'submission_platform' in str(complaints), complaints\n"
        "assert logging.getLogger().handlers == []\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    fit(tmp_path / "runs", mlperf())
    assert ":::MLLOG" not in "".join(capsys.readouterr())


# --- the file ---


@pytest.mark.test_all
def test_the_clock_starts_before_the_data_is_made_and_stops_at_the_target(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def data() -> list[tuple[Tensor, Tensor]]:
        seen.append(keys(tmp_path))
        return DATA

    class RecordsKeys(Callback):
        phase = "restore"

        def on_eval_all_end(self, ctx: Context) -> None:
            seen.append(keys(tmp_path))

    fit(tmp_path, mlperf(), RecordsKeys(), train_dataloader=data)
    assert (seen[0][0], seen[0][1]) == ("init_start", "cache_clear")
    assert seen[0][-2:] == ["init_stop", "run_start"]
    assert [recorded[-1] for recorded in seen[1:]] == ["block_start", "block_start", "run_stop"]
    path = results(tmp_path)[0]
    system = path.parts[-3]
    assert path == tmp_path / "run" / "mlperf" / "results" / system / "llama31_8b" / "result_0.txt"
    assert system.startswith("1x_")
    times = [line["time_ms"] for line in lines(tmp_path)]
    assert times == sorted(times)


def test_events_are_written_in_order_with_epoch_and_samples(tmp_path: Path) -> None:
    fit(tmp_path, mlperf(target=0.7), eval_interval="2ba", values=[0.9, 0.6])
    recorded = [line for line in lines(tmp_path) if line["key"].startswith(("block", "epoch", "eval_a", "eval_st", "run"))]
    where = {"block": "first_epoch_num", "epoch": "epoch_num", "eval": "epoch_num", "run": "epoch_num"}
    assert [
        (line["key"], line["metadata"][where[line["key"].partition("_")[0]]], line["metadata"]["samples_count"])
        for line in recorded
    ] == [
        ("run_start", 0, 0),
        ("block_start", 1, 0),
        ("epoch_start", 1, 0),
        *(
            (key, 1, count)
            for count in (8, 16)
            for key in (
                "block_stop",
                "eval_start",
                "eval_accuracy",
                "eval_stop",
                "block_start",
            )
        ),
        ("epoch_stop", 1, 16),
        ("epoch_start", 2, 16),
        ("block_stop", 2, 24),
        ("eval_start", 2, 24),
        ("eval_accuracy", 2, 24),
        ("eval_stop", 2, 24),
        ("run_stop", 2, 24),
    ]
    kinds = {line["key"].rpartition("_")[2]: line["event_type"] for line in recorded}
    assert kinds == {"start": "INTERVAL_START", "stop": "INTERVAL_END", "accuracy": "POINT_IN_TIME"}
    assert checked(tmp_path) == (True, [])


def test_properties_of_the_run_are_written(tmp_path: Path) -> None:
    def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        weight, bias = parameters
        groups = [{"params": [bias], "weight_decay": 0.0}, {"params": [weight], "weight_decay": 0.25}]
        return torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.95), eps=1e-6)

    fit(
        tmp_path,
        mlperf(hyperparameters=GIVEN | {"config_filename": "big.yaml"}, system_name="my box", status="research"),
        optimizer=two_groups,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * (step + 1)),
        microbatch_size=3,
        gradient_accumulation_steps=2,
        seed=1234,
        max_duration="8ba",
        eval_interval="1ba",
    )
    expected = {
        "submission_org": "somebody",
        "submission_platform": "my box",
        "submission_status": "research",
        "submission_division": "open",
        "global_batch_size": 8,
        "micro_batch_size": 3,
        "gradient_accumulation_steps": 4,  # each batch of 4 is split into 3 and 1
        "max_steps": 8,
        "seed": 1234,
        "config_filename": "big.yaml",
        "opt_name": "adamw",
        "opt_base_learning_rate": 0.02,  # not the learning rate during the warm-up
        "opt_adamw_beta_1": 0.8,
        "opt_adamw_beta_2": 0.95,
        "opt_adamw_epsilon": 1e-6,
        "opt_adamw_weight_decay": 0.25,
        "tensor_parallelism": 1,
        "train_samples": 16,
    }
    assert {key: value_of(tmp_path, key) for key in expected} == expected
    assert results(tmp_path)[0].parts[-3] == "my_box"


def test_given_values_override_detected_ones(tmp_path: Path) -> None:
    fit(tmp_path, mlperf(hyperparameters=GIVEN | {"micro_batch_size": 7, "seed": 5, "tensor_parallelism": 2}))
    assert (value_of(tmp_path, "micro_batch_size"), value_of(tmp_path, "seed")) == (7, 5)
    assert "global_batch_size" not in keys(tmp_path)  # with ranks that share a sample, it is not detected


def test_values_are_detected_for_other_optimizers_and_batches() -> None:
    ctx = Context(RunInfo("run"))
    assert "opt_name" not in find_hyperparameters(ctx, [[1]], {})
    ctx.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5), weight_decay=0.125)
    recorded = find_hyperparameters(ctx, [[0, 0]], {})
    assert (recorded["opt_name"], recorded["opt_base_learning_rate"], recorded["opt_weight_decay"]) == ("sgd", 0.5, 0.125)
    assert "micro_batch_size" not in recorded
    ctx.optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    assert find_hyperparameters(ctx, [[1]], {})["opt_adam_beta_2"] == 0.999
    assert samples({"name": "text", "pair": [None, (torch.ones(3, 2), torch.ones(9))]}) == 3
    assert samples({"name": "text"}) == 0
    assert samples(torch.tensor(1.0)) == 1


def test_the_result_has_the_given_index_or_the_first_free_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        fit(tmp_path, mlperf(root_folder=tmp_path / "all"), run_name=name)
    fit(tmp_path, mlperf(root_folder=str(tmp_path / "all"), index=7), run_name="three")
    before = [path.read_bytes() for path in results(tmp_path)]
    assert [path.name for path in results(tmp_path)] == ["result_0.txt", "result_1.txt", "result_7.txt"]
    with pytest.raises(ConfigError, match="index=7"):
        fit(tmp_path, mlperf(root_folder=tmp_path / "all", index=7), run_name="four")
    assert [path.read_bytes() for path in results(tmp_path)] == before


# --- how runs end ---


class EndsRun(Callback):
    """Ends the run in one of several ways at the sixth step."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 6 and self.how == "raises":
            raise RuntimeError("broken")
        if ctx.step == 6 and self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if ctx.step == 6 and self.how == "stops":
            ctx.control.stop("enough", replicated=True)


@pytest.mark.parametrize("how", ["raises", "signal", "stops"])
def test_a_run_that_does_not_reach_the_target_is_aborted(tmp_path: Path, how: str) -> None:
    with trainer(tmp_path, mlperf(), EndsRun(how)) as trained:
        if how == "raises":
            with pytest.raises(RuntimeError, match="broken"):
                trained.fit()
        else:
            trained.fit()
    assert status(tmp_path) == "aborted"
    assert keys(tmp_path)[-1] == "run_stop"
    assert keys(tmp_path).count("block_start") == keys(tmp_path).count("block_stop")


def test_training_can_continue_after_the_target(tmp_path: Path) -> None:
    trained = fit(tmp_path, mlperf(stop=False))
    assert (trained.state.timestamp.epoch, trained.run.outcome) == (6, "finished")
    assert status(tmp_path) == "success"
    assert keys(tmp_path)[-1] == "run_stop"
    assert keys(tmp_path).count("eval_accuracy") == 3


@pytest.mark.parametrize(("mode", "monitor", "values"), [
    ("max", "validation/measured", [0.1, 0.4, 0.6]),
    ("auto", "validation/measured", [0.1, 0.4, 0.6]),
    ("min", "validation/measured", [0.9, 0.6, 0.4]),
    ("min", "validation/measured", [float("nan"), 0.6, 0.4]),
])  # fmt: skip
def test_the_target_is_reached_at_or_beyond_it(tmp_path: Path, mode: str, monitor: str, values: list[float]) -> None:
    trained = fit(tmp_path, mlperf(mode=mode, monitor=monitor), values=values)
    assert trained.state.timestamp.epoch == 3
    assert checked(tmp_path) == (True, [])


def test_manual_evaluations_are_not_in_the_result(tmp_path: Path) -> None:
    with trainer(tmp_path, mlperf()) as trained:
        trained.evaluate()
        trained.fit("1ep")
        trained.evaluate()
        assert keys(tmp_path)[-1] == "eval_stop"  # and nothing from later evaluations
        trained.fit("2ep")
        trained.fit("4ep")
        trained.close()
        trained.close()
    assert keys(tmp_path).count("eval_start") == 3
    assert checked(tmp_path) == (True, [])


def test_a_run_that_only_evaluates_writes_nothing(tmp_path: Path) -> None:
    with trainer(tmp_path, mlperf(), optimizer=None) as idle:
        idle.evaluate()
    assert not results(tmp_path)


def test_two_instances_work_in_one_run_and_one_instance_in_several_runs(tmp_path: Path) -> None:
    one, other = mlperf(root_folder=tmp_path / "one"), mlperf(root_folder=tmp_path / "other", target=0.8, stop=False)
    other.name = "other"
    began = []
    for name in ("first", "second"):
        began.append(now_ms())
        fit(tmp_path, one, other, run_name=name)
    assert one.state_dict() == {"reached": 0.5}
    for folder, evaluations in ((tmp_path / "one", 3), (tmp_path / "other", 2)):
        paths = results(folder)
        assert [path.name for path in paths] == ["result_0.txt", "result_1.txt"]
        for path, earliest in zip(paths, began, strict=True):
            text = path.read_text()
            first = json.loads(text.splitlines()[0].removeprefix(":::MLLOG "))
            assert (first["key"], first["time_ms"] >= earliest) == ("init_start", True)  # not the time of the constructor
            assert text.count('"eval_accuracy"') == evaluations
            assert text.count('"success"') == text.count('"run_start"') == 1


def test_weights_are_the_same_with_and_without_the_callback(tmp_path: Path) -> None:
    def weights(*callbacks: Callback) -> dict[str, Tensor]:
        torch.manual_seed(3)
        return fit(tmp_path, *callbacks, run_name=f"of{len(callbacks)}").model.state_dict()

    bare, watched = weights(), weights(mlperf(stop=False))
    assert all(torch.equal(bare[name], watched[name]) for name in bare)


# --- a resume ---


def test_a_resumed_run_stops_at_the_target_and_writes_no_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, mlperf(), CheckpointSaver(), EndsRun("signal"))
    assert status(tmp_path) == "aborted"
    before = results(tmp_path)[0].read_bytes()
    with caplog.at_level(logging.WARNING, "callsheet"):
        trained = fit(tmp_path, mlperf(), CheckpointSaver(), resume="auto")
    assert (trained.state.timestamp.epoch, trained.run.outcome) == (3, "stopped")
    assert "resumed at step 6" in caplog.text
    assert results(tmp_path)[0].read_bytes() == before
    again = fit(tmp_path, mlperf(), CheckpointSaver(), resume="auto")
    assert (again.state.timestamp.epoch, again.run.outcome) == (3, "stopped")
    further = fit(tmp_path, mlperf(target=0.3), CheckpointSaver(), resume="auto")
    assert further.state.timestamp.epoch == 4
    assert len(results(tmp_path)) == 1


# --- clearing the cache ---


def test_the_command_runs_without_a_shell_before_the_clock_starts(tmp_path: Path) -> None:
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(repr(sys.argv[2:]))"
    seen: list[bool] = []

    def data() -> list[tuple[Tensor, Tensor]]:
        seen.append((tmp_path / "cleared").exists())
        return DATA

    command = [sys.executable, "-c", program, str(tmp_path / "cleared"), "a b", "$HOME; exit 1"]
    fit(tmp_path, mlperf(cache_clear_cmd=command), train_dataloader=data)
    assert seen == [True]
    assert (tmp_path / "cleared").read_text() == "['a b', '$HOME; exit 1']"
    assert value_of(tmp_path, "cache_clear") is True
    assert checked(tmp_path) == (True, [])


def test_without_a_command_the_cache_is_not_cleared(tmp_path: Path) -> None:
    fit(tmp_path, mlperf())
    assert value_of(tmp_path, "cache_clear") is False


@pytest.mark.parametrize(
    ("command", "recorded"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no right to')"], "no right to"),
        (["there-is-no-such-program"], "No such file"),
    ],
)
def test_a_command_that_fails_ends_the_run(tmp_path: Path, command: list[str], recorded: str) -> None:
    with pytest.raises(ConfigError, match=recorded):
        trainer(tmp_path, mlperf(cache_clear_cmd=command))
    assert not results(tmp_path)


# --- many ranks ---


def on_a_rank(folder: str, options: dict[str, Any]) -> tuple[int, str]:
    command = [sys.executable, "-c", f"open({folder!r} + '/cleared', 'a').write('x')"]
    data = [(inputs[: 4 - rank], targets[: 4 - rank]) for rank in [int(os.environ["RANK"])] for inputs, targets in DATA]
    callback = mlperf(cache_clear_cmd=command, **options)
    with trainer(Path(folder), callback, shard_data=False, train_dataloader=data) as trained:
        trained.fit()
    return trained.state.timestamp.epoch, str(trained.run.outcome)


def test_two_ranks_stop_together_and_write_one_result(tmp_path: Path) -> None:
    assert run_ranks(on_a_rank, 2, str(tmp_path), {}) == [(3, "stopped")] * 2
    assert checked(tmp_path) == (True, [])
    assert value_of(tmp_path, "global_batch_size") == 7  # 4 and 3
    assert [line["metadata"]["samples_count"] for line in lines(tmp_path) if line["key"] == "eval_accuracy"] == [28, 56, 84]
    assert results(tmp_path)[0].parts[-3].startswith("2x_")
    assert (tmp_path / "cleared").read_text() == "x"  # by one rank of the machine


def rejected_on_a_rank(folder: str) -> str:
    try:
        on_a_rank(folder, {"target": 1.25})
    except ConfigError as error:
        return str(error)
    return ""


def test_two_ranks_reject_the_run_together(tmp_path: Path) -> None:
    one, other = run_ranks(rejected_on_a_rank, 2, str(tmp_path))
    assert "< 1.0" in one
    assert one == other


# --- arguments ---


def test_without_a_benchmark_it_warns_once_and_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"), trainer(tmp_path, MLPerfCallback()) as trained:
        trained.fit("1ep")
        trained.fit("2ep")
    assert [message for message in caplog.messages if "MLPerf" in message] == [
        "MLPerfCallback has nothing to do: give it a benchmark and a target"
    ]
    assert not results(tmp_path)


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({"benchmark": "lama31_8b"}, "did you mean 'llama31_8b'"),
        ({"benchmark": "bert"}, f"of the rules {RULESET}"),
        ({"ruleset": "6.1"}, f"did you mean '{RULESET}'"),
        ({"benchmark": ""}, "give both"),
        ({"target": None}, "give both"),
        ({"target": float("nan")}, "finite"),
        ({"submitter": ""}, "organization"),
        ({"monitor": "loss"}, "<dataset>/<metric>"),
        ({"mode": "least"}, "mode"),
        ({"division": "opened"}, "did you mean 'open'"),
        ({"status": "on-prem"}, "did you mean 'onprem'"),
        ({"index": -1}, "index=-1"),
        ({"cache_clear_cmd": "sync"}, "a list"),
        ({"cache_clear_cmd": []}, "a list"),
        ({"hyperparameters": {"run_stop": 1}}, "leave it out"),
        ({"hyperparameters": {"seed": torch.ones(1)}}, "plain data"),
    ],
)
def test_rejects_bad_arguments(options: Mapping[str, Any], recorded: str) -> None:
    with pytest.raises(ConfigError, match=recorded):
        mlperf(**options)


def test_a_dataset_that_is_not_evaluated_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'validation'"):
        fit(tmp_path, mlperf(monitor="valid/measured"))


def test_a_missing_package_is_named_in_the_error(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['mlperf_logging'] = None\n"
        "from callsheet.errors import MissingPackage\n"
        "from callsheet.callbacks.mlperf import MLPerfCallback\n"
        "MLPerfCallback()\n"
        "try:\n"
        "    MLPerfCallback(benchmark='flux1', target=0.5, submitter='me')\n"
        "except MissingPackage as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([python(), "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "pip install 'callsheet[mlperf]'" in done.stdout, done.stderr


def test_the_checker_accepts_the_result_of_a_hand_written_loop(tmp_path: Path) -> None:
    """The loop provides neither its data nor its microbatches, so these values are given."""
    manager = CallbackManager([mlperf(hyperparameters=GIVEN | {"micro_batch_size": 4})])
    ctx = Context(RunInfo("own", folder=tmp_path / "own"))
    manager.open(ctx)
    spans = manager.spans(ctx)
    with spans.train:
        for ctx.step in (1, 2):
            with spans.train_step:
                ctx.state.timestamp = ctx.state.timestamp.next_batch()
            ctx.standalone = False
            with spans.eval_all:
                ctx.eval_results = {"validation": {"measured": 1 / ctx.step}}
            ctx.close("on_eval_all_end")
            if ctx.control.stop_requested is not None:
                break
    manager.close()
    assert checked(tmp_path) == (True, [])


@pytest.fixture(autouse=True)
def _leaves_no_handlers() -> Iterator[None]:
    before = {name: list(logging.getLogger(name).handlers) for name in ("", "callsheet", "mllog_default")}
    yield
    assert {name: list(logging.getLogger(name).handlers) for name in before} == before


@pytest.mark.test_all
def test_the_checker_accepts_the_result_of_the_example(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "mlperf.py"
    done = subprocess.run([python(), str(example)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(results(tmp_path)[0].relative_to(tmp_path)) in done.stdout
    assert status(tmp_path) == "success"
    assert checked(tmp_path) == (True, [])


def test_a_file_is_written_line_by_line(tmp_path: Path) -> None:
    """The file of a killed process therefore has complete lines only."""
    result = ResultFile(tmp_path)
    result.write("run_start", epoch_num=1)
    assert result.path.read_text().endswith("}\n")
    result.close()
