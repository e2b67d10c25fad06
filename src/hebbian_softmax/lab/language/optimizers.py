"""The optimizers by name, with the fastest implementation that torch has for the device."""

import torch

from hebbian_softmax import OnePassAdam, OnePassRMSprop
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.model.lstm import WordLSTM

OPTIMIZERS = ("one-pass-adam", "one-pass-rmsprop", "adam", "rmsprop", "sgd")
SECOND_MOMENT = 0.999  # β₂ of Adam; RMSprop's is torch's own 0.99


def make_optimizer(
    name: str, model: WordLSTM, *, learning_rate: float, momentum: float, weight_decay: float, alone: bool
) -> torch.optim.Optimizer:
    """The optimizer of all parameters, with the head attached if the model memorizes.

    A one-pass optimizer keeps the weight in bfloat16 beside the float32 one, for a plain head, too. Among several
    ranks (not `alone`) an attached head exchanges class counts at every step, so there a plain head stays apart.
    """
    if momentum and name == "one-pass-rmsprop":
        raise LabError("one-pass-rmsprop has no momentum: leave --momentum away, or use --optimizer rmsprop")
    parameters, betas = list(model.parameters()), (momentum, SECOND_MOMENT)
    head = model.head if model.memorizes or alone else None
    fused = model.head.weight.is_cuda
    optimizer: torch.optim.Optimizer
    match name:
        case "one-pass-adam":
            optimizer = OnePassAdam(parameters, learning_rate, betas, weight_decay=weight_decay, head=head)
        case "one-pass-rmsprop":
            optimizer = OnePassRMSprop(parameters, learning_rate, weight_decay=weight_decay, head=head)
        case "adam":
            optimizer = torch.optim.Adam(parameters, learning_rate, betas, weight_decay=weight_decay, fused=fused)
        case "rmsprop":
            optimizer = torch.optim.RMSprop(parameters, learning_rate, momentum=momentum, weight_decay=weight_decay)
        case _:
            optimizer = torch.optim.SGD(
                parameters, learning_rate, momentum=momentum, weight_decay=weight_decay, fused=fused
            )
    if model.memorizes:
        model.head.attach(optimizer)
    return optimizer
