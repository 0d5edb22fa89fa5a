"""Log messages of ranks other than 0: which ones are filtered, for which handlers, and for how long."""

from __future__ import annotations

import functools
import io
import logging
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss

from callsheet import Callback, Context, Trainer
from callsheet.core.ranks import Ranks
from callsheet.errors import ConfigError
from callsheet.run.log_ranks import LogRanks, LogRanksChoice
from callsheet.testing.ranks import run_ranks

LOGGER_NAMES = ("root", "callsheet", "mine.deep", "lastResort")
CASES: list[tuple[LogRanksChoice, bool]] = [("zero", False), ("zero", True), ("all", False)]


class LogsRecords(Callback):
    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def on_run_start(self, ctx: Context) -> None:
        _log("set-up")

    def on_train_step_end(self, ctx: Context) -> None:
        _log("training")
        if self.fails:
            raise LookupError("the callback's own")

    def on_run_end(self, ctx: Context) -> None:
        _log("end")


def _log(when: str) -> None:
    for name in (None, "callsheet", "mine.deep", "never.seen.before"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "%s %s", when, logging.getLevelName(level).lower())


def logged(logger_name: str, log_ranks: LogRanksChoice, fails: bool) -> dict[str, list[str]]:
    """Return the levels that a handler of the logger `logger_name` receives on this rank, by the time at which they were logged."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    for other in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(other)
    if logger_name == "lastResort":
        logging.lastResort = handler
    else:
        logging.getLogger(None if logger_name == "root" else logger_name).addHandler(handler)
    _log("before")
    with suppress(LookupError):
        with Trainer(
            nn.Linear(1, 1),
            mse_loss,
            [(torch.ones(1, 1), torch.ones(1, 1))] * 2,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            callbacks=LogsRecords(fails=fails),
            log_ranks=log_ranks,
        ) as trainer:
            trainer.fit("1ba")
    _log("after")
    logging.getLogger(None if logger_name in ("root", "lastResort") else logger_name).removeHandler(handler)
    lines = [line.split() for line in stream.getvalue().splitlines() if line.split()[0] in _TIMES]
    return {when: sorted({line[1] for line in lines if line[0] == when}) for when in _TIMES}


def logged_in_all_cases() -> dict[tuple[str, str, bool], Any]:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    return {(logger_name, *case): logged(logger_name, *case) for logger_name in LOGGER_NAMES for case in CASES}


@functools.cache
def logged_on_ranks() -> list[dict[tuple[str, str, bool], Any]]:
    return run_ranks(logged_in_all_cases, 2)


_TIMES = ("before", "set-up", "training", "end", "after")
_ALL = ["error", "info", "warning"]


@pytest.mark.test_all
@pytest.mark.parametrize("logger_name", LOGGER_NAMES)
@pytest.mark.parametrize(("log_ranks", "fails"), CASES)
def test_other_ranks_log_only_errors_during_the_run(logger_name: str, log_ranks: str, fails: bool) -> None:
    zero, one = (found[logger_name, log_ranks, fails] for found in logged_on_ranks())
    assert zero == dict.fromkeys(_TIMES, _ALL)
    during_the_run = ["error"] if log_ranks == "zero" else _ALL
    assert one == {"before": _ALL, "set-up": during_the_run, "training": during_the_run, "end": during_the_run, "after": _ALL}


def test_the_end_of_a_run_keeps_the_log_filter_of_another_run() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("tests.log_ranks")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        outer, inner = (LogRanks("zero", Ranks(rank=1, local_rank=1, world_size=2)) for _ in range(2))
        outer.start()
        inner.start()
        inner.end()
        logger.warning("inside")
        outer.end()
        outer.end()
        logger.warning("outside")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue() == "outside\n"
    assert not handler.filters


def test_filtering_creates_no_loggers() -> None:
    logging.getLogger("tests.placeholder.child")
    before = dict(logging.Logger.manager.loggerDict)
    log_filter = LogRanks("zero", Ranks(rank=1, local_rank=1, world_size=2))
    log_filter.start()
    log_filter.end()
    assert dict(logging.Logger.manager.loggerDict) == before


def test_an_unknown_choice_of_log_ranks_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"unknown log_ranks 'zeros'; did you mean 'zero'"):
        LogRanks("zeros", Ranks())  # type: ignore[arg-type]  # the mistake that is tested
