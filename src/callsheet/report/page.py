"""The page of a run: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from callsheet.extras import load
from callsheet.report.contents import contents
from callsheet.report.perfetto import trace_json
from callsheet.report.run_folder import RunFolder, image_bytes

_SCRIPTS = ("dom.js", "tables.js", "curves.js", "timeline.js", "sections.js", "live.js", "main.js")
_MOST_IMAGE_BYTES = 24 * 2**20  # in one page


@dataclass(frozen=True, slots=True)
class Live:
    """What makes the page a live one, served beside its data.

    The page asks for `poll` with `?since=<version>` every `seconds`, where `version` is that of the data it shows; the answer is the
    JSON of `data`, or status 204 or 304 where nothing is new. Images are asked for as `images/<file>`, relative to the page, as the
    run's folder has them (`image_bytes` reads one). A button sends `POST act` with the JSON `{"act": "save" | "evaluate" | "stop"}`;
    the answer is JSON with a `message`, or another status with a text. Each request carries `token` in the header `X-Callsheet-Token`,
    beside the page's cookies. The JSON of `data` may carry `no_acts`, a sentence that says why the buttons are off; it is shown.
    With a `nonce` the page's scripts carry it, for the header `Content-Security-Policy: script-src 'nonce-...'`; styles are inline.
    """

    token: str
    poll: str = "data.json"
    act: str = "act"
    seconds: float = 2.0
    no_acts: str = ""
    nonce: str = ""


def data(run: RunFolder) -> dict[str, Any]:
    """What the page draws from, as plain data that JSON knows; numbers that are not finite are None."""
    told: dict[str, Any] = _plain(contents(run))
    return told


def page(run: RunFolder, *, live: Live | None = None) -> str:
    """The whole page as HTML. Everything it needs is in it, plotly.js (4.8 MB) as well; live, it asks its server for news.

    Raises:
        MissingPackage: plotly is not installed.
    """
    told = data(run)
    pixels: dict[str, str] = {}
    if live is None:
        pixels, told["images_left_out"] = _pixels(run, told["images"])
    scripts = [
        load("plotly.offline", extra="report", wanted_by="the report's page").get_plotlyjs(),
        "'use strict';\n(() => {\n" + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();\n",
    ]
    own = "'self'" if live is not None else ""
    policy = [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts))}",
        "style-src 'unsafe-inline'",
        f"img-src data: blob: {own}",
        f"connect-src {own}" if own else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    parts = {
        "POLICY": html.escape("; ".join(policy)),
        "TITLE": html.escape(f"{run.name} - callsheet"),
        "STYLE": _asset("page.css"),
        "NONCE": html.escape(live.nonce) if live is not None else "",
        "DATA": _json_in_html({"data": told, "pixels": pixels, "live": asdict(live) if live is not None else None}),
        "PLOTLY": scripts[0],
        "SCRIPT": scripts[1],
    }
    text = _asset("page.html")
    pieces = text.split("@@")  # text, NAME, text, NAME, ...: what is put in is not looked through again
    whole = "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))
    return whole.encode("utf-8", "replace").decode()  # half of a pair of surrogates has no bytes


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page to `report.html` in the run's folder, or to `out`, and the trace beside it; returns the page's path.

    The trace, for Perfetto, is `trace.json`, beside another `out` `<its stem>.trace.json`. Each file appears as a whole or not at all.

    Raises:
        FileNotFoundError: there is no such folder.
        MissingPackage: plotly is not installed.
    """
    run = RunFolder.read(folder)
    path = Path(out) if out is not None else Path(folder) / "report.html"
    trace = path.with_name("trace.json" if path.stem == "report" else f"{path.stem}.trace.json")
    text = page(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(trace, trace_json(run))
    _write(path, text)
    return path


def _pixels(run: RunFolder, images: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """The images as data URIs by file, as many as the page has room for, the last ones first; and how many are left out."""
    turns = [list(reversed(tellings)) for tellings in images.values()]
    files = [
        file
        for turn in range(max(map(len, turns), default=0))
        for each in turns
        if turn < len(each)
        for file in each[turn]["files"]
    ]
    found: dict[str, str] = {}
    room, left_out = _MOST_IMAGE_BYTES, 0
    for file in dict.fromkeys(files):
        content = image_bytes(run.path, file)
        if content is None or len(content) > room:
            left_out += 1
            continue
        room -= len(content)
        found[file] = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return found, left_out


def _plain(value: Any) -> Any:
    """`value` without numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _json_in_html(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return resources.files("callsheet.report").joinpath("assets", name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    """Write a file in one go, so that no reader sees half of it."""
    number, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(number, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
