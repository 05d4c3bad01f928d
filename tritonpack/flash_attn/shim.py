"""install() lets `import flash_attn` give tritonpack's functions; uninstall() undoes it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from tritonpack.checks import check_flag
from tritonpack.flash_attn import bert_padding, fa2

NAME = "flash_attn"
DISTRIBUTION = "flash-attn"
VERSION = "2.8.3"  # the release whose functions these are


class Installation(AbstractContextManager["Installation"]):
    """tritonpack's functions under the name `flash_attn`; as a context manager it uninstalls them on leaving."""

    def __init__(self) -> None:
        self._replaced = _loaded()
        self._finder = _Metadata()
        self._active = False

    def _install(self) -> None:
        self._active = True
        try:
            for name in self._replaced:
                del sys.modules[name]
            package = _module(NAME, fa2)
            package.__dict__["__version__"] = VERSION
            for source, name in ((fa2, "flash_attn_interface"), (bert_padding, "bert_padding")):
                setattr(package, name, _module(f"{NAME}.{name}", source))
            sys.meta_path.insert(0, self._finder)
            _clear_caches_of_transformers()
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Restore what `import flash_attn` found before; a second call does nothing."""
        if not self._active:
            return
        self._active = False
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(self._replaced)
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self._finder]
        _clear_caches_of_transformers()

    def __exit__(self, *error: object) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"Installation({NAME} {VERSION}, {'active' if self._active else 'uninstalled'})"


def install(*, force: bool = False) -> Installation:
    """Let `import flash_attn` give tritonpack's functions in this process, until `uninstall()`.

    It provides the public functions of `flash_attn` and `flash_attn.flash_attn_interface`, and
    `flash_attn.bert_padding`. `importlib.util.find_spec("flash_attn")` and `importlib.metadata.version("flash_attn")`,
    by which packages look for it, find it. Packages that look for it at their import must be imported afterwards;
    transformers, which caches the result, looks again. Names that packages import (`from flash_attn import ...`) stay
    there after `uninstall()`.

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
    if any(isinstance(finder, _Metadata) for finder in sys.meta_path):
        raise RuntimeError("tritonpack.flash_attn is installed already; call uninstall() on its handle first.")
    if not force:
        if _loaded():
            raise RuntimeError(
                f"{NAME} has been imported already, and the modules that imported it go on using it. Call install() "
                "before that import, or pass force=True to replace it."
            )
        installed = any(importlib.metadata.distributions(name=DISTRIBUTION))
        if installed or importlib.util.find_spec(NAME) is not None:
            raise RuntimeError(f"the real {DISTRIBUTION} is installed here. Use it, or pass force=True to replace it.")
    installation = Installation()
    installation._install()
    return installation


class _Metadata(importlib.metadata.DistributionFinder):
    """Finds the metadata of the installed functions when packages search all distributions."""

    def find_spec(self, *args: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        given = vars(context) if context is not None else {}
        name = re.sub(r"[-_.]+", "-", given.get("name") or DISTRIBUTION).lower()
        return [_Distribution()] if name == DISTRIBUTION and "path" not in given else []


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        metadata = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\nSummary: by tritonpack\n"
        return {"METADATA": metadata, "top_level.txt": f"{NAME}\n"}.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(__file__).parent / path


def _loaded() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == NAME}


def _module(name: str, source: ModuleType) -> ModuleType:
    """Import a module of this name, with the public names of a module of ours."""
    module = importlib.util.module_from_spec(ModuleSpec(name, None, origin=__file__, is_package="." not in name))
    public = {one: getattr(source, one) for one in source.__all__}
    module.__dict__.update(public, __file__=__file__, __doc__="tritonpack in the place of FlashAttention-2.")
    sys.modules[name] = module
    return module


def _clear_caches_of_transformers() -> None:
    """Clear what transformers has cached about FlashAttention, if it is imported."""
    checks = sys.modules.get("transformers.utils.import_utils")
    for name, check in list(vars(checks).items()) if checks is not None else ():
        if ("flash_attn" in name or name == "_package_distribution_mapping") and hasattr(check, "cache_clear"):
            check.cache_clear()
    functions = sys.modules.get("transformers.modeling_flash_attention_utils")
    if getattr(functions, "_loaded_implementation", None) == "flash_attention_2":
        functions._loaded_implementation = None  # type: ignore[union-attr]
