"""The worker that holds the network and all lessons: `python -m hebbian_softmax.lab.play.classroom SETTINGS`.

It trains the network first, if none is kept, and tells how far it is. Then it carries out what visitors ask, each
lesson in its own order and several lessons side by side.
"""

import base64
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.json_files import object_from_json
from hebbian_softmax.lab.images.compare import SOURCES
from hebbian_softmax.lab.images.data import SIZE, ImageSet
from hebbian_softmax.lab.play.lesson import Example, Lesson, LessonError, hebbian_head
from hebbian_softmax.lab.play.network import Knowledge, divide, prepare
from hebbian_softmax.lab.play.process import Channel, Message

CHARACTERS, DRAWINGS = 10, 5  # ready-made drawings: 10 characters that the network never saw, 5 drawings of each
SIDE_BY_SIDE = 4  # lessons that are carried on at the same time
TOLD_EVERY = 10  # training steps between two reports

Load = Callable[[], ImageSet]


class Classroom:
    """The network and the lessons of all visitors."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.knowledge: Knowledge | None = None
        self.untaught: HebbianSoftmax | None = None
        """The Hebbian head that every lesson begins with a copy of."""
        self.own = torch.empty(0)
        """The activations (known classes, features) of one test drawing of each class."""
        self.lessons: dict[str, Lesson] = {}
        self.locks: dict[str, threading.Lock] = {}

    def prepare(self, load: Load, steps: int, seed: int) -> None:
        """Get the images and the network ready, and tell the server what there is."""
        torch.set_num_threads(1)  # steps this small gain little from more, and on a busy computer they lose much
        try:
            self._tell("preparing the images", 0, 1)
            known, unseen = divide(load())
            knowledge = prepare(known, steps, seed, self._tell_training)
            self.untaught = hebbian_head(knowledge)
            rehearse(knowledge, self.untaught, known.test[0, 0])
            self.own = torch.cat([knowledge.embed(drawings) for drawings in known.test[:, 0].split(100)])
        except (LabError, OSError) as error:
            self.channel.send({"event": "failed", "error": str(error)})
            return
        self.knowledge = knowledge
        self.channel.send({"event": "ready", **describe(known, unseen)})

    def _tell_training(self, done: int, total: int) -> None:
        if done % TOLD_EVERY == 0 or done == total:
            self._tell("training the network, once", done, total)

    def _tell(self, stage: str, done: int, total: int) -> None:
        self.channel.send({"event": "progress", "stage": stage, "done": done, "total": total})

    def answer(self, request: Message) -> None:
        """Carry out one request and send the answer."""
        number = request.pop("number")
        try:
            found = self.carry_out(**request)
        except LessonError as error:
            found = {"error": str(error), "status": 409}
        except Exception as error:  # one visitor's mishap must not end the others' lessons
            say(f"hebbian: error: {reason(error)}")
            found = {"error": "something went wrong in the process that does the work", "status": 500}
        self.channel.send({**found, "number": number})

    def carry_out(self, act: str, session: str, **values: Any) -> Message:
        """Carry out an act in a lesson; the server has checked the values."""
        if self.knowledge is None:
            raise LessonError("the network is still being trained")
        torch.set_num_threads(1)  # of this thread: a single drawing is too little work for more
        with self.locks.setdefault(session, threading.Lock()):
            if act == "close":
                self.lessons.pop(session, None)
                self.locks.pop(session, None)
                return {}
            if session not in self.lessons:
                self.lessons[session] = Lesson(self.knowledge, self.untaught)
            if act == "review":
                return {"right": self.lessons[session].review(self.own), "of": len(self.own)}
            return perform(self.lessons[session], act, values)


def rehearse(knowledge: Knowledge, untaught: HebbianSoftmax, drawing: Tensor) -> None:
    """Teach a drawing in a lesson of nobody, so that the first visitor's time is not that of loading torch's parts."""
    for replay in (False, True):
        Lesson(knowledge, untaught).teach([Example("rehearsed", drawing, 1, replay)])


def perform(lesson: Lesson, act: str, values: dict[str, Any]) -> Message:
    """Carry out one act in a lesson, and return what the page needs to show it."""
    if act == "recognise":
        return {"answers": lesson.recognise(from_hex(values["drawing"]), values["taught_only"])}
    if act == "save":
        return {"taught": [to_record(each) for each in lesson.stage.examples]}
    found: Message = {}
    if act == "teach":
        found["milliseconds"] = lesson.teach([from_record(values)])
    elif act == "load":
        lesson.load([from_record(each) for each in values["taught"]])
    elif act == "forget":
        lesson.forget(values["name"])
    elif act == "rename":
        lesson.rename(values["name"], values["new_name"])
    elif act == "undo":
        lesson.undo()
    lesson_now = lesson.describe()
    for each in lesson_now["taught"]:
        each["drawings"] = [to_hex(drawing) for drawing in each["drawings"]]
    return {**found, **lesson_now}


def from_record(record: dict[str, Any]) -> Example:
    """Return the example that an entry of a saved lesson stands for."""
    return Example(record["name"], from_hex(record["drawing"]), record["steps"], record["replay"])


def to_record(example: Example) -> dict[str, Any]:
    """Return an example as an entry of a saved lesson."""
    drawing = to_hex(example.drawing)
    return {"name": example.name, "drawing": drawing, "steps": example.steps, "replay": example.replay}


def from_hex(text: str) -> Tensor:
    """Return the drawing (28, 28) that two hexadecimal digits for each pixel stand for."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).view(SIZE, SIZE)


def to_hex(drawing: Tensor) -> str:
    """Return a drawing as two hexadecimal digits for each pixel, row by row."""
    return bytes(drawing.flatten().tolist()).hex()


def describe(known: ImageSet, unseen: ImageSet) -> Message:
    """Return what the page shows of the images: names and pictures of known classes, and ready-made drawings."""
    pictures = base64.b64encode(known.images[:, 0].contiguous().numpy().tobytes()).decode()
    order = torch.randperm(len(unseen.images), generator=torch.Generator().manual_seed(0))[:CHARACTERS].tolist()
    ready_made = []
    for number in order:
        drawings = [to_hex(drawing) for drawing in unseen.images[number, :DRAWINGS]]
        ready_made.append({"name": short_name(unseen.class_names[number]), "drawings": drawings})
    names = [short_name(name) for name in known.class_names]
    return {"images": known.name, "known": names, "pictures": pictures, "ready_made": ready_made}


def short_name(name: str) -> str:
    """Return a class's name as the page shows it.

    >>> short_name("Early_Aramaic/character07"), short_name("AΑА"), short_name("12")
    ('Early Aramaic 7', 'A', '12')
    """
    alphabet, _, character = name.partition("/character")
    if character:
        return f"{alphabet.replace('_', ' ')} {int(character)}"
    return name if name.isdecimal() else name[:1]


def serve(load: Load, steps: int, seed: int) -> None:
    """Work until the server closes the pipe."""
    channel = Channel()
    classroom = Classroom(channel)
    threading.Thread(target=classroom.prepare, args=(load, steps, seed), daemon=True).start()
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    for request in channel.messages():
        pool.submit(classroom.answer, request)
    channel.end()


def main() -> None:
    settings = object_from_json(sys.argv[1])
    source = next(each for each in SOURCES if each.name == settings["images"])
    options = {"data_root": settings["data_root"]} if settings["images"] == "omniglot" else {}
    serve(lambda: source.load(source.settings(**options), True), settings["steps"], settings["seed"])


if __name__ == "__main__":
    main()
