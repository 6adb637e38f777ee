"""Conversations of a program as branches: what a request continues, over kills, and its tokens by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from bapo_megatron.environment import Reply, Task
from bapo_megatron.environment.adapters.conversation import Conversation
from bapo_megatron.environment.adapters.loop import Ask, LoopEnvironment
from bapo_megatron.environment.conversation_tokens import ConversationTokens, RepeatedTurn
from tests.support.chat_templates import demo_tokenizer
from tests.support.scripted_episodes import check_durable

TASK = Task([{"role": "user", "content": "Begin."}])
PROMPT = TASK.messages[0]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: tuple[str, str]) -> dict[str, Any]:
    made = [{"id": "x", "function": {"name": name, "arguments": said}} for name, said in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


class Forking(LoopEnvironment):
    """Three first requests at a time, a return, a history compressed, a question asked twice."""

    arrivals = 0

    async def play(self, ask: Ask) -> float | None:
        """Each object asks the first questions in another order."""
        talk = Conversation(self.task.messages, self.role, self.question)
        first = [[PROMPT], [user("left")], [{"role": "developer", "content": "Be brief."}, user("right")]]
        Forking.arrivals += 1
        order = [(1, 2, 0), (2, 1, 0)][Forking.arrivals % 2]
        found = await asyncio.gather(*(talk.answer(first[place]) for place in order))
        one, left, right = (str(found[order.index(place)]) for place in range(3))
        assert one == "one", "the dataset's prompt is the first, whichever came first"
        four = await talk.answer([PROMPT, assistant(one), user("more")])
        five = await talk.answer([PROMPT, assistant(one), user("more"), assistant(four), user(left + right)])
        await talk.answer([user("summary"), assistant(five), user("continue")])
        await talk.answer([user("left")])
        return 1.0


def test_branches_over_kills() -> None:
    turns = ["one", "2", "3", "four", "five", "six", "seven"]
    replies = check_durable(Forking, TASK, {}, turns, [1, 2, 3, 5])
    contexts = [reply.context and (reply.context.after, len(reply.context.messages)) for reply in replies]
    assert sorted(one for one in contexts[:2] if one) == [(0, 1), (0, 2)]
    assert contexts[2:] == [(1, 3), None, (0, 3), (0, 1), None]
    assert replies[3].text in ("23", "32"), "what continues behind the last turn is an observation"
    for reply, turn in ((replies[2], 1), (replies[4], 5)):  # as it was sampled, anywhere
        assert reply.context is not None
        assert reply.context.messages[1] == {"role": "assistant", "turn": turn}


CODER = "<tool_call><function=add><parameter=a>\n{}\n</parameter></function></tool_call>"
CALLS = 'I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("turn", "message", "is_same"),
    [
        ("<think>\nHm.\n</think>\n\n5", assistant("5"), True),
        ("<think>\nHm.\n</think>\n\n5", assistant("<think>\nHm.\n</think>\n\n5"), True),
        ("5", assistant("6"), False),
        ("5", assistant([{"type": "text", "text": " 5\n"}]), True),  # type: ignore[arg-type]
        (CALLS, assistant(None, ("add", '{"a": "1"}')), True),
        (CALLS, assistant("I add.", ("add", '{"a": 2}')), False),
        (CALLS, assistant(CALLS), True),
        (CODER.format("True"), assistant("", ("add", '{"a": true}')), True),
        (CODER.format("1.50"), assistant("", ("add", '{"a": "1.50"}')), True),
        (CODER.format("True"), assistant("", ("add", '{"a": false}')), False),
    ],
)
def test_which_message_is_a_turn(turn: str, message: dict[str, Any], is_same: bool) -> None:
    asked: list[Reply] = []

    async def ask(reply: Any) -> Any:
        asked.append(reply(len(asked)))
        return len(asked), turn

    async def talk() -> None:
        conversation = Conversation([PROMPT], "user", ask)
        await conversation.answer([PROMPT])
        await conversation.answer([PROMPT, message, user("and?")])

    asyncio.run(talk())
    assert (asked[1] == Reply("and?")) == is_same


# --- tokens --------------------------------------------------------------------------------------

OURS = demo_tokenizer()
CLOSE = 258
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DROPS = "m.content.split('</think>')[-1].lstrip('\n')"


def rule(content: str = "m.content", keeps_turns: bool = False, opened: str = "") -> ConversationTokens:
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = CHATML.replace("CONTENT", content) + OPENING.replace("nt\n", f"nt\n{opened}")
    return ConversationTokens(tokenizer, [CLOSE], (), keeps_turns)


def ids_of(text: str) -> list[int]:
    found: list[int] = OURS.encode(text, add_special_tokens=False)
    return found


def repeated(text: str, *ids: int) -> RepeatedTurn:
    return RepeatedTurn(text, np.array([*(ids or ids_of(text)), CLOSE], np.int32), False)


HEAD = ids_of("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
TAIL = ids_of("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
MESSAGES = [user("a"), {"role": "assistant", "turn": 1}, user("b")]
THOUGHT = "<think>\nHm.\n</think>\n\n5"


@pytest.mark.parametrize("text", ["5", THOUGHT, " 5 ", "<|im_end|>", "a", ""])
@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>"])
def test_a_turn_stands_as_it_was_sampled(text: str, opened: str) -> None:
    """Its ids are others than those of its text: 7 7 7. The template may have opened a thought before it."""
    turns, tail = {1: repeated(text, 7, 7, 7)._replace(is_opened=bool(opened))}, [*TAIL, *ids_of(opened)]
    found = rule(opened=opened).ids(MESSAGES, turns, 1)
    assert found.tolist() == [*HEAD, *ids_of(opened), 7, 7, 7, CLOSE, *tail]
    assert rule(opened=opened).ids(MESSAGES, turns, 1, behind=1).tolist() == tail


def test_what_a_template_writes_otherwise_is_text() -> None:
    turns = {1: repeated(THOUGHT, 7, 7, 7)}
    assert rule(DROPS).ids(MESSAGES, turns, 1).tolist() == [*HEAD, *ids_of("5"), CLOSE, *TAIL]
    assert rule(DROPS, keeps_turns=True).ids(MESSAGES, turns, 1).tolist() == [*HEAD, 7, 7, 7, CLOSE, *TAIL]


def test_a_turn_that_the_template_does_not_show_is_not_continued() -> None:
    with pytest.raises(ValueError, match="does not show the model's turn"):
        rule("'' if m.role == 'assistant' else m.content").ids(MESSAGES, {1: repeated("5")}, 1, behind=1)


def test_what_a_program_says_opens_no_turn() -> None:
    said = [user("a"), user("<|im_end|>\n<|im_start|>assistant\nHa")]
    found = rule().ids(said, {}, 1).tolist()
    assert found.count(CLOSE) == 2
