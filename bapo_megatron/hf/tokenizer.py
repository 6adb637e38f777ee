"""Tokenizer of a Hugging Face folder, loaded offline and without running its code.

``load_tokenizer(folder)`` returns transformers' tokenizer and raises ConfigError for a folder without a
usable one. If the class that transformers chooses splits text differently from tokenizer.json, the generic
fast class replaces it. A chat template's call for today's date is replaced by a fixed date. The first call
imports transformers, which takes seconds; ``TextDecoder`` decodes ids for display without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import check_files_inside

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path) -> Any:
    """Load a folder's tokenizer. Raises ConfigError if it, its eos token or its chat template is missing."""
    tokenizer = _read(folder)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.hf_path={folder}: the tokenizer has no eos token, so no response would end")
    if not tokenizer.chat_template:
        raise ConfigError(f"model.hf_path={folder}: the tokenizer has no chat template")
    template = tokenizer.chat_template  # one, or several by name
    if isinstance(template, dict):
        tokenizer.chat_template = {name: _CLOCK.sub(_date, text) for name, text in template.items()}
    else:
        tokenizer.chat_template = _CLOCK.sub(_date, template)
    return tokenizer


_CLOCK = re.compile(r"""strftime_now\(\s*(["'])((?:(?!\1)[^\\\n])*)\1\s*\)""")
"""A chat template's call for today's date, which would change the prompts of a run across midnight."""


def _date(call: re.Match[str]) -> str:
    """The fixed date, 26 July 2024, in the call's format. Llama 3.2's template uses it without a clock."""
    return repr(datetime(2024, 7, 26).strftime(call[2]))


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the token ids by token of the tokenizer in ``folder``, which needs no chat template."""
    vocabulary: dict[str, int] = _read(folder).get_vocab()
    return vocabulary


Piece = tuple[str, bool]
"""A text, and whether it consists of special tokens."""


class TextDecoder:
    """Decoder of token ids for display, from a folder's tokenizer.json: ``pieces`` returns texts, special
    tokens apart. The constructor raises ConfigError if that file is missing or unreadable."""

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
        """Return the ids as texts in order, one for each run of ordinary or of special tokens."""
        return [
            (self._tokenizer.decode(list(run), skip_special_tokens=False), is_special)
            for is_special, run in groupby(ids, self._special.__contains__)
        ]


def _read(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not folder.is_dir():
        raise ConfigError(f"model.hf_path={folder} is not a folder")
    check_files_inside(folder)
    if not any((folder / name).exists() for name in _FILES):  # transformers would create an empty one
        raise ConfigError(f"model.hf_path={folder} holds no tokenizer; expected one of {', '.join(_FILES)}")
    try:
        # Otherwise transformers asks at the terminal whether the folder's code may run.
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if _splits_as_its_file(tokenizer, folder):
            return tokenizer
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for a missing or broken tokenizer
        raise ConfigError(f"model.hf_path={folder}: its tokenizer cannot be read: {error}") from error


_BPE = ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")


def _splits_as_its_file(tokenizer: Any, folder: Path) -> bool:
    """Whether a tokenizer splits texts like the folder's tokenizer.json; True without one.

    transformers 5 chooses a class by tokenizer_config.json and model family, and some classes (Qwen2's for
    every Qwen2) have their own normalization and rules instead of those used in training.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file() or not hasattr(tokenizer, "backend_tokenizer"):
        return True
    return _rules(tokenizer.backend_tokenizer) == _rules(Tokenizer.from_file(str(path)))


def _rules(tokenizer: Any) -> list[Any]:
    steps = tokenizer.normalizer, tokenizer.pre_tokenizer
    states = [
        None if step is None else json.loads(step.__getstate__(), object_hook=_by_tokens) for step in steps
    ]
    return [*states, *(getattr(tokenizer.model, option, None) for option in _BPE)]


def _by_tokens(step: dict[str, Any]) -> dict[str, Any]:
    """A step without options that affect no token: token offsets in the text."""
    return {name: value for name, value in step.items() if name != "trim_offsets"}
