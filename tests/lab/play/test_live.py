"""The curriculum that somebody watches."""

import threading
import time

import pytest
import torch

from hebbian_softmax import PaperRate
from hebbian_softmax.lab.images.compare import SOURCES
from hebbian_softmax.lab.images.curriculum import CurriculumSettings
from hebbian_softmax.lab.images.data import TEST_DRAWINGS, ImageSource
from hebbian_softmax.lab.images.learner import Learner, Method
from hebbian_softmax.lab.play.live import Hardest, Orders, settings_of, watch
from hebbian_softmax.lab.play.process import Message
from tests.lab.images.toys import toy_set

DATA = toy_set(classes=40, size=16)


class Heard:
    """Stands for the pipe to the server, and keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def test_every_check_is_sent() -> None:
    heard = Heard()
    watch(heard, DATA, CurriculumSettings(steps=50, filters=4, device="cpu"), Orders())  # type: ignore[arg-type]
    started, *checks, finished = heard.messages
    assert started == {"event": "started", "steps": 50, "start": 30}
    assert finished == {"event": "finished"}
    assert [check["step"] for check in checks] == [25, 50]
    for check in checks:
        for head in ("plain", "hebbian"):
            found = check["heads"][head]
            assert 30 <= found["classes"] <= 40
            assert 0 <= found["accuracy"] <= 1
            shares = [each["accuracy"] for each in found["hardest"]]
            assert len(shares) == 5
            assert shares == sorted(shares)
            assert shares[0] <= found["accuracy"] or shares[0] < 1


def test_the_hardest_classes_are_those_recognised_least() -> None:
    learner = Learner(DATA, Method(hebbian=False), 0, filters=4)
    hardest = Hardest(learner, DATA)
    learner.recognised.copy_(torch.full((40,), TEST_DRAWINGS))
    learner.recognised[7], learner.recognised[3] = 0, 1
    hardest.see(30)
    worst, next_worst, third, *_ = hardest.names(30)
    assert worst["name"] == DATA.class_names[int(learner.order[7])]
    assert (worst["accuracy"], round(next_worst["accuracy"], 6), third["accuracy"]) == (0, 0.2, 1)


def test_orders_are_obeyed() -> None:
    orders, heard = Orders(), Heard()
    learner = Learner(DATA, Method(hebbian=True), 0, filters=4)
    orders.follow({"act": "change", "gamma": 0.3, "limit": 7})
    orders.change(learner)
    assert learner.head.rate == PaperRate(0.3, 7)
    orders.follow({"act": "pause"})
    settings = CurriculumSettings(steps=25, filters=4, device="cpu")
    thread = threading.Thread(target=watch, args=(heard, DATA, settings, orders), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not heard.messages:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    assert [message["event"] for message in heard.messages] == ["started"]
    orders.follow({"act": "resume"})
    thread.join(60)
    assert [message["event"] for message in heard.messages] == ["started", "check", "finished"]


@pytest.mark.parametrize("source", SOURCES, ids=[source.name for source in SOURCES])
def test_the_curriculum_has_the_rule_of_the_page_and_the_rate_asked_for(source: ImageSource) -> None:
    given = {"images": source.name, "data_root": "here", "steps": 50, "gamma": 0.15, "limit": 60, "seed": 3}
    found = settings_of(source, given)
    assert (found.write, found.start, found.fade) == ("centred", 0, False)
    assert (found.gamma, found.limit, found.steps, found.seed) == (0.15, 60, 50, 3)
