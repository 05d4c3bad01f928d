"""Check a release before it is published: `make release-check`, or `python -m tools.release_check [--no-installs]`.

The version, the changelog and the commit agree; the wheel and the source archive hold the package and nothing else; the
wheel installs into empty environments with the oldest versions that pyproject.toml allows, and with the newest, and
works there: `tritonpack doctor` and the quickstart. That downloads some gigabytes. uv resolves the versions.

Prints a line for each check. Exit status: 1 if one fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import tritonpack

ROOT = Path(__file__).parents[1]
OLDEST, NEWEST = "lowest-direct", "highest"  # of uv's resolutions


class ReleaseError(Exception):
    """A fault of the release."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """The output of a command.

    Raises:
        ReleaseError: it fails; with the end of what it printed.
    """
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        printed = (done.stdout + done.stderr)[-800:]
        raise ReleaseError(f"{command[0]} {command[1]} ended with status {done.returncode}: {printed}")
    return done.stdout


def check_version(changelog: str, version: str) -> str:
    """The first entry of the changelog is the version's, and has a date."""
    found = re.search(r"^## \[(.*?)\] - (.*)$", changelog, re.MULTILINE)
    if not found or found[1] != version:
        raise ReleaseError(f"CHANGELOG.md begins with {found and found[1]}, and tritonpack.__version__ is {version}.")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found[2]):
        raise ReleaseError(f"the entry of {version} in CHANGELOG.md has no date but {found[2]!r}.")
    return f"{version} of {found[2]}"


def check_commit() -> str:
    """Everything is committed."""
    if changed := run("git", "status", "--porcelain"):
        raise ReleaseError(f"not committed: {' '.join(changed.split())[:300]}")
    return run("git", "rev-parse", "--short", "HEAD").strip()


def check_files(names: set[str], wanted: set[str]) -> str:
    """An archive holds the package's files and no other Python code."""
    code = {name for name in names if name.startswith("tritonpack/") or name.endswith(".py")}
    if code != wanted:
        lacks, more = sorted(wanted - code), sorted(code - wanted)
        raise ReleaseError(
            f"lacks {', '.join(lacks[:5]) or 'nothing'}; has {', '.join(more[:5]) or 'nothing'} in addition."
        )
    return f"{len(wanted)} files of the package"


def check_wheel(wheel: Path, wanted: set[str]) -> str:
    """The wheel holds the package, and its licence."""
    names = zipfile.ZipFile(wheel).namelist()
    if not any(name.endswith("/LICENSE") for name in names):
        raise ReleaseError("lacks LICENSE.")
    return check_files(set(names), wanted)


def check_source(archive: Path, wanted: set[str]) -> str:
    """The source archive holds what a wheel is built from."""
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    if lacks := {"LICENSE", "README.md", "pyproject.toml"} - names:
        raise ReleaseError(f"lacks {', '.join(sorted(lacks))}.")
    files = {name for name in names if "." in Path(name).name and not name.startswith("tests/")}
    return check_files(files, wanted)


def check_install(wheel: Path, resolution: str, folder: Path) -> str:
    """The wheel works in an environment of its own."""
    python = folder / resolution / "bin" / "python"
    run("uv", "venv", "-q", "--python", sys.executable, python.parents[1])
    install = "uv", "pip", "install", "-q", "--python", python
    run(*install, "--resolution", resolution, "-r", ROOT / "pyproject.toml")
    run(*install, "--no-deps", wheel)
    run(python.with_name("tritonpack"), "doctor", cwd=folder)
    run(python, ROOT / "examples" / "quickstart.py", ROOT / "README.md", cwd=folder)
    listed = run("uv", "pip", "list", "-q", "--python", python)
    versions = dict(line.split()[:2] for line in listed.splitlines()[2:])
    return ", ".join(f"{name} {versions.get(name, 'absent')}" for name in ("torch", "triton", "transformers", "numpy"))


def checks(folder: Path, installs: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """The name of each check, and the check, which returns what it found."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    yield "version", partial(check_version, changelog, tritonpack.__version__)
    yield "commit", check_commit
    tracked = run("git", "ls-files", "tritonpack").split()
    run("uv", "build", "-q", "--out-dir", folder)
    wheel, archive = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    yield "wheel", partial(check_wheel, wheel, set(tracked))
    yield "source", partial(check_source, archive, set(tracked))
    for name, resolution in (("oldest", OLDEST), ("newest", NEWEST)) if installs else ():
        yield name, partial(check_install, wheel, resolution, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-installs", action="store_true", help="leave out the environments")
    options = parser.parse_args()
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, check in checks(Path(folder), not options.no_installs):
            try:
                print(f"ok    {name:8} {check()}", flush=True)
            except ReleaseError as error:
                faults += 1
                print(f"FAULT {name:8} {error}", flush=True)
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
