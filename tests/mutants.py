"""Break the code in one place at a time and see a test fail: python -m tests.mutants, or make mutants

Each mutant is a change of meaning in one file and the tests that must notice it. The list holds changes that no test
noticed once, or whose effect is easy to overlook. Survivors are printed; the exit status is 1 if there is one.
It takes about ten minutes on two cores, so it is not a part of CI. There, `test_mutants.py` checks that the list fits
the code: after an edit of a line that is named here, edit the mutant, too.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    """A change of one file, and the tests that must fail: files or node ids, and perhaps -k with an expression."""

    file: str
    old: str
    new: str
    tests: str


MASKED_SHIFT = "            shift = shift.clone()"
MUTANTS = (
    # The M-steps on a CPU
    Mutant(
        "src/mgk/ops/blockwise/statistics.py",
        "diagonal = rows.start + reach.offset - at.start",
        "diagonal = rows.start + reach.offset",
        "tests/ops/test_blocks.py",
    ),
    Mutant(
        "src/mgk/ops/blockwise/statistics.py",
        "diagonal = rows.start + reach.offset - at.start",
        "diagonal = reach.offset - at.start",
        "tests/ops/test_blocks.py",
    ),
    Mutant(
        "src/mgk/ops/blockwise/statistics.py",
        "diagonal = rows.start + reach.offset - at.start",
        "diagonal = rows.start - at.start",
        "tests/ops/test_blocks.py",
    ),
    Mutant(
        "src/mgk/ops/blockwise/statistics.py",
        "torch.arange(num_keys) - (num_keys - num_queries) if is_causal",
        "torch.arange(num_keys) if is_causal",
        "tests/ops/test_m_step.py -k blockwise",
    ),
    Mutant(
        "src/mgk/ops/blockwise/statistics.py",
        "return (seen * used).sum(0)",
        "return seen.sum(0)",
        "tests/ops/test_m_step.py -k blockwise",
    ),
    # Attention on a CPU
    Mutant(
        "src/mgk/ops/blockwise/attend.py",
        "return RowGradients(offset + total.log(), None, LOWEST_BACKWARD[offset.dtype])",
        "return RowGradients(offset + total.log(), None, LOWEST[offset.dtype])",
        "tests/ops/test_blocks.py",
    ),
    # The module
    Mutant("src/mgk/nn/attention.py", MASKED_SHIFT, MASKED_SHIFT.replace(".clone()", ""), "tests/nn/test_em_state.py"),
    Mutant(
        "src/mgk/nn/attention.py",
        "log_prior = log_prior.clone()",
        "log_prior = log_prior",
        "tests/nn/test_em_state.py",
    ),
    Mutant(
        "src/mgk/nn/attention.py",
        "log_prior = log_prior[..., last - key.shape[-2] : last]",
        "log_prior = log_prior[..., -key.shape[-2] :]",
        "tests/nn/test_attention.py tests/nn/test_cache.py -k positions",
    ),
    Mutant(
        "src/mgk/nn/operators.py",
        "(not by_position and api.takes_rows(",
        "(api.takes_rows(",
        "tests/nn/test_em_state.py",
    ),
    # A window's cache
    Mutant(
        "src/mgk/nn/cache.py",
        "before, new = min(self.length, self.window - 1)",
        "before, new = min(self.length, self.window)",
        "tests/nn/test_window.py",
    ),
    Mutant(
        "src/mgk/hf/static.py",
        "> self.place - window)",
        "> self.place - window - 1)",
        "tests/hf/test_generate.py -k window",
    ),
    # The cache of generation
    Mutant("src/mgk/hf/cache.py", "self.inner.reorder(beam_idx)", "beam_idx", "tests/hf/test_cache.py"),
    Mutant(
        "src/mgk/hf/cache.py",
        ".repeat_interleave(repeats)",
        ".repeat(repeats)",
        "tests/hf/test_cache.py",
    ),
    Mutant(
        "src/mgk/hf/cache.py",
        "device=indices.device)[indices])",
        "device=indices.device)[: len(indices)])",
        "tests/hf/test_cache.py",
    ),
    Mutant(
        "src/mgk/hf/cache.py",
        "return self.inner.length + query_length, 0",
        "return self.inner.length, 0",
        "tests/hf/test_cache.py",
    ),
    Mutant(
        "src/mgk/hf/cache.py",
        "min(0, tokens_to_remove - self.inner.length)",
        "-tokens_to_remove",
        "tests/hf/test_cache.py",
    ),
    Mutant(
        "src/mgk/hf/cache.py",
        "tokens_to_remove = min(0, tokens_to_remove - self.inner.length)",
        "tokens_to_remove = tokens_to_remove - self.inner.length",
        "tests/hf/test_cache.py",
    ),
    Mutant(
        "src/mgk/hf/cache.py",
        "if -tokens_to_remove > self.inner.length:",
        "if -tokens_to_remove >= self.inner.length:",
        "tests/hf/test_cache.py",
    ),
    Mutant(
        "src/mgk/hf/cache.py",
        "    def get_seq_length(self) -> int:\n        return self.inner.length\n",
        "    def get_seq_length(self) -> int:\n        return self.inner.length + 1\n",
        "tests/hf/test_cache.py",
    ),
    Mutant(
        "src/mgk/nn/cache.py",
        "self.batch_size = len(indices)\n        if self._key",
        "if self._key",
        "tests/hf/test_cache.py",
    ),
    # Head merging
    Mutant(
        "src/mgk/merge/layers.py",
        "rotary.sin.chunk(2, -1)[1]",
        "rotary.sin.chunk(2, -1)[0]",
        "tests/merge/test_calibration.py",
    ),
    Mutant(
        "src/mgk/merge/layers.py",
        "(rotary.cos, torch.cat",
        "(rotary.cos.flip(1), torch.cat",
        "tests/merge/test_calibration.py",
    ),
    Mutant(
        "src/mgk/merge/calibration.py",
        "torch.cat((-turned[..., half:], turned[..., :half]), -1) * sin",
        "torch.cat((turned[..., half:], -turned[..., :half]), -1) * sin",
        "tests/merge/test_calibration.py",
    ),
    Mutant(
        "src/mgk/merge/layers.py",
        "if self.causal:\n",
        "if not self.causal:\n",
        "tests/merge/test_calibration.py",
    ),
    Mutant(
        "src/mgk/merge/attention.py",
        "value, prior, window=window, **one)",
        "value, prior, window=window + 1, **one)",
        "tests/merge/test_families.py -k modernbert",
    ),
    Mutant(
        "src/mgk/merge/attention.py", "window=window - 1", "window=window", "tests/merge/test_families.py -k modernbert"
    ),
    Mutant("src/mgk/merge/normalised.py", "second).conj()", "second)", "tests/merge/test_families.py -k qwen3"),
    Mutant("src/mgk/merge/layers.py", "+ self.family.norm_offset", "", "tests/merge/test_families.py -k gemma3"),
    Mutant(
        "src/mgk/merge/static.py",
        ": value_states.shape[1]]",
        ": key_states.shape[1]]",
        "tests/merge/test_families.py -k llama",
    ),
    Mutant("src/mgk/merge/layers.py", "        model.eval()\n", "", "tests/merge/test_calibration.py"),
    Mutant("src/mgk/merge/layers.py", "        model.train(training)\n", "", "tests/merge/test_calibration.py"),
    Mutant(
        "src/mgk/merge/merge.py",
        "return small.train(model.training)",
        "return small",
        "tests/merge/test_calibration.py",
    ),
    # Checksums
    Mutant("src/mgk/data/store.py", "if verify or key not in _read_before:", "if verify:", "tests/data/test_store.py"),
    Mutant(
        "src/mgk/data/store.py",
        'if written > 1 and manifest.get("sha256") != seal(manifest):',
        "if False:",
        "tests/data/test_store.py -k flipped",
    ),
    Mutant("src/mgk/data/store.py", "stat.st_mtime_ns, stat.st_ctime_ns, ", "", "tests/data/test_store.py"),
    Mutant(
        "src/mgk/train/checkpoint.py",
        'facts.pop("sha256", None) != seal(facts)',
        'facts.pop("sha256", "") == ""',
        "tests/train/test_checkpoint.py -k flipped",
    ),
    Mutant("src/mgk/train/checkpoint.py", "if name not in present:", "if False:", "tests/train/test_checkpoint.py"),
    Mutant("src/mgk/train/checkpoint.py", "sorted(used | facts", "sorted(facts", "tests/train/test_checkpoint.py"),
    Mutant(
        "src/mgk/train/sharded.py",
        'raise pickle.UnpicklingError(f"it asks for {module}.{name}")',
        "return super().find_class(module, name)",
        "tests/train/test_sharded.py",
    ),
    Mutant("src/mgk/train/sharded.py", "if not names <= sizes.keys():", "if False:", "tests/train/test_sharded.py"),
    Mutant("src/mgk/merge/sums.py", "if checksum(file) != expected:", "if False:", "tests/hf/test_trust.py"),
    Mutant("src/mgk/merge/sums.py", '("/" in name and not deep)', '"/" in name', "tests/hf/test_trust.py"),
    Mutant(
        "src/mgk/hf/generate.py",
        "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)",
        "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)",
        "tests/hf/test_trust.py -k code",
    ),
    # Training
    Mutant(
        "src/mgk/data/batches.py",
        "    threading.Thread(target=end_with_parent, daemon=True).start()",
        "    pass",
        "tests/data/test_batches.py -k worker",
    ),
    Mutant(
        "src/mgk/train/checkpoint.py",
        "key = (tensor.data_ptr(), tensor.shape, tensor.stride())",
        "key = (tensor.data_ptr(),)",
        "tests/train/test_shared_weights.py",
    ),
    Mutant(
        "src/mgk/train/checkpoint.py",
        "FOLDER.fullmatch(path.name) for path",
        "FOLDER.match(path.name.removeprefix('.')) for path",
        "tests/train/test_checkpoint.py",
    ),
    Mutant(
        "src/mgk/files.py",
        "        flush(file)\n    flush(temporary)",
        "        pass\n    flush(temporary)",
        "tests/train/test_run.py tests/test_files.py",
    ),
    Mutant(
        "src/mgk/files.py",
        "        flush(temporary)\n        os.replace",
        "        os.replace",
        "tests/train/test_run.py tests/test_files.py",
    ),
    Mutant(
        "src/mgk/train/engine.py",
        'self.valid["accuracy"] if "accuracy" in self.valid else -self.valid["loss"]',
        '-self.valid["loss"]',
        "tests/train/test_run.py tests/train/test_watch.py",
    ),
    Mutant(
        "src/mgk/train/engine.py",
        "if not value > self.best:",
        "if not value >= self.best:",
        "tests/train/test_run.py tests/train/test_watch.py",
    ),
    Mutant(
        "src/mgk/train/engine.py",
        "        if logs or saves:\n            check_finite",
        "        if logs:\n            check_finite",
        "tests/train/test_run.py tests/train/test_watch.py",
    ),
    Mutant(
        "src/mgk/train/learner.py",
        "{self.config.seed} {step} {self.fabric.global_rank}",
        "{self.config.seed} {step}",
        "tests/train/test_watch.py",
    ),
)


def misfit(mutant: Mutant, root: Path = ROOT) -> str:
    """Return why a mutant cannot be made in a tree, or ""."""
    path = root / mutant.file
    count = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
    if count != 1:
        return f"expected its text once in {mutant.file}, found it {count} times"
    missing = [name for name in mutant.tests.split(" -k ")[0].split() if not (root / name.split("::")[0]).exists()]
    return f"no such test: {missing[0]}" if missing else ""


def copy_of_tree(target: Path) -> Path:
    """Copy what git tracks or would add."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if name.startswith("results/") or not (ROOT / name).exists():
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def outcome(mutant: Mutant, tree: Path) -> str:
    """Apply a mutant to a copy of the tree, run its tests, and restore the file; "killed" is the good outcome."""
    if problem := misfit(mutant, tree):
        return f"error: {problem}"
    path, text = tree / mutant.file, (tree / mutant.file).read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    names, _, expression = mutant.tests.partition(" -k ")
    chosen = ["-k", expression] if expression else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *names.split(), *chosen]
    variables = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return "killed"  # by a test that waits
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode in (0, 1):
        return ("survived", "killed")[done.returncode]
    return f"error: pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip().splitlines()[-1:]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="only mutants of files whose path contains this")
    chosen = parser.parse_args(arguments)
    mutants = [mutant for mutant in MUTANTS if chosen.only in mutant.file]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(chosen.jobs):
            trees.put(copy_of_tree(Path(folder) / str(number)))

        def work(mutant: Mutant) -> str:
            tree = trees.get()
            try:
                found = outcome(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{found:9}{mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}", flush=True)
            return found

        found = list(pool.map(work, mutants))
    print(f"{found.count('killed')} of {len(found)} killed, {found.count('survived')} survived")
    return int(found.count("killed") < len(found))


if __name__ == "__main__":
    raise SystemExit(main())
