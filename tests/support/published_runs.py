"""Runs that others have published, as jobs of ``bapo plan``: what each took, and what the plan says.

A run of another framework is planned as far as it can be said in this project's settings; ``Figure.why`` has
what cannot, where it matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.planning.job import GB, Job, PlanOptions
from bapo_megatron.planning.memory import FIXED, FRAGMENTATION
from bapo_megatron.planning.plan import JobPlan, make_plan
from bapo_megatron.planning.sizes import total_parameters
from bapo_megatron.planning.traffic import BROADCAST_RATE
from tests.support.shapes import activation_bytes_per_token, uniform

MILES = "[miles](https://github.com/radixark/miles/blob/main/docs/models/qwen/qwen3-8.md)"
VERL = "[verl 7060](https://github.com/verl-project/verl/issues/7060)"
TRL = "[TRL 6845](https://github.com/huggingface/trl/pull/6845)"
NEMO = "[NeMo-RL](https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md)"
FACTOR = 1.5


@dataclass(frozen=True)
class Figure:
    """One published figure beside the plan's."""

    source: str
    what: str
    published: float
    planned: float
    unit: str = "s"
    why: str = ""
    """Why the two are further apart than FACTOR, or what the comparison is worth."""
    within: float = FACTOR

    @property
    def ratio(self) -> float:
        """Published over planned."""
        return self.published / self.planned

    @property
    def row(self) -> str:
        """The figure as a row of the table in benchmarks/results/published_runs.md."""
        shown = [
            f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in (self.published, self.planned)
        ]
        both = f"{shown[0]} {self.unit} | {shown[1]} {self.unit}"
        return f"| {self.source} | {self.what} | {both} | {self.ratio:.2f} | {self.why} |"


def dense(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> ModelShape:
    """A dense model's shape."""
    fixed = {"family": "qwen3", "head_dim": 128, "max_positions": 40960, "norm_eps": 1e-6, "rope_theta": 1e6}
    settings = {"rope_scaling": None, "tied": False, "qkv_bias": False, "qk_norm": True, **fixed, **more}
    shape = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    return uniform(vocab=vocab, **shape, **settings)


QWEN3_8B = dense(36, 4096, 12288, 32, 8, 151936)
QWEN3_32B = dense(64, 5120, 25600, 64, 8, 151936)
QWEN25_7B = dense(28, 3584, 18944, 28, 4, 152064, family="qwen2", qkv_bias=True, qk_norm=False)
QWEN25_32B = dense(64, 5120, 27648, 40, 8, 152064, family="qwen2", qkv_bias=True, qk_norm=False)
QWEN25_72B = dense(80, 8192, 29568, 64, 8, 152064, family="qwen2", qkv_bias=True, qk_norm=False)
LLAMA_8B = dense(32, 4096, 14336, 32, 8, 128256, family="llama", qk_norm=False)
STANDS_FOR_27B = dense(64, 5120, 17408, 40, 2, 248320, head_dim=256)
"""Qwen3.8-27B has linear attention in 48 of 64 layers. This dense shape has as many parameters, and its KV
cache at the run's lengths is as large as the model's own with its 151 MB of state for each sequence."""


def planned(shape: ModelShape, options: dict[str, Any], **sections: Any) -> JobPlan:
    """The plan of a GRPO run with such sections."""
    run = RunConfig("published", ModelConfig(Path("model")), DataConfig(Path("data")))
    return make_plan(Job(replace(run, **sections), shape, PlanOptions(**options)))


BUSIEST = 1.7619460179037423
"""Groups of the busiest of eight engines over the mean, in expectation, where 32 go to engines at random."""


@cache
def miles(imbalance: float) -> JobPlan:
    """Qwen3.8-27B on eight H200: TP 4, DP 2, full recomputation, Adam on the host, engines of one GPU."""
    return planned(
        STANDS_FOR_27B,
        {"gpu": "h200-141gb", "mean_response_tokens": 4585, "engine_gpus": 8, "engine_imbalance": imbalance},
        data=DataConfig(Path("data"), max_prompt_tokens=1200),
        parallel=ParallelConfig(tensor=4, sequence=True, data=2, offload=True),
        batch=BatchConfig(pack_tokens=9392, recompute="full"),
        optimizer=OptimizerConfig(device="cpu"),
        algorithm=AlgorithmConfig(grpo(), old_log_probs="trainer"),
        rollout=RolloutConfig(
            prompts_per_step=32,
            group_size=8,
            max_response_tokens=8192,
            engine="sglang",
            sglang=SglangConfig(servers=8, colocated=True, sync="ipc", memory_fraction=0.8, max_in_flight=39),
        ),
    )


@cache
def trl(shape: ModelShape) -> JobPlan:
    """One sequence of 1,048,576 tokens an update on eight H100: CP 8, full recomputation."""
    return planned(
        shape,
        {"mean_response_tokens": 2**20 - 1},
        data=DataConfig(Path("data"), max_prompt_tokens=1),
        parallel=ParallelConfig(context=8),
        batch=BatchConfig(pack_tokens=2**20, recompute="full"),
        algorithm=AlgorithmConfig(grpo(), updates_per_epoch=2),
        rollout=RolloutConfig(prompts_per_step=1, group_size=2, max_response_tokens=2**20 - 1),
    )


def trl_memory(shape: ModelShape) -> float:
    """Peak by the plan's parts for what TRL's 8B run has on a GPU: weights, gradients and moments in float32
    over eight ranks, what one layer saves, and its gradients. The layers' inputs are on the host."""
    plan = trl(shape)
    job, stage = plan.job, plan.stages[0]
    layer = activation_bytes_per_token(shape, job.parallel, job.element, "full", "te").transient * job.tokens
    passing = layer + max(stage.workspace, stage.head)
    return 16 * total_parameters(shape) / 8 + passing * (1 + FRAGMENTATION) + stage.buffers + FIXED


@cache
def nemo(shape: ModelShape, tensor: int, pipeline: int, data: int, mean: int, recompute: Any) -> JobPlan:
    """64 prompts of 32 responses, four updates, colocated; pi_old's pass, and another for the reference."""
    return planned(
        shape,
        {"mean_response_tokens": mean - 128, "engine_memory_fraction": 0.6},
        data=DataConfig(Path("data"), max_prompt_tokens=1024),
        parallel=ParallelConfig(tensor=tensor, sequence=tensor > 1, pipeline=pipeline, data=data),
        batch=BatchConfig(pack_tokens=4096, recompute=recompute),
        algorithm=AlgorithmConfig(
            grpo(),
            old_log_probs="trainer",
            updates_per_epoch=4,
            corrections=CorrectionsConfig(off_policy_delta=0.1),
        ),
        rollout=RolloutConfig(
            prompts_per_step=64,
            group_size=32,
            max_response_tokens=4096 - 128,
            sglang=SglangConfig(tensor=tensor),
        ),
    )


def nemo_seconds(plan: JobPlan) -> float:
    """A step of a run whose servers take the weights on their GPUs."""
    return plan.sampling_seconds + plan.train_seconds


def broadcast(shape: ModelShape) -> float:
    """Seconds of a sync by NCCL, as expected."""
    plan = planned(
        shape,
        {},
        rollout=RolloutConfig(engine="sglang", sglang=SglangConfig(sync="broadcast", urls=("http://a:1",))),
    )
    assert plan.sync.expected_seconds == plan.sync.sent / BROADCAST_RATE
    return plan.sync.expected_seconds


def figures() -> list[Figure]:
    """All figures, in the order of the table."""
    even, dealt = miles(1.0), miles(BUSIEST)
    passes = even.speed.update_seconds - even.speed.forward_seconds + even.stepping_seconds
    handover = even.handover
    assert handover is not None
    sgl32 = broadcast(QWEN25_32B)
    return [
        Figure(MILES, "rollout, groups dealt at random", 307, dealt.sampling_seconds),
        Figure(
            MILES,
            "the same, engines loaded evenly",
            307,
            even.sampling_seconds,
            why="39 ran at a time on an engine where an even load is 32, so it was uneven",
            within=2,
        ),
        Figure(MILES, "log-probs, one pass", 33, even.speed.forward_seconds),
        Figure(
            MILES,
            "training passes, optimizer",
            282,
            passes,
            why="four passes of 33 s are 132 s; the rest, with Adam on the host, is not broken down",
            within=2.5,
        ),
        Figure(
            MILES,
            "weight sync, CUDA IPC",
            2.5,
            handover.expected_reading_seconds,
            "s",
            "the rate is from here",
        ),
        Figure(VERL, "weight sync, 32B, NCCL", 14.2, sgl32, "s", "the rate is from here"),
        Figure(VERL, "the same, weights offloaded", 17.7, sgl32),
        Figure(VERL, "weight sync, 72B, NCCL", 28.8, broadcast(QWEN25_72B)),
        Figure(
            VERL,
            "weight sync, 7B, offloaded",
            5.75,
            broadcast(QWEN25_7B),
            why="2.4 to 2.7 s of it load weights to the GPU, where they stay here",
            within=2,
        ),
        Figure(TRL, "32B, 1M tokens, a step", 1295, trl(QWEN3_32B).speed.update_seconds),
        Figure(TRL, "8B, 1M tokens, a step", 364, trl(QWEN3_8B).speed.update_seconds),
        Figure(
            TRL,
            "32B, peak of a GPU",
            60.8,
            trl_memory(QWEN3_32B) / GB,
            unit="GB",
            why="float32 states alone are 65.5 GB: that run tiles its MLPs and keeps less on the GPU",
            within=2.5,
        ),
        Figure(TRL, "8B, peak of a GPU", 56.2, trl_memory(QWEN3_8B) / GB, "GB"),
        Figure(NEMO, "32B, 32 H100, a step", 393, nemo_seconds(nemo(QWEN3_32B, 4, 4, 2, 3206, "none"))),
        Figure(NEMO, "8B, 16 H100, a step", 97.7, nemo_seconds(nemo(LLAMA_8B, 1, 2, 8, 1060, "full"))),
    ]


if __name__ == "__main__":
    print("\n".join(one.row for one in figures()))
