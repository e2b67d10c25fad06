"""The network of the page: trained once, kept, and trained again if the file is damaged."""

from pathlib import Path

import torch

from hebbian_softmax.lab.images.data import ImageSet
from hebbian_softmax.lab.play.network import FEATURES, KEPT, UNSEEN, divide, prepare
from tests.closeness import assert_as_close
from tests.lab.images.toys import toy_set


def test_the_network_is_trained_once_and_kept(tmp_path: Path) -> None:
    known, told = toy_set(classes=6), []
    first = prepare(known, 3, 0, lambda done, total: told.append((done, total)), cache_dir=tmp_path)
    assert told == [(1, 3), (2, 3), (3, 3)]
    again = prepare(known, 3, 0, lambda done, total: told.append((done, total)), cache_dir=tmp_path)
    assert len(told) == 3
    drawings = known.test[:, 0]
    assert torch.equal(again.embed(drawings), first.embed(drawings))
    assert torch.equal(again.head.weight, first.head.weight)
    assert torch.equal(again.activations, first.activations)
    assert again.activations.shape == (6, KEPT, FEATURES)

    (path,) = tmp_path.glob("*.npz")
    path.write_bytes(path.read_bytes()[:-100])
    prepare(known, 3, 0, lambda done, total: told.append((done, total)), cache_dir=tmp_path)
    assert len(told) == 6


def test_test_drawings_take_no_part_in_training(tmp_path: Path) -> None:
    known = toy_set(classes=6)
    changed = ImageSet(known.name, known.images.clone(), known.class_names)
    changed.images[:, :5] = 0
    networks = [prepare(each, 3, 0, lambda done, total: None, cache_dir=tmp_path) for each in (known, changed)]
    assert torch.equal(networks[0].head.weight, networks[1].head.weight)


def test_activations_have_equal_length(tmp_path: Path) -> None:
    known = toy_set(classes=6)
    h = prepare(known, 3, 0, lambda done, total: None, cache_dir=tmp_path).embed(known.test[:, 0])
    length = h.double().norm(dim=1)
    assert_as_close(h.norm(dim=1), h.norm(dim=1), length, "lengths")
    assert torch.allclose(length, torch.full_like(length, FEATURES**0.5), rtol=1e-5)


def test_some_classes_are_never_seen() -> None:
    images = toy_set(classes=60)
    known, unseen = divide(images)
    assert len(unseen.images) == UNSEEN
    assert sorted(known.class_names + unseen.class_names) == sorted(images.class_names)
    number = int(unseen.class_names[0])
    assert torch.equal(unseen.images[0], images.images[number])
