"""The plugin's part of an axolotl config."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tritonpack.backends import Backend


class TritonpackOptions(BaseModel):
    """The arguments of `tritonpack.patch`. Unknown options are refused.

    Attributes:
        attention: which attention runs: the kernels, or transformers' own attention with a dense mask.
        backend: of the kernels.
    """

    model_config = ConfigDict(extra="forbid")

    attention: Literal["tritonpack", "sdpa", "eager"] = "tritonpack"
    backend: Backend = "auto"


class TritonpackArgs(BaseModel):
    """The options that the plugin adds to axolotl's own.

    Attributes:
        tritonpack: None for the defaults of `patch`.
    """

    tritonpack: TritonpackOptions | None = None
