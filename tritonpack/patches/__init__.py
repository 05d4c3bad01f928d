"""`patch`: keeps the documents of a packed batch apart in a Hugging Face model."""

from tritonpack.patches.by_name import register
from tritonpack.patches.patching import Patch, patch, unpatch
from tritonpack.patches.report import Report

__all__ = ["Patch", "Report", "patch", "register", "unpatch"]
