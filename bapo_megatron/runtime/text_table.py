"""Text tables: ``text_table`` returns lines of aligned columns, drawn by rich without colours.

Widths are counted in terminal cells, so columns with wide characters line up. rich is imported only when a
table is drawn, so commands start without it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from io import StringIO
from itertools import zip_longest

from bapo_megatron.errors import printable

_RULE = "\n".join(["    ", "    ", " -  ", *["    "] * 5])
"""rich box with only a rule below the heads."""
_SPARE = 100
"""Extra console width in cells, so that texts are never wrapped or cut."""


def text_table(
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    heads: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    indent: int = 0,
) -> list[str]:
    """Return a table's lines, none without rows; markup in cells has no effect.

    ``right``: right-aligned columns. ``heads``: column titles above a rule. ``widths``: column widths in
    cells; longer texts wrap between words, and a longer word widens its column; by default columns are as
    wide as their texts. ``indent``: spaces before each line. No character is lost: tabs become spaces, and
    other control characters are escaped, since rich would drop or miscount them.
    """
    if not rows and not heads:
        return []
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [[_clean(cell) for cell in row] for row in rows]
    table = Table(
        box=Box(_RULE, ascii=True) if heads else None,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if heads else 2, 0, 0),
        show_header=heads is not None,
    )
    for column, head in enumerate(heads or rows[0]):
        words = [Text(word).cell_len for row in rows for word in row[column].split()]
        table.add_column(
            Text(_clean(head)),
            justify="right" if column in right else "left",
            no_wrap=widths is None,
            overflow="fold",  # other modes add an ellipsis if a line and its last space are too wide
            width=max([widths[column], *words]) if widths else None,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    columns = zip_longest(*([heads] if heads else []), *rows, fillvalue="")
    width = (
        _SPARE + sum(widths or ()) + sum(max(Text(cell).cell_len + 2 for cell in cells) for cells in columns)
    )
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as drawn:
        console.print(table)
    return [" " * indent + line.rstrip() for line in drawn.get().splitlines()]


def _clean(cell: str) -> str:
    """Return ``cell`` in characters whose widths rich knows, with line feeds as only line ends."""
    return printable(cell.expandtabs())
