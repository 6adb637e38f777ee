"""Rehearsal of one rank: set-up of the fake backend and the meter, then the rank's program under them.

The rank's process must do nothing else: torch stays patched in it. Used by ``metering.py``.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from bapo_megatron.config import RunConfig
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.policy.attention.context_parallel import document_chunks
from bapo_megatron.policy.device import cpu_mode
from bapo_megatron.rehearsal.checkpoints import rehearse_load, rehearse_save
from bapo_megatron.rehearsal.fake.cuda_device import install
from bapo_megatron.rehearsal.fake.fake_tensors import ListsOfTensors, repair_torch
from bapo_megatron.rehearsal.fake.meter import Meter, answer_reads, watch_sizes
from bapo_megatron.rehearsal.fake.process_group import fake_world
from bapo_megatron.rehearsal.kinds import (
    ModuleNames,
    label_model_state,
    label_offloaded_state,
    marking_saved_activations,
)
from bapo_megatron.rehearsal.program import RankProgram, message_shape
from bapo_megatron.rehearsal.records import RankRequest
from bapo_megatron.rehearsal.transformer_engine import kernel
from bapo_megatron.tensor_types import MicroBatch


class FakeWeights:
    """Weight reader (``TensorReader``) that gives tensors of the model's shapes without values."""

    def __init__(self, config: RunConfig) -> None:
        self._shapes = hf_tensors(read_model_shape(config.model.hf_path))

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """One tensor on the host, or a slice of it; only the slice is allocated."""
        cuts = zip(self._shapes[name], (rows, columns), strict=False)
        shape = [len(range(*cut.indices(size))) for size, cut in cuts]
        return torch.empty(shape, dtype=torch.bfloat16)


class RankRehearsal:
    """Rehearsal of one rank: sets up the fake backend, and runs the rank's program under the meter.

    Made by ``rehearse_rank`` in the rank's own process, which calls ``run`` once and makes a ``RankResult``
    of ``meter`` and ``seconds``. After an error of the program they hold what was recorded until then.
    """

    def __init__(self, request: RankRequest) -> None:
        self.request, self.config = request, request.config
        self.seconds: dict[str, float] = {}
        self.failed_in = "start"
        """Phase in which the program raised an error."""
        self.meter: Meter
        self.program = RankProgram(self.config, self._phase)

    def run(self, phases: Callable[[RankRehearsal], None] | None = None) -> None:
        """Rehearse ``phases``, None: all. Errors of the program propagate; the meter's records stay."""
        request = self.request
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        os.environ["LOCAL_RANK"] = "0"
        torch.set_num_threads(1)
        # The order of the set-up: patches of torch; the fake device, which process groups ask for; the
        # groups, whose names the meter needs; the modes last, since the set-up itself is not metered.
        with ExitStack() as stack:
            repair_torch()
            cuda_functions: Any = nullcontext()
            if request.device == "cuda":
                cuda_functions = install(lambda: self.meter.waits.wait(self.meter.phase, "synchronize"))
            else:
                cpu_mode()
            kinds = stack.enter_context(fake_world(request.rank, request.world_size, self.config.parallel))
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            self.meter = Meter(fake, kinds, request.device == "cuda")
            vocabulary = read_model_shape(self.config.model.hf_path).vocab
            self.meter.vocabulary = vocabulary // self.config.parallel.tensor
            answer_reads(self.meter)
            watch_sizes(self.meter)
            kernel.observers.append(self.meter.see_te_kernel)
            self._names = ModuleNames(self.meter.modules)
            self._names.watch()
            gc.collect()
            gc.disable()  # cycles are collected between phases, not at random places of the program
            # The mode entered last is called first: the meter sees a call before the fake mode answers it.
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
        """All phases in a run's order: build, two updates, weight sync, save, colocated sampling, load."""
        self.build()
        packs = self.packs()
        for number in (1, 2):  # twice: only the second update has Adam's moments from its beginning
            self.program.update(packs, number)
            label_model_state(self.meter.ledger, self.program.policy)
        del packs
        self.program.weight_sync()
        held = self.program.save(rehearse_save)  # kept over the sampling: a run's writer may still be at work
        self.program.sample()
        label_offloaded_state(self.meter.ledger, self.program.policy)
        del held
        gc.collect()
        self.program.load(rehearse_load)

    def build(self) -> None:
        """Build the policy with weights that have no values."""
        self.program.build(FakeWeights(self.config))
        label_model_state(self.meter.ledger, self.program.policy)
        self._names.learn(self.program.policy._model)

    def packs(self) -> list[MicroBatch]:
        """The packs of an update, real tensors on the host."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            packs = self.program.packs(self.request.packs)
        bounds = packs[0].cu_seqlens
        size, rank = self.config.parallel.context, self.request.place["context"]
        chunks = document_chunks(bounds, size, rank)
        self.meter.flops.chunks = [(one.queries, one.last_key - one.first_key) for one in chunks]
        hidden = read_model_shape(self.config.model.hf_path).hidden
        self.meter.collectives.message_shape = message_shape(self.config, bounds[-1], hidden)
        return packs

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.meter.during(name):
            try:
                yield
            except BaseException:
                self.failed_in = name
                raise
        self.seconds[name] = time.perf_counter() - start
