"""The denoising pass: a block sees itself both ways and its clean prefix, and leaves the cache as it was."""

import pytest
import torch
from denoising_oracle import Oracle
from random_clover import ADDED, cached_tensors, filled_cache, random_clover, tokens
from transformers import DynamicCache, StaticCache

EXACT = 5e-5  # fp32 against fp64 loops; logits have a standard deviation of 1
ONLY = {"full_attention": ["full_attention"], "linear_attention": ["linear_attention"]}


@torch.no_grad()
def denoised(model, prefix: torch.Tensor, block: torch.Tensor, **options) -> torch.Tensor:
    """Logits (B, T, V) of blocks after their prefixes (B, P)."""
    return model(block, is_causal=False, past_key_values=filled_cache(model, prefix), **options).logits


# ---- the right numbers -------------------------------------------------------------------------------------


def test_the_oracle_is_transformers_own_model_where_there_is_no_block(stock_model, clover_model):
    ids = tokens(1, 70)
    with torch.no_grad():
        stock_logits = stock_model(ids).logits[0]
    assert (stock_logits - Oracle(clover_model).logits(ids[0].tolist(), [])).abs().max() < EXACT


@pytest.mark.parametrize(
    ("length", "width"), [(0, 1), (0, 32), (1, 32), (2, 7), (3, 5), (4, 1), (31, 33), (64, 32), (100, 32)]
)
def test_the_logits_are_those_of_a_plain_forward_over_prefix_and_block(length, width, clover_model):
    prefix, block = tokens(1, length), tokens(1, width, seed=1)
    block[:, ::2] = clover_model.config.mask_token_id
    expected = Oracle(clover_model).logits(prefix[0].tolist(), block[0].tolist())[length:]
    assert (denoised(clover_model, prefix, block)[0] - expected).abs().max() < EXACT


@pytest.mark.parametrize("gdn_layers", [0, 2])
def test_the_logits_are_right_in_other_stacks_of_layers(gdn_layers):
    layer_types = ["linear_attention"] * gdn_layers + ["full_attention"]
    model = random_clover(layer_types=layer_types, num_hidden_layers=len(layer_types))
    prefix, block = tokens(1, 20), tokens(1, 32, seed=1)
    expected = Oracle(model).logits(prefix[0].tolist(), block[0].tolist())[20:]
    assert (denoised(model, prefix, block)[0] - expected).abs().max() < EXACT


@pytest.mark.parametrize("chunks", [(20, 20, 20), (1, 58, 1), (32, 28)])
def test_it_does_not_matter_how_the_prefix_was_cached(chunks, clover_model):
    prefix, block = tokens(1, 60), tokens(1, 32, seed=1)
    cache = DynamicCache(config=clover_model.config)
    with torch.no_grad():
        for chunk in prefix.split(chunks, dim=1):
            clover_model(chunk, past_key_values=cache, use_cache=True)
        got = clover_model(block, is_causal=False, past_key_values=cache).logits
    assert (got - denoised(clover_model, prefix, block)).abs().max() < 2e-4


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("trunk", [False, True])
def test_the_cache_is_read_under_both_names(name, trunk, clover_model):
    prefix, block = tokens(1, 20), tokens(1, 8, seed=1)
    part = clover_model.model if trunk else clover_model
    with torch.no_grad():
        out = part(block, is_causal=False, **{name: filled_cache(clover_model, prefix)})
        got = clover_model.lm_head(out.last_hidden_state) if trunk else out.logits
    assert torch.equal(got, denoised(clover_model, prefix, block))


def test_the_positions_continue_those_of_the_prefix(clover_model):
    prefix, block = tokens(2, 20), tokens(2, 8, seed=1)
    by_default = denoised(clover_model, prefix, block)
    explicit = denoised(clover_model, prefix, block, position_ids=torch.arange(20, 28).expand(2, -1))
    elsewhere = denoised(clover_model, prefix, block, position_ids=torch.arange(8).expand(2, -1))
    assert torch.equal(by_default, explicit)
    assert (by_default - elsewhere).abs().max() > 0.01


def test_embeddings_may_be_given_in_the_place_of_tokens(clover_model):
    prefix, block = tokens(2, 20), tokens(2, 8, seed=1)
    cache, embeddings = filled_cache(clover_model, prefix), clover_model.get_input_embeddings()(block)
    with torch.no_grad():
        got = clover_model(inputs_embeds=embeddings, is_causal=False, past_key_values=cache).logits
    assert torch.equal(got, denoised(clover_model, prefix, block))


def test_it_works_without_a_cache_and_makes_none(clover_model):
    block = tokens(2, 8)
    with torch.no_grad():
        out = clover_model(block, is_causal=False, use_cache=True)
    assert torch.equal(out.logits, denoised(clover_model, block[:, :0], block))
    assert out.past_key_values is None


def test_only_the_logits_that_are_asked_for_are_computed(clover_model):
    prefix, block = tokens(2, 20), tokens(2, 8, seed=1)
    whole = denoised(clover_model, prefix, block)
    masked = torch.rand(2, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    some, seen = torch.tensor([1, 6]), []
    note = lambda _, inputs: seen.append(inputs[0].shape[:-1])  # noqa: E731
    for kept, expected in [(masked, whole[masked]), (3, whole[:, -3:]), (some, whole[:, some])]:
        hook = clover_model.lm_head.register_forward_pre_hook(note)
        got = denoised(clover_model, prefix, block, logits_to_keep=kept)
        hook.remove()
        assert torch.allclose(got, expected, atol=1e-5)
        assert seen[-1] == expected.shape[:-1]


# ---- what a block depends on -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ONLY)
def test_every_row_of_a_block_depends_on_every_other_in_each_kind_of_layer(kind):
    model = random_clover(layer_types=ONLY[kind], num_hidden_layers=1)
    embeddings = model.get_input_embeddings()(tokens(1, 12)).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, is_causal=False).logits
    for t in range(12):
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), embeddings, retain_graph=True)
        assert gradient[0].abs().amax(-1).min() > 1e-4, t


@pytest.mark.parametrize("kind", ONLY)
def test_every_row_of_a_block_depends_on_every_token_of_the_prefix_in_each_kind_of_layer(kind):
    model = random_clover(layer_types=[kind, "full_attention"], num_hidden_layers=2)
    if kind == "linear_attention":
        model.model.layers[1].self_attn.o_proj.weight.data.zero_()  # it is only there to count the positions
    prefix, block = tokens(1, 10), tokens(1, 6, seed=1)
    before = denoised(model, prefix, block)
    for changed in range(10):
        other = prefix.clone()
        other[0, changed] = other[0, changed] % 62 + 1
        difference = (denoised(model, other, block) - before).abs().amax(-1)
        assert difference.min() > 1e-4, changed


def test_a_row_of_the_batch_depends_on_no_other(clover_model):
    embeddings = clover_model.get_input_embeddings()(tokens(3, 8, seed=1)).detach().requires_grad_()
    cache = filled_cache(clover_model, tokens(3, 20))
    logits = clover_model(inputs_embeds=embeddings, is_causal=False, past_key_values=cache).logits
    logits[1].square().sum().backward()
    assert embeddings.grad[1].abs().min() > 0
    assert embeddings.grad[[0, 2]].count_nonzero() == 0
    # ... and on no other's prefix.
    prefix, block = tokens(3, 20), tokens(3, 8, seed=1)
    other = prefix.clone()
    other[[0, 2]] = tokens(2, 20, seed=2)
    before, after = denoised(clover_model, prefix, block), denoised(clover_model, other, block)
    assert (after[1] - before[1]).abs().max() < 1e-5
    assert (after[0] - before[0]).abs().max() > 0.1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", ["by column", "true"])
def test_a_block_after_a_left_padded_prefix_has_the_logits_that_it_has_alone(positions, attention):
    model = random_clover()
    model.set_attn_implementation(attention)
    pads = [0, 5, 19, 20]  # the last one has no prefix at all
    prefix, block = tokens(4, 20), tokens(4, 32, seed=1)
    mask = torch.ones_like(prefix)
    for row, count in enumerate(pads):
        prefix[row, :count], mask[row, :count] = 0, 0
    of_prefix, of_block = {}, {}
    if positions == "true":  # it makes no difference: rotations are relative
        of_prefix["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        of_block["position_ids"] = mask.sum(-1, keepdim=True) + torch.arange(32)
    cache = filled_cache(model, prefix, attention_mask=mask, **of_prefix)
    of_block |= {"past_key_values": cache, "attention_mask": mask}
    with torch.no_grad():
        together = model(block, is_causal=False, **of_block).logits
    for row, count in enumerate(pads):
        alone = denoised(model, prefix[row : row + 1, count:], block[row : row + 1])
        assert (together[row] - alone[0]).abs().max() < 2e-4, row


def test_what_lies_under_the_padding_does_not_matter(clover_model):
    prefix, block = tokens(2, 20), tokens(2, 8, seed=1)
    mask = torch.ones_like(prefix)
    mask[0, :13] = 0
    logits = []
    for filler in (0, 42):
        prefix[0, :13] = filler
        cache = filled_cache(clover_model, prefix, attention_mask=mask)
        inputs = {"past_key_values": cache, "attention_mask": mask.bool()}
        with torch.no_grad():
            logits.append(clover_model(block, is_causal=False, **inputs).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-5


def test_a_prefix_mask_of_ones_changes_nothing(clover_model):
    prefix, block = tokens(2, 20), tokens(2, 8, seed=1)
    masked = denoised(clover_model, prefix, block, attention_mask=torch.ones(2, 20))
    assert (masked - denoised(clover_model, prefix, block)).abs().max() < 1e-5


# ---- the cache is left as it was ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 3, 32, 100])
def test_the_cache_is_bit_for_bit_the_same_afterwards(length, clover_model):
    cache = filled_cache(clover_model, tokens(2, length))
    held = cached_tensors(cache)
    before = {name: tensor.clone() for name, tensor in held.items()}
    # Two tensors in each of four layers; since transformers 5.25 a GDN layer holds its count too.
    assert len([name for name in held if "cumulative" not in name]) == (8 if length else 0)
    for width in (1, 2, 31, 32, 33):
        for padded in (False, True):
            mask = torch.ones(2, length)
            mask[0, : length // 2] = 0
            with torch.no_grad():
                out = clover_model(
                    tokens(2, width),
                    is_causal=False,
                    past_key_values=cache,
                    use_cache=True,
                    attention_mask=mask if padded else None,
                )
            after = cached_tensors(cache)
            assert out.past_key_values is cache
            assert after.keys() == held.keys()
            for name, tensor in after.items():
                assert tensor is held[name], f"{name} was replaced"
                assert torch.equal(tensor, before[name]), f"{name} after a block of {width}"
            assert cache.get_seq_length() == length
            assert cache.has_previous_state(0) == (length > 0)


def test_denoising_twice_gives_the_same_and_committing_afterwards_is_as_if_it_had_not_been(clover_model):
    prefix, block = tokens(2, 20), tokens(2, 8, seed=1)
    cache, untouched = filled_cache(clover_model, prefix), filled_cache(clover_model, prefix)
    with torch.no_grad():
        first = clover_model(block, is_causal=False, past_key_values=cache).logits
        clover_model(tokens(2, 8, seed=2), is_causal=False, past_key_values=cache)
        second = clover_model(block, is_causal=False, past_key_values=cache).logits
        after_it = clover_model(block, past_key_values=cache, use_cache=True).logits
        without_it = clover_model(block, past_key_values=untouched, use_cache=True).logits
    assert torch.equal(first, second)
    assert torch.equal(after_it, without_it)


def test_a_cache_of_fixed_size_is_read_as_a_growing_one_or_refused(clover_model):
    prefix, block = tokens(2, 20), tokens(2, 8, seed=1)
    cache = StaticCache(config=clover_model.config, max_cache_len=64)
    with torch.no_grad():
        clover_model(prefix, past_key_values=cache, use_cache=True)
        before = {name: tensor.clone() for name, tensor in cached_tensors(cache).items()}
        try:
            got = clover_model(block, is_causal=False, past_key_values=cache).logits
        except (ValueError, NotImplementedError):
            got = None
    if got is not None:
        assert (got - denoised(clover_model, prefix, block)).abs().max() < 1e-4
    for name, tensor in cached_tensors(cache).items():
        assert torch.equal(tensor, before[name]), name


# ---- training ----------------------------------------------------------------------------------------------


def test_gradients_reach_every_weight_and_are_finite():
    model = random_clover()
    cache = filled_cache(model, tokens(4, 20))
    model(tokens(4, 32, seed=1), is_causal=False, past_key_values=cache).logits.logsumexp(-1).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().max() > 1e-6, name
    for name in ADDED:
        assert getattr(model.model.layers[0].linear_attn, name).grad.count_nonzero() > 0, name


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_loses_neither_the_prefix_nor_a_gradient(reentrant):
    gradients = []
    for checkpointed in (False, True):
        model = random_clover().train()
        cache = filled_cache(model, tokens(2, 20))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        out = model(tokens(2, 8, seed=1), is_causal=False, past_key_values=cache)
        out.logits.square().sum().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, rtol=1e-3, atol=1e-3), name


# ---- implementations and precisions ------------------------------------------------------------------------


def test_sdpa_and_eager_attention_agree():
    model, prefix, block = random_clover(), tokens(2, 20), tokens(2, 32, seed=1)
    logits = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        logits.append(denoised(model, prefix, block))
    assert (logits[0] - logits[1]).abs().max() < 1e-5


def test_attention_weights_cover_the_prefix_and_the_whole_block():
    model, prefix, block = random_clover(), tokens(2, 10), tokens(2, 6, seed=1)
    model.set_attn_implementation("eager")
    mask = torch.ones(2, 10)
    mask[1, :4] = 0
    cache = filled_cache(model, prefix, attention_mask=mask)
    with torch.no_grad():
        out = model(
            block,
            is_causal=False,
            past_key_values=cache,
            attention_mask=mask,
            output_attentions=True,
            output_hidden_states=True,
            output_router_logits=True,
        )
    assert len(out.attentions) == 2
    for weights in out.attentions:
        assert weights.shape == (2, 4, 6, 16)
        assert weights[0].min() > 0
        assert weights[1, :, :, :4].count_nonzero() == 0
        assert weights[1, :, :, 4:].min() > 0
    assert [tuple(states.shape) for states in out.hidden_states] == [(2, 6, 32)] * 5
    assert [tuple(scores.shape) for scores in out.router_logits] == [(12, 8)] * 4


def test_experts_implementations_agree_in_both_passes():
    model, prefix, block = random_clover(), tokens(2, 20), tokens(2, 32, seed=1)
    results = []
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(implementation)
        assert model.config._experts_implementation == implementation
        with torch.no_grad():
            causal = model(block).logits
        coreset = denoised(model, prefix, block, expert_coreset_top_p=0.5)
        results.append(torch.stack([causal, denoised(model, prefix, block), coreset]))
    assert (results[0] - results[1]).abs().max() < 2e-5
    assert (results[0] - results[2]).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_fp32(dtype, clover_model):
    prefix, block = tokens(4, 40), tokens(4, 32, seed=1)
    half = random_clover().to(dtype)
    got, expected = denoised(half, prefix, block), denoised(clover_model, prefix, block)
    assert got.dtype == dtype
    assert got.isfinite().all()
    # Rounding moves some tokens to other experts, so the largest difference says little.
    assert (got - expected).abs().mean() < 0.05
    assert expected.std() > 0.9


def test_tuples_are_returned_where_they_are_asked_for(clover_model):
    block = tokens(1, 4)
    with torch.no_grad():
        assert torch.equal(clover_model(block, return_dict=False)[0], clover_model(block).logits)
        expected = clover_model(block, is_causal=False).logits
        assert torch.equal(clover_model(block, is_causal=False, return_dict=False)[0], expected)
        assert torch.equal(random_clover(return_dict=False)(block, is_causal=False)[0], expected)


# ---- the coreset of experts --------------------------------------------------------------------------------


def experts_used(model, prefix, block, **options) -> list[list[set[int]]]:
    """By layer and row of the batch: the experts that a denoising pass ran."""
    seen, handles, cache = [], [], filled_cache(model, prefix)
    for layer in model.model.layers:
        hook = lambda _, inputs: seen.append(inputs[1].view(len(block), -1))  # noqa: E731
        handles.append(layer.mlp.experts.register_forward_pre_hook(hook))
    with torch.no_grad():
        model(block, is_causal=False, past_key_values=cache, **options)
    for handle in handles:
        handle.remove()
    return [[set(row.tolist()) for row in indices] for indices in seen]


@pytest.mark.parametrize("top_p", [0.05, 0.4, 0.7, 0.9])
def test_with_a_coreset_the_logits_are_those_of_a_plain_forward(top_p, clover_model):
    prefix, block = tokens(2, 12), tokens(2, 32, seed=1)
    got = denoised(clover_model, prefix, block, expert_coreset_top_p=top_p)
    for row in range(2):
        oracle = Oracle(clover_model).logits(prefix[row].tolist(), block[row].tolist(), coreset_top_p=top_p)
        assert (got[row] - oracle[12:]).abs().max() < EXACT
    assert (got - denoised(clover_model, prefix, block)).abs().max() > 0.01


def test_a_coreset_of_the_whole_mass_changes_nothing(clover_model):
    prefix, block = tokens(2, 12), tokens(2, 32, seed=1)
    whole = denoised(clover_model, prefix, block, expert_coreset_top_p=1.0)
    assert (whole - denoised(clover_model, prefix, block)).abs().max() < 1e-5


def test_a_small_coreset_runs_few_experts_in_a_block_but_as_many_as_a_token_uses(clover_model):
    prefix, block = tokens(3, 12), tokens(3, 32, seed=1)
    exact, small = (experts_used(clover_model, prefix, block, expert_coreset_top_p=p) for p in (None, 1e-3))
    assert all(len(used) >= 6 for layer in exact for used in layer)
    assert all(len(used) == 2 for layer in small for used in layer)


def test_a_router_that_is_certain_stays_inside_the_coreset():
    model, prefix, block = random_clover(), tokens(2, 20), tokens(2, 32, seed=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(1000)  # all probabilities but the first are zero in fp32
    used = experts_used(model, prefix, block, expert_coreset_top_p=1e-3)
    assert all(len(row) == model.config.num_experts_per_tok for layer in used for row in layer)


def test_a_rows_coreset_is_its_own(clover_model):
    prefix, block = tokens(3, 12), tokens(3, 32, seed=1)
    together = denoised(clover_model, prefix, block, expert_coreset_top_p=0.4)
    for row in range(3):
        one = slice(row, row + 1)
        alone = denoised(clover_model, prefix[one], block[one], expert_coreset_top_p=0.4)
        assert (together[row] - alone[0]).abs().max() < 1e-5
    coresets = experts_used(clover_model, prefix, block, expert_coreset_top_p=0.4)
    assert any(layer[0] != layer[1] for layer in coresets), "rows that share a coreset would prove nothing"


def test_the_configurations_coreset_holds_unless_the_call_names_another(clover_model):
    configured, prefix, block = random_clover(expert_coreset_top_p=0.4), tokens(2, 12), tokens(2, 32, seed=1)
    assert torch.equal(
        denoised(configured, prefix, block), denoised(clover_model, prefix, block, expert_coreset_top_p=0.4)
    )
    assert torch.equal(
        denoised(configured, prefix, block, expert_coreset_top_p=0.7),
        denoised(clover_model, prefix, block, expert_coreset_top_p=0.7),
    )


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attention_mask": {"full_attention": torch.ones(2, 20)}}, "`attention_mask`.*dict.*tensor"),
        ({"attention_mask": torch.tensor([[1] * 20, [1] * 15 + [0] * 5])}, "`attention_mask`.*left"),
        ({"attention_mask": torch.tensor([[1] * 20, [0, 1, 1, 0] + [1] * 16])}, "`attention_mask`.*left"),
        ({"attention_mask": torch.ones(2, 19)}, r"`attention_mask` is \(2, 19\).*\(2, 20\)"),
        ({"attention_mask": torch.ones(2, 28)}, r"`attention_mask` is \(2, 28\).*\(2, 20\)"),
        ({"attention_mask": torch.ones(1, 20)}, r"`attention_mask` is \(1, 20\).*\(2, 20\)"),
        ({"labels": torch.ones(2, 8, dtype=torch.long)}, "`labels`"),
        ({"expert_coreset_top_p": 0.0}, r"`expert_coreset_top_p` is 0.0.*\(0, 1\]"),
        ({"expert_coreset_top_p": 1.5}, r"`expert_coreset_top_p` is 1.5.*\(0, 1\]"),
    ],
    ids=["a dict", "right padding", "a hole", "short", "with the block", "one row", "labels", "no coreset", "above 1"],
)
def test_what_a_denoising_pass_cannot_use_is_refused_by_its_name(wrong, message, clover_model):
    with pytest.raises(ValueError, match=message):
        denoised(clover_model, tokens(2, 20), tokens(2, 8), **wrong)
