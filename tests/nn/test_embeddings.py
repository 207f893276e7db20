"""Tables are tables, however few their symbols. Positions: the sinusoids and rotations are their formulas, and turned
mixtures see differences of positions alone.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mgk
from mgk.nn import MixtureAttention, RotaryPositions, Rotation, SinusoidalPositions
from mgk.nn.embeddings import SMALL_VOCABULARY, Embedding, rotate
from tests.nn.common import EXACT, KINDS, make, normal

HEAD, TURNING = 8, 4
ROTARY = {"embed_dim": 16, "num_heads": 2, "rotary_dim": TURNING}
relative = pytest.mark.parametrize(
    "kind", ["softmax", "mgk", "mgk-hard", "mgk-em", "smgk", "smgk-hard", "smgk-variance"]
)


def rotation(positions: Tensor, head_dim: int = HEAD, rotary_dim: int = TURNING) -> Rotation:
    module = RotaryPositions(head_dim, rotary_dim)
    return module(positions, torch.float64)  # type: ignore[no-any-return]


def turned(x: Tensor, positions: Tensor, rotary_dim: int = TURNING) -> Tensor:
    """The entries a and a + D/2 as one complex number, times exp(i angle)."""
    planes = x.shape[-1] // 2
    turning = rotary_dim // 2
    frequency = torch.zeros(planes, dtype=torch.float64)
    frequency[:turning] = 10_000.0 ** (-torch.arange(turning, dtype=torch.float64) / turning)
    result = torch.complex(x[..., :planes], x[..., planes:]) * torch.exp(1j * positions[..., None] * frequency)
    return torch.cat([result.real, result.imag], -1)


@pytest.mark.parametrize("shape", [(6,), (3, 7), (2, 64), (0,)])
@pytest.mark.parametrize("vocabulary", [5, SMALL_VOCABULARY, SMALL_VOCABULARY + 1])
def test_embedding_equals_pytorch(shape: tuple[int, ...], vocabulary: int) -> None:
    """Rows and gradients, of a table of few symbols and of many; symbols that do not occur get zero."""
    tokens = torch.randint(0, vocabulary - 1, shape, generator=torch.Generator().manual_seed(0))
    results = []
    for kind in (Embedding, nn.Embedding):
        module = kind(vocabulary, 3, dtype=torch.float64)
        module.load_state_dict({"weight": normal(vocabulary, 3)})
        output = module(tokens)
        torch.autograd.backward(output, normal(*shape, 3, seed=1))
        results.append([output, module.weight.grad])
    torch.testing.assert_close(results[0], results[1], **EXACT)


def test_small_vocabulary_gradient() -> None:
    """Twice, and by torch.func, as any table does; the tokens are not sorted on the way."""
    module, tokens = Embedding(5, 3, dtype=torch.float64), torch.tensor([[4, 0, 0], [2, 4, 1]])

    def look_up(table: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": table}, tokens)  # type: ignore[no-any-return]

    table = normal(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(look_up, table)
    assert torch.autograd.gradgradcheck(look_up, table)

    def loss(table: Tensor) -> Tensor:
        return (look_up(table) * normal(2, 3, 3)).sum()

    torch.testing.assert_close(torch.func.grad(loss)(table.detach()), torch.autograd.grad(loss(table), table)[0])
    with torch.profiler.profile() as seen:
        torch.autograd.backward(loss(table))
    assert not any("embedding_dense_backward" in event.key for event in seen.key_averages())


def test_sinusoids() -> None:
    positions = torch.tensor([0, 1, 7, 300])
    rows = SinusoidalPositions(6)(positions, torch.float64)
    for position, row in zip(positions.tolist(), rows, strict=True):
        angles = [position / 10_000 ** (a / 3) for a in range(3)]
        expected = torch.tensor([math.sin(x) for x in angles] + [math.cos(x) for x in angles], dtype=torch.float64)
        torch.testing.assert_close(row, expected, **EXACT)


@pytest.mark.parametrize("shape", [(2, 3, 5, HEAD), (2, 3, 2, 5, HEAD)])
def test_rotation_is_a_complex_product(shape: tuple[int, ...]) -> None:
    x, positions = normal(*shape), torch.tensor([[0, 1, 2, 3, 4], [9, 3, 0, 1, 50]])
    expected = turned(x, positions.view(2, *(1,) * (len(shape) - 3), 5))
    torch.testing.assert_close(rotate(x, rotation(positions)), expected, **EXACT)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"smgk-positions", "smgk-means"}))
def test_queries_and_keys_are_rotated_and_shifts_are_not(kind: str) -> None:
    """The weights are those of `mgk.attention_weights` on turned queries and keys and a shift with zeros in between."""
    module, x = make(kind, **ROTARY), normal(2, 5, 16)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    output, weights = module(x, rotary=rotation(positions), need_weights=True, average_attn_weights=False)
    where = positions[:, None]
    q = turned(module.query_proj(x).unflatten(-1, (2, HEAD)).transpose(1, 2), where)
    k = module.key_proj(x)
    if module.variant in ("mgk", "mlk"):
        k = turned(k.unflatten(-1, (2, module.num_components, HEAD)).permute(0, 2, 3, 1, 4), where[:, None])
    else:
        k = turned(k.unflatten(-1, (2, HEAD)).transpose(1, 2), where)
    if module.shift is not None:
        assert module.shift.shape[-1] == HEAD - TURNING
        shift = torch.zeros(2, module.num_components, HEAD, dtype=torch.float64)
        shift[..., [2, 3, 6, 7]] = module.shift.detach()  # planes 0 and 1 turn: entries 0, 1, 4 and 5
        torch.testing.assert_close(module.key_shift, shift, rtol=0, atol=0)
    if module.variant in ("mgk", "smgk"):
        variance = None if module.log_variance is None else module.log_variance.exp()
        expected = mgk.attention_weights(
            q, k, module.log_prior, shift=module.key_shift, variance=variance, e_step=module.e_step
        )
        torch.testing.assert_close(weights, expected, **EXACT)
    elif module.variant == "softmax":
        torch.testing.assert_close(weights, (q @ k.mT / HEAD**0.5).softmax(-1), **EXACT)
    v = module.value_proj(x).unflatten(-1, (2, HEAD)).transpose(1, 2)  # the values do not turn
    torch.testing.assert_close(output, module.out_proj((weights @ v).transpose(1, 2).flatten(2)), **EXACT)


def test_half_precision_model_has_float32_angles() -> None:
    """In bfloat16 the position 1001 is 1000; only the cosines and sines may be rounded."""
    positions = torch.tensor([[1001, 4095]])
    half = RotaryPositions(HEAD, TURNING).bfloat16()(positions, torch.bfloat16)
    for part, expected in zip(half, rotation(positions), strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=2**-8, atol=2**-8)


@relative
@pytest.mark.parametrize("is_causal", [False, True])
def test_only_differences_of_positions_matter(kind: str, is_causal: bool) -> None:
    module, x = make(kind, **ROTARY), normal(2, 6, 16)
    positions = torch.arange(6)[None]
    near, far, other = (
        module(x, rotary=rotation(p), is_causal=is_causal)[0] for p in (positions, positions + 1000, 2 * positions)
    )
    torch.testing.assert_close(near, far, **EXACT)
    assert (near - other).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk", "linear", "smlk"])
def test_steps_with_a_cache(kind: str) -> None:
    module, x = make(kind, **ROTARY), normal(2, 6, 16)
    positions, cache = torch.arange(6)[None], module.new_cache(2)
    steps = [
        module(x[:, part], rotary=rotation(positions[:, part]), cache=cache)[0]
        for part in (slice(0, 3), slice(3, 4), slice(4, 6))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), module(x, rotary=rotation(positions), is_causal=True)[0], **EXACT)


BUILD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rotary_dim": 2.0}, TypeError, "rotary_dim: expected an integer, got float 2.0"),
    ({"rotary_dim": 3}, ValueError, "rotary_dim: expected an even number up to head_dim = 8, itself even, got 3"),
    ({"rotary_dim": 10}, ValueError, "rotary_dim: expected an even number up to head_dim = 8"),
    (
        {"rotary_dim": 8, "variant": "smgk"},
        ValueError,
        "rotary_dim: expected less than head_dim = 8 for variant 'smgk'",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), BUILD)
def test_constructor(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixtureAttention(16, 2, **({"variant": "softmax"} | options))


def test_calls() -> None:
    x, turn = normal(2, 5, 16), rotation(torch.arange(5)[None])
    module, plain = make("smgk", **ROTARY), make("smgk", embed_dim=16, num_heads=2)
    with pytest.raises(TypeError, match="rotary: expected a Rotation for a module with rotary_dim = 4, got NoneType"):
        module(x)
    with pytest.raises(ValueError, match="rotary: expected None for a module without rotary_dim, got Rotation"):
        plain(x, rotary=turn)
    with pytest.raises(ValueError, match="rotary: expected self-attention"):
        module(x, x + 1, rotary=turn)
    with pytest.raises(ValueError, match=r"rotary.cos: expected shape \(B,Nq,D\) = \(1, 4, 8\), got \(1, 5, 8\)"):
        module(x[:, :4], rotary=turn)
    with pytest.raises(ValueError, match="width: expected an even number"):
        SinusoidalPositions(5)
