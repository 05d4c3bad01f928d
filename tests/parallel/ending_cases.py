"""Cases that end the process of the last rank, while the others wait for it."""

import os
from unittest import mock

from tests.parallel.failing_cases import is_last, make_group, quick
from tests.parallel.models import make_model, packed
from tritonpack import SequenceParallel
from tritonpack.parallel import watch


def before_a_batch():
    """No connection closes for a rank that waits at its next batch; it misses a sign of life."""
    model = make_model()
    with quick(), mock.patch.object(watch, "SILENCE", 1), SequenceParallel(model, make_group()):
        model(**packed()).loss.backward()
        if is_last():
            os._exit(3)
        model(**packed())


def in_a_batch():
    """gloo's connection closes for a rank that waits in an exchange."""
    model = make_model()
    if is_last():
        model.model.layers[0].register_forward_hook(lambda *_: os._exit(3))
    with quick(), SequenceParallel(model, make_group()):
        model(**packed()).loss.backward()


CASES = {"before a batch": before_a_batch, "in a batch": in_a_batch}
