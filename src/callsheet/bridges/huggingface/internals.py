"""The attributes of transformers that the bridge needs. If the installed version lacks one, the bridge raises `NotSupported`."""

PACKAGE = "transformers"

HOST = (
    *("transformers.Trainer.training_step", "transformers.Trainer.compute_loss", "transformers.Trainer.prediction_step"),
    *("transformers.Trainer.evaluate", "transformers.Trainer.state"),
)
"""The host wraps the methods in this list, and finds the Trainer in the call stack by its attributes `state` and `evaluate`."""

GUEST = (
    *("transformers.TrainerControl._new_training", "transformers.TrainerControl._new_step"),
    *("transformers.TrainerControl._new_epoch", "transformers.TrainerState.compute_steps"),
    "transformers.trainer_utils.speed_metrics",
)

WITHOUT = {
    "transformers.Trainer._inner_training_loop": (
        "a warning is logged, and an error that ends training may be recorded late and without its reason"
    )
}
"""For each attribute that the host can do without: what happens if the installed version lacks the attribute."""

EXEC = {"transformers.Trainer.callback_handler": "an error is logged, and the training is not observed"}
"""The attribute that only `callsheet exec` needs, and what happens if the installed version lacks the attribute."""
