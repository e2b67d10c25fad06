"""The write of a trained head: rows of new classes whose logits fit those of familiar classes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax, NewClasses
from tests.heads import assert_same_bits, copied_state, unchanged

FEATURES, FAMILIAR, NEW = 12, 8, 3
LIMIT = 1000


def trained(bias: bool = True, dtype: torch.dtype = torch.float64, **options) -> tuple[HebbianSoftmax, Tensor, Tensor]:
    """Return a head from a layer that knows eight of eleven clusters, and activations and classes of all eleven."""
    torch.manual_seed(0)
    centres = 2 * torch.randn(FAMILIAR + NEW, FEATURES, dtype=torch.float64) + 5
    targets = torch.randint(FAMILIAR + NEW, (300,))
    h = centres[targets] + torch.randn(300, FEATURES, dtype=torch.float64)
    linear = nn.Linear(FEATURES, FAMILIAR, bias=bias, dtype=torch.float64)
    known = targets < FAMILIAR
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=30)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(linear(h[known]), targets[known]) + 1e-3 * linear.weight.pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    head = HebbianSoftmax.from_linear(
        linear.to(dtype).requires_grad_(), gamma=0.1, limit=LIMIT, new_classes=NewClasses(**options)
    )
    return head, h.to(dtype), targets


def slow_rows(
    linear: nn.Linear, seen: Tensor, h: Tensor, targets: Tensor, settings: NewClasses, total: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return row and bias of each new class, by the equations of the module, one class and one activation at a time."""
    d = linear.in_features
    logits = linear(seen).detach()
    log_z = logits.logsumexp(1)
    prob = logits.softmax(1)
    entropy = -(prob * prob.log()).sum(1).mean()
    frequency = prob.mean(0)
    gained = -(frequency * frequency.log()).sum() - entropy
    padded = torch.cat([torch.zeros(1, d, dtype=seen.dtype), seen])  # one zero activation among them
    z = torch.cat([log_z.mean()[None], log_z])
    mean = padded.mean(0)
    covariance = sum(torch.outer(x - mean, x - mean) for x in padded) / len(padded)
    typical = covariance.trace() / d
    ridge = min(1.0, d / (2 * len(padded))) * typical * torch.eye(d, dtype=seen.dtype)
    slope = torch.linalg.solve(
        covariance + ridge, sum((x - mean) * (y - z.mean()) for x, y in zip(padded, z, strict=True)) / len(z)
    )
    b0 = z.mean() - slope @ mean
    one = torch.linalg.solve(sum(torch.outer(x, x) for x in padded) / len(padded) + ridge, mean)
    one = one / (one @ mean)
    k = settings.shrunk_by
    inverse = torch.linalg.inv(covariance + 10 * typical * torch.eye(d, dtype=seen.dtype))
    if not settings.whiten:
        inverse = torch.eye(d, dtype=seen.dtype)
    scale = 2 * gained * (1 + k) / (inverse @ covariance).trace()
    found = {}
    for i in range(FAMILIAR, FAMILIAR + NEW):
        mine = h[targets == i]
        if len(mine) == 0:
            continue
        memory = len(mine) / (len(mine) + k) * (mine.mean(0) - mean)
        u = scale * inverse @ memory
        prior = math.log(len(mine) / total) if settings.prior == "counts" else -math.log(FAMILIAR + NEW)
        b = b0 + prior - u @ mean - memory @ u / 2
        found[i] = (slope + u, b) if linear.bias is not None else (slope + u + b * one, torch.zeros(()))
    return found


def plain(head: HebbianSoftmax) -> nn.Linear:
    return copy.deepcopy(head.to_linear())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("prior", ["counts", "even"])
@pytest.mark.parametrize("number", [60, 4])  # fewer than features: still a line
def test_rows_are_those_of_the_equations(bias: bool, whiten: bool, prior: str, number: int) -> None:
    head, h, targets = trained(bias, whiten=whiten, prior=prior)
    linear = plain(head)
    head.calibrate(h[:number])
    head.add_classes(NEW)
    head.memorize(h[100:160], targets[100:160])
    expected = slow_rows(linear, h[:number], h[100:160], targets[100:160], head.new_classes, max(number, 60))
    assert len(expected) == NEW
    assert number > FEATURES or bool((targets[100:160] < FAMILIAR).any())
    if number <= FEATURES:  # memorize has calibrated, too
        seen = torch.cat([h[:number], h[100:160]])
        expected = slow_rows(linear, seen, h[100:160], targets[100:160], head.new_classes, number + 60)
        if number + 60 > FEATURES and prior == "counts":
            assert head.calibration.seen() == number + 60
    for i, (row, b) in expected.items():
        torch.testing.assert_close(head.weight[i], row, rtol=1e-8, atol=1e-8)
        if bias:
            torch.testing.assert_close(head.bias[i], b, rtol=1e-8, atol=1e-8)
    assert torch.equal(head.weight[:FAMILIAR], linear.weight)  # familiar rows stay
    assert head.counts[FAMILIAR:].tolist() == [int((targets[100:160] == i).sum()) for i in range(FAMILIAR, 11)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("whiten", [True, False])
def test_rows_do_not_depend_on_how_calls_are_divided(bias: bool, whiten: bool) -> None:
    rows = []
    for calls in (
        [("see", slice(0, 200)), ("write", slice(200, 300))],
        [("see", slice(0, 50)), *(("write", slice(i, i + 7)) for i in range(200, 300, 7)), ("see", slice(50, 200))],
        [("see", slice(0, 150)), ("write", slice(260, 300)), ("see", slice(150, 200)), ("write", slice(200, 260))],
    ):
        head, h, targets = trained(bias, whiten=whiten)
        head.add_classes(NEW)
        for what, part in calls:
            if what == "see":
                head.calibrate(h[part])
            else:
                part = slice(part.start, min(part.stop, 300))
                head.memorize(h[part], targets[part])
        rows.append(head(h).detach())
    for other in rows[1:]:
        torch.testing.assert_close(other, rows[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("calibrated", ["before", "by memorize", "never"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_new_classes_are_recognised_and_old_ones_stay(bias: bool, calibrated: str, dtype: torch.dtype) -> None:
    head, h, targets = trained(bias, dtype, prior="even")
    new = targets >= FAMILIAR
    before = (head(h).argmax(1) == targets)[~new].float().mean()
    if calibrated == "before":
        head.calibrate(h[:200][~new[:200]])
    head.add_classes(NEW)
    examples = new if calibrated != "by memorize" else torch.ones_like(new)
    examples = examples & (torch.arange(300) < 100)
    head.memorize(h[examples], targets[examples])
    right = head(h[100:]).argmax(1) == targets[100:]
    assert right[new[100:]].float().mean() > (0.8 if dtype != torch.bfloat16 else 0.6)
    # Three new classes alone do not show well where the mean of all activations is.
    assert right[~new[100:]].float().mean() > before - (0.3 if calibrated == "never" else 0.2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("calibrated", [True, False])
def test_classes_that_were_not_seen_are_unlikely(bias: bool, calibrated: bool) -> None:
    head, h, targets = trained(bias)
    h = h[targets < FAMILIAR]
    before = head(h).softmax(1)
    if calibrated:
        head.calibrate(h)
    head.add_classes(NEW)
    after = head(h).log_softmax(1)[:, FAMILIAR:].mean(0).exp()
    assert after.max() < before.mean(0).min() * (1.1 if calibrated else 1)
    assert after.min() > 0
    assert not torch.equal(head(h)[:, FAMILIAR:], torch.zeros(len(h), NEW, dtype=h.dtype))


def test_a_single_activation_is_enough_to_begin() -> None:
    for bias in (True, False):
        head, h, targets = trained(bias, prior="even")
        head.add_classes(NEW)
        first = (targets == FAMILIAR).nonzero()[0]
        head.memorize(h[first], targets[first])
        assert head.weight.isfinite().all()
        assert head(h[first])[0, FAMILIAR:].argmax() == 0
        head.memorize(h[:0], targets[:0])
        head.memorize(torch.zeros_like(h[:1]), targets[first])
        assert head.weight.isfinite().all()


def test_what_is_imagined_is_forgotten_when_familiar_classes_come() -> None:
    head, h, targets = trained()
    head.add_classes(NEW)
    new = targets >= FAMILIAR
    head.memorize(h[new], targets[new])
    assert bool(head.calibration.imagined)
    head.calibrate(h)
    other, _, _ = trained()
    other.add_classes(NEW)
    other.calibrate(h)
    other.memorize(h[new], targets[new])
    assert not bool(head.calibration.imagined)
    torch.testing.assert_close(head(h), other(h), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("bias", [True, False])
def test_training_steps_write_the_same_rows(bias: bool) -> None:
    """With a learning rate of 0, steps and memorize do the same."""
    head, h, targets = trained(bias)
    head.calibrate(h[:200])
    head.add_classes(NEW)
    other = copy.deepcopy(head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.0)
    head.attach(optimizer)
    for part in (slice(200, 250), slice(250, 300)):
        optimizer.zero_grad()
        head.loss(h[part], targets[part]).backward()
        optimizer.step()
        other.memorize(h[part], targets[part])
    assert_same_bits(head.state_dict(), other.state_dict())


def test_a_step_does_not_calibrate() -> None:
    head, h, targets = trained()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(optimizer)
    head.loss(h, targets.clamp_max(FAMILIAR - 1)).backward()
    optimizer.step()
    assert not head.calibration.ready
    head.calibrate(h)
    moments = head.calibration.moments.clone()
    head.loss(h, targets.clamp_max(FAMILIAR - 1)).backward()
    optimizer.step()
    assert torch.equal(head.calibration.moments, moments)


def waiting(start: int | str, *, fade: bool = False) -> tuple[HebbianSoftmax, Tensor, Tensor]:
    """Return a trained and calibrated head with new classes, whose steps wait for ``start``."""
    head, h, targets = trained()
    linear = head.to_linear()
    head = HebbianSoftmax.from_linear(linear, gamma=0.1, limit=LIMIT, start=start, fade=fade)
    head.calibrate(h)
    head.add_classes(NEW)
    return head, h, targets


def a_step(head: HebbianSoftmax, optimizer: torch.optim.Optimizer, h: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    head.loss(h, targets).backward()
    optimizer.step()


def test_steps_wait_for_the_start_and_memorize_does_not() -> None:
    head, h, targets = waiting(1)
    rows = head.weight.detach().clone()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.0)
    head.attach(optimizer)
    a_step(head, optimizer, h[:50], targets[:50])
    assert torch.equal(head.weight, rows)
    assert torch.equal(head.counts[FAMILIAR:], torch.bincount(targets[:50], minlength=FAMILIAR + NEW)[FAMILIAR:])
    assert not head.since_start.any()
    a_step(head, optimizer, h[50:], targets[50:])
    assert (head.weight[FAMILIAR:] != rows[FAMILIAR:]).any(1).all()

    head, h, targets = waiting(1)
    head.memorize(h[:50], targets[:50])
    assert (head.weight[FAMILIAR:] != rows[FAMILIAR:]).any(1).all()
    assert not head.since_start.any()


def test_writes_of_a_trained_head_fade() -> None:
    """The first write of a class is whole; a later one is as strong as the learning rate beside its highest."""
    written = {}
    for lr in (1.0, 0.5, 0.0):
        head, h, targets = waiting(0, fade=True)
        head.requires_grad_()
        optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
        head.attach(optimizer)
        for part, rate in ((slice(150), 1.0), (slice(150, 300), lr)):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            (0 * head.loss(h[part], targets[part])).backward()
            optimizer.step()
            written.setdefault(part.start, []).append(head.weight.detach()[FAMILIAR:].clone())
    first, later = written[None], written[150]
    assert torch.equal(first[0], first[1])
    torch.testing.assert_close(later[1], (first[0] + later[0]) / 2)
    torch.testing.assert_close(later[2], first[0])


def test_features_of_a_trained_head_have_settled() -> None:
    head, _, _ = waiting("auto")
    assert head.settling is not None
    assert not head.settling.measures()
    scratch = HebbianSoftmax(FEATURES, FAMILIAR, gamma=0.1, limit=LIMIT, start="auto", dtype=torch.float64)
    scratch.counts += 1
    assert scratch.settling is not None
    assert scratch.settling.measures()
    scratch.calibrate(torch.randn(20, FEATURES, dtype=torch.float64))
    assert not scratch.settling.measures()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_gradients_leave_rare_rows_to_the_write(kind: type[torch.optim.Optimizer]) -> None:
    head, h, targets = trained(gradients_from=3)
    head.add_classes(NEW)
    head.calibrate(h)
    often, once = FAMILIAR, FAMILIAR + 1
    which = torch.cat([(targets == often).nonzero()[:3, 0], (targets == once).nonzero()[:1, 0]])
    head.memorize(h[which], targets[which])
    optimizer = kind(head.parameters(), lr=0.1)
    head.attach(optimizer)
    before = {name: value.detach().clone() for name, value in head.named_parameters()}
    head.loss(h, targets.clamp_max(FAMILIAR - 1), remember=False).backward()
    optimizer.step()
    moved = (head.weight != before["weight"]).any(1)
    assert moved.tolist() == [True] * (FAMILIAR + 1) + [False, False]
    assert (head.bias != before["bias"]).tolist() == moved.tolist()


@pytest.mark.parametrize("bias", [True, False])
def test_what_gradients_have_learned_stays(bias: bool) -> None:
    head, h, targets = trained(bias)
    head.add_classes(NEW)
    head.calibrate(h)
    new = (targets == FAMILIAR).nonzero()[:, 0]
    head.memorize(h[new[:5]], targets[new[:5]])
    twin = copy.deepcopy(head)
    learned = torch.randn(FEATURES, dtype=torch.float64)
    with torch.no_grad():
        head.weight[FAMILIAR] += learned
        if bias:
            head.bias[FAMILIAR] += 2
    for each in (head, twin):
        each.memorize(h[new[5:6]], targets[new[5:6]])
    change = (head.weight - twin.weight)[FAMILIAR]
    share = 1 - 1 / (5 + 1 + 2)  # the old memory's share, with k = 2
    if bias:
        torch.testing.assert_close(change, share * learned)
    assert not change.allclose(torch.zeros_like(change))


def states(head: HebbianSoftmax, h: Tensor, targets: Tensor):
    yield "new", copied_state(head)
    head.add_classes(NEW)
    yield "grown", copied_state(head)
    head.calibrate(h[:50])
    yield "calibrated", copied_state(head)
    head.memorize(h[50:100], targets[50:100])
    yield "written", copied_state(head)


@pytest.mark.parametrize("assign", [False, True])
def test_states_resume_bit_for_bit(assign: bool) -> None:
    head, h, targets = trained()
    last = head
    for name, state in states(head, h, targets):
        other = HebbianSoftmax(FEATURES, len(state["weight"]), gamma=0.1, limit=LIMIT, bias=True, dtype=torch.float64)
        other.load_state_dict(state, assign=assign)
        assert_same_bits(other.state_dict(), state)
        last = copy.deepcopy(head)
        for each in (other, last):
            if each.num_classes > FAMILIAR:
                each.memorize(h[100:], targets[100:])
        assert_same_bits(other.state_dict(), last.state_dict())
        assert name == "new" or (last.weight[FAMILIAR:] != 0).all()


def test_a_default_head_that_takes_a_trained_state_writes_as_the_trained_one() -> None:
    """T of a trained head stays, also where the new head's would depend on its classes and on time."""
    torch.manual_seed(0)
    head = HebbianSoftmax.from_linear(nn.Linear(4, 6, bias=False))
    head.add_classes(2)
    head.memorize(torch.randn(20, 4), torch.arange(20) % 2 + 6)
    other = HebbianSoftmax(4, 8)
    other.load_state_dict(head.state_dict())
    assert other.rate == head.rate
    for each in (head, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each.attach(optimizer)
        each.loss(torch.arange(20.0).view(5, 4) - 9, torch.tensor([6, 7, 6, 7, 0])).backward()
        optimizer.step()
    assert_same_bits(other.state_dict(), head.state_dict())


def test_a_state_of_a_head_without_calibration_takes_it_away() -> None:
    scratch = HebbianSoftmax(FEATURES, FAMILIAR, gamma=0.1, limit=LIMIT, bias=True, dtype=torch.float64)
    head, h, _ = trained()
    head.calibrate(h)
    head.load_state_dict(scratch.state_dict())
    assert head.calibration is None
    linear = nn.Linear(FEATURES, FAMILIAR, dtype=torch.float64)
    head.load_state_dict(linear.state_dict())
    assert head.calibration is not None
    assert not head.calibration.ready


def test_a_state_with_moments_of_another_size_is_refused() -> None:
    head, h, _ = trained()
    head.calibrate(h)
    state = copied_state(head)
    state["calibration.moments"] = torch.zeros(3, 3, dtype=torch.float64)
    other, _, _ = trained()
    with unchanged(other), pytest.raises(ValueError, match=r"calibration\.moments.*shape \(3, 3\)"):
        other.load_state_dict(state)


def test_literal_settings_and_heads_from_scratch_have_no_calibration() -> None:
    linear = nn.Linear(FEATURES, FAMILIAR)
    for options in ({"write": "literal", "scale": "match"}, {"scale": 1.0}, {"objective": "svm"}, {"counts": 0}):
        assert HebbianSoftmax.from_linear(linear, gamma=0.1, limit=LIMIT, **options).calibration is None
    head = HebbianSoftmax(FEATURES, FAMILIAR, gamma=0.1, limit=LIMIT)
    assert head.calibration is None
    with pytest.raises(RuntimeError, match="no familiar classes"):
        head.calibrate(torch.randn(3, FEATURES))
    assert head.calibration is None
    head.memorize(torch.randn(FAMILIAR, FEATURES), torch.arange(FAMILIAR))
    head.calibrate(torch.randn(3, FEATURES))
    assert head.calibration.ready
    head.reset_memory()
    assert head.calibration is None


def test_moments_stay_float64() -> None:
    head, h, _ = trained()
    head.calibrate(h)
    moments = head.calibration.moments.clone()
    head.half().float()
    assert torch.equal(head.calibration.moments, moments)


def test_non_finite_activations_are_left_out() -> None:
    head, h, targets = trained()
    head.add_classes(NEW)
    bad = h.clone()
    bad[::7] = math.nan
    bad[3] = math.inf
    head.calibrate(bad)
    head.memorize(bad, targets)
    good = torch.isfinite(bad).all(1)
    other, _, _ = trained()
    other.add_classes(NEW)
    other.calibrate(h[good])
    other.memorize(h[good], targets[good])
    assert torch.equal(head.weight, other.weight)
    with pytest.warns(RuntimeWarning, match="no finite norm"):
        assert head.nonfinite == int((~good).sum())


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_memorizing_false_counts_only(whiten: bool, bias: bool) -> None:
    head, h, targets = trained(bias, whiten=whiten)
    head.add_classes(NEW)
    head.calibrate(h)
    head.memorizing = False
    before = head.weight.detach().clone()
    head.memorize(h, targets)
    assert torch.equal(head.weight, before)
    assert int(head.counts[FAMILIAR:].sum()) == int((targets >= FAMILIAR).sum())


def test_ignored_targets_take_no_part_in_calibration() -> None:
    heads = []
    for pads in (0, 200):
        torch.manual_seed(0)
        head = HebbianSoftmax.from_linear(torch.nn.Linear(4, 6), gamma=0.1, limit=9)
        head.add_classes(1)
        h = torch.cat([torch.randn(5, 4), torch.full((pads, 4), 300.0)])
        head.memorize(h, torch.tensor([6] * 5 + [-100] * pads))
        heads.append(head)
    torch.testing.assert_close(heads[1].weight, heads[0].weight)
    assert int(heads[1].calibration.seen()) == int(heads[0].calibration.seen())  # type: ignore[union-attr]


def test_a_masked_class_leaves_the_calibration_finite() -> None:
    linear = torch.nn.Linear(4, 6)
    with torch.no_grad():
        linear.bias[2] = -torch.inf
    head = HebbianSoftmax.from_linear(linear, gamma=0.1, limit=9)
    head.calibrate(torch.randn(50, 4))
    head.add_classes(1)
    before = head.weight[6].detach().clone()
    head.memorize(torch.randn(3, 4), torch.tensor([6, 6, 6]))
    assert head.calibration is not None
    assert head.calibration.moments.isfinite().all()
    assert not torch.equal(head.weight[6], before)
