"""Scorer of responses at an HTTP endpoint, an LLM judge or a reward model, with a cache.

``EndpointScorer.answer(prompt, response)`` returns the score or a failure; ``LlmJudge`` and ``RewardModel``
build the request and read the reply. A reward model has one of four protocols: SGLang's ``/classify``
(docs.sglang.io, reward models), vLLM's ``/classify`` (docs.vllm.ai, classification), OpenRLHF's
``--remote_rm_url`` (openrlhf/cli/serve_rm.py) or slime's ``--rm-url`` (slime/rollout/rm_hub). SGLang's
``/v1/classify`` is unusable: it returns a softmax, which is always 1 for a single number. Runs in the reward
pool's event loop, without worker processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bapo_megatron.config import RewardConfig
from bapo_megatron.data.chat_template import INVISIBLE, chat_template_of, plain_for_any_model
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.answer_text import after_thinking
from bapo_megatron.reward.endpoint_client import EndpointError, JsonClient, key_of, redacted, with_path
from bapo_megatron.reward.endpoint_settings import (
    FIELD,
    PLACES,
    LlmJudgeSettings,
    RewardModelSettings,
    read_settings,
)
from bapo_megatron.types import Prompt


@dataclass(frozen=True)
class Question:
    """Response for an endpoint to score, with its prompt, ground truth, and earlier turns."""

    messages: tuple[dict[str, Any], ...]
    response: str
    ground_truth: str
    turns: tuple[dict[str, str], ...] = ()
    """Turns of an episode before the response, as messages."""

    @property
    def text(self) -> str:
        """Prompt messages as text: a single one unchanged, several with their roles."""
        return _text(self.messages[0]) if len(self.messages) == 1 else _with_roles(self.messages)

    @property
    def conversation(self) -> str:
        """Whole conversation as text with roles, from the prompt to the response."""
        return _with_roles([*self.messages, *self.turns, _said(self.response)])

    def plain(self, cut: Callable[[str], str]) -> Question:
        messages, turns = (
            tuple({"role": message["role"], "content": cut(_text(message))} for message in several)
            for several in (self.messages, self.turns)
        )
        return replace(
            self,
            messages=messages,
            turns=turns,
            response=cut(self.response),
            ground_truth=cut(self.ground_truth),
        )


def question_of(prompt: Prompt, response: str, thinking: bool) -> Question:
    """Return the question for a prompt and a response. ``thinking``: keep the thinking parts of its turns."""
    turns = prompt.turns
    if not thinking:
        response = after_thinking(response, prompt.opens_thinking).strip()
        turns = [
            _said(after_thinking(message["content"]).strip()) if message["role"] == "assistant" else message
            for message in turns
        ]
    return Question(tuple(prompt.messages), response, prompt.ground_truth, tuple(turns))


Message = dict[str, Any]


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _with_roles(messages: Sequence[Message]) -> str:
    return "\n\n".join(f"{message['role']}: {_text(message)}" for message in messages)


def _text(message: Message) -> str:
    said = [message.get("content") or "", *map(json.dumps, message.get("tool_calls") or ())]
    return "\n".join(filter(None, said))


class RewardModel:
    """Reward model's requests and replies: ``body`` returns the JSON to send, ``value`` a reply's reward."""

    def __init__(self, settings: RewardModelSettings) -> None:
        """Load the tokenizer if the settings name one. Raises ConfigError if that fails."""
        self._settings = settings
        self.url = settings.url
        self._tokenizer = _tokenizer(settings.tokenizer) if settings.tokenizer else None
        self._body: Callable[[Question], dict[str, Any]] = getattr(self, f"_{settings.protocol}")

    def body(self, question: Question) -> dict[str, Any]:
        """Return the request body, in which messages spell no control tokens. Raises EndpointError if the
        chat template refuses them."""
        return self._body(question.plain(self._plain))

    def value(self, answer: Any) -> float:
        """Return the number in a reply times ``scale``, possibly NaN or infinite. Raises EndpointError if
        there is none or it is outside ``lowest`` to ``highest``."""
        settings = self._settings
        number = _number(_found(answer, settings.protocol, settings.reward_key))
        below = settings.lowest is not None and number < settings.lowest
        above = settings.highest is not None and number > settings.highest
        if below or above:
            range_ = f"{settings.lowest} to {settings.highest}"
            raise EndpointError("out of range", f"the reward model gave {number:g}, which is not in {range_}")
        return settings.scale * number

    def _sglang(self, question: Question) -> dict[str, Any]:
        text, tokenizer = self._text(question), self._tokenizer
        # The server adds another begin token if the tokenizer does (Llama's).
        if tokenizer and tokenizer.bos_token and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
            text = text.removeprefix(tokenizer.bos_token)
        return {**self._named(), "text": text}

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

    def _plain(self, text: str) -> str:
        if self._tokenizer is None:
            return plain_for_any_model(text)
        return chat_template_of(self._tokenizer).plain(text, INVISIBLE)

    def _templated(self, messages: Sequence[Message], opens: bool) -> str:
        assert self._tokenizer is not None
        try:
            text = chat_template_of(self._tokenizer).text(messages, INVISIBLE, opens=opens)
        except Exception as error:  # a template raises whatever its author chose
            roles = ", ".join(message["role"] for message in messages)
            refused = f"{FIELD}.tokenizer: its chat template refuses messages of the roles {roles}: {error}"
            raise EndpointError("chat template", refused) from None
        return text


def _tokenizer(folder: str) -> Any:
    try:
        return load_tokenizer(Path(folder))
    except ConfigError as error:  # its message names the policy's field
        raise ConfigError(str(error).replace("model.hf_path", f"{FIELD}.tokenizer")) from error


def _dialogue(question: Question) -> list[Message]:
    return [*question.messages, _said(question.response)]


def _found(answer: Any, protocol: str, key: str) -> Any:
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


def _number(value: Any) -> float:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise EndpointError("no number", f"the reward model gave {str(value)[:200]!r}, which is not a number")
    try:
        return float(value)
    except OverflowError:
        raise EndpointError("no number", "the reward model gave a number beyond all floats") from None


class LlmJudge:
    """LLM judge's requests and replies: ``body`` returns the JSON to send, ``value`` a reply's reward."""

    def __init__(self, settings: LlmJudgeSettings, wrong: float, correct: float) -> None:
        """``wrong``, ``correct``: rewards for the worst and the best verdict."""
        self._settings, self._wrong, self._correct = settings, wrong, correct
        self.url = with_path(settings.url, "/chat/completions")
        self._verdict = re.compile(settings.verdict)

    def body(self, question: Question) -> dict[str, Any]:
        settings, question = self._settings, question.plain(plain_for_any_model)
        fields = {
            "model": settings.model,
            "messages": [{"role": "user", "content": filled(settings.template, question)}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            **settings.extra_body,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def value(self, answer: Any) -> float:
        """Return the reward, linear in the verdict from ``wrong`` to ``correct``, or raise EndpointError."""
        settings = self._settings
        number = self._number(_reply(answer))
        if not settings.lowest <= number <= settings.highest:
            asked = f"{settings.lowest:g} to {settings.highest:g}"
            raise EndpointError("out of range", f"the judge's verdict is {number:g}, which is not in {asked}")
        share = (number - settings.lowest) / (settings.highest - settings.lowest)
        return self._wrong + share * (self._correct - self._wrong)

    def _number(self, reply: str) -> float:
        try:
            return float(self._verdict.findall(after_thinking(reply))[-1])
        except (IndexError, ValueError):
            what = f"{self._settings.verdict!r} finds no number in the judge's reply"
            raise EndpointError("no verdict", f"{what}, which ends {reply[-200:]!r}") from None


def filled(template: str, question: Question) -> str:
    """Return the template with its placeholders filled in one pass: response text is never a placeholder."""
    texts = {
        "prompt": question.text,
        "conversation": question.conversation,
        "response": question.response,
        "ground_truth": question.ground_truth,
    }
    return PLACES.sub(lambda place: texts[place[1]], template)


def _reply(answer: Any) -> str:
    try:
        choice = answer["choices"][0]
        reply = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise EndpointError("no reply", f"there is no chat completion in {str(answer)[:200]}") from None
    if choice.get("finish_reason") == "length":  # the text may end in half a number, or a thought
        raise EndpointError("cut off", "the judge's reply is cut off: raise reward.settings.max_tokens")
    if not isinstance(reply, str):
        raise EndpointError("no reply", f"the judge's reply is {str(reply)[:200]}, which is not text")
    return reply


Judge = RewardModel | LlmJudge


class EndpointScorer:
    """Async scorer for one event loop: ``open``, concurrent ``answer`` calls, ``close``. Equal requests share
    one reply, in flight or in an LRU cache of ``cache`` scores (0: never). Failures are not cached."""

    def __init__(self, reward: RewardConfig) -> None:
        settings = read_settings(reward.function, reward.settings)
        self._settings = settings
        self._judge: Judge
        if isinstance(settings, LlmJudgeSettings):
            self._judge = LlmJudge(settings, reward.wrong, reward.correct)
        else:
            assert isinstance(settings, RewardModelSettings)
            self._judge = RewardModel(settings)
        self._key = key_of(settings.api_key_env)
        self._client = JsonClient(
            self._judge.url, settings.timeout_s, settings.give_up_s, settings.concurrency, self._key
        )
        self._scores: OrderedDict[object, float] = OrderedDict()
        self._under_way: dict[object, asyncio.Task[float]] = {}

    async def open(self) -> None:
        """Wait for the endpoint. Raises RunStopped if it accepts no connection for ``give_up_s`` seconds."""
        try:
            await self._client.connect()
        except EndpointError as error:
            raise RunStopped(
                f"reward.settings.url: no server took a connection for {self._settings.give_up_s:g} s: "
                f"{error}; start it, or correct the address, then give the same command"
            ) from None

    async def answer(self, prompt: Prompt, response: str) -> dict[str, Any]:
        """Return what a reward worker would: ``score`` and ``reward``, or ``failure`` with its details."""
        try:
            value = await self._score(question_of(prompt, response, self._settings.thinking))
        except EndpointError as error:
            detail = redacted(str(error), self._key)  # may quote the server's reply
            return {"failure": "endpoint", "detail": detail, "place": error.place}
        if not math.isfinite(value):
            detail = f"{self._client.address}: {value}"
            return {"failure": "not finite", "detail": detail, "place": "endpoint"}
        return {"score": value, "reward": value}

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _score(self, question: Question) -> float:
        body = self._judge.body(question)
        text = json.dumps(body, sort_keys=True).encode()
        key = hashlib.sha256(text).digest() if self._settings.cache else object()
        if (known := self._scores.get(key)) is not None:
            self._scores.move_to_end(key)
            return known
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._asked(body))
            task.add_done_callback(lambda done: self._remember(key, done))
        return await asyncio.shield(task)  # others may wait for it when this caller is cancelled

    async def _asked(self, body: dict[str, Any]) -> float:
        return self._judge.value(await self._client.ask(body))

    def _remember(self, key: object, done: asyncio.Task[float]) -> None:
        del self._under_way[key]
        if done.cancelled() or done.exception() is not None or not math.isfinite(done.result()):
            return
        self._scores[key] = done.result()
        if len(self._scores) > self._settings.cache:
            self._scores.popitem(last=False)
