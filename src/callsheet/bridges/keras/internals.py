"""The attributes of Keras that the host needs. If the installed version lacks one, the host raises `NotSupported`."""

PACKAGE = "keras"

HOST = (
    *("keras.Model.train_function", "keras.Model.test_function", "keras.Model.predict_function"),
    *("keras.Model._initial_epoch", "keras.optimizers.Optimizer.apply"),
)
"""The host wraps the functions in this list, and sets `_initial_epoch`, the epoch at which a resumed run continues."""

EXEC = {"keras.src.backend.torch.trainer.TorchTrainer.fit": "a warning is logged, and the training is not observed"}
"""The attribute that only `callsheet exec` needs, and what happens if the installed version lacks the attribute."""
