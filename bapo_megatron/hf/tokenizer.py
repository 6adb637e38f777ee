"""Tokenizer of a Hugging Face folder, loaded offline and without running code of the folder.

ConfigError for a folder without a usable one. transformers is imported at the first call, which takes
seconds. For the sampler, evaluations, SFT, dataset preparation and checks before a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import check_files_inside

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in ``folder``. ConfigError if there is none, or it has no eos or chat template."""
    tokenizer = _read(folder)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.hf_path={folder}: the tokenizer has no eos token, so no response would end")
    if not tokenizer.chat_template:
        raise ConfigError(f"model.hf_path={folder}: the tokenizer has no chat template")
    return tokenizer


def read_vocabulary(folder: Path) -> dict[str, int]:
    """The tokens of the tokenizer in ``folder``, with their ids; it needs no chat template. ConfigError if
    there is none."""
    found: dict[str, int] = _read(folder).get_vocab()
    return found


def _read(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ConfigError(f"model.hf_path={folder} is not a folder")
    check_files_inside(folder)
    if not any((folder / name).exists() for name in _FILES):  # transformers would make up an empty one
        raise ConfigError(f"model.hf_path={folder} holds no tokenizer; expected one of {', '.join(_FILES)}")
    try:
        # Without the setting transformers asks at the terminal whether code of the folder may run.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for a missing or broken tokenizer
        raise ConfigError(f"model.hf_path={folder}: its tokenizer cannot be read: {error}") from error
