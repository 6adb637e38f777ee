"""That the installed SGLang heeds the variable by which a server on a CPU imports its own model alone.

No server is asked: two files of SGLang's package read the variable, and here stand beside two models of ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bapo_megatron.rollout.engines.sglang_cpu import stand_ins

READERS = ("srt/environ.py", "srt/models/registry.py")
WHERE = "import importlib.util as util; print(util.find_spec('sglang').submodule_search_locations[0])"
IMPORTED = "from sglang.srt.models.registry import ModelRegistry as all; print(*sorted(all.models))"


@pytest.fixture
def package(sglang: Path, tmp_path: Path) -> Path:
    """SGLang's readers of the variable, the models Qwen2 and Llava, and as much of torch as they need."""
    found = subprocess.run([sglang, "-c", WHERE], capture_output=True, text=True, check=True).stdout.strip()
    folder = tmp_path / "packages"
    (folder / "sglang/srt/models").mkdir(parents=True)
    (folder / "sglang/__init__.py").touch()
    for name in READERS:
        shutil.copy(Path(found) / name, folder / "sglang" / name)
    for model in ("Qwen2", "Llava"):
        text = f"class {model}: pass\nEntryClass = {model}\n"
        (folder / f"sglang/srt/models/{model.lower()}.py").write_text(text)
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").touch()
    (folder / "torch/nn.py").write_text("class Module: pass\n")
    return folder


@pytest.mark.parametrize(
    ("architecture", "imported"), [("Qwen2ForCausalLM", "Qwen2"), ("LlavaForCausalLM", "Llava Qwen2")]
)
def test_sglang_imports_the_served_model_alone(
    architecture: str,
    imported: str,
    sglang: Path,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All for a model that this project does not train: so the variable is what leaves the other out."""
    monkeypatch.setenv(stand_ins._DISABLED, "")  # so that it is as before when the test is over
    monkeypatch.delenv(stand_ins._DISABLED)
    monkeypatch.setattr(stand_ins, "_package", lambda: package / "sglang")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    stand_ins.import_one_model(tmp_path)
    command = [sglang, "-c", IMPORTED]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == imported, done.stderr
