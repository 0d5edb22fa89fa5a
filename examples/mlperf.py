"""Write an MLPerf Training result and check it. The model is far too small for a real result.

python examples/mlperf.py
python -m mlperf_logging.compliance_checker --usage training --ruleset 6.1.0 runs/mlperf/mlperf/results/*/llama31_8b/result_0.txt
"""

from pathlib import Path

import torch

from callsheet import Trainer
from callsheet.callbacks import MLPerfCallback


def main() -> None:
    """Fit a line to points until the loss is small enough."""
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
    data = list(zip(inputs.split(8), (3 * inputs + 1).split(8), strict=True))
    result = MLPerfCallback(
        benchmark="llama31_8b",
        target=0.05,  # for `validation/loss`, the default of `monitor`
        submitter="Example",
        ruleset="6.1.0",
        hyperparameters={  # values that the rules require and the run does not know
            "train_samples": len(inputs),
            "eval_samples": len(inputs),
            "lowest_numerical_precision_in_linear": "fp32",
            "lowest_numerical_precision_in_attn": "fp32",
            "lowest_numerical_precision_in_comm": "fp32",
        },
    )
    with Trainer(
        torch.nn.Linear(1, 1),
        torch.nn.functional.mse_loss,
        data,
        data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        max_duration="50ep",
        callbacks=result,
        run_name="mlperf",
        device="cpu",
    ) as trainer:
        trainer.fit()
    print(f"{trainer.run.outcome} after {trainer.state.timestamp.epoch} epochs at {trainer.eval_results}")
    print(*Path("runs").rglob("result_*.txt"))


if __name__ == "__main__":
    main()
