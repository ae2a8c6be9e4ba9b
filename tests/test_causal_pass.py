"""The causal pass is `Qwen3_5MoeForCausalLM`. Both models have the same weights, in fp32."""

import pytest
import torch
from random_clover import ADDED, filled_cache, random_clover, tokens
from transformers import DynamicCache, GenerationConfig, GenerationMixin, StaticCache

CACHED = 2e-4  # the chunked kernel of the GDN layers rounds by where its chunks lie
IDS = tokens(2, 110)
CHUNKS = (1, 5, 32, 2, 64, 3, 1, 1, 1)
PADS = [0, 7, 19]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def padded_batch(length: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of unequal lengths, padded on the left."""
    ids, mask = tokens(len(PADS), length), torch.ones(len(PADS), length, dtype=torch.long)
    for row, pads in enumerate(PADS):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return ids, mask


def chunked_logits(model, ids: torch.Tensor, name: str = "past_key_values", cache=None) -> torch.Tensor:
    cache = DynamicCache(config=model.config) if cache is None else cache
    passes = [model(chunk, use_cache=True, **{name: cache}) for chunk in ids.split(CHUNKS, dim=1)]
    return torch.cat([out.logits for out in passes], dim=1)


# ---- the same numbers as the stock model -------------------------------------------------------------------


def test_without_a_cache_the_logits_are_the_stock_models_exactly(clover_model, stock_model):
    expected = stock_model(IDS).logits
    assert expected.std() > 0.5, "the weights are too small for this comparison to mean anything"
    assert torch.equal(clover_model(IDS).logits, expected)


def test_every_output_is_the_stock_models_exactly(clover_model, stock_model):
    wanted = {"labels": IDS, "output_hidden_states": True, "output_router_logits": True, "use_cache": True}
    ours, theirs = clover_model(IDS, is_causal=True, **wanted), stock_model(IDS, **wanted)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.aux_loss, theirs.aux_loss)
    for name in ("hidden_states", "router_logits"):
        assert len(ours[name]) == len(theirs[name]) > 0
        assert all(map(torch.equal, ours[name], theirs[name])), name
    assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length() == IDS.shape[1]


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 4, 109])], ids=["last", "last three", "indices"])
def test_the_logits_to_keep_are_the_stock_models(kept, clover_model, stock_model):
    ours, theirs = (model(IDS, logits_to_keep=kept).logits for model in (clover_model, stock_model))
    assert torch.equal(ours, theirs)


def test_embeddings_may_be_given_in_the_place_of_tokens(clover_model, stock_model):
    embeddings = stock_model.get_input_embeddings()(IDS)
    assert torch.equal(clover_model(inputs_embeds=embeddings).logits, stock_model(IDS).logits)


def test_cached_in_chunks_the_logits_are_the_stock_models_in_the_same_chunks(clover_model, stock_model):
    assert torch.equal(chunked_logits(clover_model, IDS), chunked_logits(stock_model, IDS))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cached_in_uneven_chunks_the_logits_are_those_of_one_pass(name, clover_model, stock_model):
    difference = chunked_logits(clover_model, IDS, name) - stock_model(IDS).logits
    assert difference.abs().max() <= CACHED


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_trunk_takes_a_cache_under_both_names(name, clover_model, stock_model):
    cache = DynamicCache(config=clover_model.config)
    for chunk in IDS.split(CHUNKS, 1):
        hidden = clover_model.model(chunk, use_cache=True, **{name: cache}).last_hidden_state
    assert cache.get_seq_length() == IDS.shape[1]
    expected = stock_model.model(IDS).last_hidden_state[:, -1:]
    assert (hidden - expected).abs().max() <= CACHED


def test_a_cache_of_fixed_size_serves_the_causal_pass(clover_model, stock_model):
    cache = StaticCache(config=clover_model.config, max_cache_len=128)
    difference = chunked_logits(clover_model, IDS, cache=cache) - stock_model(IDS).logits
    assert difference.abs().max() <= CACHED


def test_transformers_own_loop_over_the_causal_pass_writes_the_stock_models_tokens(clover_model, stock_model):
    # It hands the cache on under the name of its version: without it, it would silently write others.
    budget = GenerationConfig(max_new_tokens=12, do_sample=False)
    ours = GenerationMixin.generate(clover_model, IDS[:, :20], generation_config=budget)
    assert torch.equal(ours, stock_model.generate(IDS[:, :20], generation_config=budget))
    assert len(set(ours[0, 20:].tolist())) > 3


# ---- padding -----------------------------------------------------------------------------------------------


def test_a_left_padded_batch_has_the_stock_models_logits_exactly(clover_model, stock_model):
    ids, mask = padded_batch()
    ours, theirs = (model(ids, attention_mask=mask).logits for model in (clover_model, stock_model))
    assert torch.equal(ours, theirs)


def test_a_left_padded_row_has_the_logits_that_it_has_alone(clover_model):
    ids, mask = padded_batch()
    together = clover_model(ids, attention_mask=mask).logits
    for row, pads in enumerate(PADS):
        alone = clover_model(ids[row : row + 1, pads:]).logits
        assert (together[row, pads:] - alone[0]).abs().max() <= CACHED


def test_a_left_padded_row_has_the_logits_that_it_has_alone_when_it_is_cached(clover_model):
    ids, mask = padded_batch()
    cache = filled_cache(clover_model, ids[:, :22], attention_mask=mask[:, :22])
    together = clover_model(ids[:, 22:], attention_mask=mask, past_key_values=cache).logits
    for row, pads in enumerate(PADS):
        alone = clover_model(ids[row : row + 1, pads:]).logits
        assert (together[row] - alone[0, -8:]).abs().max() <= CACHED


# ---- what denoising adds does not reach it -----------------------------------------------------------------


def test_the_four_added_tensors_do_not_take_part(stock_model):
    model = random_clover()
    added = [weight for name, weight in model.named_parameters() if name.endswith(ADDED)]
    assert len(added) == 4 * model.config.layer_types.count("linear_attention")
    for weight in added:
        weight.fill_(float("nan"))
    assert torch.equal(model(IDS).logits, stock_model(IDS).logits)


def test_a_coreset_in_the_configuration_does_not_take_part(stock_model):
    assert torch.equal(random_clover(expert_coreset_top_p=0.1)(IDS).logits, stock_model(IDS).logits)


def test_a_coreset_asked_of_it_is_refused(clover_model):
    with pytest.raises(ValueError, match="`expert_coreset_top_p` is 0.5.*causal"):
        clover_model.model(IDS, expert_coreset_top_p=0.5)
    with pytest.raises(ValueError, match="`expert_coreset_top_p` is 0.5.*causal"):
        clover_model(IDS, expert_coreset_top_p=0.5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant, stock_model):
    with torch.enable_grad():
        gradients = []
        for checkpointed in (False, True):
            model = random_clover().train()
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model(IDS, labels=IDS, is_causal=True, use_cache=False).loss.backward()
            gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    plain, checkpointed = gradients
    for name, gradient in plain.items():
        if not name.endswith(ADDED):
            assert torch.allclose(checkpointed[name], gradient, atol=1e-6), name
