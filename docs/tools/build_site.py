"""Build the site into site/: `python docs/tools/build_site.py`, in the root of the repository.

The generator reads build/pages. This program writes that folder: the pages of docs/, the files at the root that are
pages too, and what `--help` prints for each command. A warning of the generator fails the build.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def main() -> int:
    """Write build/pages, build the site from it, and return the exit code of the generator."""
    if sys.version_info < (3, 11):
        sys.exit("error: the site needs Python 3.11 or later, as its generator does")
    root = Path.cwd()
    write_pages(root, root / "build" / "pages")
    # The generator caches pages by their own text; a docstring that changed needs --clean.
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": paths}).returncode


def write_pages(root: Path, out: Path) -> None:
    """Empty the folder `out`, and write the pages into it."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(root / "docs", out, ignore=shutil.ignore_patterns("tools", "__pycache__"))
    for name, page in PAGES.items():
        (out / page).write_text(as_page((root / name).read_text(encoding="utf-8")), encoding="utf-8")
    for page in out.rglob("*.md"):
        text = with_help(page.read_text(encoding="utf-8"))
        page.write_text(with_linked_pictures(with_names_of_pages(text)), encoding="utf-8")


def as_page(text: str) -> str:
    """The text of a file at the root, with links relative to docs/: `docs/x.md` becomes `x.md`."""
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\((\w+\.md)", lambda link: f"]({PAGES.get(link[1], link[1])}", text)


def with_help(text: str) -> str:
    """The text, with what `tritonpack COMMAND --help` prints below each `<!-- help: COMMAND -->`."""
    return re.sub(r"<!-- help: ([\w-]+) -->", lambda found: f"```text\n{help_of(found[1])}\n```", text)


def with_names_of_pages(text: str) -> str:
    """The text, with `[docs/packing.md](...)` as `[packing](...)`: a page of a site isn't a file to its reader."""
    return re.sub(r"\[(?:docs/)?([\w-]+)\.md\]\(", r"[\1](", text)


def with_linked_pictures(text: str) -> str:
    """The text, with each picture a link to its file, because a narrow screen shows it small."""
    return re.sub(r"^!\[.*\]\((.*)\)$", r"[\g<0>](\1)", text, flags=re.MULTILINE)


def help_of(command: str) -> str:
    """Return the output of `tritonpack COMMAND --help`, 80 columns wide and without colours."""
    plain = {"COLUMNS": "80", "TERMINAL_WIDTH": "80", "TYPER_USE_RICH": "0"}
    call = [sys.executable, "-m", "tritonpack", command, "--help"]
    done = subprocess.run(call, capture_output=True, text=True, check=True, env=os.environ | plain)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
