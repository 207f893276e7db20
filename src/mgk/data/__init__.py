"""Data sets: prepared once as memory-mapped arrays, read as batches that are pure functions of the step.

    >>> mgk.data.prepare("listops", sizes=(1000, 100, 100), lengths=(16, 128))
    >>> listops = mgk.data.load("listops", sizes=(1000, 100, 100), lengths=(16, 128))
    >>> batches = mgk.data.Batches(listops.split("train"), batch_size=32, seed=0)
    >>> for batch in mgk.data.stream(batches, start=0, stop=100, workers=2):
    ...     batch["tokens"], batch["mask"], batch["label"]

Every set has the splits train, dev and test. `load` takes the options that the set was prepared with: each combination
of options is a set of its own, in a separate folder.
"""

from mgk.data.batches import Batches, Evaluation, evaluation, stream
from mgk.data.registry import Description, describe, folder, load, names, prepare, verify
from mgk.data.splits import Batch, Images, Pairs, Sequences, Split, Stream, Translations
from mgk.data.store import DataError, Prepared, prepared, root

__all__ = [
    "Batch",
    "Batches",
    "DataError",
    "Description",
    "Evaluation",
    "Images",
    "Pairs",
    "Prepared",
    "Sequences",
    "Split",
    "Stream",
    "Translations",
    "describe",
    "evaluation",
    "folder",
    "load",
    "names",
    "prepare",
    "prepared",
    "root",
    "stream",
    "verify",
]
