"""The denoising operators of a Gated DeltaNet layer, against plain fp64 loops and transformers' own."""

import math

import pytest
import torch
from denoising_oracle import convolution, coreset, gated_delta_net, mixer
from random_clover import ADDED, random_clover, tiny_config
from transformers import DynamicCache
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock

from clover.modeling_clover import CACHE, block_conv, block_softmax_mixer, coreset_routing

WIDTHS = (1, 2, 3, 32, 33)
# What transformers' Gated DeltaNet calls its cache: the same on 5.24 as everywhere, another name on 5.19.
LAYER_CACHE = "cache" if CACHE == "cache" else "cache_params"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- the convolution ---------------------------------------------------------------------------------------


def convolution_inputs(width: int, kernel: int = 4, channels: int = 6) -> dict[str, torch.Tensor]:
    return {
        "block": torch.randn(2, channels, width),
        "ring": torch.randn(2, channels, kernel - 1),
        "taps": torch.randn(channels, kernel),
        "right": torch.randn(channels, kernel - 1),
    }


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_convolution_is_the_published_formula(width, kernel):
    inputs = convolution_inputs(width, kernel)
    got = block_conv(**inputs)
    block, ring, taps, right = (x.double() for x in inputs.values())
    for row in range(2):
        expected = convolution(ring[row].T, block[row].T, taps, right).T
        assert (got[row] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("width", WIDTHS)
def test_without_right_taps_the_convolution_is_the_causal_one(width):
    inputs = convolution_inputs(width) | {"right": torch.zeros(6, 3)}
    whole = torch.cat([inputs["ring"], inputs["block"]], dim=-1)
    causal = stock.causal_conv1d_fn(whole, inputs["taps"], activation="silu")[..., 3:]
    assert (block_conv(**inputs) - causal).abs().max() < 1e-6


# ---- the mixer ---------------------------------------------------------------------------------------------


def mixer_inputs(width: int) -> dict[str, torch.Tensor]:
    rows, heads, d_k, d_v = 2, 3, 8, 5
    return {
        "query": torch.nn.functional.normalize(torch.randn(rows, width, heads, d_k), dim=-1),
        "key": torch.nn.functional.normalize(torch.randn(rows, width, heads, d_k), dim=-1),
        "value": torch.randn(rows, width, heads, d_v),
        "g": -torch.rand(rows, width, heads) * torch.tensor([0.01, 0.3, 3.0]),
        "log_beta": torch.rand(rows, width, heads).log(),
        "state": torch.randn(rows, heads, d_k, d_v),
        "logit_scale": torch.tensor([0.5, 2.8, 6.0]),
        "history_bias": torch.tensor([-1.0, 0.0, 2.0]),
        "history_c": torch.tensor([0.0, 1.0, 0.5]),
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_the_mixer_is_the_formula_of_the_design(width):
    inputs = mixer_inputs(width)
    got = block_softmax_mixer(**inputs)
    assert got.dtype == torch.float32
    exact = {name: value.double() for name, value in inputs.items()}
    for row in range(2):
        for head in range(3):
            of_block = [exact[name][row, :, head] for name in ("query", "key", "value", "g")]
            of_head = [exact[name][head] for name in ("logit_scale", "history_bias", "history_c")]
            beta, state = exact["log_beta"][row, :, head].exp(), exact["state"][row, head]
            expected = mixer(*of_block, beta, state, *of_head)
            assert (got[row, :, head] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("width", WIDTHS)
def test_with_flat_logits_the_history_weighs_as_much_as_the_block_whatever_its_size(width):
    inputs = mixer_inputs(width)
    for name in ("g", "log_beta", "logit_scale", "history_bias"):
        inputs[name] = torch.zeros_like(inputs[name])
    inputs["history_c"] = torch.ones(3)
    history = torch.einsum("bthk,bhkv->bthv", inputs["query"], inputs["state"])
    expected = (history + inputs["value"].mean(1, keepdim=True)) / 2 / math.sqrt(8)
    assert (block_softmax_mixer(**inputs) - expected).abs().max() < 1e-5


def test_half_precision_inputs_are_mixed_in_fp32():
    inputs = mixer_inputs(32)
    halves = {name: inputs[name].half() for name in ("query", "key", "value", "g", "log_beta")}
    same_values = {name: half.float() for name, half in halves.items()}
    assert torch.equal(block_softmax_mixer(**inputs | halves), block_softmax_mixer(**inputs | same_values))


@pytest.mark.parametrize("decay", [0.0, -1e-8, -1e4])
@pytest.mark.parametrize("write", [0.0, -1e4])
def test_extreme_gates_keep_the_mixer_and_its_gradients_finite(decay, write):
    inputs = mixer_inputs(32)
    inputs["g"], inputs["log_beta"] = torch.full((2, 32, 3), decay), torch.full((2, 32, 3), write)
    for value in inputs.values():
        value.requires_grad_()
    mixed = block_softmax_mixer(**inputs)
    mixed.square().sum().backward()
    assert mixed.isfinite().all()
    assert mixed.abs().max() > 0
    for name, value in inputs.items():
        assert value.grad.isfinite().all(), name


# ---- the layer ---------------------------------------------------------------------------------------------


def layer_and_prefix(length: int, dtype: torch.dtype = torch.float32):
    """A GDN layer, the hidden states of a prefix in two rows, and the cache that they leave."""
    model = random_clover()
    layer, cache = model.model.layers[0].linear_attn.to(dtype), DynamicCache(config=model.config)
    prefix = torch.randn(2, length, model.config.hidden_size, dtype=dtype)
    if length:
        with torch.no_grad():
            layer(prefix, **{LAYER_CACHE: cache})
    return layer, prefix, cache


@pytest.mark.parametrize("width", [1, 2, 33])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 40])
def test_the_layer_reads_its_cache_as_the_formulas_say(length, width):
    layer, prefix, cache = layer_and_prefix(length)
    block = torch.randn(2, width, prefix.shape[-1])
    with torch.no_grad():
        got = layer(block, is_causal=False, **{CACHE: cache})
    weights = {name: weight.detach().double() for name, weight in layer.named_parameters()}
    for row in range(2):
        whole = torch.cat([prefix[row], block[row]]).double()
        expected = gated_delta_net(whole, weights, length, tiny_config())[length:]
        assert (got[row] - expected).abs().max() < 2e-5


def test_without_a_cache_the_layer_denoises_as_with_an_empty_one():
    layer, _, empty = layer_and_prefix(0)
    block = torch.randn(2, 8, 32)
    with torch.no_grad():
        without, with_empty = (layer(block, is_causal=False, **{CACHE: cache}) for cache in (None, empty))
    assert torch.equal(without, with_empty)


@pytest.mark.parametrize("length", [0, 5])
def test_gradients_reach_the_four_added_tensors_and_the_block(length):
    layer, _, cache = layer_and_prefix(length)
    block = torch.randn(2, 8, 32, requires_grad=True)
    layer(block, is_causal=False, **{CACHE: cache}).square().sum().backward()
    for name, tensor in [*layer.named_parameters(), ("block", block)]:
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.count_nonzero() > 0.9 * tensor.numel(), name


@pytest.mark.parametrize("decay", [-30.0, 12.0])  # of A_log; its exponential is 1e-13 and 2e5
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_gates_keep_the_layer_and_its_gradients_finite_in_every_precision(dtype, decay):
    layer, _, cache = layer_and_prefix(5, dtype)
    with torch.no_grad():
        layer.A_log.fill_(decay)
        layer.in_proj_b.weight.mul_(100)  # write gates of 0 and 1
    block = (torch.randn(2, 32, 32, dtype=dtype) * 10).requires_grad_()
    out = layer(block, is_causal=False, **{CACHE: cache})
    out.float().square().mean().backward()
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert out.abs().max() > 0
    assert block.grad.isfinite().all()
    if dtype != torch.float16:  # the scale of A_log's gradient is that of A, which fp16 does not have
        assert all(weight.grad.isfinite().all() for weight in layer.parameters())


def test_a_block_of_nothing_but_zeros_is_finite():
    layer, _, cache = layer_and_prefix(0)
    block = torch.zeros(1, 4, 32, requires_grad=True)
    out = layer(block, is_causal=False, **{CACHE: cache})
    out.sum().backward()
    assert out.isfinite().all()
    assert block.grad.isfinite().all()


def test_the_added_tensors_have_their_published_names_and_shapes():
    layer = random_clover().model.layers[0].linear_attn
    shapes = {name: tuple(weight.shape) for name, weight in layer.named_parameters() if name in ADDED}
    assert shapes == dict(zip(ADDED, [(96, 3), (4,), (4,), (4,)], strict=True))


# ---- the coreset of experts --------------------------------------------------------------------------------


@pytest.mark.parametrize("top_p", [1e-6, 0.2, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_coreset_is_the_formula_of_the_design(top_p, spread):
    router_logits, top_k = torch.randn(3, 20, 16) * spread, 3
    weights, indices = coreset_routing(router_logits, top_k, top_p)
    for row in range(3):
        probabilities = router_logits[row].double().softmax(-1)
        inside = coreset(probabilities, top_k, top_p)
        assert top_k <= len(inside) <= 16
        for t in range(20):
            chosen = sorted(inside, key=lambda e: -probabilities[t, e])[:top_k]
            assert indices[row, t].tolist() == chosen
            expected = probabilities[t, chosen] / probabilities[t, chosen].sum()
            assert (weights[row, t] - expected).abs().max() < 1e-6


def test_a_smaller_share_needs_fewer_experts_and_never_fewer_than_each_token_uses():
    router_logits = torch.randn(1, 32, 64)
    chosen = [coreset_routing(router_logits, 4, top_p)[1] for top_p in (1e-6, 0.3, 0.6, 0.9, 1.0)]
    used = [len(experts.unique()) for experts in chosen]
    assert used == sorted(used)
    assert used[0] == 4
    assert used[0] < used[1] < used[-1]


def test_the_whole_share_is_exact_routing_even_for_experts_of_hardly_any_mass():
    router_logits = torch.randn(1, 32, 16)
    router_logits[:, :, 1:] -= 17  # nearly all mass on one expert
    weights, indices = coreset_routing(router_logits, 4, 1.0)
    exact = router_logits.softmax(-1).topk(4, dim=-1)
    assert torch.equal(indices, exact.indices)
    assert torch.allclose(weights, exact.values / exact.values.sum(-1, keepdim=True))


def test_a_token_that_finds_none_of_its_experts_in_the_coreset_is_still_routed_inside_it():
    # Three tokens choose experts 0 and 1; of those the fourth's probability underflows to nothing.
    router_logits = torch.zeros(1, 4, 6)
    router_logits[0, :3, :2] = 200.0
    router_logits[0, 3, 4:] = 200.0
    weights, indices = coreset_routing(router_logits, 2, 0.5)
    assert weights.isfinite().all()
    assert set(indices[0].flatten().tolist()) == {0, 1}
    assert torch.allclose(weights[0], torch.full((4, 2), 0.5))
