"""`mgk generate` and `mgk convert`: a thin face over `mgk.hf`, which needs Transformers when they are called."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def generate(
    run: tyro.conf.Positional[Path],
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
    """Let a language model go on with a text, token by token: mgk generate RUN --prompt "In the beginning"

    RUN is a folder of `mgk train`, or one of Transformers (`mgk convert`).

    In Python: `mgk.hf.from_run("runs/a").generate(...)`, as with any model of Transformers.

    Args:
        run: folder of the model.
        prompt: what it goes on from; a single end of line if there is none.
        tokens: how many to generate.
        sample: draw each token; --no-sample takes the likeliest.
        temperature: below 1 is more careful, above 1 bolder.
        top_p: draw from the likeliest tokens that together have this probability.
        beams: keep so many candidates; more than one shows the text at the end.
        seed: of what is drawn.
        which: which checkpoint of a run.
        device: where to compute.
        data_root: where prepared data sets are, whose vocabulary a run reads; $MGK_DATA or ~/.cache/mgk/data.
    """
    import torch

    from mgk.hf.generate import load_for_generation, stream
    from mgk.ops.arguments import check_count

    check_count("--tokens", tokens)
    check_count("--beams", beams)
    if not 0 <= top_p <= 1:
        raise ValueError(f"--top-p: expected 0 to 1, got {top_p}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model, tokenizer = load_for_generation(run, which=which, data_root=data_root)
    options: dict[str, Any] = {"do_sample": sample, "num_beams": beams, "max_new_tokens": tokens}
    if sample:
        options |= {"temperature": temperature, "top_p": top_p}
    stream(model.to(device), tokenizer, prompt, partial(print, end="", flush=True), **options)
    print()


def convert(
    paths: tyro.conf.Positional[tuple[Path, ...]],
    from_: Annotated[str, tyro.conf.arg(name="from")] = "",
    heads_to_mixtures: bool = False,
    drop: bool = False,
    text: Path | None = None,
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
    """Between runs and Transformers, or from softmax heads to mixture keys.

    mgk convert RUN FOLDER: a run of `mgk train` as a folder of Transformers, with tokenizer and model card, ready for
    `hf upload`. mgk convert FOLDER RUN: the way back. Nothing is lost either way (--state for the optimiser's too).

    mgk convert --from MODEL --heads-to-mixtures FOLDER: half the heads. The most similar heads of a trained
    softmax model are merged, two into one mixture-key head; --finetune STEPS then recovers the loss. MODEL is a run of
    `mgk train`, measured and tuned on its own data, or a model of Transformers (GPT-2, Llama, Mistral, Qwen2), which
    needs --text FILE for that.

    In Python: `mgk.hf.run_to_hf`, `mgk.hf.hf_to_run`, `mgk.hf.merge_heads` and `mgk.merge.finetune`.

    Args:
        paths: the run or folder to convert, if there is no --from, and the new or empty folder to write.
        from_: run, folder or hub name of a softmax model.
        heads_to_mixtures: merge its heads, two and two.
        drop: leave out every second head instead: the baseline to compare with.
        text: a text to calibrate, fine-tune and measure on (the last tenth), for a model of Transformers.
        windows: how many windows of the text to calibrate on.
        length: tokens of a window.
        finetune: steps of fine-tuning.
        lr: highest learning rate of it.
        batch: windows of a batch.
        which: which checkpoint of a run.
        state: with a run, the optimiser's state too.
        data: name of the data set, for a folder that does not come from a run.
        data_root: where prepared data sets are; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    from mgk.hf import convert as files

    if len(paths) != (1 if from_ else 2):
        wanted = "the folder to write" if from_ else "what to convert and the folder to write"
        raise ValueError(f"PATHS: expected {wanted}, got {len(paths)} paths")
    *sources, out = paths
    if from_:
        if not heads_to_mixtures and not drop:
            raise ValueError("--from: expected --heads-to-mixtures (or --drop) with it, got neither")
        from mgk.hf.halve import halve

        halve(
            from_, out, method="drop" if drop else "merge", text=text, windows=windows, length=length,
            finetune_steps=finetune, lr=lr, batch=batch, which=which, data_root=data_root, say=print,
        )  # fmt: skip
        return
    if files.is_run(sources[0]):
        written = files.run_to_hf(sources[0], out, which=which, state=state, data_root=data_root)
    else:
        written = files.hf_to_run(sources[0], out, data=data)
    print(f"written to {written}")
