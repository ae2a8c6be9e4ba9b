"""CloverGenerationConfig: which value wins, and that what is saved is loaded and takes effect."""

import copy
import json

import pytest
import torch
from small_clover import draw, prompt, small_clover
from transformers import AutoModelForCausalLM, GenerationConfig

from clover import CloverGenerationConfig
from clover.options_clover import BLOCK_FIELDS

IDS = torch.tensor([prompt(11)])
FIELDS = {
    "block_size": 4,
    "threshold": 0.35,
    "max_denoising_steps": 3,
    "decoding": "low_confidence",
    "expert_coreset_top_p": 0.5,
    "output_trace": True,
    "return_dict_in_generate": True,
    "max_new_tokens": 14,
    "eos_token_id": [45, 46],
    "pad_token_id": 0,
}


@pytest.fixture
def model(monkeypatch):
    """One whose generation config is the test's own."""
    model = small_clover()
    monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
    return model


def steps(model, *args, **options) -> list[tuple]:
    """What each pass filled: it shows the block size, the threshold and the budget that were in force."""
    seen = []
    model.generate(IDS, *args, callback=lambda row, step, block: seen.append((step, tuple(block))), **options)
    return [(s.block, s.step, s.positions, len(block)) for s, block in seen]


def test_the_model_that_is_loaded_has_a_clover_generation_config(tmp_path):
    draw().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded.generation_config).__name__ == "CloverGenerationConfig"
    assert isinstance(loaded.generation_config, GenerationConfig)
    assert type(draw().generation_config).__name__ == "CloverGenerationConfig"


def test_the_default_threshold_is_095():
    model = draw()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # many confidences near 1
    by_threshold = {x: steps(model, max_new_tokens=100, threshold=x) for x in (0.93, 0.95, 0.97)}
    assert by_threshold[0.93] != by_threshold[0.95] != by_threshold[0.97]
    assert steps(model, max_new_tokens=100) == by_threshold[0.95]


def test_the_default_block_size_is_the_models(model):
    explicit = steps(model, max_new_tokens=17, threshold=0.95, block_size=8, decoding="low_confidence")
    assert steps(model, max_new_tokens=17) == explicit
    small = small_clover(block_size=4)
    assert steps(small, max_new_tokens=17) == steps(model, max_new_tokens=17, block_size=4)
    assert {width for *_, width in steps(small, max_new_tokens=17)} == {4}


def test_without_a_budget_an_answer_fills_the_context():
    model = small_clover(max_position_embeddings=32)
    assert model.generate(IDS, threshold=0.4).shape == (1, 32)


def test_max_length_counts_the_prompt(model):
    assert model.generate(IDS, max_length=20, threshold=0.4).shape == (1, 20)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), IDS], dim=1)
    assert model.generate(padded, max_length=20, threshold=0.4).shape == (1, 20)


def test_max_length_and_max_new_tokens_are_one_limit_with_the_one_precedence(model):
    """Whichever of the two an argument gives wins over whichever of the two a config gives."""
    with pytest.raises(ValueError, match="`max_length` is 20.*`max_new_tokens`"):
        model.generate(IDS, max_length=20, max_new_tokens=3)
    with pytest.raises(ValueError, match="`max_length` is 20.*`max_new_tokens`"):
        model.generate(IDS, CloverGenerationConfig(max_length=20, max_new_tokens=3))
    for config in (CloverGenerationConfig(max_length=20), CloverGenerationConfig(max_new_tokens=9)):
        assert model.generate(IDS, config).shape == (1, 20)
        assert model.generate(IDS, config, max_new_tokens=3).shape == (1, 14)
        assert model.generate(IDS, config, max_length=15).shape == (1, 15)
    model.generation_config.max_new_tokens = 5
    assert model.generate(IDS).shape == (1, 16)
    assert model.generate(IDS, max_length=20).shape == (1, 20)
    assert model.generate(IDS, CloverGenerationConfig(max_length=20)).shape == (1, 20)


def test_a_whole_context_may_be_filled_exactly():
    model = small_clover(max_position_embeddings=32)
    assert model.generate(IDS, max_new_tokens=21, threshold=0.4).shape == (1, 32)


@pytest.mark.parametrize("kind", [CloverGenerationConfig, GenerationConfig])
@pytest.mark.parametrize("highest", range(1, 4))
@pytest.mark.parametrize("name, values", [("threshold", [0.95, 0.2, 0.45, 0.0]), ("block_size", [8, 4, 3, 5])])
def test_an_argument_wins_over_a_config_over_the_models_own_over_the_default(model, kind, highest, name, values):
    """`values` by level; all levels up to the highest are given."""
    expected = steps(model, **{"max_new_tokens": 17, name: values[highest]})
    setattr(model.generation_config, name, values[1])
    config = kind(max_new_tokens=17, **({name: values[2]} if highest >= 2 else {}))
    options = {name: values[3]} if highest == 3 else {}
    assert steps(model, config, **options) == expected
    assert steps(model, generation_config=config, **options) == expected


def test_a_config_keeps_of_the_models_own_what_it_does_not_set(model):
    model.generation_config.threshold, model.generation_config.eos_token_id = 0.4, None
    expected = steps(model, threshold=0.4, block_size=4, max_new_tokens=9)
    assert steps(model, CloverGenerationConfig(block_size=4, max_new_tokens=9)) == expected


def test_generate_changes_no_config_that_it_is_given(model):
    config = CloverGenerationConfig(threshold=0.4, max_new_tokens=9)
    given, own = config.to_dict(), model.generation_config.to_dict()
    model.generate(IDS, config, block_size=4, eos_token_id=45)
    assert config.to_dict() == given and model.generation_config.to_dict() == own


def test_a_clover_generation_config_is_saved_and_loaded_with_all_its_fields(tmp_path):
    config = CloverGenerationConfig(**FIELDS)
    config.save_pretrained(tmp_path)
    assert FIELDS.items() <= json.loads((tmp_path / "generation_config.json").read_text()).items()
    loaded = CloverGenerationConfig.from_pretrained(tmp_path)
    assert FIELDS.items() <= loaded.to_dict().items()
    plain = GenerationConfig.from_pretrained(tmp_path)
    assert FIELDS.items() <= plain.to_dict().items()
    assert CloverGenerationConfig.from_dict(plain.to_dict()) == loaded


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_config_of_temperature_0_is_saved_and_greedy(model, tmp_path, do_sample):
    CloverGenerationConfig(temperature=0.0, do_sample=do_sample).save_pretrained(tmp_path)
    loaded = CloverGenerationConfig.from_pretrained(tmp_path)
    assert loaded.temperature == 0
    assert torch.equal(model.generate(IDS, loaded, max_new_tokens=9), model.generate(IDS, max_new_tokens=9))


def test_the_fields_survive_a_models_save_and_load_and_take_effect(tmp_path):
    """Twice: a model that was drawn, and one that was loaded, whose generation configs come about differently."""
    model = draw()
    model.generation_config.threshold, model.generation_config.block_size = 0.35, 4
    for i in range(2):
        model.save_pretrained(tmp_path / str(i))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(i), trust_remote_code=True).eval()
        assert (model.generation_config.threshold, model.generation_config.block_size) == (0.35, 4)
        expected = steps(small_clover(), threshold=0.35, block_size=4, max_new_tokens=17)
        assert steps(model, max_new_tokens=17) == expected
        assert expected != steps(model, threshold=0.95, block_size=8, max_new_tokens=17)


def edited(folder, **fields):
    """A saved Clover whose generation_config.json a user wrote; loaded."""
    small_clover().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def test_a_threshold_written_into_generation_config_json_takes_effect(tmp_path):
    model = edited(tmp_path, threshold=0.35, block_size=4, pad_token_id=0)
    assert steps(model, max_new_tokens=17) == steps(small_clover(), max_new_tokens=17, threshold=0.35, block_size=4)
    assert steps(model, max_new_tokens=17, threshold=0.95) != steps(model, max_new_tokens=17)


def test_a_file_that_transformers_derived_from_the_models_config_keeps_our_fields(tmp_path):
    """It is marked, and for a marked file a plain GenerationConfig forgets the fields it does not know."""
    model = edited(tmp_path, threshold=0.35, _from_model_config=True)
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["threshold"] == 0.35


def test_a_value_out_of_range_in_generation_config_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"threshold.*1\.5.*\[0, 1\]"):
        edited(tmp_path, threshold=1.5).generate(IDS, max_new_tokens=5)


def test_a_misspelt_field_in_generation_config_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="treshold"):
        edited(tmp_path, treshold=0.5).generate(IDS, max_new_tokens=5)


def test_a_checkpoint_without_generation_config_json_has_the_defaults(tmp_path):
    small_clover().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert type(model.generation_config).__name__ == "CloverGenerationConfig"
    assert steps(model, max_new_tokens=17) == steps(small_clover(), max_new_tokens=17)


def test_a_generation_config_given_to_from_pretrained_is_the_models_own(tmp_path):
    small_clover().save_pretrained(tmp_path)
    for kind in (CloverGenerationConfig, GenerationConfig):
        config = kind(threshold=0.35, max_new_tokens=17)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, generation_config=config)
        assert type(model.generation_config).__name__ == "CloverGenerationConfig"
        assert steps(model.eval()) == steps(small_clover(), threshold=0.35, max_new_tokens=17)


def test_end_tokens_of_the_config_end_an_answer(tmp_path):
    free = small_clover().generate(IDS, max_new_tokens=20, threshold=0.4)[0, 11:].tolist()
    model = edited(tmp_path, threshold=0.4, eos_token_id=[free[5], 46], pad_token_id=0)
    ended = model.generate(IDS, max_new_tokens=20)[0, 11:].tolist()
    assert ended == free[: free.index(free[5]) + 1]
    listless = model.generate(IDS, max_new_tokens=20, eos_token_id=[])[0, 11:].tolist()
    assert listless == free


def test_a_copy_of_a_model_keeps_its_generation_config():
    model = draw()
    model.generation_config.threshold = 0.35
    assert copy.deepcopy(model).generation_config.threshold == 0.35


def test_none_is_the_default():
    model = small_clover()
    names = ["threshold", "decoding", "temperature", "top_k", "repetition_penalty", "presence_penalty", "do_sample"]
    names += ["num_return_sequences", "no_repeat_ngram_size", "output_trace", "block_size", "max_time", "stop_strings"]
    expected = steps(model, max_new_tokens=17)
    for name in names:
        assert steps(model, max_new_tokens=17, **{name: None}) == expected
    assert steps(model, max_new_tokens=17, **dict.fromkeys(names)) == expected


@pytest.mark.parametrize("decoding", ["low_confidence", "self_speculative", "autoregressive"])
def test_an_empty_list_of_end_tokens_is_none(decoding):
    model, options = draw(pad_token_id=None), {"attention_mask": torch.ones_like(IDS), "decoding": decoding}
    out = model.generate(IDS, eos_token_id=[], max_new_tokens=9, **options)
    assert torch.equal(out, model.generate(IDS, max_new_tokens=9, **options))


EVERY_FIELD = {
    "decoding": "low_confidence",
    "block_size": 4,
    "threshold": 0.35,
    "max_denoising_steps": 3,
    "expert_coreset_top_p": 0.5,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "stop_ramp": {"start": 2, "slope": 0.5, "max": 3.0},
    "think_end_ramp": {"start": 1, "slope": 0.25, "max": 2.0},
    "think_start_token_id": 11,
    "think_end_token_id": 12,
    "repetition_penalty": 1.3,
    "suppress_tokens": [5, 6],
    "bad_words_ids": [[7]],
    "min_new_tokens": 3,
    "max_new_tokens": 17,
    "eos_token_id": [3, 4],
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.01,
}
ELSEWHERE = {"output_trace", "max_thinking_tokens", "draft_threshold", "draft_steps"}  # which contradict those


def test_every_field_means_the_same_in_a_file_in_a_config_and_as_an_argument(tmp_path):
    assert set(BLOCK_FIELDS) <= set(EVERY_FIELD) | ELSEWHERE
    draw().save_pretrained(tmp_path)
    CloverGenerationConfig(pad_token_id=0, **EVERY_FIELD).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    texts = []
    for model, given in (
        (loaded, {}),
        (small_clover(), {"generation_config": CloverGenerationConfig(**EVERY_FIELD)}),
        (small_clover(), {"generation_config": CloverGenerationConfig.from_pretrained(tmp_path)}),
        (small_clover(), EVERY_FIELD),
    ):
        torch.manual_seed(0)
        texts.append(model.generate(IDS, **given).tolist())
    assert all(text == texts[0] for text in texts)
    torch.manual_seed(0)
    assert small_clover().generate(IDS, **EVERY_FIELD | {"temperature": 1.7}).tolist() != texts[0]


@pytest.mark.parametrize("fields", [{"draft_threshold": 0.9, "draft_steps": 3}, {"max_thinking_tokens": 3}])
def test_so_do_the_fields_that_go_with_others(tmp_path, fields):
    marks = {"think_start_token_id": 11, "think_end_token_id": 12}
    fields = fields | ({"decoding": "self_speculative"} if "draft_steps" in fields else marks)
    CloverGenerationConfig(**fields).save_pretrained(tmp_path)
    loaded = CloverGenerationConfig.from_pretrained(tmp_path)
    assert fields.items() <= loaded.to_dict().items()
    text = torch.tensor([[*prompt(5), 11]])
    expected = small_clover().generate(text, max_new_tokens=12, **fields)
    assert torch.equal(small_clover().generate(text, loaded, max_new_tokens=12), expected)
