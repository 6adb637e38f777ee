"""A mixture of experts gives one answer at every layout, with EP and without, which is transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bapo_megatron.data.samples import Sample
from tests.distributed.test_layouts import UPDATES, Answer, answers, check_agreement, layout
from tests.support.models import EXPERTS, save_tiny_model, tiny_model
from tests.support.tiers import slow_but

pytestmark = pytest.mark.distributed

LAYOUTS = [
    *("one full", "tp2-sp", "tp2-sp-etp2", "dp2", "dp2-etp2", "pp2", "cp2", "pp2-vpp2"),
    *("dp2-ep2", "dp2-ep2 selective", "dp4-ep4", "dp4-ep2 shuffled"),
    *("cp2-ep2 full", "dp2-cp2-ep2", "dp2-cp2-ep4"),
    *("tp2-sp-ep2", "dp2-tp2-sp-ep4", "dp2-tp2-sp-ep2", "dp2-tp2-sp-ep2-etp2", "dp2-tp2-sp-etp2"),
    *("dp2-pp2-ep2", "dp2-pp2-vpp2-ep2", "pp2-cp2-ep2", "dp2-pp3-ep2", "dp2-pp2-ep2 layers3+1"),
    *("tp2-sp-pp2-vpp2-ep2", "tp2-sp-cp2-ep4"),
]
"""With recomputation more of them in test_route_replay.py."""
QUICK = ("dp2-ep2 selective", "dp2-tp2-sp-ep2-etp2", "dp2-pp2-vpp2-ep2", "dp2-pp3-ep2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(EXPERTS, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path, samples: list[Sample]) -> Answer:
    [found] = answers("one", folder, samples)
    return found


@pytest.mark.parametrize("text", slow_but(LAYOUTS, *QUICK))
def test_layout_agrees_with_one_process(
    text: str, folder: Path, samples: list[Sample], reference: Answer
) -> None:
    check_agreement(answers(text, folder, samples), reference, samples)


def test_log_probs_are_those_of_transformers(samples: list[Sample], reference: Answer) -> None:
    model = tiny_model(EXPERTS)
    for index, sample in enumerate(samples):
        ids = torch.tensor(sample.token_ids[None].astype("int64"))
        with torch.no_grad():
            logits = model(ids).logits[0, :-1] / 0.7
        theirs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(reference.log_probs[index], theirs, rtol=0, atol=1e-5)


def test_load_and_router_entropy_are_those_of_transformers(samples: list[Sample], reference: Answer) -> None:
    """Of the first update: all positions of each sample, in each layer."""
    load, entropy, tokens = torch.zeros(4, 8), torch.zeros(4, dtype=torch.float64), 0
    for sample in samples:
        ids = torch.tensor(sample.token_ids[None, :-1].astype("int64"))
        with torch.no_grad():
            found = tiny_model(EXPERTS)(ids, output_router_logits=True).router_logits
        tokens += ids.numel()
        for layer, logits in enumerate(found):
            load[layer] += logits.topk(2, 1).indices.flatten().bincount(minlength=8)
            entropy[layer] += torch.distributions.Categorical(logits=logits).entropy().double().sum()
    sums = reference.experts[0]
    assert len(reference.experts) == UPDATES
    assert sums[:, :8].tolist() == load.tolist()
    assert sums[:, 8].tolist() == [tokens] * 4
    torch.testing.assert_close(sums[:, 9], entropy, rtol=1e-5, atol=0)


def test_there_are_many_layouts() -> None:
    assert len(set(map(layout, LAYOUTS))) >= 25
