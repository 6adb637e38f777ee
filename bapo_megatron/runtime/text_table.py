"""Text tables: rows of texts as aligned columns, drawn by rich without colours or wrapping.

Widths are cells of a terminal, so wide characters line up. Used by ``commands/cluster/status.py``,
``commands/verify/comparison.py`` and ``trainer/records/rollouts.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from io import StringIO

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_RULED = Box("\n".join(["    ", "    ", " -  ", *["    "] * 5]), ascii=True)
"""Nothing but a rule below the heads."""
_WIDEST = 10_000
"""Cells of a line: no table is as wide, so nothing is wrapped or cut."""


def text_table(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), heads: Sequence[str] | None = None
) -> list[str]:
    """The lines of a table; cells are plain texts, in which markup means nothing.

    ``right``: the columns that are flush right. ``heads``: titles of the columns, above a rule.
    """
    table = Table(
        box=_RULED if heads else None,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if heads else 2, 0, 0),
        show_header=heads is not None,
    )
    for column, head in enumerate(heads or rows[0]):
        table.add_column(Text(head), justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=StringIO(), width=_WIDEST, color_system=None, legacy_windows=False)
    with console.capture() as drawn:
        console.print(table)
    return [line.rstrip() for line in drawn.get().splitlines()]
