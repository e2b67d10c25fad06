"""Settings as options of a command, as values of a file, and back."""

import argparse
from dataclasses import dataclass, make_dataclass

import pytest

from hebbian_softmax.lab.base.settings import (
    Former,
    add_options,
    as_options,
    from_values,
    given_options,
    integer,
    number,
    setting,
    whole_or_auto,
)


@dataclass(frozen=True)
class Settings:
    steps: int = setting(100, "training steps", integer(1))
    learning_rate: float = setting(0.5, "of the optimizer", number(0))
    gamma: float = setting(0.1, "mixing rate", number(0, 1))


@dataclass(frozen=True)
class Switched:
    tied: bool = setting(True, "in %d of 100 %")


@pytest.mark.parametrize(
    ("words", "value"),
    [("--tied", True), ("--tied yes", True), ("--tied no", False), ("--no-tied", False), ("--no-tied no", True)],
)
def test_a_switch_takes_a_word_or_none(words: str, value: bool) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Switched)
    assert given_options(parser.parse_args(words.split()), Switched) == {"tied": value}
    assert given_options(parser.parse_args([]), Switched) == {}


def test_a_switch_refuses_other_words_and_shows_per_cent_signs(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Switched)
    assert "in %d of 100 % (default: yes)" in " ".join(parser.format_help().split())
    with pytest.raises(SystemExit):
        parser.parse_args(["--tied", "maybe"])
    assert "must be yes or no, not 'maybe'" in capsys.readouterr().err


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    return parser


def test_only_what_was_given_counts_as_given(parser: argparse.ArgumentParser) -> None:
    assert given_options(parser.parse_args([]), Settings) == {}
    given = given_options(parser.parse_args(["--learning-rate", "0", "--steps", "100"]), Settings)
    assert given == {"learning_rate": 0.0, "steps": 100}
    assert Settings(**given) == Settings(steps=100, learning_rate=0.0, gamma=0.1)


@pytest.mark.parametrize(
    ("field", "shown"),
    [
        (setting(100, "training steps", integer(1)), "--field N training steps (default: 100)"),
        (setting("", "a folder (default: this one)", str), "--field TEXT a folder (default: this one)"),
        (setting(5.0, "in %d of 100 %", number(0)), "--field NUMBER in %d of 100 % (default: 5.0)"),
    ],
)
def test_the_help_names_the_default_unless_it_is_empty(field: object, shown: str) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, make_dataclass("Settings", [("field", object, field)]))
    assert " ".join(parser.format_help().split()).endswith(shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: must be a whole number from 1 "),
        (["--steps", "1.5"], "not '1.5'"),
        (["--steps", "99999999999"], "whole number"),
        (["--gamma", "1.01"], "--gamma: must be a number from 0 to 1, not '1.01'"),
        (["--gamma", "nan"], "not 'nan'"),
        (["--learning-rate", "inf"], "must be a number from 0 up"),
        (["--learning-rate", "fast"], "not 'fast'"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(
    parser: argparse.ArgumentParser, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@dataclass(frozen=True)
class Changed:
    steps: int = setting(100, "training steps", integer(1), later=True)
    gamma: float = setting(0.2, "mixing rate", number(0, 1), before=0.1)
    fade: bool = setting(True, "whether it fades", before=False)
    write: str = setting("across", "what is written", str, former=Former("center", lambda text: f"center {text}"))


def test_older_values_keep_their_meaning() -> None:
    assert from_values(Changed, {"center": True}) == Changed(100, 0.1, False, "center True")
    assert from_values(Changed, {"center": "no", "gamma": 0.3, "fade": "yes"}) == Changed(100, 0.3, True, "center no")
    assert from_values(Changed, vars(Changed())) == Changed()
    with pytest.raises(ValueError, match="other settings: write"):
        from_values(Changed, {})


def test_settings_come_back_from_their_values_and_options(parser: argparse.ArgumentParser) -> None:
    settings = Settings(steps=7, learning_rate=0.25)
    assert from_values(Settings, vars(settings)) == settings
    assert as_options(settings) == ["--steps", "7", "--learning-rate", "0.25"]
    assert given_options(parser.parse_args(as_options(settings)), Settings) == {"steps": 7, "learning_rate": 0.25}
    with pytest.raises(ValueError, match="steps must be a whole number"):
        from_values(Settings, {**vars(settings), "steps": True})
    with pytest.raises(ValueError, match="other settings: gamma, limit"):
        from_values(Settings, {"steps": 7, "learning_rate": 0.25, "limit": 3})


def test_a_whole_number_or_auto_names_both_where_it_is_neither() -> None:
    assert (whole_or_auto("auto"), whole_or_auto("0")) == ("auto", 0)
    with pytest.raises(argparse.ArgumentTypeError, match=r"a whole number from 0 .* not 'foo'; auto is possible, too"):
        whole_or_auto("foo")
