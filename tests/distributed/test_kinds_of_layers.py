"""Experts, and hybrids of Gated DeltaNet and gated attention: one answer at every layout, transformers'.

Hybrids are dense, or have experts and a gated shared expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from bapo_megatron.data.samples import Sample
from tests.distributed.test_layouts import UPDATES, Answer, answers, check_agreement
from tests.support.models import EXPERT_HYBRID, EXPERTS, HYBRID, save_tiny_model, tiny_model
from tests.support.tiers import slow_but

pytestmark = pytest.mark.distributed

LAYOUTS = {
    EXPERTS: [
        *("one full", "tp2-sp", "tp2-sp-etp2", "dp2-etp2", "cp2", "dp4-ep4", "tp2-sp-cp2-ep4"),
        *("dp2-ep2 selective", "dp2-tp2-sp-ep2-etp2", "dp2-pp2-vpp2-ep2", "dp2-pp3-ep2"),
    ],
    HYBRID: [
        *("tp2-sp selective", "pp3 selective", "cp4", "dp2-cp2", "tp2-sp-cp2", "tp2-sp-pp2-cp2"),
        "pp2-vpp2 layers1+2+3+2 full",
    ],
    EXPERT_HYBRID: [
        *("tp2-sp-ep2", "tp2-sp-cp2-ep2", "dp2-tp2-sp-ep2-etp2 selective", "dp2-pp2-vpp2-ep2"),
    ],
}
"""Two ways to spread an update stand together in one of these, or in one of test_route_replay.py, with
recomputation, too."""
QUICK = [
    *((EXPERTS, text) for text in ("dp2-ep2 selective", "dp2-tp2-sp-ep2-etp2", "dp2-pp2-vpp2-ep2")),
    *((HYBRID, text) for text in ("tp2-sp-cp2", "pp2-vpp2 layers1+2+3+2 full")),
    *((EXPERTS, "dp2-pp3-ep2"), (EXPERT_HYBRID, "tp2-sp-ep2")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_model(family, tmp_path_factory.mktemp(family)) for family in LAYOUTS}


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path], samples: list[Sample]) -> Callable[[str], Answer]:
    """What one process says of a family."""
    return cache(lambda family: answers("one", folders[family], samples)[0])


@pytest.mark.parametrize(
    ("family", "text"), slow_but([(family, text) for family in LAYOUTS for text in LAYOUTS[family]], *QUICK)
)
def test_layout_agrees_with_one_process(
    family: str,
    text: str,
    folders: dict[str, Path],
    samples: list[Sample],
    reference: Callable[[str], Answer],
) -> None:
    check_agreement(answers(text, folders[family], samples), reference(family), samples)


@pytest.mark.parametrize(("family", "atol"), [(EXPERTS, 1e-5), (HYBRID, 2e-6), (EXPERT_HYBRID, 2e-6)])
def test_log_probs_are_those_of_transformers(
    family: str, atol: float, samples: list[Sample], reference: Callable[[str], Answer]
) -> None:
    """Document by document: its own packs would not begin anew at each."""
    model = tiny_model(family)
    for index, sample in enumerate(samples):
        ids = torch.tensor(sample.token_ids[None].astype("int64"))
        with torch.no_grad():
            logits = model(ids).logits[0, :-1] / 0.7
        theirs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(reference(family).log_probs[index], theirs, rtol=0, atol=atol)


def test_load_and_router_entropy_are_those_of_transformers(
    samples: list[Sample], reference: Callable[[str], Answer]
) -> None:
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
    experts = reference(EXPERTS).experts
    assert len(experts) == UPDATES
    assert experts[0][:, :8].tolist() == load.tolist()
    assert experts[0][:, 8].tolist() == [tokens] * 4
    torch.testing.assert_close(experts[0][:, 9], entropy, rtol=1e-5, atol=0)
