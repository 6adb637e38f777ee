"""Adapters with the real packages, and given tokens against `renderers`, in an environment of theirs.

Each script of tests/support/foreign runs in `.venv-environments` (`make environments`), plays an episode, and
again with a fresh object after each turn, as after a kill.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.environment.template import ObservationTemplate
from tests.support.chat_templates import ROOT, family_tokenizer

FOREIGN = ROOT / "tests/support/foreign"
PYTHON = ROOT / ".venv-environments/bin/python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / ".venv-environments/.done").is_file(), reason="no public environments: make environments"
    ),
]


def found(script: str, *arguments: Path, given: object = None) -> Any:
    """What a script finds, in an environment without this one's packages."""
    done = subprocess.run(
        [PYTHON, FOREIGN / f"{script}.py", *arguments],
        capture_output=True,
        text=True,
        input=json.dumps(given),
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{FOREIGN}"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def test_textarena() -> None:
    """Eight games over kills; an observation is the new text, or all that the game repeats."""
    games = found("play_textarena")
    refused = games.pop("refused")
    assert refused.startswith(
        "the prompt's last message does not end with the first observation of Secretary-v0"
    )
    assert len(games) == 8
    first, second = (said for said, _ in games["GuessTheNumber-v0"][0][:2])
    assert first == "[Player] [3]\n[GAME] The target number is higher."
    assert second == "[Player] I guess [12]\n[GAME] The target number is lower."
    for new, whole in games.values():
        assert [reward for _, reward in new] == [reward for _, reward in whole]
        for said, all_of_it in zip(new, whole, strict=True):
            assert (said[0] is None) == (all_of_it[0] is None)
            assert said[0] is None or all_of_it[0].strip().endswith(said[0])
    assert games["TowerOfHanoi-v0"][0][-1] == [None, 1.0]
    assert games["ThreeCardMonte-v0"][0][-1] == [None, 0.0]  # of two invalid moves


def test_openenv() -> None:
    """A session over kills: its seed makes the replay draw the same; the reward comes with the end. One that
    is lost continues in a new one, if that answers the same."""
    text, whole, refused, kept, lost = found("play_openenv")
    assert [one.split()[0] for one in kept] == ["higher", "higher", "lower"]
    assert lost.startswith("a session was lost, and a new one answers 'higher 0.")
    assert lost.endswith(": give extra_info.reset a seed")
    assert [said and said.split()[0] for said, _ in text] == ["higher", "lower", None]
    assert [reward for _, reward in text] == [None, None, pytest.approx(1 / 3)]
    assert json.loads(whole) == {"asked": 1, "text": text[0][0]}
    assert refused == (
        "the server's observation has no text 'board', but ['asked', 'text']: name one in `observation` of "
        "environment.settings"
    )


def test_verifiers() -> None:
    """A game of its own environment over kills, with draws; and a task's own reward of one answer.

    Rewards see the prompt, and turns without their thoughts. What is not a single conversation is refused.
    """
    played = found("play_verifiers")
    prompt, said, reward = played["game"]
    assert prompt == [{"role": "user", "content": "Guess my number."}]
    assert [one and one.split()[0] for one in said] == ["higher", "lower", None]
    assert reward == 1.5  # the task's, and what the game has recorded
    assert played["thoughts"][1][0].split()[0] == "higher"
    assert played["thoughts"][2] == 1.5
    blocks = [block.split()[:2] for block in played["transcript"].split("\n\n")]
    assert blocks == [["[user]", "Guess"], ["[assistant]", "3"], ["[user]", "higher"], ["[assistant]", "6"]]
    for name, prompt in (("twice", "Guess my number."), ("other", "Guess again.")):
        assert played[f"{name}-taskset"] == (
            f"run() opens a conversation of 'player' beside the episode's, with the prompt {prompt!r}: an "
            "episode is one conversation, on the prompt of its row"
        )
    assert [played[name][1:] for name in ("right", "wrong")] == [[[None], 1.0], [[None], 0.0]]


def test_agents_with_the_clients_of_openai_and_anthropic() -> None:
    """Streams and whole answers over kills: calls, ends, usage and log-probs as each client reads them."""
    played = found("play_agent")
    errors = played.pop("errors")
    ends = {
        "chat": ["tool_calls", "tool_calls", "stop"],
        "responses": ["completed"] * 3,
        "messages": ["tool_use", "tool_use", "end_turn"],
    }
    assert len(played) == 6
    for name, (replies, read) in played.items():
        protocol = name.partition("-")[0]
        assert replies == [["4", None], [["5", "6"], None], [None, 1.0]], name
        assert [text or "" for text, _, _ in read] == ["I add.", "", "5"], name
        assert [calls for _, calls, _ in read] == [["add"], ["add", "add"], []], name
        assert [more[0] for _, _, more in read] == ends[protocol], name
        assert [more[1] for _, _, more in read] == [[10, 2], [11, 2], [12, 2]], name
        log_probs = [[one for _, one in more[2]] for _, _, more in read if more[2:]]
        calls_alone = [-0.5, -0.25] if protocol == "chat" else []  # responses have those of texts
        assert log_probs == ([] if protocol == "messages" else [[-0.5, 0.0], calls_alone, [-0.5, -0.5]]), name
    assert errors.pop("models") == [["policy"], ["policy"]]
    assert {name: kind for name, (kind, _) in errors.items()} == {
        "n": "BadRequestError",
        "state": "BadRequestError",
        "image": "BadRequestError",
        "count": "NotFoundError",
        "key": "AuthenticationError",
    }
    assert errors["n"][1] == "n=2 is not offered here: leave it out"
    assert errors["key"][1] == "no episode has this key"


def test_an_agent_of_a_package() -> None:
    """smolagents, which nobody here wrote: its prompts, its calls, its own text of their results."""
    tools, said, reward = found("play_smolagents")
    assert tools == ["calculator", "final_answer"]
    assert "Observation:" in said  # alone, or within a history that it rewrote
    assert "5" in said
    assert reward == 1.0


# --- tokens --------------------------------------------------------------------------------------

FAMILIES = [
    ("Qwen3", "tool"),
    ("Qwen3 as sampled", "user"),
    ("Llama 3.1", "tool"),
    ("Llama 3.1", "user"),
    ("DeepSeek V3", "tool"),
    ("DeepSeek V3", "user"),
    ("R1", "user"),
]


def test_given_tokens_are_those_of_renderers() -> None:
    """Over random observations and turns; a turn may end with the model's stop, or a call's last token."""
    draw, cases, ours = random.Random(0), [], []
    letters = "abc XYZ 0123 .,;:!?()[]{}\n\t\\/'\"\u00e4\u03bb\u6f22\U0001f642"
    for family, role in FAMILIES:
        tokenizer = family_tokenizer(family.removesuffix(" as sampled"))
        template = ObservationTemplate(tokenizer, role, [tokenizer.eos_token_id])
        prompt = tokenizer.encode(
            template.prompt_text([{"role": "user", "content": "1+1="}]), add_special_tokens=False
        )
        for number in range(60):
            observation = "".join(draw.choices(letters, k=draw.randrange(40)))
            turn = [draw.randrange(1000, 100_000) for _ in range(5)]
            if family == "R1":  # it has begun to think in the prompt
                turn = [*tokenizer.encode("Hm.\n</think>\n\n", add_special_tokens=False), *turn]
            if number % 2:
                turn = [*turn, tokenizer.eos_token_id]
            ours.append(template.given_ids(observation, turn[-1]).tolist())
            about = {"family": family, "role": role, "observation": observation}
            cases.append({**about, "prompt": prompt, "turn": turn})
    theirs = found("bridge", ROOT / ".tokenizers", given=cases)
    for case, our, their in zip(cases, ours, theirs, strict=True):
        assert our == their, (case["family"], case["role"], case["observation"], case["turn"])
