"""The head that the settings ask for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hebbian_softmax import ConstantRate, HebbianSoftmax, InclusiveRate, InverseCountRate, PaperRate
from hebbian_softmax.rule import Rate

if TYPE_CHECKING:
    from hebbian_softmax.lab.language.settings import Settings

RATES: dict[str, Callable[[float, int], Rate]] = {
    "paper": PaperRate,
    "inclusive": InclusiveRate,
    "constant": ConstantRate,
    "inverse": lambda gamma, limit: InverseCountRate(limit),
}
"""λ from γ and T (section 3.1); all end at T."""
OBJECTIVES = ("l2", "ip", "svm", "smax")


def make_head(settings: "Settings", vocabulary: int) -> HebbianSoftmax:
    """One class for both: a plain softmax is a head that is given nothing to remember."""
    return HebbianSoftmax(
        settings.sizes.embedding,
        vocabulary,
        gamma=settings.gamma,
        limit=settings.limit,
        rate=RATES[settings.rate](settings.gamma, settings.limit),
        dropout=settings.output_dropout,
        objective=settings.objective,
        scale="match" if settings.rule_scale == "match" else float(settings.rule_scale),
        center=settings.center == "yes",
    )
