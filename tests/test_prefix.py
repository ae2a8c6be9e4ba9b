"""The three verbs through which the generation loop drives a model: prefill, denoise, commit."""

import pytest
import torch
from random_clover import cached_tensors, filled_cache, tokens

TOLERANCE = 2e-4  # cached, see test_causal_pass.py
PADS = [0, 3, 12]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def everything(rows: int, width: int) -> torch.Tensor:
    return torch.ones(rows, width, dtype=torch.bool)


def padded_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, pads in enumerate(PADS):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return ids, mask


def test_a_prompt_is_prefilled_then_blocks_are_denoised_and_committed(clover_model):
    prompt, first, second = tokens(2, 11), tokens(2, 8, seed=1), tokens(2, 8, seed=2)
    prefix = clover_model.prefill(prompt, torch.ones_like(prompt))
    known = [prompt]
    for block in (first, second):
        cache = filled_cache(clover_model, torch.cat(known, dim=1))
        expected = clover_model(block, is_causal=False, past_key_values=cache).logits
        got = clover_model.denoise(prefix, block, everything(2, 8))
        assert (got.view(expected.shape) - expected).abs().max() < TOLERANCE
        prefix = clover_model.commit(prefix, block)
        known.append(block)
    assert prefix.mask.shape == (2, 27)
    assert prefix.mask.all()
    assert prefix.cache.get_seq_length() == 27


def test_only_masked_positions_have_logits_row_after_row(clover_model):
    prefix = clover_model.prefill(tokens(2, 5), torch.ones(2, 5, dtype=torch.long))
    block, masked = tokens(2, 4, seed=1), torch.tensor([[1, 0, 0, 1], [0, 0, 1, 0]]).bool()
    whole = clover_model.denoise(prefix, block, everything(2, 4)).view(2, 4, -1)
    got = clover_model.denoise(prefix, block, masked)
    assert got.shape == (3, 64)
    assert (got - torch.stack([whole[0, 0], whole[0, 3], whole[1, 2]])).abs().max() < 1e-5


def test_denoising_leaves_the_prefix_bit_for_bit_as_it_was(clover_model):
    ids, mask = padded_prompts()
    prefix = clover_model.prefill(ids, mask)
    before = {name: tensor.clone() for name, tensor in cached_tensors(prefix.cache).items()}
    for width in (1, 8, 33):
        clover_model.denoise(prefix, tokens(3, width), everything(3, width))
    after = cached_tensors(prefix.cache)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(prefix.mask, mask)


def test_an_empty_prompt_is_an_empty_prefix(clover_model):
    nothing = torch.zeros(2, 0, dtype=torch.long)
    prefix, block = clover_model.prefill(nothing, nothing), tokens(2, 8)
    expected = clover_model(block, is_causal=False).logits
    assert torch.equal(clover_model.denoise(prefix, block, everything(2, 8)), expected.flatten(0, 1))
    prefix = clover_model.commit(prefix, block)
    assert prefix.cache.get_seq_length() == 8


def test_rows_of_unequal_prompts_get_what_they_get_alone(clover_model):
    # The last prompt is empty: its row is all padding.
    ids, mask = padded_prompts()
    blocks = [tokens(3, 8, seed=seed) for seed in (1, 2, 3)]
    prefix, together = clover_model.prefill(ids, mask), []
    for block in blocks:
        together.append(clover_model.denoise(prefix, block, everything(3, 8)).view(3, 8, -1))
        prefix = clover_model.commit(prefix, block)
    for row, pads in enumerate(PADS):
        own = ids[row : row + 1, pads:]
        prefix = clover_model.prefill(own, torch.ones_like(own))
        for block, expected in zip(blocks, together, strict=True):
            got = clover_model.denoise(prefix, block[row : row + 1], everything(1, 8))
            assert (got - expected[row]).abs().max() < TOLERANCE, row
            prefix = clover_model.commit(prefix, block[row : row + 1])


@pytest.mark.parametrize("rows", [[1], [2, 0], [0, 0, 1, 1, 1], [0, 1, 2], [2, 1, 0], []])
def test_selected_rows_go_on_by_themselves(rows, clover_model):
    ids, mask = padded_prompts()
    rows = torch.tensor(rows, dtype=torch.long)
    prefix, block = clover_model.prefill(ids, mask), tokens(3, 8, seed=1)
    before = {name: tensor.clone() for name, tensor in cached_tensors(prefix.cache).items()}
    selected = prefix.select(rows)
    assert torch.equal(selected.mask, mask[rows])
    if len(rows) == 0:
        return
    whole = clover_model.denoise(prefix, block, everything(3, 8)).view(3, 8, -1)
    got = clover_model.denoise(selected, block[rows], everything(len(rows), 8)).view(len(rows), 8, -1)
    assert (got - whole[rows]).abs().max() < 1e-5
    selected = clover_model.commit(selected, block[rows])  # in place, but not in the original's place
    assert all(torch.equal(tensor, before[name]) for name, tensor in cached_tensors(prefix.cache).items())
    advanced = clover_model.commit(prefix, block)
    following = tokens(3, 8, seed=2)
    whole = clover_model.denoise(advanced, following, everything(3, 8)).view(3, 8, -1)
    got = clover_model.denoise(selected, following[rows], everything(len(rows), 8)).view(len(rows), 8, -1)
    assert (got - whole[rows]).abs().max() < TOLERANCE


def counts(cache) -> list[int]:
    """What each layer says it holds; GDN layers say it since transformers 5.25."""
    return [int(layer.get_seq_length()) for layer in cache.layers if hasattr(layer, "get_seq_length")]


def test_every_layer_counts_what_a_cache_filled_with_as_many_tokens_counts(clover_model):
    prefix = clover_model.prefill(*padded_prompts())
    assert counts(prefix.select(torch.tensor([2, 1])).cache) == counts(filled_cache(clover_model, tokens(2, 12)))
    packed = prefix.select(torch.tensor([1])).packed()
    assert packed.ids.shape == (1, 12 - PADS[1])
    assert counts(packed.cache) == counts(filled_cache(clover_model, tokens(1, 12 - PADS[1])))
    committed = clover_model.commit(packed, tokens(1, 8))
    assert counts(committed.cache) == counts(filled_cache(clover_model, tokens(1, 20 - PADS[1])))


def test_rows_of_an_empty_prefix_can_be_selected(clover_model):
    nothing = torch.zeros(3, 0, dtype=torch.long)
    selected = clover_model.prefill(nothing, nothing).select(torch.tensor([2]))
    block = tokens(1, 8)
    expected = clover_model(block, is_causal=False).logits[0]
    assert torch.equal(clover_model.denoise(selected, block, everything(1, 8)), expected)
    assert clover_model.commit(selected, block).cache.get_seq_length() == 8


def test_a_coreset_can_be_asked_of_a_denoising_step(clover_model):
    prompt, block = tokens(2, 12), tokens(2, 32, seed=1)
    prefix = clover_model.prefill(prompt, torch.ones_like(prompt))
    got = clover_model.denoise(prefix, block, everything(2, 32), expert_coreset_top_p=0.4)
    cache = filled_cache(clover_model, prompt)
    expected = clover_model(block, is_causal=False, past_key_values=cache, expert_coreset_top_p=0.4).logits
    assert (got - expected.flatten(0, 1)).abs().max() < 1e-5
    assert (got - clover_model.denoise(prefix, block, everything(2, 32))).abs().max() > 0.01


def test_prefill_and_commit_do_not_run_the_head(clover_model):
    def refuse(*_):
        raise AssertionError("the head is the largest matrix there is")

    handle = clover_model.lm_head.register_forward_pre_hook(refuse)
    try:
        prefix = clover_model.prefill(tokens(1, 8), torch.ones(1, 8, dtype=torch.long))
        clover_model.commit(prefix, tokens(1, 8))
    finally:
        handle.remove()
