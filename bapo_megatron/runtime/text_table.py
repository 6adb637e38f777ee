"""Text tables: ``text_table`` returns lines of aligned columns.

Widths are counted in terminal cells, so columns with wide characters line up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest

from bapo_megatron.errors import printable


def text_table(
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    heads: Sequence[str] | None = None,
    indent: int = 0,
) -> list[str]:
    """Return a table's lines, none without rows. Columns are as wide as their longest text.

    ``right``: right-aligned columns. ``heads``: column titles above a rule. ``indent``: spaces before each
    line. Tabs become spaces; other control characters are escaped.
    """
    from rich.cells import cell_len  # on use, since commands start without it

    table = []
    for row in [heads, *rows] if heads else rows:
        cells = [printable(cell.expandtabs()).split("\n") for cell in row]
        table += [list(line) for line in zip_longest(*cells, fillvalue="")]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        blanks = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        sides = enumerate(zip(row, blanks, strict=True))
        lines.append("  ".join(b + cell if column in right else cell + b for column, (cell, b) in sides))
    if heads:
        lines.insert(1, " ".join("-" * (width + 1) for width in widths)[:-1])
    return [" " * indent + line.rstrip() for line in lines]
