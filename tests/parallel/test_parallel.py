"""Several processes compute what one computes: one group of each size runs all checks of two files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import group

CASES = [(world, name) for world in (2, 4) for name in group.checks(world)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of each group, filled when a test first needs it."""
    return {}


@pytest.mark.parametrize(("world", "name"), CASES)
def test_many_processes(
    world: int, name: str, folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if world not in folders:
        folders[world] = tmp_path_factory.mktemp(f"world{world}")
        group.run(world, folders[world])
    files = [folders[world] / f"{name}-{rank}" for rank in range(world)]
    errors = {file.read_text() if file.exists() else f"a process did not get here: {file.name}" for file in files}
    if errors != {""}:
        pytest.fail("\n".join(errors), pytrace=False)
