"""LLM judge: the request to a language model with an OpenAI-compatible API, and the score in its reply.

It makes the body and reads the reply; ``scorer.py`` sends. EndpointError for a reply that is cut off, or has
no verdict in range.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from bapo_megatron.reward.answer_text import after_thinking
from bapo_megatron.reward.endpoints.client import EndpointError
from bapo_megatron.reward.endpoints.question import Question
from bapo_megatron.reward.endpoints.settings import LlmJudgeSettings

_PATH = "/chat/completions"


class LlmJudge:
    """LLM judge (a ``Judge``): makes the request's body, and reads the score from the reply.

    Made by ``scorer.py`` for `llm_judge`.
    """

    def __init__(self, settings: LlmJudgeSettings, wrong: float, correct: float) -> None:
        """``wrong``, ``correct``: rewards of the worst and of the best verdict."""
        self._settings, self._wrong, self._correct = settings, wrong, correct
        self.url = whole_url(settings.url)
        self._verdict = re.compile(settings.verdict)

    def body(self, question: Question) -> dict[str, Any]:
        """Request body of the chat completion."""
        settings = self._settings
        fields = {
            "model": settings.model,
            "messages": [{"role": "user", "content": filled(settings.template, question)}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            **settings.extra_body,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def value(self, answer: Any) -> float:
        """Reward of the verdict, linear from ``wrong`` to ``correct``. EndpointError if there is none."""
        settings = self._settings
        number = self._number(_reply(answer))
        if not settings.lowest <= number <= settings.highest:
            asked = f"{settings.lowest:g} to {settings.highest:g}"
            raise EndpointError("out of range", f"the judge's verdict is {number:g}, which is not in {asked}")
        share = (number - settings.lowest) / (settings.highest - settings.lowest)
        return self._wrong + share * (self._correct - self._wrong)

    def _number(self, reply: str) -> float:
        """Number in the last verdict after the judge's thinking part."""
        found = self._verdict.findall(after_thinking(reply))
        if not found:
            end = reply[-200:]
            raise EndpointError(
                "no verdict", f"{self._settings.verdict!r} is not in the judge's reply, which ends {end!r}"
            )
        try:
            return float(found[-1])
        except ValueError:
            raise EndpointError(
                "no verdict", f"the judge's verdict {found[-1][:50]!r} is no number"
            ) from None


def whole_url(url: str) -> str:
    """Address of the chat completions, from itself or from the base address of the API (``.../v1``)."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return url if path.endswith(_PATH) else urlunsplit(parts._replace(path=path + _PATH))


def filled(template: str, question: Question) -> str:
    """Template with its placeholders filled, in one pass: text of a response is never a placeholder."""
    texts = {
        "prompt": question.text,
        "response": question.response,
        "ground_truth": question.ground_truth,
    }
    return re.sub(r"\{(prompt|response|ground_truth)\}", lambda place: texts[place[1]], template)


def _reply(answer: Any) -> str:
    try:
        choice = answer["choices"][0]
        reply = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise EndpointError("no reply", f"there is no chat completion in {str(answer)[:200]}") from None
    if choice.get("finish_reason") == "length":  # what it has may be half a number, or a thought
        raise EndpointError(
            "cut off", "the judge's reply is cut off before its end: raise reward.settings.max_tokens"
        )
    if not isinstance(reply, str):
        raise EndpointError("no reply", f"the judge's reply is {str(reply)[:200]}, which is no text")
    return reply
