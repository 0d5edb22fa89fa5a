"""The attributes of torchtnt that the bridge needs. If the installed version lacks one, the bridge raises `NotSupported`."""

PACKAGE = "torchtnt"

HOST = (
    *("torchtnt.framework.unit.TrainUnit.get_next_train_batch", "torchtnt.framework.unit.EvalUnit.get_next_eval_batch"),
    *("torchtnt.framework.unit.PredictUnit.get_next_predict_batch", "torchtnt.framework.unit.TrainUnit.tracked_modules"),
    *("torchtnt.framework.unit.TrainUnit.tracked_optimizers", "torchtnt.framework.unit.TrainUnit.tracked_lr_schedulers"),
)
"""The host wraps the `get_next_...` methods, and finds the unit's module, optimizer and scheduler by the `tracked_...` methods."""

_STATE_CLASS, _PHASE_STATE_CLASS = "torchtnt.framework.state.State", "torchtnt.framework.state.PhaseState"

GUEST = (
    *(
        f"{_STATE_CLASS}.{name}"
        for name in ("_entry_point", "_active_phase", "_train_state", "_eval_state", "_predict_state", "_timer")
    ),
    *(f"{_PHASE_STATE_CLASS}.{name}" for name in ("_dataloader", "_max_epochs", "_max_steps")),
)
"""The attributes of torchtnt's `State` and `PhaseState` that the guest's subclasses of these classes replace or set."""
