"""Destinations of notifications: webhooks, Slack and mail. Their secrets never appear in messages or records.

`apprise` (2.3) is not used, because it requires requests, urllib3, requests-oauthlib, click, Markdown, PyYAML and certifi, while
these three kinds of destination need only the standard library. It also follows redirects by default, which would send a message
to an address that the user did not give.
"""

from __future__ import annotations

import json
import math
import os
import smtplib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import EmailMessage
from typing import Any, NoReturn, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from callsheet.core.callback import one_of
from callsheet.errors import ConfigError

HIDDEN_PATH = "/..."
"""The text that replaces everything after the host when an address is shown."""

_DEFAULT_PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}


@dataclass(frozen=True)
class Address:
    """A checked address to which notifications are sent. Only the method `destination` reads secrets.

    Args:
        to: `https://...`, `slack:https://...` or `mailto:...`; with `url_env`, `webhook` or `slack`.
        url_env: the variable that holds the URL.
        server: for mail: `smtp://`, `smtp+starttls://` or `smtps://`, optionally a user and `@`, the host, optionally a port.
        sender: for mail: the sender's address; if empty, that of the first recipient.
        password_env: for mail: the variable that holds the user's password.

    Raises:
        ConfigError: the address is invalid.
    """

    to: str = field(repr=False)
    url_env: str
    server: str
    sender: str
    password_env: str

    def __post_init__(self) -> None:
        if self.url_env:
            if self.to not in ("", "webhook", "slack"):  # `to` may be a secret, so the message does not repeat it
                raise ConfigError("both url_env= and to= give a URL; with url_env, set to= to 'webhook' or 'slack'")
        elif self.kind == "mailto":
            user, scheme = parse_server(self.server).username, urlsplit(self.server).scheme
            if not all("@" in each and not each.split()[1:] for each in self.rest.split(",")):
                raise ConfigError(f"to={self.to!r} is not a list of addresses; separate them with commas")
            if bool(user) is not bool(self.password_env):
                raise ConfigError(
                    f"server={self.server!r}: give both a user and the variable of a password in password_env, or neither"
                )
            if user and scheme == "smtp":
                raise ConfigError(
                    f"server={self.server!r} would send a password in the clear; write smtp+starttls:// or smtps://"
                )
        elif self.to:
            parse_url(self.url)

    @property
    def kind(self) -> str:
        """The kind of address, such as "mailto" or "slack": the part of the argument `to` before its first colon."""
        return self.to.partition(":")[0]

    @property
    def rest(self) -> str:
        """The part of the argument `to` after its first colon: the recipients of mail, or the URL after `slack:`."""
        return self.to.partition(":")[2]

    @property
    def url(self) -> str:
        """The webhook's URL: the argument `to` without the prefix `slack:`."""
        return self.rest if self.kind == "slack" else self.to

    @property
    def without_secrets(self) -> str:
        """The address without its secrets, for the run's record. Of a URL, only the scheme and the host remain."""
        if self.url_env or self.kind == "mailto" or not self.to:
            return self.to
        parts = parse_url(self.url)
        return f"{'slack:' if self.kind == 'slack' else ''}{parts.scheme}://{parts.hostname}{HIDDEN_PATH}"

    def destination(self) -> Destination | None:
        """Return an object that sends notifications to this address; None if there is no address. Read secrets from the environment.

        Raises:
            ConfigError: a variable is not set, or holds no URL.
        """
        secrets = {}
        for variable in filter(None, (self.url_env, self.password_env)):
            if not os.environ.get(variable):
                raise ConfigError(f"the environment variable {variable} is not set")
            secrets[variable] = os.environ[variable].strip()
        if self.kind == "mailto":
            return Mail(self.rest, self.server, self.sender, secrets.get(self.password_env))
        if not self.to and not self.url_env:
            return None
        return Webhook(secrets[self.url_env] if self.url_env else self.url, is_slack=self.kind == "slack")


class NotDelivered(Exception):
    """Raised when a notification was not delivered. The message contains no secrets.

    `is_final` means that a retry would not help.
    """

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


@dataclass(frozen=True)
class Notification:
    """A message to send: a title, further lines of text, and `facts`, plain data that only webhooks receive."""

    title: str
    more: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The title and the other lines as one text."""
        return f"{self.title}\n{self.more}".strip()


class Destination(Protocol):
    """A destination of notifications, such as a webhook or a mail server."""

    shown: str
    """A description of the destination without secrets, for log messages."""

    def send(self, notification: Notification, timeout: float) -> None:
        """Send the notification once. Raise `NotDelivered` if that fails."""


class Webhook:
    """Sends notifications to a URL, as JSON by POST: a notification's `facts` and text or, for Slack, only its text.

    Raises:
        ConfigError: the URL is not http or https.
    """

    def __init__(self, url: str, *, is_slack: bool = False) -> None:
        parts = parse_url(url)
        self.shown = f"{'Slack' if is_slack else 'the webhook'} at {parts.hostname}"
        self._url = url
        self._is_slack = is_slack or parts.hostname == "hooks.slack.com"

    def send(self, notification: Notification, timeout: float) -> None:
        """Post the notification. Redirects are not followed."""
        text = notification.text
        if self._is_slack:
            payload: dict[str, Any] = {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
        else:
            payload = {**notification.facts, "text": text}
        headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "callsheet"}
        request = Request(self._url, data=json.dumps(_plain(payload), allow_nan=False).encode(), headers=headers)
        try:
            with _OPENER.open(request, timeout=timeout):
                return
        except HTTPError as error:
            error.close()
            raise NotDelivered(f"it answered {error.code}", is_final=error.code < 500 and error.code != 429) from None
        except URLError as error:
            raise NotDelivered(str(error.reason)) from None
        except OSError as error:
            raise NotDelivered(str(error) or type(error).__name__) from None
        except Exception as error:  # leave out the error's message, since it may contain the secret URL
            raise NotDelivered(type(error).__name__, is_final=True) from None


class Mail:
    """Sends mail by SMTP; see `Address` for the arguments."""

    def __init__(self, recipients: str, server: str, sender: str, password: str | None = None) -> None:
        parts = parse_server(server)
        self.shown = f"mail by {parts.hostname}"
        self._recipients = recipients
        self._scheme, self._host = parts.scheme, parts.hostname or ""
        self._port = parts.port or _DEFAULT_PORTS[parts.scheme]
        self._login = (parts.username, password) if parts.username and password is not None else None
        self._sender = sender or recipients.split(",")[0]

    def send(self, notification: Notification, timeout: float) -> None:
        """Send the mail through the server."""
        mail = EmailMessage()
        mail["Subject"] = " ".join(notification.title.split())[:200]
        mail["From"], mail["To"] = self._sender, self._recipients
        mail.set_content(f"{notification.text}\n")
        try:
            with self._connect(timeout) as connection:
                rejected = connection.send_message(mail)
        except smtplib.SMTPResponseException as error:
            raise NotDelivered(f"it answered {error.smtp_code}", is_final=error.smtp_code >= 500) from None
        except smtplib.SMTPRecipientsRefused:
            raise NotDelivered("it rejected the recipients", is_final=True) from None
        except OSError as error:  # smtplib's exceptions are subclasses of OSError
            raise NotDelivered(str(error) or type(error).__name__) from None
        except Exception as error:  # leave out the error's message, since it may contain the password
            raise NotDelivered(type(error).__name__, is_final=True) from None
        # The server has already accepted the mail for the other recipients. Do not retry, so that they do not get it twice.
        if rejected:
            of = len(self._recipients.split(","))
            raise NotDelivered(f"it rejected {len(rejected)} of {of} recipients", is_final=True)

    def _connect(self, timeout: float) -> smtplib.SMTP:
        context = ssl.create_default_context()
        if self._scheme == "smtps":
            connection: smtplib.SMTP = smtplib.SMTP_SSL(self._host, self._port, timeout=timeout, context=context)
        else:
            connection = smtplib.SMTP(self._host, self._port, timeout=timeout)
        try:
            if self._scheme == "smtp+starttls":
                connection.starttls(context=context)
            if self._login is not None:
                connection.login(*self._login)
        except BaseException:
            connection.close()
            raise
        return connection


def parse_url(url: str) -> SplitResult:
    """Return the parts of a webhook's URL. If the URL is invalid, raise ConfigError with a message without the URL."""
    try:
        parts = urlsplit(url.strip())
        _ = parts.port
    except ValueError:
        raise ConfigError("the URL to notify cannot be read; give one such as https://example.org/hook") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("the URL to notify is not an http or https URL with a host; give one such as https://example.org/hook")
    if parts.path == HIDDEN_PATH:
        raise ConfigError(
            f"the address at {parts.hostname} was removed from the run's records because it may be a secret; give the whole address"
        )
    return parts


def parse_server(server: str) -> SplitResult:
    """Return the parts of a mail server's address. Raise ConfigError if it is invalid."""
    parts = urlsplit(server)
    if parts.password is not None:
        raise ConfigError(
            f"the address of the mail server {parts.hostname} holds a password; name a variable for it in password_env"
        )
    one_of("scheme of a mail server", parts.scheme, tuple(_DEFAULT_PORTS))
    try:
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"server={server!r}: {error}") from None
    if not parts.hostname or parts.path.strip("/"):
        raise ConfigError(f"server={server!r}: give a scheme and a host, such as smtp+starttls://me@smtp.example.org")
    return parts


def _plain(value: Any) -> Any:
    """Return `value` as data that JSON can store: NaN, infinity and objects that JSON lacks become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> NoReturn:
        raise HTTPError(req.full_url, code, "a redirect", headers, fp)


_OPENER = build_opener(_NoRedirect)
