"""The ledger of a rehearsal: storages by phase, and which values are known on fake tensors."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bapo_rehearsal.fake.ledger import Ledger, sizes_by_kind
from bapo_rehearsal.fake.meter import Meter
from bapo_rehearsal.fake.values import known


def test_a_storage_counts_once_and_until_it_is_freed() -> None:
    """100 and 200 bytes together, then 200 and 400: the peak of the second phase is 600."""
    ledger = Ledger()
    with ledger.window("first"):
        a, b = torch.empty(100, dtype=torch.uint8), torch.empty(50, dtype=torch.float32)
        for tensor in (a, b, b[10:]):
            ledger.add(tensor, "empty", "", "", "first")
        ledger.blocks[0].kind = "weights"
    with ledger.window("second"):
        del a
        c = torch.empty(100, dtype=torch.int32)
        ledger.add(c, "empty", "", "", "second")
    assert ledger.peak("first", "cpu")[0] == 300
    assert sizes_by_kind(ledger.peak("first", "cpu")[1]) == {"weights": 100, "passing": 200}
    size, alive = ledger.peak("second", "cpu")
    assert (size, sorted(block.size for block in alive)) == (600, [200, 400])
    assert ledger.peak("second", "cuda") == (0, [])


def test_values_computed_from_host_data_are_known() -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = Meter({}, cuda=False)
    data = torch.tensor([3, 0, 5])
    with fake, meter:
        doubled = data * 2 + torch.arange(3)
        found = doubled.nonzero()
        assert known(doubled).tolist() == [6, 1, 12]  # type: ignore[union-attr]
        assert found.shape == (3, 1)
        assert (data * 1)[data > 0].shape == (2,)
        unknown = torch.empty(3)
        assert known(unknown + 1) is None
        assert unknown.nonzero().shape == (3, 1)  # not known: all of them
    assert not meter.waits  # nothing is on a GPU
    assert sum(meter.guesses.values()) == 1


def test_writing_an_unknown_value_makes_every_view_unknown() -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, Meter({}, cuda=False):
        total = torch.zeros(4)
        part = total[:2]
        part += 1
        assert known(total).tolist() == [1, 1, 0, 0]  # type: ignore[union-attr]
        part += torch.empty(2)
        assert known(total) is None
        assert known(part) is None
