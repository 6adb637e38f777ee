"""Episodes with branches on scripted engines: a rule for tokens of conversations, and an environment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.environment import Context, Environment, Reply, Task
from bapo_megatron.environment.conversation_tokens import RepeatedTurn
from tests.support.episodes import EpisodeWorld, HereSteps

PROMPT = {"role": "user", "content": "the prompt"}


class BracketConversations:
    """The rule for conversations that fits ``Brackets``: ``[text]``, and the prompt's one token."""

    keeps_turns = False

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        turns: Mapping[int, RepeatedTurn],
        from_prompt: int,
        tools: Any = None,
        behind: int = 0,
    ) -> np.ndarray:
        """The ids of all messages."""
        found: list[int] = []
        for one in messages:
            if "turn" in one:
                found += turns[one["turn"]].ids.tolist()
            else:
                found += [self.prompt] if one == PROMPT else [*map(ord, f"[{one['content']}]")]
        return np.array(found, np.int32)


def asks(after: int, *messages: Any) -> Reply:
    """A reply that is a conversation: texts of a user, and numbers of turns."""
    whole = [
        one
        if isinstance(one, dict)
        else {"role": "assistant", "turn": one}
        if isinstance(one, int)
        else {"role": "user", "content": one}
        for one in messages
    ]
    return Reply(json.dumps([after, whole]), context=Context(whole, after))


class Branching(Environment):
    """Six turns: an answer, a history compressed, two sub-conversations, a return to the first."""

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, settings)
        self.turns = 0

    async def step(self, turn: str) -> Reply:  # type: ignore[override]
        """The next question."""
        self.turns += 1
        return [
            Reply("a"),
            asks(0, "sum"),
            asks(1, PROMPT, 1, "b"),
            asks(0, "sum", 3, "c"),
            asks(2, PROMPT, 1, "a", 2, "d"),
            Reply(None, reward=float(len(turn))),
        ][self.turns - 1]


def said(_prompt: int, sample: int, turn: int) -> str:
    """Turns that differ by what is before them, and by sample."""
    return "xyz"[turn % 3] * (1 + sample + turn)


class BranchWorld(EpisodeWorld):
    """A world whose episodes have branches. All prompts are one token, which the rule writes."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, said, HereSteps(Branching), **settings)
        same = [
            dataclasses.replace(one, token_ids_P=np.array([1], np.int32), messages=[PROMPT])
            for one in self.dataset.prompts
        ]
        self.dataset = dataclasses.replace(self.dataset, prompts=same)
        rule: Any = BracketConversations(1)
        self.stepping = dataclasses.replace(self.stepping, conversations=rule)
        self.environments = {"": self.stepping}
