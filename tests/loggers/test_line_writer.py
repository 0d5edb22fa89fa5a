from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from callsheet.loggers.support.line_writer import LineWriter

NEVER = 3600.0


def wait_for(path: Path, content: bytes) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes() != content:
        assert time.monotonic() < deadline, f"{path} did not become {content!r}"
        time.sleep(0.005)


def test_lines_are_written_without_a_flush(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path, 0.01)
    writer.append("a", b"1")
    writer.append("deep/b", b"2")
    wait_for(tmp_path / "deep" / "b", b"2\n")
    writer.append("a", b"3")
    wait_for(tmp_path / "a", b"1\n3\n")
    writer.close()


def test_append_does_not_write_until_flush_or_close(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path, NEVER)
    writer.append("a", b"1")
    assert not (tmp_path / "a").exists()
    writer.flush()
    assert (tmp_path / "a").read_bytes() == b"1\n"
    writer.append("a", b"2")
    writer.close()
    writer.close()
    assert (tmp_path / "a").read_bytes() == b"1\n2\n"


def test_an_incomplete_line_is_ended_first(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"whole\nto")
    writer = LineWriter(tmp_path, NEVER)
    writer.append("a", b"next")
    writer.close()
    assert (tmp_path / "a").read_bytes() == b"whole\nto\nnext\n"


def test_many_threads_lose_no_line(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path, 0.001)

    def append(number: int) -> None:
        for each in range(500):
            writer.append("a", f"{number} {each}".encode())

    threads = [threading.Thread(target=append, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    recorded = [tuple(map(int, line.split())) for line in (tmp_path / "a").read_text().splitlines()]
    assert sorted(recorded) == [(number, each) for number in range(4) for each in range(500)]
    assert all([each for thread, each in recorded if thread == number] == list(range(500)) for number in range(4))


def test_a_failure_is_reported_once_and_the_lines_wait(tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("no folder")
    writer = LineWriter(tmp_path, NEVER)
    writer.append("deep/a", b"1")
    writer.append("b", b"2")
    with pytest.raises(OSError, match="deep") as caught:
        writer.flush()
    assert "the lines are kept" in caught.value.__notes__[0]
    writer.append("deep/a", b"3")
    writer.flush()
    assert (tmp_path / "b").read_bytes() == b"2\n"
    (tmp_path / "deep").unlink()
    writer.flush()
    assert (tmp_path / "deep" / "a").read_bytes() == b"1\n3\n"
    (tmp_path / "deep" / "a").rename(tmp_path / "c")
    writer.append("other/a", b"4")
    (tmp_path / "other").write_text("no folder either")
    with pytest.raises(OSError, match="other"):
        writer.flush()
    with pytest.raises(OSError, match="the last lines of other/a"):
        writer.close()


def in_a_small_disk(folder: str) -> tuple[int, int]:
    """Append lines while the size of files is limited to 100 bytes and half a line."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (105, limits[1]))
    writer = LineWriter(Path(folder), NEVER)
    for number in range(20):
        writer.append("a", f"{number:09}".encode())
    try:
        writer.flush()
        failed = 0
    except OSError:
        failed = 1
    size = os.path.getsize(f"{folder}/a")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()
    return failed, size


def test_a_half_written_line_is_completed(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    from callsheet.testing import run_ranks

    assert run_ranks(in_a_small_disk, 1, str(tmp_path)) == [(1, 105)]
    assert (tmp_path / "a").read_text().splitlines() == [f"{number:09}" for number in range(20)]


def test_a_forked_process_does_not_write_lines_of_its_parent(tmp_path: Path) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("nothing forks here")
    writer = LineWriter(tmp_path, NEVER)
    writer.append("a", b"1")
    child = os.fork()
    if not child:
        writer.append("a", b"2")
        writer.flush()
        writer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not (tmp_path / "a").exists()
    writer.close()
    assert (tmp_path / "a").read_bytes() == b"1\n"


def test_the_number_of_waiting_lines_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callsheet.loggers.support.line_writer._MAX_KEPT_BYTES", 20)
    (tmp_path / "deep").write_text("no folder")
    writer = LineWriter(tmp_path, NEVER)
    for number in range(30):
        writer.append("deep/a", str(number).encode())
    with pytest.raises(OSError, match="deep"):
        writer.flush()
    assert writer.lost == 20
    (tmp_path / "deep").unlink()
    writer.close()
    assert (tmp_path / "deep" / "a").read_text().split() == [str(number) for number in range(10)]


def test_without_failures_there_is_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callsheet.loggers.support.line_writer._MAX_KEPT_BYTES", 20)
    writer = LineWriter(tmp_path, NEVER)
    for line in (b"x" * 100, *[b"y" * 7] * 30, b"z" * 100):
        writer.append("a", line)
    writer.close()
    assert writer.lost == 0
    assert [len(line) for line in (tmp_path / "a").read_text().split()] == [100, *[7] * 30, 100]
