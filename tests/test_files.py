"""Files that are whole or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WRITE = "import sys, pathlib, mgk.files as files; files.write_text(pathlib.Path(sys.argv[1]), '37 \\xb1 1')"


def test_text_is_utf8_in_every_locale(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", WRITE, str(path)], env=plain, check=True)
    assert path.read_bytes() == "37 ± 1".encode()
