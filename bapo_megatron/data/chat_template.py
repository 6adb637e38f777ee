"""Chat template of a tokenizer: converts a conversation to token ids, without injected control tokens.

``chat_template_of(tokenizer).token_ids(messages)`` returns the ids. A question, tool result or response may
contain the text ``<|im_end|>``, which a tokenizer would encode as the token that ends a turn. So before the
template renders a message, a mark is inserted after the first character of each control token in its text
(``is_control``; in tool results, of every added token). The rendered text is split at the marks, and the
pieces are tokenized separately: the template's own control tokens stay tokens, those of messages become
ordinary text. If no text has a mark, the ids are ``apply_chat_template``'s.
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
"""Mark in texts that a server tokenizes: a zero-width space."""

_MARKUP = re.compile(r"<([|\uff5c]).+\1>", re.DOTALL)
"""Form of chat markup, ``<|im_start|>``, full-width bars in DeepSeek's files; there not always special."""

_WORDS = (THINKING, THOUGHT, "<tool_call>", "</tool_call>")

_OF_ANY_MODEL = re.compile(
    r"<(?=\|[^<>|]{1,64}\|>|\uff5c[^<>\uff5c]{1,64}\uff5c>|/?s>|(?:start|end)_of_turn>|[be]os>)|\[(?=/?INST\])"
)
"""First character of a control token of any known model."""


_SHOWN_CHARACTERS = 16


def is_control(text: str, special: bool) -> bool:
    """Whether an added token is a control token: it is special, or has the form of chat markup.

    ``<think>`` and ``<tool_call>`` are words that a prompt may use, even if listed as special. One-character
    tokens, some models' padding, are ordinary.
    """
    is_word = text in _WORDS or len(text.strip()) < 2
    return not is_word and (special or _MARKUP.fullmatch(text) is not None)


class ChatTemplate:
    """Chat template of one tokenizer, from ``chat_template_of``. ``token_ids`` returns a conversation's ids,
    ``text`` the rendered text with marks. Stateless, so threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        added = {
            str(token): token.special for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        }
        self._tokenizer = tokenizer
        self.control = _spelling(text for text, special in added.items() if is_control(text, special))
        """Matches the first character of each control token in a text."""
        self._added = _spelling(text for text in added if len(text.strip()) > 1)

    def token_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Return a conversation's token ids, including the start of the model's next turn."""
        mark = absent_mark(messages, tools)
        return self.encode(self.text(messages, mark, tools), mark)

    def text(
        self,
        messages: Sequence[Message],
        mark: str,
        tools: Sequence[Any] = (),
        opens: bool = True,
        given: bool = False,
    ) -> str:
        """Render a conversation, with ``mark`` in each control token of its messages. Every added token is
        marked in tool results, and with ``given`` (all text is an environment's) in all messages. ``opens``:
        including the start of the model's next turn."""
        return self.rendered([self.cut(one, mark, given) for one in messages], mark, tools, opens, given)

    def cut(self, message: Message, mark: str, given: bool) -> Message:
        """Return a message with ``mark`` where ``text`` puts it."""
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
        """Render messages that already have their marks."""
        described = {"tools": _changed(list(tools), self._cut(mark, given))} if tools else {}
        rendered: str = self._tokenizer.apply_chat_template(
            list(cut), add_generation_prompt=opens, tokenize=False, **described
        )
        return rendered

    def plain(self, text: str, mark: str) -> str:
        """Return a text with ``mark`` in each of its control tokens."""
        return self._cut(mark, False)(text)

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a text, split at its marks."""
        pieces = text.split(mark)
        return [
            token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False)
        ]

    def ids_of_text(self, text: str) -> list[int]:
        """Return the token ids of an assistant's text, without the template's tokens around it."""
        mark = absent_mark(text)
        return self.encode(self.plain(text, mark), mark)

    def _cut(self, mark: str, given: bool) -> Callable[[str], str]:
        tokens = self._added if given else self.control
        return lambda text: tokens.sub(rf"\g<0>{mark}", text)


@lru_cache(maxsize=8)
def chat_template_of(tokenizer: Any) -> ChatTemplate:
    """Return a tokenizer's chat template, cached for thousands of prompts."""
    return ChatTemplate(tokenizer)


def spelled_control_token(messages: Iterable[Message], tokenizer: Any) -> str | None:
    """Return the beginning of the first control token, of this tokenizer or any known model, in the messages'
    text, else None. The model receives it as text, even in an already rendered prompt."""
    known = _OF_ANY_MODEL, chat_template_of(tokenizer).control
    for text in (str(one.get("content") or "") for one in messages):
        if found := next(filter(None, (one.search(text) for one in known)), None):
            return text[found.start() : found.start() + _SHOWN_CHARACTERS].split()[0]
    return None


def plain_for_any_model(text: str) -> str:
    """Return a text for a server's unknown tokenizer, with an invisible character in each control token."""
    return _OF_ANY_MODEL.sub(rf"\g<0>{INVISIBLE}", text)


def absent_mark(*said: Any) -> str:
    """Return a word absent from ``said``: to contain it, the text would have to contain its own digest."""
    return f"cut{hashlib.sha256(repr(said).encode(errors='backslashreplace')).hexdigest()[:24]}q"


def _spelling(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the first character of each of these tokens, even within another."""
    ends: dict[str, list[str]] = {}
    for token in tokens:
        ends.setdefault(token[0], []).append(re.escape(token[1:]))
    beginnings = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in ends.items()]
    return re.compile("|".join(beginnings) or r"(?!)")


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a message, or part of one, with all texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(part, change) for key, part in value.items()}
    return [_changed(part, change) for part in value] if isinstance(value, (list, tuple)) else value
