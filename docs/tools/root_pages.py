"""Pages of the site that are files at the root of the repository: included, with their links turned around."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    root = Path(config.config_file_path).parent
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=as_page((root / name).read_text(encoding="utf-8"))))
    return files


def as_page(text: str) -> str:
    """Links and pictures as they are seen from docs/: `docs/x.md` is `x.md`, `CHANGELOG.md` its page."""
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\((\w+\.md)", lambda link: f"]({PAGES.get(link[1], link[1])}", text)
