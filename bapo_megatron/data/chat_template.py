"""Chat template of a tokenizer: a conversation as token ids, in which what a message says is text.

Whoever writes a question, a tool's result or a response could spell ``<|im_end|>``, and a tokenizer makes a
token of it: a turn that nobody took. So each *control token* that a message spells gets a mark behind its
first character before the template renders it, and what is between the marks is tokenized by itself. The
template's own control tokens stay tokens. A conversation that spells none has the ids of
``apply_chat_template``. Prompts, SFT, observations and the texts for judges and reward models are made here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from bapo_megatron.reward.answer_text import THINKING, THOUGHT

Message = Mapping[str, Any]

INVISIBLE = "\u200b"
"""The mark in a text for a server, which tokenizes it: a zero-width space."""

_MARKUP = re.compile(r"<([|\uff5c]).+\1>", re.DOTALL)
"""The form of chat markup, ``<|im_start|>``, in DeepSeek's files with full-width bars; not all files call it
special."""

_WORDS = (THINKING, THOUGHT, "<tool_call>", "</tool_call>")

_OF_ANY_MODEL = re.compile(
    r"<(?=\|[^<>|]{1,64}\|>|\uff5c[^<>\uff5c]{1,64}\uff5c>|/?s>|(?:start|end)_of_turn>|[be]os>)|\[(?=/?INST\])"
)
"""The first character of what is a control token of the one or the other known model."""


_SHOWN_CHARACTERS = 16


def is_control(text: str, special: bool) -> bool:
    """Whether an added token frames a conversation: special ones, and those that look like it.

    ``<think>`` and ``<tool_call>`` are words that a prompt may use, also where the file calls them special. A
    token of one character, which some models have for padding, is an ordinary one.
    """
    is_word = text in _WORDS or len(text.strip()) < 2
    return not is_word and (special or _MARKUP.fullmatch(text) is not None)


class ChatTemplate:
    """Chat template of one tokenizer. Made by ``chat_template_of``; stateless, so threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        added = {
            str(token): token.special for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        }
        self._tokenizer = tokenizer
        self.control = _spelling(text for text, special in added.items() if is_control(text, special))
        """The first character of each control token that a text spells."""
        self._added = _spelling(text for text in added if len(text.strip()) > 1)

    def token_ids(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), opens: bool = True
    ) -> list[int]:
        """Token ids of a conversation. ``opens``: up to where the model's next turn begins."""
        mark = absent_mark(messages, tools)
        return self.encode(self.text(messages, mark, tools, opens), mark)

    def text(
        self,
        messages: Sequence[Message],
        mark: str,
        tools: Sequence[Any] = (),
        opens: bool = True,
        given: bool = False,
    ) -> str:
        """The rendering of a conversation, with ``mark`` in each control token that a message spells; in the
        result of a tool in every added one, and in every message with ``given``, an environment's."""
        return self.rendered([self.cut(one, mark, given) for one in messages], mark, tools, opens, given)

    def cut(self, message: Message, mark: str, given: bool) -> Message:
        """A message with ``mark`` where ``text`` puts it."""
        cut: Message = _changed(message, self._cut(mark, given or message.get("role") == "tool"))
        return cut

    def rendered(
        self,
        cut: Sequence[Message],
        mark: str,
        tools: Sequence[Any] = (),
        opens: bool = True,
        given: bool = False,
    ) -> str:
        """The rendering of messages that have their marks."""
        described = {"tools": _changed(list(tools), self._cut(mark, given))} if tools else {}
        rendered: str = self._tokenizer.apply_chat_template(
            list(cut), add_generation_prompt=opens, tokenize=False, **described
        )
        return rendered

    def plain(self, text: str, mark: str) -> str:
        """A text with ``mark`` in each control token that it spells."""
        return self.control.sub(rf"\g<0>{mark}", text)

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a text whose marks separate pieces."""
        pieces = text.split(mark)
        return [
            token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False)
        ]

    def ids_of_text(self, text: str) -> list[int]:
        """Token ids of what an assistant says, without its frame."""
        mark = absent_mark(text)
        return self.encode(self.plain(text, mark), mark)

    def _cut(self, mark: str, given: bool) -> Callable[[str], str]:
        tokens = self._added if given else self.control
        return lambda text: tokens.sub(rf"\g<0>{mark}", text)


@lru_cache(maxsize=8)
def chat_template_of(tokenizer: Any) -> ChatTemplate:
    """The chat template of a tokenizer, made once: thousands of prompts ask for it."""
    return ChatTemplate(tokenizer)


def spelled_control_token(messages: Iterable[Message], tokenizer: Any = None) -> str | None:
    """The beginning of the first control token that a message spells, of this tokenizer or of another known
    model; None if there is none. The model gets it as text, also where a prompt was already rendered."""
    known = [_OF_ANY_MODEL, *([chat_template_of(tokenizer).control] if tokenizer is not None else [])]
    for text in (str(one.get("content") or "") for one in messages):
        if found := next(filter(None, (one.search(text) for one in known)), None):
            return text[found.start() : found.start() + _SHOWN_CHARACTERS].split()[0]
    return None


def plain_for_any_model(text: str) -> str:
    """A text for a server whose tokenizer is not known, with an invisible character in each control token."""
    return _OF_ANY_MODEL.sub(rf"\g<0>{INVISIBLE}", text)


def absent_mark(*said: Any) -> str:
    """A word that what was said does not hold: who could write it would have to know its own digest."""
    return f"cut{hashlib.sha256(repr(said).encode(errors='backslashreplace')).hexdigest()[:24]}q"


def _spelling(tokens: Iterable[str]) -> re.Pattern[str]:
    """The first character of each of these tokens in a text, wherever one begins: within another, too."""
    ends: dict[str, list[str]] = {}
    for token in tokens:
        ends.setdefault(token[0], []).append(re.escape(token[1:]))
    beginnings = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in ends.items()]
    return re.compile("|".join(beginnings) or r"(?!)")


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A message, or a part of one, with all its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(part, change) for key, part in value.items()}
    return [_changed(part, change) for part in value] if isinstance(value, (list, tuple)) else value
