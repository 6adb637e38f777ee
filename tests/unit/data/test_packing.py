"""Rollouts to packs: the shift, the masks, the weights, the plan, and the routes of their tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algo.advantages import dr_grpo, grpo
from bapo_megatron.data import samples as samples_module
from bapo_megatron.data.packing import pack_samples, split_into_updates
from bapo_megatron.data.routes import write_routes
from bapo_megatron.data.samples import Sample, samples_of
from bapo_megatron.policy.experts import pack_totals, unknown_T
from bapo_megatron.types import Group, MicroBatch, PackLayout, Prompt, Rollout, StoredRoutes
from tests.support.batches import in_memory


def sample(prompt: list[int], response: list[int], advantage: float = 1.0, version: int = 0) -> Sample:
    count = len(response)
    return Sample(
        token_ids=np.array(prompt + response, dtype=np.int32),
        log_probs_R=-np.arange(1, count + 1, dtype=np.float32),
        versions_R=np.full(count, version, dtype=np.int32),
        advantage=advantage,
    )


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


def test_documents_follow_each_other_and_positions_restart() -> None:
    [pack] = pack_samples([sample([1], [2]), sample([3, 4], [5, 6, 7])], pack_tokens=16)
    assert pack.token_T.tolist() == [3, 4, 5, 6, 1]
    assert pack.position_T.tolist() == [0, 1, 2, 3, 0]
    assert pack.cu_seqlens == (0, 4, 5)
    assert pack.rows == ((1, 0, 4), (0, 4, 1))


def test_length_is_rounded_up_and_padding_counts_nowhere() -> None:
    [pack] = pack_samples([sample([1], [2, 3])], 16, layout=PackLayout(length_multiple=4))
    assert pack.token_T.tolist() == [1, 2, 0, 0]
    assert pack.mask_T.tolist() == [1, 1, 0, 0]
    assert pack.cu_seqlens == (0, 2, 4)


def test_long_padding_is_cut_into_documents() -> None:
    samples = [sample([1], [2] * 1299), sample([1], [2])]
    layouts = [PackLayout(rank, 2, fixed_length=True) for rank in range(2)]
    packs = [pack_samples(samples, 1400, layout=layout)[0] for layout in layouts]
    assert [pack.cu_seqlens for pack in packs] == [(0, 1299), (0, 1, 513, 1025, 1299)]


def test_sequence_mean_weighs_every_response_alike() -> None:
    """Responses of 1 and 3 tokens: mean 2, weights 2 and 2/3; both sum to 2, all to the 4 tokens."""
    [pack] = pack_samples([sample([1], [2]), sample([3], [4, 5, 6])], 16, loss_mean="sequence")
    assert pack.weight_T.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])


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


def test_documents_that_only_fit_without_their_padding_do_not_share_a_pack() -> None:
    """5 and 5 take 8 and 8, which is more than 12."""
    layout = PackLayout(length_multiple=4, document_multiple=4)
    packs = pack_samples([sample([1], [2] * 5)] * 2, 12, layout=layout)
    assert [pack.cu_seqlens for pack in packs] == [(0, 8), (0, 8)]


def test_padding_documents_obey_the_multiple() -> None:
    """512 is not a multiple of 6, so padding is cut into 510; a multiple above 512 is itself the piece."""
    [pack] = pack_samples([sample([1], [2] * 5)], 1200, layout=PackLayout(0, 1, 1200, document_multiple=6))
    assert pack.cu_seqlens == (0, 6, 516, 1026, 1200)
    [pack] = pack_samples([sample([1], [2])], 1800, layout=PackLayout(0, 1, 1800, document_multiple=600))
    assert pack.cu_seqlens == (0, 600, 1200, 1800)


def test_packs_are_padded_to_the_longest_only_where_asked() -> None:
    samples = [sample([1], [2] * 9), sample([1], [2] * 3)]
    for fixed, shapes in ((False, [10, 4]), (True, [10, 10])):
        layouts = [PackLayout(rank, 2, 2, fixed_length=fixed) for rank in range(2)]
        packs = [pack for layout in layouts for pack in pack_samples(samples, 10, layout=layout)]
        assert [pack.token_T.numel() for pack in packs] == shapes


def test_a_rank_without_samples_gets_dummies() -> None:
    for samples in ([], [sample([1], [2] * 7)]):
        [dummy] = pack_samples(samples, 8, layout=PackLayout(1, 2, length_multiple=4, document_multiple=2))
        assert dummy.mask_T.tolist() == [0, 0, 0, 0]
        assert dummy.cu_seqlens == (0, 4)
        assert dummy.rows == ()
    [dummy] = pack_samples([], 8, layout=PackLayout(1, 2, length_multiple=4, fixed_length=True))
    assert dummy.cu_seqlens == (0, 4)


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


def test_a_layout_of_multiples_that_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="length_multiple=6 is not a multiple of document_multiple=4"):
        PackLayout(length_multiple=6, document_multiple=4)


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
    rollouts = tuple(
        Rollout(
            np.array([3], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32), "stop", reward
        )
        for reward in rewards
    )
    return Group(prompt, rollouts)


def test_advantages_are_normalized_within_a_group() -> None:
    groups = [group([1.0, 0.0]), group([0.0, 0.0, 3.0])]
    samples = [one.loaded() for each in samples_of(in_memory(*groups), dr_grpo) for one in each]
    assert [s.advantage for s in samples] == pytest.approx([0.5, -0.5, -1.0, -1.0, 2.0])
    assert samples[0].token_ids.tolist() == [1, 2, 3]


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


def test_packing_builds_tensors_of_the_stated_types() -> None:
    [pack] = pack_samples([sample([1], [2])], 8)
    assert pack.version_T.dtype == torch.int32
    assert pack.mask_T.dtype == pack.rollout_log_prob_T.dtype == torch.float32


X = 255
ROUTES_PROMPT = Prompt(0, np.arange(3, dtype=np.int32), "", "")


def with_routes(
    prompt: int, response: int, routes: list[list[list[int]]] | None, dtype: str = "u1"
) -> Sample:
    return Sample(
        np.arange(prompt + response, dtype=np.int32),
        np.zeros(response, np.float32),
        np.zeros(response, np.int32),
        1.0,
        routes_R=None if routes is None else np.array(routes, dtype),
    )


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


def test_packs_without_routes_have_no_column() -> None:
    [pack] = pack_samples([with_routes(1, 2, None)], 4)
    assert pack.route_TLK is None
    assert pack.take(slice(0, 1)).route_TLK is None


def test_a_part_has_its_tokens_routes() -> None:
    [pack] = pack_samples([with_routes(3, 3, FIRST)], 8)
    part = pack.take(torch.tensor([4, 0]))
    assert part.route_TLK is not None
    assert part.route_TLK.tolist() == [FIRST[2], [[X, X], [X, X]]]
    assert part.to(torch.device("cpu")).route_TLK is part.route_TLK


def test_a_rank_reads_its_own_samples_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with a dummy pack reads none, and has the column all the same."""
    parts = [np.array(FIRST, np.uint8), np.array(SECOND, np.uint8)]
    crcs = write_routes(tmp_path / "routes.npy", parts)
    file = tmp_path / "routes.npy"
    stored = [StoredRoutes(file, first, n, 2, 2, "|u1", crc)
              for first, n, crc in ((0, 3, crcs[0]), (3, 2, crcs[1]))]  # fmt: skip
    ids = [np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)]
    rollouts = [
        Rollout(one, np.zeros(len(one), np.float32), one, "stop", 1.0, where)
        for one, where in zip(ids, stored, strict=True)
    ]
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
