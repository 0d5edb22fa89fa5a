from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from callsheet.loggers.support.output_log import OutputLog


def written(path: Path, *texts: str, max_bytes: int | None = None) -> str:
    log = OutputLog(path / "log", max_bytes)
    for text in texts:
        log.write(text)
    log.close()
    return (path / "log").read_text()


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["one\ntwo\n"], "one\ntwo\n"),
        (["on", "e\nt", "wo\n"], "one\ntwo\n"),
        (["no end"], "no end\n"),
        (["\n", "  \n"], "\n  \n"),
        (["windows\r\n"], "windows\n"),
        (["\r 10%", "\r 50%", "\r100%\n"], "100%\n"),  # as tqdm writes
        (["10%\r", "50%\r", "100%\r", "\n"], "100%\n"),
        (["\r 10%", "\r     \r", "said above\n", "\r 20%\n"], "said above\n 20%\n"),
        # as rich does
        (["\r\x1b[2Kbar one", "\r\x1b[2Kprinted\nbar two", "\r\x1b[2Kbar three\n\x1b[?25h"], "printed\nbar three\n"),
        (["\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07\n"], "red link\n"),
        (["\x1b[?25l\n", "after\n"], "after\n"),
        (["höher \ud800\n"], "höher \\ud800\n"),
    ],
)
def test_the_file_contains_what_a_terminal_shows(tmp_path: Path, texts: list[str], shown: str) -> None:
    assert written(tmp_path, *texts) == shown


def test_it_appends_to_an_existing_file(tmp_path: Path) -> None:
    written(tmp_path, "one\n")
    assert written(tmp_path, "two\n") == "one\ntwo\n"


def test_a_line_is_written_when_it_is_complete(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "deep" / "log")
    log.write("one\ntw")
    assert (tmp_path / "deep" / "log").read_text() == "one\n"
    log.close()
    log.close()
    log.write("late\n")
    assert (tmp_path / "deep" / "log").read_text() == "one\ntw\n"


def test_lines_of_two_streams_are_not_mixed(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log")
    for text, stream in [("out ", "stdout"), ("err ", "stderr"), ("one\n", "stdout"), ("two\n", "stderr")]:
        log.write(text, stream)
    log.close()
    assert (tmp_path / "log").read_text() == "out one\nerr two\n"


@pytest.mark.test_all
def test_a_bar_that_is_rewritten_for_hours_takes_no_memory(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log")
    for number in range(100_000):
        log.write(f"\r{number:050}")
    assert sum(map(len, log._lines.values())) < 200_000
    log.write("\n")
    log.write("x" * 200_000)  # neither a newline nor a carriage return
    assert len((tmp_path / "log").read_text()) == 51 + 200_001
    log.close()


def test_the_size_limit_is_kept(tmp_path: Path) -> None:
    assert written(tmp_path, *(f"{number:09}\n" for number in range(25)), max_bytes=100) == "".join(
        f"{number:09}\n" for number in range(20, 25)
    )
    assert (tmp_path / "log.1").read_text() == "".join(f"{number:09}\n" for number in range(10, 20))
    assert written(tmp_path, *(f"{number:09}\n" for number in range(25, 32)), max_bytes=100).startswith("000000030\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log", 10_000_000)

    def write(name: str) -> None:
        for _ in range(300):
            log.write(f"{name * 50}\n", name)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert sorted((tmp_path / "log").read_text().split()) == sorted(name * 50 for name in "abcd" for _ in range(300))


def test_a_failing_disk_is_reported_once_and_print_raises_nothing(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no disk here that is always full")
    (tmp_path / "log").symlink_to("/dev/full")
    log = OutputLog(tmp_path / "log")
    log.write("one\n")
    log.write("two\n")
    failure = log.failure()
    assert failure is not None
    assert "No space" in str(failure)
    assert log.failure() is None
    log.close()


def test_a_forked_process_does_not_write_output_of_its_parent(tmp_path: Path) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("nothing forks here")
    log = OutputLog(tmp_path / "log")
    log.write("no end")
    child = os.fork()
    if not child:
        log.write(" yet\n")
        log.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log.close()
    assert (tmp_path / "log").read_text() == "no end\n"
