"""What `hebbian reproduce omniglot` tries: the settings it tunes over, and the methods it compares beyond the paper."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product

from hebbian_softmax.lab.base.statistics import mean_and_spread
from hebbian_softmax.lab.images.curriculum import History
from hebbian_softmax.lab.images.learner import Method

PAPER_RATE = 8e-3
RATES = (1e-4, 4e-4, 1e-3, 4e-3, 8e-3, 1.6e-2, 4e-2)  # of the paper's figure on plain softmax's learning rate
TRIALS = 27  # settings tried for each head
SLOW = ("svm", "smax")  # objectives that no CUDA graph can hold


def plain_settings(count: int = TRIALS) -> list[Method]:
    """Plain softmax has its learning rate alone to tune: `count` of them from 1e-4 to 4e-2, the paper's range."""
    ratio = (4e-2 / 1e-4) ** (1 / max(1, count - 1))
    return [Method(hebbian=False, learning_rate=float(f"{1e-4 * ratio**number:.2g}")) for number in range(count)]


def hebbian_settings(count: int = TRIALS) -> list[Method]:
    """As many for the rule: learning rates that suit plain softmax, T, and the paper's γ; fewer are spread evenly."""
    grid = [
        Method(hebbian=True, learning_rate=rate, limit=limit, gamma=gamma)
        for rate, limit, gamma in product((2e-3, 4e-3, 8e-3), (30, 100, 300), (0.05, 0.1, 0.25))
    ]
    return [grid[number * len(grid) // count] for number in range(min(count, len(grid)))]


def best(outcomes: Mapping[Method, Iterable[History]], target: int, most: int) -> Method:
    """The method with the fewest steps to `target` classes, mean over seeds; who does not get there counts `most`.

    Among those where no seed got there, the one that reached most classes.
    """

    def score(method: Method) -> tuple[float, float]:
        histories = list(outcomes[method])
        steps = mean_and_spread([most if (taken := each.steps_to(target)) is None else taken for each in histories])[0]
        return steps, -mean_and_spread([each.reached for each in histories])[0]

    return min(outcomes, key=score)


def beyond(plain: Method, hebbian: Method) -> dict[str, tuple[str, Method]]:
    """By short name: the title, and the tuned settings with one thing changed; nothing is tuned again."""
    unlimited = 2**31 - 1
    return {
        "literal": ("literal rule: neither scale nor center", replace(hebbian, scale=1.0, center=False)),
        "scale": ("scale only", replace(hebbian, center=False)),
        "center": ("center only", replace(hebbian, scale=1.0)),
        "constant": ("constant λ = γ, for ever", replace(hebbian, rate="constant")),
        "inverse": ("pure λ = 1/c, for ever", replace(hebbian, rate="inverse")),
        "rule-only": ("rule only: rows get no gradient, no T", replace(hebbian, train_rows=False, limit=unlimited)),
        "ip": ("inner objective IP", replace(hebbian, objective="ip")),
        "svm": ("inner objective SVM", replace(hebbian, objective="svm")),
        "smax": ("inner objective Smax", replace(hebbian, objective="smax")),
        "imprinting": ("weight imprinting: first activation, then gradients only", replace(hebbian, limit=1)),
        "class-means": ("plain softmax trained, answers by nearest class mean", replace(plain, class_means=True)),
        "head-rate": ("plain softmax, 10× learning rate of the head", replace(plain, head_rate=10.0)),
        "extra-steps": (
            f"plain softmax, 3 more steps on classes seen fewer than {hebbian.limit} times",
            replace(plain, extra_steps=3, limit=hebbian.limit),
        ),
    }


def described(method: Method) -> str:
    """The settings that were tuned.

    >>> described(Method(hebbian=True))
    'learning rate 0.001, T 50, γ 0.1'
    """
    words = f"learning rate {method.learning_rate:g}"
    return f"{words}, T {method.limit}, γ {method.gamma:g}" if method.hebbian else words
