"""Datasets of bins: items of PackedDataset are bins; BinDataset can be indexed by the documents of a bin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from tritonpack.packing.bins import Algorithm, Packing, pack
from tritonpack.packing.lengths import Overlong, whole_lengths
from tritonpack.packing.reader import (
    Length,
    cut,
    document_length,
    fetch,
    is_table,
    measure_lengths,
    require_callable,
    require_lengths,
    require_map_style,
)


class PackedDataset(Dataset):
    """A map-style dataset whose item i is the list of documents in bin i, or of their pieces.

    `DataLoader(packed, batch_size=1, shuffle=True, collate_fn=PackingCollator())` yields one row per bin. With
    batch_size=k a row holds the documents of k bins, up to k times the capacity.

    >>> packed = PackedDataset([[5, 6, 7], [8, 9], [4]], pack([3, 2, 1], capacity=4))
    >>> len(packed), packed[0]
    (2, [[5, 6, 7], [4]])

    Args:
        dataset: documents, indexed from 0: mappings with a row of tokens as "input_ids", or rows of tokens; with
            `length`, documents of any form.
        packing: which documents each bin holds.
        length: returns the number of tokens of a document.

    Raises:
        ValueError: a packing of more documents than the dataset has; at access, a document with another number of
            tokens than was packed, or a document that must be cut and can't be.
    """

    def __init__(self, dataset: Any, packing: Packing, *, length: Length | None = None) -> None:
        require_map_style(dataset)
        require_callable(length)
        if not isinstance(packing, Packing):
            raise ValueError(f"packing must be a Packing, as pack() returns it; got {type(packing).__name__}.")
        last = int(packing.items.max())
        if last >= len(dataset):
            raise ValueError(
                f"the packing has a document {last}, but the dataset only {len(dataset)} documents. Pack the lengths "
                "of this dataset."
            )
        self.dataset = dataset
        self.packing = packing
        self.length = length

    def __len__(self) -> int:
        return self.packing.num_bins

    def __getitem__(self, bin_index: int) -> list[Any]:
        spans, pieces = self.packing.spans(bin_index), []
        documents = fetch(self.dataset, [number for number, _, _ in spans])
        for document, (number, start, stop) in zip(documents, spans, strict=True):
            tokens = document_length(document, number, self.length)
            # A piece is as long as a bin, or it ends its document.
            if stop > tokens or (stop < tokens and stop - start < self.packing.capacity):
                raise ValueError(
                    f"document {number} has {tokens} tokens, but its tokens {start} to {stop} were packed. The lengths "
                    "belong to another dataset; measure them again."
                )
            pieces.append(document if stop - start == tokens else cut(document, start, stop, tokens, number))
        return pieces


class BinDataset(Dataset):
    """A map-style dataset that also takes lists of indices, for samplers that yield bins (MultipackBatchSampler).

    >>> documents = BinDataset([[5, 6, 7], [8, 9], [4]])
    >>> documents[[2, 0]], documents[1], len(documents)
    ([[4], [5, 6, 7]], [8, 9], 3)

    Args:
        dataset: documents, indexed from 0.

    Raises:
        ValueError: a dataset that has no length or can't be indexed by document.
    """

    def __init__(self, dataset: Any) -> None:
        require_map_style(dataset)
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        return fetch(self.dataset, index) if isinstance(index, (list, tuple, np.ndarray)) else self.dataset[index]


def pack_dataset(
    dataset: Any,
    capacity: int,
    *,
    lengths: Sequence[int] | NDArray[Any] | None = None,
    length: Length | None = None,
    algorithm: Algorithm = "best_fit_decreasing",
    max_items: int | None = None,
    overlong: Overlong = "error",
    columns: Sequence[str] | None = None,
    jobs: int = 1,
) -> Any:
    """Pack the documents of a map-style dataset; item i holds the documents of bin i.

    A `datasets.Dataset` becomes a `datasets.Dataset` of rows, which can be selected, shuffled, mapped and saved. They
    are made by its `map`: they lie in files of its cache, where the next call finds them, or in memory if the given
    dataset does. `info.description` says what was done with documents that are too long. A row has:

    | column | holds |
    |---|---|
    | `input_ids`, `labels`, ... | the tokens of its documents, end to end: int32, masks int8 |
    | `seq_lengths` | the number of tokens of each document, int32 |
    | `position_ids` | the place of each token in its document, uint16, or int32 above a capacity of 65,536 |

    Anything else, and a `datasets.Dataset` with a transform, `lengths` or `length`, becomes a PackedDataset, which
    fetches the documents of a bin when it is asked for them:

    >>> packed = pack_dataset([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}], capacity=4)
    >>> packed[0]
    [{'input_ids': [5, 6, 7]}, {'input_ids': [8]}]

    Args:
        dataset, length: see PackedDataset.
        lengths: (documents,) integers, the tokens of each document. None counts them.
        capacity, algorithm, max_items, overlong: see `pack`.
        columns: the columns with one value per token that rows of a `datasets.Dataset` keep; None keeps all, and other
            columns than PackingCollator's are an error. `attention_mask` must be 1 everywhere, and is left out. If
            there are no labels, they are made from `completion_mask` and `assistant_masks`, which are left out, because
            trainers remove these columns. Given labels are combined with them, as PackingCollator does.
        jobs: processes that make the rows of a `datasets.Dataset`. An interrupted call goes on after what a process
            finished, with the same number of them.

    Raises:
        ValueError: see `pack` and PackedDataset; lengths of another number of documents; a document of a
            `datasets.Dataset` that PackingCollator refuses, with its number; columns or jobs for another dataset.
        ImportError: numba can't be imported.
    """
    if lengths is None and length is None and is_table(dataset):
        from tritonpack.packing.rows import packed_dataset  # imports datasets

        return packed_dataset(
            dataset, capacity, algorithm=algorithm, max_items=max_items, overlong=overlong, columns=columns, jobs=jobs
        )[0]
    if columns is not None or jobs != 1:
        raise ValueError(
            "columns and jobs are for a datasets.Dataset without a transform, lengths and length, whose rows are "
            f"written; got columns={columns!r:.100}, jobs={jobs!r:.100} for {type(dataset).__name__}. Leave them out."
        )
    require_map_style(dataset)
    lengths = measure_lengths(dataset, length) if lengths is None else whole_lengths(lengths)
    require_lengths(lengths, dataset)
    packing = pack(lengths, capacity, algorithm=algorithm, max_items=max_items, overlong=overlong)
    return PackedDataset(dataset, packing, length=length)
