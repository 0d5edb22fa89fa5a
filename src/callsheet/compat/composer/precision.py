"""`composer.core.precision`: the enum of Composer's numeric precisions."""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """Composer's names for numeric precisions, in upper or lower case. The Trainer rejects `AMP_FP8`."""

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP8 = "amp_fp8"

    @classmethod
    def _missing_(cls, value: object) -> Precision | None:
        return next((each for each in cls if each.value == str(value).lower()), None)
