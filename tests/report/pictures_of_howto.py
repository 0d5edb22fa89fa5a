"""Makes the pictures of docs/howto/read_a_report.md from the program on that page.

In the folder `tests`: `python -m report.pictures_of_howto ../docs/images`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from playwright.sync_api import sync_playwright

from .pictures import take

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "read_a_report.md"


def main(out: Path) -> None:
    program = re.findall(r'^```python title="train.py"\n(.*?)^```$', PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[
        0
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The page shows these commands.
    shell = partial(subprocess.run, shell=True, check=True, env=os.environ | {"PATH": path})
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch)
        (folder / "train.py").write_text(program, encoding="utf-8")
        for name in ("good", "slow", "unstable"):
            shell(f"python train.py {name} && callsheet report {name}", cwd=folder)
        shell("callsheet compare good slow && callsheet compare good slow unstable -o compare.html", cwd=folder)
        arguments = ["--no-sandbox", "--disable-gpu", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_context(viewport={"width": 1280, "height": 1600}, offline=True).new_page()
        page.goto((folder / "runs" / "slow" / "report.html").as_uri())
        page.locator("#timeline").scroll_into_view_if_needed()
        take(page, out / "howto-slow.png", 880, "#timeline")
        page.goto((folder / "runs" / "unstable" / "report.html").as_uri())
        page.locator("#log").check()
        page.locator("summary", has_text="throughput").first.click()  # collapse its charts
        take(page, out / "howto-unstable.png", 1430)
        page.goto((folder / "compare.html").as_uri())
        page.locator("#log").check()
        take(page, out / "howto-compare.png", 1000, "#differences")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
