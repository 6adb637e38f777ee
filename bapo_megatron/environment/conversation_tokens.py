"""Tokens of a whole conversation, in which the model's own turns stand as they were sampled.

An agent program that rewrites its history, or holds several conversations, asks with all its messages. The
chat template renders them, with marks in place of the model's turns; where the template shows a turn as it
is, the sampled ids stand in its place, and what is between two turns is tokenized by itself. A turn that the
template writes otherwise (without its thoughts, say) is text like any other: what follows it is a branch that
does not have the sampled turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bapo_megatron.data.chat_template import absent_mark, chat_template_of
from bapo_megatron.reward.answer_text import THINKING, THOUGHT

_TAGS = re.compile(f"({re.escape(THINKING)}|{re.escape(THOUGHT)})")
_OPENED = f"{THINKING}\n"


class RepeatedTurn(NamedTuple):
    """A turn of the model, for a conversation that repeats it."""

    text: str
    """Without the token that ended it."""
    ids: np.ndarray
    """As sampled, int32, with that token."""
    is_opened: bool
    """Whether the template had opened its thinking part: ``text`` begins inside it."""


class ConversationTokens:
    """The rule for the tokens of conversations, for one tokenizer and its chat template. Stateless."""

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int], tools: Sequence[Any], keeps_turns: bool
    ) -> None:
        """``stop_token_ids``: the model's own. ``tools``: what the prompts' template was given.
        ``keeps_turns``: sampled turns stay whatever the template makes of them (``history="sampled"``)."""
        self._chat, self._stops, self._tools = chat_template_of(tokenizer), frozenset(stop_token_ids), tools
        self.keeps_turns = keeps_turns

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        turns: Mapping[int, RepeatedTurn],
        from_prompt: int,
        tools: Sequence[Any] | None = None,
        behind: int = 0,
    ) -> np.ndarray:
        """Token ids, int32, of a conversation up to where the model's next turn begins.

        ``messages``: chat messages; ``{"role": "assistant", "turn": 3}`` is ``turns[3]``. ``from_prompt``:
        the number of first messages that are the dataset's; what looks like an added token in others is text.
        ``tools``: None: those of the prompts. ``behind``: the ids of what follows this turn alone; 0: of all.
        Raises what the chat template raises; ValueError if it does not show the turn ``behind``.
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
            head = before + (_OPENED if turn.is_opened else "")
            parts += [self._encode(head, cut, drop), turn.ids]
            drop = turn.ids[-1] in self._stops
            if messages[place]["turn"] == behind:
                parts = []
        return np.concatenate([*parts, self._encode(text, cut, drop)]).astype(np.int32)

    def _marked(self, turn: RepeatedTurn, mark: str) -> str:
        """The turn with marks in place of its words: the template sees where its thoughts begin and end."""
        if self.keeps_turns or not turn.text.strip():
            return (_OPENED if turn.is_opened else "") + mark
        text = (_OPENED if turn.is_opened else "") + turn.text
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
        """``drop``: without the first id, the end of a turn whose own ids have it."""
        ids = self._chat.encode(text, cut)
        return np.array(ids[1:] if drop and ids[:1] and ids[0] in self._stops else ids, np.int32)
