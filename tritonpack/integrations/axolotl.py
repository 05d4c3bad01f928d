"""axolotl: `plugins: [tritonpack.integrations.axolotl.TritonpackPlugin]` in a config patches every model it loads.

    plugins:
      - tritonpack.integrations.axolotl.TritonpackPlugin
    sample_packing: true
    tritonpack:  # may be left out
      attention: tritonpack
      backend: auto

This module can be imported without axolotl. The plugin derives from axolotl's base class if that is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal
from weakref import WeakSet

from pydantic import BaseModel, ConfigDict
from torch import nn

from tritonpack.backends import Backend
from tritonpack.patches import patch, unpatch

logger = logging.getLogger(__name__)

# Options of an axolotl config that choose the attention; all but the first are older names.
CHOICES = (
    "attn_implementation", "flash_attention", "sdp_attention", "eager_attention", "flex_attention", "sage_attention",
    "xformers_attention",
)  # fmt: skip

_Base: Any = import_module("axolotl.integrations.base").BasePlugin if find_spec("axolotl") else object


class TritonpackOptions(BaseModel):
    """The arguments `attention` and `backend` of `tritonpack.patch`. Unknown options are refused."""

    model_config = ConfigDict(extra="forbid")

    attention: Literal["tritonpack", "sdpa", "eager"] = "tritonpack"
    backend: Backend = "auto"


class TritonpackArgs(BaseModel):
    """The options that the plugin adds to axolotl's own; None for the defaults of `patch`."""

    tritonpack: TritonpackOptions | None = None


class TritonpackPlugin(_Base):
    """Patches models after axolotl has loaded them, adapters included, and unpatches them at the end of training."""

    def __init__(self) -> None:
        super().__init__()
        self._patched: WeakSet[nn.Module] = WeakSet()

    def get_input_args(self) -> str:
        """The name of the pydantic model of the options that a config may have."""
        return "tritonpack.integrations.axolotl.TritonpackArgs"

    def register(self, cfg: MutableMapping[str, Any]) -> None:
        """Choose the attention to load models with if the config chooses none. Called before axolotl checks the config.

        axolotl refuses names that it does not know. The patch replaces the attention afterwards.
        """
        if cfg.get("attn_implementation") == "tritonpack" or not any(cfg.get(choice) for choice in CHOICES):
            attention = _options(cfg)["attention"]
            cfg["attn_implementation"] = attention if attention in ("sdpa", "eager") else "sdpa"

    def load_datasets(self, cfg: MutableMapping[str, Any], preprocess: bool = False) -> None:
        """Load nothing, but declare that attention keeps packed samples apart, in rows of any length, without a mask.

        axolotl's own table of names does not have tritonpack.
        """
        cfg["attn_supports_packing"] = cfg["attn_decontaminates_packing"] = True

    def pre_model_load(self, cfg: MutableMapping[str, Any]) -> None:
        """Declare it again: axolotl has checked the config, and derived from it again how batches are laid out."""
        self.load_datasets(cfg)

    def post_model_load(self, cfg: MutableMapping[str, Any], model: nn.Module) -> None:
        """Patch the model.

        Raises:
            UnsupportedModelError: (a ValueError) the model can't be packed exactly.
        """
        handle = patch(model, **_options(cfg))
        self._patched.add(model)
        logger.info("patched %s", handle.report)

    def post_train_unload(self, cfg: MutableMapping[str, Any]) -> None:
        """Unpatch the patched models that still exist."""
        for model in list(self._patched):
            unpatch(model)
        self._patched.clear()


def _options(cfg: MutableMapping[str, Any]) -> dict[str, Any]:
    """The arguments of `patch`. axolotl may not have checked the config yet, and reports its mistakes later."""
    given = cfg.get("tritonpack")
    given = given if isinstance(given, Mapping) else {}
    return {"attention": given.get("attention") or "tritonpack", "backend": given.get("backend") or "auto"}
