"""Tokenizer of a Hugging Face folder, loaded offline and without running code of the folder.

ConfigError for a folder without a usable one. transformers is imported at the first call, which takes
seconds; ``TextDecoder`` does without. For reports, the sampler, evaluations, SFT, dataset preparation and
checks before a run. Used throughout the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
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


Piece = tuple[str, bool]
"""A text, and whether it is that of special tokens."""


class TextDecoder:
    """A decoder of token ids for readers, with special tokens apart, out of a folder's tokenizer.json.

    Without transformers, whose import takes seconds and 0.4 GB. ConfigError for a folder without that file,
    or with one that cannot be read. Made by ``commands/report/episodes.py``.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist")
        check_files_inside(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"{path} cannot be read: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """The texts of runs of ordinary and of special tokens, in their order."""
        return [
            (self._tokenizer.decode(list(run), skip_special_tokens=False), is_special)
            for is_special, run in groupby(ids, self._special.__contains__)
        ]


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
