from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.common import prepare


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("data"))
