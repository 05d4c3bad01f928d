"""What was removed, and what to use in its place."""

from __future__ import annotations

from collections.abc import Iterable

_TO_DISK = "use tritonpack.pack_dataset(dataset, capacity).save_to_disk(folder), or the command tritonpack pack"

# Names of tritonpack.
NAMES = {
    "RankFailedError": "if a rank fails, the others end with torch.distributed's error, after their group's time limit",
    "pack_to_disk": _TO_DISK,
    "PackedFolder": _TO_DISK,
}

# Keyword arguments of functions.
OPTIONS = {
    "tiled_loss": "use Liger-Kernel's fused linear cross-entropy or torch's, see docs/long-context.md",
    "tiled_mlp": "use gradient checkpointing (docs/long-context.md)",
    "carry_threshold": "windows are packed as by pack(algorithm='windowed')",
    "divide": "divide the documents, as datasets.distributed.split_dataset_by_node does, and pass num_replicas=1",
    "padded": "torch.nn.utils.rnn.pad_sequence(parts, batch_first=True) pads the list that is returned",
    "heads_k_stride": "keys travel in about four steps of heads",
    "backward": "gradients are summed over ranks; where yours are summed too, divide the loss by the number of ranks",
}

# Commands, and options of commands.
COMMANDS = {
    "bench": "in a clone of the repository run python -m benchmarks.gpu",
    "demo": "in a clone of the repository run make demo",
    "demo-grpo": "in a clone of the repository run make demo-grpo",
    "plan --lookahead": "use tritonpack.packing.plan_epoch(lookahead=...)",
    "plan --steps-together": "use tritonpack.packing.plan_epoch(steps_together=...)",
    "plan --epochs": "run the command with another --seed for each epoch",
    "plan --out": "the rows are drawn in the terminal, and --json writes the numbers",
    "pack --max-items": "use tritonpack.pack_dataset(max_items=...)",
    "pack --shard-mib": "save the rows again with save_to_disk(folder, max_shard_size=...)",
}


def refuse_removed(names: Iterable[str], caller: str) -> None:
    """Refuse keyword arguments that a function doesn't have.

    Raises:
        ValueError: one that was removed.
        TypeError: another one.
    """
    for name in names:
        if name in OPTIONS:
            raise ValueError(f"{name} of {caller} was removed: {OPTIONS[name]}.")
        raise TypeError(f"{caller} got an unexpected keyword argument {name!r}")
