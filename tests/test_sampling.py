"""Choosing tokens: what is drawn follows the processed distribution, and no row's draw depends on another row."""

import pytest
import torch
from naive_denoiser import fresh_logits
from small_clover import MASK, VOCAB, left_padded, prompt, small_clover
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@pytest.fixture
def model():
    return small_clover()


def write(model, prompts, **options):
    return model.generate(**left_padded(prompts), **{"max_new_tokens": 20, "threshold": 0.4} | options)


def sample(model, prompts, seed=0, **options):
    torch.manual_seed(seed)
    return write(model, prompts, do_sample=True, **options)


PROCESSED = {
    "temperature": ({"temperature": 1.7, "top_k": 0}, [TemperatureLogitsWarper(1.7)]),
    "top_k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top_p": ({"top_p": 0.8, "top_k": 0}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.1, "top_k": 0}, [MinPLogitsWarper(0.1)]),
    "all": (
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(20), TopPLogitsWarper(0.9)],
    ),
}


def processed(model, text: list[int], warpers) -> torch.Tensor:
    """(V,) the distribution of the one masked position after a text, by transformers' warpers, mask token excepted."""
    scores = fresh_logits(model, text, [MASK])
    scores[:, MASK] = float("-inf")
    return LogitsProcessorList(warpers)(None, scores).softmax(-1)[0]


@pytest.mark.parametrize("name", PROCESSED)
def test_tokens_are_drawn_from_the_processed_distribution(model, name):
    options, warpers = PROCESSED[name]
    text, count = prompt(8), 4000
    out = sample(model, [text], **options, block_size=1, max_new_tokens=1, num_return_sequences=count)
    expected = processed(model, text, warpers) * count
    found = torch.bincount(out[:, 8], minlength=VOCAB).double()
    assert found[expected == 0].sum() == 0
    likely = expected > 5
    chi_square = ((found - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = int(likely.sum())
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("name", PROCESSED)
def test_confidence_is_probability_under_the_processed_distribution(model, name):
    options, warpers = PROCESSED[name]
    text = prompt(8)
    settings = {"block_size": 1, "max_new_tokens": 1, "return_dict_in_generate": True, "output_trace": True}
    (step,) = sample(model, [text], **options, **settings).trace[0]
    temperature = options.get("temperature", 1.0)
    mask_share = (fresh_logits(model, text, [MASK]) / temperature).softmax(-1)[0, MASK]
    expected = processed(model, text, warpers)[step.tokens[0]] * (1 - mask_share)
    assert step.confidences == pytest.approx([float(expected)], abs=1e-5)


def test_a_seed_gives_the_same_answer_again_and_another_seed_another(model):
    texts = [prompt(3), prompt(12)]
    assert torch.equal(sample(model, texts, seed=3), sample(model, texts, seed=3))
    assert not torch.equal(sample(model, texts, seed=3), sample(model, texts, seed=4))


def test_a_generator_gives_the_same_answer_again_and_leaves_the_global_one_alone(model):
    before = torch.get_rng_state()
    first, second, other = (
        write(model, [prompt(5)], do_sample=True, generator=torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_row_draws_what_it_would_draw_alone(model):
    texts = [prompt(12), prompt(3), prompt(9)]
    together = sample(model, texts)
    assert together[0, 12:].tolist() == sample(model, texts[:1])[0, 12:].tolist()
    assert together[:2, 12:].tolist() == sample(model, texts[:2])[:, 12:].tolist()
    assert len({tuple(row) for row in sample(model, [texts[0]] * 3).tolist()}) == 3


def test_several_answers_to_a_prompt_are_rows_of_their_own(model):
    texts = [prompt(12), prompt(3)]
    answers = sample(model, texts, num_return_sequences=3)
    repeated = sample(model, [text for text in texts for _ in range(3)])
    assert torch.equal(answers, repeated)


@pytest.mark.parametrize("do_sample", [True, False])
def test_temperature_zero_is_greedy_whatever_the_seed(model, do_sample):
    greedy = write(model, [prompt(5)])
    for seed in (0, 1):
        torch.manual_seed(seed)
        assert torch.equal(write(model, [prompt(5)], do_sample=do_sample, temperature=0), greedy)


def test_with_one_token_to_choose_from_sampling_is_greedy(model):
    options = {"block_size": 1, "max_new_tokens": 20}
    assert torch.equal(sample(model, [prompt(5)], top_k=1, **options), write(model, [prompt(5)], **options))


def test_the_mask_token_is_never_drawn(model):
    out = sample(model, [prompt(5)], temperature=50.0, top_k=0, num_return_sequences=40)
    assert MASK not in out[:, 5:]
    assert len(set(out[:, 5:].flatten().tolist())) == VOCAB - 1


@pytest.mark.parametrize("name, value", [("temperature", 0.7), ("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)])
def test_sampling_options_of_a_greedy_call_are_refused(model, name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value}.*do_sample"):
        write(model, [prompt(5)], **{name: value})


def test_several_equal_answers_are_refused(model):
    with pytest.raises(ValueError, match="do_sample.*`num_return_sequences`.*2"):
        write(model, [prompt(5)], num_return_sequences=2)


def test_a_generator_that_nothing_would_draw_from_is_refused(model):
    with pytest.raises(ValueError, match="`generator`.*do_sample"):
        write(model, [prompt(5)], generator=torch.Generator())


def test_a_models_own_sampling_options_do_no_harm_to_a_greedy_call(model, monkeypatch):
    greedy = write(model, [prompt(5)])
    for name, value in (("do_sample", True), ("temperature", 0.6), ("top_k", 20), ("top_p", 0.95)):
        monkeypatch.setattr(model.generation_config, name, value)
    assert torch.equal(write(model, [prompt(5)], do_sample=False), greedy)
