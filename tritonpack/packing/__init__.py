"""Packing: which documents share a row, and how they become a batch. Needs neither transformers nor Triton."""

from tritonpack.packing.bins import Packing, pack
from tritonpack.packing.collator import PackingCollator
from tritonpack.packing.cost import CostModel
from tritonpack.packing.distributed import MultipackDistributedBatchSampler

__all__ = ["CostModel", "MultipackDistributedBatchSampler", "Packing", "PackingCollator", "pack"]
