"""What a rehearsal computes with: stand-ins for Transformer Engine's kernels, and the ledger of storages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bapo_rehearsal.fake.ledger import Ledger, sizes_by_kind
from bapo_rehearsal.fake.meter import Meter
from bapo_rehearsal.fake.values import known
from bapo_rehearsal.transformer_engine import installation  # noqa: F401  it fills the table
from bapo_rehearsal.transformer_engine.extension import KERNELS, MaskType
from bapo_rehearsal.transformer_engine.layers import positions_of

BOUNDS = (0, 3, 8)
"""Two documents."""
BFLOAT16, FLOAT32 = 4, 2
NOTHING = torch.empty(0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gemm(a: Tensor, transposed_a: bool, b: Tensor, transposed_b: bool, **rest: Any) -> Any:
    names = {"out": None, "bias": None, "is_grad": False, "accumulate": False, **rest}
    operands = (a, transposed_a, b, transposed_b, names["out"], None, None, names["bias"], BFLOAT16, False)
    ends = (None, names["is_grad"], NOTHING, 0, names["accumulate"], False)
    return KERNELS["generic_gemm"](*operands, *ends)


def test_linear_layer_gemms_by_hand() -> None:
    """y = x W^T + b of x [1, 2], W [3, 2]; then the gradients of x, of W and of b."""
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4], [5, 6], [7, 8]]), torch.ones(3)
    y, none, _, _ = gemm(weight, True, x, False, bias=bias)
    assert y.tolist() == [[12.0, 18.0, 24.0]]
    assert none is None
    grad = torch.tensor([[1.0, 0.0, 2.0]])
    assert gemm(weight, False, grad, False)[0].tolist() == [[17.0, 20.0]]
    held = torch.ones(3, 2)
    out, grad_bias, _, _ = gemm(x, False, grad, True, out=held, bias=bias, is_grad=True, accumulate=True)
    assert out is held
    assert held.tolist() == [[2.0, 3.0], [1.0, 1.0], [3.0, 5.0]]
    assert grad_bias.tolist() == [1.0, 0.0, 2.0]


def test_rms_norm() -> None:
    x = torch.tensor([[3.0, 4.0]])
    out, mean, inverse = KERNELS["rmsnorm_fwd"](
        x, torch.tensor([1.0, 2.0]), 0.0, None, None, FLOAT32, 0, False
    )
    assert mean is None
    assert inverse.item() == pytest.approx(1 / math.sqrt(12.5))
    assert out[0].tolist() == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])
    x = torch.randn(5, 8, generator=generator(), requires_grad=True)
    weight = torch.randn(8, generator=generator(1), requires_grad=True)
    grad = torch.randn(5, 8, generator=generator(2))
    expected = F.rms_norm(x, (8,), weight, 1e-6)
    expected.backward(grad)
    value, _, inverse = KERNELS["rmsnorm_fwd"](
        x.detach(), weight.detach(), 1e-6, None, None, FLOAT32, 0, False
    )
    torch.testing.assert_close(value, expected.detach())
    grads = KERNELS["rmsnorm_bwd"](grad, x.detach(), inverse, weight.detach(), 0, False)
    torch.testing.assert_close(grads, [x.grad, weight.grad])


@pytest.mark.parametrize(
    ("size", "rank", "positions"),
    [(1, 0, [*range(8), *range(4)]), (2, 0, [0, 1, 6, 7, 0, 3]), (2, 1, [2, 3, 4, 5, 1, 2])],
)
def test_positions_under_context_parallelism_by_hand(size: int, rank: int, positions: list[int]) -> None:
    assert positions_of(torch.tensor([0, 8, 12]), size, rank).tolist() == positions


def test_rope_rotates_forward_and_back() -> None:
    freqs = (torch.arange(3.0) * math.pi / 2)[:, None].expand(3, 2)[
        :, None, None
    ]  # position p by p x 90 degrees
    x = torch.tensor([1.0, 0.0, 5.0]).expand(3, 1, 3).contiguous()  # the third is not turned
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    turned = KERNELS["fused_rope_forward"](x, freqs, None, "thd", False, bounds, 1, 0)
    expected = torch.tensor([[1.0, 0.0, 5.0], [0.0, 1.0, 5.0], [-1.0, 0.0, 5.0]])[:, None]
    torch.testing.assert_close(turned, expected, atol=1e-6, rtol=0)
    for start in ((), (None,)):  # 2.11, and later with start positions
        back = KERNELS["fused_rope_backward"](turned, freqs, *start, "thd", False, bounds, 1, 0)
        torch.testing.assert_close(back, x, atol=1e-6, rtol=0)


def attention_inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries of four heads, and keys and values of two."""
    return [torch.randn(8, heads, 16, generator=generator(heads), dtype=dtype) for heads in (4, 2, 2)]


def forward(mask: MaskType, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> list[Tensor]:
    """As 2.11 calls it."""
    before = (5, 5, True, 0.25, 0.0, True, None, None, mask, None, (-1, 0), bounds, bounds)
    return KERNELS["fused_attn_fwd"](*before, q, k, v, None, bounds, bounds, *[None] * 10)


def backward(mask: MaskType, inputs: list[Tensor], out: Tensor, saved: list[Tensor], grad: Tensor) -> Any:
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    before = (5, 5, 0.25, 0.0, True, None, None, mask, None, (-1, 0), False, bounds, bounds)
    return KERNELS["fused_attn_bwd"](
        *before, *inputs, out, grad, None, None, saved, bounds, bounds, *[None] * 4
    )


@pytest.mark.parametrize("causal", [True, False])
def test_attention_within_documents(causal: bool) -> None:
    mask = MaskType.NVTE_PADDING_CAUSAL_MASK if causal else MaskType.NVTE_PADDING_MASK
    inputs = [x.requires_grad_() for x in attention_inputs()]
    parts = []
    for start, end in ((0, 3), (3, 8)):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in inputs)
        part = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.25, enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    expected = torch.cat(parts)
    grad = torch.randn(8, 4, 16, generator=generator(9))
    expected.backward(grad)
    plain = [x.detach() for x in inputs]
    out, lse, state = forward(mask, *plain, torch.tensor(BOUNDS, dtype=torch.int32))
    torch.testing.assert_close(out, expected.detach())
    assert lse.shape == (8, 4, 1)
    assert lse[0, 0, 0].item() == pytest.approx(
        float(plain[0][0, 0] @ plain[1][0, 0]) * 0.25 if causal else float(_scores(plain).logsumexp(0))
    )
    assert state.shape == (2,)
    grads = backward(mask, plain, out, [lse], grad)
    torch.testing.assert_close(grads[:3], [x.grad for x in inputs])


def _scores(inputs: list[Tensor]) -> Tensor:
    """Of the first query's first head, with the keys of its document."""
    return inputs[1][:3, 0] @ inputs[0][0, 0] * 0.25


def test_context_parallel_halves_of_documents() -> None:
    """Of documents 0..4 and 4..6; what a rank of the ring reads, and where it adds."""
    bounds, x = torch.tensor([0, 4, 6]), torch.arange(6.0)[:, None, None]
    read = KERNELS["thd_read_half_tensor"]
    assert read(x, bounds, 0).flatten().tolist() == [0, 1, 4]
    assert read(torch.stack([x, 10 + x]), bounds, 1).flatten().tolist() == [2, 3, 5, 12, 13, 15]
    grad = torch.ones(6, 1, 1)
    KERNELS["thd_grad_correction"](grad, torch.tensor([5.0, 6, 7])[:, None, None], bounds, "none", "copy")
    assert grad.flatten().tolist() == [1, 1, 5, 6, 1, 7]
    KERNELS["thd_grad_correction"](grad, x, bounds, "add", "copy")
    assert grad.flatten().tolist() == [1, 2, 2, 3, 5, 5]
    lse = torch.zeros(1, 6)
    KERNELS["thd_second_half_lse_correction"](lse, torch.zeros(1, 3), bounds, True)
    assert lse[0].tolist() == pytest.approx([0, 0, math.log(2), math.log(2), 0, math.log(2)])
    assert KERNELS["thd_read_second_half_lse"](lse, bounds, True, 4)[0].tolist() == pytest.approx(
        [math.log(2)] * 3 + [0]
    )


@pytest.mark.parametrize("since_2_20", [True, False])
def test_partial_attention_outputs_are_merged(since_2_20: bool) -> None:
    """Equal log-sum-exps in both steps: half of each."""
    bounds, lse = torch.tensor([0, 2]), torch.full((1, 2), math.log(2))
    step, step_lse = torch.tensor([4.0, 8.0])[:, None, None], torch.zeros(1, 2)
    out = torch.full((2, 1, 1), 2.0) if since_2_20 else torch.full((2, 1, 1), 1.0)
    before = (step_lse,) if since_2_20 else ()
    KERNELS["thd_out_correction"](out, step, *before, lse, step_lse, bounds, False, True)
    assert out.flatten().tolist() == pytest.approx([3, 5])


def test_fused_adam_equals_torch_adamw() -> None:
    ours = torch.randn(7, generator=generator())
    theirs = ours.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    first, second = torch.zeros(7), torch.zeros(7)
    for step in (1, 2, 3):
        theirs.grad = torch.randn(7, generator=generator(step))
        optimizer.step()
        lists = [[theirs.grad], [ours], [first], [second]]
        KERNELS["multi_tensor_adam"](65536, NOTHING, lists, 0.1, 0.9, 0.95, 1e-8, step, 1, 1, 0.01)
    torch.testing.assert_close(ours, theirs.detach())


def test_multi_tensor_norm_and_scale_by_hand() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    norm, each = KERNELS["multi_tensor_l2norm"](65536, NOTHING, [tensors], True)
    assert norm.tolist() == [5.0]
    assert each.tolist() == [3.0, 4.0]
    KERNELS["multi_tensor_scale"](65536, NOTHING, [tensors, tensors], 0.5)
    assert [x.tolist() for x in tensors] == [[1.5], [0.0, 2.0]]


def test_fake_tensors_get_output_shapes_without_reads() -> None:
    """What a rehearsal allocates is what the compiled kernel returns; there is no value to read."""
    real = attention_inputs(torch.bfloat16)
    expected = forward(MaskType.NVTE_PADDING_CAUSAL_MASK, *real, torch.tensor(BOUNDS, dtype=torch.int32))
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in real)
        bounds, freqs = torch.empty(3, dtype=torch.int32, device="cuda:0"), torch.empty(8, 1, 1, 16)
        found = forward(MaskType.NVTE_PADDING_CAUSAL_MASK, q, k, v, bounds)
        half = KERNELS["thd_read_half_tensor"](q, bounds, 1)
        turned = KERNELS["fused_rope_forward"](q, freqs, None, "thd", False, bounds, 2, 1)
        flat, bias = (torch.empty(*shape, device="cuda:0") for shape in ((8, 16), (16,)))
        product, grad, _, _ = gemm(flat, False, flat, True, bias=bias, is_grad=True)
    assert {x.device for x in (*found, half, turned, product, grad)} == {torch.device("cuda:0")}
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert (half.shape, turned.shape) == ((4, 4, 16), (8, 4, 16))
    assert (product.shape, grad.shape) == ((16, 16), (16,))


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


def test_a_view_keeps_its_storage_alive() -> None:
    ledger = Ledger()
    tensor = torch.empty(64, dtype=torch.uint8)
    ledger.add(tensor, "empty", "", "", "")
    part = tensor[:1]
    del tensor
    with ledger.window("later"):
        pass
    assert ledger.peak("later", "cpu")[0] == 64
    del part
    with ledger.window("last"):
        pass
    assert ledger.peak("last", "cpu")[0] == 0


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
