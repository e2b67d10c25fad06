"""Softmax layers that memorise: fast learning of rare and new classes."""

from hebbian_softmax.attach.attachment import Attachment
from hebbian_softmax.calibration import NewClasses
from hebbian_softmax.distributed import prepare_fsdp
from hebbian_softmax.layer import HebbianSoftmax
from hebbian_softmax.loss import linear_cross_entropy, linear_log_prob, linear_topk
from hebbian_softmax.memory import MbPA, NeuralCache
from hebbian_softmax.objectives import SVM, Euclidean, InnerProduct, SparseSoftmax
from hebbian_softmax.optim import OnePassAdam, OnePassRMSprop
from hebbian_softmax.rows import RowPart
from hebbian_softmax.rule import ConstantRate, InclusiveRate, InverseCountRate, PaperRate, RecentRate
from hebbian_softmax.shared_rows import shard_rows

__version__ = "0.2.0.dev0"

__all__ = [
    "SVM",
    "Attachment",
    "ConstantRate",
    "Euclidean",
    "HebbianSoftmax",
    "InclusiveRate",
    "InnerProduct",
    "InverseCountRate",
    "MbPA",
    "NeuralCache",
    "NewClasses",
    "OnePassAdam",
    "OnePassRMSprop",
    "PaperRate",
    "RecentRate",
    "RowPart",
    "SparseSoftmax",
    "linear_cross_entropy",
    "linear_log_prob",
    "linear_topk",
    "prepare_fsdp",
    "shard_rows",
]
