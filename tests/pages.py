"""The documentation pages of the repository, and the code in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# A fenced block, and the comment that may stand before it.
FENCED = re.compile(r"^(?:<!-- (.+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    language: str
    text: str
    reason: str
    """Why a test does not run it, from a comment `<!-- not run: REASON -->` before it; "" if one does."""

    @property
    def commands(self) -> list[str]:
        """The commands of a block of `sh`, without comments, continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text()
    found = []
    for match in FENCED.finditer(text):
        note, language, code = match.groups()
        reason = (note or "").removeprefix("not run: ") if (note or "").startswith("not run: ") else ""
        found.append(Block(page, text.count("\n", 0, match.start(2)) + 1, language, code, reason))
    return found
