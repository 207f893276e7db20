"""Wrong usage: one line that says what was expected, what came and what to do; exit status 2, and 1 for a failure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mgk.cli as cli

RAW = re.compile(r"\[Errno|invalid literal|could not convert|Missing from|Traceback|\{None\}|Error parsing")

USAGE = [
    # Commands
    ("", "command: expected one of train, eval, compare, data, generate, convert, explore, figures, bench, demo"),
    ("nonsense", "got 'nonsense'"),
    ("trian lra-text", "did you mean train?"),
    ("--verison", "command: expected one of"),
    ("data", "command: expected one of list, prepare, verify, got nothing; see mgk data --help"),
    ("data prepair text", "got 'prepair'; did you mean prepare?"),
    # Names
    ("train", "RECIPE: expected a name after `mgk train`, got nothing; see mgk train --help"),
    ("train --seed 3", "RECIPE: expected a name after `mgk train`, got --seed"),
    ("train lra-txt", "did you mean lra-text?"),
    ("train cifar10 --paper", "expected a recipe of the Long Range Arena, got cifar10"),
    ("compare", "RECIPE: expected a name after `mgk compare`, got nothing"),
    ("data prepare", "NAME: expected a name after `mgk data prepare`, got nothing"),
    ("data prepare nonsense", "NAME: expected one of listops, imdb"),
    ("data prepare imbd", "did you mean imdb?"),
    # Options that do not exist
    ("train lra-text --model.hedas 3", "--model.hedas: no such option; did you mean --model.heads?"),
    ("train lra-text --model.atention smgk", "did you mean --model.attention?"),
    ("train lra-text --attention smgk", "--attention: no such option; did you mean --model.attention?"),
    ("train lra-text --lr 1", "did you mean --optimiser.lr?"),
    ("train lra-text --reusme", "did you mean --resume?"),
    ("train lra-text --no-reusme", "did you mean --no-resume?"),
    ("train lra-text --recipe lm", "--recipe: no such option"),
    ("train lra-text -x", "-x: no such option; see mgk train lra-text --help"),
    ("train lra-text --help modle", "--help: expected one of model, data, optimiser, run, save, all, got 'modle'"),
    ("generate model --no-sampel", "did you mean --no-sample?"),
    ("eval run --dataroot x", "did you mean --data-root?"),
    ("data prepare text notes.txt --bep 3", "--bep: no such option; did you mean --bpe?"),
    ("demo --step 3", "did you mean --steps?"),
    # Values of options
    ("train lra-text --steps many", "--steps: expected a whole number, got 'many'"),
    ("train lra-text --steps 2.5", "--steps: expected a whole number, got '2.5'"),
    ("train lra-text --steps=", "--steps: expected a whole number, got ''"),
    ("train lra-text --seed", "--seed: expected a whole number, got nothing"),
    ("train lra-text --seed --resume", "--seed: expected a whole number, got nothing"),
    ("train lra-text --data-root", "--data-root: expected a path, got nothing"),
    ("train lra-text --optimiser.lr fast", "--optimiser.lr: expected a number, got 'fast'"),
    ("train lra-text --optimiser.betas 1", "--optimiser.betas: expected 2 numbers, got 1: 1"),
    ("train lra-text --model.attention gauss", "expected one of softmax, linear, mgk, smgk, mlk, smlk, got 'gauss'"),
    ("train lra-text --device tpu", "--device: expected one of auto, cpu, cuda, got 'tpu'"),
    ("train lra-text --device mps", "Apple GPUs have no fused kernel of mixture attention, only the dense formula"),
    ("train lra-text --resume=yes", "--resume: expected no value, got 'yes'; --no-resume switches it off"),
    ("train lra-text --model.heads 0", "--model.heads: expected at least 1, got 0"),
    ("train lra-text --model.dropout 2", "--model.dropout: expected"),
    ("train lra-text --steps 0", "--steps: expected at least 1, got 0"),
    ("train lra-text --optimiser.lr -1", "--optimiser.lr: expected at least 0, got -1"),
    ("train lra-text --optimiser.warmup 30000", "--optimiser.warmup: expected at most steps = 20000, got 30000"),
    ("train lra-text --steps 20 --optimiser.warmup 30", "--optimiser.warmup: expected at most steps = 20, got 30"),
    ("train lra-text --data.options lengths --device cpu", "data.options: expected NAME=VALUE, got 'lengths'"),
    ("data prepare listops --sizes 3", "--sizes: expected 3 whole numbers, got 1: 3"),
    ("bench --shapes a,b", "--shapes: expected B,H,N,D or B,H,N,D,causal, got 'a,b'"),
    ("bench --rounds 0", "--rounds: expected at least 1, got 0"),
    ("bench --plan --gpu H100", "--gpu: expected a compute capability, e.g. 8.0, got 'H100'"),
    ("demo --steps -1", "steps: expected at least"),
    ("generate model --top-p 3", "--top-p: expected 0 to 1, got 3.0"),
    ("generate model --tokens 0", "--tokens: expected at least 1, got 0"),
    ("compare lra-text", "attentions: expected at least one"),
    ("compare lra-text --attentions", "--attentions: expected one or more texts, got nothing"),
    ("compare lra-text --attentions gauss:3", "attentions: expected VARIANT:HEADS"),
    # Arguments
    ("train lra-text smgk", "'smgk': not expected here; mgk train lra-text takes no arguments, only options"),
    ("generate", "RUN: expected folder of the model, got nothing; type: mgk generate RUN"),
    ("generate a b", "'b': not expected here; mgk generate takes RUN"),
    ("eval", "RUN: expected folder of the run, got nothing; type: mgk eval RUN"),
    ("data list all", "'all': not expected here"),
    ("convert", "PATHS: expected what to convert and the folder to write, got 0 paths"),
    ("convert a", "PATHS: expected what to convert and the folder to write, got 1 paths"),
    (
        "convert --from gpt2 out",
        "--from: expected one of --heads-to-mixtures, --drop and --pool with it, got 0 of them",
    ),
    # Files and folders
    ("eval nowhere", "nowhere: expected the folder of a run"),
    ("figures nowhere", "nowhere: expected the folder of a run"),
    ("generate nowhere", "nowhere: expected the folder of a run or of a model, found no config.json in it"),
    ("explore model --input missing.txt", "missing.txt: no such file or directory"),
    ("explore model --input model", "model: is a directory"),
    ("explore model --text a --input b", "--text, --input: expected one of them, got both"),
    (
        "train lra-text --out other --device cpu",
        "other: expected the folder of a run or an empty one, found other files",
    ),
    ("convert model other", "other: expected a new or empty folder, found files in it"),
    (
        "data verify --data-root nowhere",
        "--data-root: expected a folder with prepared data sets, found none in nowhere",
    ),
]
FAILURES = [
    ("train lra-text --data-root nowhere --device cpu", "type: mgk data prepare imdb"),
    ("data prepare cifar10 --root nowhere", "get cifar-10-python.tar.gz"),
    ("data prepare text notes.txt --data-root nowhere", "text: expected at least 10,000 bytes of text in notes.txt"),
    ("data prepare text missing.txt", "source: missing.txt does not exist"),
    ("data verify nonsense --root nowhere", "nonsense is not prepared"),
]


@pytest.mark.parametrize(
    ("command", "status", "says"), [*((c, 2, says) for c, says in USAGE), *((c, 1, says) for c, says in FAILURES)]
)
def test_an_error_is_one_line(
    command: str, status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MGK_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("MGK_RAW", raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.txt").write_text("short")
    (tmp_path / "other" / "file").write_text("short")
    try:
        found: object = cli.main(command.split())
    except SystemExit as stop:
        found = stop.code
    error = capsys.readouterr().err
    assert (found, error.count("\n")) == (status, 1), error
    assert error.startswith("mgk: error: ")
    assert says in error
    assert not RAW.search(error)


def test_a_short_run_shortens_its_warm_up_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MGK_DATA", str(tmp_path))
    action = cli.parse(["train", "lra-text", "--steps", "50"])
    config = action.keywords["config"]  # type: ignore[attr-defined]
    assert (config.steps, config.optimiser.warmup) == (50, 20)  # 8,000 of 20,000 in the recipe
    notice = "mgk: --optimiser.warmup: shortened from 8,000 to 20 steps, in proportion to --steps 50\n"
    assert capsys.readouterr().err == notice
    config = cli.parse(["train", "lra-text", "--steps", "9000"]).keywords["config"]  # type: ignore[attr-defined]
    assert config.optimiser.warmup == 8000
    assert capsys.readouterr().err == ""


def test_values_reach_the_configuration() -> None:
    words = (
        "train lra-text --model.num_kv_heads=2 --optimiser.betas 0.5 1e-1 --no-model.attention-bias --out -3 --resume "
        "--no-resume --data.options a=1 b=2 --seed 1 --seed 2"
    )
    given = cli.parse(words.split()).keywords  # type: ignore[attr-defined]
    config = given["config"]
    assert (config.model.num_kv_heads, config.optimiser.betas, config.model.attention_bias) == (2, (0.5, 0.1), False)
    assert (given["out"], given["resume"], config.data.options, config.seed) == (Path("-3"), False, ("a=1", "b=2"), 2)


def test_root_is_another_name_of_data_root(tmp_path: Path) -> None:
    for name in ("--root", "--data-root"):
        given = cli.parse(["data", "list", name, str(tmp_path)]).keywords  # type: ignore[attr-defined]
        assert given == {"data_root": tmp_path}


def test_an_error_shows_control_characters_as_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may quote a file of a stranger, which could command the terminal."""
    (tmp_path / "config.json").write_text('{"model": {"kind": "language", "a\\u001b[2J\\u0007": 1}}')
    assert cli.main(["eval", str(tmp_path)]) != 0
    error = capsys.readouterr().err
    assert "a\\x1b[2J\\x07: no such field" in error
    assert "\x1b" not in error


def test_an_error_of_the_system_has_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "runs/a")

    monkeypatch.setattr(cli, "parse", lambda words: full)
    assert cli.main([]) == 1  # no usage is wrong
    assert capsys.readouterr().err == "mgk: error: runs/a: no space left on device\n"
