"""The parts of NeMo AutoModel's recipes that the host uses and that are not public API."""

PACKAGE = "nemo-automodel"

_RECIPE_CLASS = "nemo_automodel.recipes.llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction"
_MODE_IS_INFERRED = "which of training and validation is running is inferred from the model's mode and the step scheduler"

WITHOUT = {
    f"{_RECIPE_CLASS}._run_train_optim_step": _MODE_IS_INFERRED,
    f"{_RECIPE_CLASS}._run_validation_epoch": _MODE_IS_INFERRED,
}
"""For each of two methods, what happens if a recipe, such as the one for sequence classification, does not have the method."""
