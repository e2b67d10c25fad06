"""Errors that a user can act on, as opposed to bugs."""

import contextlib
import signal
from collections.abc import Iterator

import torch


class LabError(Exception):
    """An error that the user can act on. Its message is one line: what is wrong and what to do about it.

    The command line prints it without a traceback and exits with 1. A `command` to type next follows on its own line.
    """

    def __init__(self, message: str = "", *, command: str | None = None) -> None:
        super().__init__(message)
        self.command = command


class DivergedError(LabError):
    """A loss, a weight or a perplexity is infinite or nan."""


class OutOfTimeError(Exception):
    """The time budget of a run is used up. Everything that was finished by then is stored."""


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt this is not an error, so `except Exception` lets it pass."""

    signum = signal.SIGTERM


def reason(error: BaseException) -> str:
    """Return the type and the text of an error on one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return text if len(text) <= 300 else text[:299] + "…"


@contextlib.contextmanager
def enough_memory(what: str, advice: str) -> Iterator[None]:
    """Raise a `LabError` with some advice if the device's memory turns out to be too small for `what`."""
    try:
        yield
    except RuntimeError as error:
        if (cause := _out_of_memory(error)) is None:
            raise
        raise LabError(f"the device's memory is too small for {what}: {advice} ({reason(cause)})") from error


def _out_of_memory(error: BaseException) -> BaseException | None:
    """Return the error that reports missing memory: this one, or one that it followed, as after a failed capture."""
    told = ("out of memory", "allocate memory", "not enough memory", "ALLOC_FAILED")
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in told):
        return error
    return None if error.__context__ is None else _out_of_memory(error.__context__)
