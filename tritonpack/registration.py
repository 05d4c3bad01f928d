"""Our attention's names, known to transformers from the moment that there is a transformers.

`import tritonpack` imports neither torch nor transformers. Where transformers' models are loaded already, the names are
registered at once; otherwise when they are, by whoever imports them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# What registration stands on. Models import both, and either may come first.
NEEDED = ("transformers.modeling_utils", "transformers.masking_utils")


def register_with_transformers() -> None:
    """Register now if transformers' models are loaded, else when they are; a second call changes nothing."""
    if _ready():
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """A finder that finds nothing itself: it sees to it that we hear when a needed module has been executed."""

    asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in NEEDED or self.asking:
            return None
        self.asking = True  # another such finder may ask us in turn
        try:
            finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        finally:
            self.asking = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._listen(spec.loader)
        return spec

    def _listen(self, loader: object) -> None:
        """The loader stays the object that it is, for those who read sources through it."""
        execute = loader.exec_module  # type: ignore[attr-defined]

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            if module.__name__ in NEEDED:  # a loader may serve several modules
                loader.__dict__.pop("exec_module", None)
                self._tell(module.__name__)

        try:
            loader.exec_module = execute_and_tell  # type: ignore[attr-defined]
        except AttributeError:  # a loader of fixed attributes: tritonpack.patch() registers, too
            return

    def _tell(self, executed: str) -> None:
        if self in sys.meta_path and _ready(executed):
            sys.meta_path.remove(self)
            _register()


def _ready(executed: str = "") -> bool:
    """Whether models can be built and nothing that registration imports is half-way through its own import."""
    modules = {name: sys.modules.get(name) for name in NEEDED}
    if modules[NEEDED[0]] is None:
        return False
    return not any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in modules.items()
        if name != executed
    )


def _register() -> None:
    try:
        from tritonpack.hub import loading
        from tritonpack.patches import interface
        from tritonpack.patches.by_name import patch_named_models

        interface.register()
        patch_named_models()
        loading.answer_for_alias()
    except ImportError as error:
        if (error.name or "").split(".")[0] != "transformers":
            raise
        # An older one has no such interface, and must stay importable.
        warnings.warn(
            f"tritonpack's attention isn't known to this version of transformers: {error}. tritonpack.patch() needs "
            "transformers 5.6 or later.",
            stacklevel=2,
        )
