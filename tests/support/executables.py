"""Programs of a few lines of shell, which stand for those of a machine."""

from __future__ import annotations

from pathlib import Path


def executable(path: Path, text: str) -> Path:
    """A program at ``path``, of lines of bash, or of what its own first line names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path
