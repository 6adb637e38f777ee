"""The two sides of ``against_trl.py``: each runs in its own process and makes one step on request.

``ours`` is a run of ``bapo train``: trainer, sampler process with the embedded engine, reward workers.
``trl`` is TRL's GRPOTrainer in its own loop. Both stop between two steps (``Gate``) and count CPU seconds by
phase (``Meter``). Functions import both, since a reward worker also imports this module.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

GENERATION, REWARD, OLD = "generation", "reward and advantages", "old log-probs"
UPDATE, WEIGHTS, REST = "update", "weights to the engine", "rest"
PHASES = (GENERATION, REWARD, OLD, UPDATE, WEIGHTS, REST)

MAX_PROMPT_TOKENS = 64
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Settings:
    """Settings of both sides."""

    model: Path
    prompts: Path
    """Rows with a `prompt` of chat messages, in the order of use on both sides."""
    folder: Path
    """Folder of the run's files."""
    core: int
    steps: int
    prompts_per_step: int
    group_size: int
    response_tokens: int
    updates: int
    """Updates per step, each with its share of the step's responses."""
    micro_batch: int
    """Responses per forward and backward pass."""

    @property
    def responses(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def accumulated(self) -> int:
        """Micro-batches per update."""
        return self.responses // self.updates // self.micro_batch


@dataclass(frozen=True)
class Batch:
    """Sequences of the check before the timing, equal on both sides."""

    prompts: list[np.ndarray]
    """Prompts of equal length; the responses have one length, too."""
    responses: list[np.ndarray]
    advantages: np.ndarray
    old_log_probs: np.ndarray
    """[sequences, response tokens]"""


def score(prompt: Any, response: str) -> float:
    """Free reward that differs within a group: a hash of the response, in [0, 1)."""
    return zlib.crc32(response.encode()) / 2**32


Clocks = tuple[float, dict[Any, tuple[float, bool]]]
"""CPU seconds of this process; of each descendant process, and whether it is a child."""


def read_clocks(known: Collection[Any] | None) -> Clocks:
    """Clocks of this process and its ``known`` descendants; None: all, whose search takes milliseconds."""
    here, below = psutil.Process(), {}
    for process in here.children(recursive=True) if known is None else known:
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            below[process] = (used.user + used.system, process.ppid() == here.pid)
    return time.process_time(), below


class Meter:
    """CPU seconds (user and system) by phase, of this process and its descendants.

    A child is the sampler: its time counts as generation, or as weight transport while the trainer sends
    weights. A grandchild is a reward worker.
    """

    def __init__(self, clocks: Callable[[Collection[Any] | None], Clocks] | None = None) -> None:
        self._clocks = clocks or read_clocks
        self._phase = REST
        self.seconds: Counter[str] = Counter()
        """Seconds by phase since ``begin``."""
        self._own = 0.0
        self._below: dict[Any, float] = {}
        self._counts: Counter[str] = Counter()

    def begin(self) -> None:
        """Reset the counts and seconds."""
        self._settle(None)
        self.seconds.clear()
        self._counts.clear()

    def end(self) -> dict[str, Any]:
        """Seconds by phase since ``begin``, the counts, and the peak memory so far in MiB."""
        self._settle(None)
        pids = {"trainer": [os.getpid()], "sampler and workers": [process.pid for process in self._below]}
        memory = {name: sum(map(peak_mib, group)) for name, group in pids.items()}
        return {"cpu_s": dict(self.seconds), "peak_mib": memory, **self._counts}

    def count(self, name: str, number: int) -> None:
        self._counts[name] += number

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager of a phase; the time of an inner phase counts only as the inner one's."""
        outer = self.switch(name)
        try:
            yield
        finally:
            self.switch(outer)

    def switch(self, phase: str) -> str:
        """Begin a phase. Returns the previous one."""
        self._settle(self._below)
        before, self._phase = self._phase, phase
        return before

    def timed(self, owner: Any, attribute: str, name: str) -> None:
        """Wrap a method or function so that each call is a phase."""
        call = getattr(owner, attribute)

        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.phase(name):
                return call(*arguments, **named)

        setattr(owner, attribute, timed)

    def _settle(self, known: Collection[Any] | None) -> None:
        """Add the CPU time since the last call to the current phase."""
        own, below = self._clocks(known)
        self.seconds[self._phase] += own - self._own
        of_sampler = WEIGHTS if self._phase == WEIGHTS else GENERATION
        for process, (seconds, is_child) in below.items():
            self.seconds[of_sampler if is_child else REWARD] += seconds - self._below.get(process, 0.0)
        self._own, self._below = own, {process: seconds for process, (seconds, _) in below.items()}


def peak_mib(pid: int) -> float:
    """Peak resident memory of a process so far, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


class Gate:
    """Border between two steps: reports the last step, then answers questions until the next is due."""

    def __init__(self, pipe: Connection, meter: Meter) -> None:
        self._pipe, self._meter = pipe, meter

    def wait(self, answer: Callable[[str, Batch], Any]) -> None:
        """Wait for the next step. Raises SystemExit if none follows."""
        self._pipe.send(self._meter.end())
        while (call := self._pipe.recv()) != "step":
            if call is None:
                sys.exit(0)
            self._pipe.send(answer(*call))
        self._meter.begin()


# --- ours ------------------------------------------------------------------------------------------


def run_ours(settings: Settings, gate: Gate, meter: Meter) -> None:
    """Run the product; its steps begin with the weight transport."""
    import bapo_megatron.train as loop
    from bapo_megatron.checkpoint.run_directory import check_writable
    from bapo_megatron.commands.train import train_process
    from bapo_megatron.rollout.weight_sync.disk import DiskSync
    from bapo_megatron.runtime.distributed import free_port

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    config = our_config(settings)
    next_batch, push = loop.next_batch, DiskSync.push

    def counted_batch(run: Any, step: int) -> Any:
        with meter.phase(GENERATION):
            batch = next_batch(run, step)
        for group in batch.header.groups:
            meter.count("prompt_tokens", group.prompt_tokens * len(group.responses))
            meter.count("tokens", sum(response.tokens for response in group.responses))
        return batch

    def push_at_the_gate(sync: DiskSync, policy: Any, step: int) -> None:
        gate.wait(partial(our_answer, config, policy))
        with meter.phase(WEIGHTS):
            push(sync, policy, step)

    loop.next_batch, DiskSync.push = counted_batch, push_at_the_gate
    meter.timed(loop, "training_samples", REWARD)
    meter.timed(loop, "update", UPDATE)
    check_writable(config.directory)
    # Without the other checks of `bapo train`, which reject an end token outside the vocabulary.
    train_process(config)


def our_config(settings: Settings) -> Any:
    from bapo_megatron.algo.bounds import grpo
    from bapo_megatron.config import (
        AlgorithmConfig,
        BatchConfig,
        CheckpointConfig,
        DataConfig,
        ModelConfig,
        OptimizerConfig,
        RewardConfig,
        RolloutConfig,
        RunConfig,
    )

    longest = MAX_PROMPT_TOKENS + settings.response_tokens
    return RunConfig(
        name="against_trl",
        run_dir=settings.folder / "run",
        steps=settings.steps,
        threads=1,
        model=ModelConfig(settings.model, dtype="float32"),
        data=DataConfig(settings.prompts, max_prompt_tokens=MAX_PROMPT_TOKENS, shuffle=False),
        reward=RewardConfig(function=f"{__spec__.name}:score", workers=1),
        rollout=RolloutConfig(
            prompts_per_step=settings.prompts_per_step,
            group_size=settings.group_size,
            max_response_tokens=settings.response_tokens,
            drop_uniform_groups=False,
        ),
        algorithm=AlgorithmConfig(bounds=grpo(), advantage="grpo", updates_per_epoch=settings.updates),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.0),
        batch=BatchConfig(pack_tokens=settings.micro_batch * longest),
        checkpoint=CheckpointConfig(every=settings.steps),
    )


def our_answer(config: Any, policy: Any, what: str, batch: Batch) -> Any:
    """Log-probs [sequences, response tokens] of a batch, or GRPO's loss, from the run's policy."""
    from bapo_megatron.data.packing import pack_samples
    from bapo_megatron.data.samples import Sample
    from bapo_megatron.trainer.update_loss import UpdateLoss

    rows = zip(batch.prompts, batch.responses, batch.old_log_probs, batch.advantages, strict=True)
    samples = [
        Sample(
            np.concatenate([prompt, response]).astype(np.int32),
            old.astype(np.float32),
            np.full(len(response), -1, np.int32),
            float(advantage),
        )
        for prompt, response, old, advantage in rows
    ]
    packs = pack_samples(samples, config.batch.pack_tokens, "token", policy.pack_layout)
    if what == "loss":
        loss = UpdateLoss(config.algorithm).loss(policy, packs, on_policy=False)
        return float(policy.token_sums(packs, loss)[0]) / batch.old_log_probs.size
    log_probs = np.zeros_like(batch.old_log_probs)
    for pack, stats in zip(packs, policy.log_probs(packs), strict=True):
        for index, offset, positions in pack.rows:
            end = offset + positions
            log_probs[index] = stats.log_prob_T[end - log_probs.shape[1] : end].numpy()
    return log_probs


# --- TRL -------------------------------------------------------------------------------------------


def run_trl(settings: Settings, gate: Gate, meter: Meter) -> None:
    """Run TRL's trainer; its steps begin before its loop makes the batch of an update."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(1)

    class AtTheGate(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % settings.updates == 0:
                gate.wait(partial(trl_answer, trainer))

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            meter.switch(UPDATE)

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            meter.switch(REST)

    def rewards(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [score(None, completion[0]["content"]) for completion in completions]

    rows = [json.loads(line) for line in settings.prompts.read_text().splitlines()]
    trainer = GRPOTrainer(
        model=str(settings.model),
        reward_funcs=rewards,
        args=trl_config(settings),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[AtTheGate()],
    )
    generate = trainer._generate_single_turn

    def counted(prompt_ids: Any, *arguments: Any) -> Any:
        with meter.phase(GENERATION):
            output = generate(prompt_ids, *arguments)
        meter.count("prompt_tokens", sum(map(len, prompt_ids)))
        meter.count("tokens", sum(map(len, output[0])))
        return output

    log_probs = trainer._get_per_token_logps_and_entropies

    def of_old(*arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            return log_probs(*arguments, **named)
        with meter.phase(OLD):
            return log_probs(*arguments, **named)

    trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies = counted, of_old
    meter.timed(trainer, "_generate_and_score_completions", REWARD)
    meter.timed(trainer, "training_step", UPDATE)
    meter.timed(trainer, "_clip_grad_norm", UPDATE)
    trainer.train()


def trl_config(settings: Settings) -> Any:
    """TRL's settings: equal to ours, or cheapest on a CPU; all others are defaults."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(settings.folder / "trl"),
        max_steps=settings.steps * settings.updates,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.accumulated,
        steps_per_generation=settings.responses // settings.micro_batch,
        num_generations=settings.group_size,
        max_completion_length=settings.response_tokens,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        num_iterations=1,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )


def trl_answer(trainer: Any, what: str, batch: Batch) -> Any:
    """Same as ``our_answer``, from TRL's trainer."""
    import torch

    prompt_ids = torch.from_numpy(np.stack(batch.prompts)).long()
    completion_ids = torch.from_numpy(np.stack(batch.responses)).long()
    ids = torch.cat([prompt_ids, completion_ids], dim=1)
    trainer.model.train()  # as in its steps; before the first it is not, and the loss differs
    with torch.no_grad():
        if what == "log_probs":
            log_probs, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), completion_ids.size(1)
            )
            return log_probs.numpy()
        # The whole batch: TRL would divide by the tokens of a micro-batch's share.
        parts = trainer.args.steps_per_generation / trainer.current_gradient_accumulation_steps
        inputs = {
            "prompt_ids": prompt_ids,
            "prompt_mask": torch.ones_like(prompt_ids),
            "completion_ids": completion_ids,
            "completion_mask": torch.ones_like(completion_ids),
            "advantages": torch.from_numpy(batch.advantages).float(),
            "old_per_token_logps": torch.from_numpy(batch.old_log_probs).float(),
            "num_items_in_batch": torch.tensor(completion_ids.numel() * parts),
        }
        loss = float(trainer._compute_loss(trainer.model, inputs))
        trainer._metrics["train"].clear()
        return loss


def main() -> None:
    """Run the side ``ours`` or ``trl``; the second argument is the descriptor of a pipe with the settings."""
    side, pipe = sys.argv[1], Connection(int(sys.argv[2]))
    settings: Settings = pipe.recv()
    os.sched_setaffinity(0, {settings.core})
    meter = Meter()
    {"ours": run_ours, "trl": run_trl}[side](settings, Gate(pipe, meter), meter)


if __name__ == "__main__":
    # Under its own name: a pipe does not find classes of __main__.
    from benchmarks.against_trl_sides import main as named_main

    named_main()
