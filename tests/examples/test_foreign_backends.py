"""The adapters of other implementations compute attention over documents."""

import pytest

from examples import foreign_backends
from tritonpack.testing import conformance

FORWARD = ("forward/causal", "forward/cross-window", "forward/group-of-three", "forward/scale")
BACKWARD = ("empty/documents", "isolation/cross", "repeat/causal")


@pytest.mark.parametrize("name", ["sdpa", "flex_attention"])
def test_adapter(name: str) -> None:
    report = conformance.run(getattr(foreign_backends, name), only=[*FORWARD, *BACKWARD])
    backward = "pass" if name == "sdpa" else "not offered"  # FlexAttention has no backward on a CPU
    expected = dict.fromkeys(FORWARD, "pass") | dict.fromkeys(BACKWARD, backward)
    assert len(report.results) == 2 * len(expected)
    for result in report.results:
        assert result.outcome == expected[result.check], result
