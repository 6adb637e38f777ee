"""The commands of the pages, run as they stand there: every block that begins with ```sh.

Files that a page shows (```python file=...) are written first. Runs make one step, unless they say how many,
and the demo's suite has its first 20 problems.
What follows a block as ```text is printed by it, among other lines. docs/extending.md has its own test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_workspace import copy_repository, environment_of, run_commands, shortened
from tests.support.pages import PAGES, blocks
from tests.support.tiers import slow_but

pytestmark = pytest.mark.e2e

RUN = [
    page
    for page in PAGES
    if page.name != "extending.md" and any(block.kind == "sh" for block in blocks(page))
]
QUICK = ("config.md",)


@pytest.mark.parametrize(
    "page", slow_but(RUN, *(page for page in RUN if page.name in QUICK)), ids=lambda page: page.name
)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    found = blocks(page)
    copy_repository(tmp_path, ["recipes"], {block.file: block.text for block in found if block.file})
    suite = tmp_path / "recipes/demo/eval.jsonl"
    suite.write_text("".join(suite.read_text().splitlines(keepends=True)[:20]))
    environment = environment_of(tmp_path)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.kind == "sh":
            expected = after.text if after is not None and after.kind == "text" else ""
            run_commands(shortened(block.text), expected, tmp_path, environment)
