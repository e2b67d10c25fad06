"""What can go wrong for a user, as opposed to a bug."""

import contextlib
from collections.abc import Iterator

import torch


class LabError(Exception):
    """Something the user can act on. The message is one line: what is wrong and what to do about it.

    The command line prints it without a traceback and exits with 1.
    """


class DivergedError(LabError):
    """A loss or a weight became infinite or nan during training."""


class OutOfTimeError(Exception):
    """The time budget of a run is used up. Everything that was finished before is stored."""


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it is no error, so that `except Exception` lets it pass."""


def reason(error: BaseException) -> str:
    """The type and the text of an error on one line of bearable length."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return text if len(text) <= 300 else text[:299] + "…"


@contextlib.contextmanager
def enough_memory(what: str, advice: str) -> Iterator[None]:
    """Say in words that the device's memory is too small for `what`, and what to do about it."""
    try:
        yield
    except RuntimeError as error:
        if (cause := _out_of_memory(error)) is None:
            raise
        raise LabError(f"the device's memory is too small for {what}: {advice} ({reason(cause)})") from error


def _out_of_memory(error: BaseException) -> BaseException | None:
    """The error that says so: this one, or one during which it came (a capture that fails raises another)."""
    told = ("out of memory", "allocate memory", "not enough memory", "ALLOC_FAILED")
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in told):
        return error
    return None if error.__context__ is None else _out_of_memory(error.__context__)
