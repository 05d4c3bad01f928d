"""The exceptions that users meet, and the warning.

Bad values raise ValueError; these are for what has no value to blame.
"""


class UnsupportedModelError(ValueError):
    """The model can't be packed exactly; the message names what stands in the way and what is supported."""


class BackendUnavailableError(ValueError):
    """The attention backend that was asked for can't run here; no other one was tried in its place."""


class IsolationError(AssertionError):
    """A document of a packed batch saw another one; the message names the layer where the leak begins."""


class PackingWarning(UserWarning):
    """Something that packing alone can't tell from a mistake; the message says how to end it, once per process."""
