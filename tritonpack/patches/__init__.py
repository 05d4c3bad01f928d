"""patch(model): a Hugging Face model whose attention knows where each document of a packed batch ends."""

from tritonpack.patches.by_name import register
from tritonpack.patches.patching import Patch, patch, unpatch
from tritonpack.patches.report import Report

__all__ = ["Patch", "Report", "patch", "register", "unpatch"]
