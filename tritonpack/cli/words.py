"""Numbers in sentences."""


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 layer", "2 layers", "1,024 layers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """A share in percent; 100% means all: "99.99%" for 0.99999."""
    return "100%" if share == 1 else f"{min(100 * share, 99.99):.2f}%"
