"""The tokenizer of a folder: a tokenizer.json counts before the class that transformers would choose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bapo_megatron.hf.tokenizer import load_tokenizer

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ONE_DIGIT, THREE_DIGITS = _WORDS % "", _WORDS % "{1,3}"
TEXT = "2345 + 123 = 2468, na\u00efve or nai\u0308ve"


def save_tokenizer(folder: Path, split: str, kind: str | None, family: str) -> Tokenizer:
    """A byte-level BPE tokenizer of the words that ``split`` finds, as a model folder has it."""
    tokenizer = Tokenizer(models.BPE())
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(split), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([f"{TEXT} 12 345"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "pad_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}
    if kind is not None:
        settings["tokenizer_class"] = kind
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return tokenizer


@pytest.mark.parametrize("split", [ONE_DIGIT, THREE_DIGITS])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen2", "LlamaTokenizerFast"),  # the form of R1-Distill-Qwen
        ("qwen2", "PreTrainedTokenizerFast"),
        ("qwen3", "Qwen2Tokenizer"),
        ("qwen3_moe", None),
        ("llama", "PreTrainedTokenizerFast"),
        ("llama", "GPT2Tokenizer"),
    ],
)
def test_texts_are_split_as_the_file_says(split: str, family: str, kind: str | None, tmp_path: Path) -> None:
    """transformers 5 would split a Qwen2's text by rules of its own, whatever the model was trained with."""
    file = save_tokenizer(tmp_path, split, kind, family)
    loaded = load_tokenizer(tmp_path)
    wanted = file.encode(TEXT, add_special_tokens=False).ids
    assert loaded.encode(TEXT, add_special_tokens=False) == wanted
    messages = [{"role": "user", "content": TEXT}]
    assert loaded.apply_chat_template(messages, return_dict=False) == wanted
    assert loaded.decode([*wanted, loaded.eos_token_id], skip_special_tokens=True) == TEXT


def test_a_template_that_writes_the_date_writes_the_same_every_day(tmp_path: Path) -> None:
    """Llama 3.2's does: a run continued on another day would have other prompts before its responses."""
    file = save_tokenizer(tmp_path, THREE_DIGITS, None, "llama")
    dated = "{{ strftime_now('%d %b %Y') + messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(dated)
    ids = load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": TEXT}], return_dict=False)
    assert file.decode(ids) == f"26 Jul 2024{TEXT}"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text(dated)
    assert "strftime" not in str(load_tokenizer(tmp_path).chat_template)
