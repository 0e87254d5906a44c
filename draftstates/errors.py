"""The one error type that speaks to users."""


class UserError(Exception):
    """Something the user can mend; the message names the file, row or sample, what was expected and what was found."""


CAPTURE_ANEW = "delete the shard and run again to capture it anew"  # what to do about a damaged one
