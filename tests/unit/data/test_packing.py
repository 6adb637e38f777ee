"""Rollouts to packs: the shift, masks, weights and routes; the plan: balance, capacity, long tails."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algo.advantages import grpo
from bapo_megatron.data import samples as samples_module
from bapo_megatron.data.pack_plan import Documents, balance, plan_packs
from bapo_megatron.data.packing import pack_samples, split_into_updates
from bapo_megatron.data.routes import write_routes
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.experts import pack_totals, unknown_T
from bapo_megatron.tensor_types import MicroBatch
from bapo_megatron.types import Group, PackLayout, Prompt, Rollout, StoredRoutes
from tests.support.batches import in_memory, samples_of


def sample(prompt: list[int], response: list[int], advantage: float = 1.0, version: int = 0) -> Sample:
    token_ids = np.array(prompt + response, dtype=np.int32)
    log_probs_R = -np.arange(1, len(response) + 1, dtype=np.float32)
    return Sample(token_ids, log_probs_R, np.full(len(response), version, dtype=np.int32), advantage)


def test_fields_stand_at_the_predicting_token() -> None:
    """Prompt [5, 6], response [7, 8]: position 0 predicts 6 (no loss), 1 predicts 7, 2 predicts 8."""
    [pack] = pack_samples([sample([5, 6], [7, 8], advantage=-0.5, version=4)], pack_tokens=16)
    assert pack.token_T.tolist() == [5, 6, 7]
    assert pack.label_T.tolist() == [6, 7, 8]
    assert pack.position_T.tolist() == [0, 1, 2]
    assert pack.mask_T.tolist() == [0, 1, 1]
    assert pack.weight_T.tolist() == [0, 1, 1]
    assert pack.advantage_T.tolist() == [0, -0.5, -0.5]
    assert pack.rollout_log_prob_T.tolist() == [0, -1, -2]
    assert pack.old_log_prob_T.tolist() == [0, -1, -2]
    assert pack.version_T.tolist() == [0, 4, 4]
    assert pack.cu_seqlens == (0, 3)
    assert pack.rows == ((0, 0, 3),)


def test_old_log_probs_and_importance_stand_at_the_predicting_token() -> None:
    """Responses of 2 and 1 tokens, mean 1.5: weights 0.75 and 1.5 each, times the importance."""
    recomputed = dataclasses.replace(
        sample([5, 6], [7, 8]),
        old_log_probs_R=np.array([-0.5, -0.25], np.float32),
        importance_R=np.array([2.0, 0.5], np.float32),
    )
    [pack] = pack_samples([recomputed, sample([1], [2])], 16, loss_mean="sequence")
    assert pack.old_log_prob_T.tolist() == [0, -0.5, -0.25, -1]
    assert pack.rollout_log_prob_T.tolist() == [0, -1, -2, -1]
    assert pack.weight_T.tolist() == [0, 1.5, 0.375, 1.5]
    assert pack.mask_T.tolist() == [0, 1, 1, 1]


def test_a_constant_divides_every_response_alike() -> None:
    """Dr. GRPO: losses 1, 2, 3 and 5, divided by 8 and by the two responses that train: 11 / 8 / 2 = 0.6875.

    verl's ``agg_loss`` (1dda039) has this number with `seq-mean-token-sum-norm` and a factor of 8. Ours is
    divided by the 4 trained tokens, so the weights are 4 / 2 / 8.
    """
    samples = [sample([1], [2, 3, 4]), sample([5], [6]), untrained([7], [8])]
    [pack] = pack_samples(samples, 16, "constant", max_response_tokens=8)
    assert pack.weight_T[pack.mask_T > 0].tolist() == [0.25] * 4
    per_token = dict(zip((2, 3, 4, 6), (1.0, 2.0, 3.0, 5.0), strict=True))
    losses = [per_token.get(int(label), 0.0) for label in pack.label_T]
    assert float((pack.weight_T * torch.tensor(losses)).sum()) / 4 == 0.6875


def untrained(prompt: list[int], response: list[int]) -> Sample:
    """A response of which an environment gave every token."""
    return dataclasses.replace(sample(prompt, response), loss_mask_R=np.zeros(len(response), np.uint8))


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_sequence_mean_counts_responses_with_a_trained_token(ranks: int, context: int) -> None:
    """Of 1, 3 and 0 trained tokens: N = 2, so the weights are (4 / 2) / 1 = 2 and (4 / 2) / 3, in all 4, the
    divisor of the loss: at every number of replicas, and with documents padded for context parallelism."""
    samples = [sample([1], [2]), untrained([7], [8, 9]), sample([3], [4, 5, 6]), untrained([7], [])]
    many = 2 * context
    layouts = [PackLayout(rank, ranks, many, document_multiple=many) for rank in range(ranks)]
    packs = [pack for layout in layouts for pack in pack_samples(samples, 16, "sequence", layout)]
    found = torch.cat([pack.weight_T[pack.mask_T > 0] for pack in packs])
    assert sorted(found.tolist()) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])
    assert all(pack.sequences == 4 for pack in packs)


def test_a_sequence_mean_of_nothing_has_no_weight() -> None:
    [pack] = pack_samples([untrained([7], [8, 9])], 16, "sequence")
    assert pack.weight_T.tolist() == [0, 0]


def test_documents_are_padded_to_their_multiple() -> None:
    """4 and 1 positions take 4 and 4; the pack of 8 is padded to 12 by a document of 4."""
    layout = PackLayout(length_multiple=12, document_multiple=4)
    [pack] = pack_samples([sample([3, 4], [5, 6, 7]), sample([1], [2], advantage=-1.0)], 12, "token", layout)
    assert pack.cu_seqlens == (0, 4, 8, 12)
    assert pack.token_T.tolist() == [3, 4, 5, 6, 1, 0, 0, 0, 0, 0, 0, 0]
    assert pack.label_T.tolist() == [4, 5, 6, 7, 2, 0, 0, 0, 0, 0, 0, 0]
    assert pack.position_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 0]
    assert pack.mask_T.tolist() == pack.weight_T.tolist() == [0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert pack.advantage_T.tolist() == [0, 1, 1, 1, -1, 0, 0, 0, 0, 0, 0, 0]
    assert pack.rows == ((0, 0, 4), (1, 4, 1))
    assert pack.max_seqlen == 4


def test_padding_documents_obey_the_multiple() -> None:
    """512 is not a multiple of 6, so padding is cut into 510; a multiple above 512 is itself the piece."""
    [pack] = pack_samples([sample([1], [2] * 5)], 1200, layout=PackLayout(0, 1, 1200, document_multiple=6))
    assert pack.cu_seqlens == (0, 6, 516, 1026, 1200)
    [pack] = pack_samples([sample([1], [2])], 1800, layout=PackLayout(0, 1, 1800, document_multiple=600))
    assert pack.cu_seqlens == (0, 600, 1200, 1800)


@pytest.mark.parametrize("fixed", [False, True])
def test_an_update_without_samples_gets_a_dummy(fixed: bool) -> None:
    [dummy] = pack_samples([], 8, layout=PackLayout(1, 2, length_multiple=4, fixed_length=fixed))
    assert (dummy.mask_T.tolist(), dummy.cu_seqlens, dummy.rows) == ([0, 0, 0, 0], (0, 4), ())


def test_a_sample_without_positions_takes_no_room() -> None:
    """A single token predicts nothing and disturbs no neighbour."""
    [pack] = pack_samples([sample([1], [2, 3]), sample([], [4]), sample([5], [])], 8)
    assert pack.token_T.tolist() == [1, 2]
    assert pack.mask_T.tolist() == [1, 1]
    assert pack.rollout_log_prob_T.tolist() == [-1, -2]
    assert pack.cu_seqlens == (0, 2)
    assert pack.rows == ((0, 0, 2), (1, 2, 0), (2, 2, 0))


def test_nothing_predicts_the_first_token_of_a_sample_without_a_prompt() -> None:
    [pack] = pack_samples([sample([], [4, 5, 6]), sample([1], [2])], 8)
    assert pack.label_T.tolist() == [5, 6, 2]
    assert pack.mask_T.tolist() == [1, 1, 1]
    assert pack.rollout_log_prob_T.tolist() == [-2, -3, -1]


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=50)
def test_ranks_share_the_samples_and_the_shape(
    lengths: list[int], data_size: int, multiple: int, count: int, document: int, fixed: bool
) -> None:
    samples = [sample([1], list(range(n))) for n in lengths]
    layouts = [
        PackLayout(rank, data_size, multiple * document, count, document, fixed) for rank in range(data_size)
    ]
    ranks = [pack_samples(samples, 50, "token", layout) for layout in layouts]
    assert {len(packs) for packs in ranks} == {len(ranks[0])}
    assert len(ranks[0]) % count == 0
    packs = [pack for packs in ranks for pack in packs]
    assert sorted(row[0] for pack in packs for row in pack.rows) == list(range(len(samples)))
    assert sum(float(pack.mask_T.sum()) for pack in packs) == sum(lengths)
    for pack in packs:
        check_shape(pack, multiple * document, document)
    if fixed:
        assert len({pack.token_T.numel() for pack in packs}) == 1
    else:
        for pack in packs:
            documents = pack.cu_seqlens[len(pack.rows)]
            assert pack.token_T.numel() - max(1, documents) < multiple * document


def check_shape(pack: MicroBatch, multiple: int, document: int) -> None:
    assert pack.token_T.numel() <= 50
    assert pack.token_T.numel() % multiple == 0
    assert pack.cu_seqlens[-1] == pack.token_T.numel()
    assert all(bound % document == 0 for bound in pack.cu_seqlens)
    for row, (_, start, length) in enumerate(pack.rows):
        assert start == pack.cu_seqlens[row]
        assert 0 <= pack.cu_seqlens[row + 1] - start - length < document


def group(rewards: list[float]) -> Group:
    prompt = Prompt(0, np.array([1, 2], dtype=np.int32), "3", "test")
    columns = np.array([3], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32)
    return Group(prompt, tuple(Rollout(*columns, "stop", reward) for reward in rewards))


@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 5))
def test_updates_share_the_groups(count: int, updates: int, seed: int) -> None:
    groups = [group([float(i), 0.0]) for i in range(count)]
    parts = split_into_updates(groups, updates, (seed, 1))
    assert sorted(g.rollouts[0].reward for part in parts for g in part) == list(range(count))
    assert len(parts) == min(updates, count)
    sizes = [len(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all(sizes)
    again = split_into_updates(groups, updates, (seed, 1))
    assert [[id(g) for g in part] for part in again] == [[id(g) for g in part] for part in parts]


X = 255
ROUTES_PROMPT = Prompt(0, np.arange(3, dtype=np.int32), "", "")


def with_routes(prompt: int, response: int, routes: Any, dtype: str = "u1") -> Sample:
    made = sample(list(range(prompt)), list(range(prompt, prompt + response)))
    return dataclasses.replace(made, routes_R=None if routes is None else np.array(routes, dtype))


FIRST = [[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[2, 1], [4, 3]]]
SECOND = [[[6, 7], [0, 1]], [[X, X], [X, X]]]


def test_a_row_is_at_the_position_that_predicts_its_token() -> None:
    """By hand: a prompt of 3 and a response of 3, a response of 2 without a prompt, one without routes."""
    samples = [with_routes(3, 3, FIRST), with_routes(0, 2, SECOND), with_routes(1, 1, None)]
    [pack] = pack_samples(samples, 16)
    assert pack.route_TLK is not None
    place = {index: (start, positions) for index, start, positions in pack.rows}
    found = {n: pack.route_TLK[start : start + count].tolist() for n, (start, count) in place.items()}
    none = [[X, X], [X, X]]
    assert found == {0: [none, none, *FIRST], 1: [SECOND[1]], 2: [none]}
    assert pack.route_TLK.dtype == torch.uint8
    assert unknown_T(pack.route_TLK).sum() == pack.token_T.numel() - 3
    assert pack_totals([pack]).tolist() == [5, 3, 4]  # trained, known of them, unknown but padding


def test_numbers_of_many_experts_are_int16() -> None:
    rows = [[[300, 511]], [[0xFFFF, 0xFFFF]]]
    [pack] = pack_samples([with_routes(1, 2, rows, "u2")], 4)
    assert pack.route_TLK is not None
    assert (pack.route_TLK.dtype, pack.route_TLK.tolist()) == (torch.int16, [[[300, 511]], [[-1, -1]]])
    assert unknown_T(pack.route_TLK).tolist() == [False, True]


def test_a_rank_reads_its_own_samples_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with a dummy pack reads none, and has the column all the same."""
    parts = [np.array(FIRST, np.uint8), np.array(SECOND, np.uint8)]
    crcs = write_routes(tmp_path / "routes.npy", parts)
    rollouts = []
    for first, count, crc in ((0, 3, crcs[0]), (3, 2, crcs[1])):
        stored = StoredRoutes(tmp_path / "routes.npy", first, count, 2, 2, "|u1", crc)
        ids = np.arange(count, dtype=np.int32)
        rollouts.append(Rollout(ids, np.zeros(count, np.float32), ids, "stop", 1.0, stored))
    [samples] = samples_of(in_memory(Group(ROUTES_PROMPT, tuple(rollouts))), grpo, (), "replay")
    read: list[int] = []
    plain = samples_module.read_routes
    monkeypatch.setattr(samples_module, "read_routes", lambda one: (read.append(one.first), plain(one))[1])
    packs = [pack_samples(samples, 8, layout=PackLayout(data_rank=rank, data_size=3)) for rank in range(3)]
    assert sorted(read) == [0, 3]
    assert all(pack.route_TLK is not None for [pack] in packs)
    known = sorted(int((~unknown_T(pack.route_TLK)).sum()) for [pack] in packs if pack.route_TLK is not None)
    assert known == [0, 1, 3]


@pytest.mark.parametrize(("asked", "replays"), [("off", None), ("measure", False), ("replay", True)])
def test_what_is_made_of_stored_routes(asked: str, replays: bool | None, tmp_path: Path) -> None:
    stored = StoredRoutes(tmp_path / "routes.npy", 0, 3, 2, 2, "|u1", 0)
    ids = np.arange(3, dtype=np.int32)
    one = Rollout(ids, np.zeros(3, np.float32), ids, "stop", 1.0, stored)
    [[made, _]] = samples_of(in_memory(Group(ROUTES_PROMPT, (one, one))), grpo, (), asked)  # type: ignore[arg-type]
    assert made.route_row == (None if replays is None else (2, 2, np.dtype(np.uint8)))
    assert made.without_routes().route_row is None
    if replays is not None:
        assert made.replays_routes == replays


def rank_costs(plan: list[list[list[int]]], lengths: list[int], quadratic: float) -> np.ndarray:
    costs = np.array(lengths) + quadratic * np.square(lengths, dtype=float)
    return np.array([sum(costs[i] for pack in rank for i in pack) for rank in plan])


def long_tailed(number: int, longest: int, seed: int) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(np.log(0.25 * longest), 0.9, number)
    return [int(length) for length in np.clip(lengths, 64, longest)]


FIXED = {"fixed_length": True, "quadratic": 1.0}


@pytest.mark.parametrize(
    ("lengths", "pack_tokens", "layout", "plan"),
    [
        # cost(4) = 4 + 16 = 20, cost(2) = 2 + 4 = 6: the long one against all four short ones, 20 : 24.
        # Equal tokens, [4, 2] and [2, 2, 2], would cost 26 : 18.
        ([4, 2, 2, 2, 2], 8, PackLayout(data_size=2, quadratic=1.0), [[[1, 2, 3, 4]], [[0]]]),
        # The same documents at one length: 6 and 6 tokens, not 4 and 8, which would pad the 4 to 8.
        ([4, 2, 2, 2, 2], 8, PackLayout(data_size=2, **FIXED), [[[0, 3]], [[1, 2, 4]]]),
        # Packs of 8: 8 | 7 1 | 6 2 | 4 4, attention 64, 50, 40, 32. Best is 64 + 32 : 50 + 40.
        ([8, 7, 6, 4, 4, 2, 1], 8, PackLayout(data_size=2, **FIXED), [[[0], [3, 4]], [[1, 6], [2, 5]]]),
        # Two packs of 2 a rank: 2 | empty against 1 1 | 1 1, attention 4 : 4, although tokens are 2 : 4.
        ([2, 1, 1, 1, 1], 2, PackLayout(0, 2, 1, 2, **FIXED), [[[0], []], [[1, 4], [2, 3]]]),
        # Longest first gives 3 2 2 | 3 2; exchanging a 3 for a 2 makes it 6 : 6.
        ([3, 3, 2, 2, 2], 8, PackLayout(), [[[0, 1], [2, 3, 4]]]),
        ([3, 3, 2, 2, 2], 8, PackLayout(fixed_length=True), [[[0, 1], [2, 3, 4]]]),
        # The heaviest pack of a rank comes first.
        ([3, 5, 4], 5, PackLayout(), [[[1], [2], [0]]]),
        # Longest to the emptiest gives 6 3 | 5 4 and has no room for the 2; best fit gives 6 4 | 5 3 2.
        ([6, 5, 4, 3, 2], 10, PackLayout(), [[[0, 2], [1, 3, 4]]]),
        ([], 8, PackLayout(0, 2, 1, 3), [[[], [], []]] * 2),
        ([], 8, PackLayout(0, 2, 1, 3, fixed_length=True), [[[], [], []]] * 2),
    ],
)
def test_plans_by_hand(
    lengths: list[int], pack_tokens: int, layout: PackLayout, plan: list[list[list[int]]]
) -> None:
    assert plan_packs(lengths, pack_tokens, layout) == plan


@pytest.mark.parametrize(
    ("lengths", "pack_tokens", "layout", "message"),
    [
        ([3, 51], 50, PackLayout(), r"51 tokens .* does not fit into packs of 50 .* at least 51"),
        ([49], 50, PackLayout(length_multiple=8), r"packs of 48 \(pack_tokens=50, .*=8\).* at least 56"),
        ([4], 3, PackLayout(length_multiple=4), r"packs of 0 \(pack_tokens=3"),
    ],
)
def test_a_sample_longer_than_a_pack_is_refused(
    lengths: list[int], pack_tokens: int, layout: PackLayout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_packs(lengths, pack_tokens, layout)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [4, 16])
def test_long_tailed_updates_come_out_level(ranks: int, seed: int) -> None:
    """256 samples, the longest as long as a pack; the slowest rank decides how long the update takes."""
    lengths = long_tailed(256, 65536, seed)
    plan = plan_packs(lengths, 65536, PackLayout(data_size=ranks, quadratic=1e-5))
    costs = rank_costs(plan, lengths, 1e-5)
    assert costs.max() <= 1.03 * costs.mean()
    assert sum(len(rank) for rank in plan) <= 1.1 * sum(lengths) / 65536 + ranks


@pytest.mark.parametrize("seed", range(4))
def test_one_length_pads_little_and_comes_out_level(seed: int) -> None:
    """Packs twice as long as the longest sample, in multiples of four on each of eight ranks."""
    lengths = long_tailed(512, 65536, seed)
    layout = PackLayout(0, 8, 16, 4, fixed_length=True, quadratic=1e-5)
    plan = plan_packs(lengths, 131072, layout)
    totals = [[sum(lengths[i] for i in pack) for pack in rank] for rank in plan]
    length = max(max(rank) for rank in totals)
    tokens = length * sum(len(rank) for rank in plan)
    assert sum(lengths) >= 0.98 * tokens
    costs = length * len(plan[0]) + rank_costs(plan, lengths, 1e-5) - [sum(rank) for rank in totals]
    assert costs.max() <= 1.03 * costs.mean()


PACKS = [[[0, 1], [2]], [[3], [4, 5]]]


@pytest.mark.parametrize(
    ("groups", "tokens", "weights", "room", "more", "balanced"),
    [
        # 7 + 4 against 5 + 2 (11 : 7) in full packs of 11 and 8: 7 for 5 gives 9 : 9.
        ([[[0, 1]], [[2, 3]]], [7, 4, 5, 2], [7, 4, 5, 2], 11, {}, [[[2, 1]], [[0, 3]]]),
        # Three of 3 against one, where there is room: moving one gives 6 : 6.
        ([[[0, 1, 2]], [[3]]], [3, 3, 3, 3], [3, 3, 3, 3], 9, {}, [[[1, 2]], [[3, 0]]]),
        # Weights 9 : 1, but the light document takes 6 of 9 tokens: nothing fits beside it.
        ([[[0, 1]], [[2]]], [5, 4, 6], [5, 4, 1], 9, {}, [[[0, 1]], [[2]]]),
        # Weights 5 4 | 1 | 2. The 1 fills its pack of 9 tokens, so the 5 changes places with the 2.
        ([[[0, 1]], [[2]], [[3]]], [5, 4, 9, 2], [5, 4, 1, 2], 9, {}, [[[1, 3]], [[2]], [[0]]]),
        # 9 : 1 is 4 above the mean of 5: it stops at the slack, and at the work.
        ([[[0, 1]], [[2]]], [5, 4, 1], [5, 4, 1], 9, {"slack": 4.0, "work": 10**6}, [[[0, 1]], [[2]]]),
        ([[[0, 1]], [[2]]], [5, 4, 1], [5, 4, 1], 9, {"slack": 3.9, "work": 5000}, [[[0, 1]], [[2]]]),
        # All packs are full. Weights (5 4) 8 : 2 (1 0), the packs in brackets of unequal pieces: of single
        # documents with room 8 for 2 is the best, 11 : 9.
        (PACKS, [3, 2, 5, 5, 4, 1], [5, 4, 8, 2, 1, 0], 5, {}, [[[0, 1], [3]], [[2], [4, 5]]]),
    ],
)
def test_balancing_by_hand(
    groups: Any, tokens: list[int], weights: list[int], room: int, more: dict[str, Any], balanced: Any
) -> None:
    balance(groups, Documents(np.array(tokens), np.array(weights), room), **{"slack": 0, **more})
    found, wanted = ([[sorted(pack) for pack in group] for group in one] for one in (groups, balanced))
    assert found == wanted
