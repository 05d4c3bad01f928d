"""Packed (padding-free) training of language models: packing, exact varlen attention, patching of models."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tritonpack.removed import NAMES

__version__ = "0.1.0"
_imported_by = os.getpid()  # that imported the package; a fork of it keeps the number

if TYPE_CHECKING:
    from tritonpack import flash_attn as flash_attn
    from tritonpack import packing as packing
    from tritonpack import parallel as parallel
    from tritonpack.attention import varlen_attention as varlen_attention
    from tritonpack.errors import BackendUnavailableError as BackendUnavailableError
    from tritonpack.errors import IsolationError as IsolationError
    from tritonpack.errors import PackingWarning as PackingWarning
    from tritonpack.errors import UnsupportedModelError as UnsupportedModelError
    from tritonpack.integrations.trainer import SavedTokensCallback as SavedTokensCallback
    from tritonpack.integrations.trainer_setup import setup as setup
    from tritonpack.kernels.tile_shapes import load_tiles as load_tiles
    from tritonpack.masks.block_diagonal import BlockDiagonalMask as BlockDiagonalMask
    from tritonpack.packing import BinDataset as BinDataset
    from tritonpack.packing import MultipackBatchSampler as MultipackBatchSampler
    from tritonpack.packing import MultipackDistributedBatchSampler as MultipackDistributedBatchSampler
    from tritonpack.packing import Packing as Packing
    from tritonpack.packing import PackingCollator as PackingCollator
    from tritonpack.packing import TreeBatch as TreeBatch
    from tritonpack.packing import TreeCollator as TreeCollator
    from tritonpack.packing import Units as Units
    from tritonpack.packing import VisionPackingCollator as VisionPackingCollator
    from tritonpack.packing import dataloader as dataloader
    from tritonpack.packing import pack as pack
    from tritonpack.packing import pack_dataset as pack_dataset
    from tritonpack.packing import pack_stream as pack_stream
    from tritonpack.packing import pack_tree as pack_tree
    from tritonpack.parallel import AllGatherWithGrad as AllGatherWithGrad
    from tritonpack.parallel.context import SequenceParallel as SequenceParallel
    from tritonpack.patches import patch as patch
    from tritonpack.patches import register as register
    from tritonpack.patches import unpatch as unpatch

# Public name -> its module below `tritonpack`, imported at the name's first use. So packing needs no transformers, and
# nothing needs Triton before a kernel runs.
_HOMES = {
    "AllGatherWithGrad": "parallel",
    "BackendUnavailableError": "errors",
    "BinDataset": "packing",
    "BlockDiagonalMask": "masks.block_diagonal",
    "IsolationError": "errors",
    "MultipackBatchSampler": "packing",
    "MultipackDistributedBatchSampler": "packing",
    "Packing": "packing",
    "PackingCollator": "packing",
    "PackingWarning": "errors",
    "SavedTokensCallback": "integrations.trainer",
    "SequenceParallel": "parallel.context",
    "TreeBatch": "packing",
    "TreeCollator": "packing",
    "Units": "packing",
    "UnsupportedModelError": "errors",
    "VisionPackingCollator": "packing",
    "dataloader": "packing",
    "flash_attn": "flash_attn",
    "load_tiles": "kernels.tile_shapes",
    "pack": "packing",
    "pack_dataset": "packing",
    "pack_stream": "packing",
    "pack_tree": "packing",
    "patch": "patches",
    "register": "patches",
    "setup": "integrations.trainer_setup",
    "unpatch": "patches",
    "varlen_attention": "attention",
}

# Subpackages with public names of their own, imported at their first use as attributes.
_SUBPACKAGES = ("packing", "parallel", "testing")

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"tritonpack.{name}")
    if name in NAMES:
        # An AttributeError's message is lost in `from tritonpack import name`.
        raise ImportError(f"tritonpack.{name} was removed: {NAMES[name]}.")
    if name not in _HOMES:
        raise AttributeError(f"module 'tritonpack' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        home = import_module(f"tritonpack.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if not error.name or "." in error.name:  # a part of a package that is installed
            raise
        raise ImportError(
            f"tritonpack.{name} needs {error.name}, which isn't installed here; run pip install {error.name}."
        ) from error
    value = home if name == _HOMES[name] else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
