"""Playwright's `expect`, or None if Playwright is not installed, as for `make test`, which selects no browser tests."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

expect: Any = import_module("playwright.sync_api").expect if find_spec("playwright") else None
