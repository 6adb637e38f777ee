"""Comparing rows of metrics, and logs of runs."""

from __future__ import annotations

from pathlib import Path

from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.types import Metrics


def known(row: Metrics) -> dict[str, float]:
    """The metrics that have a value: pytest.approx takes no None."""
    return {name: value for name, value in row.items() if value is not None}


def results(run_dir: Path, name: str = "metrics.jsonl") -> list[Metrics]:
    """The rows of a log without what depends on the clock."""
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in read_jsonl(run_dir / name)
    ]
