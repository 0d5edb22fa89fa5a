"""Removes credentials from settings and texts, and shortens the reason why a run ended to one printable line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from callsheet.errors import text_of

_MAX_REASON_CHARACTERS = 300  # the maximum length of a reason, in characters
_URL_PATTERN = re.compile(r"\b(https?://)(?:[^\s/@'\"]*@)?([^\s/?#'\"<>]+)[^\s'\"<>)]*")
_LOGIN_PATTERN = re.compile(r"(\b\w+://)[^\s/@'\"]+@")
_SECRET_PATTERN = re.compile(
    r"(?i)\b([\w-]*(?:password|passwd|passphrase|secret|token(?!iz)|(?:api|access|private)[_-]?key|credential|authorization)[\w-]*|pwd?)"
    r"([\"']?[^\S\n]*[=:][^\S\n]*)(?:bearer\s+|basic\s+)?[^\s,;)]+"  # matches only if the name and the value are on one line
)
_KEY_BLOCK_PATTERN = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)

_TEXT_TOKEN_OPTION_PATTERN = re.compile(r"(?i)tokens(_per_\w+)?$|(?:pad|eos|bos|unk|mask|cls|sep)_token$|token_ids?$")
"""Names of options about the tokens of a text, such as `pad_token`, which are not credentials."""

_TOKEN_PATTERN = re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|pk-|xox[abeprs]-|AKIA|ASIA|AIza|eyJ)[\w.-]{12,}")


def one_line(text: str, *, at_most: int = _MAX_REASON_CHARACTERS) -> str:
    """Return `text` as one printable line, cut after `at_most` characters.

    Text that looks like a credential, such as the value after `token=`, is replaced by `...`. So is everything after the host of a
    URL.
    """
    plain = " ".join("".join(each if each.isprintable() else " " for each in text[: 20 * at_most]).split())
    plain = without_credentials(_URL_PATTERN.sub(r"\1\2/...", plain))
    return plain if len(plain) <= at_most else f"{plain[: at_most - 3]}..."


def without_credentials(text: str) -> str:
    """Return `text` with `...` in place of each part that looks like a credential.

    The removed text is a private key in PEM form, the login in a URL, the value after a name such as `token=`, and any word with the
    prefix of a well-known kind of token.
    """
    return _TOKEN_PATTERN.sub(
        "...", _SECRET_PATTERN.sub(r"\1\2...", _LOGIN_PATTERN.sub(r"\1...@", _KEY_BLOCK_PATTERN.sub("...", text)))
    )


def is_secret(name: str) -> bool:
    """Return whether the name of an option or a field, such as `api_key`, says that the value is a credential.

    A number of tokens, such as `max_new_tokens`, is not a credential, and neither is the id of a special token.
    """
    return not _TEXT_TOKEN_OPTION_PATTERN.search(name) and without_credentials(f"{name}=x").endswith("=...")


def without_secrets(values: Any) -> Any:
    """Return settings without credentials: `...` replaces values under a name such as `api_key`, and credentials inside texts.

    A mapping becomes a new dict, and a list or tuple a new list. Values of other types, except strings, are returned unchanged.
    """
    if isinstance(values, str):
        return without_credentials(values)
    if isinstance(values, Mapping):
        return {
            name: "..." if isinstance(name, str) and is_secret(name) and inside else without_secrets(inside)
            for name, inside in values.items()
        }
    return [without_secrets(inside) for inside in values] if isinstance(values, (list, tuple)) else values


def error_line(error: BaseException) -> str:
    """Return the type and the text of `error` as one line. `one_line` shortens the line and removes credentials."""
    text = text_of(error)
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)
