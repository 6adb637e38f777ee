"""Small runs for rehearsals, and what real ranks of them allocate and send on gloo."""

from __future__ import annotations

import ctypes
import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from bapo_megatron.algo.bapo import balanced
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.planning.job import Job, PlanOptions, shape_folder
from bapo_megatron.tensor_types import COLUMNS
from bapo_rehearsal.checkpoints import staged_save
from bapo_rehearsal.fake.process_group import Collectives, group_kinds
from bapo_rehearsal.program import RankProgram
from bapo_rehearsal.records import Call
from tests.support.workers import run_layout

TOKENS = 512  # of a pack
_SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def colocated(run: RunConfig) -> RunConfig:
    """The run with a colocated server, for which the policy leaves."""
    rollout = replace(run.rollout, engine="sglang", sglang=SglangConfig(colocated=True))
    return replace(run, rollout=rollout, parallel=replace(run.parallel, offload=True))


_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}


_HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def hybrid_run(folder: Path, parallel: ParallelConfig, layers: int = 4, every: int = 2) -> RunConfig:
    """The run of ``small_run`` with full attention in each layer ``every``, else Gated DeltaNet."""
    run = small_run(folder, parallel, layers)
    config = {**json.loads((folder / "config.json").read_text()), **_HYBRID}
    (folder / "config.json").write_text(json.dumps({**config, "full_attention_interval": every}))
    return run


def expert_run(folder: Path, parallel: ParallelConfig, layers: int = 2, **batch: Any) -> RunConfig:
    """The run of ``small_run`` with experts, whose packs have routes that are even."""
    run = small_run(folder, parallel, layers, **batch)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **_EXPERTS}))
    return replace(run, rollout=replace(run.rollout, route_replay="replay"))


def small_run(folder: Path, parallel: ParallelConfig, layers: int = 2, **batch: Any) -> RunConfig:
    """A run of a small bfloat16 model whose folder has a config.json and no weights."""
    (folder / "config.json").write_text(json.dumps({**_SHAPE, "num_hidden_layers": layers}))
    return RunConfig(
        name="small",
        steps=2,
        model=ModelConfig(folder, "bfloat16"),
        data=DataConfig(folder / "none.jsonl", max_prompt_tokens=8),
        parallel=parallel,
        rollout=RolloutConfig(prompts_per_step=1, group_size=4, max_response_tokens=TOKENS - 8),
        algorithm=AlgorithmConfig(bounds=balanced(), updates_per_epoch=1),
        batch=replace(BatchConfig(pack_tokens=TOKENS, logprob_chunk_tokens=256), **batch),
    )


def shortened(path: Path, layers: int, folder: Path, stages: tuple[int, ...] = ()) -> Job:
    """The job of a recipe at its own layout and lengths, with ``layers`` of its model: a config.json in
    ``folder``. ``stages``: the layers of each pipeline stage, where they differ."""
    run = load_recipe(path, RunConfig)
    config = json.loads((shape_folder(path, run.model.hf_path) / "config.json").read_text())
    config.get("text_config", config)["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    run = replace(
        run,
        model=replace(run.model, hf_path=folder),
        parallel=replace(run.parallel, pipeline_layers=stages),
    )
    return Job(run, read_model_shape(folder), PlanOptions())


class RandomWeights:
    """A reader of random tensors in bfloat16, as a published model stores them."""

    def __init__(self, folder: Path) -> None:
        self._shapes = hf_tensors(read_model_shape(folder))
        self._order = {name: number for number, name in enumerate(self._shapes)}

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> torch.Tensor:
        whole = self._shapes[name]
        cuts = zip(whole, (rows, columns), strict=False)
        shape = [*(len(range(*cut.indices(size))) for size, cut in cuts), *whole[2:]]
        generator = torch.Generator().manual_seed(self._order[name])
        return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)


_OBJECTS = "objects"
"""The profiler's name of what exchanges objects."""


RealRank = tuple[dict[str, int], list[Call]]
"""A rank's peaks by phase, in bytes, and its collectives."""


def real_ranks(config: RunConfig, packs: int) -> list[RealRank]:
    """On every rank, on gloo: the peaks of torch's CPU allocator by phase, in bytes; and the collectives."""
    return run_layout(_real_rank, config.parallel, config, packs)


def _real_rank(config: RunConfig, packs: int) -> RealRank:
    _report_every_thread()
    torch.compiler.set_stance("force_eager")  # as on a CPU; pytest has read torch's environment before
    recorder = _Recorder()
    program = RankProgram(config, recorder.during)
    gc.disable()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, recorder:
        program.build(RandomWeights(config.model.hf_path))
        batches = program.packs(packs)
        for number in (1, 2):
            program.update(batches, number)
        program.weight_sync()
        held = program.save(staged_save)
        program.sample()
        del held
    # The packs are on the host, which the rehearsal does not count: on a GPU they are not in its memory.
    held = sum(getattr(pack, name).nbytes for pack in batches for name in COLUMNS)
    peaks = {phase: size - held * (phase != "build") for phase, size in _peaks(profiler).items()}
    return peaks, recorder.calls


class _Recorder(TorchDispatchMode):
    """The collectives of a real rank, but for those that carry objects."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = Collectives(group_kinds(), lambda _tensor, _op: None)
        self.phase, self._objects = "", False
        for name in ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"):
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, self._unseen(getattr(module, name)))

    @property
    def calls(self) -> list[Call]:
        return self._inner.calls

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase = phase
        with record_function(f"phase {phase}"):
            yield

    def _unseen(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outer, self._objects = self._objects, True
            try:
                with record_function(_OBJECTS):
                    return function(*args, **kwargs)
            finally:
                self._objects = outer

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not self._objects:
            self._inner.note(func, args, self.phase)
        return func(*args, **(kwargs or {}))


def _report_every_thread() -> None:
    """Report frees in gloo's threads, too: the profiler is on in this thread alone."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _totals(allocations: list[Any], of_kernel: bool) -> Iterator[tuple[int, int]]:
    """Times and total bytes at the allocations of one event, without those that a kernel frees itself."""
    sizes = [-one.extra_fields.alloc_size for one in allocations] if of_kernel else []
    freed = Counter(size for size in sizes if size > 0)
    taken = Counter[int]()
    for one in sorted(allocations, key=lambda one: one.start_time_ns):
        size = one.extra_fields.alloc_size
        if size > 0 and taken[size] < freed[size]:
            taken[size] += 1
        elif size < 0 and taken[-size]:
            taken[-size] -= 1
            freed[-size] -= 1
        scratch = sum(bytes_each * count for bytes_each, count in taken.items())
        yield one.start_time_ns, one.extra_fields.total_allocated - scratch


def _peaks(profiler: profile) -> dict[str, int]:
    """The most bytes of each phase, those at its start included, outside of the exchange of objects.

    Pickled, those are tensors for a moment: some hundred bytes for each tensor of a checkpoint. What a kernel
    takes for itself, such as products in float32 on a processor without bfloat16, is not counted.
    """
    from torch._C._profiler import _EventType

    assert profiler.profiler is not None
    events: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())
    totals = list(_totals([event for event in events if event.tag == _EventType.Allocation], of_kernel=False))
    windows: dict[str, tuple[int, int]] = {}
    objects: list[tuple[int, int]] = []
    while events:
        event = events.pop()
        events += event.children
        allocations = [child for child in event.children if child.tag == _EventType.Allocation]
        totals += _totals(allocations, of_kernel=event.name.startswith("aten::"))
        if event.name == _OBJECTS:
            objects.append((event.start_time_ns, event.end_time_ns))
        elif event.name.startswith("phase "):
            windows[event.name.removeprefix("phase ")] = (event.start_time_ns, event.end_time_ns)
    totals = [one for one in totals if not any(start <= one[0] <= end for start, end in objects)]
    totals.sort()

    def peak(start: int, end: int) -> int:
        before = [total for when, total in totals if when < start]
        return max([*before[-1:], *(total for when, total in totals if start <= when <= end)], default=0)

    return {phase: peak(*window) for phase, window in windows.items()}
