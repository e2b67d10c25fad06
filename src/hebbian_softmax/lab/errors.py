"""What can go wrong for a user, as opposed to a bug."""


class LabError(Exception):
    """Something the user can act on. The message is one line: what is wrong and what to do about it.

    The command line prints it without a traceback and exits with 1.
    """


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it is no error, so that `except Exception` lets it pass."""


def reason(error: BaseException) -> str:
    """The type and the text of an error on one line of bearable length."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return text if len(text) <= 300 else text[:299] + "…"
