"""The settings of a recipe: one dataclass whose fields are the options of the command and the entries of config.json.

>>> @dataclasses.dataclass(frozen=True)
... class Settings:
...     steps: int = setting(100, "training steps", integer(1))
>>> parser = argparse.ArgumentParser()
>>> add_options(parser, Settings)
>>> given_options(parser.parse_args(["--steps", "7"]), Settings)
{'steps': 7}
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

METAVARS = {int: "N", float: "NUMBER", tuple: "VALUES"}
REQUIRED: Any = dataclasses.MISSING
"""The default of a setting that has none: its option must be given."""


@dataclasses.dataclass(frozen=True)
class Former:
    """An older name of a setting, and how the text of its value there is turned into the text of a value now."""

    name: str
    convert: Callable[[str], str]


def setting(
    default: Any,
    help: str,
    parse: Callable[[str], Any] | None = None,
    later: bool = False,
    metavar: str = "",
    before: Any = None,
    former: Former | None = None,
) -> Any:
    """Declare a field of a settings dataclass.

    `parse` turns the option's text into a value or refuses it. A field whose default is True or False needs none: it
    is a `Switch`. Set `later` on a setting that older runs do not have: they go on with its default, which must be
    what they did. Where the default is something else, `before` is what they did. Older runs may also have the setting
    under a `former` name. `metavar` stands for the value in the help text.
    """
    if isinstance(default, bool):
        parse = boolean
    assert parse is not None, "only a setting that is True or False can do without parse"
    metadata = {"help": help, "parse": parse, "later": later, "metavar": metavar, "before": before, "former": former}
    return dataclasses.field(default=default, metadata=metadata)


def add_options(parser: argparse._ActionsContainer, settings: type, rename: Callable[[str], str] = str) -> None:
    """Give a parser, or a group in it, one option for each field. `rename` turns a field's name into the option's."""
    for field in dataclasses.fields(settings):
        # Where the default is empty, the help text itself says what that means.
        default = f" (default: {_as_text(field.default)})" if field.default not in ("", REQUIRED) else ""
        if isinstance(field.default, bool):
            form: dict[str, Any] = {"action": Switch}
        else:
            metavar = field.metadata["metavar"] or METAVARS.get(type(field.default), "TEXT")
            form = {"type": field.metadata["parse"], "required": field.default is REQUIRED, "metavar": metavar}
        help = f"{field.metadata['help']}{default}".replace("%", "%%")
        parser.add_argument(option_name(rename(field.name)), help=help, **form)


class Switch(argparse.Action):
    """An option that is on or off: `--tied` or `--no-tied`, and with a word `--tied yes` or `--tied no`."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        (on,) = option_strings
        super().__init__([on, f"--no-{on[2:]}"], dest, nargs="?", metavar="yes|no", help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            value = values is None or boolean(values)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        setattr(namespace, self.dest, value == (option_string == self.option_strings[0]))


def given_options(arguments: argparse.Namespace, settings: type, rename: Callable[[str], str] = str) -> dict[str, Any]:
    """Return the settings given on the command line; the others keep their defaults or a resumed run's values."""
    values = {field.name: getattr(arguments, rename(field.name)) for field in dataclasses.fields(settings)}
    return {name: value for name, value in values.items() if value is not None}


def from_values(settings: type, values: Mapping[str, Any]) -> Any:
    """Make settings from a file's values under the rules of the command line; a ValueError says what is wrong."""
    fields = dataclasses.fields(settings)
    values = {**_values_before(fields), **values}
    for field in fields:
        former: Former | None = field.metadata["former"]
        if former is not None and former.name in values:
            values[field.name] = _parsed(former.name, former.convert, values.pop(former.name))
    if (names := {field.name for field in fields}) != set(values):
        raise ValueError(f"other settings: {', '.join(sorted(names ^ set(values)))}")
    return settings(
        **{field.name: _parsed(field.name, field.metadata["parse"], values[field.name]) for field in fields}
    )


def _parsed(name: str, parse: Callable[[str], Any], value: Any) -> Any:
    try:
        return parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name} {error}") from error


def _values_before(fields: Sequence[dataclasses.Field[Any]]) -> dict[str, Any]:
    """Return what runs did that were begun before there were some of the settings."""
    found = {field.name: field.default for field in fields if field.metadata["later"]}
    return found | {field.name: field.metadata["before"] for field in fields if field.metadata["before"] is not None}


def as_options(settings: Any) -> list[str]:
    """Return the words of the command line that give these settings; those at their defaults need none."""
    words = []
    for field in dataclasses.fields(settings):
        if (value := getattr(settings, field.name)) != field.default:
            words += (
                [option_name(field.name, value)] if isinstance(value, bool) else [option_name(field.name), typed(value)]
            )
    return words


def option_name(field: str, value: bool = True) -> str:
    """Return the option of a field, or the one that turns it off.

    >>> option_name("layer_norm"), option_name("tied", False)
    ('--layer-norm', '--no-tied')
    """
    return ("--" if value else "--no-") + field.replace("_", "-")


def typed(value: Any) -> str:
    """Return a value as one types it.

    >>> typed(3.0), typed(0.004), typed("auto")
    ('3', '0.004', 'auto')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _as_text(value: Any) -> str:
    if type(value) is tuple:
        return ",".join(f"{each:g}" for each in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def boolean(text: str) -> bool:
    """Parse yes, no, true or false."""
    values = {"yes": True, "true": True, "no": False, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"must be yes or no, not {text!r}")
    return values[text.lower()]


def whole_or_auto(text: str) -> int | str:
    """Parse `auto` or a whole number."""
    if text == "auto":
        return text
    try:
        return integer(0)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; auto is possible, too") from None


def integer(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a parser of whole numbers from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"must be a whole number from {minimum} to {maximum}, not {text!r}")
        return value

    return parse


def multiple(of: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a parser of positive multiples of `of`."""

    def parse(text: str) -> int:
        value = integer(1, maximum)(text)
        if value % of:
            raise argparse.ArgumentTypeError(f"must be a multiple of {of}, not {text!r}")
        return value

    return parse


def several(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of different values with commas between them."""

    def parse_all(text: str) -> tuple[Any, ...]:
        values = tuple(parse(part.strip()) for part in text.split(","))
        if len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"must be different values, not {text!r}")
        return values

    return parse_all


def choice(*names: str) -> Callable[[str], str]:
    """Return a parser of one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, not {text!r}")
        return text

    return parse


def positive(text: str) -> float:
    """Parse a number above 0."""
    value = number(0)(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text!r}")
    return value


def number(minimum: float, maximum: float = math.inf) -> Callable[[str], float]:
    """Return a parser of finite numbers from `minimum` to `maximum`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (minimum <= value <= maximum and math.isfinite(value)):
            bounds = f"from {minimum:g} up" if maximum == math.inf else f"from {minimum:g} to {maximum:g}"
            raise argparse.ArgumentTypeError(f"must be a number {bounds}, not {text!r}")
        return value

    return parse
