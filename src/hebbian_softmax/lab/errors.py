"""What can go wrong for a user, as opposed to a bug."""


class LabError(Exception):
    """Something the user can act on. The message is one line: what is wrong and what to do about it.

    The command line prints it without a traceback and exits with 1.
    """
