"""Help texts: every option has a description, and a page fits on a screen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mgk.data
from mgk import cli, recipes
from mgk.cli import data
from mgk.cli.options import options_of
from mgk.cli.parsing import Command
from mgk.recipes import RECIPES
from mgk.train import config as configuration

COMMANDS = [*(name for name in cli.COMMANDS if name != "data"), *(f"data {name}" for name in data.COMMANDS)]
SCREEN = 45  # lines
SETTINGS = 60  # lines of the settings of a model, for which users ask by name


@pytest.fixture(autouse=True)
def _a_terminal_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def shown_by(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_python_call_on_one_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by([*command.split(), "--help"], capsys)
    assert "In Python:" in shown
    assert len(shown.splitlines()) <= SCREEN
    assert all(len(line) <= 100 for line in shown.splitlines())


@pytest.mark.parametrize(("words", "commands"), [([], cli.COMMANDS), (["data"], data.COMMANDS)])
def test_help_of_a_group_lists_its_commands(
    words: list[str], commands: dict[str, Command], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = " ".join(shown_by([*words, "--help"], capsys).split())
    for name, command in commands.items():
        assert f" {name} {' '.join(command.summary.split())}" in shown


def pages() -> Iterator[str]:
    for name in mgk.data.names():
        yield f"data prepare {name} --help"
    for name in RECIPES:
        yield f"train {name} --help"
    for page in ("model", "data", "optimiser", "save", "run"):
        yield f"train lm --help {page}"
    yield "compare lm --help"


@pytest.mark.parametrize("command", list(pages()))
def test_pages_fit_and_describe_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown_by(command.split(), capsys).splitlines()
    assert len(lines) <= (SETTINGS if command.endswith("model") else SCREEN)
    assert all(len(line) <= 100 for line in lines)
    options = [line for line in lines if line.startswith("  --")]
    assert options
    for line in options:
        name, _, text = line.strip().partition("  ")
        assert text.strip(), name
        assert "None" not in name


def test_every_option_of_every_command_is_described() -> None:
    for command in cli.COMMANDS.values():
        run = getattr(command.parse, "args", None)
        for option in options_of(run[0], {}) if run else ():
            assert option.text, option.flag


def test_help_of_train_names_every_recipe_and_of_a_recipe_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by(["train", "--help"], capsys)
    assert all(name in shown for name in RECIPES)
    for name in ("lra-text", "lm", "cifar10"):
        shown = shown_by(["train", name, "--help", "all"], capsys)
        for field in configuration.flatten(recipes.recipe(name)):
            if field not in ("model.kind", "recipe"):
                assert f"{field.replace('_', '-')} " in shown
    assert "Attention heads [4]" in shown_by(["train", "lra-text", "--help"], capsys)
