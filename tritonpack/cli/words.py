"""Numbers in sentences."""


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 layer", "2 layers", "1,024 layers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
