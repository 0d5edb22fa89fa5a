"""A small HTTP server that shows the live page of one or more runs on this machine.

It listens on 127.0.0.1, serves the page, its data and the run's images, and answers only requests that carry its token. Of several
runs, each has its own page below `/run/<number>/`.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from callsheet.errors import CallsheetError, ConfigError, RequestRejected
from callsheet.report.live_comparison import LiveComparison
from callsheet.report.live_run import LiveRun
from callsheet.report.run_folder import image_bytes

logger = logging.getLogger("callsheet")

HOST = "127.0.0.1"
# Accept any port: if ssh forwards the page, the browser may use another port than the server.
_LOCAL_HOST_PATTERN = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.ASCII | re.IGNORECASE)
_RUN_PATH_PATTERN = re.compile(r"/run/(0|[1-9]\d{0,5})(/.*)", re.ASCII | re.DOTALL)
_MAX_REQUEST_BYTES = 1024  # the maximum size of a request that a button of the page sends, in bytes
_IDLE_SECONDS = 60.0  # if a connection has no complete request after this time, it is closed
_MAX_CONNECTIONS = 32  # the maximum number of open connections, since each has a thread; a browser opens six

_ENTRY_PAGE = '<!doctype html><meta charset="utf-8"><title>callsheet</title><link rel="icon" href="data:,"><meta http-equiv="refresh" content="0;url=/">'
"""The answer to a request whose address has the token: a page that loads the page `/` at once.

The cookie is `SameSite=Strict`: the browser sends it only with requests from the server's own pages, such as this second request.
"""


class WatchServer(ThreadingHTTPServer):
    """An HTTP server for the page of `watched` (a run or a comparison) on `port`. If the port is 0, a free port is used.

    Raises:
        ConfigError: the server cannot listen on the port.
    """

    daemon_threads = True
    block_on_close = False  # do not wait for open connections at the end, because browsers keep theirs open
    allow_reuse_address = sys.platform != "win32"  # on Windows, this option would let two servers use one port

    def __init__(self, watched: LiveRun | LiveComparison, port: int = 0) -> None:
        self.watched = watched
        self.token = secrets.token_urlsafe(32)
        self.form_token = secrets.token_urlsafe(32)  # the page's buttons send this token, which other sites do not know
        self._tickets: set[str] = set()
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.waiting: dict[socket.socket, float] = {}  # connection -> when it began to wait for a complete request
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on port {port}: {error}; give another --port, or 0 for any that is free") from None

    @property
    def url(self) -> str:
        """The address of the page, with the token. Anyone who has this address can do everything that the page can do."""
        return self._url_with_token(self.token)

    def ticket_url(self) -> str:
        """Return an address with which the page can be opened only once.

        This address is meant for the command line of a browser, which other users may see in the list of processes.
        """
        ticket = secrets.token_urlsafe(32)
        self._tickets.add(ticket)
        return self._url_with_token(ticket)

    def lets_in(self, word: str) -> bool:
        """Return whether `word` is the server's token or an unused ticket. A ticket is valid once: this call removes it."""
        if same(word, self.token):
            return True
        ticket = next((each for each in self._tickets if same(word, each)), None)
        self._tickets.discard(ticket or "")
        return ticket is not None

    @property
    def cookie(self) -> str:
        """The name of the page's cookie. It contains the port, because a browser shares cookies between all ports of a host."""
        return f"callsheet-{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection in a new thread, or reject it if there are too many connections."""
        if not self._room.acquire(blocking=False):
            with suppress(OSError):
                request.settimeout(1.0)
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the thread was not started, so it will not release `_room` at its end: release `_room` here
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        self.waiting[request] = time.monotonic()
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.waiting.pop(request, None)
            self._room.release()

    def service_actions(self) -> None:
        """Close connections that have not completed a request in time. `serve_forever` calls this regularly."""
        now = time.monotonic()
        for request, since in list(self.waiting.items()):
            if now - since > _IDLE_SECONDS and self.waiting.pop(request, None) is not None:
                with suppress(OSError):  # the connection may be closed already
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a request, and keep serving. A browser that disconnects is not an error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            logger.exception("callsheet watch: a request failed")

    def _url_with_token(self, word: str) -> str:
        return f"http://{HOST}:{self.server_address[1]}/?token={word}"


def same(given: str, right: str) -> bool:
    """Return whether two secrets are equal, in constant time, so that the time does not reveal where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), right.encode())


class _Rejected(Exception):
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "callsheet", ""
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self, path: str, query: dict[str, list[str]]) -> None:
        self._request_is_whole()
        if path == "/" and "token" in query:
            if not self.server.lets_in(query["token"][-1]):
                raise _Rejected(HTTPStatus.FORBIDDEN, "this address is used up; open the one that callsheet watch printed")
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.OK, "text/html", _ENTRY_PAGE.encode(), {"Set-Cookie": cookie})
            return
        self._check_cookie()
        watched, path = self._find_watched(path)
        if path == "/":
            nonce = secrets.token_urlsafe(16)
            self._send(HTTPStatus.OK, "text/html", watched.page(self.server.form_token, nonce), nonce=nonce)
        elif path == "/data.json":
            news = watched.news(query.get("since", [""])[-1])
            self._send(HTTPStatus.NO_CONTENT if news is None else HTTPStatus.OK, "application/json", news or b"")
        elif isinstance(watched, LiveComparison):  # `/act` and `/images/` exist only for the page of a single run
            raise _Rejected(HTTPStatus.NOT_FOUND, "there is nothing here")
        elif path == "/act":
            raise _Rejected(HTTPStatus.METHOD_NOT_ALLOWED, "a request to the run must be a POST")
        elif path.startswith("/images/") and (image := image_bytes(watched.folder, unquote(path[1:]))) is not None:
            self._send(HTTPStatus.OK, "image/png", image)
        else:
            raise _Rejected(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _post(self, path: str, _: dict[str, list[str]]) -> None:
        self._check_cookie()
        watched, path = self._find_watched(path)
        if path != "/act" or isinstance(watched, LiveComparison):
            raise _Rejected(HTTPStatus.NOT_FOUND, "there is nothing here")
        if self.headers.get("Origin") != f"http://{self.headers.get('Host')}":
            raise _Rejected(HTTPStatus.FORBIDDEN, "only the page itself may send requests to the run")
        if not same(self.headers.get("X-Callsheet-Token", ""), self.server.form_token):
            raise _Rejected(HTTPStatus.FORBIDDEN, "the page is of an earlier server; load it again")
        try:
            request = json.loads(self._body())
            message = watched.ask(str(request["act"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:  # ConfigError is a ValueError, too
            why = str(error) if isinstance(error, CallsheetError) else 'send {"act": "save"}, "evaluate" or "stop"'
            raise _Rejected(HTTPStatus.BAD_REQUEST, why) from error
        except RequestRejected as error:
            raise _Rejected(HTTPStatus.CONFLICT, str(error)) from error
        except OSError as error:
            raise _Rejected(HTTPStatus.INTERNAL_SERVER_ERROR, f"the request cannot be written: {error}") from error
        self._send(HTTPStatus.OK, "application/json", json.dumps({"message": message}).encode())

    def _find_watched(self, path: str) -> tuple[LiveRun | LiveComparison, str]:
        """Return the run (or comparison) for a path, and the rest of the path. For `/run/3/act` this is run 3 and `/act`."""
        watched = self.server.watched
        if isinstance(watched, LiveComparison) and (found := _RUN_PATH_PATTERN.fullmatch(path)):
            number = int(found[1])
            if number < len(watched.runs):
                return watched.runs[number], found[2]
        return watched, path

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > _MAX_REQUEST_BYTES:
            raise _Rejected(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send at most {_MAX_REQUEST_BYTES} bytes, with a Content-Length"
            )
        body = self.rfile.read(int(length))
        self._request_is_whole()
        return body

    def _request_is_whole(self) -> None:
        """Stop the connection's idle timer, because the request is complete."""
        self.server.waiting.pop(self.connection, None)

    # --- access control ---

    def _check_host(self) -> None:
        """Reject a request whose `Host` header is not the name of this machine.

        Otherwise a foreign site could let its name resolve to this machine (DNS rebinding) and read the page.
        """
        if not _LOCAL_HOST_PATTERN.fullmatch(self.headers.get("Host", "")):
            raise _Rejected(HTTPStatus.FORBIDDEN, f"open the page as {HOST} or localhost")

    def _check_cookie(self) -> None:
        for pair in self.headers.get("Cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self.server.cookie and same(value, self.server.token):
                return
        raise _Rejected(HTTPStatus.FORBIDDEN, "open the address that callsheet watch printed: it has the token")

    # --- sending answers ---

    def _answer(self, what: Callable[[str, dict[str, list[str]]], None]) -> None:
        try:
            self._check_host()
            try:
                parts = urlsplit(self.path)
                query = parse_qs(parts.query, max_num_fields=16)
            except ValueError:
                raise _Rejected(HTTPStatus.BAD_REQUEST, "this is not an address") from None
            what(parts.path, query)
        except _Rejected as rejected:
            # Close the connection, so that the server does not parse unread parts of this request as the next request.
            self.close_connection = True
            self._send(rejected.status, "text/plain", f"{rejected}\n".encode())
        except CallsheetError as error:  # for example a missing package
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n".encode())
        finally:
            self.server.waiting[self.connection] = time.monotonic()

    def _send(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str] | None = None, *, nonce: str = "") -> None:
        script = f"'nonce-{nonce}'" if nonce else "'none'"
        policy = (
            f"default-src 'none'; script-src {script}; style-src 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8" if kind != "image/png" else kind,
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            **(more or {}),
        }
        if status != HTTPStatus.NO_CONTENT:
            headers["Content-Length"] = str(len(body))
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the base class rejects: a request that is invalid or has an unknown method."""
        self.close_connection = True
        # After an invalid request line, the base class knows no HTTP version and omits the answer's status line. So set a version.
        self.request_version = self.protocol_version
        self._send(HTTPStatus(code), "text/plain", f"{HTTPStatus(code).phrase}\n".encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log the request at debug level, but not its query, which may contain the token."""
        path = getattr(self, "path", "").partition("?")[0]
        logger.debug("callsheet watch: %s %s", getattr(self, "command", None), path)
