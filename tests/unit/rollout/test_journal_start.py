"""The first records of an empty journal: at a checkpoint of its own run, or of another one (fork)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.rollout.sampler.events import FORKED, OUTSTANDING, journal_start
from tests.support.sampling import ScriptedEngine, World, mixed, prompt_ids

pytestmark = pytest.mark.virtual_time

OURS = {"prompts": 12, "seed": 1, "data.shuffle": False, "model.hf_path": "m", "rollout.temperature": 1.0}
STATE: dict[str, Any] = {
    "identity": OURS,
    "next_number": 9,
    "taken": 9,
    "served": 2,
    "weights_step": 2,
    "step_of": [[0, 0], [4, 1], [8, 2]],
    "first_step_of": [[0, 0], [4, 1], [8, 2]],
    "tokens": {"sampled": 100, "trained": 70, "dropped_uniform": 10},
    "trained": [[1, 30], [2, 40]],
    "judged": [[7, [1.0], [3], ["stop"], []], [5, [1.0], [3], ["stop"], []]],
    "dropped": {"uniform": 1},
    OUTSTANDING: [[7, 0, 7], [8, 0, 8]],
}


def state_of(world: World) -> dict[str, Any]:
    """The state that a checkpoint keeps, through JSON as trainer.json has it."""
    found: dict[str, Any] = json.loads(json.dumps(world.sampler.state()))
    return found


async def parent_of(folder: Path, **rollout: Any) -> dict[str, Any]:
    """The state after step 1 of a run that samples a step ahead: it trained on 0 to 3, others wait."""
    world = World(folder, [ScriptedEngine(mixed)], max_staleness=1, **rollout)
    async with world.sampling(rounds=False):
        await world.train(1)
        state = state_of(world)
    assert [place for _, _, place in state[OUTSTANDING]] == list(range(4, state["taken"]))
    assert state["taken"] > 4
    return state


@pytest.mark.parametrize("forked", [False, True])
async def test_unfinished_prompts_are_resampled_first(forked: bool, tmp_path: Path) -> None:
    """In a fork, and after a lost journal: no prompt is skipped, and none comes twice."""
    state = await parent_of(tmp_path / "a")
    if forked:
        state[FORKED] = None
    engine = ScriptedEngine(mixed)
    world = World(tmp_path / "b", [engine], max_staleness=1)
    async with world.sampling(first_step=2, state=state, rounds=False):
        taken = [*prompt_ids(await world.train(2)), *prompt_ids(await world.train(3))]
    assert sorted(taken) == [4, 5, 6, 7, 8, 9, 10, 11]
    [event] = [one for one in world.events if one["kind"] in ("fork_position", "journal_missing")]
    assert event["kind"] == ("fork_position" if forked else "journal_missing")
    count = len(state[OUTSTANDING])
    assert f"the prompts of {count} unfinished groups are sampled again, first" in event["detail"]


async def test_a_kill_before_the_resampling_loses_no_prompt(tmp_path: Path) -> None:
    """State and reopened groups are one commit: a second process finds both."""
    state = {**await parent_of(tmp_path / "a"), FORKED: None}
    world = World(tmp_path / "b", [ScriptedEngine(mixed)], max_staleness=1)
    with pytest.raises(RuntimeError, match="killed"):
        async with world.sampling(first_step=2, state=state, rounds=False):
            raise RuntimeError("killed")
    again = World(tmp_path / "b", [ScriptedEngine(mixed)], max_staleness=1)
    async with again.sampling(first_step=2, state=state, rounds=False):
        assert sorted(prompt_ids(await again.train(2))) == [4, 5, 6, 7]
    assert "fork_position" not in again.event_kinds()  # it continues with its own journal


def test_the_records_by_hand() -> None:
    """Of 100 sampled tokens 70 were trained on and 10 dropped: the other 20 are lost, and counted so."""
    cooler = {**OURS, "rollout.temperature": 0.5}
    (found, *opened), _, message = journal_start({**STATE, FORKED: None}, cooler, 2)
    assert found.fields == {
        **{name: STATE[name] for name in ("next_number", "taken", "served", "weights_step")},
        **{name: STATE[name] for name in ("step_of", "first_step_of", "dropped")},
        "identity": cooler,
        "tokens": {**STATE["tokens"], "dropped_lost": 20},
        "trained": [],
        "judged": [STATE["judged"][1]],  # group 7 is judged again
    }
    assert [record.fields for record in opened] == [{"groups": [[7, 0, 7], [8, 0, 8]], "taken": None}]
    assert message.startswith("the dataset continues after 9 prompts; the prompts of 2 unfinished groups")
    for why, ours, told in (
        (None, {**OURS, "seed": 2, "prompts": 9}, "prompts is 9, and was 12, seed is 2, and was 1"),
        ("data.path is b, and was a", OURS, "data.path is b, and was a"),
    ):
        (begun, *opened), _, message = journal_start({**STATE, FORKED: why}, ours, 2)
        assert (begun.fields["taken"], begun.fields["judged"], opened) == (0, [], [])
        assert message == f"the dataset begins at its start: {told}"
    within = {**OURS, "environment.function": "a:B", "rollout.group_size": "2 episodes of an environment"}
    assert journal_start({**STATE, FORKED: None}, within, 2)[0][0].fields["taken"] == 9
    # Of a run that was killed and repeated step 2.
    fields = journal_start({**STATE, FORKED: None}, OURS, 1)[0][0].fields
    assert (fields["served"], fields["weights_step"]) == (1, 1)
    assert fields["step_of"] == fields["first_step_of"] == [[0, 0], [4, 1]]
    (lost, *_), kind, _ = journal_start(STATE, OURS, 2)
    assert lost.fields["trained"] == STATE["trained"]
    assert kind == "journal_missing"
