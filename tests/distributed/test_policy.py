"""The Megatron policy against Hugging Face transformers and torch's AdamW, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.checkpoint.export import export_hf
from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats
from tests.support.fp8 import in_bfloat16, save_fp8_folder
from tests.support.layouts import layout
from tests.support.models import EXPERTS, FAMILIES, FORMS, random_samples, save_tiny_model, tiny_model
from tests.support.policies import weights_of
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

ONE = ParallelConfig()

Tensors = dict[str, torch.Tensor]


def policy_on(
    folder: Path, temperature: float = 1.0, parallel: ParallelConfig = ONE, **lr: float
) -> MegatronPolicy:
    optimizer = OptimizerConfig(**{"lr": 1e-3, "clip_grad": 0.5, **lr})
    batch = BatchConfig(pack_tokens=96, logprob_chunk_tokens=17)
    return MegatronPolicy(ModelConfig(folder, "float32"), parallel, batch, optimizer, 10, temperature)


def hf_stats(model: torch.nn.Module, sample: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.from_numpy(sample.token_ids).long()[None]
    log_probs = (model(ids).logits[0, :-1].double() / temperature).log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def worst_difference(folder: Path, samples: list[Sample], family: str, temperature: float) -> float:
    policy = policy_on(folder, temperature)
    packs = pack_samples(samples, 96)
    model = tiny_model(family)
    worst = 0.0
    with torch.no_grad():
        for pack, stats in zip(packs, policy.log_probs(packs), strict=True):
            for index, start, length in pack.rows:
                log_prob, entropy = hf_stats(model, samples[index], temperature)
                ours = slice(start, start + length)
                worst = max(worst, float((stats.log_prob_T[ours] - log_prob).abs().max()))
                worst = max(worst, float((stats.entropy_T[ours] - entropy).abs().max()))
    return worst


@pytest.mark.parametrize("family", FORMS)
def test_log_probs_and_entropies_equal_transformers(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path)
    samples = random_samples(12, seed=5)
    [worst] = run_layout(worst_difference, ONE, folder, samples, family, 0.6)
    assert worst < 1e-5


def test_long_positions_see_llama_rope_scaling(tmp_path: Path) -> None:
    """A sequence past 8192 / 4 positions, where Llama 3's scaling acts, still agrees."""
    folder = save_tiny_model("llama", tmp_path)
    samples = random_samples(5, seed=1, longest=4000)
    assert max(s.positions for s in samples) > 3000
    [worst] = run_layout(worst_long_difference, ONE, folder, samples)
    assert worst < 2e-5


def loaded_weights(folder: Path, parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    return weights_of(policy_on(folder, parallel=parallel))


@pytest.mark.parametrize("family", ["qwen2", EXPERTS])
def test_every_rank_reads_its_part_of_a_folder_in_fp8(family: str, tmp_path: Path) -> None:
    """At TP2 the parts begin and end within blocks: hidden 144, MLP 200 or experts of 72."""
    sizes = {"hidden_size": 144, "intermediate_size": 200}
    sizes |= {"moe_intermediate_size": 72} if family == EXPERTS else {}
    plain = save_tiny_model(family, tmp_path / "plain", **sizes)
    folder = save_fp8_folder(plain, tmp_path / "fp8")
    wanted = in_bfloat16(folder)
    parallel = ParallelConfig(tensor=2, sequence=family == EXPERTS)
    for weights in run_layout(loaded_weights, parallel, folder, parallel):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[name].float()) for name, tensor in weights.items())


def worst_long_difference(folder: Path, samples: list[Sample]) -> float:
    optimizer, batch = OptimizerConfig(), BatchConfig(pack_tokens=16384)
    policy = MegatronPolicy(ModelConfig(folder, "float32"), ONE, batch, optimizer, 1, 1.0)
    [pack] = pack_samples(samples, 16384)
    [stats] = policy.log_probs([pack])
    model = tiny_model("llama")
    with torch.no_grad():
        return max(
            float((stats.log_prob_T[start : start + n] - hf_stats(model, samples[i], 1.0)[0]).abs().max())
            for i, start, n in pack.rows
        )


def weighted_loss(stats: TokenStats, batch: MicroBatch) -> torch.Tensor:
    loss = -(stats.log_prob_T * batch.advantage_T * batch.weight_T).sum()
    return torch.stack([loss, batch.mask_T.sum()])


def megatron_updates(
    folder: Path, samples: list[Sample], loss_mean: str
) -> tuple[list, dict[str, torch.Tensor]]:
    policy = policy_on(folder)
    packs = pack_samples(samples, 96, loss_mean)
    results = [policy.update(packs, weighted_loss) for _ in range(3)]
    weights = weights_of(policy)
    return [(float(r.sums[0] / r.sums[1]), r.grad_norm) for r in results], weights


def torch_updates(family: str, samples: list[Sample], loss_mean: str) -> tuple[list, dict[str, torch.Tensor]]:
    """The same three updates with transformers and torch's AdamW, no packs, no Megatron."""
    model = tiny_model(family)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    spared = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": spared, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    results = []
    for _ in range(3):
        adam.zero_grad()
        per_sample = []
        for sample in samples:
            log_prob = hf_stats(model, sample, 1.0)[0][-sample.response_tokens :]
            per_sample.append(-(log_prob * sample.advantage))
        if loss_mean == "token":
            loss = torch.cat(per_sample).mean()
        else:
            loss = torch.stack([tokens.mean() for tokens in per_sample]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        results.append((loss.item(), norm.item()))
    return results, model.state_dict()


@pytest.mark.parametrize(
    ("family", "loss_mean"), [*((form, "token") for form in FORMS), ("qwen2", "sequence")]
)
def test_updates_equal_transformers_with_adamw(family: str, loss_mean: str, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path)
    samples = random_samples(10, seed=7)
    [(ours, weights)] = run_layout(megatron_updates, ONE, folder, samples, loss_mean)
    expected, reference = torch_updates(family, samples, loss_mean)
    for (loss, norm), (expected_loss, expected_norm) in zip(ours, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    for name, tensor in weights.items():
        # An entry whose gradient is about zero may step either way: at most three steps of lr 1e-3 each.
        close = (tensor - reference[name]).abs() < 2e-5
        assert close.float().mean() > 0.99, name


def first_step(folder: Path, samples: list[Sample], fused: bool) -> tuple[int, list[Tensors]]:
    """Calls of torch's fused kernel in an update; weights before it, its gradients, weights after it."""
    optimizer = OptimizerConfig(lr=1.0, eps=1.0, weight_decay=0.0, clip_grad=0.5, fused=fused)
    batch = BatchConfig(pack_tokens=96)
    policy = MegatronPolicy(ModelConfig(folder, "float32"), ONE, batch, optimizer, 10)
    calls, kernel = [], torch._fused_adamw_
    torch._fused_adamw_ = lambda *given, **named: calls.append(1) or kernel(*given, **named)
    model = dict(policy._model[0].module.named_parameters())
    before = {name: one.detach().clone() for name, one in model.items()}
    try:
        policy.update(pack_samples(samples, 96), weighted_loss)
    finally:
        torch._fused_adamw_ = kernel
    after = {name: one.detach().clone() for name, one in model.items()}
    return len(calls), [before, {name: one.main_grad.clone() for name, one in model.items()}, after]


@pytest.mark.parametrize(("fused", "calls"), [(True, 2), (False, 0)])
def test_a_step_of_adamw_by_hand(fused: bool, calls: int, tmp_path: Path) -> None:
    """lr = eps = 1: the first step is g / (|g| + 1), by one fused kernel for each group, or without it.

    Of ``optimizer.device=cpu``, which has the kernel always: test_host_optimizer.py.
    """
    folder, samples = save_tiny_model("qwen2", tmp_path), random_samples(6, seed=7)
    [(found, (before, gradients, after))] = run_layout(first_step, ONE, folder, samples, fused)
    assert found == calls
    for name, gradient in gradients.items():
        expected = before[name] - gradient / (gradient.abs() + 1)
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)
    assert any(bool(one.any()) for one in gradients.values())


def learning_rates(folder: Path, samples: list[Sample], settings: dict) -> list[float]:
    policy = policy_on(folder, **settings)
    packs = pack_samples(samples, 96)
    return [policy.update(packs, weighted_loss).learning_rate for _ in range(6)]


def test_schedule_warms_up_and_decays(tmp_path: Path) -> None:
    """Warmup of 4 updates to 1e-3: quarter, half, ...; then linear to 1e-4 at update 10."""
    folder = save_tiny_model("qwen2", tmp_path)
    settings = {"warmup_updates": 4, "decay": "linear", "min_lr": 1e-4}
    [rates] = run_layout(learning_rates, ONE, folder, random_samples(2), settings)
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 8.5e-4, 7e-4])


def nan_loss(stats: TokenStats, batch: MicroBatch) -> torch.Tensor:
    return weighted_loss(stats, batch) * torch.nan


class NanGradient(torch.autograd.Function):
    """The loss itself stays finite."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.nan


def nan_gradient(stats: TokenStats, batch: MicroBatch) -> torch.Tensor:
    return NanGradient.apply(weighted_loss(stats, batch))


def update_with_nan(
    folder: Path, samples: list[Sample], parallel: ParallelConfig, broken: TokenFn
) -> tuple[str, bool, int]:
    """Only the last replica's loss is broken."""
    policy = policy_on(folder, parallel=parallel)
    layout = policy.pack_layout
    loss = broken if layout.data_rank == layout.data_size - 1 else weighted_loss
    before = weights_of(policy)
    message = ""
    try:
        policy.update(pack_samples(samples, 96, "token", layout), loss)
    except FloatingPointError as error:
        message = str(error)
    same = all(torch.equal(before[name], tensor) for name, tensor in policy.hf_weights())
    return message, same, policy.version


@pytest.mark.parametrize("text", slow_but(["dp2", "tp2-cp2"], "dp2"))
@pytest.mark.parametrize(
    ("broken", "says"),
    [(nan_loss, "the loss of update 1 is nan"), (nan_gradient, "the gradient norm is nan")],
)
def test_a_nan_on_one_replica_stops_every_rank_and_spares_the_weights(
    text: str, broken: TokenFn, says: str, tmp_path: Path
) -> None:
    folder, parallel = save_tiny_model("qwen2", tmp_path), layout(text).parallel
    for message, same, version in run_layout(
        update_with_nan, parallel, folder, random_samples(5), parallel, broken
    ):
        assert message == says
        assert same
        assert version == 0


def export(folder: Path, parallel: ParallelConfig, output: Path) -> None:
    policy = policy_on(folder, parallel=parallel)
    packs = pack_samples(random_samples(4), 96, "token", policy.pack_layout)
    policy.update(packs, weighted_loss)
    export_hf(policy.hf_weights(), folder, output, shard_bytes=20_000)
    stats = policy.log_probs(packs)
    torch.save([(pack.rows, s.log_prob_T) for pack, s in zip(packs, stats, strict=True)], output / "stats.pt")


@pytest.mark.parametrize("family", slow_but(FORMS, *FAMILIES))
def test_export_loads_in_transformers_with_the_same_log_probs(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_tiny_model(family, tmp_path / "hf")
    parallel = ParallelConfig(tensor=2, pipeline=2)
    output = tmp_path / "out"
    run_layout(export, parallel, folder, parallel, output)
    assert len(list(output.glob("*.safetensors"))) > 1
    assert (output / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    samples = random_samples(4)
    with torch.no_grad():
        for rows, log_probs in torch.load(output / "stats.pt"):
            for index, start, length in rows:
                expected = hf_stats(model, samples[index], 1.0)[0]
                torch.testing.assert_close(
                    log_probs[start : start + length].double(), expected, rtol=0, atol=1e-5
                )


def test_every_group_waits_as_long_as_the_recipe_says() -> None:
    """Not only the default group: megatron's own wait 30 minutes if they are not told."""
    for found in run_layout(_timeouts_s, ParallelConfig(tensor=2, timeout_minutes=7)):
        assert len(found) > 5
        assert set(found) == {420.0}


def _timeouts_s() -> list[float]:
    groups = torch.distributed.distributed_c10d._world.pg_map
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]
