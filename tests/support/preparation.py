"""Rows of made-up problems, and folders that `bapo data prepare` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from bapo_megatron.data.prepare.card import Card
from bapo_megatron.data.prepare.command import prepare
from bapo_megatron.data.prepare.options import DATA_FILE, PrepareOptions

MODEL = Path(__file__).parents[2] / "recipes/demo/policy"


GOATS = "A farmer has 12 goats and buys 7 more. How many goats has he now?"
TESTS = json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})


def skywork(content: str, truth: str, index: int = 0, failures: int = 8) -> dict[str, Any]:
    difficulty = {f"DeepSeek-R1-Distill-Qwen-{size}": failures for size in ("1.5B", "7B", "32B")}
    return {
        "data_source": "train-math-made-up",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": index, "model_difficulty": difficulty},
    }


def write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(tmp_path: Path, rows: list[Any], name: str = "rows.jsonl", **options: Any) -> Card:
    source = write(tmp_path / name, rows)
    return prepare(PrepareOptions((source,), tmp_path / "out", **{"max_invalid": 1.0, **options}))


def kept(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / DATA_FILE).read_text().splitlines()]


def questions(tmp_path: Path) -> list[str]:
    return [row["prompt"][-1]["content"].split("\n\n")[0] for row in kept(tmp_path)]
