"""`decoding="self_speculative"`: the autoregressive text, drafted by denoising and verified causally."""

from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_clover import cached_tensors, filled_cache, random_clover, tokens
from small_clover import draw, left_padded, prompt, small_clover
from transformers import DynamicCache


@pytest.fixture
def model():
    return small_clover()


def write(model, prompts, decoding="self_speculative", **options):
    return model.generate(**left_padded(prompts), **{"max_new_tokens": 24, "decoding": decoding} | options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_steps": 1},
        {"draft_steps": 8},
        {"draft_threshold": 0.0},
        {"block_size": 1},
        {"block_size": 2},
        {"block_size": 33},
    ],
)
def test_greedy_text_is_the_autoregressive_one(model, options):
    for text in (prompt(1), prompt(7), prompt(40)):
        assert torch.equal(write(model, [text], **options), write(model, [text], "autoregressive", pad_token_id=0))


@settings(derandomize=True, database=None, deadline=None, max_examples=25)
@given(st.integers(0, 5), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 30), st.integers(1, 5))
def test_so_is_every_row_of_a_batch_for_any_weights(seed, lengths, budget, draft_steps):
    model, texts = small_clover(seed), [prompt(length, seed) for length in lengths]
    options = {"max_new_tokens": budget}
    together = write(model, texts, draft_steps=draft_steps, **options)
    width = max(lengths)
    for row, text in zip(together.tolist(), texts, strict=True):
        alone = write(model, [text], "autoregressive", pad_token_id=0, **options)[0].tolist()
        assert row[width:] == alone[len(text) :]


STOCK = {
    "penalised": {"repetition_penalty": 1.5},
    "no repeats": {"no_repeat_ngram_size": 2},
    "banned": {"suppress_tokens": [3, 4, 5], "bad_words_ids": [[7], [8, 9]]},
    "at least": {"min_new_tokens": 9, "eos_token_id": list(range(3, 30))},
    "ended": {"eos_token_id": list(range(3, 12))},
}


@pytest.mark.parametrize("name", STOCK)
def test_transformers_processors_work_as_in_autoregressive_decoding(model, name):
    options = {"pad_token_id": 0} | STOCK[name]
    expected = write(model, [prompt(9)], "autoregressive", **options)
    assert torch.equal(write(model, [prompt(9)], **options), expected)


def test_sampled_text_has_the_autoregressive_distribution():
    """Chi-square over pairs of tokens of a tiny vocabulary, against exact probabilities of the causal pass."""
    model, text, count = draw(3, vocab_size=8, mask_token_id=7), [1, 2, 3], 6000
    with torch.no_grad():
        model.lm_head.weight.mul_(0.7)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "temperature": 1.3, "num_return_sequences": count}
    out = write(model, [text], max_new_tokens=2, draft_steps=1, block_size=4, **options)
    found = torch.zeros(8, 8).index_put((out[:, 3], out[:, 4]), torch.tensor(1.0), accumulate=True)
    with torch.no_grad():
        first = (model(torch.tensor([text])).logits[0, -1] / 1.3).softmax(-1)
        second = torch.stack([(model(torch.tensor([[*text, t]])).logits[0, -1] / 1.3).softmax(-1) for t in range(8)])
    expected = first[:, None] * second * count
    likely = expected > 5
    chi_square = ((found - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = int(likely.sum())
    assert degrees > 20
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_a_sampled_row_is_the_same_alone_and_from_the_same_seed(model):
    texts, results = [prompt(9), prompt(4)], []
    for rows in (texts, texts, texts[:1]):
        torch.manual_seed(1)
        results.append(write(model, rows, do_sample=True)[0].tolist())
    assert results[0] == results[1] == results[2]


@torch.no_grad()
@pytest.mark.parametrize("length", [0, 1, 3, 20])
@pytest.mark.parametrize("counts", [[1, 1], [2, 7], [8, 3], [8, 8]])
def test_the_states_after_a_partial_acceptance_are_those_of_a_fresh_prefill(length, counts):
    model = random_clover()
    text, block = tokens(2, length), tokens(2, 8, seed=1)
    prefix = model.prefill(text, torch.ones_like(text))
    logits, keep = model.verify(prefix, block)
    fresh = (
        filled_cache(model, torch.cat([text, block], 1)[:, :length]) if length else DynamicCache(config=model.config)
    )
    assert (logits - model(block, cache=fresh, use_cache=True).logits).abs().max() < 2e-4
    kept = keep(torch.tensor(counts))
    assert kept.mask.sum(-1).tolist() == [length + count for count in counts]
    for row, count in enumerate(counts):
        alone = kept.select(torch.tensor([row]))
        expected = filled_cache(model, torch.cat([text, block], 1)[row : row + 1, : length + count])
        got = cached_tensors(alone.cache)
        for name, tensor in cached_tensors(expected).items():
            have = got[name]
            if "cumulative" in name:  # since transformers 5.25; it counts the padding, as the shape of the keys does
                assert have == length + max(counts), name
                continue
            if have.shape != tensor.shape:  # keys and values, padded on the left
                have = have[:, :, -tensor.shape[2] :]
            assert (have - tensor).abs().max() < 2e-4, name


def test_no_projection_is_run_again_after_a_partial_acceptance(model, monkeypatch):
    text = torch.tensor([prompt(9)])
    prefix = model.prefill(text, torch.ones_like(text))
    with torch.no_grad():
        _, keep = model.verify(prefix, torch.tensor([prompt(8)]))

    def forbidden(*args):
        pytest.fail("a layer was run again")

    handles = [module.register_forward_pre_hook(forbidden) for module in model.modules()]
    keep(torch.tensor([3]))
    for handle in handles:
        handle.remove()


def test_it_tells_how_much_was_accepted(model):
    out = write(model, [prompt(9), prompt(4)], return_dict_in_generate=True, output_trace=True)
    for row in (0, 1):
        assert out.mean_accepted_length[row] == 24 / out.num_commit_passes[row]
        assert len(out.trace[row]) == out.num_commit_passes[row]
        assert [token for step in out.trace[row] for token in step.tokens] == out.sequences[row, 9:].tolist()
        passes = out.num_denoising_passes[row] + out.num_commit_passes[row]
        assert out.tokens_per_forward[row] == 24 / passes
        assert out.num_denoising_passes[row] <= 2 * out.num_commit_passes[row]


def test_drafts_that_always_agree_take_one_verifying_pass_a_block():
    """A model that says the same token whatever it sees, in both passes."""
    model = draw(0)
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.lm_head.weight.zero_()
    out = write(model, [prompt(9)], max_new_tokens=32, return_dict_in_generate=True)
    assert out.num_commit_passes == [4]
    assert out.mean_accepted_length == [8.0]


@pytest.mark.parametrize("name, value", [("threshold", 0.5), ("presence_penalty", 1.0), ("max_denoising_steps", 2)])
def test_options_of_block_diffusion_are_refused(model, name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*self_speculative"):
        write(model, [prompt(5)], **{name: value})


@pytest.mark.parametrize("name, value", [("draft_steps", 1), ("draft_threshold", 0.6)])
def test_options_of_drafts_are_refused_elsewhere(model, name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*low_confidence"):
        write(model, [prompt(5)], "low_confidence", **{name: value})


def test_threads_share_a_model_and_no_states(model):
    """Autoregressive passes of other threads, too, run through the modules that a verifying pass looks into."""
    texts = [prompt(length, seed) for seed, length in enumerate((3, 9, 14))]
    expected, found = [write(model, [text]).tolist() for text in texts], {}

    def work(i):
        found[i] = [write(model, [texts[i]]).tolist() for _ in range(4)]

    def disturb():
        while len(found) < len(texts):
            write(model, [prompt(8)], "autoregressive", pad_token_id=0)

    threads = [Thread(target=work, args=(i,)) for i in range(len(texts))] + [Thread(target=disturb)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {i: [expected[i]] * 4 for i in range(len(texts))}


def test_min_new_tokens_warns_of_nothing(model, caplog):
    write(model, [prompt(5)], min_new_tokens=6, eos_token_id=3)
    assert not caplog.records
