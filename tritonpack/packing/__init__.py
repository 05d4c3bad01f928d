"""Packing: which documents share a row, and how they become a batch. Needs neither transformers nor Triton."""

from tritonpack.packing.bins import Packing, pack
from tritonpack.packing.collator import PackingCollator
from tritonpack.packing.cost import CostModel
from tritonpack.packing.dataset import BinDataset, PackedDataset, pack_dataset
from tritonpack.packing.distributed import MultipackDistributedBatchSampler
from tritonpack.packing.multipack import MultipackBatchSampler
from tritonpack.packing.stream import PackedStream, pack_stream

__all__ = [
    "BinDataset",
    "CostModel",
    "MultipackBatchSampler",
    "MultipackDistributedBatchSampler",
    "PackedDataset",
    "PackedStream",
    "Packing",
    "PackingCollator",
    "pack",
    "pack_dataset",
    "pack_stream",
]
