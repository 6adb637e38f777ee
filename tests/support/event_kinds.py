"""Kinds of events that the program writes, read from its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORTERS = {"event", "warning", "_report", "_report_problem", "_note"}


def written_kinds() -> Iterator[str]:
    """Kinds of events by their name in the code: arguments of the reporters, values of "kind" in a dict."""
    for path in (ROOT / "bapo_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found: list[ast.expr] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                found = node.args[:1] if name in REPORTERS else []
                found += [keyword.value for keyword in node.keywords if keyword.arg == "event"]
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                found = [value for key, value in pairs if getattr(key, "value", None) == "kind"]
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
                is_kind = getattr(node.targets[0], "id", "") == "kind"
                found = [node.value.body, node.value.orelse] if is_kind else []
            texts = [one.value for one in found if isinstance(one, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str) and text.isidentifier())
    for path in (ROOT / "slurm").rglob("*.sh"):
        yield from re.findall(r"\bbapo_event (\w+) \"", path.read_text())
