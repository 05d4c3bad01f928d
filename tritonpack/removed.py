"""Removed names, options and commands, each with its replacement."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

_TO_DISK = "use tritonpack.pack_dataset(dataset, capacity).save_to_disk(folder), or the command tritonpack pack"

_OF_TABLES = (
    "pack_dataset takes a datasets.Dataset and counts its tokens; bins of any other dataset load by "
    "DataLoader(dataset, batch_sampler=[items.tolist() for items in pack(lengths, capacity)], "
    "collate_fn=PackingCollator())"
)
_TREES = "use tritonpack.dataloader(groups, tokens, lengths=Units.of_trees(groups), collate_fn=TreeCollator())"
_IMAGES = "the tokens of a row limit its images, too, because images take tokens in proportion to their patches"

# Names of tritonpack.
NAMES = {
    "RankFailedError": "if a rank fails, the others end with torch.distributed's error, after their group's time limit",
    "pack_to_disk": _TO_DISK,
    "PackedFolder": _TO_DISK,
    "CostModel": 'use objective="quadratic", which loads ranks nearly as evenly',
    "Mixture": "mix datasets by datasets.interleave_datasets(..., probabilities=)",
    "PackedDataset": _OF_TABLES,
    "pack_trees": _TREES,
    "TreePacking": _TREES,
}

# Attributes of classes.
ATTRIBUTES = {
    "BlockDiagonalMask.to_bits": "use to_dense()",
    "BlockDiagonalMask.from_tree_ends": "use from_tree; batch.parents of a TreeBatch has the parents",
    "BlockDiagonalMask.distances": "they are mask.diagonal[:, None] minus the places of keys, 0, 1, 2, ... or "
    "mask.key_places",
    "Layout.imbalance": "the visible pairs of a rank are sums of mask.key_stop - mask.key_start over layout.rows",
    "TrainerSetup.figures": "logs hold all entries, see trainer.state.log_history[-1]",
    "Units.of_documents": "pass the lengths themselves",
    "VisionPackingCollator.measure": "dataloader counts input_ids itself",
}

# Keyword arguments of functions; "name of function()" where the name alone is too general.
OPTIONS = {
    "chunk of make_layout()": "use the layout 'documents', which is even without it",
    "return_lse of attend()": "varlen_attention returns it, for a whole batch on one rank",
    "cost of plan_statistics()": "cost_utilization uses the costs of a Llama of 8 billion parameters",
    "total_tokens of plan_statistics()": "tokens_covered is the share of the given lengths",
    "verify_ranks": "samplers for all processes compare their lengths and settings; compare state_dict() of others",
    "tiled_loss": "use Liger-Kernel's fused linear cross-entropy or torch's, see docs/long-context.md",
    "tiled_mlp": "use gradient checkpointing (docs/long-context.md)",
    "cost_model": 'use objective="quadratic", which loads ranks nearly as evenly',
    "lookahead": "a step is offered 1% more tokens than it holds",
    "steps_together": "the lengths decide it",
    "order": "pass the documents in your order, such as dataset.select(numbers), and shuffle=False",
    "budgets": _IMAGES,
    "resources": _IMAGES,
    "first_fit": "use algorithm='best_fit', which takes documents in input order, too",
    "windowed": "use algorithm='best_fit', which takes documents in input order",
    "length or lengths": _OF_TABLES,
    "length": "documents are rows of tokens, or mappings with input_ids",
    "measure": "dataloader counts input_ids itself; for documents of another form pass lengths=",
    "capacity=": "dataloader(tokens=..., lengths=Units.of_trees(groups)) limits rows of trees",
    "seed of MultipackBatchSampler()": "pass RandomSampler(..., generator=torch.Generator().manual_seed(0))",
    "overlong of MultipackBatchSampler()": "remove longer documents from the dataset (dataset.filter)",
    "per_token=": "it takes the columns of processors alone; remove other columns (dataset.remove_columns)",
    "objective='documents'": "collate labels of whole documents yourself: batch['labels'] = torch.tensor(labels)",
    "carry_threshold": "bins that are filled to less than 95% are packed again with the next window",
    "divide": "divide the documents, as datasets.distributed.split_dataset_by_node does, and pass num_replicas=1",
    "padded": "torch.nn.utils.rnn.pad_sequence(parts, batch_first=True) pads the list that is returned",
    "heads_k_stride": "keys travel in about four steps of heads",
    "backward": "gradients are summed over ranks; where yours are summed too, divide the loss by the number of ranks",
    "grad_reduce": "average gradients over ranks; where yours are summed, divide the loss by the number of ranks",
}

# Commands, and options of commands.
COMMANDS = {
    "bench": "in a clone of the repository run python -m benchmarks.gpu",
    "demo": "in a clone of the repository run make demo",
    "demo-grpo": "in a clone of the repository run make demo-grpo",
    "plan --lookahead": "a step is offered 1% more tokens than it holds",
    "plan --steps-together": "the lengths decide it",
    "plan --objective cost": "use --objective quadratic, which loads ranks nearly as evenly",
    "plan --model": "costs are computed for a Llama of 8 billion parameters",
    "plan --epochs": "run the command with another --seed for each epoch",
    "plan --out": "--json writes the numbers",
    "pack --algorithm first_fit": "use --algorithm best_fit, which takes documents in input order, too",
    "pack --algorithm windowed": "use --algorithm best_fit, which takes documents in input order",
    "pack --max-items": "use tritonpack.pack_dataset(max_items=...)",
    "pack --shard-mib": "save the rows again with save_to_disk(folder, max_shard_size=...)",
}


def names_of(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module: ImportError for a removed name, AttributeError for one that never existed."""

    def refuse(name: str) -> NoReturn:
        if name in NAMES:
            # An AttributeError's message is lost in `from module import name`.
            raise ImportError(f"{module}.{name} was removed: {NAMES[name]}.")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return refuse


def refuse_removed(names: Iterable[str], caller: str) -> None:
    """Refuse keyword arguments that a function doesn't have.

    Raises:
        ValueError: the first one was removed.
        TypeError: the first one never existed.
    """
    for name in names:
        what = f"{name} of {caller}"
        if instead := OPTIONS.get(what) or OPTIONS.get(name):
            raise ValueError(f"{what} was removed: {instead}.")
        raise TypeError(f"{caller} got an unexpected keyword argument {name!r}")


Class = TypeVar("Class", bound=type)


class _Removed:
    """An attribute whose reading raises AttributeError with what to use in its place."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, *_: object) -> NoReturn:
        raise AttributeError(f"{self.name} was removed: {ATTRIBUTES[self.name]}.")


def refuse_attributes(owner: Class) -> Class:
    """Refuse the attributes that a class had."""
    for name in ATTRIBUTES:
        if name.startswith(f"{owner.__name__}."):
            setattr(owner, name.partition(".")[2], _Removed(name))
    return owner
