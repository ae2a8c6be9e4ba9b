"""`decoding="autoregressive"`: transformers' own generation, which a stock Qwen3.5-MoE of the same weights repeats."""

import pytest
import torch
from random_clover import random_clover, tokens
from transformers import DynamicCache, TextStreamer

from clover import CloverGenerationConfig

OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "penalised": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "at least": {"min_new_tokens": 9, "eos_token_id": [3, 4, 5, 6, 7, 8, 9, 10]},
    "with scores": {"return_dict_in_generate": True, "output_scores": True},
}


def write(model, ids, **options):
    torch.manual_seed(0)
    return model.generate(ids, **{"max_new_tokens": 12, "pad_token_id": 0} | options)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [1, 3])
def test_it_is_transformers_own_generation_token_by_token(name, rows, clover_model, stock_model):
    ids = tokens(rows, 17)
    ours = write(clover_model, ids, decoding="autoregressive", **OPTIONS[name])
    expected = write(stock_model, ids, **OPTIONS[name])
    if name == "with scores":
        assert torch.equal(torch.stack(ours.scores), torch.stack(expected.scores))
        ours, expected = ours.sequences, expected.sequences
    assert torch.equal(ours, expected)


def test_a_left_padded_batch_is_transformers_too(clover_model, stock_model):
    ids, mask = tokens(2, 17), torch.ones(2, 17, dtype=torch.long)
    mask[1, :6] = 0
    ours = write(clover_model, ids, attention_mask=mask, decoding="autoregressive")
    assert torch.equal(ours, write(stock_model, ids, attention_mask=mask))


def test_criteria_processors_and_streamers_reach_it(clover_model, stock_model):
    class Puts(TextStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append("end")

    results = []
    for model, options in ((clover_model, {"decoding": "autoregressive"}), (stock_model, {})):
        streamer = Puts()
        stop = [lambda ids, scores: torch.tensor([ids.shape[1] == 22])]
        ban = [lambda ids, scores: scores.index_fill(-1, torch.tensor([5, 6, 7]), float("-inf"))]
        out = write(model, tokens(1, 17), streamer=streamer, stopping_criteria=stop, logits_processor=ban, **options)
        results.append((out.tolist(), streamer.tokens))
    assert results[0] == results[1]
    assert len(results[0][0][0]) == 22


def test_without_a_budget_it_may_fill_the_context():
    model = random_clover(max_position_embeddings=40)
    assert model.generate(tokens(1, 17), decoding="autoregressive").shape == (1, 40)


def test_the_models_own_config_can_choose_it(clover_model, stock_model, monkeypatch):
    monkeypatch.setattr(clover_model.generation_config, "decoding", "autoregressive")
    assert torch.equal(write(clover_model, tokens(1, 17)), write(stock_model, tokens(1, 17)))


@pytest.mark.parametrize(
    "name, value",
    [("threshold", 0.5), ("block_size", 8), ("output_trace", True), ("callback", print), ("presence_penalty", 1.0)],
)
def test_options_of_block_diffusion_are_refused(name, value, clover_model):
    with pytest.raises(ValueError, match=f"`{name}`.*autoregressive"):
        write(clover_model, tokens(1, 17), decoding="autoregressive", **{name: value})


def test_an_unknown_option_is_refused(clover_model):
    with pytest.raises(ValueError, match="treshold"):
        write(clover_model, tokens(1, 17), decoding="autoregressive", treshold=0.5)


BEFORE_ANY_WORK = [
    ("input_ids", None, {}),
    ("input_ids", [[1, 2, 3]], {}),
    ("input_ids", torch.ones(1, 0, dtype=torch.long), {}),
    ("input_ids", torch.tensor([[1, 10**6]]), {}),
    ("input_ids", tokens(1, 300), {}),
    ("attention_mask", tokens(1, 3), {"attention_mask": torch.tensor([[1, 1, 0]])}),
    ("logits_processor", tokens(1, 3), {"logits_processor": [3]}),
    ("logits_processor", tokens(1, 3), {"logits_processor": 3}),
    ("stopping_criteria", tokens(1, 3), {"stopping_criteria": [3]}),
    ("stop_strings", tokens(1, 3), {"stop_strings": ["x"]}),
    ("tokenizer", tokens(1, 3), {"stop_strings": ["x"], "tokenizer": 3}),
    ("streamer", tokens(1, 3), {"streamer": print}),
    ("generator", tokens(1, 3), {"generator": torch.Generator(), "do_sample": True}),
    ("suppress_tokens", tokens(1, 3), {"suppress_tokens": [10**6]}),
    ("max_new_tokens", tokens(1, 3), {"max_new_tokens": 10**6}),
    ("min_new_tokens", tokens(1, 3), {"min_new_tokens": 30}),
]


@pytest.mark.parametrize("name, prompt, options", BEFORE_ANY_WORK, ids=[f"{n} {o}" for n, _, o in BEFORE_ANY_WORK])
def test_what_is_refused_elsewhere_is_refused_here_before_any_pass(name, prompt, options):
    model = random_clover(max_position_embeddings=64)
    hook = model.model.register_forward_pre_hook(lambda *args: pytest.fail("a pass was run before the refusal"))
    try:
        with pytest.raises(ValueError, match=f"`{name}`"):
            write(model, prompt, decoding="autoregressive", **options)
    finally:
        hook.remove()


def test_a_cache_of_block_diffusion_is_refused_and_transformers_own_is_taken(clover_model):
    text = tokens(1, 17)
    out = clover_model.generate(text, max_new_tokens=4, return_dict_in_generate=True)
    returned = out.cache if hasattr(out, "cache") else out.past_key_values
    with pytest.raises(ValueError, match="`past_key_values`.*block diffusion"):
        write(clover_model, text, decoding="autoregressive", past_key_values=returned)
    cache = DynamicCache(config=clover_model.config)
    clover_model(text[:, :9], use_cache=True, past_key_values=cache)
    expected = write(clover_model, text, decoding="autoregressive")
    assert torch.equal(write(clover_model, text, decoding="autoregressive", past_key_values=cache), expected)


def test_values_that_ask_for_nothing_are_let_off(clover_model):
    neutral = {"output_trace": False, "presence_penalty": 0.0, "threshold": 0.95, "max_thinking_tokens": None}
    expected = write(clover_model, tokens(1, 17), decoding="autoregressive")
    assert torch.equal(write(clover_model, tokens(1, 17), decoding="autoregressive", **neutral), expected)


@pytest.mark.parametrize("name, value", [("threshold", 0.5), ("presence_penalty", 1.0), ("block_size", 8)])
def test_an_option_of_block_diffusion_is_refused_in_a_config_too(name, value, clover_model):
    config = CloverGenerationConfig(decoding="autoregressive", **{name: value})
    with pytest.raises(ValueError, match=f"`{name}`.*autoregressive"):
        write(clover_model, tokens(1, 17), generation_config=config)
