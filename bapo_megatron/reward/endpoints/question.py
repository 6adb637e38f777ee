"""Question to an endpoint: a prompt, a response and a ground truth, as plain text.

Its digest is the key of the cache of scores. Made by ``scorer.py``, put into a request by the judge.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from bapo_megatron.reward.answer_text import THINKING, after_thinking
from bapo_megatron.types import Prompt


@dataclass(frozen=True)
class Question:
    """A response with its prompt and ground truth, as plain data.

    Made by ``question_of`` in the scorer, sent by a ``Judge``.
    """

    messages: tuple[dict[str, str], ...]
    """The chat messages of the prompt."""
    response: str
    ground_truth: str

    @property
    def text(self) -> str:
        """Messages as text: a single one unchanged, several with their roles."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n\n".join(f"{one['role']}: {one['content']}" for one in self.messages)

    def digest(self) -> bytes:
        """Digest of the question, the key of the score cache."""
        parts = [self.messages, self.response, self.ground_truth]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def question_of(prompt: Prompt, response: str, thinking: bool) -> Question:
    """Question of a prompt and a response. ``thinking``: with the response's thinking part."""
    if not thinking:
        opened = THINKING if prompt.opens_thinking else ""  # by the chat template
        response = after_thinking(opened + response).strip()
    return Question(tuple(prompt.messages), response, prompt.ground_truth)
