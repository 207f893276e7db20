"""`mgk generate` and `mgk convert`, which need Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mgk.cli.parsing import Positional, UsageError


def generate(
    run: Path,
    prompt: str = "",
    tokens: int = 200,
    sample: bool = True,
    temperature: float = 1.0,
    top_p: float = 0.95,
    beams: int = 1,
    seed: int = 0,
    which: Literal["best", "last"] = "best",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    data_root: Path | None = None,
) -> None:
    """Generate text with a language model.

    For example: mgk generate RUN --prompt "In the beginning". RUN is a folder written by `mgk train`, or a Transformers
    folder (`mgk convert`). Control characters are printed as codes.

    In Python: `mgk.hf.from_run("runs/a").generate(...)`, as with any Transformers model.

    Args:
        run: folder of the model.
        prompt: text to continue; a single end of line if not given.
        tokens: number of tokens to generate.
        sample: sample each token; --no-sample takes the most probable one.
        temperature: below 1 makes probable tokens more probable, above 1 less.
        top_p: sample from the most probable tokens that together have this probability.
        beams: number of beams; with more than one, the text is printed at the end.
        seed: seed of the sampling.
        which: which checkpoint of a run.
        device: where to compute.
        data_root: folder of the prepared data sets, for a run's vocabulary; that of the run if not given.
    """
    import torch

    from mgk.hf.generate import load_for_generation, stream
    from mgk.ops.arguments import check_count
    from mgk.train.sample import visible

    check_count("--tokens", tokens)
    check_count("--beams", beams)
    if not 0 <= top_p <= 1:
        raise UsageError(f"--top-p: expected 0 to 1, got {top_p}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model, tokenizer = load_for_generation(run, which=which, data_root=data_root)
    options: dict[str, Any] = {"do_sample": sample, "num_beams": beams, "max_new_tokens": tokens}
    if sample:
        options |= {"temperature": temperature, "top_p": top_p}
    stream(model.to(device), tokenizer, prompt, lambda text: print(visible(text), end="", flush=True), **options)
    print()


def convert(
    paths: Positional[tuple[Path, ...]],
    from_: str = "",
    heads_to_mixtures: bool = False,
    drop: bool = False,
    pool: bool = False,
    text: Path | None = None,
    images: Path | None = None,
    windows: int = 16,
    length: int = 256,
    finetune: int = 0,
    lr: float = 3e-4,
    batch: int = 16,
    which: Literal["best", "last"] = "best",
    state: bool = False,
    data: str = "",
    data_root: Path | None = None,
) -> None:
    """Convert between runs and Transformers folders, or from softmax heads to mixture keys.

    mgk convert RUN FOLDER converts a run of `mgk train` to a Transformers folder, with tokenizer and model card, ready
    for `hf upload`. mgk convert FOLDER RUN converts it back. Both keep everything (the optimiser's state with --state).

    mgk convert --from MODEL --heads-to-mixtures FOLDER halves the heads of a trained softmax model: the most similar
    heads are merged, two into one mixture-key head, and --finetune STEPS recovers the loss. MODEL is a run of
    `mgk train`, which is measured and tuned on its own data, or a Transformers model, which needs --text FILE (language
    models and encoders) or --images FOLDER (ViT, DeiT) for that. docs/merging.md lists the families.

    In Python: `mgk.hf.run_to_hf`, `mgk.hf.hf_to_run`, `mgk.hf.merge_heads` and `mgk.merge.finetune`.

    Args:
        paths: the run or folder to convert (not with --from), then the new or empty folder to write.
        from_: run, folder or hub name of a softmax model.
        heads_to_mixtures: merge its heads in pairs.
        drop: drop every second head instead, as a baseline.
        pool: replace every two key and value heads by their mean instead (grouped queries), as a baseline.
        text: file to calibrate and fine-tune on, and to measure on (its last tenth), for a Transformers model.
        images: the same for a model of images, a folder with PNG or JPEG files.
        windows: number of windows of the text, or of images, to calibrate on.
        length: tokens per window.
        finetune: steps of fine-tuning.
        lr: peak learning rate of the fine-tuning.
        batch: windows per batch.
        which: which checkpoint of a run.
        state: convert the optimiser's state of a run too.
        data: name of the data set, for a folder that was not converted from a run.
        data_root: folder of the prepared data sets; that of the run if not given.
    """
    from mgk.hf import convert as files

    if len(paths) != (1 if from_ else 2):
        wanted = "the folder to write" if from_ else "what to convert and the folder to write"
        raise UsageError(f"PATHS: expected {wanted}, got {len(paths)} paths")
    *sources, out = paths
    if from_:
        chosen = [name for name, given in (("merge", heads_to_mixtures), ("drop", drop), ("pool", pool)) if given]
        if len(chosen) != 1:
            wanted = "one of --heads-to-mixtures, --drop and --pool"
            raise UsageError(f"--from: expected {wanted} with it, got {len(chosen)} of them")
        from mgk.hf.halve import halve

        halve(
            from_, out, method=chosen[0], text=text, images=images, windows=windows, length=length,
            finetune_steps=finetune, lr=lr, batch=batch, which=which, data_root=data_root, say=print,
        )  # fmt: skip
        return
    if files.is_run(sources[0]):
        written = files.run_to_hf(sources[0], out, which=which, state=state, data_root=data_root)
    else:
        written = files.hf_to_run(sources[0], out, data=data)
    print(f"written to {written}")
