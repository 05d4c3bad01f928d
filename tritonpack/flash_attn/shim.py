"""install() lets `import flash_attn` give tritonpack's functions; uninstall() undoes it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from tritonpack.checks import check_flag

NAME = "flash_attn"
VERSION = "2.8.3"  # the release whose functions these are
# A folder of sys.path with the package and its metadata, by which packages look for it.
_FILES = {
    f"{NAME}/__init__.py": f"""
from tritonpack.flash_attn.fa2 import *
from flash_attn import bert_padding, flash_attn_interface
__version__ = "{VERSION}"
""",
    f"{NAME}/flash_attn_interface.py": "from tritonpack.flash_attn.fa2 import *\n",
    f"{NAME}/bert_padding.py": "from tritonpack.flash_attn.bert_padding import *\n",
    f"{NAME}-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
    f"{NAME}-{VERSION}.dist-info/top_level.txt": f"{NAME}\n",
}


class Installation(ExitStack):
    """Undoes `install()` by `uninstall()`, or on leaving it as a context manager; a second time does nothing."""

    uninstall = ExitStack.close


_INSTALLED: list[Installation] = []  # at most one, which lives as long as the process unless it is uninstalled


def install(*, force: bool = False) -> Installation:
    """Let `import flash_attn` give tritonpack's functions in this process, until `uninstall()` of the returned handle.

    A temporary folder of `sys.path` holds the public functions of `flash_attn`, `flash_attn.flash_attn_interface` and
    `flash_attn.bert_padding`, and metadata. Packages that look for these at their import must be imported afterwards;
    transformers, which caches the result, looks again. Names that packages import stay there after `uninstall()`.

    Args:
        force: replace the real flash-attn, if it is installed or imported, until `uninstall()`.

    Raises:
        ValueError: `force` is neither True nor False.
        RuntimeError: the real flash-attn is there and `force` isn't given, or tritonpack is installed already.

    >>> with install():
    ...     from flash_attn import flash_attn_varlen_func
    """
    check_flag(force, "force")
    if _INSTALLED:
        raise RuntimeError("tritonpack.flash_attn is installed already; call uninstall() on its handle first.")
    found = _loaded() or any(importlib.metadata.distributions(name="flash-attn")) or importlib.util.find_spec(NAME)
    if found and not force:
        raise RuntimeError("the real flash-attn is installed or imported; use it, or pass force=True to replace it.")
    with Installation() as undo:
        undo.callback(sys.modules.update, _loaded())
        undo.callback(_forget)
        folder = undo.enter_context(TemporaryDirectory(prefix="tritonpack-"))
        for name, text in _FILES.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        sys.path.insert(0, folder)
        undo.callback(lambda: sys.path.remove(folder))
        _forget()
        undo.callback(_INSTALLED.clear)
        _INSTALLED.append(undo.pop_all())
    return _INSTALLED[0]


def _loaded() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == NAME}


def _forget() -> None:
    """Forget what Python and transformers know about the package."""
    for name in _loaded():
        del sys.modules[name]
    importlib.invalidate_caches()
    checks = sys.modules.get("transformers.utils.import_utils")
    for name, check in list(vars(checks).items()) if checks is not None else ():
        if (NAME in name or name == "_package_distribution_mapping") and hasattr(check, "cache_clear"):
            check.cache_clear()
    functions = sys.modules.get("transformers.modeling_flash_attention_utils")
    if getattr(functions, "_loaded_implementation", None) == "flash_attention_2":
        functions._loaded_implementation = None  # type: ignore[union-attr]
