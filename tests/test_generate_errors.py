"""Nothing is silently ignored: what `generate()` cannot do is refused by name, before any pass of the model."""

import pytest
import torch
from small_clover import MASK, PAD, VOCAB, draw, prompt, small_clover
from transformers import DynamicCache, GenerationConfig, StoppingCriteriaList, TextStreamer

IDS = torch.tensor([prompt(5), prompt(5, 1)])


@pytest.fixture
def idle_model():
    """A model that may not run."""
    model = small_clover()

    def refuse(*_):
        raise AssertionError("a pass was run before the error")

    handles = [model.register_forward_pre_hook(refuse), model.model.register_forward_pre_hook(refuse)]
    yield model
    for handle in handles:
        handle.remove()


WRONG_VALUES = [
    ({"threshold": 1.5}, r"`threshold` is 1.5.*\[0, 1\]"),
    ({"threshold": -0.1}, r"`threshold` is -0.1.*\[0, 1\]"),
    ({"threshold": "0.9"}, r"`threshold` is '0.9'.*\[0, 1\]"),
    ({"threshold": True}, r"`threshold` is True.*\[0, 1\]"),
    ({"threshold": float("nan")}, r"`threshold` is nan.*\[0, 1\]"),
    ({"block_size": 0}, "`block_size` is 0.*at least 1"),
    ({"block_size": 2.5}, "`block_size` is 2.5.*integer"),
    ({"max_denoising_steps": 0}, "`max_denoising_steps` is 0.*at least 1"),
    ({"decoding": "beam"}, "`decoding` is 'beam'.*low_confidence"),
    ({"expert_coreset_top_p": 0}, r"`expert_coreset_top_p` is 0.*\(0, 1\]"),
    ({"max_new_tokens": 0}, "`max_new_tokens`"),
    ({"max_length": 5}, "`max_length` is 5.*more than the prompt's 5"),
    ({"max_new_tokens": 508}, "`max_new_tokens` is 508.*at most 507"),
    ({"output_trace": True}, "`output_trace` is True.*return_dict_in_generate"),
]
UNUSED_FIELDS = [
    {"do_sample": True},
    {"num_beams": 2},
    {"num_return_sequences": 2},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 5},
    {"repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[3]]},
    {"suppress_tokens": [3]},
    {"stop_strings": ["a"]},
    {"max_time": 1.0},
    {"min_new_tokens": 3},
    {"cache_implementation": "static"},
    {"use_cache": False},
    {"output_scores": True},
    {"prompt_lookup_num_tokens": 3},
]
UNUSED_ARGUMENTS = [
    {"streamer": TextStreamer(None)},
    {"stopping_criteria": StoppingCriteriaList([lambda *_: True])},
    {"logits_processor": [lambda ids, scores: scores]},
    {"past_key_values": DynamicCache()},
    {"inputs_embeds": torch.zeros(2, 5, 32)},
    {"position_ids": torch.zeros(2, 5, dtype=torch.long)},
    {"labels": IDS},
    {"is_causal": True},
    {"assistant_model": object()},
    {"custom_generate": "somewhere"},
    {"presence_penalty": 1.0},
    {"seed": 3},
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_VALUES, ids=[str(wrong) for wrong, _ in WRONG_VALUES])
def test_a_wrong_value_is_refused_as_an_argument(wrong, message, idle_model):
    with pytest.raises(ValueError, match=message):
        idle_model.generate(IDS, **{"max_new_tokens": 3} | wrong if "max_length" not in wrong else wrong)


@pytest.mark.parametrize("wrong", [w for w, _ in WRONG_VALUES[:10]], ids=str)
def test_a_wrong_value_is_refused_in_a_config(wrong, idle_model):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"`{name}`"):
        type(idle_model.generation_config)(**wrong)
    plain = GenerationConfig(max_new_tokens=3, **wrong)
    with pytest.raises(ValueError, match=f"`{name}`"):
        idle_model.generate(IDS, generation_config=plain)


@pytest.mark.parametrize("unused", UNUSED_FIELDS, ids=str)
def test_a_field_that_is_not_used_is_refused_as_an_argument_and_in_a_config(unused, idle_model):
    (name,) = unused
    with pytest.raises(ValueError, match=f"`{name}`"):
        idle_model.generate(IDS, max_new_tokens=3, **unused)
    with pytest.raises(ValueError, match=f"`{name}`"):
        idle_model.generate(IDS, generation_config=type(idle_model.generation_config)(max_new_tokens=3, **unused))


@pytest.mark.parametrize("unused", UNUSED_ARGUMENTS, ids=lambda unused: next(iter(unused)))
def test_an_argument_that_is_not_used_is_refused(unused, idle_model):
    with pytest.raises(ValueError, match=f"`{next(iter(unused))}`"):
        idle_model.generate(IDS, max_new_tokens=3, **unused)


def test_a_misspelt_argument_is_refused_with_the_right_name(idle_model):
    with pytest.raises(ValueError, match="`treshold`.*did you mean `threshold`"):
        idle_model.generate(IDS, max_new_tokens=3, treshold=0.5)


def test_neutral_values_of_unused_fields_pass():
    out = small_clover().generate(
        IDS, max_new_tokens=3, do_sample=False, num_beams=1, temperature=1.0, top_k=50, use_cache=True, streamer=None
    )
    assert out.shape == (2, 8)


def test_temperature_zero_is_greedy():
    model = small_clover()
    assert torch.equal(model.generate(IDS, max_new_tokens=9), model.generate(IDS, max_new_tokens=9, temperature=0.0))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"inputs": IDS[0]}, r"`input_ids`.*shape \(5,\).*\(B, P\)"),
        ({"inputs": IDS.float()}, "`input_ids`.*float32.*integer"),
        ({"inputs": IDS.tolist()}, "`input_ids` is 'list'|`input_ids` is list"),
        ({}, "`input_ids`"),
        ({"inputs": IDS[:, :0]}, "`input_ids`.*empty"),
        ({"inputs": IDS, "attention_mask": torch.tensor([[1] * 5, [0] * 5])}, "`input_ids`.*empty"),
        ({"inputs": IDS, "attention_mask": torch.tensor([[1] * 5, [1] * 3 + [0] * 2])}, "`attention_mask`.*left"),
        ({"inputs": IDS, "attention_mask": torch.tensor([[1] * 5, [1, 0, 1, 1, 1]])}, "`attention_mask`.*left"),
        ({"inputs": IDS, "attention_mask": torch.ones(2, 4)}, r"`attention_mask` is \(2, 4\).*\(2, 5\)"),
        ({"inputs": torch.tensor([[1, VOCAB]])}, r"`input_ids`.*\[0, 48\)"),
        ({"inputs": torch.tensor([[1, -1]])}, r"`input_ids`.*\[0, 48\)"),
        ({"inputs": IDS, "input_ids": IDS}, "`inputs`"),
    ],
    ids=["1-D", "float", "list", "none", "no columns", "empty row", "right", "hole", "mask", "high", "low", "twice"],
)
def test_prompts_that_cannot_be_answered_are_refused(inputs, message, idle_model):
    with pytest.raises(ValueError, match=message):
        idle_model.generate(**inputs, max_new_tokens=3, pad_token_id=PAD)


def test_without_a_mask_token_the_error_tells_how_to_set_one():
    model = draw(mask_token_id=None)
    with pytest.raises(ValueError, match="`mask_token_id` is None.*model.config.mask_token_id = "):
        model.generate(IDS, max_new_tokens=3)
    model.config.mask_token_id = MASK
    assert model.generate(IDS, max_new_tokens=3).shape == (2, 8)
