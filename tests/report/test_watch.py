"""The live page: access control, responses, and a real job that is watched and controlled in a real browser."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, build_opener

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import SaveOnTrigger
from callsheet.callbacks.support.listeners import LISTENERS, announce, withdraw
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError, RequestRejected
from callsheet.loggers import JSONLLogger
from callsheet.report import live_run, watch
from callsheet.report.live_run import LiveRun
from callsheet.report.watch import WatchServer
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

HERE = Path(__file__).parent
DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
SHEET = "event phase callback ranks lane every\non_train_step_end decide SaveOnTrigger 0 inline\n"


class Draws(Callback):
    def on_train_end(self, ctx: Context) -> None:
        ctx.log_images("grey/ramp", [torch.linspace(0, 1, 64).reshape(8, 8)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        callbacks=[Draws()],
        loggers=[JSONLLogger()],
        runs_folder=folder,
        run_name="run",
        max_duration="2ep",
        log_interval="1ba",
        device="cpu",
    ) as trainer:
        trainer.fit()
    return folder / "run"


@pytest.fixture
def ended(trained: Path, tmp_path: Path) -> Path:
    """Return the folder of a run that has finished."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def running(ended: Path) -> Path:
    """Return the folder as it was just before the run's end."""
    events = ended / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if json.loads(line)["event"] != "run_end"))
    (ended / "call_sheet.txt").write_text(SHEET)
    announce(ended, "SaveOnTrigger", ended / "trigger")
    return ended


def end(folder: Path, outcome: str = "finished") -> None:
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), "event": "run_end", "step": 6, "outcome": outcome, "seconds": 1.0}) + "\n")


@pytest.fixture
def serve() -> Iterator[Callable[[Path], WatchServer]]:
    """Return a function that serves a run until the test ends."""
    servers: list[WatchServer] = []

    def start(folder: Path) -> WatchServer:
        server = WatchServer(LiveRun(folder))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Client:
    """An HTTP client that keeps the cookie and sends exactly the given headers."""

    def __init__(self, server: WatchServer, *, enters: bool = True) -> None:
        self.server = server
        self.port = server.server_address[1]
        self.headers = {"Host": f"127.0.0.1:{self.port}"}
        if enters:
            _, headers, _ = self.ask("GET", f"/?token={server.token}")
            self.headers["Cookie"] = headers["Set-Cookie"].partition(";")[0]

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str | None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True)
            sent = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
            for name, value in ({"Content-Length": str(len(body))} if body is not None else {}).items():
                sent.setdefault(name, value)
            for name, text in sent.items():
                if text is not None:
                    connection.putheader(name, text)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str | None) -> int:
        return self.ask("GET", path, None, **headers)[0]

    def act(self, act: str, **headers: str | None) -> tuple[int, str]:
        sent: dict[str, str | None] = {"Origin": f"http://{self.headers['Host']}", "X-Callsheet-Token": self.server.form_token}
        status, _, body = self.ask("POST", "/act", json.dumps({"act": act}).encode(), **(sent | headers))
        return status, body.decode()


# --- access ---


PATHS = ("/", "/data.json", "/images/grey/ramp/6-0.png", "/nothing", "/act")


def test_without_the_token_nothing_is_answered(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    server = serve(ended)
    stranger = Client(server, enters=False)
    name = server.cookie
    for path in PATHS:
        assert stranger.get(path) == 403
        for cookie in (
            f"{name}=",
            f"{name}={server.token[:-1]}",
            f"{name}={server.form_token}",
            f"other={server.token}",
            "=;=",
            "\u00e4",
        ):
            assert stranger.get(path, Cookie=cookie) == 403
    for word in ("", server.token[:-1], server.token + "x", server.form_token, "%C3%A4", "%ED%A0%80"):
        status, headers, body = stranger.ask("GET", f"/?token={word}")
        assert (status, headers["Set-Cookie"]) == (403, None)
        assert server.token.encode() not in body
    assert stranger.act("stop")[0] == 403
    for path in PATHS:  # the token is only for the first request
        assert stranger.get(f"{path}x?token={server.token}") == 403


def test_the_token_sets_a_cookie_that_gives_access(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    server = serve(ended)
    status, headers, body = Client(server, enters=False).ask("GET", urlsplit(server.url).path + "?" + urlsplit(server.url).query)
    assert status == 200
    pair, *attributes = (part.strip() for part in headers["Set-Cookie"].split(";"))
    assert pair == f"callsheet-{server.server_address[1]}={server.token}"
    assert set(attributes) == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert server.token.encode() not in body
    visitor = Client(server)
    assert visitor.get("/") == visitor.get("/data.json") == 200
    assert visitor.get("/data.json", Cookie=f'bad=" ; {visitor.headers["Cookie"]}; more=1') == 200  # cookies of other servers


def test_an_ordinary_client_is_served(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    server = serve(ended)
    origin = f"http://127.0.0.1:{server.server_address[1]}"
    sent = Request(f"{origin}/data.json", headers={"Cookie": f"{server.cookie}={server.token}"})
    with build_opener().open(sent, timeout=30) as answer:
        assert json.load(answer)["run"]["name"] == "run"


def test_the_token_differs_each_time_and_is_long(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    words = {word for _ in range(3) for server in [serve(ended)] for word in (server.token, server.form_token)}
    assert len(words) == 6
    assert min(map(len, words)) >= 43


def test_a_ticket_opens_once(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    server = serve(ended)
    stranger = Client(server, enters=False)
    path = "/?" + urlsplit(server.ticket_url()).query
    assert server.token not in path
    status, headers, _ = stranger.ask("GET", path)
    assert (status, server.token in headers["Set-Cookie"]) == (200, True)
    assert stranger.get(path) == 403


def test_only_this_machine_can_connect(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    server = serve(ended)
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.settimeout(5)
        with pytest.raises(OSError, match=r"refused|unreachable|timed out"):  # another address of the same machine
            other.connect(("127.0.0.2", server.server_address[1]))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:{port}", 200),
        ("LocalHost:9000", 200),  # forwarded by ssh
        ("127.0.0.1", 200),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example:{port}", 403),
        ("127.0.0.1:{port}.evil.example", 403),
        ("evil.example@127.0.0.1:{port}", 403),
        ("127.0.0.1:{port}, evil.example", 403),
        ("0.0.0.0:{port}", 403),
        ("", 403),
        (None, 403),
    ],
)
def test_a_host_name_that_resolves_to_this_machine_is_not_enough(
    ended: Path, serve: Callable[[Path], WatchServer], host: str | None, status: int
) -> None:
    """This prevents DNS rebinding, where the browser believes that it talks to another site."""
    visitor = Client(serve(ended))
    named = host and host.format(port=visitor.port)
    assert visitor.get("/data.json", Host=named) == status
    assert visitor.get(f"/?token={visitor.server.token}", Host=named) == status


def test_other_sites_cannot_press_the_buttons(running: Path, serve: Callable[[Path], WatchServer]) -> None:
    visitor = Client(serve(running))
    own = f"http://{visitor.headers['Host']}"
    for origin in (
        None,
        "null",
        "",
        "http://evil.example",
        f"https://{visitor.headers['Host']}",
        f"{own}.evil.example",
        "http://127.0.0.1:1",
    ):
        assert visitor.act("stop", Origin=origin)[0] == 403
    for token in (None, "", visitor.server.token):
        assert visitor.act("stop", X_Callsheet_Token=token)[0] == 403
    assert visitor.act("stop", Cookie=None)[0] == 403
    assert not (running / "trigger").exists()
    assert visitor.act("stop")[0] == 200
    assert (running / "trigger").exists()


def test_only_a_post_acts(running: Path, serve: Callable[[Path], WatchServer]) -> None:
    visitor = Client(serve(running))
    assert visitor.get("/act?act=stop") == 405
    for method in ("HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW"):
        assert visitor.ask(method, "/act")[0] == 501
    for path in ("/", "/data.json", "/acts", "/act/", "/images/x.png"):
        sent: dict[str, str | None] = {
            "Origin": f"http://{visitor.headers['Host']}",
            "X-Callsheet-Token": visitor.server.form_token,
        }
        assert visitor.ask("POST", path, b'{"act": "stop"}', **sent)[0] == 404
    assert not (running / "trigger").exists()


@pytest.mark.parametrize(
    ("body", "length", "status"),
    [
        (b'{"act": "stopp"}', None, 400),
        (b'{"act": ["stop"]}', None, 400),
        (b'{"act": "stop\\nsave"}', None, 400),
        (b'["stop"]', None, 400),
        (b"1", None, 400),
        (b"{", None, 400),
        (b"", None, 400),
        (b"\xff\xfe", None, 400),
        (b"[" * 1000, None, 400),
        (b'{"act": "stop"}' + b" " * 5000, None, 413),
        (b'{"act": "stop"}', "-1", 413),
        (b'{"act": "stop"}', "many", 413),
    ],
)
def test_invalid_requests_are_rejected(
    running: Path, serve: Callable[[Path], WatchServer], body: bytes, length: str | None, status: int
) -> None:
    visitor = Client(serve(running))
    headers = {"Origin": f"http://{visitor.headers['Host']}", "X-Callsheet-Token": visitor.server.form_token}
    sent = headers | ({} if length is None else {"Content-Length": length})
    assert visitor.ask("POST", "/act", body, **sent)[0] == status
    assert not (running / "trigger").exists()
    assert visitor.get("/data.json") == 200  # other clients are still served


def test_data_that_is_not_http_does_no_harm(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    server = serve(ended)
    for sent in (b"\x16\x03\x01\x02\x00\n\n", b"GET\n\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 70_000 + b"\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as talk:
            talk.sendall(sent)
            talk.shutdown(socket.SHUT_WR)
            while talk.recv(65536):
                pass
    assert Client(server).get("/data.json") == 200


def sent_and_answered(server: WatchServer, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as talk:
        talk.sendall(sent)
        talk.shutdown(socket.SHUT_WR)
        found = b""
        while piece := talk.recv(65536):
            found += piece
        return found


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        (b"GET http://[::1 HTTP/1.1", b"", b"400"),
        (b"GET /?" + b"a=1&" * 50 + b" HTTP/1.1", b"", b"400"),
        (b"GET / HTTP/1.1 and more", b"", b"400"),
        (b"BREW / HTTP/1.1", b"", b"501"),
        (b"GET / HTTP/1.1", b"X: " + b"x" * 70_000 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1", b"X: x\r\n" * 200, b"431"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1", b"", b"414"),
    ],
)
def test_a_malformed_request_is_answered_without_a_traceback(
    ended: Path,
    serve: Callable[[Path], WatchServer],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    request_line: bytes,
    headers: bytes,
    status: bytes,
) -> None:
    server = serve(ended)
    with caplog.at_level(logging.DEBUG, logger="callsheet"):
        answer = sent_and_answered(server, request_line + b"\r\nHost: 127.0.0.1\r\n" + headers + b"\r\n")
    assert answer.split(b" ", 2)[:2] == [b"HTTP/1.1", status]
    assert [record for record in caplog.records if record.exc_info] == []
    assert "Traceback" not in capfd.readouterr().err
    assert Client(server).get("/data.json") == 200


def test_connections_are_few_and_end_when_they_send_nothing(
    ended: Path, serve: Callable[[Path], WatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_MAX_CONNECTIONS", 4)
    server = serve(ended)
    address = ("127.0.0.1", server.server_address[1])
    silent = [socket.create_connection(address, timeout=30) for _ in range(4)]
    for each in silent:
        each.sendall(b"GET / HTTP/1.1\r\nX: y")  # an incomplete request does not keep the connection
    eventually(lambda: len(server.waiting) == 4)
    with socket.create_connection(address, timeout=30) as another:
        assert another.recv(100).startswith(b"HTTP/1.1 503 ")
    monkeypatch.setattr(watch, "_IDLE_SECONDS", 0.0)
    eventually(lambda: not server.waiting)
    monkeypatch.setattr(watch, "_IDLE_SECONDS", 60.0)
    for each in silent:
        each.close()
    assert eventually(lambda: Client(server)).get("/data.json") == 200


# --- responses ---


def test_every_answer_has_security_headers(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    visitor = Client(serve(ended))
    stranger = Client(visitor.server, enters=False)
    answers = [client.ask("GET", path) for client in (visitor, stranger) for path in (*PATHS, f"/?token={visitor.server.token}")]
    answers += [visitor.ask("PUT", "/"), stranger.ask("GET", "/", Host="evil.example")]
    for status, headers, _ in answers:
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Access-Control-Allow-Origin"] is None
        assert "Python" not in headers["Server"]
        policy = headers["Content-Security-Policy"]
        assert {
            "default-src 'none'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        } <= set(policy.split("; ")), status
        assert "unsafe-eval" not in policy
        assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


def test_the_scripts_of_the_page_carry_a_nonce_of_their_own(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    visitor = Client(serve(ended))
    nonces = set()
    for _ in range(2):
        _, headers, body = visitor.ask("GET", "/")
        (nonce,) = re.findall(r"script-src 'nonce-([\w-]+)'", headers["Content-Security-Policy"])
        assert f'nonce="{nonce}"'.encode() in body
        assert visitor.server.token.encode() not in body
        nonces.add(nonce)
    assert len(nonces) == 2


def test_an_image_is_served(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    (line,) = (ended / "images.jsonl").read_text().splitlines()
    (file,) = json.loads(line)["files"]
    status, headers, body = Client(serve(ended)).ask("GET", f"/{quote(file)}")
    assert (status, headers["Content-Type"], body) == (200, "image/png", (ended / file).read_bytes())


def test_only_images_of_the_run_are_served(ended: Path, serve: Callable[[Path], WatchServer], tmp_path: Path) -> None:
    images = ended / "images"
    image = next(images.rglob("*.png"))
    inner = image.relative_to(ended).as_posix()
    shutil.copy(image, ended / "beside.png")
    shutil.copy(image, tmp_path / "outside.png")
    (images / "link.png").symlink_to(tmp_path / "outside.png")
    (images / "text.png").write_text("a secret")
    (images / "folder").symlink_to(tmp_path)
    visitor = Client(serve(ended))
    assert visitor.get(f"/{inner}") == 200
    for path in (
        "/images/../beside.png",
        "/images/%2e%2e/beside.png",
        "/images/..%2fbeside.png",
        "/images/%2e%2e/%2e%2e/outside.png",
        "/images//etc/passwd",
        f"/images/{quote(str(tmp_path / 'outside.png'), safe='')}",
        "/images/link.png",
        "/images/folder/outside.png",
        "/images/text.png",
        "/images/",
        "/images",
        "/images/grey",
        "/images/none.png",
        "/images/%00.png",
        "/images/" + "x" * 5000,
        "/beside.png",
        "/metrics.jsonl",
        "/events.jsonl",
        "/run",
        "/..",
        "/index.html",
        "//evil.example/",
        "/data.json/",
    ):
        assert visitor.get(path) == 404, path


def test_polling_is_cheap_and_returns_new_data(running: Path, serve: Callable[[Path], WatchServer]) -> None:
    visitor = Client(serve(running))

    def news(since: str) -> dict[str, Any] | None:
        status, _, body = visitor.ask("GET", f"/data.json?since={quote(since, safe='')}")
        assert (status, body == b"") in ((200, False), (204, True))
        return json.loads(body) if body else None

    first = news("")
    assert first is not None
    assert first["disabled_reason"] == ""
    assert news(first["version"]) is None
    metrics = running / "metrics.jsonl"
    status = metrics.stat()
    content = metrics.read_text()
    metrics.write_text(content.replace('"step": 6', '"step": 7'))
    os.utime(metrics, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert news(first["version"]) is None  # it checked the file's size and time, and did not read it
    metrics.write_text(content + content.splitlines()[-1].replace('"step": 6', '"step": 8') + "\n")
    second = eventually(lambda: news(first["version"]))
    assert second["run"]["steps"] == 8
    end(running)
    third = eventually(lambda: news(second["version"]))
    assert third["disabled_reason"] == "the run has ended: finished"


def eventually(ask: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """Call `ask` until its result is truthy, and return it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if answer := ask():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"nothing came in {seconds:.0f} s")


def test_reading_takes_a_share_of_the_time_at_most(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reading, the next one is delayed, because the job may need the processor."""
    monkeypatch.setattr(live_run, "_MAX_CORE_SHARE", 1e-9)
    run = LiveRun(running)
    first = json.loads(run.news("") or b"")
    line = (running / "metrics.jsonl").read_text().splitlines()[-1]
    with open(running / "metrics.jsonl", "a") as file:
        file.write(line.replace('"step": 6', '"step": 8') + "\n")
    assert run.news(first["version"]) is None
    monkeypatch.setattr(run.budget, "not_before", 0.0)
    assert run.news(first["version"]) is not None


def test_a_folder_that_was_moved_is_reported(running: Path, serve: Callable[[Path], WatchServer]) -> None:
    visitor = Client(serve(running))
    running.rename(running.with_name("run.1"))
    sent = json.loads(visitor.ask("GET", "/data.json?since=x")[2])
    assert sent["disabled_reason"] == f"the folder {running} is gone"
    assert visitor.act("stop") == (409, f"the folder {running} is gone\n")
    assert visitor.get("/") == 200


# --- requests to the run ---


def test_a_button_writes_a_request(running: Path, serve: Callable[[Path], WatchServer]) -> None:
    visitor = Client(serve(running))
    for act in ("save", "evaluate", "stop", "save"):
        status, text = visitor.act(act)
        assert (status, json.loads(text)["message"].startswith(f"{act}: requested through")) == (200, True)
    assert sorted((running / "trigger").read_text().splitlines()) == [
        f"{act} asked for in the browser" for act in ("evaluate", "save", "stop")
    ]


def test_a_run_that_has_ended_receives_no_requests(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    visitor = Client(serve(ended))
    assert visitor.act("save") == (409, "the run has ended: finished\n")
    assert not (ended / "trigger").exists()


def test_a_late_request_is_withdrawn(running: Path) -> None:
    """A resumed run must not find a stop request that came too late for the previous process."""
    run = LiveRun(running)
    run.ask("stop")
    (running / "trigger").write_text((running / "trigger").read_text() + "save by another program\n")
    end(running)
    withdraw(running, "SaveOnTrigger")
    eventually(lambda: b"the run has ended" in (run.news("") or b""))
    assert (running / "trigger").read_text() == "save by another program\n"


@pytest.mark.parametrize(
    ("sheet", "listeners", "why"),
    [
        (SHEET, '{"SaveOnTrigger": "trigger"}', ""),
        ("", '{"SaveOnTrigger": "trigger"}', ""),
        (SHEET.replace("SaveOnTrigger", "on demand"), '{"on demand": "trigger"}', ""),  # the trigger has another name
        (SHEET, '{"SaveOnTrigger": 3, "other SaveOnTrigger": "x", "SaveOnTrigger ": "/x"}', "reads '/x'"),
        (SHEET, '{"of an earlier job": "trigger"}', "SaveOnTrigger does not listen"),  # the earlier job was killed
        (SHEET, "", "SaveOnTrigger does not listen"),
        ("", "", "the run has no SaveOnTrigger"),
        (SHEET, "[1]", "SaveOnTrigger does not listen"),
        (SHEET, "[" * 100_000, "SaveOnTrigger does not listen"),
        (
            SHEET,
            '{"SaveOnTrigger": "/elsewhere/trigger"}',
            "reads '/elsewhere/trigger', outside its folder: write to it by hand",
        ),
        (SHEET, '{"SaveOnTrigger": "../trigger"}', "write to it by hand"),
        (SHEET, '{"SaveOnTrigger": ".."}', "write to it by hand"),
        (SHEET, '{"SaveOnTrigger": "a\\u0000/b"}', "write to it by hand"),
        (SHEET, '{"SaveOnTrigger": ""}', "write to it by hand"),
    ],
)
def test_the_page_names_the_reason_why_requests_are_not_possible(running: Path, sheet: str, listeners: str, why: str) -> None:
    (running / "call_sheet.txt").write_text(sheet)
    (running / LISTENERS).write_text(listeners)
    run = LiveRun(running)
    reason = json.loads(run.news("") or b"")["disabled_reason"]
    assert (why in reason) if why else reason == ""
    if why:
        with pytest.raises(RequestRejected, match=re.escape(reason)):
            run.ask("save")
        assert not (running / "trigger").exists()


def test_a_trigger_of_another_name_is_found(running: Path) -> None:
    announce(running, "SaveOnTrigger", running / "ask-me")
    LiveRun(running).ask("save")
    assert (running / "ask-me").read_text() == "save asked for in the browser\n"


class RequestsStop(Callback):
    """Requests a stop through the live page at one step, and keeps the message."""

    def __init__(self, *, has_sheet: bool) -> None:
        self.has_sheet = has_sheet
        self.answer = ""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            folder = Path(ctx.run.folder or "")
            (folder / "heartbeat.json").touch()  # the run is alive
            eventually((folder / "call_sheet.txt").exists if self.has_sheet else lambda: True)
            try:
                self.answer = LiveRun(folder).ask("stop")
            except RequestRejected as error:
                self.answer = str(error)


@pytest.mark.parametrize("has_sheet", [True, False])
@pytest.mark.parametrize(
    ("file", "name", "answer", "steps"),
    [
        ("", "", "requested through {folder}/run/trigger", 2),
        ("", "my own", "requested through {folder}/run/trigger", 2),
        ("{folder}/run/ask-me", "", "requested through {folder}/run/ask-me", 2),
        ("{folder}/elsewhere", "", "reads '{folder}/elsewhere', outside its folder", 6),
        ("{folder}/elsewhere", "my own", "reads '{folder}/elsewhere', outside its folder", 6),
    ],
)
def test_the_file_of_a_script_s_trigger_is_known(
    file: str, name: str, answer: str, steps: int, has_sheet: bool, tmp_path: Path
) -> None:
    trigger = SaveOnTrigger(file=file.format(folder=tmp_path) or None, seconds=0)
    if name:
        trigger.name = name
    requester = RequestsStop(has_sheet=has_sheet)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        callbacks=[trigger, requester],
        loggers=[JSONLLogger()] if has_sheet else [],
        runs_folder=tmp_path,
        run_name="run",
        max_duration="2ep",
        device="cpu",
    ) as trainer:
        trainer.fit()
    assert answer.format(folder=tmp_path) in requester.answer
    assert trainer.ctx.step == steps
    assert not (tmp_path / "elsewhere").exists()
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith((LISTENERS, "trigger", "ask-me"))]


def test_a_run_that_stopped_writing_receives_no_requests(running: Path) -> None:
    long_ago = time.time() - 86400
    for path in running.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    assert b"the run has not written anything for a long time" in (LiveRun(running).news("") or b"")


def test_a_request_that_the_run_does_not_read_is_reported(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LiveRun(running)
    run.ask("save")
    assert json.loads(run.news("") or b"")["disabled_reason"] == ""
    monkeypatch.setattr(live_run, "_PENDING_WARN_SECONDS", 0.0)
    assert "still pending in" in json.loads(run.news("") or b"")["disabled_reason"]
    (running / "trigger").unlink()
    assert json.loads(run.news("") or b"")["disabled_reason"] == ""


def test_the_token_is_in_no_log(
    running: Path, serve: Callable[[Path], WatchServer], caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    with caplog.at_level(logging.DEBUG):
        visitor = Client(serve(running))
        visitor.get("/")
        visitor.get(f"/?token={visitor.server.token}")
        visitor.get(f"/images/{visitor.server.token}?token={visitor.server.token}")
        visitor.ask("PUT", f"/?token={visitor.server.token}")
        visitor.act("save")
    output = caplog.text + "".join(capfd.readouterr())
    assert "GET /" in output
    assert "requested save" in output
    assert f"?token={visitor.server.token}" not in output


def test_a_port_that_is_taken_is_named(ended: Path, serve: Callable[[Path], WatchServer]) -> None:
    taken = serve(ended).server_address[1]
    with pytest.raises(ConfigError, match=rf"cannot listen on port {taken}: .*; give another --port"):
        WatchServer(LiveRun(ended), taken)


# --- the command ---


def watch_command(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    command = [python(), "-m", "callsheet", "watch", *arguments]
    left_out = ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "BROWSER")
    known = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**known, **environment}
    )


def interrupted(watch: subprocess.Popen[str]) -> str:
    """Send Ctrl-C to the command, and return its output."""
    watch.send_signal(signal.SIGINT)
    out, _ = watch.communicate(timeout=60)
    assert watch.returncode == 0, out
    return out


def status_of(url: str) -> int:
    try:
        with build_opener().open(url, timeout=30) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_the_browser_opens_an_address_that_is_valid_once(running: Path, tmp_path: Path) -> None:
    """The connection may stay open while the page is served."""
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$1" > {tmp_path}/new\n'
        f"echo $$ > {tmp_path}/pid\n"
        f"mv {tmp_path}/new {tmp_path}/opened\nexec sleep 600 > {tmp_path}/output 2>&1\n"
    )
    browser.chmod(0o755)
    watch = watch_command(str(running), cwd=tmp_path, DISPLAY=":0", BROWSER=f"{browser} %s")
    try:
        assert watch.stdout is not None
        (printed,) = re.findall(r"http://\S+", watch.stdout.readline())
        opened = eventually(lambda: (tmp_path / "opened").exists() and (tmp_path / "opened").read_text().strip())
        assert urlsplit(opened).netloc == urlsplit(printed).netloc
        assert opened != printed
        assert [status_of(opened), status_of(opened), status_of(printed), status_of(printed)] == [200, 403, 200, 200]
        assert interrupted(watch).endswith("no longer watching\n")
    finally:
        watch.kill()
        watch.wait(60)
        if (tmp_path / "pid").exists():
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_ctrl_c_while_a_connection_is_accepted_ends_the_server(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives when the connection's thread has started; `serve_forever` must not treat it as a failed request."""

    def start(thread: threading.Thread) -> None:
        started(thread)
        thread.join(60)
        raise KeyboardInterrupt

    started = threading.Thread.start
    with (
        WatchServer(LiveRun(ended)) as server,
        closing(socket.create_connection(("127.0.0.1", server.server_address[1]), 60)) as client,
    ):
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            server.handle_request()


def test_waiting_ends_with_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "events.jsonl").touch()
    watch = watch_command("tniy", cwd=tmp_path)
    try:
        assert watch.stdout is not None
        assert watch.stdout.readline() == "there is no run in runs/tniy yet; did you mean 'tiny'?\n"
        assert watch.stdout.readline() == "waiting for it; Ctrl-C ends this\n"
        assert interrupted(watch) == "\nno longer watching\n"
    finally:
        watch.kill()
        watch.wait(60)


@pytest.fixture
def job_and_url(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """Start `callsheet watch`, which waits for the run, and then the job."""
    watch = watch_command("live", "--no-browser", cwd=tmp_path)
    assert watch.stdout is not None
    job: subprocess.Popen[bytes] | None = None
    try:
        assert watch.stdout.readline() == "there is no run in runs/live yet\n"
        assert "waiting for it" in watch.stdout.readline()
        job = subprocess.Popen([python(), str(HERE / "live_job.py"), str(tmp_path / "runs"), "live"])
        line = watch.stdout.readline()
        (url,) = re.findall(r"watching runs/live: (http://127\.0\.0\.1:\d+/\?token=[\w-]{43})\n", line)
        yield job, url, tmp_path / "runs" / "live"
        out = interrupted(watch)
        assert out.endswith("no longer watching\n")
        assert "Traceback" not in out
    finally:
        for process in (watch, job):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(60)


def test_a_run_is_watched_and_controlled_in_a_browser(
    chromium: Any, job_and_url: tuple[subprocess.Popen[bytes], str, Path], tmp_path: Path
) -> None:
    job, url, folder = job_and_url
    with closing(chromium.new_context(viewport={"width": 1280, "height": 900})) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        wrong: list[str] = []
        requested: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))

        page.goto(url)
        page.wait_for_selector("#act-save:enabled")
        assert page.url == url.partition("?")[0]  # the token is not in the address
        assert page.evaluate("document.cookie") == ""
        (cookie,) = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")

        def steps() -> int:
            (number,) = re.findall(r"([\d,]+) steps", page.inner_text("header.top"))
            return int(number.replace(",", ""))

        def wait_until_after(step: int) -> None:
            while steps() <= step:
                page.wait_for_timeout(100)  # the time limit of the test ends this loop

        before = steps()
        wait_until_after(before + 20)
        assert page.query_selector("#checkpoints") is None
        page.click("#act-save")
        page.wait_for_selector("#request-message:has-text('requested through')")
        page.wait_for_selector("#checkpoints")  # without loading the page again
        (saved,) = find_checkpoints(folder / "checkpoints").checkpoints
        assert saved.step > before
        page.click("#act-evaluate")
        page.wait_for_selector("#evaluations")
        assert json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["event"] == "evaluation"

        page.click("#act-stop")
        page.click("dialog button[value=no]")
        page.wait_for_selector("dialog", state="detached")
        now = steps()
        wait_until_after(now + 20)
        assert job.poll() is None
        page.screenshot(path=tmp_path / "live.png")
        page.click("#act-stop")
        page.click("#confirm-stop")
        assert job.wait(60) == 0
        page.wait_for_selector("header.top:has-text('the run has ended: stopped')")  # shortly before, the server stops listening
        page.wait_for_selector("#act-stop:disabled")
        ending = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
        assert (ending["event"], ending["outcome"]) == ("run_end", "stopped")
        assert not (folder / "trigger").exists()
        page.screenshot(path=tmp_path / "ended.png")
    assert wrong == []
    assert all(address.startswith((url.partition("?")[0], "data:", "blob:")) for address in requested)
