"""Rehearsal of one rank: set-up of the fake backend and the meter, then the rank's program.

``rehearse_rank`` needs a process of its own, where torch stays patched. It returns the meter's records as a
``RankResult``. An error of the program becomes the result's error; an error of the set-up is raised.

The load of each expert depends on the real router, so the rehearsed rank is assumed to be the busiest of its
EP group: each peer sends it ``expert_imbalance`` times the mean, spread evenly over its experts, and it
spreads the rest over its peers. These numbers determine all message sizes and expert input sizes.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _disable_current_modes

from bapo_megatron.config import RunConfig
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.policy.device import cpu_mode
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.positions import document_chunks
from bapo_megatron.tensor_types import MicroBatch
from bapo_rehearsal import flash_linear_attention
from bapo_rehearsal.checkpoints import rehearse_load, rehearse_save
from bapo_rehearsal.fake.cuda_device import install
from bapo_rehearsal.fake.ledger import (
    Block,
    Ledger,
    is_of_program,
    kind_of,
    short_path,
    sizes_by_kind,
)
from bapo_rehearsal.fake.meter import Meter, answer_reads, watch_sizes
from bapo_rehearsal.fake.process_group import ListsOfTensors, fake_world, repair_torch
from bapo_rehearsal.fake.values import ShapesFromValues, know
from bapo_rehearsal.program import RankProgram, message_shape
from bapo_rehearsal.records import (
    OFFLOADED,
    REFERENCE,
    LargeTensor,
    Peak,
    RankRequest,
    RankResult,
)
from bapo_rehearsal.transformer_engine.extension import observers

_LARGEST = 40


class FakeWeights:
    """Weight reader (``TensorReader``) that returns tensors of the model's shapes without values."""

    def __init__(self, config: RunConfig) -> None:
        self._shapes = hf_tensors(read_model_shape(config.model.hf_path))

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return one tensor on the host, or a slice of it; only the slice is allocated."""
        whole = self._shapes[name]
        cuts = zip(whole, (rows, columns), strict=False)
        shape = [len(range(*cut.indices(size))) for size, cut in cuts]
        return torch.empty([*shape, *whole[2:]], dtype=torch.bfloat16)


class RankRehearsal:
    """Rehearsal of one rank: sets up the fake backend and runs the rank's program under the meter.

    Call ``run`` once. ``meter`` and ``seconds`` keep their records after an error of the program.
    """

    def __init__(self, request: RankRequest) -> None:
        self.request, self.config = request, request.config
        self.seconds: dict[str, float] = {}
        self.failed_in = "start"
        """Phase in which the program raised an error."""
        self.meter: Meter
        self.program = RankProgram(self.config, self._phase)

    def run(self, phases: Callable[[RankRehearsal], None] | None = None) -> None:
        """Rehearse ``phases`` (None: all). Errors of the program propagate; the meter's records stay."""
        request = self.request
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        torch.compiler.set_stance("force_eager")  # torch may have read its environment already
        os.environ["LOCAL_RANK"] = "0"
        torch.set_num_threads(1)
        # Set-up order: patches of torch; the fake device, which process groups need; the groups, whose
        # names the meter needs; the modes last, so that the set-up is not metered.
        with ExitStack() as stack:
            repair_torch()
            cuda_functions: Any = nullcontext()
            if request.device == "cuda":
                cuda_functions = install(lambda: self.meter.wait("synchronize"))
            else:
                cpu_mode()
            kinds = stack.enter_context(fake_world(request.rank, request.world_size, self.config.parallel))
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            self.meter = Meter(kinds, request.device == "cuda")
            shape = read_model_shape(self.config.model.hf_path)
            self.meter.vocabulary = shape.vocab // self.config.parallel.tensor
            if shape.experts is not None:
                spread_copies(request.expert_imbalance, self.meter.shapes)
            answer_reads(self.meter)
            watch_sizes(self.meter)
            observers.append(self.meter.see_te_kernel)
            flash_linear_attention.install()
            self._names = ModuleNames(self.meter.modules)
            self._names.watch()
            gc.collect()
            gc.disable()  # collect cycles between phases, not at random places of the program
            # The mode entered last is called first: the meter sees a call before the fake mode handles it.
            for mode in (
                ListsOfTensors(),
                cuda_functions,
                fake,
                self.meter,
                marking_saved_activations(self.meter.ledger),
            ):
                stack.enter_context(mode)
            torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
            (phases or RankRehearsal.all_phases)(self)

    def all_phases(self) -> None:
        """All phases in run order: build, two updates, weight sync, save, colocated sampling, load."""
        self.build()
        packs = self.packs()
        make_placeholders(self.program.policy)
        for number in (1, 2):  # only the second update has Adam's moments from its start
            self.program.update(packs, number)
            label_model_state(self.meter.ledger, self.program.policy)
        del packs
        self.program.weight_sync()
        # Kept during sampling: a run's writer may still be busy.
        files = self.program.save(rehearse_save)
        self.program.sample()
        for block in self.program.policy._offload.host.blocks:
            _mark(self.meter.ledger, block, OFFLOADED)
        del files
        gc.collect()
        self.program.load(rehearse_load)

    def build(self) -> None:
        self.program.build(FakeWeights(self.config))
        label_model_state(self.meter.ledger, self.program.policy)
        self._names.learn(self.program.policy._model)

    def packs(self) -> list[MicroBatch]:
        """Packs of an update, real tensors on the host. Sets the meter's chunks and message shape."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            packs = self.program.packs(self.request.packs)
        bounds = packs[0].cu_seqlens
        size, rank = self.config.parallel.context, self.request.place["context"]
        chunks = document_chunks(bounds, size, rank)
        self.meter.chunks = [(chunk.queries, chunk.last_key - chunk.first_key) for chunk in chunks]
        hidden = read_model_shape(self.config.model.hf_path).hidden
        self.meter.collectives.message_shape = message_shape(self.config, bounds[-1], hidden)
        return packs

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        if self.request.names_phases:
            print(f"rank {self.request.rank}: {name} ...", file=sys.stderr, flush=True)
        with self.meter.during(name):
            try:
                yield
            except BaseException:
                self.failed_in = name
                raise
        self.seconds[name] = time.perf_counter() - start


def rehearse_rank(request: RankRequest, layers: str) -> RankResult:
    """Rehearse one rank in this process, which must do nothing else afterwards; return its result."""
    rehearsal = RankRehearsal(request)
    error = None
    try:
        rehearsal.run()
    except BaseException as failure:
        if not hasattr(rehearsal, "meter"):
            raise  # the set-up failed
        error = describe(failure, rehearsal.failed_in)
    return result_of(rehearsal, layers, error)


def result_of(rehearsal: RankRehearsal, layers: str, error: str | None) -> RankResult:
    """Result of a rehearsal, from its meter."""
    request, meter = rehearsal.request, rehearsal.meter
    gpu, highest = _peaks(meter.ledger, request.device)
    return RankResult(
        rank=request.rank,
        place=request.place,
        layers=layers,
        packs=request.packs,
        gpu=gpu,
        host=_peaks(meter.ledger, "cpu")[0],
        largest=_largest(highest),
        flops=dict(meter.flops),
        calls=meter.collectives.calls,
        waits=dict(meter.waits),
        guesses=dict(meter.guesses),
        seconds=rehearsal.seconds,
        kernels=meter.kernels,
        error=error,
    )


def describe(error: BaseException, phase: str) -> str:
    """Error text of a failed rank: phase, innermost lines of the project and its libraries, error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        f"{short_path(frame.filename)}:{frame.lineno}"
        for frame in frames
        if is_of_program(frame.filename, frame.name)
    ]
    own = [line for line in lines if line.startswith("bapo_megatron/")] or lines or ["?"]
    below = f" (below it {lines[-1]})" if lines and lines[-1] != own[-1] else ""
    message = " ".join(str(error).split())[:400]
    return f"{phase}: {own[-1]}{below}: {type(error).__name__}: {message}"


def _peaks(ledger: Ledger, device: str) -> tuple[dict[str, Peak], list[Block]]:
    """Peak memory by phase, and the blocks allocated at the highest peak."""
    peaks: dict[str, Peak] = {}
    highest: list[Block] = []
    best = -1
    for phase in ledger.windows:
        size, blocks = ledger.peak(phase, device)
        peaks[phase] = Peak(size, dict(sizes_by_kind(blocks)))
        if size > best:
            best, highest = size, blocks
    return peaks, highest


def _largest(blocks: list[Block]) -> list[LargeTensor]:
    sizes: Counter[tuple[tuple[int, ...], str, str, str, str]] = Counter()
    counts: Counter[tuple[tuple[int, ...], str, str, str, str]] = Counter()
    for block in blocks:
        key = (block.shape, block.dtype, kind_of(block), block.module, block.line)
        sizes[key] += block.size
        counts[key] += 1
    return [LargeTensor(size, counts[key], *key) for key, size in sizes.most_common(_LARGEST)]


def label_model_state(ledger: Ledger, policy: MegatronPolicy) -> None:
    """Label the blocks of weights, gradients, optimizer states and the reference's host copy."""
    for block in policy._reference.host.blocks if policy._reference is not None else ():
        _mark(ledger, block, REFERENCE)
    for chunk in policy._model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            _mark(ledger, buffer.grad_data, "gradients")
            if buffer.param_data is not None:
                _mark(ledger, buffer.param_data, "weights")
        for parameter in chunk.parameters():
            _mark(ledger, parameter, "weights")
    for part in policy._optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                _mark(ledger, parameter, "optimizer")
                for value in part.optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        _mark(ledger, value, "optimizer")


def make_placeholders(policy: MegatronPolicy) -> None:
    """Allocate Transformer Engine's placeholders for weight gradients that its GEMMs accumulate.

    The first backward pass would do it. But version 2.11 reads attributes of weights that autograd saved, and
    the hooks of ``marking_saved_activations`` drop these.
    """
    for chunk in policy._model:
        for module in chunk.modules():
            if getattr(module, "fuse_wgrad_accumulation", False):
                base = sys.modules["transformer_engine.pytorch.module.base"]
                for weight in module.parameters(recurse=False):
                    if weight.dim() == 2:
                        base.get_dummy_wgrad(list(weight.shape), weight.dtype)


def _mark(ledger: Ledger, tensor: Tensor, kind: str) -> None:
    block = ledger.block(tensor)
    if block is not None and not block.kind:
        block.kind = kind


class ModuleNames:
    """Stack of the modules in their forward pass, innermost last, such as ``decoder.layers.*.mlp``.

    ``watch`` registers hooks for all modules of the process; ``learn`` sets the names of a built model.
    """

    def __init__(self, running: list[str]) -> None:
        self._running = running
        self._names: dict[int, str] = {}

    def learn(self, chunks: list[Any]) -> None:
        """Read the module names of the model's chunks. Until then a module has its class name."""
        for chunk in chunks:
            while hasattr(chunk, "module"):
                chunk = chunk.module
            for name, module in chunk.named_modules():
                self._names[id(module)] = re.sub(r"\.\d+(?=\.|$)", ".*", name)

    def watch(self) -> None:
        torch_module.register_module_forward_pre_hook(self._enter)
        torch_module.register_module_forward_hook(self._leave, always_call=True)

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        self._running.append(self._names.get(id(module)) or type(module).__name__)

    def _leave(self, _module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()


@contextmanager
def marking_saved_activations(ledger: Ledger) -> Iterator[None]:
    """Context manager that labels tensors that autograd saves for a backward pass."""

    def keep(tensor: Tensor) -> Tensor:
        block = ledger.block(tensor) if tensor.layout is torch.strided else None
        if block is not None:
            block.saved = True
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


def parts(whole: int, count: int) -> list[int]:
    """Split ``whole`` into ``count`` nearly equal integers, larger ones first."""
    return [whole // count + (number < whole % count) for number in range(count)]


def spread_copies(imbalance: float, shapes: ShapesFromValues) -> None:
    """Patch megatron-core's token dispatcher: its message sizes become those of the busiest rank. ``shapes``
    sets the sizes of selections by masks of unknown values in torch's permutation."""
    dispatcher: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    plain_preprocess, plain_permute = dispatcher.preprocess, token_dispatcher.permute

    def preprocess(self: Any, routing_map: Tensor) -> Tensor:
        of_experts: Tensor = plain_preprocess(self, routing_map)
        _tell_sizes(self, of_experts, len(routing_map) * self.config.moe_router_topk, imbalance)
        return of_experts

    def permute(*args: Any, **kwargs: Any) -> Any:
        with shapes.selecting(kwargs["num_out_tokens"]):
            return plain_permute(*args, **kwargs)

    dispatcher.preprocess = preprocess
    token_dispatcher.permute = permute  # type: ignore[attr-defined]


def _tell_sizes(dispatcher: Any, of_experts: Tensor, copies: int, imbalance: float) -> None:
    """Attach values to the dispatcher's counts. ``copies``: token copies that a rank routes."""
    size, gathered, local = dispatcher.ep_size, dispatcher.tp_size, dispatcher.num_local_experts
    here = round(copies * min(imbalance, size) / size)  # copies that each rank sends to this one
    own = dispatcher.ep_group.rank() if size > 1 else 0
    sent = parts(copies - here, size - 1) if size > 1 else []
    sent.insert(own, here)
    by_expert = parts(here, local)
    _tell(dispatcher.input_splits, sent)
    _tell(dispatcher.output_splits, [here] * size)
    _tell(dispatcher.output_splits_tp, [here * size] * gathered)
    _tell(of_experts, [count * size * gathered for count in by_expert])
    if local > 1:
        _tell(dispatcher.num_global_tokens_per_local_expert, [by_expert] * (size * gathered))


def _tell(tensor: Tensor | None, values: list[Any]) -> None:
    if tensor is not None:
        with unset_fake_temporarily():
            know(tensor, torch.tensor(values, dtype=tensor.dtype).reshape(tensor.shape))
