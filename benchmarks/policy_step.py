"""Benchmark of ``Policy.update`` in tokens/s against a bare megatron-core loop and transformers with AdamW.

    python -m benchmarks.policy_step            # a quarter of an hour on two cores
    python -m benchmarks.policy_step --quick

The second table has CPU seconds on one thread, for a model as large as SmolLM2-135M. Three loops train the
same model from the same weights on the same documents, in turns:

- the policy: log-probs, entropies, the BAPO loss at lagged bounds, all logged metrics of an update;
- bare megatron-core: the same layers, DDP, optimizer, packs and schedule, plain cross entropy;
- transformers: padded batches of documents of similar length, its cross entropy, torch's fused AdamW.

Writes benchmarks/results/policy_step.md.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algo.bapo import eq8_literal
from bapo_megatron.config import AlgorithmConfig, BatchConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.attention import DocumentPack
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.tensor_types import MicroBatch
from bapo_megatron.trainer.update_loss import UpdateLoss
from benchmarks.common import (
    Clock,
    in_turns,
    is_quick,
    machine,
    one_process,
    random_samples,
    save_model,
    torch_policy,
    write,
)


@dataclass(frozen=True)
class Size:
    """Size of the model and the update."""

    hidden: int
    layers: int
    vocab: int
    longest: int = 2048
    samples: int = 16
    pack: int = 4096
    rounds: int = 5
    fields: dict[str, object] = field(default_factory=dict)
    """Configuration fields that replace those of ``save_model``."""
    equal: bool = False
    """Whether all documents have ``longest`` tokens."""

    @property
    def name(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, vocabulary {self.vocab:,}"


SIZES = (Size(256, 8, 8192), Size(512, 8, 8192), Size(512, 4, 32768))
_SMOL: dict[str, object] = {
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
_OF_SMOL = Size(576, 30, 49152, samples=8, pack=1024, rounds=3, fields=_SMOL)
CPU_SIZES = {
    "8 documents of 128 tokens": replace(_OF_SMOL, longest=128, equal=True),
    "8 documents of up to 256 tokens": replace(_OF_SMOL, longest=256),
}
"""Sizes of SmolLM2-135M, by their documents."""
QUICK = (Size(64, 2, 512, longest=64, samples=8, pack=128, rounds=1),)


def of_policy(policy: MegatronPolicy, samples: Sequence[Sample], size: Size) -> Callable[[], object]:
    """Function that makes one update with all sums of the exact search, at the bounds of the last update."""
    clipping = UpdateLoss(AlgorithmConfig(bounds=replace(eq8_literal(), scope="lagged")))
    packs = pack_samples(samples, size.pack, "token", policy.pack_layout)

    def step() -> None:
        loss = clipping.loss(policy, packs, on_policy=False)
        clipping.observe(policy.update(packs, loss).sums)

    return step


def of_megatron(policy: MegatronPolicy, samples: Sequence[Sample], size: Size) -> Callable[[], object]:
    """Function that makes one step with megatron-core alone: GPTModel ends with its own loss."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    [wrapped] = policy._model
    rotary = wrapped.module.rotary
    wrapped.module.__class__ = GPTModel
    packs = pack_samples(samples, size.pack, "token", policy.pack_layout)

    def forward(iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        pack: MicroBatch = next(iterator)
        table = None if rotary is None else rotary.table(pack.position_T)
        losses = model(
            pack.token_T[None],
            pack.position_T[None],
            attention_mask=None,
            labels=pack.label_T[None],
            packed_seq_params=DocumentPack.of(pack.cu_seqlens, pack.max_seqlen, policy.device, table),
        )

        def loss(loss_1T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = (loss_1T[0] * pack.mask_T).sum()
            return total, pack.mask_T.sum().to(torch.int), {"loss": total.detach()}

        return losses, loss

    def step() -> None:
        wrapped.zero_grad_buffer()
        policy._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(packs),
            model=wrapped,
            num_microbatches=len(packs),
            seq_length=size.pack,
            micro_batch_size=1,
            forward_only=False,
        )
        policy._schedule.step(increment=1)
        policy._optimizer.step()

    return step


def of_transformers(folder: Path, samples: Sequence[Sample], size: Size) -> Callable[[], object]:
    """Function that makes one step on padded batches of up to a pack's tokens, sorted by length."""
    import transformers

    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = padded_batches(samples, size.pack)

    def step() -> None:
        optimizer.zero_grad()
        for token_BL, mask_BL, label_BL in batches:
            model(input_ids=token_BL, attention_mask=mask_BL, labels=label_BL).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def padded_batches(samples: Sequence[Sample], tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ids, attention masks and labels of batches with at most ``tokens``, padding included."""
    rows = sorted((torch.from_numpy(sample.token_ids).long() for sample in samples), key=len, reverse=True)
    batches = []
    while rows:
        count = max(1, tokens // len(rows[0]))
        taken, rows = rows[:count], rows[count:]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(taken, batch_first=True)
        labels = pad(taken, batch_first=True, padding_value=-100)
        batches.append((ids, (labels >= 0).long(), labels))
    return batches


def measure(size: Size, clock: Clock = time.perf_counter) -> tuple[int, dict[str, float]]:
    """Tokens of an update, and each loop's seconds by ``clock``."""
    samples = random_samples(size.samples, size.longest, size.vocab, equal=size.equal)
    with tempfile.TemporaryDirectory() as folder:
        longest = size.longest
        path = save_model(Path(folder), size.hidden, size.layers, size.vocab, longest, **size.fields)
        batch = BatchConfig(pack_tokens=size.pack)
        loops = {
            "Policy.update": of_policy(torch_policy(path, batch), samples, size),
            "bare megatron-core": of_megatron(torch_policy(path, batch), samples, size),
            "transformers + AdamW": of_transformers(path, samples, size),
        }
        return sum(sample.positions for sample in samples), in_turns(loops, size.rounds, clock)


def rows(size: Size) -> list[str]:
    tokens, seconds = measure(size)
    bare = seconds["bare megatron-core"]
    return [
        f"| {size.name} | {name} | {tokens / value:,.0f} | {bare / value:.2f} |"
        for name, value in seconds.items()
    ]


def cpu_rows(documents: str, size: Size) -> list[str]:
    """Rows of the second table: CPU seconds of this process, on one thread."""
    torch.set_num_threads(1)
    _, seconds = measure(size, time.process_time)
    theirs = seconds["transformers + AdamW"]
    return [
        f"| {documents} | {name} | {value:.1f} | {value / theirs:.2f} |" for name, value in seconds.items()
    ]


def report(sizes: Sequence[Size], cpu_sizes: Mapping[str, Size]) -> str:
    table = "\n".join(line for size in sizes for line in rows(size))
    cpu_table = "\n".join(line for pair in cpu_sizes.items() for line in cpu_rows(*pair))
    big, small = sizes[0], next(iter(cpu_sizes.values()))
    return f"""# Speed of an update

Command: `python -m benchmarks.policy_step`

{machine()}, two threads, float32, one process.
{big.samples} documents of up to {big.longest:,} tokens in packs of at most {big.pack:,}.
Medians of {big.rounds} rounds in which the loops take turns.

| model | loop | tokens/s | speed / bare |
|---|---|---:|---:|
{table}

*bare megatron-core* is the same model, optimizer, packs and schedule with GPTModel's own cross entropy and
nothing else. *Policy.update* also gives entropies, the BAPO loss and all sums that are logged, and never
holds a pack's logits. *transformers* pads batches of documents of like length; its attention is sdpa, its
AdamW fused. The attention of the two megatron loops is ours: megatron-core has none for packed documents on
a CPU.

## A model as large as SmolLM2-135M

{machine()}, one thread, float32, one process, {small.layers} layers, hidden {small.hidden}, vocabulary
{small.vocab:,}. CPU seconds of an update, which other programs on the machine disturb less than its
duration; medians of {small.rounds} rounds in which the loops take turns.

| documents | loop | CPU seconds | / transformers |
|---|---|---:|---:|
{cpu_table}
"""


def main() -> None:
    quick = is_quick(__doc__)
    with one_process():
        if quick:
            print(report(QUICK, {"quick": replace(QUICK[0], equal=True)}))
        else:
            write("policy_step", report(SIZES, CPU_SIZES))


if __name__ == "__main__":
    main()
