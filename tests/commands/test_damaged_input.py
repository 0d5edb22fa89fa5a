"""Unreadable files and values are rejected with a one-line error that names the file or the key, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from callsheet.cli.main import main
from callsheet.errors import ConfigError
from callsheet.recipes import recipe as recipe_module
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.existing_run import reject_another_job
from callsheet.recipes.yaml_file import parse_yaml, read_yaml

BASE = "recipe: pretrain\nrun_name: mine\nmax_duration: 4ba\n"
DEEP = "[" * 400 + "]" * 400


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.startswith("callsheet: ")
    assert err.count("\n") == 1, err
    assert len(err) < 600
    return err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9: 1\n", ":1: the byte 0xe9 is not UTF-8"),
        (b"[1]\n", r": \[1\] is not a mapping of keys and values"),
        (b"seed: 1\na: [\n", ":3: this is not YAML"),
        (b"a: " + DEEP.encode(), ": its lists and mappings are nested too deeply"),
        (b"a: &x [*x]\n", ": its lists and mappings are nested too deeply"),
        (b"", ": nothing is not a mapping"),
    ],
)
def test_resuming_over_a_damaged_configuration_names_the_file_and_what_to_do(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.yaml{message}.*restore it.*resume='new'") as found:
        reject_another_job(tmp_path / "config.yaml", "seed: 1\n", ())
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "a: [1\nb: 2\n",
            "bad.yaml:2: this is not YAML: expected ',' or ']', but got ':', while parsing a flow sequence (line 1)",
        ),
        ("a:\n\tb: 1\n", "bad.yaml:2: this is not YAML: found character '\\t' that cannot start any token"),
        ("a: 1\nb: \x07\n", "bad.yaml:2: this is not YAML: the character 0x07 is not allowed"),
        ('a: 1\nb: ["\\ud83d"]\n', "bad.yaml:2: half of a surrogate pair, '\\ud83d', is not a character"),
        ("a: b: c\n", "bad.yaml:1: this is not YAML: mapping values are not allowed here"),
        ("a: 2001-99-99\n", "bad.yaml: a value cannot be read: month must be in 1..12; put it in quotes if it is a text"),
        (f"a: {DEEP}\n", "bad.yaml: its lists and mappings are nested too deeply"),
        ("{a: " * 1200, "bad.yaml: its lists and mappings are nested too deeply"),
        ("a: &x [*x]\n", "bad.yaml: its lists and mappings are nested too deeply"),
    ],
)
@pytest.mark.parametrize("words", [["show", "bad.yaml"], ["train", "bad.yaml"], ["show", "run"], ["evaluate", "run"]])
def test_a_file_that_is_not_yaml_is_rejected_with_its_line(
    words: list[str],
    content: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("bad.yaml")
    if words[-1] == "run":
        Path("runs", "run").mkdir(parents=True)
        path, message = Path("runs", "run", "config.yaml"), message.replace("bad.yaml", "runs/run/config.yaml")
    path.write_text(content)
    assert main(words) == 2
    assert error_line(capsys).startswith(f"callsheet: {message}")


def test_a_value_that_is_nested_too_deeply_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(BASE)
    for value in (DEEP, "&x [*x]"):
        assert main(["show", "mine.yaml", "--model", value]) == 2
        assert error_line(capsys).startswith("callsheet: --model: its lists and mappings are nested too deeply")
        assert parse_yaml(value) == value
        with monkeypatch.context() as patch:
            patch.setenv("CALLSHEET_MODEL", value)  # not a key itself, only its parts are
            assert main(["show", "mine.yaml"]) == 0
            assert error_line(capsys).startswith("callsheet: the environment variable CALLSHEET_MODEL is not a key")
            patch.setenv("CALLSHEET_PROMPTS", value)
            patch.delenv("CALLSHEET_MODEL")
            assert main(["show", "mine.yaml"]) == 2
            assert error_line(capsys).startswith("callsheet: CALLSHEET_PROMPTS: its lists and mappings are nested too deeply")
    assert main(["show", "mine.yaml", "--seed", "2001-99-99"]) == 2
    assert "seed" in error_line(capsys)


def test_a_date_as_the_key_of_a_value_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(BASE)
    assert main(["show", "mine.yaml", "--model.config", "{2020-01-01: 1}"]) in (0, 2)  # an error of a type would be raised


def test_half_of_a_surrogate_pair_in_a_value_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(BASE)
    for value in ('["\\ud83d"]', "\udcff"):  # Python reads a byte that is not UTF-8 as half of a surrogate pair
        assert main(["show", "mine.yaml", "--prompts", value]) == 2
        assert error_line(capsys).startswith("callsheet: --prompts: half of a surrogate pair, ")
    monkeypatch.setenv("CALLSHEET_PROMPTS", '["\\ud83d"]')
    assert main(["show", "mine.yaml"]) == 2
    assert error_line(capsys).startswith("callsheet: CALLSHEET_PROMPTS: half of a surrogate pair, ")


def test_a_row_that_is_nested_too_deeply_is_rejected_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": "a"}\n{"text": ' + "[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match=r"deep\.jsonl:2: the values of this line are nested too deeply"):
        Rows(str(path)).read(["text"])


def test_a_file_that_is_nested_30_levels_deep_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fine.yaml"
    path.write_text("a: " + "[" * 30 + "]" * 30 + "\n")
    assert set(read_yaml(path)) == {"a"}


def test_show_reports_that_a_run_was_not_made_from_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "metrics.jsonl").write_text("")
    assert main(["show", "mine"]) == 2
    assert "runs/mine has no config.yaml, so it is not the run of a recipe" in capsys.readouterr().err


def test_show_names_the_nearest_recipe_and_the_nearest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show", "pretrian"]) == 2
    assert error_line(capsys).startswith(
        "callsheet: there is no recipe or run 'pretrian'; did you mean 'pretrain'? (a YAML file; a recipe: "
    )
    run = Path("runs", "pretrian-2")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(BASE)
    assert main(["show", "pretrian"]) == 2
    assert "; did you mean 'pretrain', or the run 'pretrian-2'? (" in error_line(capsys)
    assert main(["show", "zzzz"]) == 2
    assert "there is no recipe or run 'zzzz' (a YAML file" in error_line(capsys)


def test_text_that_a_model_writes_cannot_change_the_terminal() -> None:
    assert recipe_module._printable("a\x07b\x1b[2J\n\tc\r\x9b\ud800 é漢") == "a\\x07b\\x1b[2J\n\tc\\r\\x9b\\ud800 é漢"
