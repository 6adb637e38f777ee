"""Tokenization of an observation: the ids that the chat template puts between two model turns.

``ObservationTemplate.given_ids`` takes an observation and the last sampled token, and returns the ids after
it. Sampled tokens are never tokenized again. The ids are those of the *tail*: in the rendering of
[user, assistant, observation] with a generation prompt, the text after the assistant's content, from the
token that closes the model's turn up to its next turn. This is exact because a tokenizer splits text at such
a token first: ``ids(a + CLOSE + b) = ids(a) + [CLOSE] + ids(b)``. A template that rewrites earlier turns once
others follow has no exact continuation: ``check_template`` raises ConfigError before a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from bapo_megatron.data.chat_template import absent_mark, chat_template_of
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.answer_text import THINKING, THOUGHT

History = Literal["template", "sampled"]
"""Form in which the model sees its earlier turns: as its template writes them, or as sampled."""

_QUESTION, _OBSERVATION, _SECOND = "What is 2+3?", "Bseen5c2dEnd", "Cseen9e4fEnd"
_OTHER = {"tool": "user", "user": "tool"}
_ROUNDS = {
    "without thinking": ("First.", "Second."),
    "with thinking": (f"{THINKING}\nHm.\n{THOUGHT}\n\nFirst.", f"{THINKING}\nAh.\n{THOUGHT}\n\nSecond."),
}
_EMPTY_THOUGHTS = {
    "with an empty thinking part": tuple(f"{THINKING}\n\n{THOUGHT}\n\n{one}." for one in ("First", "Second"))
}
"""Turns of a model told not to think (Qwen3's ``/no_think``), or trained not to."""
_SHOWN = 10
"""Number of tokens that a message shows from each sequence, starting where they differ."""


class ObservationTemplate:
    """Stateless tokenizer of observations of one role (tool or user) for one chat template: ``given_ids``."""

    def __init__(
        self,
        tokenizer: Any,
        role: str,
        stop_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """``stop_token_ids``: the model's own end tokens, without ``Environment.stops``. ``tools``: tools in
        the prompts. Raises ConfigError if the template refuses the role, drops the observation, or ends the
        model's turn with none of the stop tokens."""
        self._tokenizer, self.role, self._tools = tokenizer, role, list(tools or ())
        self._stops = frozenset(stop_token_ids)
        self._chat = chat_template_of(tokenizer)
        tail = self._tail([_OBSERVATION])
        if _OBSERVATION not in tail:
            raise ConfigError(_refusal(role, "drops what an observation says"))
        self._close = self._close_of(tail)
        self._takes_several = role == "tool"
        self._takes_several = self._takes_several and self._continues_several()

    def given_ids(self, observation: str | Sequence[str], last_token: int) -> np.ndarray:
        """Return the ids, int32, of the model's input after a turn that ended with ``last_token``.

        They start with the token that closes the turn, unless the turn ended with a stop token of the model;
        a turn that ended with one of ``Environment.stops`` gets closed. Text that looks like an added token
        stays text. Several texts (results of a turn's calls) become a message each if the template continues
        those, else lines of one message. Takes below 1 ms for a short observation.
        """
        texts = [observation] if isinstance(observation, str) else list(observation)
        if not self._takes_several:
            texts = ["\n".join(texts)]
        mark = absent_mark(texts)
        ids = self._chat.encode(self._tail(texts, mark), mark)
        return np.array(ids[1:] if last_token in self._stops else ids, np.int32)

    def prompt_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of rendered messages up to the start of the model's turn."""
        return self._chat.rendered(messages, "", self._tools)

    def difference(self, turns: Sequence[str], answers: int = 1) -> str | None:
        """Return how an episode of these turns (assistant contents), each followed by ``answers`` messages,
        differs from its whole rendering; None if equal."""
        messages: list[dict[str, str]] = [{"role": "user", "content": _QUESTION}]
        prompt = self.prompt_text(messages)
        opened = opened_thinking(prompt)
        ours = self._encode(prompt)
        for number, turn in enumerate(turns):
            ours += [*self._encode(turn.removeprefix(opened)), self._close]
            said = [f"{_OBSERVATION}{number}", f"{_SECOND}{number}"][:answers]
            ours += self.given_ids(said, self._close).tolist()
            messages += [{"role": "assistant", "content": turn}]
            messages += [{"role": self.role, "content": text} for text in said]
        try:
            whole = self._encode(self.prompt_text(messages))
        except Exception as error:  # a template raises whatever its author chose
            return f"the template refuses two rounds: {error}"
        if ours == whole:
            return None
        both = zip(ours, whole, strict=False)
        first = next((place for place, (a, b) in enumerate(both) if a != b), min(len(ours), len(whole)))
        shown = [self._tokenizer.decode(ids[first : first + _SHOWN]) for ids in (ours, whole)]
        return f"at token {first} the episode has {shown[0]!r}, the template writes {shown[1]!r}"

    def check_tools(self) -> None:
        """Raise ConfigError if the template does not write the given ``tools`` into a prompt."""
        messages = [{"role": "user", "content": _QUESTION}]
        if self._tools and self.prompt_text(messages) == self._chat.rendered(messages, ""):
            raise ConfigError(
                "model.hf_path: its chat template ignores the tools that the environment describes. Describe "
                "them in the prompts, and leave `tools` out of the class; or mend chat_template.jinja"
            )

    def _continues_several(self) -> bool:
        """Whether the template shows two answers to a turn, and continues them wherever it continues one."""
        try:
            tail = self._tail([_OBSERVATION, _SECOND])
        except ConfigError:
            return False
        if not 0 <= tail.find(_OBSERVATION) < tail.find(_SECOND):
            return False
        return all(
            self.difference(turns) is not None or self.difference(turns, 2) is None
            for turns in _ROUNDS.values()
        )

    def _tail(self, observations: Sequence[str], mark: str = "") -> str:
        """Return the rendered text after an assistant's content and with ``observations`` following, where
        ``mark`` splits text that looks like an added token. A template may still quote or trim the texts."""
        turn = absent_mark("turn", observations)
        messages = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": turn},
            *({"role": self.role, "content": observation} for observation in observations),
        ]
        try:
            text = self._chat.text(messages, mark, self._tools, given=True)
        except Exception as error:  # a template raises whatever its author chose
            raise ConfigError(_refusal(self.role, f"refuses it: {error}")) from error
        _, match, tail = text.rpartition(turn)
        if not match:
            raise ConfigError(_refusal(self.role, "does not show the model's turn before it"))
        return tail

    def _close_of(self, tail: str) -> int:
        first = self._encode(tail)[0]
        if first not in self._stops:
            stops = sorted(str(self._tokenizer.convert_ids_to_tokens(token)) for token in self._stops)
            problem = f"ends the model's turn with {tail[:24]!r}, none of its stop tokens {stops}"
            raise ConfigError(_refusal(self.role, problem))
        return first

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def check_template(
    template: ObservationTemplate, model: str, history: History = "template", begun: bool = False
) -> None:
    """Raise ConfigError, before a run, if the chat template rewrites sampled turns or ignores the tools.

    Two rounds of turn and observation must equal the whole rendering token by token: without a thinking part,
    with one, and with an empty one, as far as the generation prompt allows them. ``model``: name for the
    message. ``history="sampled"`` keeps sampled turns in any case, so only the tools are checked. ``begun``:
    the run started before empty thinking parts were checked.
    """
    template.check_tools()
    if history == "sampled":
        return
    for name, turns in _rounds_after(template.prompt_text([{"role": "user", "content": _QUESTION}]), begun):
        if not (problem := template.difference(turns)):
            continue
        other = _OTHER[template.role]
        raise ConfigError(
            f"model.hf_path={model}: its chat template does not continue an episode whose observations have "
            f"the role `{template.role}`: of two rounds {name}, {problem}. Either set "
            'environment.history="sampled": the model then sees its turns as it sampled them; or try role='
            f'"{other}" in the class; or mend chat_template.jinja, so that it leaves earlier turns alone'
        )


def _rounds_after(prompt: str, begun: bool) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rounds that can follow a generation prompt: it may have opened a thinking part, which every
    turn then has, or written an empty one, so that no turn has another."""
    if opened_thinking(prompt):
        return [("with thinking", _ROUNDS["with thinking"])]
    if prompt.rstrip().endswith(THOUGHT):
        return [("without thinking", _ROUNDS["without thinking"])]
    return [*_ROUNDS.items(), *({} if begun else _EMPTY_THOUGHTS).items()]


def _refusal(role: str, problem: str) -> str:
    return (
        f"model.hf_path: its chat template, given an observation of the role `{role}`, {problem}. Set role = "
        f"\"{_OTHER[role]}\" in the environment's class, or mend chat_template.jinja in the model's folder"
    )


def opened_thinking(prompt: str) -> str:
    """Return the ``<think>`` and white space at the end of the generation prompt, or an empty string."""
    return prompt[prompt.rindex(THINKING) :] if prompt.rstrip().endswith(THINKING) else ""
