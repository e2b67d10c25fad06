"""The store of every memory: the last n activations of each stream, and the classes that followed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.memory import checks


class History:
    """The last ``capacity`` activations of each stream with their classes, oldest first.

    The buffer has room for twice as many. When it is full, the window of the last ones moves back to its start. So
    storing an activation takes constant time on average, and the window is always one slice.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._keys: Tensor | None = None
        self._labels: Tensor | None = None
        self._start = self._end = 0

    def __len__(self) -> int:
        """Return the number of entries of each stream."""
        return self._end - self._start

    def check(self, h: Tensor) -> None:
        """Check that activations (B, T, d) go with those stored."""
        if self._keys is None:
            return
        streams, _, features = self._keys.shape
        if h.shape[2] != features:
            raise ValueError(f"h must have {features} features, as those stored, got {h.shape[2]}")
        if h.shape[0] != streams:
            raise ValueError(f"h must have {streams} streams, as those stored, got {h.shape[0]}")
        if h.dtype != self._keys.dtype:
            raise TypeError(f"h must have the dtype of those stored, {self._keys.dtype}, got {h.dtype}")
        if h.device != self._keys.device:
            raise ValueError(f"h must be on the device of those stored, {self._keys.device}, got {h.device}")

    def window(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored keys (B, m, d) and labels (B, m); while empty, of the dtype and device of ``h``."""
        if self._keys is None or self._labels is None:
            return h[:, :0], torch.empty(h.shape[0], 0, dtype=torch.int64, device=h.device)
        return self._keys[:, self._start : self._end], self._labels[:, self._start : self._end]

    @torch.inference_mode(False)  # A buffer made in inference mode could not be changed outside of it.
    @torch.no_grad()
    def append(self, h: Tensor, labels: Tensor) -> None:
        """Store activations (B, T, d) and their classes (B, T), oldest first."""
        h, labels = h[:, -self.capacity :], labels[:, -self.capacity :]
        new = h.shape[1]
        if new == 0:
            return
        self._make_room(h, new)
        assert self._keys is not None
        assert self._labels is not None
        self._keys[:, self._end : self._end + new] = h
        self._labels[:, self._end : self._end + new] = labels
        self._end += new
        self._start = max(self._start, self._end - self.capacity)

    def _make_room(self, h: Tensor, new: int) -> None:
        """Make room for ``new`` more entries, by moving the window or by a larger buffer."""
        keys, labels = self.window(h)
        if self._keys is not None and self._end + new <= self._keys.shape[1]:
            return
        kept = min(len(self), self.capacity - new)
        keys, labels = keys[:, len(self) - kept :], labels[:, len(self) - kept :]
        room = min(2 * self.capacity, max(2 * (kept + new), 16))
        if self._keys is None or self._labels is None or room > self._keys.shape[1]:
            self._keys, old_keys = h.new_empty(h.shape[0], room, h.shape[2]), keys
            self._labels, old_labels = labels.new_empty(h.shape[0], room), labels
        else:
            old_keys, old_labels = keys.clone(), labels.clone()
        self._keys[:, :kept], self._labels[:, :kept] = old_keys, old_labels
        self._start, self._end = 0, kept

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``keys`` (streams, stored, d) and ``labels`` (streams, stored), oldest first."""
        keys, labels = self.window(torch.empty(0, 0, 0))
        return {"keys": keys.clone(), "labels": labels.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all entries by those of ``state``, which is checked before anything changes."""
        if not isinstance(state, Mapping) or set(state) != {"keys", "labels"}:
            what = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"state must have the keys 'keys' and 'labels', got {what}")
        keys, labels = state["keys"], state["labels"]
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in (keys, labels)]
        if not isinstance(keys, Tensor) or keys.dim() != 3 or shapes[1] != tuple(keys.shape[:2]):
            pair = f"{shapes[0]} and {shapes[1]}"
            raise ValueError(f"state must hold keys (streams, stored, d) and labels (streams, stored), got {pair}")
        if keys.shape[1] > self.capacity:
            raise ValueError(f"state must hold at most {self.capacity} entries a stream, got {keys.shape[1]}")
        if keys.shape[1]:  # An empty state does not know the number of features.
            try:
                checks.check_pair(keys, labels)
            except (TypeError, ValueError) as error:
                raise ValueError(f"state must hold what observe would take: {error}") from error
        self.reset()
        self.append(keys, labels)


class Timeline:
    """The stored entries (B, m, d) and then a sequence (B, T, d), addressed as one without joining them in memory."""

    def __init__(self, stored: tuple[Tensor, Tensor], sequence: tuple[Tensor, Tensor]) -> None:
        self.stored, self.sequence = stored, sequence
        self.start = stored[0].shape[1]
        self.end = self.start + sequence[0].shape[1]

    def keys(self, low: int, high: int) -> Tensor:
        """Return the activations of positions low … high - 1."""
        return self._slice(0, low, high)

    def labels(self, low: int, high: int) -> Tensor:
        """Return the classes of positions low … high - 1."""
        return self._slice(1, low, high)

    def _slice(self, which: int, low: int, high: int) -> Tensor:
        old, new = self.stored[which], self.sequence[which]
        if low >= self.start:
            return new[:, low - self.start : high - self.start]
        if high <= self.start:
            return old[:, low:high]
        return torch.cat([old[:, low:], new[:, : high - self.start]], 1)


class Memory:
    """The part that all memories share: a history, and its state."""

    def __init__(self, capacity: int) -> None:
        self._history = History(capacity)

    def __len__(self) -> int:
        """Return the number of entries stored in each stream."""
        return len(self._history)

    def observe(self, h: Tensor, targets: Tensor) -> None:
        """Store activations and the classes that followed them, oldest first."""
        self._history.append(*self._checked(h, targets))

    def reset(self) -> None:
        """Forget everything; the next activations may have other streams, features, dtype and device."""
        self._history.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``keys`` (streams, stored, d) and ``labels`` (streams, stored), oldest first."""
        return self._history.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all entries by those of another memory's ``state_dict``."""
        self._history.load_state_dict(state)

    def _checked(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return activations and targets as (B, T, d) and (B, T), after checking that they go with those stored."""
        streams, labels = checks.check_pair(h, targets)
        self._history.check(streams)
        return streams, labels
