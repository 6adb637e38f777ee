"""Which of SGLang's models a server on a CPU imports: its own alone, where this project trains it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bapo_megatron.rollout.engines.sglang_cpu import stand_ins

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of SGLang with a few models, and no variable of it."""
    models = tmp_path / "sglang/srt/models"
    models.mkdir(parents=True)
    for name in ("qwen2", "qwen3", "qwen3_moe", "llava", "registry"):
        (models / f"{name}.py").touch()
    monkeypatch.setattr(stand_ins, "_package", lambda: tmp_path / "sglang")
    monkeypatch.setenv(VARIABLE, "")  # so that it is as before when the test is over
    monkeypatch.delenv(VARIABLE)


def folder(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def test_a_model_that_is_trained_here_is_imported_alone(tmp_path: Path) -> None:
    stand_ins.import_one_model(folder(tmp_path, json.dumps({"architectures": ["Qwen3ForCausalLM"]})))
    assert os.environ[VARIABLE] == "llava,qwen2,qwen3_moe,registry"


@pytest.mark.parametrize(
    "text",
    ['{"architectures": ["LlavaForCausalLM"]}', '{"architectures": null}', "[]", "no JSON", "{}"],
)
def test_of_any_other_all_are_imported(text: str, tmp_path: Path) -> None:
    stand_ins.import_one_model(folder(tmp_path, text))
    assert VARIABLE not in os.environ


def test_without_a_model_all_are_imported(tmp_path: Path) -> None:
    stand_ins.import_one_model(tmp_path / "absent")
    assert VARIABLE not in os.environ


def test_what_the_user_disables_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "llava")
    stand_ins.import_one_model(folder(tmp_path, json.dumps({"architectures": ["Qwen2ForCausalLM"]})))
    assert os.environ[VARIABLE] == "llava"
