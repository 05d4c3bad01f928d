"""The exceptions of tritonpack, and its warning. Wrong arguments raise a plain ValueError."""


class UnsupportedModelError(ValueError):
    """The model can't be packed exactly; the message says why, and what is supported."""


class BackendUnavailableError(ValueError):
    """The requested attention backend can't run here; no other backend is tried."""


class OutputError(OSError):
    """A file of results can't be written; the message names it."""


class IsolationError(AssertionError):
    """Another document of a packed batch changed a document; the message names the first layer that mixes them."""


class PackingWarning(UserWarning):
    """A likely mistake, reported once per process; the message says how to correct or silence it."""
