"""``bapo doctor``: one step of each source's environment, one call of the recipe's reward."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.commands.doctor import doctor, environments
from bapo_megatron.commands.doctor.environments import environment_row, try_environments
from bapo_megatron.commands.doctor.recipe import check_recipe, try_reward
from bapo_megatron.commands.doctor.rows import DoctorRow
from bapo_megatron.config import EnvironmentConfig, RewardConfig, RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.data.prompts import PromptSet
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.types import Prompt

RECIPE = Path(__file__).parents[3] / "recipes/demo_tools_cpu.py"
DEMO = RECIPE.with_name("demo_cpu.py")
LONG_S = 300.0
pytestmark = pytest.mark.integration

GAME = """
import json, os, time
from bapo_megatron.environment import Environment, Reply

REPLIES = {"text": "higher", "number": Reply(42)}
REPLIES |= {"note": Reply("higher", note={1}), "end": Reply(None, reward=1.5)}

class Game(Environment):
    role = "user"

    def __init__(self, task, settings):
        super().__init__(task, settings)
        self.does = settings["does"]
        self.note("made")
        if self.does == "refuse":
            try:
                self.number = self.read(task.ground_truth)
            except ValueError as error:
                raise LookupError("no number") from error

    def read(self, text):
        return int(text)

    def note(self, what):
        if "log" in self.settings:
            with open(self.settings["log"], "a") as log:
                print(json.dumps([what, vars(self.task)]), file=log)

    def step(self, turn):
        self.note(turn)
        if self.does == "raise":
            raise ValueError("the door is shut")
        if self.does == "hang":
            time.sleep(1000)
        if self.does == "die":
            os._exit(9)
        return REPLIES.get(self.does, Reply("Say a number.\\n", reward=0.25))

    def close(self):
        self.note("closed")
"""


@pytest.fixture
def game(tmp_path: Path) -> str:
    file = tmp_path / "doctor_game.py"
    file.write_text(GAME)
    return f"{file}:Game"


def tried(game: str, does: str, **fields: Any) -> DoctorRow:
    """The trial on row 3 of a dataset whose rows have no number."""
    settings = {"does": does, **fields.pop("settings", {})}
    environment = EnvironmentConfig(game, settings, **{"step_limit_s": LONG_S, **fields})
    config = replace(load_recipe(RECIPE, RunConfig), environment=environment)
    [trial] = try_environments(config, [PromptSet((prompt(3), prompt(4)), 0, 2)])
    return trial


def prompt(row: int, source: str = "") -> Prompt:
    messages = [{"role": "user", "content": "hello"}]
    return Prompt(row, np.zeros(1, np.int32), "many", "test", {"a": 1}, source=source, messages=messages)


def test_an_object_takes_one_step_and_is_closed(game: str, tmp_path: Path) -> None:
    """In the named interpreter, with the settings; the row has what came of it."""
    log = tmp_path / "log"
    row = tried(game, "answer", settings={"log": str(log)}, python=Path(sys.executable))
    said = "a turn of role user ('Say a number.\\n'), reward 0.25, not done"
    assert row == environment_row(
        "ok", f"environment.function={game}, row 3: to 'I do not know.' it gave {said}"
    )
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [what for what, _ in events] == ["made", "I do not know.", "closed"]
    task = events[0][1]
    assert task.pop("episode").startswith("doctor-")
    given = {"messages": prompt(3).messages, "ground_truth": "many", "data_source": "test"}
    assert task == {**given, "extra_info": {"a": 1}}
    assert tried(game, "end").found.endswith("it gave no turn, reward 1.5, done")


AGENT = """
import json, os, sys, urllib.request
asked = json.load(sys.stdin)["messages"]
for _ in range(int(sys.argv[1])):
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    body = json.dumps({"model": "policy", "messages": asked}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
with open(os.environ["BAPO_REWARD_FILE"], "w") as file:
    file.write("0.5")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("turns", "code", "state", "says"),
    [
        ("3", "0", "ok", r"to 'I do not know\.', 3 times, it gave no turn, reward 0\.5, done"),
        ("4", "0", "optional", r", 3 times, .*not done\. It had not ended"),
        ("0", "0", "problem", r"ended with 0 and sent no request to OPENAI_BASE_URL"),
        ("1", "1", "optional", r"ended with 1\."),
    ],
)
def test_an_agent_program_plays_a_whole_episode(
    turns: str, code: str, state: str, says: str, tmp_path: Path
) -> None:
    """What a run would end or refuse is seen before it."""
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    environment = EnvironmentConfig(
        "bapo_megatron.environment.adapters.endpoint:EndpointEnvironment",
        {"command": [sys.executable, str(agent), turns, code]},
        max_turns=3,
        step_limit_s=LONG_S,
    )
    config = replace(load_recipe(RECIPE, RunConfig), environment=environment)
    [row] = try_environments(config, [PromptSet((prompt(3),), 0, 1)])
    assert row.state == state
    assert re.search(says, row.found, re.DOTALL), row.found
    assert ("environment.max_turns" in row.fix) == (turns == "4")
    assert "Traceback" not in row.found


@pytest.mark.parametrize(
    ("does", "state", "says"),
    [
        # What no turn can change is a problem; at the invented turn a failure ends no run.
        ("refuse", "problem", r"raised: LookupError\('no number'\).*return int\(text\).*raise LookupError\("),
        ("text", "problem", r"raised: TypeError\('step returned str: return a Reply'\)"),
        ("number", "problem", r"raised: TypeError\('Reply\.observation is int: give a text, "),
        ("note", "problem", r"raised: TypeError\('Object of type set is not JSON serializable'\)"),
        ("raise", "optional", r"raised: ValueError\('the door is shut'\).*raise ValueError\("),
        ("hang", "optional", "time: no answer within 2 s; longer was not waited"),
        ("die", "optional", "died: "),
    ],
)
def test_a_step_that_fails(
    game: str, does: str, state: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once, for it may act outside, and not waited for longer than the doctor has time."""
    monkeypatch.setattr(environments, "MOST_WAIT_S", 2.0 if does == "hang" else LONG_S)
    row = tried(game, does, settings={"log": str(tmp_path / "log")})
    assert row.state == state
    begin = re.escape(f"environment.function={game}, row 3: to 'I do not know.': ")
    assert re.match(begin + says, row.found, re.DOTALL), row.found
    assert ("; environment.settings is {" in row.fix) is (state == "problem")
    assert ("a run continues" in row.fix) is (does in ("raise", "die"))
    events = [json.loads(line)[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert events.count("I do not know.") == (does != "refuse")


def test_what_cannot_reach_a_worker(game: str) -> None:
    """An interpreter that does not run."""
    trial = tried(game, "end", python=Path("/bin/false"))
    assert trial.state == "problem"
    begin = f"environment.function={game}, row 3: no step: environment.function={game}: its worker did not"
    assert trial.found.startswith(begin)
    assert "environment.python=/bin/false" in trial.found


def test_the_doctor_steps_the_environments_of_a_recipe(game: str, tmp_path: Path) -> None:
    """Each source has its own, one without any is not tried; the suites' is tried once."""
    sources = []
    for name, environment in (("sums", {}), ("games", {"function": game, "settings": {"does": "text"}})):
        row = {"prompt": [{"role": "user", "content": f"{name}?"}], "reward_model": {"ground_truth": "7"}}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**row, "data_source": name}) + "\n")
        sources.append({"path": str(tmp_path / f"{name}.jsonl"), "environment": environment})
    flags = [f"--run-dir={tmp_path / 'run'}", f"--data.sources={json.dumps(sources)}", "--data.path=None"]
    told, _ = check_recipe(RECIPE, flags)
    suites, games = (row for row in told if row.name == "environment")
    assert suites.state == "ok", "the recipe's own has the held-out suite"
    assert "Calculator, row 0: to 'I do not know.' it gave no turn, no reward (reward" in suites.found
    assert games.state == "problem"
    assert f"data.sources[games].environment.function={game}, row 0 of source games" in games.found
    assert not list(try_environments(load_recipe(RECIPE, RunConfig), []))
    assert "step returned str: return a Reply" in games.found


@pytest.mark.parametrize(
    ("function", "works", "says"),
    [
        ("math", True, r"score 1 for row 3 with its ground truth in a box as the response"),
        ("tests.support.reward_functions:score", False, r"no score for row 3 .*raised: KeyError\("),
        ("tests.support.reward_functions:one", False, "cannot be called with a prompt and a response"),
    ],
)
def test_a_reward_is_tried_on_a_row(function: str, works: bool, says: str) -> None:
    config = replace(load_recipe(DEMO, RunConfig), reward=RewardConfig(function=function))
    row = try_reward(config, Prompt(3, np.zeros(1, np.int32), "34", "test"))
    assert re.search(says, row.found)
    assert (row.state, bool(row.fix)) == (("ok", False) if works else ("problem", True))
    if "no score" in row.found:
        assert "Traceback (most recent call last):" in row.found
        assert "return ACTIONS[word](prompt, rest)" in row.found


def test_a_recipe_that_ends_the_process_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a report that continues."""
    for section in ("package_rows", "sglang_rows", "sandbox_rows"):
        monkeypatch.setattr(doctor, section, lambda *_: iter(()))
    path = tmp_path / "crash.py"
    path.write_text("import os, signal\nprint('noise')\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert doctor.run_doctor([str(path), "--json"]) == 1
    told = json.loads(capfd.readouterr().out)["rows"]
    [row] = [row for row in told if row["section"] == "recipe"]
    assert row["found"].startswith("ended by SIGKILL")
    assert "machine" in {row["section"] for row in told}


def test_the_doctor_calls_the_reward_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("def score(prompt, response):\n    return prompt.truth\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    base = shutil.copytree(DEMO.parent / "demo/policy", tmp_path / "base")
    for name in ("config", "generation_config", "tokenizer_config"):  # as a base model has them
        file = base / f"{name}.json"
        written = file.read_text().replace("<|im_end|>", "<|endoftext|>")
        file.write_text(written.replace('"eos_token_id": 258', '"eos_token_id": 256'))
    flags = [f"--run-dir={tmp_path / 'run'}", f"--model.hf-path={base}"]
    rows, _ = check_recipe(DEMO, [*flags, "--reward.function=broken_rewards:score"])
    [stops, row] = [row for row in rows if row.name in ("stop tokens", "reward")]
    assert (stops.state, row.state) == ("optional", "problem")
    assert "ends turns with <|im_end|>, and no response stops there" in stops.found
    assert "AttributeError: 'Prompt' object has no attribute 'truth'" in row.found


def test_a_judge_that_is_not_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo_megatron.commands.doctor.recipe.ENDPOINT_DEADLINE_S", 0.3)
    settings = {"url": f"http://127.0.0.1:{free_port()}/v1", "model": "m"}
    reward = RewardConfig(function="llm_judge", settings=settings)
    prompt = Prompt(3, np.zeros(1, np.int32), "34", "test", messages=[{"role": "user", "content": "17*2="}])
    row = try_reward(replace(load_recipe(DEMO, RunConfig), reward=reward), prompt)
    assert row.state == "problem"
    assert "no server took a connection for 0.3 s" in row.found


@pytest.mark.parametrize("field", ["environment.function", "reward.function"])
def test_a_missing_module_is_told_once(tmp_path: Path, field: str) -> None:
    told, _ = check_recipe(RECIPE, [f"--run-dir={tmp_path / 'run'}", f"--{field}=absent:One"])
    [problem] = [row.found for row in told if row.state == "problem"]
    assert f"{field}=absent:One" in problem
    assert not [row for row in told if row.name == field.partition(".")[0]]
