"""Reward model: the request to a server of one, in four protocols, and the number in its reply.

It makes the body and reads the reply; ``scorer.py`` sends. The protocols are those of SGLang's ``/classify``
(docs.sglang.io, reward models), of vLLM's ``/classify`` (docs.vllm.ai, classification), of OpenRLHF's
``--remote_rm_url`` (openrlhf/cli/serve_rm.py) and of slime's ``--rm-url`` (slime/rollout/rm_hub). SGLang's
``/v1/classify`` is useless: it answers a softmax, which of one number is always 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.endpoints.client import EndpointError
from bapo_megatron.reward.endpoints.question import Question
from bapo_megatron.reward.endpoints.settings import FIELD, RewardModelSettings

Message = dict[str, str]


class RewardModel:
    """Reward model (a ``Judge``): makes the request's body, and reads the number from the reply.

    Made by ``scorer.py`` for `reward_model`.
    """

    def __init__(self, settings: RewardModelSettings) -> None:
        """Load the tokenizer, if the settings name one. ConfigError if it cannot be loaded."""
        self._settings = settings
        self.url = settings.url
        self._tokenizer = _tokenizer(settings.tokenizer) if settings.tokenizer else None
        self._body: Callable[[Question], dict[str, Any]] = getattr(self, f"_{settings.protocol}")

    def body(self, question: Question) -> dict[str, Any]:
        """Request body in the protocol of the settings."""
        return self._body(question)

    def value(self, answer: Any) -> float:
        """Reward in a reply, NaN and infinity included. EndpointError without a number, or out of range."""
        settings = self._settings
        number = _number(_found(answer, settings.protocol, settings.reward_key))
        below = settings.lowest is not None and number < settings.lowest
        above = settings.highest is not None and number > settings.highest
        if below or above:
            range_ = f"{settings.lowest} to {settings.highest}"
            raise EndpointError("out of range", f"the reward model gave {number:g}, which is not in {range_}")
        return settings.scale * number

    def _sglang(self, question: Question) -> dict[str, Any]:
        return {**self._named(), "text": self._text(question)}

    def _vllm(self, question: Question) -> dict[str, Any]:
        asked = {"input": self._text(question)} if self._tokenizer else {"messages": _dialogue(question)}
        return {**self._named(), **asked, "use_activation": False, "add_special_tokens": False}

    def _openrlhf(self, question: Question) -> dict[str, Any]:
        prompt, label = self._opening(question), question.ground_truth
        return {"query": [self._text(question)], "prompts": [prompt], "labels": [label]}

    def _slime(self, question: Question) -> dict[str, Any]:
        prompt = self._opening(question) if self._tokenizer else question.text
        return {"prompt": prompt, "response": question.response, "label": question.ground_truth}

    def _named(self) -> dict[str, str]:
        return {"model": self._settings.model} if self._settings.model else {}

    def _text(self, question: Question) -> str:
        return self._templated(_dialogue(question), False)

    def _opening(self, question: Question) -> str:
        return self._templated(question.messages, True)

    def _templated(self, messages: Sequence[Message], opens: bool) -> str:
        assert self._tokenizer is not None
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=opens
            )
        except Exception as error:  # a template raises whatever its author chose
            roles = ", ".join(one["role"] for one in messages)
            raise EndpointError(
                "chat template",
                f"{FIELD}.tokenizer={self._settings.tokenizer}: its chat template refuses messages of the "
                f"roles {roles}: {error}",
            ) from None
        return text


def _tokenizer(folder: str) -> Any:
    try:
        return load_tokenizer(Path(folder))
    except ConfigError as error:  # its message names the policy's field
        raise ConfigError(str(error).replace("model.hf_path", f"{FIELD}.tokenizer")) from error


def _dialogue(question: Question) -> list[Message]:
    return [*question.messages, {"role": "assistant", "content": question.response}]


def _found(answer: Any, protocol: str, key: str) -> Any:
    """Value at the protocol's place of the number."""
    try:
        if protocol == "sglang":
            return (answer[0] if isinstance(answer, list) else answer)["embedding"]
        if protocol == "vllm":
            return answer["data"][0]["probs"]
        if protocol == "openrlhf":
            return answer["rewards"]
        return answer[key] if key else answer
    except (KeyError, IndexError, TypeError):
        raise EndpointError(
            "no number", f"protocol={protocol} finds no number in {str(answer)[:200]}"
        ) from None


def _number(found: Any) -> float:
    """A number, alone or in lists of one."""
    while isinstance(found, list) and len(found) == 1:
        found = found[0]
    if isinstance(found, list):
        many = f"a list of {len(found)}" + (": an embedding, or a model of several classes" if found else "")
        raise EndpointError("no number", f"one number is expected of the reward model; it gave {many}")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise EndpointError("no number", f"the reward model gave {str(found)[:200]!r}, which is no number")
    try:
        return float(found)
    except OverflowError:
        raise EndpointError("no number", "the reward model gave a number beyond all floats") from None
