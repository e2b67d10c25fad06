"""What all image sets have in common."""

import torch

from hebbian_softmax.lab.images.data import ImageSet


def some(name: str = "some") -> ImageSet:
    images = torch.randint(256, (3, 20, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageSet(name, images, ["a", "b", "c"])


def test_the_first_five_drawings_are_for_testing_and_both_parts_are_views() -> None:
    images = some()
    assert torch.equal(images.test, images.images[:, :5])
    assert torch.equal(torch.cat([images.test, images.train], dim=1), images.images)
    assert images.train.shape == (3, 15, 28, 28)
    assert images.train.untyped_storage().data_ptr() == images.images.untyped_storage().data_ptr()


def test_the_identity_follows_name_class_names_and_pixels() -> None:
    identity = some().identity
    assert identity == some().identity
    assert identity.startswith("some-3x20x28x28-")
    changed = some().images.clone()
    changed[2, 19, 27, 27] ^= 1
    others = [
        some("other"),
        ImageSet("some", changed, ["a", "b", "c"]),
        ImageSet("some", some().images, ["a", "c", "b"]),
    ]
    assert len({identity, *(other.identity for other in others)}) == 4
