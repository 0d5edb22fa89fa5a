"""Files as bytes, and the baselines."""

import math
from pathlib import Path

import numpy as np
import pytest

from callsheet import ConfigError
from callsheet.recipes.byte_files import ByteFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(80):
        (tmp_path / f"{number}.py").write_bytes(b"abababab" * 10)
    return tmp_path


def test_a_file_is_for_training_or_for_validation_and_stays_there(folder: Path) -> None:
    train, validation = ByteFiles(str(folder)).files
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == 80
    (folder / "another.py").write_text("x = 1\n")
    again = ByteFiles(str(folder)).files
    assert set(validation) <= set(again[1])
    assert set(train) <= set(again[0])


def test_the_standard_library_comes_without_its_tests() -> None:
    train, validation = ByteFiles().files
    assert any(path.name == "argparse.py" for path in [*train, *validation])
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in [*train, *validation])


def test_baselines_are_cross_entropies_in_nats(folder: Path) -> None:
    unigram, bigram = ByteFiles(str(folder)).baselines()
    assert unigram == pytest.approx(math.log(2), abs=0.2)  # a or b, and now and then a newline or a byte never seen
    assert bigram < 0.2  # after an a there is a b


def test_windows_are_stretches_of_the_bytes(folder: Path) -> None:
    data = ByteFiles(str(folder), sequence_length=16, validation_batches=2)
    batch = next(iter(data.train_dataloader(4)))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 16)
    text = data.train_bytes.tobytes()
    assert all(bytes(row.tolist()) in text for row in batch["input_ids"])
    assert len(data.validation_dataloader(4)) <= 2
    assert data.train_bytes.dtype == np.uint8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"folder": "/nowhere"}, "there is no folder /nowhere"),
        ({"validation_percent": 0}, "validation_percent"),
        ({"sequence_length": 1}, "sequence_length"),
    ],
)
def test_what_cannot_work_is_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _ = ByteFiles(**arguments).files  # type: ignore[arg-type]  # wrong on purpose
