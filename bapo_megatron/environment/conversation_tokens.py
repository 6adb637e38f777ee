"""Tokenization of a whole conversation in which the model's own turns keep their sampled token ids.

``ConversationTokens.ids`` takes the messages of an agent program's request that starts a branch (the program
rewrites its history or holds several conversations), and returns the input ids of the model's next turn. The
sampler calls it. The chat template renders the messages with marks in place of the model's turns. Where it
shows a turn unchanged, the sampled ids replace the mark, and the text between turns is tokenized separately.
A turn that the template rewrites (e.g. without its thoughts) becomes ordinary text, without sampled ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bapo_megatron.data.chat_template import absent_mark, chat_template_of
from bapo_megatron.environment.template import opened_thinking
from bapo_megatron.reward.answer_text import THINKING, THOUGHT

_TAGS = re.compile(f"({re.escape(THINKING)}|{re.escape(THOUGHT)})")


class RepeatedTurn(NamedTuple):
    """An earlier model turn in a conversation: text, sampled ids, and whether it starts inside a thought."""

    text: str
    """Text without the end token."""
    ids: np.ndarray
    """Sampled ids, int32, with the end token."""
    is_opened: bool
    """Whether the template opened the thinking part, so that ``text`` starts inside it."""


class ConversationTokens:
    """Tokenizer of whole conversations by one model's tokenizer and chat template: ``ids``. Stateless."""

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int], tools: Sequence[Any], keeps_turns: bool
    ) -> None:
        """``stop_token_ids``: the model's own. ``tools``: tools in the prompts. ``keeps_turns``: keep sampled
        turns even if the template rewrites them (``history="sampled"``)."""
        self._chat, self._stops, self._tools = chat_template_of(tokenizer), frozenset(stop_token_ids), tools
        self.keeps_turns = keeps_turns
        prompt = self._chat.text([{"role": "user", "content": "1+1="}], "", tools)
        self._opened = opened_thinking(prompt) or f"{THINKING}\n"

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        turns: Mapping[int, RepeatedTurn],
        from_prompt: int,
        tools: Sequence[Any] | None = None,
        behind: int = 0,
    ) -> np.ndarray:
        """Return the token ids, int32, of a conversation up to the start of the model's next turn.

        ``messages``: chat messages; ``{"role": "assistant", "turn": 3}`` is ``turns[3]``. ``from_prompt``:
        number of leading messages from the dataset; in all others, text that looks like an added token stays
        text. ``tools``: None for the prompts' tools. ``behind``: return only ids after this turn; 0: all.
        Raises the chat template's errors, and ValueError if the template does not show the turn ``behind``.
        """
        cut = absent_mark(messages, *(turn.text for turn in turns.values()))
        shown = {
            place: self._marked(turns[message["turn"]], f"{cut}n{place}e")
            for place, message in enumerate(messages)
            if "turn" in message
        }
        render = partial(self._text, messages, turns, shown, from_prompt, cut, tools)
        text = render()
        rewritten = [place for place, mark in shown.items() if text.count(mark) != 1]
        if rewritten:
            for place in rewritten:
                del shown[place]
            text = render()
        if behind and behind not in {messages[place]["turn"] for place in shown}:
            raise ValueError("the chat template does not show the model's turn before it")
        parts: list[np.ndarray] = []
        drop = False
        for place, mark in shown.items():
            before, _, text = text.partition(mark)
            turn = turns[messages[place]["turn"]]
            head = before + (self._opened if turn.is_opened else "")
            parts += [self._encode(head, cut, drop), turn.ids]
            drop = turn.ids[-1] in self._stops
            if messages[place]["turn"] == behind:
                parts = []
        return np.concatenate([*parts, self._encode(text, cut, drop)]).astype(np.int32)

    def _marked(self, turn: RepeatedTurn, mark: str) -> str:
        """Return the turn with marks in place of its words, so that the template sees its thinking part."""
        if self.keeps_turns or not turn.text.strip():
            return (self._opened if turn.is_opened else "") + mark
        text = (self._opened if turn.is_opened else "") + turn.text
        pieces = _TAGS.split(text)
        return "".join(
            re.sub(r"\S.*\S|\S", f"{mark}{number}z", piece, count=1, flags=re.DOTALL)
            if not _TAGS.fullmatch(piece)
            else piece
            for number, piece in enumerate(pieces)
        )

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        turns: Mapping[int, RepeatedTurn],
        shown: Mapping[int, str],
        from_prompt: int,
        cut: str,
        tools: Sequence[Any] | None,
    ) -> str:
        said: list[Mapping[str, Any]] = []
        for place, message in enumerate(messages):
            if place in shown:
                said.append({"role": "assistant", "content": shown[place]})
            elif "turn" in message:
                text = turns[message["turn"]].text
                said.append({"role": "assistant", "content": self._chat.plain(text, cut)})
            else:
                said.append(self._chat.cut(message, cut, given=place >= from_prompt))
        return self._chat.rendered(said, cut, self._tools if tools is None else tools)

    def _encode(self, text: str, cut: str, drop: bool) -> np.ndarray:
        """Return the ids; ``drop`` omits a leading end token that the turn's own ids already have."""
        ids = self._chat.encode(text, cut)
        return np.array(ids[1:] if drop and ids[:1] and ids[0] in self._stops else ids, np.int32)
