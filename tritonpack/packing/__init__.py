"""Packing: which documents share a row, and how they become a batch. Needs neither transformers nor Triton."""

from tritonpack.packing.bins import Packing, pack
from tritonpack.packing.collator import PackingCollator
from tritonpack.packing.dataset import BinDataset, pack_dataset
from tritonpack.packing.lengths import fit_lengths
from tritonpack.packing.loader import PackedDataLoader, dataloader
from tritonpack.packing.planning.plan import Plan, plan_epoch
from tritonpack.packing.planning.statistics import PlanStatistics, plan_statistics
from tritonpack.packing.samplers.distributed import MultipackDistributedBatchSampler
from tritonpack.packing.samplers.multipack import MultipackBatchSampler
from tritonpack.packing.stream import PackedStream, pack_stream
from tritonpack.packing.trees.tree_batch import TreeBatch, TreeCollator, pack_tree
from tritonpack.packing.units import Units
from tritonpack.packing.vision.collator import VisionPackingCollator
from tritonpack.removed import names_of

__getattr__ = names_of(__name__)
__all__ = [
    "BinDataset",
    "MultipackBatchSampler",
    "MultipackDistributedBatchSampler",
    "PackedDataLoader",
    "PackedStream",
    "Packing",
    "PackingCollator",
    "Plan",
    "PlanStatistics",
    "TreeBatch",
    "TreeCollator",
    "Units",
    "VisionPackingCollator",
    "dataloader",
    "fit_lengths",
    "pack",
    "pack_dataset",
    "pack_stream",
    "pack_tree",
    "plan_epoch",
    "plan_statistics",
]
