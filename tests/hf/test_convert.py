"""Conversion between runs and Transformers folders, and the commands for it."""

from __future__ import annotations

import filecmp
import functools
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import mgk.data
from mgk.cli.hf import convert, generate
from mgk.cli.parsing import read_options
from mgk.hf import hf_to_run, run_to_hf
from mgk.hf.tokenizer import byte_tokenizer, image_processing, tokenizer_of
from mgk.train import evaluate, load_model, train
from mgk.train.config import read, replace
from tests.hf.common import foreign, make, same_weights
from tests.recipes.common import TEXT, small

RECORD = ("config.json", "log.jsonl", "result.json")
SHORT: dict[str, Any] = {"steps": 4, "eval_every": 2, "log_every": 2, "optimiser__warmup": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A few steps of language models of bytes, of words and with a tokenizer, and of a classifier, with their data."""
    made = {}
    modern: dict[str, Any] = {"model__attention": "smgk", "model__vocabulary_multiple": 64}
    changed: dict[str, dict[str, Any]] = {
        "enwik8": {"model__attention": "softmax"},
        "wikitext2": {},
        "lra-text": {},
        "lm-nano-cpu": modern,
    }
    for name, changes in changed.items():
        root = tmp_path_factory.mktemp(name)
        train(replace(small(name, root), **SHORT, **changes), root / "run", data_root=root)
        made[name] = root
    return made


def same_runs(one: Path, two: Path) -> bool:
    return same_weights(load_model(one)[0], load_model(two)[0])


@pytest.mark.parametrize("name", ["enwik8", "wikitext2", "lra-text", "lm-nano-cpu"])
def test_converting_and_back_is_lossless(runs: dict[str, Path], name: str, tmp_path: Path) -> None:
    root = runs[name]
    folder = run_to_hf(root / "run", tmp_path / "hf", data_root=root, state=True)
    back = hf_to_run(folder, tmp_path / "back")
    assert same_runs(root / "run", back)
    assert all(filecmp.cmp(root / "run" / file, back / file, shallow=False) for file in RECORD)
    starts = [json.loads((run / "run.json").read_text())["starts"] for run in (root / "run", back)]
    assert [start.pop("data_root") for start in starts[0]] == [str(root.resolve())]  # a path of this machine
    assert starts[0] == starts[1]
    assert filecmp.cmp(root / "run/best/model.safetensors", back / "best/model.safetensors", shallow=False)
    one, two = (torch.load(run / "best/state.pt", weights_only=True) for run in (root / "run", back))
    assert str(one) == str(two)
    before, after = (evaluate(run, data_root=root, device="cpu") for run in (root / "run", back))
    assert {**before, "run": ""} == {**after, "run": ""}


def test_a_run_resumes_after_converting_back(tmp_path: Path) -> None:
    """With the optimiser's state, a resumed run ends with the weights of one that was not interrupted."""
    settings = replace(small("lra-text", tmp_path / "data"), **SHORT, optimiser__schedule="constant")
    options: dict[str, Any] = {"data_root": tmp_path / "data"}
    train(settings, tmp_path / "whole", **options)
    train(replace(settings, steps=2), tmp_path / "half", **options)
    folder = run_to_hf(tmp_path / "half", tmp_path / "hf", which="last", state=True)
    back = hf_to_run(folder, tmp_path / "back")
    told = json.loads((back / "config.json").read_text()) | {"steps": 4}
    (back / "config.json").write_text(json.dumps(told))
    (back / "result.json").unlink()
    train(settings, back, resume=True, **options)
    assert filecmp.cmp(tmp_path / "whole/last/model.safetensors", back / "last/model.safetensors", shallow=False)


def test_resuming_without_the_state_is_an_error(tmp_path: Path) -> None:
    settings = replace(small("lra-text", tmp_path / "data"), **SHORT)
    train(settings, tmp_path / "run", data_root=tmp_path / "data")
    back = hf_to_run(run_to_hf(tmp_path / "run", tmp_path / "hf"), tmp_path / "back")
    (back / "result.json").unlink()
    with pytest.raises(ValueError, match=r"no optimiser state.*mgk convert --state"):
        train(settings, back, resume=True, data_root=tmp_path / "data")


def test_the_tokenizer_gives_the_tokens_of_the_data_set(runs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("enwik8", "wikitext2", "lm-nano-cpu"):
        run_to_hf(runs[name] / "run", tmp_path / name, data_root=runs[name])
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        settings = read(runs[name] / "run/config.json")
        prepared = mgk.data.load(settings.data.name, root=runs[name], **_parsed(settings.data.options))
        tokens = prepared.split("train").tokens[:200].tolist()  # type: ignore[union-attr]
        if name != "wikitext2":
            text = tokenizer.decode(tokens)
        else:
            text = " ".join(prepared.words[token] for token in tokens).replace("<eos>", "\n")
        assert tokenizer(text)["input_ids"] == tokens
        if name == "enwik8":
            assert text == bytes(tokens).decode()
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        plain, _ = load_model(runs[name] / "run")
        given = torch.tensor([tokens[:20]])
        assert same_weights(model.mgk, plain)
        torch.testing.assert_close(model(given).logits, plain(given))
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(given, **options), model.generate(given, use_cache=False, **options))


def test_the_byte_tokenizer() -> None:
    text = "é\t√ 🙂\n"
    assert byte_tokenizer(0)(text)["input_ids"] == list(text.encode())
    padded = byte_tokenizer(1)
    assert padded(text)["input_ids"] == [byte + 1 for byte in text.encode()]
    assert padded.pad_token_id == 0
    assert padded.decode(padded(text)["input_ids"]) == text
    assert len(byte_tokenizer(0)) == 256


def test_the_other_tokenizers(tmp_path: Path) -> None:
    options = small("lra-listops", tmp_path / "listops").data.options
    listops = mgk.data.load("listops", root=tmp_path / "listops", **_parsed(options))
    tokenizer = tokenizer_of(listops)
    assert tokenizer is not None
    row = listops.split("train").row(0).tolist()  # type: ignore[union-attr]
    words = [str(tokenizer.convert_ids_to_tokens(number)) for number in row]
    assert tokenizer("( ".join(words))["input_ids"] == row
    options = small("enwiki", tmp_path / "enwiki").data.options
    enwiki = mgk.data.load("enwiki", root=tmp_path / "enwiki", **_parsed(options))
    tokenizer = tokenizer_of(enwiki)
    assert tokenizer is not None
    from mgk.data.corpora import END, PIECE

    assert enwiki.words is not None
    number = {word: index for index, word in enumerate(enwiki.words)}
    lines = [line for line in TEXT.splitlines()[:20] if line.strip()]
    expected = [number.get(word, 1) for line in lines for word in (*PIECE.findall(line), END)]
    assert tokenizer("\n".join(lines) + "\n")["input_ids"] == expected
    options = small("fashion-mnist", tmp_path / "images").data.options
    images = mgk.data.load("fashion-mnist", root=tmp_path / "images", **_parsed(options))
    assert tokenizer_of(images) is None


def _parsed(options: tuple[str, ...]) -> dict[str, Any]:
    found = {name: json.loads(value) for name, value in (option.split("=") for option in options)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def test_the_card_shows_the_record_of_the_run(runs: dict[str, Path], tmp_path: Path) -> None:
    run_to_hf(runs["lra-text"] / "run", tmp_path / "hf")
    card = (tmp_path / "hf/README.md").read_text()
    result = json.loads((runs["lra-text"] / "run/result.json").read_text())
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    row = f"| test | {result['test']['loss']:.4f} | {result['test']['accuracy']:.4f} |"
    assert row in " ".join(card.split())  # columns are aligned with spaces
    assert f"{result['parameters']:,} parameters" in card
    assert "AutoModelForSequenceClassification.from_pretrained" in card
    assert str(tmp_path) not in card
    assert (tmp_path / "hf/tokenizer.json").exists()  # the run knows the folder of its data set


def test_a_model_without_a_record_becomes_a_run(tmp_path: Path) -> None:
    make("classifier").save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match="data: expected the name of a data set"):
        hf_to_run(tmp_path / "hf", tmp_path / "run")
    hf_to_run(tmp_path / "hf", tmp_path / "run", data="imdb")
    model, settings = load_model(tmp_path / "run")
    assert settings.data.name == "imdb"
    assert same_weights(AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").mgk, model)
    with pytest.raises(ValueError, match="expected a new or empty folder"):
        hf_to_run(tmp_path / "hf", tmp_path / "run", data="imdb")
    foreign("gpt2")[0].save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="gpt2: expected a model with model_type 'mgk', got 'gpt2'"):
        hf_to_run(tmp_path / "gpt2", tmp_path / "other", data="imdb")


def test_the_command_generates(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = runs["enwik8"]
    options: dict[str, Any] = {"prompt": "Lic", "tokens": 6, "device": "cpu"}  # a run knows the folder of its data
    shown = []
    run_to_hf(root / "run", tmp_path / "hf", data_root=root)
    for folder in (root / "run", root / "run", tmp_path / "hf"):
        generate(folder, **options, sample=folder.name == "run")
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]  # same seed
    assert all(text.endswith("\n") and len(text) > 1 for text in shown)
    generate(root / "run", **options, beams=2, sample=False)
    generate(runs["wikitext2"] / "run", **options | {"prompt": "the License"})
    assert capsys.readouterr().out.strip()
    with pytest.raises(ValueError, match="expected a language model, got a classifier"):
        generate(runs["lra-text"] / "run", prompt="x")
    with pytest.raises(ValueError, match=r"found no config\.json"):
        generate(tmp_path, prompt="x")
    with pytest.raises(ValueError, match="--prompt: expected at least one token, got none in ' '"):
        generate(runs["wikitext2"] / "run", **options | {"prompt": " ", "data_root": runs["wikitext2"]})
    for name, value, expected in (("beams", 0, "at least 1"), ("tokens", 0, "at least 1"), ("top_p", 2.0, "0 to 1")):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: expected {expected}, got {value}"):
            generate(root / "run", **options | {name: value})


def test_the_command_converts_in_both_directions(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = runs["enwik8"]
    convert((root / "run", tmp_path / "hf"), data_root=root)
    convert((tmp_path / "hf", tmp_path / "back"))
    assert capsys.readouterr().out == f"written to {tmp_path / 'hf'}\nwritten to {tmp_path / 'back'}\n"
    assert same_runs(root / "run", tmp_path / "back")


def test_the_command_line_options(tmp_path: Path) -> None:
    """The option is `--from`, not `--from-`."""
    seen: list[tuple[Any, ...]] = []

    @functools.wraps(convert)
    def noted(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    read_options(noted, "mgk convert", ["--from", "gpt2", "--heads-to-mixtures", "--finetune", "5", "out"])()
    ((args, kwargs),) = seen
    given = inspect.signature(convert).bind(*args, **kwargs).arguments
    assert (given["paths"], given["from_"], given["heads_to_mixtures"], given["finetune"]) == (
        (Path("out"),),
        "gpt2",
        True,
        5,
    )


def test_a_wrong_command_is_an_error(tmp_path: Path) -> None:
    for paths, options, message in (
        ((tmp_path,), {}, "PATHS: expected what to convert and the folder to write, got 1"),
        ((tmp_path, tmp_path), {"from_": "x"}, "PATHS: expected the folder to write, got 2"),
        ((tmp_path,), {"from_": "x"}, "--heads-to-mixtures"),
        ((tmp_path / "none", tmp_path / "new"), {}, "none: expected the folder of a run or of a model"),
        (
            (tmp_path / "new",),
            {"from_": f"{tmp_path}/none", "heads_to_mixtures": True},
            "--from: expected a run, a folder",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            convert(paths, **options)  # type: ignore[arg-type]


def test_images_are_prepared_as_the_data_set_does(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="needs Pillow")
    from transformers import AutoImageProcessor

    facts: dict[str, Any] = {"image": [8, 8, 3], "mean": (0.5, 0.25, 0.75), "std": (0.5, 0.125, 0.25), "classes": 10}
    prepared: Any = SimpleNamespace(manifest={"facts": facts})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_processing(prepared)))
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    found = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="np")["pixel_values"][0]
    expected = ((image / 255 - facts["mean"]) / facts["std"]).transpose(2, 0, 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
