"""Write a kernel repository of tritonpack's attention: `python -m tools.hub_build OUT`.

The `kernels` library loads it (docs/upstream.md). The modules below `ROOTS`, and what they import of tritonpack, are
copied with relative imports. The three variants hold the same files; only their `metadata.json` differs.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import shutil
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

from tools.hub_files.loading import load

__all__ = ["build", "load"]

ROOT = Path(__file__).parents[1]
FILES = Path(__file__).with_name("hub_files")
PACKAGE = "tritonpack"  # and the name of the kernel
VERSION = 1  # of the kernel's functions; transformers asks for 1
BACKENDS = ("cpu", "cuda", "rocm")
# `attention.py` imports backends by name at their first use. `gluon`, which "auto" never chooses, is left out.
ROOTS = ("attention", "flash_attn.fa2", "backends.blocked", "backends.reference", "backends.triton")
ALLOWED = {"einops", "torch", "triton"} | sys.stdlib_module_names
MAX_LINES = 10_000

ENTRY = '''"""tritonpack's attention over packed documents, under the names of FlashAttention-2."""

import os

_imported_by = os.getpid()  # notices.py reads it

from .flash_attn.fa2 import flash_attn_func, flash_attn_varlen_func  # noqa: E402

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
'''
BUILD = f"""[general]
name = "{PACKAGE}"
version = {VERSION}
edition = 5
license = "MIT"
backends = {json.dumps(BACKENDS)}

[general.hub]
repo-id = "{PACKAGE}/{PACKAGE}"

[torch-noarch]
"""


def build(out: str | Path) -> int:
    """Write the repository, and return the number of lines of Python of a variant.

    Args:
        out: an empty folder, or one that doesn't exist.

    Raises:
        ValueError: `out` holds files, or the attention imports what a kernel may not have, or it is too long.
    """
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and isn't an empty folder; name a new one, or empty it.")
    sources = collect()
    lines = sum(text.count("\n") for text in sources.values())
    if lines > MAX_LINES:
        raise ValueError(f"the attention has {lines} lines, and a kernel may have {MAX_LINES}; shorten ROOTS.")
    _write(out / "torch-ext" / PACKAGE, sources)
    for backend in BACKENDS:
        variant = out / "build" / f"torch-{backend}"
        _write(variant, sources)
        text = json.dumps(metadata(backend, sources), indent=2)
        (variant / "metadata.json").write_text(text + "\n", encoding="utf-8")
    _write(out, {"build.toml": BUILD, ".gitignore": "__pycache__/\n.pytest_cache/\nresult\n"})
    (out / "tests").mkdir()
    for name, place in (("CARD.md", out), ("loading.py", out / "tests"), ("test_packed.py", out / "tests")):
        shutil.copy(FILES / name, place)
    shutil.copy(ROOT / "LICENSE", out)
    return lines


def collect() -> dict[str, str]:
    """The source of each file of the kernel, by its path.

    Raises:
        ValueError: an import that is neither tritonpack's, nor allowed, nor of Python itself.
    """
    sources, waiting = {"__init__.py": ENTRY}, list(ROOTS)
    while waiting:
        module = waiting.pop()
        path = _path(module)
        if path is None:
            raise ValueError(f"{PACKAGE} has no module {module}, which ROOTS names.")
        if path in sources:
            continue
        text = (ROOT / PACKAGE / path).read_text(encoding="utf-8")
        waiting += _needs(text, path)
        sources[path] = _with_relative_imports(text, path)
    for path in list(sources):  # a folder that is imported only for a file in it
        sources.setdefault((Path(path).parent / "__init__.py").as_posix(), "")
    return dict(sorted(sources.items()))


def metadata(backend: str, sources: dict[str, str]) -> dict[str, object]:
    """`metadata.json` of a variant. A kernel's `python-depends` can't name torch and triton, which it may always use.

    The digest is the format of `kernels`: base64 of the SHA-256 of each file but this one. `id`, the name under which
    the variant is imported and its operators are registered, ends in the first digits of the SHA-256 of all of these.
    """
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in sources.items()}
    both = b"".join(path.encode() + digest for path, digest in digests.items())
    return {
        "name": PACKAGE,
        "id": f"_{PACKAGE}_{backend}_{hashlib.sha256(both).hexdigest()[:10]}",
        "version": VERSION,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {path: b64encode(digest).decode() for path, digest in digests.items()},
        },
    }


def _path(module: str) -> str | None:
    """The file of a module below tritonpack, or None if this isn't a module."""
    place = module.replace(".", "/")
    return next((path for path in (f"{place}.py", f"{place}/__init__.py") if (ROOT / PACKAGE / path).exists()), None)


def _needs(text: str, path: str) -> Iterator[str]:
    """The modules below tritonpack that a file imports when it runs; a type checker's imports don't count."""
    tree = ast.parse(text)
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, module = name.partition(".")
            if package not in ALLOWED | {PACKAGE}:
                raise ValueError(f"{path} imports {name}; a kernel may import torch, triton and einops alone.")
            if package == PACKAGE:
                known = [one for one in (module, module.rpartition(".")[0]) if one and _path(one)]
                if isinstance(node, ast.Import) or (not known and f"\n{module} = " not in ENTRY):
                    raise ValueError(
                        f"{path} imports {name}; write `from {PACKAGE} import` and a module or ENTRY's name."
                    )
                yield from known


def _with_relative_imports(text: str, path: str) -> str:
    lines, dots = text.splitlines(keepends=True), "." * (path.count("/") + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            before, line = lines[node.lineno - 1][: node.col_offset], lines[node.lineno - 1][node.col_offset :]
            inner = (node.module or "").partition(".")[2]
            lines[node.lineno - 1] = before + line.replace(f"from {node.module} ", f"from {dots}{inner} ", 1)
    return "".join(lines)


def _write(folder: Path, sources: dict[str, str]) -> None:
    for path, text in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.hub_build", description="Write a kernel repository.")
    parser.add_argument("out", type=Path, metavar="OUT", help="an empty folder, or one that doesn't exist")
    out = parser.parse_args(arguments).out
    try:
        lines = build(out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {len(BACKENDS)} variants of {lines:,} lines each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
