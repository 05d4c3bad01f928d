"""The plugin's part of an axolotl config."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tritonpack.backends import Backend


class TritonpackOptions(BaseModel):
    """The arguments `attention` and `backend` of `tritonpack.patch`. Unknown options are refused."""

    model_config = ConfigDict(extra="forbid")

    attention: Literal["tritonpack", "sdpa", "eager"] = "tritonpack"
    backend: Backend = "auto"


class TritonpackArgs(BaseModel):
    """The options that the plugin adds to axolotl's own; None for the defaults of `patch`."""

    tritonpack: TritonpackOptions | None = None
