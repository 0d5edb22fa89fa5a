"""Each table that is indexed by the words of a `Literal` has an entry for every word."""

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from callsheet.callbacks import runtime_estimator
from callsheet.callbacks.support import inference_files
from callsheet.recipes.models import language_model
from callsheet.report import imports


@pytest.mark.parametrize(
    ("words", "table"),
    [
        (runtime_estimator.Unit, runtime_estimator._SECONDS_PER_UNIT),
        (inference_files.Format, inference_files.FORMATS),
        (language_model.DtypeName, language_model._DTYPES),
        (imports.SourceKind, imports.KINDS),
    ],
    ids=lambda value: "" if isinstance(value, Mapping) else "-".join(get_args(value)),
)
def test_a_table_has_every_word_of_its_type(words: Any, table: Mapping[str, Any]) -> None:
    assert tuple(table) == get_args(words)
