"""The sort of a batch's classes by kernels, against torch's."""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import interpreted

sort = pytest.importorskip("hebbian_softmax.write.gpu.sort")


@pytest.fixture(params=[pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("classes", [1, 7, 2**15, 2**25 - 2, 2**25 - 1, 2**31 - 2])
@pytest.mark.parametrize("n", [1, 17, 150])
def test_it_is_the_stable_sort(n: int, classes: int, device: str) -> None:
    dtype = torch.int16 if classes <= 2**15 else torch.int32
    keys = torch.randint(-1, min(classes, 300), (n,))
    keys = torch.where(keys < 3, keys, classes - 1 - torch.randint(0, min(classes, 50), (n,)))  # both ends
    keys = keys.to(device, dtype)
    for found, expected in zip(sort.sort_in_chunks(keys, classes, longest=64), keys.sort(stable=True), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("key", [-1, 0, 299])
def test_equal_keys_keep_their_order(key: int, device: str) -> None:
    keys = torch.full((150,), key, dtype=torch.int16, device=device)
    ordered, order = sort.sort_in_chunks(keys, 300, longest=64)
    assert torch.equal(ordered, keys)
    assert torch.equal(order, torch.arange(150, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [512, 8191, sort.MOST, sort.MOST + 1])
def test_many(n: int) -> None:
    keys = torch.randint(-1, 267_735, (n,), dtype=torch.int32, device="cuda")
    for found, expected in zip(sort.stable_sort(keys, 267_735), keys.sort(stable=True), strict=True):
        assert torch.equal(found, expected)
