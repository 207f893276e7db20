"""Checksums of a Transformers folder, written beside its files and compared when a model is loaded from it.

    FOLDER/mgk_sums.json    {"files": {"config.json": {"bytes": ..., "sha256": ...}, "model.safetensors": ..., ...}}

Transformers and safetensors notice a file that is too short, but not a flipped bit. A folder without the sums (an older
one, or one that another program wrote) is loaded as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mgk.files import checksum, read_json, write_json

SUMS = "mgk_sums.json"
WRITTEN = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "modeling_mgk.py",
)
"""What `save_pretrained` of a model writes."""


def write_sums(folder: Path, patterns: Iterable[str] = WRITTEN) -> None:
    """Write the checksums of the files of a folder that match a pattern."""
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    write_json(folder / SUMS, {"files": {path.relative_to(folder).as_posix(): checksum(path) for path in files}})


def check_sums(folder: Path, *, deep: bool = False) -> None:
    """Raise an OSError that names the first file which is not what was written, if the folder has checksums.

    Files in subfolders are read only if `deep`. A listed file may be missing: what is needed is missed by its reader.
    """
    path = folder / SUMS
    if not path.exists():
        return
    advice = f"download or write the folder again, or remove {SUMS} if you changed the file yourself"
    for name, expected in _listed(path):
        file = folder / name
        if ("/" in name and not deep) or not file.is_file():
            continue
        if checksum(file) != expected:
            raise OSError(f"{file}: damaged or changed: its checksum is not that in {SUMS}; {advice}")


def _listed(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        files = read_json(path)["files"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OSError(f"{path}: damaged; download or write the folder again, or remove this file") from None
    for name, expected in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise OSError(f"{path}: expected names of files in this folder, got {name!r}")
        yield name, expected


class SummedModel(PreTrainedModel):
    """Mixin for a model class: checksums are written with the model, and compared when it is loaded from a folder.

    Code that a folder brings along (`auto_map`) is never run, and nobody is asked whether it may.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model; a folder of this machine is compared with its checksums first."""
        if pretrained_model_name_or_path is not None:
            folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
            if folder.is_dir():
                check_sums(folder)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model, and then the checksums of its files."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if args[0] if args else kwargs.get("is_main_process", True):
            write_sums(Path(save_directory))

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Upload the checksums, too: `save_pretrained(push_to_hub=True)` uploads before it returns."""
        write_sums(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)
