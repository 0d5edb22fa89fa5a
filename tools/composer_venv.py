"""Make `.venv-composer`, in which Composer's bridge is tested.

The venv has mosaicml, and can import all packages of this environment too. Composer pins an older torch, so it and the few
packages that it needs are installed without their dependencies. If the venv exists with these versions, nothing is done.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".venv-composer"

VERSIONS = {
    "mosaicml": "0.32.1",
    "torchvision": "0.28.0",  # the release for torch 2.13
    "coolname": "5.0.0",
    "py-cpuinfo": "9.0.0",
    "tabulate": "0.9.0",
    "torch-optimizer": "0.3.0",
    "pytorch-ranger": "0.1.1",
    "mosaicml-cli": "0.8.3",
    "backoff": "2.2.1",  # from here on: needed to import mosaicml-cli
    "gql": "4.4.0",
    "graphql-core": "3.3.2",
    "tenacity": "9.2.1",
    "ruamel.yaml": "0.19.1",
    "questionary": "2.1.1",
    "validators": "0.36.0",
}


class CannotInstallError(Exception):
    """pip cannot install the packages."""


def make(folder: Path = FOLDER, versions: Mapping[str, str] = VERSIONS) -> Path:
    """Make the venv if it does not exist, and return its interpreter. Another venv has its own `folder` and `versions`.

    Raises:
        CannotInstallError: pip cannot install one of the packages; the message is pip's.
    """
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    wanted = "\n".join(["this one", sys.executable, *(f"{name}=={version}" for name, version in versions.items())])
    ready = folder / ".ready"
    if ready.is_file() and ready.read_text() == wanted:
        return python
    print(f"making {folder.name} ...", flush=True)
    venv.create(folder, clear=True, with_pip=False)
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
    ).stdout.strip()
    Path(packages, "the_other_venv.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"  # reads its .pth files too; one has callsheet's path
    )
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages]
    wanted_versions = [f"{name}=={version}" for name, version in versions.items()]
    done = subprocess.run([*install, *wanted_versions], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotInstallError(f"pip: {(errors or ['no message'])[-1]}")
    ready.write_text(wanted)
    return python


if __name__ == "__main__":
    print(make())
