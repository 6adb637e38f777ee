"""``bapo plan``: FLOPs, traffic and the seconds of updates, engines and syncs by hand on a small shape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapo_megatron.algo.bapo import balanced, grpo, paper
from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.config import (
    AlgorithmConfig,
    ParallelConfig,
    PolarityConfig,
    ReferenceKlConfig,
    SglangConfig,
)
from bapo_megatron.hf.config import attention_flops, attention_weight, linear_flops_per_token
from bapo_megatron.planning.engines import cache_bytes_per_token, engine_plan
from bapo_megatron.planning.job import GPUS, Job, PlanOptions, slots
from bapo_megatron.planning.memory import host_bytes, reference_bytes
from bapo_megatron.planning.page import plan_text
from bapo_megatron.planning.plan import make_plan, summary
from bapo_megatron.planning.speed import handover_estimate, host_update_seconds, reference_seconds, speed
from bapo_megatron.planning.traffic import Sync, forward_passes, known_passes, update_traffic
from tests.support.altered import altered
from tests.support.planned_jobs import BIG, ON_HOST, SMALL, colocated, job, planned


def test_flops_by_hand() -> None:
    """Matrices of a layer: 8 x 16 + 8 x 8 + 3 x 8 x 16 = 576; of the head: 256."""
    assert linear_flops_per_token(SMALL) == 2 * (4 * 576 + 256)
    # 4 layers x 4 heads x 2 wide x 2 products x 2 FLOPs x 10 x 10 / 2 causal pairs
    assert attention_flops(SMALL, 10) == 4 * 4 * 2 * 2 * 2 * 50
    assert attention_weight(SMALL) == pytest.approx(64 / 5120)


def test_the_time_of_a_step_on_the_host_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 B an element at half of 614 GB/s, shared by a node's ranks; 4 and 2 B at half of 64 GB/s."""
    shared = job(ParallelConfig(data=2))
    assert host_update_seconds(shared) == 0
    host = altered(shared, ON_HOST)
    stepping = host_update_seconds(host)
    assert stepping == pytest.approx(40 * 2952 / 307e9)
    slow = replace(GPUS["h100-80gb"], pcie=0.1e9)
    monkeypatch.setitem(GPUS, "h100-80gb", slow)
    assert host_update_seconds(host) == pytest.approx(2 * 2952 / 0.05e9)
    monkeypatch.undo()
    plan, without = make_plan(host), make_plan(shared)
    assert plan.train_seconds - without.train_seconds == pytest.approx(host.updates * stepping)
    assert "0.0 s to step the optimizer on the host" in plan_text(plan, [], [])


def test_traffic_by_hand() -> None:
    """16 tokens x 8 wide x 2 B = 256 B a message, 8 packs. With CP half of a pack on each rank: 8 tokens
    x 2 x 4 wide x 2 B, once round a ring of two, 4 layers, 8 packs."""
    for name, parallel, sent in (
        ("TP", ParallelConfig(tensor=2, sequence=True), 256 / 2 * 8 * (4 * (4 + 6 + 4) + 2)),
        ("PP", ParallelConfig(pipeline=2), 256 * 8 * 3),
        ("DP", ParallelConfig(data=2), 6 * 2952 / 2),
        ("CP", ParallelConfig(context=2), 8 * 8 * 2 * 4 * 8 * (3 + 1)),
    ):
        assert {part.name: part.sent for part in update_traffic(job(parallel))}[name] == sent


@pytest.mark.parametrize(
    ("flags", "links"),
    [
        ((), ("NVLink", "network", "network")),
        # Groups of 6 ranks: the second one has two GPUs of the first node and four of the next.
        (("tensor=2", "context=3", "data=4"), ("NVLink", "network", "network")),
        (("tensor=4", "context=2"), ("NVLink", "NVLink", "NVLink")),
    ],
)
def test_traffic_takes_the_network_once_a_group_leaves_the_node(
    flags: tuple[str, ...], links: tuple[str, ...]
) -> None:
    found = {part.name: part.link for part in update_traffic(planned(*flags))}
    assert found == dict(zip(("TP", "CP", "DP"), links, strict=True))


def test_speed_adds_up() -> None:
    """No pipeline: time is executed FLOPs over the stated rates, and full recompute adds the layers once."""
    attention = attention_flops(SMALL, 16) / 16  # every response has 14 tokens, a prompt 2
    body, head = 2 * 4 * 576, 512
    # "selective" recomputes the MLP, 2 x 4 x 3 x 8 x 16.
    for mode, again, scores in (("none", 0, 0), ("selective", 3072, 0), ("full", body, 1)):
        found = speed(job(recompute=mode))
        # The search's pass comes on top. Flash attention makes seven products, of which a forward pass has
        # two, so 3.5 forward passes, not 3.
        matrices = 4 * body + again + 4 * head
        scored = (4.5 + scores) * attention
        assert found.executed_per_token == pytest.approx(matrices + scored)
        seconds = 128 * (matrices / 0.3 + scored / 0.5) / 989e12
        assert found.update_seconds == pytest.approx(seconds)
        assert found.idle == pytest.approx(0, abs=1e-9)


MASKED = CorrectionsConfig(off_policy_delta=0.1)
BY_TRAINER = AlgorithmConfig(balanced(), old_log_probs="trainer")


@pytest.mark.parametrize(
    ("algorithm", "staleness", "passes", "known"),
    [
        (AlgorithmConfig(balanced()), 0, 1, 1),
        (AlgorithmConfig(balanced()), 1, 1, 0),
        (AlgorithmConfig(balanced(), known_ratio=False), 0, 1, 0),
        (AlgorithmConfig(balanced(), polarity=PolarityConfig(enabled=True)), 0, 1, 0),
        (AlgorithmConfig(grpo()), 0, 0, 0),
        (AlgorithmConfig(replace(paper(), bounds_tokens=None)), 0, 0, 0),
        (BY_TRAINER, 1, 2, 1),
        # pi_old takes a pass over the step's tokens, which four epochs train on: a quarter for each
        (replace(BY_TRAINER, bounds=grpo(), reuse_epochs=4, updates_per_epoch=3), 0, 0.25, 0),
        (AlgorithmConfig(grpo(), corrections=MASKED), 0, 1, 1),
        (AlgorithmConfig(balanced(), corrections=MASKED), 0, 2, 2),
        (AlgorithmConfig(loss="sapo"), 0, 0, 0),
        (AlgorithmConfig(loss="gspo"), 0, 1, 0),  # between engine and trainer there is a ratio, too
        (AlgorithmConfig(loss="gspo", old_log_probs="trainer"), 0, 2, 1),
        (AlgorithmConfig(loss="not_on_this_machine:Loss"), 0, 1, 0),
    ],
)
def test_forward_only_passes_of_an_update_and_those_that_a_steps_first_skips(
    algorithm: AlgorithmConfig, staleness: int, passes: float, known: int
) -> None:
    """A step of one update takes no forward-only pass where the ratios are known; one of four takes three."""
    one = altered(job(), {"run.algorithm": algorithm, "run.rollout.max_staleness": staleness})
    assert (forward_passes(one), known_passes(one)) == (passes, known)
    for epochs in (1, 4):
        plan = make_plan(altered(one, {"run.algorithm.reuse_epochs": epochs}))
        once = plan.speed.forward_seconds / forward_passes(plan.job) if known else 0
        updates = epochs * algorithm.updates_per_epoch
        assert plan.train_seconds == pytest.approx(updates * plan.speed.update_seconds - known * once)
        assert ("the first" in plan_text(plan, [], [])) == bool(known)


def test_replicas_without_a_full_pack_idle() -> None:
    """8 packs: on 16 replicas as long as on 8, at half the tokens a GPU, and nothing the better for it."""
    eight, sixteen = (make_plan(job(ParallelConfig(data=data))) for data in (8, 16))
    assert sixteen.speed.update_seconds == pytest.approx(eight.speed.update_seconds)
    assert sixteen.speed.tokens_per_second == pytest.approx(eight.speed.tokens_per_second / 2)
    assert sixteen.speed.idle == pytest.approx(0.5)
    assert sixteen.cost > 1.9 * eight.cost
    text = plan_text(sixteen, [], [])
    assert "WARNING: its 128 tokens fill 50% of one pack of each of 16 replicas" in text
    assert "of each of" not in plan_text(eight, [], [])
    assert "GB of the 1,800 that it may use, 90% of its 2,000; the checkpoint has" in text


@pytest.mark.parametrize(("mean", "spread"), [(16384, 1.5), (8000, 1.5), (50000, 1.5), (16384, 0.3)])
def test_attention_is_that_of_the_assumed_lengths(mean: int, spread: float) -> None:
    """The token-weighted mean of the lengths by 20,000 quantiles, with prompts of the mean length."""
    found = planned(mean_response_tokens=mean, length_spread=spread)
    responses = [found.lengths.quantile((i + 0.5) / 20_000) for i in range(20_000)]
    lengths = [found.mean_prompt + response for response in responses]
    expected = sum(n * n for n in lengths) / sum(lengths)
    assert found.typical_length == pytest.approx(expected, rel=0.005)
    assert speed(found).flops_per_token == pytest.approx(
        3 * (linear_flops_per_token(BIG) + attention_flops(BIG, expected) / expected), rel=0.005
    )


def test_pipeline_speed() -> None:
    """Two stages, 8 packs: 9 slots of the last stage, which has the output layer; fewer if interleaved."""
    found = speed(job(ParallelConfig(pipeline=2)))
    attention = attention_flops(SMALL, 16) / 16 / 2
    body = 2 * 4 * 576 / 2
    slot = 16 * ((body * 4 + 4 * 512) / 0.3 + attention * 4.5 / 0.5) / 989e12
    assert found.update_seconds == pytest.approx(9 * slot)
    assert slots(ParallelConfig(pipeline=4, virtual=3), 8) == 8 + 3 / 3


def test_cache_by_hand() -> None:
    assert cache_bytes_per_token(SMALL) == 2 * 4 * 2 * 2 * 2
    assert cache_bytes_per_token(BIG) == 256 * 1024
    found = engine_plan(planned(engine_gpus=64))
    # 0.85 x 80 GB less a quarter of the weights, on four GPUs, over 17.7 GB a sequence.
    assert found.longest_sequences == int((0.85 * 80e9 * 4 - 65.5e9) / (67584 * 256 * 1024)) == 11
    assert engine_plan(planned(engine_gpus=2)).count == 0
    assert not engine_plan(altered(planned(), {"run.rollout.sglang.tensor": 1})).fits


def test_decoding_by_hand() -> None:
    """One engine of 4 GPUs, 8 responses: a step reads all weights and 8 caches of 2 + 14 / 2 tokens.

    The model has two KV heads: each is held by two GPUs.
    """
    found = engine_plan(altered(job(), {"options.engine_gpus": 4}))
    step = (2952 * 2 / 4 + 8 * 9 * 64 / 2) / (0.6 * 3350e9)
    assert found.running == 8
    assert found.tokens_per_second == pytest.approx(8 / step)
    assert found.step_seconds == pytest.approx(14 * step)
    assert found.longest_seconds == pytest.approx(14 * (2952 * 2 / 4 + 7 * 64 / 2) / (0.6 * 3350e9))
    # All have the longest length, so nothing is left for a tail: the prompts' 2 tokens come on top.
    assert found.prefill_seconds == pytest.approx(8 * 2 * (2 * 4 * 576 + 512) / 4 / (0.3 * 989e12))
    assert found.rollout_seconds == pytest.approx(found.step_seconds + found.prefill_seconds)
    assert found.cut_share == 1


def test_dropped_groups_are_sampled_again() -> None:
    """Half of the groups dropped: twice as many responses, of which as many train as before."""
    with_half = altered(job(), {"options.dropped_groups": 0.5, "options.engine_gpus": 4})
    found, without = make_plan(with_half), make_plan(altered(with_half, {"options.dropped_groups": 0.0}))
    assert found.job.sampled_responses == 16
    assert found.engines.running == 16
    assert found.engines.prefill_seconds == pytest.approx(2 * without.engines.prefill_seconds)
    twice = found.engines.step_seconds * found.engines.tokens_per_second
    assert twice == pytest.approx(2 * without.engines.step_seconds * without.engines.tokens_per_second)
    assert found.train_seconds == without.train_seconds
    assert "for 16 responses of 14 tokens, 8 of them of dropped groups" in plan_text(found, [], [])
    assert "dropped" not in plan_text(without, [], [])
    most = altered(with_half, {"options.dropped_groups": 0.99})
    assert most.sampled_responses == 3 * 8  # rollout.max_oversampling


def test_the_tail_of_a_rollout_by_hand() -> None:
    """Two engines, eight responses of 7 tokens in the mean: each has four, one of them of 14."""
    options = PlanOptions(mean_response_tokens=7, engine_gpus=8, length_spread=1e-6)
    even = engine_plan(replace(job(), options=options))
    bandwidth = 0.6 * 3350e9
    weights, token = 2952 * 2 / 4 / bandwidth, 64 / 2 / bandwidth
    seconds = 7 * weights + 4 * 7 * (2 + 3.5) * token
    assert even.rollout_seconds - even.prefill_seconds == pytest.approx(seconds)
    assert even.cut_share == pytest.approx(0)
    spread = engine_plan(replace(job(), options=replace(options, length_spread=3.0)))
    assert spread.rollout_seconds > 1.8 * even.rollout_seconds  # 14 steps, not 7
    uneven = engine_plan(replace(job(), options=replace(options, engine_imbalance=2.0)))
    seconds = 7 * weights + 8 * 7 * (2 + 3.5) * token
    assert uneven.rollout_seconds - uneven.prefill_seconds == pytest.approx(seconds)
    queued = engine_plan(altered(job(), {"options": options, "run.rollout.max_batch": 2}))
    assert queued.running == 2
    seconds = 14 * weights + 4 * 7 * (2 + 3.5) * token  # two after two
    assert queued.rollout_seconds - queued.prefill_seconds == pytest.approx(seconds)


def test_a_step_that_continues_responses_waits_for_no_tail() -> None:
    """With staleness of 1 unfinished responses continue in the next step; they overlap unless that is off."""
    one = replace(job(), options=PlanOptions(mean_response_tokens=7, length_spread=3.0))
    waits = make_plan(one)
    assert waits.sampling_seconds == waits.engines.rollout_seconds > waits.engines.step_seconds
    beside = make_plan(altered(one, {"run.rollout.max_staleness": 1}))
    sync = beside.sync.expected_seconds
    assert beside.sampling_seconds == beside.engines.step_seconds
    assert beside.step_seconds - sync == pytest.approx(max(beside.sampling_seconds, beside.train_seconds))
    assert " s beside it, sync " in list(summary(beside))[2]
    behind = make_plan(altered(beside.job, {"run.rollout.overlap": False}))
    assert behind.step_seconds - sync == pytest.approx(behind.sampling_seconds + behind.train_seconds)


def test_weight_syncs_by_hand() -> None:
    """5,904 bytes: 50 GB/s on the wire; 4.61 GB/s by NCCL; 2 GB/s to the disk, and again from it."""

    def sync(**changes: object) -> Sync:
        sglang = SglangConfig(**{"urls": ("http://n1:30000",), **changes})  # type: ignore[arg-type]
        return make_plan(altered(job(), {"run.rollout.engine": "sglang", "run.rollout.sglang": sglang})).sync

    assert sync(sync="broadcast").seconds == sync().seconds == pytest.approx(5904 / 50e9)
    assert sync(sync="broadcast").expected_seconds == pytest.approx(5904 * 14.2 / 65.5e9)
    assert sync().expected_seconds == pytest.approx(2 * 5904 / 2e9)
    assert make_plan(colocated()).sync.expected_seconds == pytest.approx(5904 / 2e9)  # reading is a turn's
    nodes = make_plan(planned())  # eight nodes write, each node of servers reads all
    assert nodes.sync.expected_seconds == pytest.approx(nodes.sync.sent * (1 / 8 + 1) / 2e9)


def test_the_seconds_of_a_hand_over_by_hand() -> None:
    """Gathered over NVLink at 450 GB/s; two copies, each read and written, at half of 3.35 TB/s."""
    found = handover_estimate(colocated(sync="ipc"))
    assert found is not None
    assert found.by_handles
    assert found.reading_seconds == pytest.approx(2 * 2952 * (1 / 450e9 + 4 / (0.5 * 3.35e12)))
    assert found.expected_reading_seconds == pytest.approx(2 * 2952 * 2.5 / 53e9)  # as miles measured
    assert found.seconds == found.moving_seconds + found.expected_reading_seconds
    sync = make_plan(colocated(sync="ipc")).sync
    assert sync.seconds == sync.expected_seconds == 0


def test_a_frozen_reference_by_hand() -> None:
    """2952 parameters in bfloat16, in one block of 2^28 bytes; they cross half of PCIe's rate four times. A
    forward pass a step, which the passes over a batch share."""

    def with_reference(coefficient: float, epochs: int = 1) -> Job:
        kl = ReferenceKlConfig(coefficient)
        algorithm = AlgorithmConfig(grpo(), reference_kl=kl, reuse_epochs=epochs, updates_per_epoch=3)
        return altered(job(), {"run.algorithm": algorithm})

    off, on = with_reference(0.0), with_reference(0.1)
    assert (reference_bytes(off), reference_bytes(on)) == (0, 2**28)
    assert host_bytes(on) - host_bytes(off) == 2**28
    assert reference_seconds(off) == 0
    assert reference_seconds(on) == pytest.approx(4 * 2 * 2952 / 32e9)
    assert [forward_passes(one) for one in (off, on, with_reference(0.1, epochs=4))] == [0, 1, 0.25]
    plan = make_plan(on)
    rest = 3 * plan.speed.update_seconds - plan.speed.known_seconds
    assert plan.train_seconds == pytest.approx(rest + reference_seconds(on))
    assert "in which the frozen reference and the policy swap places" in plan_text(plan, [], [])
    assert "reference" not in plan_text(make_plan(off), [], [])
