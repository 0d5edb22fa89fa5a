"""Renders the page of a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from callsheet.core.optional import load
from callsheet.report.contents import contents
from callsheet.report.perfetto import trace_json
from callsheet.report.run_folder import RunFolder, image_bytes

_SCRIPTS = ("dom.js", "tables.js", "frame.js", "charts.js", "curves.js", "timeline.js", "sections.js", "live.js", "live_controls.js", "main.js")  # fmt: skip
_MAX_TOTAL_IMAGE_BYTES = 24 * 2**20  # the maximum size of all images in one page, in bytes


@dataclass(frozen=True, slots=True)
class Live:
    """The settings of a live page, which gets its data from a server.

    The page requests an image as `images/<file>`, relative to the page's address. The image has the same path in the run's folder,
    from which `image_bytes` reads it. The page's styles are inline.

    Args:
        token: sent with each request in the header `X-Callsheet-Token`, in addition to the page's cookies.
        poll: the address of the data. The page requests it with `?since=<version>`, with the version of the data it shows.
            The answer is the JSON of `data`, or status 204 or 304 if nothing is new.
        act: the address for requests. A button sends `POST act` with the JSON `{"act": "save" | "evaluate" | "stop"}`; the
            answer is JSON with a `message`, or another status with a text.
        seconds: the time between two requests of the data.
        disabled_reason: a sentence that the page shows and that says why the buttons are disabled; empty if they are enabled.
            The JSON of `data` may contain this sentence too.
        nonce: an attribute of the page's scripts, for the header `Content-Security-Policy: script-src 'nonce-...'`; empty: no
            attribute.
    """

    token: str
    poll: str = "data.json"
    act: str = "act"
    seconds: float = 2.0
    disabled_reason: str = ""
    nonce: str = ""


def data(run: RunFolder) -> dict[str, Any]:
    """Return the data that the scripts of a run's page draw, as plain JSON values. Numbers that are not finite become None.

    Args:
        run: the content of the run's folder.
    """
    content: dict[str, Any] = plain(contents(run))
    return content


def page(run: RunFolder, *, live: Live | None = None) -> str:
    """Return the whole page of a run as HTML. The page needs no other files, because it contains even plotly.js (4.8 MB).

    Args:
        run: the content of the run's folder.
        live: the settings with which the page polls its server; None: the page needs no server, and contains the run's images.

    Raises:
        MissingPackage: plotly is not installed.
    """
    content = data(run)
    pixels: dict[str, str] = {}
    if live is None:
        pixels, content["images_left_out"] = image_uris(
            content["images"], lambda file: image_bytes(run.path, file), room=_MAX_TOTAL_IMAGE_BYTES
        )
    return html_page(
        f"{run.name} - callsheet",
        {"data": content, "pixels": pixels, "live": asdict(live) if live is not None else None},
        _SCRIPTS,
        has_server=live is not None,
        nonce=live.nonce if live is not None else "",
    )


def html_page(
    title: str, content: Mapping[str, Any], scripts: Sequence[str], *, has_server: bool = False, nonce: str = ""
) -> str:
    """Return a page as HTML that needs no other files: it contains styles, plotly.js, scripts, and the data that they draw.

    Args:
        title: the page's title.
        content: the JSON values that the scripts find as `pageData`.
        scripts: the names of the script files in the folder `assets`, in the order in which they run.
        has_server: whether the page may request data and images from its server. If not, the page can request nothing.
        nonce: the nonce of the scripts, in addition to their hashes.

    Raises:
        MissingPackage: plotly is not installed.
    """
    texts = [
        plotly_js(),
        "'use strict';\n(() => {\n" + "\n".join(_asset(name) for name in scripts) + "\n})();\n",
    ]
    own = "'self'" if has_server else ""
    policy = [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, texts))}",
        "style-src 'unsafe-inline'",
        f"img-src data: blob: {own}",
        f"connect-src {own}" if own else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    parts = {
        "POLICY": html.escape("; ".join(policy)),
        "TITLE": html.escape(title),
        "STYLE": _asset("page.css"),
        "NONCE": html.escape(nonce),
        "DATA": json_in_html(content),
        "PLOTLY": texts[0],
        "SCRIPT": texts[1],
    }
    text = _asset("page.html")
    pieces = text.split("@@")  # text and names alternate; inserted texts are not split, so they may contain `@@`
    whole = "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))
    return whole.encode("utf-8", "replace").decode()  # replace lone surrogates, which UTF-8 cannot encode


def plotly_js() -> str:
    """Return the source of plotly.js. Raise MissingPackage if plotly is not installed."""
    text: str = load("plotly.offline", extra="report", wanted_by="the report's page").get_plotlyjs()
    return text


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run, and a trace for Perfetto next to it.

    The trace is `trace.json`; if `out` has another name than `report.html`, it is `<stem of out>.trace.json`. Each file is
    written atomically.

    Args:
        folder: the run's folder.
        out: the path of the page; None: `report.html` in the run's folder.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: there is no such folder.
        MissingPackage: plotly is not installed.
    """
    run = RunFolder.read(folder)
    path = Path(out) if out is not None else Path(folder) / "report.html"
    trace = path.with_name("trace.json" if path.stem == "report" else f"{path.stem}.trace.json")
    text = page(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(trace, trace_json(run))
    write_atomically(path, text)
    return path


def image_uris(images: Mapping[str, Any], read: Callable[[str], bytes | None], *, room: int) -> tuple[dict[str, str], int]:
    """Return the latest images that fit into `room` bytes, as data URIs by file name. Also return how many images were left out.

    Args:
        images: for each name, its entries in the order of their steps. Each entry has `files`.
        read: returns the content of a file, or None if it is not an image that may be shown.
        room: how many bytes the images may have together, before they are encoded.
    """
    turns = [list(reversed(entries)) for entries in images.values()]
    files = [
        file
        for turn in range(max(map(len, turns), default=0))
        for each in turns
        if turn < len(each)
        for file in each[turn]["files"]
    ]
    found: dict[str, str] = {}
    left_out = 0
    for file in dict.fromkeys(files):
        content = read(file)
        if content is None or len(content) > room:
            left_out += 1
            continue
        room -= len(content)
        found[file] = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return found, left_out


def plain(value: Any) -> Any:
    """Convert `value` to plain JSON values, with None for NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def json_in_html(value: Any) -> str:
    """Return `value` as JSON that is safe inside an HTML script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return resources.files("callsheet.report").joinpath("assets", name).read_text(encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, so that no reader sees an incomplete file."""
    number, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(number, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
