from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
