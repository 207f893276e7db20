"""The command line: options reach the functions, an error is one line, help texts are complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mgk.data
import mgk.train
from mgk import cli
from mgk.cli import demo
from mgk.train import Result
from mgk.train import config as configuration
from mgk.train.learner import Learner

LISTOPS = "--sizes 60 20 20 --lengths 6 30 --depth 3 --arguments 4"
SMALL = (
    "--data.options sizes=[60,20,20] lengths=[6,30] depth=3 arguments=4 --model.max-length 32 --model.layers 1 "
    "--model.width 16 --data.batch 4 --steps 4 --eval-every 2 --log-every 1 --optimiser.warmup 1 --workers 0 "
    "--device cpu"
)


def run(command: str) -> int:
    return cli.main(command.split())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    assert run(f"data prepare listops --root {root} {LISTOPS}") == 0
    return root


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"mgk {mgk.__version__}\n"


def test_from_data_to_trained_model_and_table(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = f"{SMALL} --data-root {root}"
    assert run(f"train lra-listops {common} --model.attention mgk --model.heads 2 --seed 3") == 0
    assert "written to runs/lra-listops-mgk-2-3" in capsys.readouterr().out
    written = configuration.read(tmp_path / "runs/lra-listops-mgk-2-3/config.json")
    assert (written.model.attention, written.model.heads, written.seed, written.steps) == ("mgk", 2, 3, 4)
    assert run(f"eval runs/lra-listops-mgk-2-3 --data-root {root} --device cpu --split dev") == 0
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "dev" in shown
    assert run(f"compare lra-listops {common} --attentions softmax:2 smgk:1 --seeds 2 --out grid") == 0
    shown = capsys.readouterr().out
    assert "| softmax:2 |" in shown
    assert "±" in shown
    assert len(json.loads((tmp_path / "grid/comparison.json").read_text())["rows"]) == 2


def test_paper_changes_defaults_that_options_still_override(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def train(config: Any, out: Path, **options: object) -> Result:
        seen.append(config)
        return Result(str(out), True, 0, 0)

    monkeypatch.setattr(mgk.train, "train", train)
    assert run("train lra-text --paper --model.heads 8") == run("train lra-text") == 0
    paper, sound = seen
    assert (paper.model.pooling, paper.data.valid, paper.model.heads) == ("padded", "test", 8)
    assert (sound.model.pooling, sound.data.valid, sound.model.heads) == ("mean", "dev", 4)


def test_a_stopped_run_says_so_and_resume_continues_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"train lra-listops {SMALL} --data-root {root} --out {tmp_path / 'run'}"
    update = Learner.update

    def interrupted(self: Learner, step: int, batch: Any) -> None:
        update(self, step, batch)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", interrupted)
        assert run(command) == 128 + signal.SIGTERM
    assert "stopped at step 1; continue with" in capsys.readouterr().err
    assert run(command) == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert run(f"{command} --resume --model.heads 1") == 2
    assert "model.heads: the run in" in capsys.readouterr().err
    assert run(f"{command} --resume") == 0


def test_data_is_listed_and_verified(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"data list --root {root}") == 0
    lines = capsys.readouterr().out.splitlines()
    for name in mgk.data.names():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert ("prepared" in line.split()[1]) == (name == "listops")
    assert run(f"data verify --root {root}") == 0
    assert "train 60, dev 20, test 20" in capsys.readouterr().out


def test_verify_finds_a_changed_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"data prepare listops --root {tmp_path} {LISTOPS}") == 0
    array = next(tmp_path.glob("*/train.tokens.npy"))
    content = bytearray(array.read_bytes())
    content[-1] ^= 1
    array.write_bytes(content)
    assert run(f"data verify --root {tmp_path}") == 1
    error = capsys.readouterr().err
    assert "is damaged" in error
    assert error.count("\n") == 1
    advised = error.split("type: mgk ")[1].strip()  # a command that prepares this very set again
    assert run(f"{advised} --root {tmp_path}") == 0
    assert run(f"data verify --root {tmp_path}") == 0


def test_demo_shows_every_variant_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "LISTOPS", demo.LISTOPS | {"sizes": (60, 20, 20)})
    monkeypatch.setattr(demo, "SEEDS", 1)
    assert run(f"demo --steps 3 --out {tmp_path}") == 0
    shown = capsys.readouterr().out
    for word in (*demo.VARIANTS, "| softmax:4 |", "| softmax:2 |", "| smgk:2    |", "comparison.md", "report.html"):
        assert word in shown
    assert (tmp_path / "steps-3" / "comparison.md").exists()
    monkeypatch.chdir(tmp_path)  # `explore` writes its page there
    commands = [line.removeprefix("mgk ") for line in shown.splitlines() if line.startswith("mgk ")]
    assert [run(command) for command in commands] == [0, 0]
    assert run(f"demo --steps 3 --out {tmp_path}") == 0  # nothing is left to train


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="expected the folder of a run"):
        cli.main(["eval", "nowhere", "--debug"])


def test_ctrl_c_prints_no_error_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parse", lambda arguments: stop)
    assert cli.main([]) == 130
    assert capsys.readouterr().err == ""


def test_python_m_mgk_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "mgk", "--help"], capture_output=True, text=True, check=True)
    assert "bench" in done.stdout
    assert "train" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("library", ["rich", "safetensors"])
def test_without_its_libraries_the_command_line_says_what_to_install(library: str) -> None:
    program = f"import sys\nsys.modules['{library}'] = None\nimport mgk.cli"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("mgk: error: ")
    assert done.stderr.endswith(": pip install 'mgk[train]'\n")
    assert library in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("library", "extra"), cli.EXTRAS.items())
def test_a_missing_library_of_an_extra_is_named(
    library: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    monkeypatch.setattr(cli, "parse", lambda arguments: fail)
    assert cli.main([]) == 1
    assert capsys.readouterr().err == f"mgk: error: No module named {library!r}: pip install 'mgk[{extra}]'\n"


def test_the_library_imports_without_rich() -> None:
    """It may be missing on GPU images; only the command line needs it."""
    program = (
        "import sys\nsys.modules['rich'] = None\n"
        "import mgk.data, mgk.models, mgk.train, mgk.recipes, benchmarks.train\n"
        "from mgk.train.progress import Progress\nProgress('x', 3).show(3, loss=1.0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
