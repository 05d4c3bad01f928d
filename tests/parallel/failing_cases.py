"""A case that fails on one rank, to see that the runner notices."""

import torch.distributed as dist


def fails():
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("as it should")


CASES = {"passes": lambda: None, "on the last rank alone": fails}
