"""Bad inputs of every public function, as one table: each is refused by an error of the right type, and in words.

A row is an argument, a bad value for it, the type of the error, and a word that its message must have. A test fails
while a public function, or one of its arguments, has no row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from tests.good_calls import CALLS, KEYS, LABELS, LOG_PROB, H, W, Y, a_head, sgd

MODULES = ["", ".optim", ".memory", ".distributed", ".rule", ".objectives"]
NAN, INF = math.nan, math.inf
META = torch.randn(3, 4, device="meta")
COMPLEX = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

Row = tuple[str, Any, type[Exception], str]


def an_integer(name: str, low: int) -> list[Row]:
    return [
        (name, low - 1, ValueError, name),
        (name, 2.5, TypeError, "integer"),
        (name, "3", TypeError, "integer"),
        (name, True, TypeError, "integer"),
        (name, NAN, TypeError, "integer"),
    ]


def a_number(name: str, *bad: float) -> list[Row]:
    return [
        (name, "0.1", TypeError, name),
        (name, True, TypeError, name),
        (name, torch.ones(2), TypeError, name),
        *((name, value, ValueError, name) for value in (NAN, *bad)),
    ]


def a_flag(name: str) -> list[Row]:
    return [(name, "no", TypeError, name), (name, 1, TypeError, name)]


def a_constant(name: str, size: int, instead: str) -> list[Row]:
    """Return what is refused as ``size`` numbers without a gradient; the error says what to do ``instead``."""
    return [
        (name, [1.0] * size, TypeError, f"{name} must be a tensor"),
        (name, torch.ones(size - 1), ValueError, "shape"),
        (name, torch.ones(size, dtype=torch.int64), TypeError, "floating point"),
        (name, torch.ones(size, requires_grad=True), ValueError, instead),
        (name, torch.ones(size, device="meta"), ValueError, "device"),
    ]


def a_workspace() -> list[Row]:
    return an_integer("workspace", 1)


BATCH_ROWS: list[Row] = [
    ("h", [1.0], TypeError, "h must be a tensor"),
    ("h", H.long(), TypeError, "floating point"),
    ("h", torch.randn(3, 5), ValueError, "shape"),
    ("h", torch.tensor(1.0), ValueError, "shape"),
    ("targets", [0, 5, 2], TypeError, "targets must be a tensor"),
    ("targets", Y.float(), TypeError, "class indices"),
    ("targets", Y.bool(), TypeError, "class indices"),
    ("targets", torch.tensor([0, 5]), ValueError, "shape"),
    ("targets", torch.tensor([0, 6, 2]), ValueError, "got 6"),
    ("targets", torch.tensor([0, -1, 2]), ValueError, "got -1"),
    ("targets", Y.to("meta"), ValueError, "device"),
]
LOSS_ROWS: list[Row] = [
    ("input", [1.0], TypeError, "input must be a tensor"),
    ("input", H.long(), TypeError, "floating point"),
    ("input", H.double(), TypeError, "dtype"),
    ("input", torch.randn(3, 5), ValueError, "shape"),
    ("input", META, ValueError, "device"),
    ("linear_weight", None, TypeError, "linear_weight must be a tensor"),
    ("linear_weight", torch.randn(6), ValueError, "shape"),
    ("linear_weight", W.to(torch.complex64), TypeError, "floating point"),
    ("linear_bias", 0.0, TypeError, "linear_bias must be a tensor"),
    ("linear_bias", torch.randn(5), ValueError, "shape"),
    *a_workspace(),
]
TARGET_ROWS: list[Row] = [
    ("target", 3, TypeError, "target must be a tensor"),
    ("target", Y.float(), TypeError, "class indices"),
    ("target", torch.tensor([0]), ValueError, "shape"),
    ("target", torch.tensor([0, 6, 2]), IndexError, "6"),
    ("target", torch.tensor([0, -1, 2]), IndexError, "-1"),
    ("ignore_index", 0.5, TypeError, "integer"),
    ("ignore_index", 2**63, ValueError, "ignore_index"),
    ("impl", "fast", ValueError, "impl"),
    ("impl", None, ValueError, "impl"),
]
PART_ROWS: list[Row] = [("rows", 3, TypeError, "RowPart.of"), ("rows", slice(0, 6), TypeError, "RowPart.of")]
CLASS_WEIGHT_ROWS: list[Row] = [
    *a_constant("weight", 6, instead="gradient"),
    ("reduction", "avg", ValueError, "reduction"),
    ("reduction", None, ValueError, "reduction"),
    *a_number("label_smoothing", -0.1, 1.1),
]
PRIOR_ROWS: list[Row] = [
    *a_constant("prior", 6, instead="linear_bias"),
    ("prior", torch.tensor([0, 0, 0, 0, 0, NAN]), ValueError, "got nan"),
    ("prior", torch.tensor([0, 0, INF, 0, 0, 0]), ValueError, "got inf"),
]
TOKEN_WEIGHT_ROWS: list[Row] = [
    *a_constant("token_weight", 3, instead="none"),
    ("token_weight", torch.tensor([1, NAN, 1]), ValueError, "got nan"),
    ("token_weight", torch.tensor([1, 1, INF]), ValueError, "got inf"),
    *a_number("z_loss", -0.1, INF),
]
SHAPE_ROWS: list[Row] = [
    *a_number("temperature", 0.0, -1.0, INF),
    ("temperature", None, TypeError, "temperature"),
    *a_number("softcap", 0.0, -1.0, INF),
]
MASKED_ROWS: list[Row] = [("prior", torch.tensor([0, 0, 0, 0, 0, -INF]), ValueError, "masks with -inf, got 5")]
"""One of the good targets is masked."""
STREAM_ROWS: list[Row] = [
    ("h", [1.0], TypeError, "h must be a tensor"),
    ("h", KEYS.long(), TypeError, "floating point"),
    ("h", KEYS.double(), TypeError, "dtype"),
    ("h", torch.randn(1, 3, 5), ValueError, "features"),
    ("h", torch.randn(2, 3, 4), ValueError, "h"),
    ("h", torch.randn(1, 1, 3, 4), ValueError, "shape"),
    ("h", torch.full((1, 3, 4), NAN), ValueError, "finite"),
    ("h", torch.full((1, 3, 4), 1e30), ValueError, "inner products"),
]
LABEL_ROWS: list[Row] = [
    ("targets", [[0, 5, 2]], TypeError, "targets must be a tensor"),
    ("targets", LABELS.float(), TypeError, "class indices"),
    ("targets", torch.tensor([0, 5, 2]), ValueError, "shape"),
    ("targets", torch.tensor([[0, -1, 2]]), ValueError, "got -1"),
]
OUTPUT_LAYER_ROWS: list[Row] = [
    ("weight", None, TypeError, "weight must be a tensor"),
    ("weight", torch.randn(6, 5), ValueError, "shape"),
    ("weight", W.double(), TypeError, "dtype"),
    ("weight", torch.randn(2, 4), ValueError, "targets"),
    ("weight", torch.full((6, 4), NAN), ValueError, "finite"),
    ("bias", 0.0, TypeError, "bias must be a tensor"),
    ("bias", torch.randn(5), ValueError, "shape"),
    *a_workspace(),
]
STATE_ROWS: list[Row] = [
    ("state", None, ValueError, "state"),
    ("state", {"keys": KEYS}, ValueError, "labels"),
    ("state", {"keys": KEYS, "labels": LABELS[0]}, ValueError, "labels"),
    ("state", {"keys": KEYS.long(), "labels": LABELS}, ValueError, "floating point"),
    ("state", {"keys": KEYS, "labels": LABELS - 3}, ValueError, "at least 0"),
    ("state", {"keys": torch.randn(1, 9, 4), "labels": torch.zeros(1, 9).long()}, ValueError, "at most 3"),
]
COUNTS_ROWS: list[Row] = [
    ("counts", -1, ValueError, "counts"),
    ("counts", 0.5, ValueError, "counts"),
    ("counts", [1, 2], ValueError, "counts"),
    ("counts", "many", ValueError, "counts"),
    ("counts", 2**63, ValueError, "counts"),
    ("counts", True, ValueError, "counts"),
]
SUGGEST_ROWS: list[Row] = [
    ("counts", [0, 0], ValueError, "at least once"),
    ("counts", [], ValueError, "at least once"),
    ("counts", [1.5], ValueError, "integers"),
    ("counts", [-1, 2], ValueError, "integers"),
    ("counts", "many", ValueError, "counts"),
    ("epochs", -1, ValueError, "epochs"),
    ("epochs", NAN, ValueError, "epochs"),
    ("epochs", INF, ValueError, "epochs"),
    ("epochs", "2", ValueError, "epochs"),
]
GAMMA_ROWS = a_number("gamma", -0.1, 1.5)
LIMIT_ROWS: list[Row] = an_integer("limit", 0)
ASCENT_ROWS: list[Row] = [
    *a_number("radius", 0.0, -1.0, INF),
    *an_integer("neighbours", 1),
    *an_integer("steps", 0),
    *a_workspace(),
]
OPTIMIZER_ROWS: list[Row] = [
    ("params", [], ValueError, "empty parameter list"),
    ("params", torch.zeros(2), TypeError, "params"),
    ("params", [COMPLEX], TypeError, "real"),
    ("lr", "fast", TypeError, "lr"),
    ("lr", -1.0, ValueError, "lr"),
    ("lr", NAN, ValueError, "lr"),
    ("lr", torch.ones(2), ValueError, "lr"),
    ("lr", torch.tensor(-1.0), ValueError, "lr"),
    *a_number("eps", -1.0),
    *a_number("weight_decay", -1.0),
    ("head", nn.Linear(4, 6), TypeError, "head"),
    ("head", a_head(), ValueError, "head.weight"),
]

TABLE: dict[str, list[Row]] = {
    "HebbianSoftmax": [
        *an_integer("in_features", 1),
        ("num_classes", -1, ValueError, "num_classes"),
        ("num_classes", 2.5, TypeError, "integer"),
        *GAMMA_ROWS,
        *LIMIT_ROWS,
        ("rate", 0.1, TypeError, "callable"),
        ("rate", lambda counts, n: 0.1, ValueError, "rate"),
        ("rate", lambda counts, n: counts + 1.5, ValueError, "[0, 1]"),
        *a_flag("bias"),
        *a_number("dropout", -0.1, 1.1),
        ("objective", "best", ValueError, "objective"),
        ("objective", 3, TypeError, "objective"),
        ("scale", "most", ValueError, "scale"),
        ("scale", INF, ValueError, "scale"),
        ("scale", [1.0], TypeError, "scale"),
        ("write", "central", ValueError, "write must be one of"),
        *(row for row in an_integer("start", 0) if not isinstance(row[1], str)),
        ("start", "3", ValueError, 'start must be "auto" or a number of batches'),
        *(row for name in ("fade", "seen_only") for row in a_flag(name)),
        ("new_classes", "even", TypeError, "NewClasses"),
        ("ignore_index", 0.5, TypeError, "ignore_index"),
        ("ignore_index", 2**63, ValueError, "ignore_index"),
        ("device", "nowhere", RuntimeError, "device"),
        ("dtype", torch.int64, TypeError, "dtype"),
        ("dtype", torch.complex64, TypeError, "dtype"),
        ("dtype", "float32", TypeError, "dtype"),
    ],
    "HebbianSoftmax.from_linear": [
        ("linear", None, TypeError, "nn.Linear"),
        ("linear", nn.Embedding(6, 4), TypeError, "nn.Linear"),
        *GAMMA_ROWS,
        *LIMIT_ROWS,
        *COUNTS_ROWS,
        ("options", {"dropout": 2}, TypeError, "options"),
    ],
    "HebbianSoftmax.suggest": SUGGEST_ROWS,
    "HebbianSoftmax.loss": [
        ("targets", torch.full((3, 6), 0.5), ValueError, "sum"),
        ("targets", torch.full((3, 5), 0.2), ValueError, "shape"),
        *BATCH_ROWS,
        ("h", H.double(), TypeError, "dtype"),
        *CLASS_WEIGHT_ROWS,
        *PRIOR_ROWS,
        *MASKED_ROWS,
        *TOKEN_WEIGHT_ROWS,
        *SHAPE_ROWS,
        *a_flag("remember"),
    ],
    "HebbianSoftmax.seen_prior": [row for row in BATCH_ROWS if row[0] == "targets" and row[3] != "shape"],
    "HebbianSoftmax.remember": BATCH_ROWS,
    "HebbianSoftmax.memorize": BATCH_ROWS,
    "HebbianSoftmax.calibrate": [row for row in BATCH_ROWS if row[0] == "h"],
    "HebbianSoftmax.targets": [
        ("targets", [0, 5, 2], TypeError, "targets must be a tensor"),
        *a_flag("shift"),
    ],
    "HebbianSoftmax.attach": [
        ("optimizer", None, TypeError, "optimizer"),
        ("optimizer", sgd(nn.Linear(4, 6)), ValueError, "head.weight"),
        ("process_group", "all", TypeError, "process_group"),
        ("replace", False, RuntimeError, "replace=True"),
        *a_flag("replace"),
    ],
    "HebbianSoftmax.add_classes": [*an_integer("n", 1), ("optimizer", "adam", TypeError, "optimizer")],
    "HebbianSoftmax.reset_memory": COUNTS_ROWS,
    "prepare_fsdp": [("head", None, TypeError, "fully_shard"), ("head", a_head(), TypeError, "fully_shard")],
    "linear_cross_entropy": [
        *LOSS_ROWS,
        *TARGET_ROWS,
        *CLASS_WEIGHT_ROWS,
        *PRIOR_ROWS,
        *MASKED_ROWS,
        *TOKEN_WEIGHT_ROWS,
        *SHAPE_ROWS,
        *PART_ROWS,
    ],
    "linear_log_prob": [
        *LOSS_ROWS,
        *TARGET_ROWS,
        *PRIOR_ROWS,
        *MASKED_ROWS,
        *SHAPE_ROWS,
        *PART_ROWS,
        *a_flag("entropy"),
    ],
    "linear_topk": [
        *LOSS_ROWS,
        *PRIOR_ROWS,
        *SHAPE_ROWS,
        *PART_ROWS,
        *an_integer("k", 1),
        ("k", 7, ValueError, "k must be at most"),
    ],
    "NeuralCache": [*an_integer("size", 1), *a_number("theta", 0.0, -1.0, INF)],
    "NeuralCache.observe": [*STREAM_ROWS, *LABEL_ROWS],
    "NeuralCache.log_prob": [*STREAM_ROWS, *LABEL_ROWS, *a_workspace()],
    "NeuralCache.probabilities": [
        *STREAM_ROWS,
        *an_integer("num_classes", 1),
        ("num_classes", 2, ValueError, "stored targets"),
    ],
    "NeuralCache.sequence_log_prob": [
        *STREAM_ROWS,
        *LABEL_ROWS,
        ("thetas", 0.3, ValueError, "list"),
        ("thetas", [], ValueError, "list"),
        ("thetas", [0.3, 0.0], ValueError, "thetas"),
        ("thetas", [0.3, "a"], TypeError, "thetas"),
        ("sizes", 3, ValueError, "list"),
        ("sizes", [0], ValueError, "sizes"),
        ("sizes", [9], ValueError, "at most"),
        *an_integer("block", 1),
        *a_workspace(),
    ],
    "NeuralCache.load_state_dict": STATE_ROWS,
    "MbPA": [
        *an_integer("memory_size", 1),
        ("memory_size", 1, ValueError, "neighbours"),
        *an_integer("neighbours", 1),
        *an_integer("steps", 1),
        *a_number("learning_rate", 0.0, -1.0, INF),
        *a_number("l2", -1.0, INF),
        *a_number("epsilon", 0.0, INF),
        ("search", "annoy", ValueError, "search"),
        ("search", None, ValueError, "search"),
    ],
    "MbPA.observe": [*STREAM_ROWS, *LABEL_ROWS],
    "MbPA.log_prob": [*STREAM_ROWS, *LABEL_ROWS, *OUTPUT_LAYER_ROWS, ("targets", LABELS + 3, ValueError, "targets")],
    "MbPA.probabilities": [*STREAM_ROWS, *OUTPUT_LAYER_ROWS],
    "MbPA.sequence_log_prob": [
        *STREAM_ROWS,
        *LABEL_ROWS,
        *OUTPUT_LAYER_ROWS,
        ("neighbours", 2, ValueError, "list"),
        ("neighbours", [0], ValueError, "neighbours"),
        ("neighbours", [4], ValueError, "at most"),
        ("learning_rates", 0.1, ValueError, "list"),
        ("learning_rates", [-1.0], ValueError, "learning_rates"),
        *an_integer("block", 1),
    ],
    "MbPA.load_state_dict": STATE_ROWS,
    "mix": [
        ("model", [-1.0], TypeError, "model must be a tensor"),
        ("model", torch.tensor([1, 2]), TypeError, "floating point"),
        ("cache", -1.0, TypeError, "cache must be a tensor"),
        ("cache", torch.zeros(3), ValueError, "shape"),
        ("cache", None, ValueError, "cache must be given"),
        ("cache", torch.zeros(2, device="meta"), ValueError, "device"),
        *a_number("cache_weight", -0.1, 1.1),
        ("cache_weight", 0.95, ValueError, "at most 1"),
        ("mbpa", "no", TypeError, "mbpa must be a tensor"),
        ("mbpa", None, ValueError, "mbpa must be given"),
        *a_number("mbpa_weight", -0.1, 1.1),
    ],
    "mix_memories": [
        ("model", None, TypeError, "model must be a tensor"),
        ("memories", [LOG_PROB], TypeError, "memories"),
        ("memories", {"cache": LOG_PROB}, TypeError, "memories"),
        ("memories", {"cache": (LOG_PROB, 2.0)}, ValueError, "cache_weight"),
        ("memories", {"cache": ("x", 0.5)}, TypeError, "cache must be a tensor"),
    ],
    "NewClasses": [
        *a_flag("whiten"),
        *a_number("shrinkage", -1),
        ("prior", "uneven", ValueError, "prior"),
        *an_integer("gradients_from", 0),
    ],
    "Euclidean": a_number("radius", 0.0, -1.0, INF),
    "InnerProduct": a_number("radius", 0.0, -1.0, INF),
    "SVM": [*ASCENT_ROWS, *a_number("xi", INF), *a_number("epsilon", INF), *a_number("step_size", 0.0, -1.0, INF)],
    "SparseSoftmax": [*ASCENT_ROWS, *a_number("step_size", 0.0, -1.0, INF)],
    "resolve_objective": [("objective", "best", ValueError, "objective"), ("objective", None, TypeError, "objective")],
    **{name: [*GAMMA_ROWS, *LIMIT_ROWS] for name in ("PaperRate", "RecentRate", "InclusiveRate")},
    "ConstantRate": [*a_number("value", -0.1, 1.5), *LIMIT_ROWS],
    "InverseCountRate": LIMIT_ROWS,
    "suggest_settings": SUGGEST_ROWS,
    "OnePassAdam": [
        *OPTIMIZER_ROWS,
        ("betas", 0.9, ValueError, "betas"),
        ("betas", (0.9, 1.0), ValueError, "betas[1]"),
        ("betas", (-0.1, 0.9), ValueError, "betas[0]"),
        ("betas", ("a", 0.9), TypeError, "betas[0]"),
    ],
    "OnePassRMSprop": [*OPTIMIZER_ROWS, *a_number("alpha", -0.1, 1.1)],
}
for _name in ("OnePassAdam", "OnePassRMSprop"):
    TABLE[f"{_name}.add_param_group"] = [
        ("param_group", {"params": [COMPLEX]}, TypeError, "real"),
        ("param_group", [COMPLEX], TypeError, "param_group"),
    ]
    TABLE[f"{_name}.load_state_dict"] = [
        ("state_dict", {"state": {}, "param_groups": [{"params": [0], "momentum": 0.9}]}, ValueError, "momentum"),
        ("state_dict", {"state": {}, "param_groups": []}, ValueError, "parameter groups"),
        ("state_dict", {}, ValueError, "param_groups"),
        ("state_dict", None, TypeError, "state_dict"),
    ]
    TABLE[f"{_name}.step"] = [("closure", 3, TypeError, "closure")]

EXCEPTIONS = {
    "Attachment": "head.attach makes it",
    "Attachment.remember": "the layer calls it with checked arguments",
    **dict.fromkeys(("Attachment.take", "Attachment.timing"), "the optimizers call it"),
    **dict.fromkeys(("RecentRate.least_limit", "RecentRate.length"), "the write calls it"),
    "HebbianSoftmax.batch_to_memorize": "remember and memorize call it",
    "HebbianSoftmax.forward": "it takes and refuses what nn.Linear does",
    "HebbianSoftmax.forget": "an attachment calls it",
    "HebbianSoftmax.mixing_rate": "the write calls it",
    "HebbianSoftmax.remembers": "the layer calls it",
    "SVM.value": "the objective calls it",
    "SVM.gradient": "the objective calls it",
    "SparseSoftmax.value": "the objective calls it",
    "SparseSoftmax.gradient": "the objective calls it",
    "ClassSums": "sum_by_class makes it",
    **dict.fromkeys(("Settings", "settings_of"), "HebbianSoftmax checks its own arguments by it"),
    "project": "the objectives call it",
    "nearest_rows": "the objectives call it",
    "needs_whole_matrix": "the write calls it",
    "accumulation_dtype": "the write calls it",
    "sum_by_class": "the write calls it",
    "add_counts": "the write calls it",
    "merge_sums": "the write calls it",
    "mix_rows": "the write calls it",
    "RowPart": "RowPart.of makes it",
    "RowPart.of": "it needs ranks: tests/distributed/test_row_parts.py tries them",
    "RowPart.agreement": "the losses call it",
    "RowPart.gather": "the losses call it",
    "RowPart.max_": "the losses call it",
    "RowPart.sum_": "the losses call it",
    "shard_rows": "it needs ranks: tests/distributed/test_rows_refused.py tries them",
    "check_rows_at_hand": "the layer calls it",
    "wrapped_by_ddp": "add_classes and shard_rows call it",
    "weight_to_write": "the layer calls it",
    "check_group": "head.attach calls it",
    "group_of_batch": "the layer calls it",
    **dict.fromkeys(
        ["check_same_batch", "groups_of_shards", "fsdp_modules", "own_rows", "resolve_group", "join_counts"],
        "the write calls it",
    ),
    **dict.fromkeys(["join_activations", "join_sums", "sum_over_shards"], "the write calls it"),
}
"""Public names without rows, and why: they have no underscore because another module of the library uses them."""


def public_functions() -> Iterator[tuple[str, inspect.Signature]]:
    """Yield every public class, function and method that takes arguments."""
    for module in map(import_module, (f"hebbian_softmax{name}" for name in MODULES)):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value):
                continue
            yield name, inspect.signature(value)
            for method in dir(value) if inspect.isclass(value) else ():
                function = getattr(value, method)
                of_ours = str(getattr(function, "__module__", None)).startswith("hebbian_softmax")
                if inspect.isroutine(function) and of_ours and not method.startswith("_"):
                    yield f"{name}.{method}", inspect.signature(function)


def test_every_public_function_and_argument_has_a_row() -> None:
    missing = []
    for name, signature in public_functions():
        arguments = set(signature.parameters) - {"self"}
        if name in EXCEPTIONS or name.partition(".")[0] == "ClassSums":
            continue
        rows = TABLE.get(name, [])
        missing += [f"{name}({each})" for each in sorted(arguments - {row[0] for row in rows})]
    assert not missing, f"no bad input is tried for {missing}"


def test_no_row_is_left_over() -> None:
    names = {name for name, _ in public_functions()}
    assert {*TABLE, *EXCEPTIONS} - names == set()
    assert TABLE.keys() == CALLS.keys()


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"prepare_fsdp"}))
def test_the_calls_are_good_without_the_bad_input(name: str) -> None:
    CALLS[name]()


@pytest.mark.parametrize("name", sorted(TABLE))
def test_bad_inputs(name: str) -> None:
    wrong = []
    for argument, value, error, word in TABLE[name]:
        shown = f"{name}({argument}={value!r:.60})"
        try:
            CALLS[name](**{argument: value})
        except Exception as raised:
            if type(raised) is not error or word not in str(raised):
                wrong.append(f"{shown} raises {type(raised).__name__}: {str(raised)[:200]}")
        else:
            wrong.append(f"{shown} is accepted")
    assert not wrong, "\n".join(wrong)
