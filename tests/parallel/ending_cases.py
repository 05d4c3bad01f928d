"""A case that ends the process of the last rank, while the others wait for it."""

import os

from tests.parallel.models import is_last, make_model, packed
from tritonpack import SequenceParallel


def in_a_batch():
    """gloo's connection closes for a rank that waits in an exchange."""
    model = make_model()
    if is_last():
        model.model.layers[0].register_forward_hook(lambda *_: os._exit(3))
    with SequenceParallel(model):
        model(**packed()).loss.backward()


CASES = {"in a batch": in_a_batch}
