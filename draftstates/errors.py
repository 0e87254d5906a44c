"""The one error type that speaks to users."""


class UserError(Exception):
    """Something the user can mend; the message names the file, row or sample, what was expected and what was found."""


class ShardRefused(UserError):
    """A shard failed verification.

    Attributes:
        origins: ids of the shards that its samples at fault were copied from.
    """

    def __init__(self, message: str, *, origins: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.origins = origins


CAPTURE_ANEW = "delete the shard and run again to capture it anew"  # what to do about a damaged one
