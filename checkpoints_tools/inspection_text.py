"""Text of a checkpoint inspection, from its result alone: one line for each fact, then the keys as a tree.

`bapo-ckpt inspect` prints it. Used by ``commands.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias, cast

from checkpoints_tools.core.progress import format_bytes
from checkpoints_tools.inspection import OBJECT, Inspection, KeyGroup

_SHORT = {
    "tensor": "TP",
    "pipeline": "PP",
    "virtual": "VPP",
    "context": "CP",
    "data": "DP",
    "world": "ranks ",
}

_Node: TypeAlias = "dict[str, _Node | None]"


def as_text(found: Inspection) -> str:
    """The inspection as text: the facts, one a line, then the keys as a tree."""
    return "\n".join([*_facts(found), "keys", *_tree(found.keys)])


def _facts(found: Inspection) -> Iterator[str]:
    yield f"checkpoint   {found.folder}"
    yield f"format       {found.format}" + (f", {found.layout}" if found.layout else "")
    if found.iteration is not None:
        yield f"iteration    {found.iteration}"
    if found.written_at:
        layout = " ".join(f"{_SHORT[name]}{size}" for name, size in found.written_at.items())
        yield f"written at   {layout}"
    yield f"model        {_model(found)}"
    yield f"parameters   {found.parameters:,}"
    yield "weights      " + ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in found.dtypes.items())
    if found.vocabulary_rows is not None:
        padding = found.vocabulary_rows - found.model["vocab"] if found.model else 0
        yield f"vocabulary   {found.vocabulary_rows:,} rows" + (
            f", {padding:,} of padding" if padding else ""
        )
    size = f", {format_bytes(found.optimizer_bytes)}" if found.optimizer_bytes else ""
    yield f"optimizer    {found.optimizer or 'none'}{size}"
    yield f"on disk      {format_bytes(found.total_bytes)}"


def _model(found: Inspection) -> str:
    if found.model is None:
        return "unknown: the checkpoint carries no config.json; --hf-reference names one"
    model = found.model
    parts = [
        f"{model['name']}: {model['layers']} layers",
        f"hidden {model['hidden']}",
        f"{model['heads']} heads of {model['head_dim']} on {model['kv_heads']} KV groups",
        f"MLP {model['ffn']}",
        f"vocabulary {model['vocab']:,}",
        "tied embeddings" if model["tied"] else "untied embeddings",
    ]
    return ", ".join(parts)


def _tree(groups: Iterable[KeyGroup]) -> Iterator[str]:
    """Keys by their dotted parts, those without a sibling on one line."""
    root: _Node = {}
    for group in groups:
        *folders, name = group.key.split(".")
        node = root
        for folder in folders:
            node = cast(_Node, node.setdefault(f"{folder}.", {}))
        node[f"{name}  {_what(group)}"] = None
    return _lines(root, 1)


def _lines(node: _Node, depth: int) -> Iterator[str]:
    for name, below in node.items():
        while below and len(below) == 1:
            [(last, below)] = below.items()
            name += last
        yield "  " * depth + name.removesuffix(".")
        if below:
            yield from _lines(below, depth + 1)


def _what(group: KeyGroup) -> str:
    what = f"{group.dtype} {list(group.shape)}" if group.dtype != OBJECT else OBJECT
    times = f" x {group.count}" if group.count > 1 else ""
    return what + times + (f", {group.chunks} chunks" if group.chunks > 1 else "")
