"""Going on from a returned cache: the same answer as starting over, and less work."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_clover import cached_tensors
from small_clover import draw, left_padded, prompt, small_clover
from transformers import DynamicCache


@pytest.fixture
def model():
    return small_clover()


def write(model, text, **options):
    options = {"max_new_tokens": 20, "threshold": 0.4, "return_dict_in_generate": True} | options
    ids = torch.tensor([text])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def kept(out):
    return out.cache if hasattr(out, "cache") else out.past_key_values


@settings(derandomize=True, database=None, deadline=None, max_examples=40)
@given(st.integers(1, 30), st.lists(st.integers(0, 20), min_size=1, max_size=3), st.integers(1, 25), st.booleans())
def test_a_conversation_goes_on_as_if_it_had_started_over(length, turns, budget, many_tokens):
    model, text, cache = small_clover(), prompt(length), None
    options = {"max_new_tokens": budget, "threshold": 0.1 if many_tokens else 0.6}
    for turn, more in enumerate([0, *turns]):
        text = text + prompt(more, seed=turn)
        out = write(model, text, past_key_values=cache, **options)
        over = write(model, text, **options)
        assert torch.equal(out.sequences, over.sequences)
        assert out.num_denoising_passes == over.num_denoising_passes
        text, cache = out.sequences[0].tolist(), kept(out)


def test_what_the_cache_holds_is_not_run_again(model):
    first = write(model, prompt(30))
    seen = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args or [kwargs["input_ids"]])[0].shape[1]), with_kwargs=True
    )
    text = first.sequences[0].tolist() + prompt(3)
    write(model, text, past_key_values=kept(first), max_new_tokens=1)
    hook.remove()
    known = int(kept(first)[0].mask.sum())
    assert known == 48  # whole blocks of prompt and answer: 50 tokens, the last block not committed
    assert seen == [len(text) // 8 * 8 - known, 8] or seen[0] == 8


def test_a_cache_is_left_as_it_is_and_can_be_used_twice(model):
    first = write(model, prompt(12))
    (prefix,) = kept(first)
    before = {name: tensor.clone() for name, tensor in cached_tensors(prefix.cache).items()}
    text = first.sequences[0].tolist() + prompt(9)
    one, two = (write(model, text, past_key_values=kept(first)).sequences for _ in range(2))
    assert torch.equal(one, two)
    assert all(torch.equal(tensor, before[name]) for name, tensor in cached_tensors(prefix.cache).items())


def test_every_row_of_a_batch_has_a_cache_of_its_own(model):
    texts = [prompt(3), prompt(17), prompt(9)]
    out = model.generate(**left_padded(texts), max_new_tokens=20, threshold=0.4, return_dict_in_generate=True)
    for row, text in enumerate(texts):
        longer = text + out.sequences[row, 17:].tolist() + prompt(4)
        assert torch.equal(
            write(model, longer, past_key_values=kept(out)[row]).sequences, write(model, longer).sequences
        )


def test_a_cache_that_does_not_fit_is_refused(model):
    cache = kept(write(model, prompt(12)))
    whole = write(model, prompt(12)).sequences[0].tolist()
    other = [whole[0] % 40 + 1, *whole[1:]]
    for text in (other, whole[:9], prompt(40)):
        with pytest.raises(ValueError, match="`past_key_values` is 'of 24 tokens'.*begins with"):
            write(model, text, past_key_values=cache)
    with pytest.raises(ValueError, match="`past_key_values` is 'of 24 tokens'.*whole blocks"):
        write(model, whole, past_key_values=cache, block_size=16)
    with pytest.raises(ValueError, match="`past_key_values`.*2 answers"):
        ids = torch.tensor([whole, whole])
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
    with pytest.raises(ValueError, match="`past_key_values` is 'DynamicCache'"):
        write(model, whole, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="`past_key_values`.*self_speculative"):
        write(model, whole, past_key_values=cache, decoding="self_speculative", threshold=None)


def test_both_of_transformers_names_for_a_cache_are_one_argument(model):
    first = write(model, prompt(12))
    text = first.sequences[0].tolist() + prompt(3)
    expected = write(model, text).sequences
    assert torch.equal(write(model, text, cache=kept(first)).sequences, expected)
    assert torch.equal(write(model, text, past_key_values=kept(first)).sequences, expected)
    with pytest.raises(ValueError, match="`cache`.*`past_key_values`"):
        write(model, text, cache=kept(first), past_key_values=kept(first))


def test_a_cache_of_another_model_is_refused():
    """Its tokens may fit; its states do not."""
    first = write(draw(seed=1), prompt(12))
    with pytest.raises(ValueError, match="`past_key_values` is 'of another model'"):
        write(small_clover(), first.sequences[0].tolist(), past_key_values=kept(first))
