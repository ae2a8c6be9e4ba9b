"""What generate() refuses: every argument it has no use for and every value it cannot work with, before any work.

Each refusal is a ValueError that names the field and says what is allowed, however the value came: as an argument, in
a generation config given to generate(), or in the model's own.
"""

import copy
import re

import pytest
import torch
from small_clover import PAD, prompt, small_clover
from transformers import DynamicCache, GenerationConfig

from clover import CloverGenerationConfig

IDS = torch.tensor([prompt(11)])


@pytest.fixture
def model():
    return small_clover()


@pytest.fixture(autouse=True)
def no_work(model):
    """No pass is run by anything that is refused."""
    watched = [small_clover(), small_clover(max_position_embeddings=32), small_clover(mask_token_id=None)]

    def forbidden(*args):
        pytest.fail("a pass was run before the refusal")

    hooks = [each.model.register_forward_pre_hook(forbidden) for each in watched]
    hooks += [each.register_forward_pre_hook(forbidden) for each in watched]
    yield
    for hook in hooks:
        hook.remove()


def refused(name: str, *allowed: str):
    """The ValueError names the field and has all of these words."""
    return pytest.raises(ValueError, match="".join(f"(?=.*{word})" for word in (rf"\b{name}\b", *allowed)))


# ---- fields of a generation config -----------------------------------------------------------------------------------

OUT_OF_RANGE = [
    ("threshold", 1.5, r"\[0, 1\]"),
    ("threshold", -0.1, r"\[0, 1\]"),
    ("threshold", float("nan"), r"\[0, 1\]"),
    ("threshold", "0.9", r"\[0, 1\]"),
    ("threshold", True, r"\[0, 1\]"),
    ("block_size", 0, "at least 1"),
    ("block_size", -8, "at least 1"),
    ("block_size", 2.5, "integer"),
    ("block_size", "8", "integer"),
    ("block_size", True, "integer"),
    ("max_denoising_steps", 0, "at least 1"),
    ("max_denoising_steps", 1.5, "integer"),
    ("max_denoising_steps", True, "integer"),
    ("decoding", "x", "low_confidence"),
    ("decoding", 3, "low_confidence"),
    ("expert_coreset_top_p", 0, r"\(0, 1\]"),
    ("expert_coreset_top_p", 1.5, r"\(0, 1\]"),
    ("output_trace", "yes", "true or false"),
    ("output_trace", 1, "true or false"),
    ("max_new_tokens", 0, "0"),
    ("max_new_tokens", -3, "-3"),
]

OF_ANOTHER_KIND = [
    ("max_new_tokens", 2.5, "integer"),
    ("max_new_tokens", "8", "integer"),
    ("max_new_tokens", True, "integer"),
    ("max_length", 40.5, "integer"),
    ("max_length", True, "integer"),
    ("eos_token_id", "x", "token id"),
    ("eos_token_id", 2.5, "token id"),
    ("eos_token_id", [3, "x"], "token id"),
    ("pad_token_id", "x", "token id"),
    ("pad_token_id", [1], "token id"),
    ("return_dict_in_generate", "yes", "true or false"),
    ("do_sample", 1, "true or false"),
    ("temperature", "hot", "number"),
    ("temperature", -0.1, "at least 1e-6"),
    ("temperature", 1e-39, "at least 1e-6"),
    ("top_k", 2.5, "integer"),
    ("top_k", -1, "at least 0"),
    ("top_p", 0.0, r"\(0, 1\]"),
    ("top_p", 1.1, r"\(0, 1\]"),
    ("min_p", 1.5, r"\[0, 1\]"),
    ("num_return_sequences", 0, "at least 1"),
    ("presence_penalty", "1", "number"),
    ("frequency_penalty", float("inf"), "finite"),
    ("repetition_penalty", 0, "above 0"),
    ("no_repeat_ngram_size", -2, "at least 0"),
    ("min_new_tokens", -1, "at least 0"),
    ("suppress_tokens", [1.5], "token ids"),
    ("suppress_tokens", 3, "token ids"),
    ("bad_words_ids", [1], "token ids"),
    ("bad_words_ids", [[]], "token ids"),
    ("stop_ramp", {"start": 1}, "slope"),
    ("stop_ramp", {"start": 1, "slope": "x", "max": 2}, "three numbers"),
    ("think_end_ramp", 3, "slope"),
    ("think_end_token_id", "x", "token id"),
    ("max_thinking_tokens", -1, "at least 0"),
    ("max_time", 0, "above 0"),
    ("stop_strings", [3], "string"),
]

NOT_USED = [
    ("typical_p", 0.9),
    ("epsilon_cutoff", 0.01),
    ("min_length", 3),
    ("begin_suppress_tokens", [1]),
    ("sequence_bias", [[[1], 2.0]]),
    ("forced_eos_token_id", 3),
    ("num_beams", 2),
    ("output_scores", True),
    ("output_logits", True),
    ("guidance_scale", 2.0),
    ("cache_implementation", "static"),
    ("prompt_lookup_num_tokens", 3),
]

MISSPELT = [("treshold", 0.5, "threshold"), ("blocksize", 8, "block_size"), ("max_new_token", 5, "max_new_tokens")]


def ids_of(cases):
    return [f"{name}={value!r}" for name, value, *_ in cases]


@pytest.mark.parametrize("name, value, allowed", OUT_OF_RANGE, ids=ids_of(OUT_OF_RANGE))
@pytest.mark.parametrize("through", ["argument", "CloverGenerationConfig", "GenerationConfig", "the model's own"])
def test_a_value_out_of_range_is_refused(model, monkeypatch, name, value, allowed, through):
    with refused(name, re.escape(repr(value)), allowed):
        if through == "argument":
            model.generate(IDS, **{"max_new_tokens": 5, name: value})
        else:
            generate_by_config(model, monkeypatch, through, name, value)


@pytest.mark.parametrize("name, value, allowed", OF_ANOTHER_KIND, ids=ids_of(OF_ANOTHER_KIND))
@pytest.mark.parametrize("through", ["argument", "CloverGenerationConfig", "the model's own"])
def test_a_value_of_another_kind_is_refused(model, monkeypatch, name, value, allowed, through):
    """Not through a plain GenerationConfig: that one fails by itself, or is read like these."""
    with refused(name, re.escape(repr(value)), allowed):
        if through == "argument":
            model.generate(IDS, **{"max_new_tokens": 5, name: value})
        else:
            generate_by_config(model, monkeypatch, through, name, value)


@pytest.mark.parametrize("name, value", NOT_USED, ids=ids_of(NOT_USED))
@pytest.mark.parametrize("through", ["argument", "CloverGenerationConfig", "GenerationConfig", "the model's own"])
@pytest.mark.filterwarnings("ignore")
def test_a_field_that_block_diffusion_does_not_use_is_refused(model, monkeypatch, name, value, through):
    with refused(name):
        if through == "argument":
            model.generate(IDS, max_new_tokens=5, **{name: value})
        else:
            generate_by_config(model, monkeypatch, through, name, value)


@pytest.mark.parametrize("name, value, meant", MISSPELT, ids=ids_of(MISSPELT))
def test_a_misspelt_argument_is_refused_with_the_name_that_was_meant(model, name, value, meant):
    with refused(name, f"`{meant}`"):
        model.generate(IDS, **{name: value})


@pytest.mark.parametrize("name, value, meant", MISSPELT, ids=ids_of(MISSPELT))
@pytest.mark.parametrize("through", ["CloverGenerationConfig", "GenerationConfig", "the model's own"])
def test_a_misspelt_field_of_a_config_is_refused(model, monkeypatch, name, value, meant, through):
    with refused(name):
        generate_by_config(model, monkeypatch, through, name, value)


def generate_by_config(model, monkeypatch, through, name, value):
    if through == "the model's own":
        own = copy.deepcopy(model.generation_config)
        setattr(own, name, value)
        monkeypatch.setattr(model, "generation_config", own)
        model.generate(IDS, **({} if name == "max_new_tokens" else {"max_new_tokens": 5}))
    else:
        kind = CloverGenerationConfig if through == "CloverGenerationConfig" else GenerationConfig
        model.generate(IDS, generation_config=kind(**{"max_new_tokens": 5, name: value}))


@pytest.mark.parametrize("name, value, allowed", OUT_OF_RANGE, ids=ids_of(OUT_OF_RANGE))
def test_a_clover_generation_config_refuses_a_value_when_it_is_made(name, value, allowed):
    with refused(name, re.escape(repr(value)), allowed):
        CloverGenerationConfig(**{name: value})


def test_values_that_ask_for_what_happens_anyway_are_not_refused(model):
    """Greedy, one beam, one answer: what a pipeline or a served request spells out."""
    from clover.generation_clover import refuse_unused

    for name, value in (
        ("do_sample", False),
        ("num_beams", 1),
        ("temperature", 1.0),
        ("top_p", 1.0),
        ("num_return_sequences", 1),
        ("repetition_penalty", 1.0),
        ("use_cache", True),
        ("streamer", None),
        ("stopping_criteria", None),
    ):
        config, arguments = model._prepare_generation_config(None, **{name: value})
        refuse_unused(config, arguments)


# ---- arguments -------------------------------------------------------------------------------------------------------

FOREIGN = {
    "prefix_allowed_tokens_fn": lambda row, ids: [1],
    "past_key_values": DynamicCache(),
    "cache": DynamicCache(),
    "inputs_embeds": torch.zeros(1, 11, 32),
    "position_ids": torch.arange(11)[None],
    "cache_position": torch.arange(11),
    "token_type_ids": torch.zeros_like(IDS),
    "custom_generate": lambda *args, **kwargs: None,
    "assistant_model": object(),
    "synced_gpus": True,
    "labels": IDS,
    "is_causal": True,
    "negative_prompt_ids": IDS,
    "block": 4,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_argument_that_generate_has_no_use_for_is_refused(model, name):
    with refused(name, "(it takes|did you mean|must be)"):
        model.generate(IDS, max_new_tokens=5, **{name: FOREIGN[name]})


def test_a_callback_that_cannot_be_called_is_refused(model):
    with refused("callback"):
        model.generate(IDS, max_new_tokens=5, callback="x")


def test_a_generation_config_that_is_none_of_transformers_is_refused(model):
    with refused("generation_config"):
        model.generate(IDS, generation_config={"max_new_tokens": 5})


def test_a_trace_without_a_place_for_it_is_refused(model):
    with refused("output_trace", "return_dict_in_generate"):
        model.generate(IDS, max_new_tokens=5, output_trace=True)
    with refused("output_trace", "return_dict_in_generate"):
        model.generate(IDS, generation_config=CloverGenerationConfig(max_new_tokens=5, output_trace=True))


# ---- prompts ---------------------------------------------------------------------------------------------------------

NO_PROMPTS = {
    "nothing": None,
    "a list": [[1, 2, 3]],
    "1-D": torch.arange(1, 9),
    "3-D": torch.ones(1, 2, 3, dtype=torch.long),
    "floats": torch.ones(1, 5),
    "bools": torch.ones(1, 5, dtype=torch.bool),
    "no column": torch.ones(1, 0, dtype=torch.long),
    "no row": torch.ones(0, 5, dtype=torch.long),
    "a row of padding": torch.tensor([[PAD] * 5, [1] * 5]),
    "an id below the vocabulary": torch.tensor([[3, -1, 4]]),
    "an id above the vocabulary": torch.tensor([[3, 48, 4]]),
}


@pytest.mark.parametrize("name", NO_PROMPTS)
def test_what_is_no_prompt_is_refused(model, name):
    with refused("input_ids"):
        model.generate(NO_PROMPTS[name], max_new_tokens=5)


def test_an_id_out_of_the_vocabulary_is_refused_in_any_row_but_not_in_the_padding():
    model = small_clover()
    ids = torch.tensor([[1, 2, 3], [1, 2, 999]])
    with refused("input_ids", r"\[0, 48\)"):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5)


def test_prompts_given_twice_are_refused(model):
    with refused("inputs", "input_ids"):
        model.generate(IDS, input_ids=IDS, max_new_tokens=5)


@pytest.mark.parametrize("row", [[1, 1, 0], [1, 0, 1], [0, 1, 0]])
def test_padding_on_the_right_or_inside_is_refused(model, row):
    mask = torch.tensor([row, [1, 1, 1]])
    with refused("attention_mask", "left"):
        model.generate(torch.tensor([[5, 6, 7], [5, 6, 7]]), attention_mask=mask, max_new_tokens=5)


def test_padding_on_the_right_is_refused_where_it_is_inferred_from_the_pad_token(model):
    with refused("attention_mask", "left"):
        model.generate(torch.tensor([[5, 6, PAD], [5, 6, 7]]), max_new_tokens=5)


@pytest.mark.parametrize("shape", [(1, 10), (2, 11), (11,), (1, 1, 11, 11)])
def test_an_attention_mask_of_another_shape_is_refused(model, shape):
    with refused("attention_mask", re.escape("(1, 11)")):
        model.generate(IDS, attention_mask=torch.ones(shape, dtype=torch.long), max_new_tokens=5)


def test_an_attention_mask_that_is_no_tensor_is_refused(model):
    with refused("attention_mask"):
        model.generate(IDS, attention_mask=[[1] * 11], max_new_tokens=5)


# ---- length ----------------------------------------------------------------------------------------------------------


def test_a_prompt_with_an_answer_longer_than_the_context_is_refused():
    short = small_clover(max_position_embeddings=32)
    with refused("max_new_tokens", "22", "21"):
        short.generate(IDS, max_new_tokens=22)
    with refused("max_length", "33", "32"):
        short.generate(IDS, max_length=33)


def test_a_prompt_that_fills_the_context_is_refused():
    with refused("input_ids", "32"):
        small_clover(max_position_embeddings=32).generate(torch.tensor([prompt(32)]))


@pytest.mark.parametrize("length", [1, 10, 11])
def test_a_max_length_that_leaves_nothing_to_write_is_refused(model, length):
    with refused("max_length", str(length), "11"):
        model.generate(IDS, max_length=length)


def test_a_model_without_a_mask_token_says_how_to_set_it():
    with refused("mask_token_id", "model.config.mask_token_id"):
        small_clover(mask_token_id=None).generate(IDS, max_new_tokens=5)


def test_training_with_gradient_checkpointing_is_refused_because_it_keeps_no_prefix(model, monkeypatch):
    """transformers turns every cache off there; an answer written without its prompt would be another."""
    monkeypatch.setattr(model.model, "gradient_checkpointing", True)
    model.train()
    try:
        with refused("training", "eval"):
            model.generate(IDS, max_new_tokens=5)
    finally:
        model.eval()


# ---- what a model cannot do, and what cannot be had together --------------------------------------------------------

THINKING = {"think_start_token_id": 11, "think_end_token_id": 12, "max_thinking_tokens": 3}
RAMP = {"start": 0, "slope": 1.0, "max": 2.0}
SENSELESS = [
    ("suppress_tokens", {"suppress_tokens": [48]}),
    ("suppress_tokens", {"suppress_tokens": list(range(47))}),
    ("suppress_tokens", {"suppress_tokens": list(range(20)), "bad_words_ids": [[i] for i in range(20, 47)]}),
    ("bad_words_ids", {"bad_words_ids": [[3, 48]]}),
    ("bad_words_ids", {"bad_words_ids": [[3]], "eos_token_id": 3}),
    ("eos_token_id", {"eos_token_id": [3, 48]}),
    ("eos_token_id", {"eos_token_id": 47}),  # the mask token
    ("pad_token_id", {"pad_token_id": -1}),
    ("think_end_token_id", THINKING | {"think_end_token_id": 48}),
    ("think_end_token_id", THINKING | {"think_end_token_id": 47}),
    ("think_end_token_id", THINKING | {"think_end_token_id": 11}),
    ("stop_ramp", {"eos_token_id": 3, "stop_ramp": RAMP | {"start": float("nan")}}),
    ("stop_ramp", {"eos_token_id": 3, "stop_ramp": RAMP | {"slope": float("inf")}}),
    ("stop_ramp", {"eos_token_id": 3, "stop_ramp": RAMP | {"slope": -1}}),
    ("stop_ramp", {"stop_ramp": RAMP}),
    ("max_thinking_tokens", THINKING | {"suppress_tokens": [12]}),
    ("max_thinking_tokens", THINKING | {"bad_words_ids": [[4, 12]]}),
    ("max_thinking_tokens", THINKING | {"eos_token_id": 12, "min_new_tokens": 4}),
    ("max_denoising_steps", THINKING | {"max_denoising_steps": 4}),
    ("min_new_tokens", {"min_new_tokens": 6}),
    ("max_length", {"max_length": 30}),
    ("temperature", {"temperature": 1e-39, "do_sample": True}),
]


@pytest.mark.parametrize("name, fields", SENSELESS, ids=[f"{name} {fields}" for name, fields in SENSELESS])
@pytest.mark.parametrize("through", ["arguments", "a config"])
def test_what_a_model_cannot_do_or_cannot_have_together_is_refused(model, name, fields, through):
    fields = {"max_new_tokens": 5} | fields
    with refused(name):
        if through == "arguments":
            model.generate(IDS, **fields)
        else:
            model.generate(IDS, CloverGenerationConfig(**fields))


def test_a_config_that_was_copied_from_the_models_own_may_choose_another_decoding(model):
    """What the model's own config says of block diffusion does not stand in the way."""
    from clover.options_clover import refuse_contradictions

    own = copy.deepcopy(model.generation_config)
    own.threshold, own.decoding = 0.4, "autoregressive"
    refuse_contradictions(own, {"decoding": "autoregressive"}, {})
    with refused("threshold", "autoregressive"):
        refuse_contradictions(own, {"decoding": "autoregressive", "threshold": 0.4}, {})


def test_a_tokenizer_that_is_none_is_refused(model):
    with refused("tokenizer"):
        model.generate(IDS, max_new_tokens=5, stop_strings=["x"], tokenizer=3)
