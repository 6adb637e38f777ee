"""The question to an endpoint: what is judged, in plain text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from bapo_megatron.reward.answer_text import THINKING, behind_thinking
from bapo_megatron.types import Prompt


@dataclass(frozen=True)
class Question:
    """A response, and what it answers."""

    messages: tuple[dict[str, str], ...]
    """The chat messages of the prompt."""
    response: str
    ground_truth: str

    @property
    def text(self) -> str:
        """The messages as text: that of a single one as it stands, of several with their roles."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n\n".join(f"{one['role']}: {one['content']}" for one in self.messages)

    def digest(self) -> bytes:
        """The digest by which equal questions are known."""
        parts = [self.messages, self.response, self.ground_truth]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def question_of(prompt: Prompt, response: str, thinking: bool) -> Question:
    """The question. ``thinking``: with the thinking part of the response."""
    if not thinking:
        opened = THINKING if prompt.opens_thinking else ""  # by the chat template
        response = behind_thinking(opened + response).strip()
    return Question(tuple(prompt.messages), response, prompt.ground_truth)
