"""How far the log-probs of trainer and engine lie apart because of the output layer's arithmetic.

    python -m benchmarks.head_precision         # a minute on one core
    python -m benchmarks.head_precision --quick

Both get the same bfloat16 hidden states and weights, at random, with the logits of a language model: a spread
of 6 and peaks near 30. Tokens are drawn from the engine's distribution. The engine's formula is written down
from SGLang 0.5.23 (``logits_processor.py``, ``sampler.py``); "before" is the trainer's formula of commit
1d1f58e. Nothing is timed. Writes benchmarks/results/head_precision.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bapo_megatron.policy.output_head import OutputHead
from benchmarks.common import is_quick, machine, write

SPREAD = 6.0
TEMPERATURES = (0.6, 1.0)


def engine(hidden_TH: Tensor, weight_VH: Tensor, temperature: float, fp32_head: bool) -> Tensor:
    """Log-probs of SGLang, [tokens, vocabulary], with or without ``--enable-fp32-lm-head``."""
    if fp32_head:
        logits_TV = hidden_TH.float() @ weight_VH.float().t()
    else:
        logits_TV = (hidden_TH @ weight_VH.t()).float()
    return logits_TV.div_(torch.full((1, 1), temperature)).softmax(-1).log()


def before(hidden_TH: Tensor, weight_VH: Tensor, temperature: float, label_T: Tensor) -> Tensor:
    """The trainer's log-probs before: logits / t in the matmul, rounded to bfloat16."""
    logits_TV = torch.addmm(
        hidden_TH.new_zeros(()), hidden_TH, weight_VH.t(), beta=0, alpha=1 / temperature
    ).float()
    return logits_TV.log_softmax(-1).gather(1, label_T[:, None])[:, 0]


def now(hidden_TH: Tensor, weight_VH: Tensor, temperature: float, label_T: Tensor) -> Tensor:
    """The trainer's log-probs."""
    return OutputHead(temperature, 1024).stats(hidden_TH, weight_VH, label_T).log_prob_T


def neighbours(hidden_TH: Tensor) -> Tensor:
    """The hidden states with every entry moved to one of its two neighbours in bfloat16, at random."""
    step = torch.randint(0, 2, hidden_TH.shape, dtype=torch.int16) * 2 - 1
    return (hidden_TH.view(torch.int16) + step).view(torch.bfloat16)


def rows(tokens: int, vocab: int, width: int) -> list[str]:
    """Mean and largest gap of each pair of formulas."""
    torch.manual_seed(0)
    hidden_TH = torch.randn(tokens, width).bfloat16()
    weight_VH = (SPREAD * torch.randn(vocab, width) / width**0.5).bfloat16()
    lines = []
    for temperature in TEMPERATURES:
        for name, formula, states, fp32_head in (
            ("before, servers without the flag", before, hidden_TH, False),
            ("before, servers with the flag", before, hidden_TH, True),
            ("now, servers without the flag", now, hidden_TH, False),
            ("**now, servers with the flag**", now, hidden_TH, True),
            ("now, with the flag, hidden states one rounding apart", now, neighbours(hidden_TH), True),
        ):
            theirs_TV = engine(states, weight_VH, temperature, fp32_head)
            label_T = torch.multinomial(theirs_TV.exp(), 1)[:, 0]
            theirs_T = theirs_TV.gather(1, label_T[:, None])[:, 0]
            gap_T = (formula(hidden_TH, weight_VH, temperature, label_T) - theirs_T).abs()
            lines.append(f"| {temperature} | {name} | {gap_T.mean():.1e} | {gap_T.max():.1e} |")
    return lines


def report(tokens: int, vocab: int, width: int) -> str:
    table = "\n".join(rows(tokens, vocab, width))
    return f"""# Output layer: log-probs of trainer and engine on equal hidden states

Command: `python -m benchmarks.head_precision`

{machine()}. {tokens:,} tokens, vocabulary {vocab:,}, hidden size {width:,}, bfloat16. The gap is
`|log pi_trainer - log pi_engine|` of tokens that the engine sampled, in nats; the flag is
`--enable-fp32-lm-head`, which the run gives its servers.

| temperature | trainer and engine | mean gap | largest |
|---:|---|---:|---:|
{table}

What is left with the flag is the rounding of float32 at logits of this size. The last rows move every entry
of the hidden states to a neighbouring bfloat16 number: an order of magnitude for what other kernels in the
layers below may do, which no output layer can mend.
"""


if __name__ == "__main__":
    if is_quick(__doc__):
        print("\n".join(rows(64, 2048, 256)))
    else:
        write("head_precision", report(512, 16384, 1024))
