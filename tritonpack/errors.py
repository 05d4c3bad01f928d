"""The exceptions of tritonpack, and its warning. Arguments that don't fit raise a plain ValueError."""


class UnsupportedModelError(ValueError):
    """The model can't be packed exactly; the message says why, and what is supported."""


class BackendUnavailableError(ValueError):
    """The attention backend that was named can't run here; no other backend was tried."""


class OutputError(OSError):
    """A file of results can't be written; the message names it."""


class IsolationError(AssertionError):
    """A document of a packed batch saw another document; the message names the first layer that leaks."""


class PackingWarning(UserWarning):
    """A likely mistake, reported once per process; the message says how to correct or silence it."""
