"""What ends an answer: end tokens, stop strings, criteria, time and the budget, each row for itself."""

import time
from pathlib import Path

import pytest
import torch
from small_clover import PAD, left_padded, prompt, small_clover
from transformers import AutoModel, AutoTokenizer, MaxTimeCriteria

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"


@pytest.fixture
def model():
    return small_clover()


@pytest.fixture(scope="module")
def tiny():
    return AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=True, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


def write(model, prompts, **options):
    options = {"max_new_tokens": 30, "threshold": 0.4, "return_dict_in_generate": True} | options
    return model.generate(**left_padded(prompts), **options)


def answer(out, width: int, row: int = 0) -> list[int]:
    return out.sequences[row, width:].tolist()


def test_a_criterion_is_called_on_every_prefix_of_the_answer_as_in_autoregressive_generation(model):
    seen = []
    out = write(model, [prompt(5)], stopping_criteria=[lambda ids, scores: bool(seen.append(ids[0].tolist()))])
    whole = out.sequences[0].tolist()
    assert seen == [whole[: 6 + i] for i in range(30)]
    assert out.finish_reason == ["length"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 11, 12, 29, 30])
def test_an_answer_ends_with_the_token_at_which_a_criterion_says_so(model, count):
    free = answer(write(model, [prompt(5)]), 5)
    stop = lambda ids, scores: torch.tensor([ids.shape[1] == 5 + count])  # noqa: E731
    out = write(model, [prompt(5)], stopping_criteria=[stop])
    assert answer(out, 5) == free[:count]
    assert out.finish_reason == ["stopping_criteria"]


def test_a_criterion_ends_its_row_alone_and_saves_the_passes(model):
    texts = [prompt(9), prompt(4)]
    free = write(model, texts)
    first = free.sequences[0, 9:].tolist()
    stop = lambda ids, scores: ids[0].tolist() == texts[0] + first[:3]  # noqa: E731
    out = write(model, texts, stopping_criteria=[stop], pad_token_id=PAD)
    assert answer(out, 9) == first[:3] + [PAD] * 27
    assert answer(out, 9, 1) == answer(free, 9, 1)
    assert out.finish_reason == ["stopping_criteria", "length"]
    assert out.num_commit_passes[0] == 0 < free.num_commit_passes[0]
    assert out.num_denoising_passes[0] < free.num_denoising_passes[0]


def test_an_end_token_comes_before_a_criterion_and_a_criterion_before_the_budget(model):
    free = answer(write(model, [prompt(5)]), 5)
    always = [lambda ids, scores: True]
    out = write(model, [prompt(5)], stopping_criteria=always, eos_token_id=free[0])
    assert (answer(out, 5), out.finish_reason) == (free[:1], ["stop"])
    out = write(model, [prompt(5)], stopping_criteria=always, max_new_tokens=1)
    assert (answer(out, 5), out.finish_reason) == (free[:1], ["stopping_criteria"])


def request(tokenizer, text: str) -> dict[str, torch.Tensor]:
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


TABLE = "Make a CSV table (name,age,points): James is 62 and has 82 points; David is 61 and has 12 points."


@pytest.mark.parametrize("block_size", [2, 3, 8, 32])
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_stop_string_ends_the_answer_also_when_it_is_split_across_blocks(tiny, tokenizer, block_size, length):
    inputs = request(tokenizer, TABLE)
    width, options = inputs["input_ids"].shape[1], {"block_size": block_size, "max_new_tokens": 24}
    free = tiny.generate(**inputs, **options)[0, width:].tolist()
    for at in (2, 9):
        stop = tokenizer.decode(free[at : at + length])
        out = tiny.generate(**inputs, **options, stop_strings=[stop], tokenizer=tokenizer, return_dict_in_generate=True)
        written = out.sequences[0, width:].tolist()
        shortest = next(n for n in range(1, 25) if stop in tokenizer.decode(free[:n]))
        assert written == free[:shortest]
        assert out.finish_reason == ["stop_string"]


def test_a_stop_string_that_never_comes_changes_nothing(tiny, tokenizer):
    inputs = request(tokenizer, TABLE)
    out = tiny.generate(**inputs, stop_strings="@@@", tokenizer=tokenizer, max_new_tokens=40)
    assert torch.equal(out, tiny.generate(**inputs, max_new_tokens=40))


def test_stop_strings_without_a_tokenizer_are_refused(model):
    with pytest.raises(ValueError, match="`stop_strings`.*tokenizer"):
        write(model, [prompt(5)], stop_strings=["x"])


def test_when_the_time_is_over_what_is_known_so_far_is_the_answer(model):
    free = write(model, [prompt(5), prompt(3)])
    wait = lambda row, step, block: time.sleep(0.02)  # noqa: E731
    out = write(model, [prompt(5), prompt(3)], max_time=0.1, callback=wait)
    assert out.finish_reason == ["time", "time"]
    for row in (0, 1):
        written = [token for token in answer(out, 5, row) if token != PAD]
        assert written == answer(free, 5, row)[: len(written)]
        assert 1 <= out.num_denoising_passes[row] < free.num_denoising_passes[row]


def test_enough_time_changes_nothing(model):
    out = write(model, [prompt(5)], max_time=1000.0)
    assert torch.equal(out.sequences, write(model, [prompt(5)]).sequences)
    assert out.finish_reason == ["length"]


def test_transformers_own_time_criterion_works_too(model):
    out = write(model, [prompt(5)], stopping_criteria=[MaxTimeCriteria(max_time=0.0)])
    assert (out.sequences.shape, out.finish_reason) == ((1, 6), ["stopping_criteria"])


def test_a_failing_criterion_leaves_the_model_as_it_was(model):
    def fails(ids, scores):
        raise RuntimeError("the user's")

    before = write(model, [prompt(5)]).sequences
    with pytest.raises(RuntimeError, match="the user's"):
        write(model, [prompt(5)], stopping_criteria=[fails])
    assert torch.equal(write(model, [prompt(5)]).sequences, before)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("stop_strings", [""], "stop_strings"),
        ("stop_strings", 3, "stop_strings"),
        ("max_time", 0, "max_time"),
        ("max_time", -1.0, "max_time"),
        ("stopping_criteria", [3], "stopping_criteria"),
        ("stopping_criteria", lambda ids, scores: True, "stopping_criteria"),
    ],
)
def test_what_can_end_nothing_is_refused(model, name, value, message):
    with pytest.raises(ValueError, match=f"`{message}`"):
        write(model, [prompt(5)], **{name: value})


def test_the_last_step_tells_that_the_time_is_over(model):
    wait = lambda row, step, block: time.sleep(0.02)  # noqa: E731
    for options in ({"decoding": "low_confidence"}, {"decoding": "self_speculative", "threshold": None}):
        out = write(model, [prompt(5)], max_time=0.05, callback=wait, output_trace=True, **options)
        assert [step.finish_reason for step in out.trace[0]] == [None] * (len(out.trace[0]) - 1) + ["time"]


@pytest.mark.parametrize("verdict", [None, torch.tensor([True, False]), "yes"])
def test_a_criterion_that_says_neither_yes_nor_no_is_an_error(model, verdict):
    with pytest.raises(ValueError, match="`stopping_criteria`.*true or false"):
        write(model, [prompt(5)], stopping_criteria=[lambda ids, scores: verdict])


def test_an_end_that_is_banned_never_comes_and_one_that_is_made_unlikely_comes_later(model):
    """Block-diffusion models tend to be too sure of the end; the usual means against that work here too."""
    eos = answer(write(model, [prompt(5)]), 5)[6]
    early = write(model, [prompt(5)], eos_token_id=eos)
    assert early.finish_reason == ["stop"]

    def unlikely(ids, scores):
        scores[:, eos] -= 1e4
        return scores

    for options in ({"suppress_tokens": [eos]}, {"logits_processor": [unlikely]}, {"min_new_tokens": 30}):
        out = write(model, [prompt(5)], eos_token_id=eos, **options)
        assert len(answer(out, 5)) == 30 > len(answer(early, 5))
        assert eos not in answer(out, 5)[:-1]
