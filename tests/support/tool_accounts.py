"""The journal of a run with faulty tools, held against what the tools say that they were asked and answered.

- All that a tool was asked is in the journal: a turn is on disk before its environment sees it.
- All that the model was given was said by its tool, and those who failed had a fault of that kind: a tool
  that hangs or dies costs its own episode, and no other.
- No step of the run is missing, and none is there twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.audit import Exchange
from tests.support.faulty_tools import FAILURES, NOTED, fault_of

Place = tuple[str, int]
"""Name of an episode, and answers of its environment before."""


def check_tools(log: Path, episodes: Mapping[str, Sequence[Exchange]], tokenizer: Any) -> Counter[str]:
    """AssertionError where the two differ. Steps of tools by fault, and what became of them.

    ``episodes``: those of an ``Audit``, by name.
    """
    exchanges = {(name, place): one for name, turns in episodes.items() for place, one in enumerate(turns)}
    asked, answered, counts = Counter[Place](), {}, Counter[str]()
    for row in read_jsonl(log):
        place = row["episode"], row["replies"]
        assert place in exchanges, f"the tool of {place} was asked about a turn that is not on disk"
        if row["what"] == "asked":
            turn = tokenizer.decode(exchanges[place].turn_ids[:-1], skip_special_tokens=False)
            assert row["turn"] == turn, f"{place}: the tool was asked {row['turn']!r}; on disk is {turn!r}"
            asked[place] += 1
        elif row["what"] == "answered":
            before = answered.setdefault(place, row["said"])
            assert before == row["said"], f"{place}: the tool said {before!r}, then {row['said']!r}"
        else:
            counts["outlived their step"] += 1
    for place, one in exchanges.items():
        if one.said is not None:
            _check_answer(place, one, answered, tokenizer)
    of_journal = [one.said for one in exchanges.values() if one.said is not None]
    counts.update(f"fault {fault_of(*place)}" for place in asked)
    counts.update(f"failed {said['failure']}" for said in of_journal if said["failure"])
    counts["asked"], counts["asked again"] = len(asked), sum(times > 1 for times in asked.values())
    counts["answers in the journal"] = len(of_journal)
    return counts


def _check_answer(place: Place, one: Exchange, answered: dict[Place, str | None], tokenizer: Any) -> None:
    said = one.said
    assert said is not None
    fault = fault_of(*place)
    expected = FAILURES.get(fault)
    # A call that was out of time is asked once more; then a kill of its worker is its second loss.
    killed = expected == "time" and (said["failure"], said["detail"]) == ("died", "signal SIGKILL")
    assert said["failure"] == expected or killed, (
        f"{place}: the fault of its tool is {fault!r}, and the journal says {said['failure']!r}, "
        f"{said['detail']!r}"
    )
    if said["failure"]:
        return
    assert place in answered, f"{place}: the journal has an answer that no tool gave"
    spoken = answered[place]
    if said["finish_reason"] is None:
        assert said["text"][:NOTED] == spoken, f"{place}: {said['text'][:NOTED]!r} is not {spoken!r}"
        given = tokenizer.decode(one.given_ids, skip_special_tokens=False)
        assert said["text"] in given, f"{place}: the answer is {said['text']!r}, its tokens are {given!r}"
    else:
        reason = said["finish_reason"]
        assert (reason == "stop") == (spoken is None), (
            f"{place}: ended with {reason!r}, and the tool said {spoken!r}"
        )


def check_steps(run_dir: Path) -> int:
    """AssertionError if the metrics lack a step, have one twice, or their updates do. Their number."""
    steps = [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), f"steps {steps}"
    versions = [row["version"] for row in read_jsonl(run_dir / "updates.jsonl")]
    assert versions == list(range(1, len(versions) + 1)), f"versions {versions}"
    return len(steps)
