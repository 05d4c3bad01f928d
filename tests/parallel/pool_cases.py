"""Cases that fail on one rank, for the tests of the pool."""

import os
import time

import torch.distributed as dist


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


def fails():
    if is_last():
        raise ValueError("as it should")


def dies():
    if is_last():
        os._exit(3)


def is_stuck():
    if is_last():
        time.sleep(600)


CASES = {
    "passes": lambda: None,
    "fails on the last rank": fails,
    "the last rank dies": dies,
    "the last rank is stuck": is_stuck,
}
