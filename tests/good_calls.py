"""A good call of every public function with arguments, for tests that spoil one argument at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hebbian_softmax as hs
from hebbian_softmax import memory, objectives, rule

H, W, Y = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 5, 2])
KEYS, LABELS = torch.randn(1, 3, 4), torch.tensor([[0, 5, 2]])
LOG_PROB = torch.tensor([-1.0, -2.0])


def a_head(**options: Any) -> hs.HebbianSoftmax:
    return hs.HebbianSoftmax(**({"in_features": 4, "num_classes": 6, "gamma": 0.1, "limit": 5} | options))


def a_trained_head() -> hs.HebbianSoftmax:
    return hs.HebbianSoftmax.from_linear(nn.Linear(4, 6), gamma=0.1, limit=5)


def sgd(head: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(head.parameters(), lr=0.1)


def attached_twice(**options: Any) -> None:
    head = a_head()
    first = sgd(head)
    head.attach(first)
    head.attach(**({"optimizer": sgd(head), "replace": True} | options))


def memory_with(kind: type[Any], *settings: Any) -> Any:
    made = kind(*settings)
    made.observe(KEYS, LABELS)
    return made


def a_cache() -> hs.NeuralCache:
    return memory_with(hs.NeuralCache, 3, 0.3)


def an_mbpa() -> hs.MbPA:
    return memory_with(hs.MbPA, 3, 2)


def optimizer_of(kind: type[Any]) -> Any:
    return kind([nn.Parameter(torch.zeros(2))])


def with_defaults(function: Callable[..., Any], **defaults: Any) -> Callable[..., Any]:
    return lambda **changes: function(**(defaults | changes))


BATCH = {"h": H, "targets": Y}
STREAM = {"h": KEYS, "targets": LABELS}
LOSS = {"input": H, "linear_weight": W, "target": Y}
LAYER = STREAM | {"weight": W}

CALLS: dict[str, Callable[..., Any]] = {
    "HebbianSoftmax": a_head,
    "HebbianSoftmax.from_linear": with_defaults(
        hs.HebbianSoftmax.from_linear, linear=nn.Linear(4, 6), gamma=0.1, limit=5
    ),
    "HebbianSoftmax.suggest": with_defaults(hs.HebbianSoftmax.suggest, counts=[3, 5], epochs=2),
    "HebbianSoftmax.loss": lambda **changes: a_head().loss(**(BATCH | {"remember": False} | changes)),
    "HebbianSoftmax.seen_prior": lambda **changes: a_head().seen_prior(**({"targets": Y} | changes)),
    "HebbianSoftmax.remember": lambda **changes: a_head().eval().remember(**(BATCH | changes)),
    "HebbianSoftmax.memorize": lambda **changes: a_head().memorize(**(BATCH | changes)),
    "HebbianSoftmax.calibrate": lambda **changes: a_trained_head().calibrate(**({"h": H} | changes)),
    "HebbianSoftmax.targets": lambda **changes: a_head().targets(**({"targets": Y} | changes)),
    "HebbianSoftmax.attach": attached_twice,
    "HebbianSoftmax.add_classes": lambda **changes: a_head().add_classes(**({"n": 2} | changes)),
    "HebbianSoftmax.reset_memory": lambda **changes: a_head().reset_memory(**changes),
    "prepare_fsdp": with_defaults(hs.prepare_fsdp, head=None),
    "linear_cross_entropy": with_defaults(hs.linear_cross_entropy, **LOSS),
    "linear_log_prob": with_defaults(hs.linear_log_prob, **LOSS),
    "linear_topk": with_defaults(hs.linear_topk, input=H, linear_weight=W, k=2),
    "NeuralCache": with_defaults(hs.NeuralCache, size=3, theta=0.3),
    "NeuralCache.observe": lambda **changes: a_cache().observe(**(STREAM | changes)),
    "NeuralCache.log_prob": lambda **changes: a_cache().log_prob(**(STREAM | changes)),
    "NeuralCache.probabilities": lambda **changes: a_cache().probabilities(**({"h": KEYS, "num_classes": 6} | changes)),
    "NeuralCache.sequence_log_prob": lambda **changes: a_cache().sequence_log_prob(**(STREAM | changes)),
    "NeuralCache.load_state_dict": lambda **changes: a_cache().load_state_dict(
        **({"state": a_cache().state_dict()} | changes)
    ),
    "MbPA": with_defaults(hs.MbPA, memory_size=3, neighbours=2),
    "MbPA.observe": lambda **changes: an_mbpa().observe(**(STREAM | changes)),
    "MbPA.log_prob": lambda **changes: an_mbpa().log_prob(**(LAYER | changes)),
    "MbPA.probabilities": lambda **changes: an_mbpa().probabilities(**({"h": KEYS, "weight": W} | changes)),
    "MbPA.sequence_log_prob": lambda **changes: an_mbpa().sequence_log_prob(**(LAYER | changes)),
    "MbPA.load_state_dict": lambda **changes: an_mbpa().load_state_dict(
        **({"state": an_mbpa().state_dict()} | changes)
    ),
    "mix": with_defaults(memory.mix, model=LOG_PROB, cache=LOG_PROB, cache_weight=0.1, mbpa=LOG_PROB, mbpa_weight=0.1),
    "mix_memories": with_defaults(memory.mix_memories, model=LOG_PROB, memories={"cache": (LOG_PROB, 0.1)}),
    "NewClasses": hs.NewClasses,
    "Euclidean": hs.Euclidean,
    "InnerProduct": hs.InnerProduct,
    "SVM": hs.SVM,
    "SparseSoftmax": hs.SparseSoftmax,
    "resolve_objective": with_defaults(objectives.resolve_objective, objective="l2"),
    "PaperRate": with_defaults(hs.PaperRate, gamma=0.1, limit=5),
    "RecentRate": with_defaults(hs.RecentRate, gamma=0.1, limit=5),
    "InclusiveRate": with_defaults(hs.InclusiveRate, gamma=0.1, limit=5),
    "ConstantRate": with_defaults(hs.ConstantRate, value=0.1),
    "InverseCountRate": hs.InverseCountRate,
    "suggest_settings": with_defaults(rule.suggest_settings, counts=[3, 5], epochs=2),
}
for _kind in (hs.OnePassAdam, hs.OnePassRMSprop):
    _name = _kind.__name__
    CALLS[_name] = with_defaults(_kind, params=[nn.Parameter(torch.zeros(2))])
    CALLS[f"{_name}.add_param_group"] = lambda kind=_kind, **changes: optimizer_of(kind).add_param_group(
        **({"param_group": {"params": [nn.Parameter(torch.zeros(2))]}} | changes)
    )
    CALLS[f"{_name}.load_state_dict"] = lambda kind=_kind, **changes: optimizer_of(kind).load_state_dict(
        **({"state_dict": optimizer_of(kind).state_dict()} | changes)
    )
    CALLS[f"{_name}.step"] = lambda kind=_kind, **changes: optimizer_of(kind).step(**changes)
