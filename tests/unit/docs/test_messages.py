"""Messages that docs/troubleshooting.md quotes are the program's own."""

from __future__ import annotations

import re

from tests.support.pages import ROOT

_OF_LIBRARIES = ("Unrecognized options", "Perhaps you meant", "Too many open files")


def test_quoted_messages_exist() -> None:
    folders = (ROOT / "bapo_megatron", ROOT / "checkpoints_tools")
    source = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    source = re.sub(r'"\s*f?"', "", source)  # parts of a string on several lines
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [
        text for text in re.findall(r'"([^"]+)"', page) if text not in _OF_LIBRARIES and "--" not in text
    ]
    fragments = [part.strip() for text in quoted for part in text.split("...")]
    assert len(quoted) > 10
    assert not [part for part in fragments if part not in source]
