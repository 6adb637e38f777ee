"""The journal of a run with agent programs, held against what the programs say that they asked and were told.

- All that a program was told is a turn on disk, and asked again, after a kill or a retry, it gets the same.
- A program's request is sampled once, however often it was asked.
- Only programs that were killed have failed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.audit import Exchange


def check_agents(
    log: Path, episodes: Mapping[str, Sequence[Exchange]], tokenizer: Any, killed: int
) -> Counter[str]:
    """AssertionError where the two differ. Requests by what became of them.

    ``episodes``: those of an ``Audit``, by name. ``killed``: how many programs were.
    """
    turns = {
        name: [tokenizer.decode(one.turn_ids[:-1], skip_special_tokens=False) for one in exchanges]
        for name, exchanges in episodes.items()
    }
    told: dict[tuple[str, str], str] = {}
    asked: defaultdict[str, set[str]] = defaultdict(set)
    counts = Counter[str]()
    for row in read_jsonl(log):
        name, request = row["episode"], row["request"]
        assert name in turns, f"the program of {name} ran, and no turn of it is on disk"
        if row["what"] == "asked":
            counts["requests"] += 1
            counts["asked again, after a kill"] += request in asked[name]
            asked[name].add(request)
        elif row["what"] == "answered":
            before = told.setdefault((name, request), row["said"])
            assert before == row["said"], f"{name}, {request}: was told {before!r}, then {row['said']!r}"
            assert row["said"] in turns[name], f"{name}, {request}: {row['said']!r} is not on disk"
        else:
            counts[row["what"]] += 1
    for name, found in turns.items():
        # The first is the prompt's, which the model answers before the program starts.
        most = max(1, len(asked[name]))
        assert len(found) <= most, f"{name}: {len(found)} turns for {most} requests: {found}"
        counts["turns"] += len(found)
    answers = [one.said for of_one in episodes.values() for one in of_one if one.said is not None]
    failures = [one["detail"] for one in answers if one["failure"]]
    assert len(failures) <= killed, f"{killed} programs were killed, and {len(failures)} failed: {failures}"
    return counts + Counter({"episodes": len(turns), "told": len(told), "failed": len(failures)})
