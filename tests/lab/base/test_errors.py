"""A device whose memory is too small is reported in words, and no other error is changed."""

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError, enough_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_that_is_too_small(error: RuntimeError) -> None:
    with (
        pytest.raises(LabError, match=r"too small for a step: do less \(\w+: .*(alloc|ALLOC|of memory)"),
        enough_memory("a step", "do less"),
    ):
        raise error


def test_an_error_that_it_led_to() -> None:
    """A capture that runs out of memory ends with the error of the capture."""

    def capture() -> None:
        try:
            raise torch.OutOfMemoryError("Tried to allocate 9 GiB")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(LabError, match="Tried to allocate 9 GiB"), enough_memory("a step", "do less"):
        capture()


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="a bug"), enough_memory("a step", "do less"):
        raise RuntimeError("a bug")
