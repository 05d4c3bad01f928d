"""install() lets `import flash_attn` give tritonpack's functions; uninstall() undoes it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

from tritonpack.checks import check_flag

NAME = "flash_attn"
DISTRIBUTION = "flash-attn"
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
    f"{NAME}-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n",
    f"{NAME}-{VERSION}.dist-info/top_level.txt": f"{NAME}\n",
}


class Installation(AbstractContextManager["Installation"]):
    """tritonpack's functions under the name `flash_attn`; as a context manager it uninstalls them on leaving."""

    def __init__(self) -> None:
        self._replaced = _loaded()
        self._folder = tempfile.TemporaryDirectory(prefix="tritonpack-")  # which is removed when Python ends, too
        _INSTALLED.append(self)
        try:
            for name, text in _FILES.items():
                path = Path(self._folder.name, name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            sys.path.insert(0, self._folder.name)
            self._forget()
        except BaseException:
            self.uninstall()
            raise

    def _forget(self) -> None:
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

    def uninstall(self) -> None:
        """Restore what `import flash_attn` found before; a second call does nothing."""
        if self not in _INSTALLED:
            return
        _INSTALLED.remove(self)
        sys.path[:] = [path for path in sys.path if path != self._folder.name]
        self._folder.cleanup()
        self._forget()
        sys.modules.update(self._replaced)

    def __exit__(self, *error: object) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"Installation({NAME} {VERSION}, {'active' if self in _INSTALLED else 'uninstalled'})"


_INSTALLED: list[Installation] = []  # at most one, which lives as long as the process unless it is uninstalled


def install(*, force: bool = False) -> Installation:
    """Let `import flash_attn` give tritonpack's functions in this process, until `uninstall()`.

    It provides the public functions of `flash_attn` and `flash_attn.flash_attn_interface`, and
    `flash_attn.bert_padding`. `importlib.util.find_spec("flash_attn")` and `importlib.metadata.version("flash_attn")`,
    by which packages look for it, find it in a temporary folder of `sys.path`. Packages that look for it at their
    import must be imported afterwards; transformers, which caches the result, looks again. Names that packages import
    (`from flash_attn import ...`) stay there after `uninstall()`.

    Args:
        force: replace the real flash-attn, if it is installed or imported, until `uninstall()`.

    Returns:
        A handle with `uninstall()`; as a context manager it uninstalls on leaving.

    Raises:
        ValueError: `force` is neither True nor False.
        RuntimeError: the real flash-attn is there and `force` isn't given, or tritonpack is installed already.

    >>> with install():
    ...     from flash_attn import flash_attn_varlen_func
    """
    check_flag(force, "force")
    if _INSTALLED:
        raise RuntimeError("tritonpack.flash_attn is installed already; call uninstall() on its handle first.")
    if not force and _loaded():
        raise RuntimeError(
            f"{NAME} has been imported already, and the modules that imported it go on using it. Call install() before "
            "that import, or pass force=True to replace it."
        )
    if not force and (any(importlib.metadata.distributions(name=DISTRIBUTION)) or importlib.util.find_spec(NAME)):
        raise RuntimeError(f"the real {DISTRIBUTION} is installed here. Use it, or pass force=True to replace it.")
    return Installation()


def _loaded() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == NAME}
