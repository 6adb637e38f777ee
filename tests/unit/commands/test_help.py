"""Commands without typed flags tell their usage when they are asked."""

from __future__ import annotations

import pytest

from bapo_megatron.cli import run
from bapo_megatron.errors import ConfigError, refuse_arguments


@pytest.mark.parametrize("command", [["report"], ["status"], ["logs"], ["cancel"], ["eval", "compare"]])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(command: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([*command, flag])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: bapo {' '.join(command)} ")


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="usage: this"):
        refuse_arguments(["--halp"], "usage: this")
