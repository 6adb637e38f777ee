"""Benchmark of the output layer, from hidden states to loss and gradient: peak memory and time.

    python -m benchmarks.output_head            # 32,768 tokens x 32,768 vocabulary; needs 16 GB
    python -m benchmarks.output_head --quick

Three ways, float32, forward and backward, each in its own process:

- full logits: log-softmax of all logits, entropy, log-probs, autograd;
- fused: all logits, then Megatron's vocab_parallel_cross_entropy, which gives no entropy;
- chunked: ``OutputHead.sums``, log-probs, entropy and loss, with the gradient from the same pass.

Writes benchmarks/results/output_head.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bapo_megatron.policy.output_head import OutputHead
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from benchmarks.common import in_a_process, is_quick, machine, one_process, peak_above, write

WAYS = ("full logits", "fused", "chunked")
HIDDEN = (256, 512, 1024)
CHUNK = 1024
ROUNDS = 3


def full_logits(hidden_TH: Tensor, weight_VH: Tensor, label_T: Tensor) -> None:
    log_prob_TV = (hidden_TH @ weight_VH.t()).log_softmax(-1)
    with torch.no_grad():
        -(log_prob_TV.exp() * log_prob_TV).sum(-1)
    log_prob_TV.gather(1, label_T[:, None]).sum().backward()


def fused(hidden_TH: Tensor, weight_VH: Tensor, label_T: Tensor) -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits_T1V = (hidden_TH @ weight_VH.t())[:, None]
    vocab_parallel_cross_entropy(logits_T1V, label_T[:, None]).sum().backward()


def chunked(hidden_TH: Tensor, weight_VH: Tensor, label_T: Tensor, chunk: int = CHUNK) -> None:
    ones_T = torch.ones_like(label_T, dtype=torch.float32)
    batch = MicroBatch.of(
        token_T=label_T,
        label_T=label_T,
        position_T=label_T,
        mask_T=ones_T,
        weight_T=ones_T,
        advantage_T=ones_T,
        rollout_log_prob_T=ones_T,
        old_log_prob_T=ones_T,
        version_T=label_T,
        cu_seqlens=(0, label_T.numel()),
        rows=(),
    )

    def loss(stats: TokenStats, _batch: MicroBatch) -> Tensor:
        return torch.stack([stats.log_prob_T.sum(), stats.entropy_T.sum()])

    OutputHead(1.0, chunk).sums(hidden_TH, weight_VH, batch, loss)[0].backward()


def measure(way: str, tokens: int, vocab: int, hidden: int) -> dict[str, float]:
    """Seconds of the faster of two runs, and peak GiB above inputs and gradients."""
    run: Callable[[Tensor, Tensor, Tensor], None] = {
        "full logits": full_logits,
        "fused": fused,
        "chunked": chunked,
    }[way]
    hidden_TH = torch.randn(tokens, hidden, requires_grad=True)
    weight_VH = (torch.randn(vocab, hidden) / hidden**0.5).requires_grad_()
    label_T = torch.randint(0, vocab, (tokens,))
    run(hidden_TH[:64], weight_VH, label_T[:64])  # loads the libraries
    seconds = []

    def timed() -> None:
        hidden_TH.grad = weight_VH.grad = None
        start = time.perf_counter()
        run(hidden_TH, weight_VH, label_T)
        seconds.append(time.perf_counter() - start)

    gib = peak_above(timed)
    timed()
    return {"seconds": min(seconds), "gib": gib}


def rows(tokens: int, vocab: int, hidden: int) -> list[str]:
    """Table rows: median times and largest peaks of the ways, which take turns."""
    runs = [
        {way: in_a_process("benchmarks.output_head", "--one", way, tokens, vocab, hidden) for way in WAYS}
        for _ in range(ROUNDS)
    ]
    seconds = {way: statistics.median(run[way]["seconds"] for run in runs) for way in WAYS}
    peaks = {way: max(run[way]["gib"] for run in runs) for way in WAYS}
    return [
        f"| {hidden:,} | {way} | {peaks[way]:.2f} GiB | {peaks['full logits'] / peaks[way]:.1f} "
        f"| {seconds[way]:.1f} s | {seconds[way] / seconds['fused']:.2f} |"
        for way in WAYS
    ]


def report(tokens: int, vocab: int) -> str:
    table = "\n".join(line for hidden in HIDDEN for line in rows(tokens, vocab, hidden))
    return f"""# Output layer: full logits, fused cross entropy, chunks

Command: `python -m benchmarks.output_head`

{machine()}, two threads.
{tokens:,} tokens x {vocab:,} vocabulary, float32, forward and backward. Each way in a process of its own,
taking turns; medians of {ROUNDS} times, largest of {ROUNDS} peaks. Chunks of {CHUNK:,} tokens. The peak is
what the pass adds to hidden states, weights and the gradients of both.

| hidden | way | peak | full / peak | time | time / fused |
|---:|---|---:|---:|---:|---:|
{table}

*full logits* and *chunked* give log-probs and entropies, *fused* log-probs alone. All three make three
matmuls. What *chunked* saves in time it saves on passes over logits that do not fit into the cache; what it
spends more on is the entropy.
"""


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--one"]:
        way, *sizes = arguments[1:]
        with one_process():
            print(json.dumps(measure(way, *map(int, sizes))))
    elif is_quick(__doc__):
        print("\n".join(rows(2048, 4096, 128)))
    else:
        write("output_head", report(32768, 32768))


if __name__ == "__main__":
    main(sys.argv[1:])
