"""Packing: which documents share a row, and how they become a batch. Needs neither transformers nor Triton."""

from tritonpack.packing.bins import Packing, pack
from tritonpack.packing.collator import PackingCollator

__all__ = ["Packing", "PackingCollator", "pack"]
