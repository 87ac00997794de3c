"""The exact class of an error, for tests that name the builtin that it also is."""

from hyper_parallel import InvalidState, InvalidType, InvalidValue

_OURS = {ValueError: InvalidValue, TypeError: InvalidType, RuntimeError: InvalidState}


def ours(builtin: type[BaseException]) -> type[BaseException]:
    """Return the class that the library raises where its callers may catch a builtin; any other class as it is."""
    return _OURS.get(builtin, builtin)
