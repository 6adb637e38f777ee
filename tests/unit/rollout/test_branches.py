"""Episodes whose turns form a tree: by hand, in the sampler over cuts of its journal, and as samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.algo.advantages import dr_grpo
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.sampler import turns
from bapo_megatron.rollout.sampler.branches import NOTHING, PROMPT
from bapo_megatron.rollout.sampler.response import (
    Response,
    Sampling,
    branch_ids,
    given,
    most_tokens,
    next_request,
)
from bapo_megatron.rollout.sampler.scoring import Scorer, response_score
from bapo_megatron.rollout.sampler.step_batches import read_example, read_header, read_step, write_step
from bapo_megatron.rollout.sampler.step_columns import StepColumns, header_of
from bapo_megatron.types import GIVEN, ColumnFile, Group, Prompt, StepBatch
from tests.support import accounts
from tests.support.batches import samples_of
from tests.support.branching import BranchWorld
from tests.support.episodes import check_cuts, run, step_of
from tests.support.responses import answer, asked, rows_of, turn

STOP = 9
SAMPLING = Sampling(0.5, 12, 7, (STOP,), in_environment=True)
PROMPT_ROW = Prompt(0, np.array([100, 101], np.int32), "", "test")


def by_hand() -> Response:
    """A turn; a conversation of its own; the first one again, twice from the same turn."""
    first = turn(Response(), 1, STOP)
    other = turn(asked(first, 50, 51, after=NOTHING), 2, STOP)
    again = turn(asked(other, 60, after=0), 3, STOP)
    return turn(asked(again, 61, after=0), 4, STOP)


def test_a_request_continues_its_branch() -> None:
    response = by_hand()
    assert most_tokens(asked(response, 70), SAMPLING) == 6, "the limit is that of a branch"
    request = next_request(asked(response, 70), 4, SAMPLING, PROMPT_ROW, "3-1", 5)
    assert request.input_ids.tolist() == [100, 101, 1, STOP, 61, 4, STOP, 70]
    assert (request.request_id, request.prefix_tokens) == ("3-1-13", 6)
    own = next_request(asked(response, 70, after=NOTHING), 4, SAMPLING, PROMPT_ROW, "3-1", 5)
    assert own.input_ids.tolist() == [70]
    assert own.params.seed != request.params.seed


def test_draws_depend_on_the_conversation_and_not_on_the_order() -> None:
    def seeds(*order: int) -> dict[int, int | None]:
        response, found = turn(Response(), 1, STOP), {}
        for one in order:
            response = asked(response, one, after=NOTHING)
            request = next_request(response, 4, SAMPLING, PROMPT_ROW, "r", 5)
            found[one] = request.params.seed
            response = turn(response, STOP)
        return found

    assert seeds(50, 51) == seeds(51, 50)
    repeated = asked(turn(asked(turn(Response(), STOP), 50, after=NOTHING), STOP), 50, after=NOTHING)
    request = next_request(repeated, 4, SAMPLING, PROMPT_ROW, "r", 5)
    assert request.params.seed != seeds(50)[50], "a question that is repeated has a second answer"


def test_a_conversation_that_leaves_a_turn_out_is_rewritten() -> None:
    response = turn(asked(turn(Response(), 1, STOP), 60), 2, STOP)
    ids = np.append(branch_ids(response, response.branch, PROMPT_ROW), np.int32(70))
    for count, expected in ((len(ids), ([70], None, False)), (5, ([60], 0, True))):
        found = turns._placed(ids[:count], PROMPT_ROW, response, (0, 2), 2)
        assert (found.ids.tolist(), found.after, found.rewritten) == expected


def test_the_penalty_for_length_is_that_of_the_longest_branch() -> None:
    class Rewards:
        async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
            return RewardResult(float(tokens))

    scorer = Scorer(Rewards(), 0.0, print)  # type: ignore[arg-type]
    assert by_hand().sampled_tokens == 8
    assert asyncio.run(response_score(scorer, PROMPT_ROW, by_hand(), "")).reward == 4.0


def test_an_episode_is_cut_as_a_whole() -> None:
    """Overlong filtering takes all its branches out: they have one reward."""
    ends = (answer(finish_reason=reason) for reason in ("length", "stop"))
    rows = [row for end in ends for row in given(by_hand(), end).rollouts(1.0)]
    batch = StepBatch((Group(PROMPT_ROW, tuple(rows)),), {})
    [header] = header_of(batch, ColumnFile(Path(), 0, "", {})).groups
    assert [one.is_cut for one in header.responses] == [True] * 3 + [False] * 3


def test_every_sampled_token_is_trained_on_once() -> None:
    end = given(by_hand(), answer(finish_reason="turns"))
    rows = end.rollouts(1.0, [np.full(4, -1.0), np.full(5, -2.0), np.full(5, -3.0)])
    assert [one.token_ids_R.tolist() for one in rows] == [
        [50, 51, 2, STOP],
        [1, STOP, 60, 3, STOP],
        [1, STOP, 61, 4, STOP],
    ]
    masks = [one.loss_mask_R.tolist() for one in rows if one.loss_mask_R is not None]
    assert masks == [[False, False, True, True], [True, True, False, True, True], [False] * 3 + [True] * 2]
    assert [one.versions_R.tolist() for one in rows][2] == [1, 1, GIVEN, 1, 1]
    assert [(one.branch, one.has_prompt, one.finish_reason) for one in rows] == [
        (0, False, "stop"),
        (1, True, "stop"),
        (2, True, "turns"),
    ]
    assert [float(one.teacher_log_probs_R[0]) for one in rows if one.teacher_log_probs_R is not None] == [
        -1.0,
        -2.0,
        -3.0,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_against_a_list_of_conversations(seed: int) -> None:
    """By hand: each conversation is a list of (token, number of its turn); a turn is trained on once."""
    random, response = np.random.default_rng(seed), Response()
    conversations: list[list[tuple[int, int]]] = []
    ends: dict[int, list[tuple[int, int]]] = {PROMPT: [], NOTHING: []}
    context, token = ends[PROMPT], 1
    for number in range(int(random.integers(1, 9))):
        count = int(random.integers(1, 4))
        response = turn(response, *range(token, token + count))
        place = len(response.episode.turns) - 1
        context = [*context, *((one, number) for one in range(token, token + count))]
        token, ends[place] = token + count, context
        conversations.append(context)
        after = int(random.choice([*ends]))
        asks = [*range(token, token + int(random.integers(1, 3)))]
        token += len(asks)
        before, context = response, [*ends[after], *((one, -1) for one in asks)]
        response = asked(response, *asks, after=None if after == place else after)
    response = given(before, answer(finish_reason="stop"))
    whole = [
        one
        for one in conversations
        if not any(one == other[: len(one)] for other in conversations if other != one)
    ]
    rows = response.rollouts(1.0)
    assert [one.token_ids_R.tolist() for one in rows] == [[ids for ids, _ in one] for one in whole]
    trained = [
        ids
        for one in rows
        for ids, mask in zip(
            one.token_ids_R.tolist(),
            [True] * len(one.token_ids_R) if one.loss_mask_R is None else one.loss_mask_R.tolist(),
            strict=True,
        )
        if mask
    ]
    assert sorted(trained) == sorted({ids for one in conversations for ids, number in one if number >= 0})


# --- in the sampler ------------------------------------------------------------------------------


def test_branches_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first response: the first conversation, the compressed one, and one from its first turn."""
    world = BranchWorld(tmp_path)
    batch = run(step_of(world), monkeypatch)
    accounts.check_accounts(world.journal, world.journal, world.config.rollout, world.dataset.prompts)
    found = rows_of(batch)
    assert [(*one[:4], one.branch, one.has_prompt) for one in found[0]][:3] == [
        ("x\x03[b]yy\x03", "stop", 3.0, "11---111", 0, True),
        ("[sum]yy\x03[c]zzz\x03", "stop", 3.0, "-----111---1111", 1, False),
        ("x\x03[a]yy\x03[d]zzz\x03", "stop", 3.0, "-----111---1111", 2, True),
    ]
    assert len(found[0]) == 6, "two responses of three branches"
    metrics = batch.metrics
    assert (metrics["environment/turns_mean"], metrics["environment/branches_mean"]) == (6.0, 3.0)
    assert metrics["environment/branches_rewritten"] == 0.0
    sampled = sum(row.mask.count("1") for group in found for row in group)
    assert metrics["sampler/tokens_trained"] == sampled == metrics["rollout/tokens"]


def test_the_journal_cut_anywhere_gives_the_same_branches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cuts(BranchWorld, tmp_path, rows_of, monkeypatch)


# --- as samples ----------------------------------------------------------------------------------


def stored(folder: Path) -> StepBatch:
    """A step with a group of two episodes, of three branches and of one."""
    end = answer(finish_reason="stop")
    many, one = given(by_hand(), end), given(turn(Response(), 5, STOP), end)
    group = Group(PROMPT_ROW, (*many.rollouts(1.0), *one.rollouts(0.0)))
    batch = StepBatch((group,), {})
    write_step(folder, 1, batch)
    return batch


def test_a_step_file_keeps_branches(tmp_path: Path) -> None:
    batch = stored(tmp_path)
    expected, (found,) = batch.groups[0].rollouts, read_step(tmp_path, 1).groups
    places = [(one.branch, one.has_prompt, one.finish_reason) for one in found.rollouts]
    assert places == [(one.branch, one.has_prompt, one.finish_reason) for one in expected]
    header = read_header(tmp_path, 1)
    columns = StepColumns(header)
    columns.open()
    assert [len(one) for one in header.groups[0].episodes] == [3, 1]
    for number, one in enumerate(expected):
        ids_P, tokens = columns.read(0, number)
        assert ids_P.tolist() == ([100, 101] if one.has_prompt else [])
        assert tokens.token_ids_R.tolist() == one.token_ids_R.tolist()
    assert [one.branch for one in read_example(tmp_path, 1)[1]] == [0, 1, 2]
    columns.close()


@pytest.mark.parametrize(("share", "first"), [("whole", 0.5), ("split", 0.5 / 3)])
def test_an_episode_counts_once_in_its_group(tmp_path: Path, share: Any, first: float) -> None:
    """Rewards 1 and 0: the mean is 1/2, however many branches the first one has. In a mean over responses its
    branches count as many, or, with a part of its advantage each, as one."""
    stored(tmp_path)
    columns = StepColumns(read_header(tmp_path, 1))
    columns.open()
    [samples] = samples_of(columns, dr_grpo, branch_reward=share)
    assert [one.advantage for one in samples] == pytest.approx([first] * 3 + [-0.5])
    assert [one.loaded().token_ids.tolist()[0] for one in samples] == [50, 100, 100, 100]
    assert [one.positions for one in samples] == [one.loaded().positions for one in samples]
    assert sum(one.loaded().predicted_tokens for one in samples) == 8 + 2
    [pack] = pack_samples(samples, 64, loss_mean="sequence")
    share_T = pack.weight_T * pack.advantage_T * pack.mask_T
    positive, negative = float(share_T.clamp(min=0).sum()), float(share_T.clamp(max=0).sum())
    assert positive == pytest.approx(-negative * (3 if share == "whole" else 1))
    columns.close()
