"""The one exception that tells a user's mistake in one sentence."""

__all__ = ["FederatedError"]


class FederatedError(ValueError):
    """A mistake in the configuration, the data or the user's module.

    The message is one sentence: what was expected, what came, and which option to change. The command line prints it
    as the last line on stderr, without a traceback.

    Attributes:
        is_told: Whether another process of the run says it, so that this one need not.
    """

    is_told: bool = False
