"""pack_dataset: a datasets.Dataset of packed rows. BinDataset: a dataset that is indexed by the documents of a bin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from tritonpack.packing.bins import Algorithm
from tritonpack.packing.lengths import Overlong, is_table
from tritonpack.packing.loader import fetch, require_map_style
from tritonpack.removed import refuse_removed


class BinDataset(Dataset):
    """A map-style dataset that also takes lists of indices, for samplers that yield bins (MultipackBatchSampler).

    >>> documents = BinDataset([[5, 6, 7], [8, 9], [4]])
    >>> documents[[2, 0]], documents[1], len(documents)
    ([[4], [5, 6, 7]], [8, 9], 3)

    ValueError for a dataset that has no length or can't be indexed by document, from 0.
    """

    def __init__(self, dataset: Any) -> None:
        require_map_style(dataset)
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        return fetch(self.dataset, index) if isinstance(index, (list, tuple, np.ndarray)) else self.dataset[index]


def pack_dataset(
    dataset: Any, capacity: int, *, algorithm: Algorithm = "best_fit_decreasing", max_items: int | None = None,
    overlong: Overlong = "error", columns: Sequence[str] | None = None, jobs: int = 1, **removed: Any,
) -> Any:  # fmt: skip
    """Pack the documents of a `datasets.Dataset` into a `datasets.Dataset` of rows; row i holds the documents of bin i.

    They are made by `map` of the dataset: they lie in files of its cache, where the next call finds them, or in memory
    if the given dataset does. `info.description` says what was done with documents that are too long. A row has:

    | column | holds |
    |---|---|
    | `input_ids`, `labels`, ... | the tokens of its documents, end to end: int32, masks int8 |
    | `seq_lengths` | the number of tokens of each document, int32 |
    | `position_ids` | the place of each token in its document, uint16, or int32 above a capacity of 65,536 |

    Args:
        dataset: tokenized documents, a `datasets.Dataset` without a transform.
        capacity, algorithm, max_items, overlong: see `pack`.
        columns: the columns with one value per token that rows keep; None keeps all, and other columns than
            PackingCollator's are an error. `attention_mask` must be 1 everywhere, and is left out. If there are no
            labels, they are made from `completion_mask` and `assistant_masks`, which are left out, because trainers
            remove these columns. Given labels are combined with them, as PackingCollator does.
        jobs: processes that make the rows. An interrupted call goes on after what a process finished, with the same
            number of them.

    Raises:
        ValueError: see `pack`; another dataset; a document that PackingCollator refuses, with its number.
        ImportError: numba or datasets can't be imported.
    """
    refuse_removed(("length or lengths" if "length" in name else name for name in removed), "pack_dataset")
    if not is_table(dataset):
        raise ValueError(
            f"pack_dataset takes a datasets.Dataset without a transform; got {type(dataset).__name__}. Make one by "
            "datasets.Dataset.from_list(documents), from_generator(function), or dataset.map(function). Rows of other "
            "datasets load by dataloader, and rows of a stream by pack_stream."
        )
    from tritonpack.packing.rows import packed_dataset  # imports datasets

    rows, _ = packed_dataset(
        dataset, capacity, algorithm=algorithm, max_items=max_items, overlong=overlong, columns=columns, jobs=jobs
    )
    return rows
