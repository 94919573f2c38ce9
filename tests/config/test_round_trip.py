# SPDX-License-Identifier: Apache-2.0
"""Values of flags → a command line or a file → the same values, for every command: what a launcher tells its
processes, and what the config.yaml of a run says.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.cli import COMMANDS
from dschat.settings.files import ConfigFile, read_file
from dschat.settings.flags import Flag, flags_of
from dschat.settings.parse import _merge, as_yaml, resolve, to_yaml
from dschat.settings.parser import FlagParser
from dschat.settings.words import as_words, kind_of
from flag_cases import FAMILIES, REQUIRED, config_of

NASTY = [
    "",
    " ",
    "-",
    "--",
    "-x",
    "--seed",
    "--seed=3",
    "a b",
    "a,b",
    "a: b",
    "'",
    '"',
    "\\",
    "# x",
    "a #b",
    "@a",
    "a=b",
]
NASTY += [
    "two\nlines",
    "tab\t",
    "\r\n",
    "null",
    "~",
    "none",
    "true",
    "off",
    "010",
    "1e-6",
    ".inf",
    "[a]",
    "{a: b}",
    "!!x",
]
NASTY += [
    "${HOME}",
    "$HOME",
    "$$",
    "$${x}",
    "${",
    "${a ${HOME}",
    "~/x",
    "~nobody",
    "Ω→é",
    "\U0001f600",
    "\u2028",
    "%h %n",
    "<|im_end|>",
]
NASTY += ["&amp; `id` $(id)", "a;b", "-1", "-1e-6", "*", "?", "| x", "> x", "&x", "*x", "%", "...", "---", "x\n...\ny"]
TEXTS = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]))
EXAMPLES = 8  # of each command
NUMBERS = st.sampled_from([0.0, 1e-6, 1.5e-5, -1e-6, 0.1, 1 / 3, math.inf, -math.inf, 1e22]) | st.floats(
    allow_nan=False
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    Path: TEXTS.map(Path),
    int: st.integers(),
    float: NUMBERS,
    bool: st.booleans(),
}


def values_of(flag: Flag) -> st.SearchStrategy[Any]:
    """Values that a command line can give a flag."""
    kind, several, convert = kind_of(flag.type)
    choices = flag.options.get("choices") or (get_args(kind) if get_origin(kind) is Literal else ())
    if choices:
        values = st.sampled_from([convert(str(choice)) for choice in choices])
    elif kind in PLAIN and convert is kind or kind is bool:
        values = PLAIN[kind]
    elif kind in (int, float):
        values = st.sampled_from(["1", "7", "none"] if convert.__name__ == kind.__name__ else ["1", "7"]).map(convert)
    else:
        values = TEXTS.map(convert)
    if flag.path and flag.default is None:
        values = values.filter(bool)  # a path may be left out, and not be empty
    if several:
        empty = flag.options.get("nargs") == "*" or flag.default == []
        return st.lists(values, min_size=0 if empty else 1, max_size=4)
    return values


def all_values(flags: type, positional: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the flags of a command, each with a value."""
    own = [flag for flag in flags_of(flags).values() if positional or not flag.positional]
    values = {flag.name: values_of(flag) for flag in own}
    if not values:
        return st.just({})
    required = {flag.name for flag in own if flag.positional}
    for name in required:  # two dashes alone are what ends the flags
        values[name] = values[name].filter(lambda value: str(value) != "--")
    names = st.sets(st.sampled_from(sorted(values)), min_size=1, max_size=6)
    return names.flatmap(lambda some: st.fixed_dictionaries({name: values[name] for name in {*some, *required}}))


def comparable(flags: type, values: dict[str, Any]) -> dict[str, Any]:
    """Lists as lists, and without what says None where that is the default: it need not be said."""
    unset = {name for name, flag in flags_of(flags).items() if flag.default is None}
    given_values = {name: value for name, value in values.items() if not (value is None and name in unset)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given_values.items()}


def takes_bare_words(flags: type) -> bool:
    return any(flag.positional for flag in flags_of(flags).values()) or hasattr(flags, "other_words")


def checked(flags: type, values: st.SearchStrategy[dict[str, Any]], check: Callable[[dict[str, Any]], None]) -> None:
    settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)(given(values)(check))()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_says_any_values(command):
    flags = COMMANDS[command].flags_class()
    # Beside words without dashes a flag has no value: one that is off by default is off when it is not given.
    off = (
        {name for name, flag in flags_of(flags).items() if flag.default is False} if takes_bare_words(flags) else set()
    )

    parser = FlagParser(flags)

    def check(values):
        given_values, other_words = parser.read(as_words(flags, values))
        found, _ = _merge(flags, parser, ConfigFile({}, {}, {}), given_values)
        expected = {name: value for name, value in values.items() if not (name in off and value is False)}
        assert comparable(flags, found) == comparable(flags, expected) and other_words == []

    checked(flags, all_values(flags, positional=True), check)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_says_any_values(command, tmp_path):
    flags = COMMANDS[command].flags_class()
    path, parser = tmp_path / "flags.yaml", FlagParser(flags)

    def check(values):
        path.write_text(as_yaml(flags, values, dict.fromkeys(values, "here")), encoding="utf-8")
        assert len(path.read_text("utf-8").split("\n")) == len(values) + 1  # a line for each
        found, _ = _merge(flags, parser, read_file(str(path), command, {}), {})
        assert comparable(flags, found) == comparable(flags, values)

    checked(flags, all_values(flags, positional=False), check)


@pytest.mark.parametrize("step", FAMILIES)
def test_the_words_for_a_launchers_processes(step, tmp_path, monkeypatch):
    """Of the file that a run without trackers left, and of one with surprising texts."""
    monkeypatch.chdir(tmp_path)
    odd = ["-rows.jsonl", "--seed", "a b.jsonl", "$x", "~/é", 'l\'é "x"\nb']
    for flags in (
        [],
        ["--end_of_conversation_token=<|im_end|>", "--no_self_checks", "--chosen_key=--x", "--prompt_key= "],
    ):
        config = config_of(step, flags)
        if flags:
            config = config.changed(data_path=odd)
        Path("config.yaml").write_text(to_yaml(config), encoding="utf-8")
        told = resolve(FAMILIES[step], ["--config", "config.yaml"], runs_here=False)
        assert told.config == config and "--report_to" in told.words()
        assert resolve(FAMILIES[step], told.words(), runs_here=False).config == config


def test_a_default_that_a_file_takes_back():
    """64000 pairs unless a file says otherwise: none is not a number of pairs, and not the default."""
    config = config_of("refuel", "--total_episodes none")
    assert config.regression.total_episodes is None and "total_episodes: none\n" in to_yaml(config)
    told = resolve(FAMILIES["refuel"], [*REQUIRED["refuel"], "--total_episodes", "none"])
    assert resolve(FAMILIES["refuel"], told.words()).config == told.config
