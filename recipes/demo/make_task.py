r"""Generator of the demo task: a tokenizer, a small random model, and addition with a scratchpad.

    python recipes/demo/make_task.py --out recipes/demo

writes ``model`` (a Hugging Face folder with its tokenizer), ``warm_start.jsonl``, ``train.jsonl`` and
``eval.jsonl`` (the fields of Skywork-OR1-RL-Data; no sum is in two of them). It takes seconds and needs no
network. Equal arguments give equal files.

The warm start's solutions show two habits: most are guesses, the others add digit by digit. Guesses are
rarely right, so RL has to learn that addition earns more reward, and to make fewer slips.

With ``--guesses 0 --rambles 0.7`` most solutions slip in a column, doubt it, begin again, and give up at the
fifth attempt: wrong responses are the long ones, as on hard problems (Fig. 6 of the paper), and most tokens
are negative.

With ``--neutral CHARS`` a random character ends each column instead of the comma: tokens that keep their
entropy throughout training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

RESERVED = 5
"""Unused tokens that fill the vocabulary up to 264 = 256 bytes + 3 + 5, which 8 divides."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

BARE_TEMPLATE = "{%- for message in messages -%}{{ message['content'] }}{%- endfor -%}"
"""Chat template of ``--bare``: the prompt is only the sum, which is 18 tokens shorter."""

DATA_SOURCE = "bapo_demo/addition"

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_CLASSES: dict[tuple[bool, bool], tuple[type[Any], type[Any]]] = {
    (False, False): (Qwen2Config, Qwen2ForCausalLM),
    (True, False): (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    (False, True): (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    (True, True): (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
}
"""Configuration and model classes of transformers, by (has experts, has Gated DeltaNet)."""


# --- the tokenizer and the model -----------------------------------------------------------------


def make_tokenizer(folder: Path, template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Write a tokenizer whose tokens are the bytes of the NFC text, with a chat template. Returns it.

    ``<|im_end|>`` ends a turn. NFC is explicit because transformers 5 adds it to every tokenizer beside a
    Qwen2 model: all versions then read equally.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    bytes_only.normalizer = normalizers.NFC()
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([END_OF_TEXT, START, END, *(f"<|reserved_{n}|>" for n in range(RESERVED))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token=END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    _name_the_class_for_all_versions(folder / "tokenizer_config.json")
    return tokenizer


def _name_the_class_for_all_versions(path: Path) -> None:
    """Set a tokenizer class of both transformers 4 and 5; version 5 writes one that 4 lacks."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


def make_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 192,
    context: int = 256,
    experts: int = 0,
    hybrid: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """Write a random Qwen2, float32, untied. The defaults (0.23 M parameters) allow TP 2, PP 2, VPP 2.

    With ``experts`` a Qwen3 MoE: that many experts per layer, two per token, each ``hidden`` wide. A
    ``hybrid`` is a Qwen3.5: full attention in every second layer, Gated DeltaNet in the others.
    """
    config_class, model_class, kind = _kind(hidden // heads, heads, hidden, experts, hybrid)
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **{"rope_parameters": _ROPE, **kind},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(folder)
    return model


def _kind(
    head_dim: int, heads: int, hidden: int, experts: int, hybrid: bool
) -> tuple[type[Any], type[Any], dict[str, Any]]:
    """Classes of a kind of model in transformers, and its additional configuration fields."""
    own: dict[str, Any] = {"head_dim": head_dim} if experts or hybrid else {}
    if experts:
        own |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    if experts and not hybrid:
        own |= {"norm_topk_prob": True}
    if experts and hybrid:
        own |= {"shared_expert_intermediate_size": hidden}
    if hybrid:
        own |= {
            "full_attention_interval": 2,
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": head_dim,
            "linear_value_head_dim": head_dim,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        }
    return *_CLASSES[bool(experts), hybrid], own


# --- the solutions -------------------------------------------------------------------------------


def ramble(numbers: Sequence[int], rng: np.random.Generator, attempts: int = 5) -> str:
    r"""Wrong solution: ``attempts`` column additions, each abandoned at a slip; the last gives its wrong sum.

    >>> ramble([47, 86], np.random.default_rng(0), attempts=3)
    '7+6+0=13,4+8+1=15?7+6+0=13,4+8+1=11?7+6+0=9?\\boxed{129}'
    """
    parts: list[str] = []
    wrong = 0
    for _ in range(attempts):
        columns = scratchpad(numbers).split(",")[:-1]
        place = int(rng.integers(len(columns)))
        sums, _, total = columns[place].rpartition("=")
        slip = _other_total(int(total), rng)
        wrong = sum(numbers) + (slip - int(total)) * 10**place
        parts += [*(f"{column}," for column in columns[:place]), f"{sums}={slip}?"]
    return "".join(parts) + rf"\boxed{{{wrong}}}"


def _other_total(total: int, rng: np.random.Generator) -> int:
    """Wrong total of a column: at most 4 off, and at least 0."""
    return int(rng.choice([other for other in range(max(0, total - 4), total + 5) if other != total]))


def scratchpad(numbers: Sequence[int]) -> str:
    r"""Column addition from the right; the last addend of each column is the carry.

    >>> scratchpad([47, 86])
    '7+6+0=13,4+8+1=13,\\boxed{133}'
    """
    columns: list[str] = []
    carry = 0
    for place in range(max(len(str(number)) for number in numbers)):
        digits = [number // 10**place % 10 for number in numbers]
        total = sum(digits) + carry
        columns.append("+".join(map(str, [*digits, carry])) + f"={total},")
        carry = total // 10
    return "".join(columns) + rf"\boxed{{{sum(numbers)}}}"


def with_neutral(solution: str, neutral: str, rng: np.random.Generator) -> str:
    r"""The solution with a random ``neutral`` character in place of each comma.

    >>> with_neutral(scratchpad([47, 86]), ",;/|", np.random.default_rng(0))
    '7+6+0=13|4+8+1=13/\\boxed{133}'
    """
    if len(neutral) < 2:
        return solution
    return "".join(neutral[rng.integers(len(neutral))] if char == "," else char for char in solution)


# --- the problems --------------------------------------------------------------------------------


def make_problems(
    sizes: dict[str, int], *, min_digits: int = 2, max_digits: int = 3, addends: int = 2, seed: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """``sizes`` problems of each split. No sum occurs twice, not even with its numbers swapped.

    Raises ValueError if there are fewer sums.
    """
    sums = _sums(np.random.default_rng(seed), sum(sizes.values()), range(min_digits, max_digits + 1), addends)
    return {
        split: [_row(index, split, numbers) for index, numbers in enumerate(islice(sums, size))]
        for split, size in sizes.items()
    }


def add_solutions(
    rows: list[dict[str, Any]],
    guesses: float,
    rambles: float = 0.0,
    seed: int = 0,
    *,
    attempts: tuple[int, int] = (5, 5),
    neutral: str = ",",
) -> list[dict[str, Any]]:
    """The rows with a solution for supervised training.

    The share ``guesses`` is a number up to 5 off, the share ``rambles`` a wrong solution of FEWEST to MOST
    ``attempts``, the rest a right one. A random ``neutral`` character ends each column.
    """
    rng = np.random.default_rng([seed, 1])
    habits = rng.random(len(rows))
    errors = rng.integers(-5, 6, len(rows)).tolist()
    solved: list[dict[str, Any]] = []
    for row, habit, error in zip(rows, habits, errors, strict=True):
        numbers = [int(number) for number in row["prompt"][0]["content"].rstrip("=").split("+")]
        if habit < guesses:
            solution = rf"\boxed{{{sum(numbers) + error}}}"
        elif habit < guesses + rambles:
            fewest, most = attempts
            count = fewest if fewest == most else int(rng.integers(fewest, most + 1))
            solution = ramble(numbers, rng, count)
        else:
            solution = scratchpad(numbers)
        solution = with_neutral(solution, neutral, rng)
        solved.append({**row, "extra_info": {**row["extra_info"], "solution": solution}})
    return solved


def _sums(rng: np.random.Generator, count: int, widths: range, addends: int) -> Iterator[list[int]]:
    seen: set[tuple[int, ...]] = set()
    misses = 0
    while len(seen) < count:
        digits = int(rng.choice(widths))
        smallest = 10 ** (digits - 1) if digits > 1 else 0
        numbers = rng.integers(smallest, 10**digits, addends).tolist()
        key = tuple(sorted(numbers))
        misses = misses + 1 if key in seen else 0
        if misses > 1000:
            raise ValueError(f"there are hardly {count} different sums; ask for fewer, or for more digits")
        if misses == 0:
            seen.add(key)
            yield numbers


def _row(index: int, split: str, numbers: list[int]) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": "+".join(map(str, numbers)) + "="}],
        "reward_model": {"style": "rule", "ground_truth": str(sum(numbers))},
        "extra_info": {"index": index, "split": split, "digits": len(str(numbers[0]))},
    }


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one row per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- the command line ----------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the whole task to ``--out``."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if min(args.guesses, args.rambles) < 0 or args.guesses + args.rambles > 1:
        parser.error("--guesses and --rambles are shares of the solutions: together at most 1")
    if not 1 <= args.attempts[0] <= args.attempts[1]:
        parser.error("--attempts FEWEST MOST: 1 or more, in this order")
    model_folder: Path = args.out / "model"
    model_folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(model_folder, BARE_TEMPLATE if args.bare else CHAT_TEMPLATE)
    shape = {
        name: getattr(args, name)
        for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "context", "experts", "hybrid")
    }
    model = make_model(model_folder, tokenizer, **shape, seed=args.seed)
    sizes = {"warm_start": args.warm_start, "train": args.train, "eval": args.eval}
    digits = {"min_digits": args.min_digits, "max_digits": args.max_digits}
    splits = make_problems(sizes, **digits, addends=args.addends, seed=args.seed)
    habits = {"attempts": tuple(args.attempts), "neutral": args.neutral}
    splits["warm_start"] = add_solutions(
        splits["warm_start"], args.guesses, args.rambles, args.seed, **habits
    )
    for split, rows in splits.items():
        write_jsonl(args.out / f"{split}.jsonl", rows)
    print(f"{args.out}: {model.num_parameters():,} parameters; problems: {sizes}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--guesses", type=float, default=0.75, help="share of solutions that only guess")
    parser.add_argument("--rambles", type=float, default=0.0, help="share that fails after a long time")
    parser.add_argument(
        "--attempts", type=int, nargs=2, default=(5, 5), metavar=("FEWEST", "MOST"), help="of a ramble"
    )
    parser.add_argument("--neutral", default=",", help="characters that end a column, each as good")
    parser.add_argument("--bare", action="store_true", help="prompts without the marks of a chat")
    parser.add_argument("--hybrid", action="store_true", help="a model with Gated DeltaNet in most layers")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the problems")
    for flag, default, meaning in (
        ("--warm-start", 4000, "problems with solutions"),
        ("--train", 1500, "problems to train on"),
        ("--eval", 200, "problems to evaluate on"),
        ("--min-digits", 2, "digits of the easiest sums"),
        ("--max-digits", 3, "digits of the hardest sums"),
        ("--addends", 2, "numbers in a sum"),
        ("--hidden", 64, "hidden size"),
        ("--layers", 4, "layers"),
        ("--heads", 4, "attention heads"),
        ("--kv-heads", 2, "key-value heads"),
        ("--ffn", 192, "hidden size of the MLP"),
        ("--context", 256, "longest sequence, in tokens"),
        ("--experts", 0, "experts of each layer; 0 for a dense model"),
    ):
        parser.add_argument(flag, type=int, default=default, help=meaning)
    return parser


if __name__ == "__main__":
    main()
