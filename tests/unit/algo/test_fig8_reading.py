"""What is read from Fig. 8: the numbers of the document, and the method on curves that are known."""

from __future__ import annotations

from pathlib import Path

from studies import fig8_reading as fig8

DOCUMENT = Path(fig8.__file__).with_name("results") / "fig8_reading.md"


def test_the_document_is_what_the_command_prints() -> None:
    assert DOCUMENT.read_text() == "\n".join(fig8.report()) + "\n"
