"""Rows of files and folders: their splits, their file and line, and reading by workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader

from callsheet.errors import ConfigError
from callsheet.recipes.data.rows import Rows, number_rows, prepare_rows
from callsheet.recipes.data.tables import Stream, Table, reject
from callsheet.recipes.data.text_rows import TextRows
from callsheet.recipes.distill import DistillConfig
from callsheet.recipes.finetune import FinetuneConfig
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.recipes.pretrain import PretrainConfig


def write(path: Path, texts: list[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(rows: Rows) -> list[str]:
    return [row["text"] for row in rows.read(["text"])]


def test_a_folder_is_read_by_split(tmp_path: Path) -> None:
    for name in ("train-1", "train-2", "val", "test"):
        write(tmp_path / f"{name}.jsonl", [name])
    assert texts_of(Rows(str(tmp_path))) == ["train-1", "train-2"]
    assert texts_of(Rows(str(tmp_path), split="validation")) == ["val"]
    assert texts_of(Rows(str(tmp_path), split="test")) == ["test"]


def test_a_missing_split_is_an_error_if_files_are_named_after_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ["train"])
    with pytest.raises(ConfigError, match=r"no file of the split 'validation', but has train.jsonl"):
        Rows(str(tmp_path), split="validation").read(["text"])
    (tmp_path / "train.jsonl").rename(tmp_path / "rows.jsonl")
    assert texts_of(Rows(str(tmp_path), split="validation")) == ["train"]  # no file is named after a split


def test_each_row_has_its_file_and_line(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.jsonl", ["1", "2"]), write(tmp_path / "b.jsonl", ["3"])
    Path(one).write_text(Path(one).read_text().replace("\n", "\n\n", 1))
    table = Rows(str(tmp_path / "*.jsonl")).read(["text"])
    assert isinstance(table, Table)
    assert [place for place, _ in table.places()] == [f"{one}:1", f"{one}:3", f"{other}:1"]
    assert [row["text"] for row in table] == ["1", "2", "3"]


CALLS = [
    {"name": "add", "arguments": {"a": 1, "b": None}},
    {"name": "say", "arguments": {"text": "hi"}},
    {"name": "stop", "arguments": {}},
]


@pytest.mark.parametrize("streaming", [False, True])
def test_objects_of_a_parquet_file_have_only_their_own_keys(streaming: bool, tmp_path: Path) -> None:
    table = Dataset.from_list([{"messages": [{"role": "assistant", "tool_calls": [call]}], "text": None} for call in CALLS])
    table.to_parquet(tmp_path / "calls.parquet")
    own = [{"name": "add", "arguments": {"a": 1}}, *CALLS[1:]]
    rows = Rows(str(tmp_path / "calls.parquet"), streaming=streaming).read(["text"])
    assert list(rows) == [{"messages": [{"role": "assistant", "tool_calls": [call]}], "text": None} for call in own]
    assert [row for _, row in rows.places()] == list(rows)


def test_a_line_of_json_keeps_its_null_keys(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps({"call": call}) + "\n" for call in CALLS))
    assert [row["call"] for row in Rows(str(tmp_path / "calls.jsonl")).read(["call"])] == CALLS


def test_half_of_a_surrogate_pair_is_rejected_with_its_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl", ["\U0001f600", "\\ud83d"])  # a pair, and a backslash with text
    assert texts_of(Rows(whole)) == ["\U0001f600", "\\ud83d"]
    half = write(tmp_path / "half.jsonl", ["a", "\ud83d"])
    with pytest.raises(ConfigError, match=r"half\.jsonl:2: half of a surrogate pair, '\\ud83d'"):
        Rows(half).read(["text"])
    Path(half).write_bytes(b'{"text": "\xed\xa0\xbd"}\n')
    with pytest.raises(ConfigError, match=r"half\.jsonl:1: half of a surrogate pair"):
        Rows(half).read(["text"])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a', r"b\.jsonl:2: this line is not JSON"),
        ("[1]", r"b\.jsonl:2: this line is a JSON list, not an object"),
        ('{"words": "a"}', r"b\.jsonl:2: there is no column 'text' \(it has words\)"),
        ('{"text": "\\ud83d"}', r"b\.jsonl:2: half of a surrogate pair"),
        ('{"text": 5}', r"b\.jsonl:2: the column 'text' holds int, not a text; give a text"),
    ],
)
def test_a_damaged_line_of_a_stream_is_rejected_with_its_file_and_line(
    line: str, message: str, workers: int, tmp_path: Path
) -> None:
    write(tmp_path / "a.jsonl", ["whole"] * 3)
    damaged = Path(write(tmp_path / "b.jsonl", ["whole"]))
    damaged.write_text(f"{damaged.read_text()}{line}\n")
    dataset = TextRows(Rows(str(tmp_path), streaming=True), sequence_length=2).sets(byte_tokenizer()).datasets["train"]
    with pytest.raises(ConfigError, match=rf"^\S*{message}") as found:
        list(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert "\n" not in str(found.value)


def test_half_of_a_surrogate_pair_is_rejected_with_the_row_of_a_program(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [{"text": "\U0001f600", "image": object()}, {"messages": [{"content": "a\ud83d"}]}]
    rows = number_rows(given)
    assert next(rows) == ("row 1", given[0])
    with pytest.raises(ConfigError, match=r"^row 2: half of a surrogate pair, '\\ud83d', is not a character; remove it$"):
        next(rows)


@pytest.mark.parametrize("config", [PretrainConfig, FinetuneConfig, DistillConfig])
def test_half_of_a_surrogate_pair_is_rejected_with_its_prompt(config: Any) -> None:
    assert config(prompts=["\U0001f600"]).prompts == ["\U0001f600"]
    with pytest.raises(ConfigError, match=r"^prompts\[1\]: half of a surrogate pair, '\\ud83d'"):
        config(prompts=["a", "b\ud83d"])


def test_a_stream_keeps_the_types_and_null_keys_of_json_lines(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "2024-01-01"}, {"text": 5, "more": [1]}, {"text": {"a": None}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(Rows(str(tmp_path / "rows.jsonl"), streaming=True).read(["text"])) == rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_of_a_stream_that_was_deleted_is_named(kind: str, tmp_path: Path) -> None:
    for name in "ab":
        if kind == "jsonl":
            write(tmp_path / f"{name}.jsonl", [name])
        else:
            Dataset.from_list([{"text": name}]).to_parquet(tmp_path / f"{name}.parquet")
    rows = Rows(str(tmp_path / f"*.{kind}"), streaming=True).read(["text"])
    (tmp_path / f"b.{kind}").unlink()
    assert next(iter(rows))["text"] == "a"
    with pytest.raises(ConfigError, match=rf"there is no file .*b\.{kind}"):
        list(rows)


def test_a_parquet_file_of_a_stream_with_other_columns_is_named(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "a"}] * 2).to_parquet(tmp_path / "a.parquet")
    Dataset.from_list([{"words": "b"}]).to_parquet(tmp_path / "b.parquet")
    rows = Rows(str(tmp_path / "*.parquet"), streaming=True).read(["text"])
    with pytest.raises(
        ConfigError, match=r"b\.parquet, row 1: this row or one of the next rows cannot be read: CastError: .*; repair"
    ):
        list(rows)


def test_a_folder_of_json_lines_and_parquet_files_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["a"])
    Dataset.from_list([{"text": "b"}]).to_parquet(tmp_path / "b.parquet")
    for path in (str(tmp_path), str(tmp_path / "*")):
        with pytest.raises(
            ConfigError, match=r"files of JSON lines and Parquet files, such as a\.jsonl and b\.parquet; give a pattern"
        ):
            Rows(path).read(["text"])
    assert texts_of(Rows(str(tmp_path / "*.parquet"))) == ["b"]


def test_each_split_of_a_folder_may_have_another_kind_of_file(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ["a"])
    Dataset.from_list([{"text": "b"}]).to_parquet(tmp_path / "test.parquet")
    assert texts_of(Rows(str(tmp_path))) == ["a"]
    assert texts_of(Rows(str(tmp_path), split="test")) == ["b"]
    with pytest.raises(ConfigError, match=r"no file of the split 'validation', but has test\.parquet, train\.jsonl"):
        Rows(str(tmp_path), split="validation").read(["text"])
    (tmp_path / "train.parquet").mkdir()  # a folder of another program
    assert texts_of(Rows(str(tmp_path))) == ["a"]


def test_a_folder_that_datasets_saved_is_read_by_split(tmp_path: Path) -> None:
    DatasetDict({name: Dataset.from_list([{"text": name}]) for name in ("train", "test")}).save_to_disk(tmp_path / "saved")
    assert texts_of(Rows(str(tmp_path / "saved"), split="test")) == ["test"]


def test_workers_share_the_rows_of_a_saved_folder(tmp_path: Path) -> None:
    rows = [{"text": str(number)} for number in range(6)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=2)
    for limit in (None, 4):
        stream = Rows(str(tmp_path / "saved"), streaming=True, limit=limit).read(["text"])
        assert isinstance(stream, Stream)
        assert list(stream) == rows[:limit]
        read = list(DataLoader(stream, batch_size=None, num_workers=2))
        assert len(read) == len({row["text"] for row in read}) == (limit or len(rows))


def test_a_saved_folder_with_a_format_is_streamed_as_plain_rows(tmp_path: Path) -> None:
    saved = Dataset.from_list([{"text": str(number), "other": number} for number in range(3)])
    saved.set_format("torch", columns=["text"])
    saved.save_to_disk(tmp_path / "saved")
    assert list(Rows(str(tmp_path / "saved"), streaming=True).read(["text"])) == [{"text": str(number)} for number in range(3)]


def test_workers_read_all_rows_up_to_the_limit_of_a_saved_folder(tmp_path: Path) -> None:
    Dataset.from_list([{"text": str(number)} for number in range(12)]).save_to_disk(tmp_path / "saved", num_shards=3)
    for limit in (1, 10, 12):
        stream = Rows(str(tmp_path / "saved"), streaming=True, limit=limit).read(["text"])
        read = {row["text"] for row in DataLoader(stream, batch_size=None, num_workers=2)}  # type: ignore[arg-type]
        assert read == {str(number) for number in range(limit)}


def test_workers_read_the_first_rows_of_files_of_different_length(tmp_path: Path) -> None:
    for name, texts in (("a", ["1"]), ("b", ["2", "3", "4", "5"]), ("c", ["6", "7", "8"])):
        write(tmp_path / f"{name}.jsonl", texts)
    for limit in (1, 4, 6, 20):
        stream = Rows(str(tmp_path / "*.jsonl"), streaming=True, limit=limit).read(["text"])
        for workers in (0, 2):
            read = [row["text"] for row in DataLoader(stream, batch_size=None, num_workers=workers)]  # type: ignore[arg-type]
            assert sorted(read) == [str(number) for number in range(1, min(limit, 8) + 1)]


def test_a_worker_names_the_row_of_its_own_part(tmp_path: Path) -> None:
    Dataset.from_list([{"text": str(number)} for number in range(4)]).save_to_disk(tmp_path / "saved", num_shards=2)

    def rejects(row: Any, place: str) -> Any:
        return row if row["text"] != "3" else reject(place, "a mistake")

    rows = prepare_rows(Rows(str(tmp_path / "saved"), streaming=True).read(["text"]), rejects)
    with pytest.raises(ConfigError, match=r"saved, row 2 of the part of worker 1: a mistake"):
        list(DataLoader(rows, batch_size=None, num_workers=2))


def test_a_row_with_a_value_that_contains_itself_is_used() -> None:
    row: dict[str, Any] = {"text": "a"}
    row["itself"] = row
    assert [place for place, _ in number_rows([row])] == ["row 1"]


def test_a_missing_split_of_a_saved_folder_is_an_error_that_names_the_splits(tmp_path: Path) -> None:
    DatasetDict({name: Dataset.from_list([{"text": name}]) for name in ("train", "validation")}).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        ConfigError, match=r"saved has no split 'valid'; did you mean 'validation'\? \(it has train, validation\)$"
    ):
        Rows(str(tmp_path / "saved"), split="valid").read(["text"])


def test_the_name_of_a_file_may_have_brackets(tmp_path: Path) -> None:
    lines = write(tmp_path / "rows[1].jsonl", ["a", "b"])
    Dataset.from_list([{"text": "c"}]).to_parquet(tmp_path / "rows[1].parquet")
    assert texts_of(Rows(lines)) == texts_of(Rows(lines, streaming=True)) == ["a", "b"]
    assert texts_of(Rows(str(tmp_path / "rows[1].parquet"))) == ["c"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"path": "nothing-*.jsonl"}, "no file matches"),
        ({"path": "nothing.jsonl"}, "there is no file .*nothing.jsonl$"),
        ({"path": "hero.jsonl"}, "there is no file .*hero.jsonl; did you mean 'here.jsonl'?"),
        ({"path": "hero.jsonl", "streaming": True}, "there is no file .*hero.jsonl; did you mean 'here.jsonl'?"),
        ({"path": "nothing.parquet"}, "there is no file .*nothing.parquet$"),
        ({"path": "here.jsonl", "limit": 0}, "limit=0"),
        ({"path": "nothing"}, "no rows could be read from"),
    ],
)
def test_a_missing_file_or_a_bad_limit_is_rejected(rows: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "here.jsonl", ["a"])
    rows = {**rows, "path": str(tmp_path / rows["path"])}
    with pytest.raises(ConfigError, match=message):
        Rows(**rows).read(["text"])


@pytest.mark.parametrize("files", [1, 2])
def test_workers_share_a_stream_without_losing_rows(files: int, tmp_path: Path) -> None:
    for number in range(files):
        write(tmp_path / f"train-{number}.jsonl", [f"{number} has the words of row {row} and more" for row in range(20)])
    rows = TextRows(Rows(str(tmp_path / "train-*.jsonl"), streaming=True), sequence_length=8)
    counts = []
    for workers in (0, 2):
        dataset = rows.sets(byte_tokenizer()).datasets["train"]
        counts.append(sum(1 for _ in DataLoader(dataset, batch_size=None, num_workers=workers)))
    assert counts[0] - files <= counts[1] <= counts[0]  # the incomplete last window of each worker is dropped
