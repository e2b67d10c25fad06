"""The pool itself: a test that should fail must not pass or hang."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool


def fail() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 had enough")
    dist.barrier()


def hang() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        torch.futures.Future().wait()


def warn() -> None:
    torch.tensor(torch.ones(1))  # torch warns of the copy


@pytest.mark.slow
def test_errors_warnings_and_hanging_ranks_fail_and_the_next_run_works() -> None:
    with Pool() as pool:
        with pytest.raises(AssertionError, match="rank 1 had enough"):
            pool.run(2, fail)
        with pytest.raises(AssertionError, match="UserWarning: To copy construct from a tensor"):
            pool.run(2, warn)
        pool.timeout = 20
        with pytest.raises(AssertionError, match=r"ranks \[0, 1\] did not answer for 20 s"):
            pool.run(2, hang)
        pool.timeout = 60
        assert pool.run(2, dist.get_rank) == [0, 1]
