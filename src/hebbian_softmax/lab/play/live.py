"""The worker that trains the curriculum while somebody watches: `python -m hebbian_softmax.lab.play.live SETTINGS`.

It sends the outcome of every check, and obeys `pause`, `resume` and `change` (of γ and T) between two steps.
"""

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import PaperRate
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.json_files import object_from_json
from hebbian_softmax.lab.images.compare import SOURCES, Comparison
from hebbian_softmax.lab.images.curriculum import CHECK_EVERY, CurriculumSettings
from hebbian_softmax.lab.images.data import TEST_DRAWINGS, ImageSet, ImageSource
from hebbian_softmax.lab.images.fleet import Threads
from hebbian_softmax.lab.images.learner import Learner
from hebbian_softmax.lab.play.classroom import Load, short_name, to_hex
from hebbian_softmax.lab.play.lesson import RULE
from hebbian_softmax.lab.play.process import Channel, Message

HARDEST = 5  # classes of each head that are shown
MEMORY = 0.7  # share of the earlier checks in the running accuracy of a class


class Orders:
    """What the visitor wants, noted by the thread that listens and obeyed by the one that trains."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.running.set()
        self._changes: list[tuple[float, int]] = []

    def follow(self, message: Message) -> None:
        """Note an order."""
        if message["act"] == "change":
            self._changes.append((message["gamma"], message["limit"]))
        elif message["act"] == "pause":
            self.running.clear()
        else:
            self.running.set()

    def change(self, learner: Learner) -> None:
        """Give a learner the last γ and T that were asked for."""
        while self._changes:
            learner.head.rate = PaperRate(*self._changes.pop(0))


class Hardest:
    """The classes that a learner recognises worst, over its last checks."""

    def __init__(self, learner: Learner, data: ImageSet) -> None:
        self.learner, self.data = learner, data
        self._average = torch.zeros(learner.total)
        self._checks = torch.zeros(learner.total)

    def see(self, active: int) -> None:
        """Take in the last check, of the first `active` classes."""
        accuracy = self.learner.recognised[:active].cpu() / TEST_DRAWINGS
        first = self._checks[:active] == 0
        average = torch.where(first, accuracy, MEMORY * self._average[:active] + (1 - MEMORY) * accuracy)
        self._average[:active] = average
        self._checks[:active] += 1

    def names(self, active: int) -> list[Message]:
        """Return the hardest classes: name, picture and running accuracy."""
        worst: Sequence[int] = self._average[:active].argsort(stable=True)[:HARDEST].tolist()
        return [self._describe(label) for label in worst]

    def _describe(self, label: int) -> Message:
        number = int(self.learner.order[label])
        picture: Tensor = self.data.images[number, 0]
        accuracy = float(self._average[label])
        return {"name": short_name(self.data.class_names[number]), "picture": to_hex(picture), "accuracy": accuracy}


def watch(channel: Channel, data: ImageSet, settings: CurriculumSettings, orders: Orders) -> None:
    """Train both learners and send the outcome of each check."""
    with Threads("cpu", 2) as threads:
        comparison = Comparison(data, settings, threads)
        hardest = {name: Hardest(learner, data) for name, learner in comparison.learners.items()}
        channel.send({"event": "started", "steps": settings.steps, "start": comparison.histories["plain"].start})
        for step in range(1, settings.steps + 1):
            orders.running.wait()
            orders.change(comparison.learners["hebbian"])
            comparison.train_step()
            if step % CHECK_EVERY == 0:
                tested = {name: int(learner.active) for name, learner in comparison.learners.items()}
                comparison.evaluate()
                heads = {}
                for name, history in comparison.histories.items():
                    hardest[name].see(tested[name])
                    heads[name] = {
                        "classes": history.reached,
                        "accuracy": history.accuracy[-1],
                        "hardest": hardest[name].names(tested[name]),
                    }
                channel.send({"event": "check", "step": step, "heads": heads})
        channel.send({"event": "finished"})


def serve(load: Load, settings: CurriculumSettings) -> None:
    """Train until the end, or until the server closes the pipe."""
    if hasattr(os, "nice"):
        os.nice(10)  # the lessons' answers come first
    torch.set_num_threads(1)
    channel, orders = Channel(), Orders()

    def listen() -> None:
        for message in channel.messages():
            orders.follow(message)
        channel.end()

    threading.Thread(target=listen, daemon=True).start()
    try:
        watch(channel, load(), settings, orders)
    except (LabError, OSError) as error:
        channel.send({"event": "failed", "error": str(error)})
    channel.end()


def settings_of(source: ImageSource, given: Message) -> CurriculumSettings:
    """Return the settings of a curriculum that the server asks for, with the rule that the page was measured with."""
    options: dict[str, Any] = {name: given[name] for name in ("steps", "gamma", "limit", "seed")} | RULE
    options["rate"] = "paper"
    if given["images"] == "omniglot":
        options["data_root"] = given["data_root"]
    # The demo's size also for Omniglot: checks come often enough to watch them.
    return replace(source.settings(), filters=CurriculumSettings().filters, device="cpu", **options)


def main() -> None:
    given = object_from_json(sys.argv[1])
    source = next(each for each in SOURCES if each.name == given["images"])
    settings = settings_of(source, given)
    serve(lambda: source.load(settings, True), settings)


if __name__ == "__main__":
    main()
