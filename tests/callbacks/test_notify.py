from __future__ import annotations

import base64
import email
import email.policy
import json
import logging
import math
import os
import re
import signal
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.callbacks.notify import Notify
from callsheet.callbacks.support.delivery import why_not_delivered
from callsheet.callbacks.support.destinations import NotDelivered, Notification
from callsheet.checkpoint import find_checkpoints
from callsheet.core.lane_options import LaneOptions
from callsheet.core.spec import CallbackSpec
from callsheet.errors import ConfigError
from callsheet.loggers import InMemoryLogger
from callsheet.testing import run_ranks

SECRET = "T0K3N-of-ours"  # a secret part of the URL
NONE_OF_OURS = "the URL to notify is not an http or https URL with a host; give one such as https://example.org/hook"
DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 4


class WebhookServer:
    """A web server that records what is posted to it. It answers with the given status codes in turn, then with 200."""

    def __init__(self, *answers: int) -> None:
        self.posts: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.lets_go = threading.Event()
        self.lets_go.set()
        self.received_request = threading.Event()
        hook, script = self, list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.received_request.set()
                hook.lets_go.wait(60)
                hook.paths.append(self.path)
                hook.posts.append(json.loads(body))
                answer = script.pop(0) if script else 200
                self.send_response(answer)
                if 300 <= answer < 400:
                    self.send_header("Location", f"{hook.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                hook.paths.append(f"GET {self.path}")
                self.send_error(404)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.lets_go.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def events(self) -> list[str]:
        return [post["event"] for post in self.posts]


@contextmanager
def webhook_server(*answers: int) -> Iterator[WebhookServer]:
    hook = WebhookServer(*answers)
    try:
        yield hook
    finally:
        hook.close()


@pytest.fixture
def hook() -> Iterator[WebhookServer]:
    with webhook_server() as made:
        yield made


class LogsNumbers(Callback):
    """Logs the given numbers, one per step."""

    def __init__(self, numbers: Sequence[float] = ()) -> None:
        self.numbers = numbers

    def on_train_step_end(self, ctx: Context) -> None:
        if self.numbers:
            ctx.log({"some/number": self.numbers[ctx.step - 1]}, across="same")


class CallsAtStep(Callback):
    """Calls a function at one step."""

    def __init__(self, step: int, what: Callable[[], Any]) -> None:
        self.step = step
        self.what = what

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            self.what()


def trainer(folder: Path | str, *callbacks: Callback, **options: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        options.pop("evaluation", None),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        device="cpu",
        **({"max_duration": "2ep", "run_name": "my-run", "log_interval": "1ba"} | options),
    )


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    with trainer(folder, *callbacks, **options) as trained:
        trained.fit()
    return trained


def raises(error: BaseException) -> Callable[[], None]:
    def raise_error() -> None:
        raise error

    return raise_error


# --- which notifications are sent ---


def test_a_finished_run_sends_its_start_and_its_end(hook: WebhookServer, tmp_path: Path) -> None:
    fit(tmp_path, Notify(to=f"{hook.url}/hook/{SECRET}"), evaluation=DATA[:1])
    assert hook.events == ["start", "end"]
    assert set(hook.paths) == {f"/hook/{SECRET}"}
    start, end = hook.posts
    assert start["text"] == "my-run starts, to 2ep (cpu)"
    assert (end["run"], end["step"], end["epoch"], end["elapsed"], end["outcome"]) == ("my-run", 8, 2, 1.0, "finished")
    assert {"train/loss", "validation/loss"} <= end["metrics"].keys()
    assert end["text"].startswith("my-run finished after 8 steps, ")
    assert f"validation/loss: {end['metrics']['validation/loss']:.6g}" in end["text"]


def test_a_failed_run_sends_the_exception_and_where_it_was_raised(hook: WebhookServer, tmp_path: Path) -> None:
    error = ValueError("no such <thing>")
    error.add_note("seen at midnight")
    with pytest.raises(ValueError, match="no such"):
        fit(tmp_path, Notify(to=hook.url), CallsAtStep(3, raises(error)))
    assert hook.events == ["start", "failure"]
    failure = hook.posts[1]
    assert failure["exception"] == {"type": "ValueError", "message": "no such <thing>", "span": "train_step", "rank": 0}
    assert failure["text"].startswith(
        "my-run failed at step 3, in train_step, on rank 0: ValueError\nValueError: no such <thing>\n"
    )
    assert "seen at midnight" in failure["text"]
    assert "raised by callback CallsAtStep" in failure["text"]


def test_a_failure_during_set_up_is_sent(hook: WebhookServer, tmp_path: Path) -> None:
    def no_data() -> Any:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        fit(tmp_path, Notify(to=hook.url), evaluation=no_data)
    assert hook.events == ["failure"]
    assert "in data_init" in hook.posts[0]["text"]


def test_a_preempted_run_sends_a_preemption(hook: WebhookServer, tmp_path: Path) -> None:
    fit(tmp_path, Notify(to=hook.url), CallsAtStep(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert hook.events == ["start", "preemption"]
    assert hook.posts[1]["text"] == "my-run is preempted by a signal at step 2"


def test_an_interrupted_run_sends_an_end(hook: WebhookServer, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Notify(to=hook.url), CallsAtStep(2, raises(KeyboardInterrupt())))
    assert hook.events == ["start", "end"]
    assert hook.posts[1]["outcome"] == "interrupted"


def test_an_exit_is_sent_as_a_failure(hook: WebhookServer, tmp_path: Path) -> None:
    """The run's outcome is `failed` too."""
    with pytest.raises(SystemExit):
        fit(tmp_path, Notify(to=hook.url), CallsAtStep(2, raises(SystemExit(3))))
    assert hook.events == ["start", "failure"]
    assert hook.posts[1]["exception"]["type"] == "SystemExit"
    assert hook.posts[1]["text"].startswith("my-run failed at step 2, in train_step, on rank 0: SystemExit\nSystemExit: 3")


@pytest.mark.parametrize(
    ("on", "fails", "expected"),
    [("failure", False, []), ("failure", True, ["failure"]), (["end"], True, []), (["start", "end"], False, ["start", "end"])],
)
def test_only_the_requested_notifications_are_sent(
    on: Any, fails: bool, expected: list[str], hook: WebhookServer, tmp_path: Path
) -> None:
    try:
        fit(tmp_path, Notify(to=hook.url, on=on), *([CallsAtStep(2, raises(ValueError("x")))] if fails else []))
    except ValueError:
        assert fails
    assert hook.events == expected


def test_progress_is_sent_at_the_interval(hook: WebhookServer, tmp_path: Path) -> None:
    fit(tmp_path, Notify(to=hook.url, on=(), every="3ba"))
    assert [(post["event"], post["step"]) for post in hook.posts] == [("progress", 3), ("progress", 6)]
    assert hook.posts[0]["text"].startswith("my-run is at step 3, 0% of 2ep\ntrain/loss: ")


def test_progress_is_sent_at_the_next_record(hook: WebhookServer, tmp_path: Path) -> None:
    fit(tmp_path, Notify(to=hook.url, on=(), every=3), log_interval="4ba")
    assert [post["step"] for post in hook.posts] == [4, 8]


NUMBERS = [3.0, 1.0, 0.5, math.nan, 1.0, 2.0, math.inf, 0.0]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("some/number < 2", [2, 8]),
        ("some/number<2", [2, 8]),
        (" some/number <= 2.0 ", [2, 8]),
        ("some/number > 1e0", [1, 6]),
        ("some/number >= 1", [1, 5]),
        ("some/number > 100", [7]),
        ("some/number < -1", []),
    ],
)
def test_a_rule_notifies_when_it_becomes_true(rule: str, expected: list[int], hook: WebhookServer, tmp_path: Path) -> None:
    fit(tmp_path, Notify(to=hook.url, on=(), when=rule), LogsNumbers(NUMBERS))
    assert [(post["event"], post["step"]) for post in hook.posts] == [("crossing", step) for step in expected]
    for post in hook.posts:
        assert post["rule"] == rule
        assert post["text"] == f"my-run some/number is {NUMBERS[post['step'] - 1]:.6g} ({rule}) at step {post['step']}"


def test_several_rules_and_metrics_of_evaluations(hook: WebhookServer, tmp_path: Path) -> None:
    rules = ["validation/loss < 1e9", "some/number > 2.5"]
    fit(tmp_path, Notify(to=hook.url, on=(), when=rules), LogsNumbers(NUMBERS), evaluation=DATA[:1])
    assert [(post["rule"], post["step"]) for post in hook.posts] == [(rules[1], 1), (rules[0], 4), (rules[1], 7)]
    assert hook.posts[2]["metrics"]["some/number"] == "inf"  # JSON has no infinity


def test_a_manual_evaluation_does_not_trigger_a_rule(hook: WebhookServer, tmp_path: Path) -> None:
    with trainer(
        tmp_path, Notify(to=hook.url, on=(), when="validation/loss < 1e9"), evaluation=DATA, eval_interval=None
    ) as trained:
        trained.evaluate()
        trained.fit()
        trained.evaluate()
    assert not hook.posts


def test_a_metric_that_was_never_logged_is_named(hook: WebhookServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, Notify(to=hook.url, when=["some/numbers < 1", "some/number < 1"]), LogsNumbers(NUMBERS))
    assert [message for message in caplog.messages if "of a rule" in message] == [
        "Notify: no record of the run had the metric 'some/numbers' of a rule"
    ]


@pytest.mark.test_all
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"on": (), "every": "3ba", "when": ["some/number < 2", "some/number > 1e0"]}

    def recorded(hook: WebhookServer, since: int = 0) -> list[tuple[str, int]]:
        return [(post.get("rule", ""), post["step"]) for post in hook.posts if post["step"] > since]

    with webhook_server() as hook:
        fit(tmp_path, Notify(to=hook.url, **options), LogsNumbers(NUMBERS), CheckpointSaver(keep=None, save_interval="1ba"))
        whole = hook
    found = find_checkpoints(tmp_path / "my-run" / "checkpoints").checkpoints
    assert len(found) >= 8
    for each in found:
        with webhook_server() as hook:
            fit(tmp_path, Notify(to=hook.url, **options), LogsNumbers(NUMBERS), run_name=f"from{each.step}", resume=each.path)
            assert recorded(hook) == recorded(whole, each.step)
    with webhook_server() as hook:
        fit(
            tmp_path,
            Notify(to=hook.url),
            LogsNumbers(NUMBERS),
            run_name="again",
            resume=sorted(found, key=lambda c: c.step)[0].path,
        )
    assert hook.posts[0]["text"] == "again resumes at step 1, to 2ep (cpu)"


def test_a_new_run_starts_from_scratch(hook: WebhookServer, tmp_path: Path) -> None:
    notify = Notify(to=hook.url, when="some/number > 100")
    fit(tmp_path, notify, LogsNumbers(NUMBERS))
    fit(tmp_path, notify, LogsNumbers(NUMBERS), run_name="other")
    assert hook.events == ["start", "crossing", "end"] * 2
    assert [post["run"] for post in hook.posts] == ["my-run"] * 3 + ["other"] * 3


def test_two_fits_are_one_run(hook: WebhookServer, tmp_path: Path) -> None:
    with trainer(tmp_path, Notify(to=hook.url)) as trained:
        trained.fit("1ep")
        trained.fit("2ep")
    assert hook.events == ["start", "end"]


# --- Slack and mail ---


def test_slack_receives_an_escaped_text(hook: WebhookServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACK_URL", f"{hook.url}/services/{SECRET}\n")
    with pytest.raises(ValueError, match="&"):
        fit(tmp_path, Notify(to="slack", url_env="SLACK_URL", on="failure"), CallsAtStep(1, raises(ValueError("<a> & b"))))
    (post,) = hook.posts
    assert list(post) == ["text"]
    assert "ValueError: &lt;a&gt; &amp; b" in post["text"]
    assert hook.paths == [f"/services/{SECRET}"]
    fit(tmp_path / "again", Notify(to=f"slack:{hook.url}", on="start"))
    assert hook.posts[1:] == [{"text": "my-run starts, to 2ep (cpu)"}]


def test_the_webhook_may_be_in_an_environment_variable(
    hook: WebhookServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_URL", hook.url)
    fit(tmp_path, Notify(url_env="HOOK_URL"))
    assert hook.events == ["start", "end"]


class MailServer:
    """A minimal mail server."""

    def __init__(
        self, tls: ssl.SSLContext | None = None, *, at_once: bool = False, rejects: bool = False, unknown: bytes = b""
    ) -> None:
        self.mails: list[EmailMessage] = []
        self.logins: list[tuple[str, str]] = []
        self.in_the_clear: list[bytes] = []
        mail_server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    self.serve()
                except (OSError, ssl.SSLError):
                    pass  # the client may disconnect at any time

            def serve(self) -> None:
                connection, is_safe = self.request, False
                if at_once and tls is not None:
                    connection, is_safe = tls.wrap_socket(connection, server_side=True), True
                lines = connection.makefile("rb")

                def reply(text: str) -> None:
                    connection.sendall(text.encode() + b"\r\n")

                reply("220 sink")
                while line := lines.readline():
                    if not is_safe:
                        mail_server.in_the_clear.append(line)
                    word = line.split()[0].upper()
                    if word == b"EHLO":
                        reply("250-sink")
                        if tls is not None and not is_safe:
                            reply("250-STARTTLS")
                        reply("250 AUTH PLAIN")
                    elif word == b"STARTTLS":
                        assert tls is not None
                        reply("220 ready")
                        connection, is_safe = tls.wrap_socket(connection, server_side=True), True
                        lines = connection.makefile("rb")
                    elif word == b"AUTH":
                        _, user, password = base64.b64decode(line.split()[2]).decode().split("\0")
                        mail_server.logins.append((user, password))
                        reply("535 no" if rejects else "235 welcome")
                    elif word == b"RCPT" and unknown and unknown in line:
                        reply("550 unknown recipient")
                    elif word == b"DATA":
                        reply("354 speak")
                        content = b""
                        while (part := lines.readline()) != b".\r\n":
                            content += part
                        mail_server.mails.append(
                            email.message_from_bytes(content, _class=EmailMessage, policy=email.policy.default)
                        )
                        reply("250 taken")
                    elif word == b"QUIT":
                        reply("221 bye")
                        return
                    else:
                        reply("250 well")

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self) -> MailServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_a_failure_is_sent_by_mail_to_all_recipients(tmp_path: Path) -> None:
    with MailServer() as mail_server:
        notify = Notify(
            to="mailto:me@example.org,you@example.org",
            server=f"smtp://localhost:{mail_server.port}",
            sender="run@example.org",
            on="failure",
        )
        with pytest.raises(ValueError, match="two"):
            fit(tmp_path, notify, CallsAtStep(2, raises(ValueError("of\ntwo lines, and \u00fc"))))
    (mail,) = mail_server.mails
    assert mail["Subject"] == "my-run failed at step 2, in train_step, on rank 0: ValueError"
    assert (mail["From"], mail["To"]) == ("run@example.org", "me@example.org, you@example.org")
    assert "ValueError: of\ntwo lines, and \u00fc\n" in mail.get_content().replace("\r\n", "\n")


def test_a_rejected_recipient_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    to = "mailto:me@example.org,you@example.org,her@example.org"
    with MailServer(unknown=b"you@") as mail_server, caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, Notify(to=to, server=f"smtp://localhost:{mail_server.port}", on="end"))
    assert len(mail_server.mails) == 1  # recipients that have the mail do not get it again
    assert [message for message in caplog.messages if "did not reach" in message] == [
        "Notify: 'end' did not reach mail by localhost: it rejected 1 of 3 recipients"
    ]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a key with a self-signed certificate for `localhost`."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2", "-nodes"]
    parts = ["-keyout", str(path) + ".key", "-out", str(path) + ".crt"]
    ran = subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", *subject, *parts], capture_output=True, check=False)
    if ran.returncode:
        pytest.skip("openssl makes no certificate here")
    path.write_text(Path(str(path) + ".key").read_text() + Path(str(path) + ".crt").read_text())
    return path


def encrypting(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.mark.parametrize("scheme", ["smtp+starttls", "smtps"])
@pytest.mark.parametrize("is_trusted", [True, False])
def test_mail_with_a_password_is_sent_only_encrypted_to_a_trusted_server(
    scheme: str,
    is_trusted: bool,
    certificate: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MAIL_PASSWORD", SECRET)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with (
        MailServer(encrypting(certificate), at_once=scheme == "smtps") as mail_server,
        caplog.at_level(logging.WARNING, "callsheet"),
    ):
        server = f"{scheme}://me@localhost:{mail_server.port}"
        notify = Notify(to="mailto:me@example.org", server=server, password_env="MAIL_PASSWORD", on="start", retries=0)
        fit(tmp_path, notify)
    assert not any(SECRET.encode() in line or b"AUTH" in line for line in mail_server.in_the_clear)
    if is_trusted:
        assert mail_server.logins == [("me", SECRET)]
        assert [mail["From"] for mail in mail_server.mails] == ["me@example.org"]
    else:
        assert not mail_server.logins
        assert not mail_server.mails
        assert "certificate" in caplog.text.lower()
    assert SECRET not in caplog.text


def test_a_wrong_password_is_tried_once(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MAIL_PASSWORD", SECRET)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with MailServer(encrypting(certificate), rejects=True) as mail_server, caplog.at_level(logging.WARNING, "callsheet"):
        server = f"smtp+starttls://me@localhost:{mail_server.port}"
        fit(tmp_path, Notify(to="mailto:me@example.org", server=server, password_env="MAIL_PASSWORD", on="start"))
    assert set(mail_server.logins) == {("me", SECRET)}
    assert [message for message in caplog.messages if "did not reach" in message] == [
        "Notify: 'start' did not reach mail by localhost: it answered 535"
    ]
    assert SECRET not in caplog.text


# --- what goes wrong ---


def weights_of(trained: Trainer) -> list[Any]:
    return [parameter.flatten().tolist() for parameter in trained.model.parameters()]


def test_an_unreachable_address_is_reported_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with webhook_server() as hook:
        pass  # the server is closed and its port is free
    plain = fit(tmp_path / "plain")
    with caplog.at_level(logging.WARNING, "callsheet"):
        trained = fit(tmp_path, Notify(to=f"{hook.url}/{SECRET}", every="1ba", retries=0))
    assert weights_of(trained) == weights_of(plain)
    lost = [message for message in caplog.messages if "did not reach the webhook at 127.0.0.1: " in message]
    assert [message.split("'")[1] for message in lost] == ["start", *["progress"] * 8, "end"]
    assert "Connection refused" in lost[0]
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("answers", "posts", "is_lost"),
    [((503, 429, 200), 3, False), ((500, 500, 500, 200), 3, True), ((404, 200), 1, True), ((302, 200), 1, True)],
)
def test_a_notification_is_retried_only_if_that_may_help(
    answers: tuple[int, ...], posts: int, is_lost: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with webhook_server(*answers) as hook, caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, Notify(to=f"{hook.url}/{SECRET}", on="start"))
    assert hook.paths == [f"/{SECRET}"] * posts  # a redirect is not followed either
    assert any(f"it answered {answers[posts - 1]}" in message for message in caplog.messages) == is_lost
    assert SECRET not in caplog.text


def test_an_endpoint_that_does_not_answer_does_not_delay_training(
    hook: WebhookServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook.lets_go.clear()
    with caplog.at_level(logging.WARNING, "callsheet"):
        trained = fit(tmp_path, Notify(to=hook.url, on="start", timeout=0.2, retries=0))
    assert trained.run.outcome == "finished"
    assert any("'start' did not reach" in message and "timed out" in message for message in caplog.messages)


@pytest.mark.test_all
def test_the_queue_and_the_wait_at_the_end_are_bounded(
    hook: WebhookServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook.lets_go.clear()
    notify = Notify(to=hook.url, every="1ba", timeout=60)
    notify.lane_options = LaneOptions(queue=4, overflow="drop_oldest", deadline=1.0)
    memory = InMemoryLogger()
    # On a busy machine, the lane's thread may start late. Its short queue would then drop the start of training, and Notify
    # would send nothing.
    busy = CallsAtStep(1, lambda: hook.received_request.wait(30))
    start = time.monotonic()
    with caplog.at_level(logging.ERROR, "callsheet"):
        trained = fit(tmp_path, notify, busy, loggers=[memory], max_duration="20ep")
    assert time.monotonic() - start < 30
    assert trained.run.outcome == "finished"
    assert len(memory.history("train/loss")[0]) == 80
    found = [message for message in caplog.messages if "a lane has not delivered all events" in message]
    assert len(found) == 1, caplog.messages
    (message,) = found
    assert message.endswith(": Notify: 4 waiting, and one has not returned")
    assert memory.costs is not None
    (lost,) = [each for each in memory.costs.failures if each.callback == "Notify"]
    assert lost.dropped >= 70
    hook.lets_go.set()


class Broken:
    shown = "a broken destination"

    def __init__(self) -> None:
        self.tried = 0

    def send(self, notification: Notification, timeout: float) -> None:
        self.tried += 1
        raise NotDelivered("for good", is_final=True)


def test_a_permanent_failure_is_not_retried() -> None:
    broken = Broken()
    assert why_not_delivered(Notification("first", facts={"event": "start"}), broken, timeout=1, retries=5) == "for good"
    assert broken.tried == 1


def test_without_a_destination_it_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, Notify(every="1ba"))
    assert caplog.messages == ["Notify has no address to send to; give it to= or url_env="]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the environment variable HOOK_URL is not set"),
        ("", "the environment variable HOOK_URL is not set"),
        (f"ftp://host/{SECRET}", NONE_OF_OURS),
        (f"http://[{SECRET}", "the URL to notify cannot be read; give one such as https://example.org/hook"),
        (f"file:///{SECRET}", NONE_OF_OURS),
    ],
)
def test_a_bad_environment_variable_is_named(
    value: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HOOK_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("HOOK_URL", value)
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, Notify(url_env="HOOK_URL"))
    assert caplog.messages == [f"Notify sends nothing: {message}"]


def test_a_url_that_python_rejects_is_not_in_the_message(
    hook: WebhookServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, Notify(to=f"{hook.url}/{SECRET} with a space", on="start"))
    assert "did not reach the webhook at 127.0.0.1: InvalidURL" in caplog.text
    assert SECRET not in caplog.text


# --- secrets and configuration ---


@pytest.mark.parametrize("kind", ["", "slack:"])
def test_an_address_is_left_out_of_records(
    kind: str, hook: WebhookServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify = Notify(to=f"{kind}http://user:{SECRET}@127.0.0.1/services/{SECRET}?key={SECRET}", on=["start"])
    spec = CallbackSpec.of(notify)
    assert spec.init_args == {"to": f"{kind}http://127.0.0.1/...", "on": ["start"]}
    with pytest.raises(ConfigError, match=r"the address at 127\.0\.0\.1 was removed from the run's records") as caught:
        spec.build()
    assert SECRET.lower() not in str(caught.value).lower()
    monkeypatch.setenv("HOOK_URL", f"{hook.url}/{SECRET}")
    named = CallbackSpec.of(Notify(url_env="HOOK_URL"))
    assert named.init_args == {"url_env": "HOOK_URL"}
    again = named.build()
    fit(tmp_path, again, CheckpointSaver())
    assert hook.paths[0] == f"/{SECRET}"
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert written
    assert not any(SECRET.encode() in content for content in written)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": f"ftp://example.org/{SECRET}"}, "not an http or https URL"),
        ({"to": SECRET}, "not an http or https URL"),
        ({"to": f"slack:file:///{SECRET}"}, "not an http or https URL"),
        ({"to": f"https:///{SECRET}"}, "with a host"),
        ({"to": f"https://host:port/{SECRET}"}, "cannot be read"),
        ({"to": f"https://example.org/{SECRET}", "url_env": "HOOK_URL"}, "both url_env= and to= give a URL"),
        ({"to": f"{SECRET}:{SECRET}"}, "not an http or https URL"),
        ({"to": "mailto:someone"}, "is not a list of addresses"),
        ({"to": "mailto:a@b.org\nBcc: c@d.org"}, "is not a list of addresses"),
        ({"to": "mailto:a@b.org", "server": "smtp://me@localhost", "password_env": "X"}, "in the clear"),
        ({"to": "mailto:a@b.org", "server": "smtps://me@localhost"}, "give both a user and"),
        ({"to": "mailto:a@b.org", "password_env": "X"}, "give both a user and"),
        ({"to": "mailto:a@b.org", "server": f"smtps://me:{SECRET}@localhost"}, "name a variable for it in password_env"),
        ({"to": "mailto:a@b.org", "server": "http://localhost"}, "unknown scheme of a mail server"),
        ({"to": "mailto:a@b.org", "server": "smtp://localhost:mail"}, "server='smtp://localhost:mail'"),
        ({"to": "mailto:a@b.org", "server": "smtp://"}, "give a scheme and a host"),
        ({"on": "finish"}, "unknown event to notify of 'finish'"),
        ({"when": "validation/loss"}, "as in 'validation/loss < 1.5'"),
        ({"when": "loss < low"}, "as in"),
        ({"when": "loss < nan"}, "as in"),
        ({"when": "loss == 1"}, "as in"),
        ({"every": "0ba"}, "more than 0"),
        ({"timeout": 0}, "timeout=0"),
        ({"retries": -1}, "retries=-1"),
    ],
)
def test_rejects_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Notify(**options)
    assert SECRET.lower() not in str(caught.value).lower()


# --- on several ranks ---


def on_a_rank(folder: str, url: str, failing: int) -> str:
    logging.disable(logging.CRITICAL)
    rank = int(os.environ["RANK"])
    does = [CallsAtStep(3, raises(ValueError("only here")))] if rank == failing else [CallsAtStep(3, lambda: None)]
    try:
        with trainer(folder, Notify(to=url, when="train/loss < 1e9"), *does, timeout_seconds=20.0) as trained:
            trained.fit()
    except Exception as error:
        return type(error).__name__
    return "finished"


@pytest.mark.test_all
def test_only_rank_zero_notifies(hook: WebhookServer, tmp_path: Path) -> None:
    assert run_ranks(on_a_rank, 2, str(tmp_path), hook.url, -1) == ["finished"] * 2
    assert hook.events == ["start", "crossing", "end"]
    assert "on 2 ranks" in hook.posts[0]["text"]


def test_another_ranks_failure_is_reported(hook: WebhookServer, tmp_path: Path) -> None:
    ends = run_ranks(on_a_rank, 2, str(tmp_path), hook.url, 1)
    assert ends[1] == "ValueError"
    assert hook.events[-1] == "failure"
    assert hook.posts[-1]["exception"]["rank"] == 0
    assert re.search(r"rank 1 on machine \S+ failed at step 3: ValueError: only here", hook.posts[-1]["text"])
