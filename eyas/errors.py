"""The one way eyas says no: a single line that tells what is wrong, where, and what to do."""


class EyasError(Exception):
    """A fault the user can mend. The command line prints its message as one line and exits with code 2.

    Everything else that escapes is a bug in eyas and shows its traceback.
    """
