"""axolotl: `plugins: [tritonpack.integrations.axolotl.TritonpackPlugin]` in a config patches every model it loads.

    plugins:
      - tritonpack.integrations.axolotl.TritonpackPlugin
    sample_packing: true
    tritonpack:  # may be left out
      attention: tritonpack
      backend: auto

Importing this needs no axolotl; its base class is taken where it is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

from torch import nn

from tritonpack.patches import patch, unpatch

logger = logging.getLogger(__name__)

# Options by which a config of axolotl chooses attention; the others are older than `attn_implementation`.
CHOICES = (
    "attn_implementation",
    "flash_attention",
    "sdp_attention",
    "eager_attention",
    "flex_attention",
    "sage_attention",
    "xformers_attention",
)


def _base_plugin() -> Any:
    if find_spec("axolotl") is None:
        return object
    from axolotl.integrations.base import BasePlugin

    return BasePlugin


_BasePlugin: Any = _base_plugin()


class TritonpackPlugin(_BasePlugin):
    """Patches models when axolotl has loaded them, adapters included, and unpatches them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._patched: WeakSet[nn.Module] = WeakSet()

    def get_input_args(self) -> str:
        """The options that a config may have, as a pydantic model."""
        return "tritonpack.integrations.axolotl.args.TritonpackArgs"

    def register(self, cfg: MutableMapping[str, Any]) -> None:
        """Before axolotl checks the config: choose an attention to load models with, if the config doesn't.

        The patch takes its place afterwards. axolotl takes no name that it doesn't know.
        """
        if cfg.get("attn_implementation") == "tritonpack" or not any(cfg.get(choice) for choice in CHOICES):
            attention = _options(cfg)["attention"]
            cfg["attn_implementation"] = attention if attention in ("sdpa", "eager") else "sdpa"

    def load_datasets(self, cfg: MutableMapping[str, Any], preprocess: bool = False) -> None:
        """Nothing is loaded, but from here on axolotl lays its batches out for attention that packs."""
        _declare_packing(cfg)

    def pre_model_load(self, cfg: MutableMapping[str, Any]) -> None:
        """axolotl has checked the config, and derived from it anew how batches are laid out."""
        _declare_packing(cfg)

    def post_model_load(self, cfg: MutableMapping[str, Any], model: nn.Module) -> None:
        """Patch the model.

        Raises:
            UnsupportedModelError: (a ValueError) a family that can't be packed exactly.
        """
        handle = patch(model, **_options(cfg))
        self._patched.add(model)
        logger.info("patched %s", handle.report)

    def post_train_unload(self, cfg: MutableMapping[str, Any]) -> None:
        """Unpatch what is still there of the patched models."""
        for model in list(self._patched):
            unpatch(model)
        self._patched.clear()


def _options(cfg: MutableMapping[str, Any]) -> dict[str, Any]:
    """What patch() takes; before axolotl has checked the config, of which mistakes are its to report."""
    given = cfg.get("tritonpack")
    given = given if isinstance(given, Mapping) else {}
    return {"attention": given.get("attention") or "tritonpack", "backend": given.get("backend") or "auto"}


def _declare_packing(cfg: MutableMapping[str, Any]) -> None:
    """axolotl derives from its table of names whether attention keeps packed samples apart: in rows of any length, and
    without a mask. It knows nothing of ours."""
    cfg["attn_supports_packing"] = cfg["attn_decontaminates_packing"] = True
