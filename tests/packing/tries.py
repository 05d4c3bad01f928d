"""The settings of tests that try drawn values: the same in every run."""

from hypothesis import settings

REPEATABLE = settings(deadline=None, derandomize=True, database=None, max_examples=60)
