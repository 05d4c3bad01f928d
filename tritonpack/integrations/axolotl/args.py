"""The plugin's part of an axolotl config."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tritonpack.backends import Backend


class TritonpackOptions(BaseModel):
    """What `tritonpack.patch` takes; an option that it doesn't know is a mistake.

    Attributes:
        attention: which attention runs: the kernels, or transformers' own attention with a dense mask.
        backend: of the kernels.
    """

    model_config = ConfigDict(extra="forbid")

    attention: Literal["tritonpack", "sdpa", "eager"] = "tritonpack"
    backend: Backend = "auto"


class TritonpackArgs(BaseModel):
    """What the plugin adds to axolotl's own options.

    Attributes:
        tritonpack: None for what `patch` does by default.
    """

    tritonpack: TritonpackOptions | None = None
