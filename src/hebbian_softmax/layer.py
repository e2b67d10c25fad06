"""HebbianSoftmax: an ``nn.Linear`` whose rows also memorise."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hebbian_softmax import _torch, checks, seen, state
from hebbian_softmax.attach import targets as target_context
from hebbian_softmax.attach.attachment import Attachment, attach_to, warn_unattached
from hebbian_softmax.calibration import Calibration, NewClasses, check_new_classes
from hebbian_softmax.distributed import check_rows_at_hand, group_of_batch, weight_to_write
from hebbian_softmax.growth import grow
from hebbian_softmax.loss.api import cross_entropy
from hebbian_softmax.loss.checks import Options, check_same_dtype
from hebbian_softmax.loss.soft import soft_cross_entropy
from hebbian_softmax.low_precision import LowPrecisionCopy
from hebbian_softmax.objectives import Objective, resolve_objective
from hebbian_softmax.rule import GAMMA, LIMIT, Rate, RecentRate, accumulation_dtype, settings_of, suggest_settings
from hebbian_softmax.shared_rows import gathered_logits, same_dropout, shared_loss
from hebbian_softmax.write import trained, write
from hebbian_softmax.write.activations import Activations
from hebbian_softmax.write.running import RunningStatistics
from hebbian_softmax.write.settling import Settling


class HebbianSoftmax(nn.Linear):
    r"""A softmax output layer that learns new and rare classes by memorising activations (Algorithm 1).

    It can replace an ``nn.Linear``: the parameters, the state-dict keys of the weight and bias, and the output are the
    same. Once the head is attached to an optimizer, each of the optimizer's steps is followed, for every class
    :math:`i` of the batch, by

    .. math::
        \theta[i] \leftarrow \lambda_i \bar h_i + (1 - \lambda_i)\, \hat\theta[i], \qquad
        \lambda_i = \max(1 / c[i], \gamma) \cdot \mathbb{I}\{c[i] < T\}

    where :math:`\bar h_i` is the mean activation of the class in the batch, and :math:`c[i]` counts its occurrences
    before the batch. That is the paper's rule, ``write="literal"``. Our study chose the default: it writes across the
    mean activation, weighs later occurrences more, begins once features have settled, and fades with the learning rate.

    Args:
        in_features: size of the activations h.
        num_classes: number of rows of the matrix; with 0 the head has no classes until :meth:`add_classes`.
        gamma: γ, in [0, 1], usually 0.2: the least λ, or in steps how far the usual rate is raised as lr falls.
        limit: T, the number of occurrences after which a class is left to gradient descent. By default 100. Unless
            writes are literal, it is more in long trainings, and fewer if there are few classes (``RecentRate``).
        rate: a callable ``(counts_before, n) -> λ`` that replaces the usual one; see :mod:`hebbian_softmax.rule`.
        bias: as in ``nn.Linear``; the rule does not write it.
        dropout: probability of zeroing a feature in :meth:`loss` while training; what is memorised is not dropped.
        objective: ``l2`` (the paper's), ``ip``, ``svm``, ``smax`` or a callable; see :mod:`hebbian_softmax.objectives`.
        write: ``"literal"``: activations as they are, the paper's rule. ``"centred"``: without their running mean.
            ``"across"``: the same, and rows stay as they are along that mean, where they say how likely a class is.
        scale: the factor on what is written, or ``"match"``: the mean norm of the familiar rows divided by the mean
            norm of the activations, both as running values. By default 1 for literal writes and else ``"match"``.
        start: the number of batches before steps begin to write, or ``"auto"``: once features have settled
            (:mod:`hebbian_softmax.write.settling`). Counting goes on meanwhile. By default ``"auto"``, 0 if literal.
        fade: whether λ is multiplied by the learning rate of the weight over its highest one so far. The first write of
            a class after ``start`` does not fade. By default only literal writes do not fade.
        seen_only: whether the softmax of :meth:`loss` leaves out classes that were never counted and are no target of
            the call, and :meth:`forward` in eval mode gives them -inf; see :mod:`hebbian_softmax.seen`.
        new_classes: how classes that are added to a trained head are written; see :mod:`hebbian_softmax.calibration`.
        ignore_index: targets of this value take no part, as in ``F.cross_entropy``.

    >>> backbone = nn.Linear(20, 8)
    >>> head = HebbianSoftmax(8, 1000)
    >>> optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()])
    >>> handle = head.attach(optimizer)
    >>> loss = head.loss(backbone(torch.randn(4, 20)), torch.tensor([3, 14, 15, 3]))
    >>> loss.backward()
    >>> optimizer.step()
    >>> head.counts[[3, 14, 15, 92]].tolist()
    [2, 1, 1, 0]
    """

    counts: Tensor
    since_start: Tensor
    nonfinite_count: Tensor
    filled: Tensor
    running: RunningStatistics
    checked_filled: Tensor | None = None  # the buffer ``filled`` that was found to have its value, to check it once
    context: target_context.Targets | None = None  # the open context of targets()
    in_context, graph_key = False, -1  # what compiled graphs see of it, and the number under which they find this head
    warned_not_called = False
    row_mesh: DeviceMesh | None = None  # the ranks that share the rows and see the same batch; set by shard_rows()

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        gamma: float = GAMMA,
        limit: int | None = None,
        rate: Rate | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        objective: str | Objective = "l2",
        write: str = "across",
        scale: float | str | None = None,
        start: int | str | None = None,
        fade: bool | None = None,
        seen_only: bool = False,
        new_classes: NewClasses | None = None,
        ignore_index: int = -100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        in_features = checks.check_integer("in_features", in_features, 1)
        num_classes = checks.check_integer("num_classes", num_classes, 0)
        settings = settings_of(gamma, limit, rate, write, scale, start, fade)
        dropout = checks.check_number("dropout", dropout, 0, 1)
        objective = resolve_objective(objective)
        ignore_index = checks.check_integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
        super().__init__(in_features, num_classes, checks.check_flag("bias", bias), device, checks.check_dtype(dtype))
        self._gamma, self._limit, self.rate, self.write, self.scale, self.start, self.fade = settings
        self.dropout, self.objective, self.ignore_index = dropout, objective, ignore_index
        self.new_classes = check_new_classes(new_classes)
        self.seen_only = checks.check_flag("seen_only", seen_only)
        self.memorizing = True
        """Set this to False to stop the writes; counting goes on."""
        for name, shape in (("counts", (num_classes,)), ("since_start", (num_classes,)), ("nonfinite_count", ())):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64, device=self.weight.device))
        self.calibration: Calibration | None = None
        """What a trained head knows about its activations; None in a head that is trained from scratch."""
        self.register_buffer("filled", state.signature(self.weight.device))
        like: Any = {"device": self.weight.device, "dtype": accumulation_dtype(self.weight)}
        self.running = RunningStatistics(in_features, num_classes, **like)
        self.settling = Settling(in_features, num_classes, **like) if self.start == "auto" else None
        self.checked_gradients: set[int] = set()
        """The ``id`` of each parameter that has grown, whose gradients are checked for the old size."""
        self.low_precision: LowPrecisionCopy | None = None
        """The weight in bfloat16 for the loss, kept up to date by an optimizer of :mod:`hebbian_softmax.optim`."""
        self._attachment: Attachment | None = None
        self._warned_unattached = False
        self._nonfinite_told = 0

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, limit: int = LIMIT, counts: Tensor | int | None = None, **options: Any
    ) -> HebbianSoftmax:
        """Return a head that has the parameters of a trained ``nn.Linear``, not copies of them.

        Its classes count as familiar (``counts = limit``), so the rule leaves their rows alone and memorises only
        classes added later. ``counts`` (one number, or one for each class) overrides that. Features have settled.

        >>> head = HebbianSoftmax.from_linear(nn.Linear(8, 10))
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
        options |= {"limit": limit, "bias": linear.bias is not None}
        options |= {"device": "meta", "dtype": checks.check_weight(linear).dtype}
        head = cls(linear.in_features, linear.out_features, **options)
        state.adopt_linear(head, linear, counts)
        return head.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """Return a plain ``nn.Linear`` that has the parameters of this head, not copies of them.

        This is the inverse of :meth:`from_linear`, for tools that know ``nn.Linear`` only. The outputs are the same,
        and the two share their parameters until one gets others: training or growing one changes both.

        >>> head = HebbianSoftmax(8, 10)
        >>> head.to_linear().weight is head.weight
        True
        """
        return state.linear_of(self)

    @staticmethod
    def suggest(counts: Tensor | Sequence[int], epochs: float) -> tuple[float, int]:
        """Return the paper's γ = 1/N_min and T = N_min × epochs, for literal writes; other writes are better without.

        N_min is the count of the rarest class in an epoch; classes that never occur are left out. γ is at most 1/2.

        >>> HebbianSoftmax.suggest([1000, 50, 20, 0], epochs=5)
        (0.05, 100)
        """
        return suggest_settings(counts, epochs)

    @property
    def num_classes(self) -> int:
        """The number of rows, which ``add_classes`` raises."""
        return self.out_features

    @property
    def gamma(self) -> float:
        """γ as it was given; to change it while training, set ``rate``."""
        return self._gamma

    @property
    def limit(self) -> int:
        """T as it was given, or 100, from which the usual rate may depart; to change it in training, set ``rate``."""
        return self._limit

    @property
    def nonfinite(self) -> int:
        """The number of activations left out so far because of an inf, a NaN or an infinite norm; warns about new ones.

        Reading it waits for the device.
        """
        self._nonfinite_told, told = int(self.nonfinite_count), self._nonfinite_told
        if self._nonfinite_told > told:
            message = f"{self._nonfinite_told - told} activations had no finite norm and were not memorised"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return self._nonfinite_told

    def forward(self, input: Tensor) -> Tensor:
        logits = self._logits(input)
        return seen.without_unseen(self, logits) if self.seen_only and not self.training else logits

    def _logits(self, input: Tensor) -> Tensor:
        # First, and without a look at the graph, so that this stays one graph.
        if torch.compiler.is_compiling() and self.row_mesh is None:
            if not self.in_context:
                return super().forward(input)
            return target_context.linear_in_graph(input, self.weight, self.bias, self.graph_key)
        if self.row_mesh is not None:
            logits = gathered_logits(self, input)
        elif self._attachment is None and self.context is None:
            return super().forward(input)
        else:
            logits = F.linear(input, self._own_weight(), self.bias)
        target_context.follow_call(self, input, logits)
        # What remember() was given may be this input, which no graph has made.
        if self._attachment is not None and logits.requires_grad and input.grad_fn is None and self.remembers():
            self._attachment.watch_weight()
            self._attachment.frozen_inputs.computed(logits, input, exact=self.context is not None)
        return logits

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or module; the weight as a WeightInUse while frozen features wait for logits."""
        value: Any = super().__getattr__(name)
        attachment: Attachment | None = self.__dict__.get("_attachment") if name == "weight" else None
        if attachment is None or torch.compiler.is_compiling() or not attachment.frozen_inputs.waits:
            return value
        return attachment.frozen_inputs.in_use(value)

    def loss(
        self,
        h: Tensor,
        targets: Tensor,
        *,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        prior: Tensor | None = None,
        token_weight: Tensor | None = None,
        temperature: float = 1.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        remember: bool = True,
    ) -> Tensor:
        """Return the cross-entropy of activations (..., features) and class indices (...); remember both in training.

        It is ``F.cross_entropy(head(dropout(h)), targets, ...)``, where ``weight`` stands for the class weights; but
        where every target is ignored it is 0 with zero gradients. The other options are those of
        :func:`~hebbian_softmax.linear_cross_entropy`. The activations are memorised at the optimizer step that applies
        the gradient of this loss, but not those whose ``token_weight`` is 0 or less.

        Targets may also be probabilities (..., num_classes), as from mixup or a teacher. An activation is then
        memorised for the class that has more than half of the probability; where no class has, it is not memorised.
        """
        flat, flat_targets = checks.check_batch(h, targets, features=self.in_features, classes=self.num_classes)
        weight_of_head = self._own_weight()
        more = prior, token_weight, temperature, softcap, z_loss
        options = Options(weight, reduction, self.ignore_index, label_smoothing, *more)
        options.check(weight_of_head, h.shape[:-1])
        if not torch.compiler.is_compiling():
            if self.context is not None:
                target_context.refuse_within(self, "head.loss")
            if weight_of_head.shape[0] > self.counts.shape[0]:
                state.follow_weight(self)
            if self.row_mesh is not None or _torch.is_sharded(weight_of_head):
                check_rows_at_hand(self, weight_of_head, h)
            checks.check_same_place(weight_of_head, h)
            checks.check_target_values(flat_targets, num_classes=self.num_classes, ignore_index=self.ignore_index)
        copy = None if self.low_precision is None else self.low_precision.for_products(weight_of_head, h)
        if copy is None:
            check_same_dtype(weight_of_head, h)
        soft = flat_targets.is_floating_point()
        dropped = F.dropout(flat, self.dropout, self.training) if self.row_mesh is None else same_dropout(self, flat)
        if copy is not None and (soft or self.num_classes == 0):  # what follows is plain torch, and cannot use the copy
            dropped, copy = dropped.to(weight_of_head.dtype), None
        options = seen.with_left_out(self, flat_targets, options) if self.seen_only else options
        operands = dropped, weight_of_head, flat_targets, self.bias
        if self.row_mesh is not None:
            loss = shared_loss(*operands, options, copy)
        elif soft:
            loss = soft_cross_entropy(*operands, options)
        else:
            loss = cross_entropy(*operands, options, zero_if_empty=True, copy=copy)
        if reduction == "none":
            loss = loss.view(h.shape[:-1])
        if self._attachment is not None:
            self._attachment.pending.asked_by_loss(self.training, remember)
        if checks.check_flag("remember", remember) and torch.is_grad_enabled() and self.remembers(warn=True):
            assert self._attachment is not None
            self._attachment.watch_weight()
            classes = checks.classes_to_memorize(flat_targets, self.ignore_index, token_weight)
            loss = self._attachment.watch(loss, flat, classes)
        return loss

    def seen_prior(self, targets: Tensor | None = None) -> Tensor:
        """Return 0 for each class that was counted or is in ``targets``, and -inf for the others.

        Add it to the logits of a loss of your own, or give it as ``prior`` to :func:`~hebbian_softmax.linear_topk`.
        """
        return seen.prior_of(self, targets)

    def remember(self, h: Tensor, targets: Tensor) -> None:
        """Remember activations for a loss of your own; call this before the backward pass of that loss.

        ``h`` is the tensor that the head is called with, or one from which that tensor is computed. Its activations
        become pending when a backward pass gives a gradient to both ``h`` and the weight. For an ``h`` that no graph
        has made (frozen features), the gradient of ``head(h)`` counts, or of what ``h`` and ``head.weight`` compute.
        """
        target_context.refuse_within(self, "head.remember")
        flat, flat_targets = self.batch_to_memorize(h, targets)
        if not torch.is_grad_enabled() or _torch.is_transforming() or not self.remembers(warn=True):
            return
        assert self._attachment is not None
        self._attachment.remember(h, flat, flat_targets)

    def targets(self, targets: Tensor, *, shift: bool = False) -> target_context.Targets:
        """Return a context in which one call of the head, made by any model around it, is remembered for ``targets``.

        >>> model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), HebbianSoftmax(8, 10))
        >>> head, optimizer = model[-1], torch.optim.Adam(model.parameters())
        >>> handle = head.attach(optimizer)
        >>> x, y = torch.randn(4, 20), torch.tensor([3, 1, 4, 1])
        >>> with head.targets(y):
        ...     loss = F.cross_entropy(model(x), y)
        >>> loss.backward()
        >>> optimizer.step()
        >>> head.counts[:5].tolist()
        [0, 2, 0, 1, 1]

        The head's input is what is memorised, as it comes: a dropout before the head is part of it. ``targets`` has one
        class for each activation, or probabilities as in :meth:`loss`. ``shift=True`` is for causal language models
        that shift their labels themselves: the activation at a position is remembered for the label of the next one.
        The backward pass may come after the context. In eval mode and under ``no_grad`` nothing is remembered.
        """
        return target_context.Targets(self, targets, shift)

    @property
    def attachment(self) -> Attachment | None:
        """The handle that :meth:`attach` returned, until it is removed."""
        return self._attachment

    def attach(
        self,
        optimizer: torch.optim.Optimizer,
        process_group: dist.ProcessGroup | None = None,
        *,
        replace: bool = False,
    ) -> Attachment:
        """Let every real step of ``optimizer`` end with the rule's write, until :meth:`detach`.

        ``replace=True`` lets go of an earlier optimizer that still lives, as in a second ``fit``; what awaits its step
        is forgotten. The optimizer may be wrapped, as accelerate and Lightning do it. The handle that is returned has
        ``remove()``, too.

        An optimizer of :mod:`hebbian_softmax.optim` that was made with ``head=`` is attached already, and its handle is
        returned. In data-parallel training all ranks of ``process_group`` (by default all ranks, once the default group
        is initialised) form one batch, and every one of them must step. Copies and unpickled heads are not attached;
        neither are copies of the optimizer.
        """
        self._attachment = attach_to(self, optimizer, process_group, replace)
        return self._attachment

    def detach(self) -> None:
        """Undo :meth:`attach`: steps no longer write, and what is pending is forgotten. Without one, do nothing."""
        if self._attachment is not None:
            self._attachment.remove()

    @torch.no_grad()
    def memorize(self, h: Tensor, targets: Tensor) -> None:
        """Write activations into the rows of their classes now, without an optimizer and in any mode; counts advance.

        What is pending stays pending; ``start`` and ``fade`` do not matter. With DDP or sharded rows all ranks call it.
        A trained head that has seen no more activations than it has features sees these first, as in :meth:`calibrate`.
        """
        state.ensure_filled(self)
        flat, flat_targets = self.batch_to_memorize(h, targets)
        weight = weight_to_write(self)
        group = group_of_batch(self, weight)
        trained.prepare(self, flat, flat_targets, weight, group)
        write(self, [Activations(flat, flat_targets)], weight, group)

    def calibrate(self, h: Tensor) -> None:
        """Let the head see activations (..., features) of any classes, so that it can write new classes well.

        A trained head (:meth:`from_linear`) needs this before it memorises; without it, the first activations that
        are memorised serve. A few thousand are enough, and each costs as much as a prediction. A head that was trained
        from scratch counts as trained from now on.
        """
        state.ensure_filled(self)
        state.follow_weight(self)
        flat, weight = checks.check_activations(h, self.in_features), weight_to_write(self)
        checks.check_same_place(weight, h)
        trained.calibrate(self, flat, weight, group_of_batch(self, weight))

    def forget(self, attachment: Attachment) -> None:
        """Let go of an attachment that is removed."""
        self._attachment = None if self._attachment is attachment else self._attachment

    def add_classes(self, n: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Append ``n`` new classes in place: parameters keep their identity, old rows and optimizer state their bits.

        The state of ``optimizer``, and that of the attached optimizer, grows as well, and so do modules that share the
        weight (a tied embedding). New rows are initialised like those of a new head, with count 0 and bias 0. A loss
        that was computed before can no longer be backpropagated: its backward pass raises an error.

        On a CPU there is then memory for an eighth more rows, so that adding single classes copies the matrix rarely.
        A gradient that was made since the last growth is copied; clear it first if it is no longer needed.
        """
        grow(self, n, optimizer)

    def reset_parameters(self) -> None:
        """Initialise the head anew, and forget what was counted."""
        if self.weight.numel():  # torch warns about tensors without elements
            super().reset_parameters()
        if hasattr(self, "counts"):  # nn.Linear calls this before there are counts
            self.reset_memory()

    def reset_memory(self, counts: Tensor | int = 0) -> None:
        """Set the counts, one number or one for each class, and forget the running values; the rows stay.

        ``reset_memory(head.limit)`` says that the rows come from a trained layer. A head on the meta device whose
        buffers were neither loaded nor initialised needs this call.
        """
        state.reset(self, counts)
        self._nonfinite_told = 0

    def center_of_activations(self) -> Tensor:
        """Return what is subtracted from activations before they are written."""
        return self.running.mean if self.write != "literal" else torch.zeros_like(self.running.mean)

    def mixing_rate(self, counts: Tensor, n: Tensor, *, in_step: bool = False, fallen: Tensor | float = 0.0) -> Tensor:
        """Return λ of classes seen ``counts`` times before and ``n`` times now; ``fallen`` is ``RecentRate``'s."""
        if not isinstance(self.rate, RecentRate):
            return checks.check_rate_values(self.rate(counts, n), counts)
        mean = self.running.seen // max(self.num_classes, 1) if self.limit_grows() else 0
        rate = self.rate(counts, n, mean, self.running.batches_seen(), self.num_classes if in_step else None, fallen)
        return checks.check_rate_values(rate, counts)

    def limit_grows(self) -> bool:
        """Return whether T depends on the classes and on the time so far; a given T, and a trained head's, does not."""
        return isinstance(self.rate, RecentRate) and self.rate.limit is None and self.calibration is None

    def extra_repr(self) -> str:
        return state.described(self)

    def remembers(self, warn: bool = False) -> bool:
        """Return whether activations are remembered now: while training, on an attached head.

        With ``warn``, warn once if the head is not attached.
        """
        if not self.training:
            return False
        attached = self._attachment is not None and self._attachment.active
        if warn and not attached and not self._warned_unattached:
            self._warned_unattached = True
            warn_unattached(self._attachment)
        return attached

    def _own_weight(self) -> Tensor:
        """Return the weight itself, never an alias of it."""
        own = None if torch.compiler.is_compiling() else _torch.own_parameter(self, "weight")
        return self.weight if own is None else own

    def batch_to_memorize(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Check a batch; return its activations (N, features) and the classes (N,) for which they are memorised."""
        state.follow_weight(self)
        flat, flat_targets = checks.check_batch(h, targets, features=self.in_features, classes=self.num_classes)
        checks.check_target_values(flat_targets, num_classes=self.num_classes, ignore_index=self.ignore_index)
        return flat, checks.classes_to_memorize(flat_targets, self.ignore_index)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the attachment out of copies and pickles: the optimizer's hook belongs to the original."""
        state.fill_if_known(self)
        bonds = {"_attachment": None, "context": None, "in_context": False, "graph_key": -1, "checked_filled": None}
        return self.__dict__ | bonds | {"checked_gradients": set(), "low_precision": None}

    def _save_to_state_dict(self, *args: Any) -> None:
        state.fill_if_known(self)
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state.adopt_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._nonfinite_told = 0
        # With assign=True a state of another dtype is taken as it is.
        self.counts, self.since_start = self.counts.long(), self.since_start.long()
