"""What `behavior.py` knows about the differences from commit 218f8947, the last one before the redesign: new names, and reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass

RENAMED: dict[str, str] = {
    "FieldNotTold": "FieldNotAvailable",
    "NotCarried": "NotSupported",
    "RequestRefused": "RequestRejected",
    "LogRecord": "MetricsRecord",
    "Told": "RecordedEvent",
    "accumulate": "gradient_accumulation_steps",
    "refuse": "reject",
    "refused": "rejected",
    "hears": "listens",
    "NOT_TOLD": "NOT_FIRED",
    "TOLD_AT": "FIRED_AT",
    "TOLD_AT_EVALUATION": "FIRED_AT_EVALUATION",
    "TOLD_FROM": "FIRED_AT",
    "TOLD": "FIRED_AT",
    "HOST_EVENTS": "FIRED_AT",
}
"""Maps the old name of a field, metric, option or public name to the new one."""

RENAMED_IN_TESTS = RENAMED | {
    "accumulate": "set_gradient_accumulation",
    "test_what_is_too_large_is_refused": "test_a_payload_above_the_size_limit_is_rejected",
    "test_what_the_loop_cannot_do_is_refused_and_leaves_nothing": "test_an_unsupported_request_is_rejected_and_not_kept",
}
"""The same for the tests of rejected input, where `accumulate` is a method of `Control`, and two tests have quite different names."""


@dataclass(frozen=True)
class Reason:
    """Why values differ. `part` and `key` are regular expressions, which must match at the start of the title of a part and of a key.

    `change` limits the reason to values that were "added", "removed" or "changed"; empty for all.
    """

    text: str
    part: str
    key: str = ""
    change: str = ""

    def explains(self, part: str, key: str, change: str) -> bool:
        return bool(re.match(self.part, part) and re.match(self.key, key)) and self.change in ("", change)


REWORDED = "The message is in plain English now (STYLE.md). The test, the rejected input and the class of the error are the same."

NEW_NAMES = {
    r"callsheet\.bridges\.instructlab/FIRED_AT": "The name of the table is the same in all hosts; it was `EVENT_MAP`.",
    r"callsheet\.bridges\.ultralytics": "New: the Ultralytics bridge.",
    r"callsheet\.plugins\.": "New: the plugins for axolotl and ms-swift.",
    r"callsheet\.launcher": "The module of `launch` is a public import path now.",
    r"callsheet\.bridges\.matrix/": "New: the matrix has the trainers of other libraries that are built on a framework's trainer.",
    r"callsheet\.checkpoint/|callsheet/CostReport|callsheet\.compat\.automodel/BaseRecipe|callsheet\.recipes/DistillationTask": (
        "A class or function that the docs refer to, or that signatures of public functions contain, is public now."
    ),
    r"callsheet\.errors/": "A helper of other modules, beside the errors; users do not need it.",
    r"callsheet\.report/(Imported|import_runs)": "New: `callsheet import` and its function.",
    r"callsheet\.report/(leave|withdraw)_request": "The functions behind the buttons of the live report are public now.",
}
OLD_NAMES = {
    r"callsheet/(?!TimeUnit)": "The public face is small: `callsheet` exports the few errors that programs catch. All are in `callsheet.errors`.",
    r"callsheet/TimeUnit": "The public face is small: `Time` and `Interval` take units as strings. `TimeUnit` is in `callsheet.core.time`.",
    r"callsheet\.metrics/": "The public module has `MetricLog` alone; the module that defines it is `callsheet.run.metrics`.",
    r"callsheet\.bridges\.bare/": "The public module has `attach` alone; its parts are in modules of their own.",
    r"callsheet\.bridges\.(composer|instructlab)/EVENT_MAP": (
        "Composer's was a second name of `COMPOSER_EVENTS` in `callsheet.bridges.composer.names`; InstructLab's table is `FIRED_AT`."
    ),
    r"in docs/callsheet/": "The old docs imported an error from `callsheet`; it is in `callsheet.errors`.",
    r"in docs/callsheet\.recipes\.": "Data, models and tasks of recipes are in subfolders. The name is imported from `callsheet.recipes`, as before.",
}

REASONS: tuple[Reason, ...] = (
    *(Reason(text, "names", key, "added") for key, text in NEW_NAMES.items()),
    *(Reason(text, "names", key, "removed") for key, text in OLD_NAMES.items()),
    Reason("New commands.", "commands", "(compare|delete|exec|import|mark)/", "added"),
    Reason("New options of the commands that list, report and watch runs.", "commands", "(runs|report|watch)/", "added"),
    Reason("An option of a new command, in the examples of `callsheet --help`.", "commands", "callsheet/", "added"),
    Reason("New: the Ultralytics bridge.", "matrix", "ultralytics/", "added"),
    Reason(
        "New: the matrix has the trainers of other libraries that are built on a framework's trainer.",
        "matrix",
        ".*/derived/",
        "added",
    ),
    Reason(
        "A row of the matrix has a new name; its verdict is the same.",
        "matrix",
        "lightning/guests/EarlyStopping (in the midst|during)",
    ),
    *(
        Reason(
            "With `strict=False`, a callback that reads a field which the framework does not provide is not called at that event, "
            "and training and the other callbacks continue. Before, its error ended the run of all callbacks.",
            part,
            key,
        )
        for part, key in (("matrix", "instructlab/callbacks/SpeedMonitor/"), ("hosts instructlab", "outcome with built-ins"))
    ),
    Reason(
        "A hand-written loop evaluates and steps its scheduler after an epoch, so `on_checkpoint_due` at the end of an epoch is fired "
        "when the loop has done this. Before, it was fired at the end of the epoch, and again after the evaluation.",
        "hosts (bare|accelerate)",
        r"on_checkpoint_due \d+(/|$)",
    ),
    Reason(
        "New files in a run's folder: its settings and its environment.",
        "(recipes|run_folders)",
        r"file/(settings|environment)\.json",
        "added",
    ),
    Reason(
        "The loss with class weights is 0, and not NaN, if the classes of all samples have weight 0. It is computed as a sum divided by the "
        "weights, so its last bits differ.",
        "(recipes|run_folders) classify",
        r"(events|metrics) \d+/(checkpoint|results|values)/",
        "changed",
    ),
    Reason(
        "The manifest has the times of the save, whose numbers of digits vary.",
        "(recipes|run_folders)",
        r"events \d+/checkpoint/size_bytes",
        "changed",
    ),
    Reason("New fields of the records of events.", "(recipes|run_folders)", r"events \d+/(seconds|epochs)", "added"),
    Reason(
        "A resumed run keeps the records of the checkpoint's step that were logged after the checkpoint, such as those of an evaluation. "
        "Before, they were dropped.",
        "run_folders",
        r"metrics \d+/records",
        "changed",
    ),
    Reason("New: a wrong declaration of `requests` or `required_fields` is rejected.", "rejections", ".*halt", "added"),
    Reason(
        "The limit of a payload is checked for more kinds of values.", "rejections", ".*the value: .* bytes, more than", "added"
    ),
    Reason(
        "New: a value that is nested too deeply to be compared is rejected with its path.",
        "rejections",
        ".*nested deeper",
        "added",
    ),
)
"""The first reason that explains a difference is the one that is reported."""


def reason(part: str, key: str, change: str) -> str:
    """Return why a value differs, or an empty string if nobody has written it down."""
    return next((each.text for each in REASONS if each.explains(part, key, change)), "")
