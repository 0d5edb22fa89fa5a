"""Files as bytes, and their baselines."""

import math
from pathlib import Path

import numpy as np
import pytest

from callsheet.errors import ConfigError
from callsheet.recipes.data.byte_files import ByteFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(80):
        (tmp_path / f"{number}.py").write_bytes(b"abababab" * 10)
    return tmp_path


def test_each_file_is_in_one_split_and_stays_there_when_a_file_is_added(folder: Path) -> None:
    train, validation, test = ByteFiles(str(folder)).files
    assert not set(train) & set(validation)
    assert not set(test) & {*train, *validation}
    assert len(train) + len(validation) + len(test) == 80
    (folder / "another.py").write_text("x = 1\n")
    again = ByteFiles(str(folder)).files
    assert set(validation) <= set(again[1])
    assert set(train) <= set(again[0])
    assert set(test) <= set(again[2])


def test_the_standard_library_is_read_without_its_tests() -> None:
    files = [path for part in ByteFiles().files for path in part]
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)


def test_baselines_are_cross_entropies_in_nats(folder: Path) -> None:
    unigram, bigram = ByteFiles(str(folder)).baselines()
    assert unigram == pytest.approx(math.log(2), abs=0.2)  # a or b, and rarely a newline or an unseen byte
    assert bigram < 0.2  # a b follows each a


def test_windows_are_slices_of_the_training_bytes(folder: Path) -> None:
    data = ByteFiles(str(folder), sequence_length=16, validation_windows=7)
    text, windows = data.train_bytes.tobytes(), data.train()
    for window in (windows[0], windows[len(windows) - 1]):
        assert window["input_ids"].shape == window["labels"].shape == (16,)
        assert bytes(window["input_ids"].tolist()) in text
    assert len(data.validation()) == len(data.test()) == 7
    assert data.train_bytes.dtype == np.uint8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folder": "/nowhere"}, "there is no folder /nowhere"),
        ({"validation_percent": 0}, "validation_percent"),
        ({"test_percent": 96}, "together less than 100"),
        ({"sequence_length": 1}, "sequence_length"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = ByteFiles(**arguments).files  # type: ignore[arg-type]  # the mistake that is tested
