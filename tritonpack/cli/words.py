"""Numbers in sentences."""

from tritonpack.packing.lengths import count as count


def percent(share: float) -> str:
    """A share in percent; 100% means all: "99.99%" for 0.99999."""
    return "100%" if share == 1 else f"{min(100 * share, 99.99):.2f}%"
