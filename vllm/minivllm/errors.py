"""The errors that a person can act on: what is wrong, and what would be right."""


class MinivllmError(ValueError):
    """Input that cannot work. Scripts print it as one line and exit with code 2, without a traceback."""


class UnsupportedModelError(MinivllmError):
    """A model for which an answer would be wrong, so none is given."""
