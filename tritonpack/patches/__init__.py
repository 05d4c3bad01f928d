"""patch(model): a Hugging Face model whose attention knows where each document of a packed batch ends."""

from tritonpack.patches.patching import Patch, Report, patch, unpatch

__all__ = ["Patch", "Report", "patch", "unpatch"]
