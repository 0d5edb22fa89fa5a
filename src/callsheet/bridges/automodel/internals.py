"""The parts of NeMo AutoModel's recipes that the host uses and that are not public API."""

PACKAGE = "nemo-automodel"

_RECIPE = "nemo_automodel.recipes.llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction"
_INFERRED = "which of training and validation is running is inferred from the model's mode and the step scheduler"

WITHOUT = {f"{_RECIPE}._run_train_optim_step": _INFERRED, f"{_RECIPE}._run_validation_epoch": _INFERRED}
"""For each of two methods, what happens if a recipe, such as the one for sequence classification, does not have the method."""
