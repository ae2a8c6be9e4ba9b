"""What keeps an answer from going wrong: penalties, ramps, bans and the user's own processors, by naive loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_denoiser import fresh_logits, naive_generate
from small_clover import MASK, VOCAB, left_padded, prompt, small_clover

EOS = 7


@pytest.fixture
def model():
    return small_clover()


def write(model, text, **options):
    out = model.generate(**left_padded([text]), **{"max_new_tokens": 30, "threshold": 0.4} | options)
    return out[0, len(text) :].tolist()


def naive(model, text, adjust, budget=30, eos=(), threshold=0.4) -> list[int]:
    """The naive denoiser's answer with logits changed by `adjust(logits, position in answer, answer with None)`."""

    def logits_of(prefix, block):
        logits = fresh_logits(model, prefix, block)
        answer = [None if token == MASK else token for token in (prefix + block)[len(text) :]]
        first = len(text) - len(prefix)
        for i in range(max(first, 0), len(block)):
            adjust(logits[i], i - first, answer)
        return logits

    settings = {"block_size": 8, "threshold": threshold, "budget": budget, "mask_id": MASK, "eos": eos}
    return naive_generate(logits_of, text, **settings).tokens


# ---- penalties and ramps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value", [("presence_penalty", 3.0), ("frequency_penalty", 1.5), ("repetition_penalty", 1.8)]
)
@pytest.mark.parametrize("length", [3, 8, 13])
def test_penalties_look_at_the_response_alone_accepted_tokens_of_the_block_included(model, name, value, length):
    text = prompt(length)

    def adjust(logits, position, answer):
        for token in {token for token in answer if token is not None}:
            if name == "presence_penalty":
                logits[token] -= value
            elif name == "frequency_penalty":
                logits[token] -= value * answer.count(token)
            else:
                logits[token] = logits[token] / value if logits[token] > 0 else logits[token] * value

    penalised = write(model, text, **{name: value})
    assert penalised == naive(model, text, adjust)
    assert penalised != write(model, text)


def test_penalties_end_a_forced_repetition():
    model, stuck = small_clover(), torch.nn.functional.one_hot(torch.tensor(9), VOCAB) * 9.0
    bias = [lambda ids, scores: scores + stuck]
    repeating = write(model, prompt(5), logits_processor=bias)
    assert repeating.count(9) > 20
    for name, value in (("presence_penalty", 9.0), ("frequency_penalty", 2.0), ("no_repeat_ngram_size", 2)):
        assert write(model, prompt(5), logits_processor=bias, **{name: value}).count(9) < repeating.count(9) / 2


def test_a_stop_ramp_makes_the_end_likelier_the_longer_the_answer(model):
    text, bump = prompt(5), {"start": 4, "slope": 0.5, "max": 6.0}

    def adjust(logits, position, answer):
        if position > 4:
            logits[EOS] += min(6.0, 0.5 * (position - 4))

    ramped = write(model, text, stop_ramp=bump, eos_token_id=EOS, max_new_tokens=60)
    assert ramped == naive(model, text, adjust, budget=60, eos=(EOS,))
    assert ramped[-1] == EOS
    assert len(ramped) < len(write(model, text, eos_token_id=EOS, max_new_tokens=60))


START, END = 11, 12


@pytest.mark.parametrize("opened", ["by the prompt", "never", "and closed by the prompt"])
def test_a_think_end_ramp_works_while_thinking_is_open_and_nothing_behind_is_known(model, opened):
    """One token a pass: what may be accepted beside an end is another test's."""
    text = prompt(9)
    text[4] = START if opened != "never" else 1
    text[6] = END if "closed" in opened else 1
    options = {"think_start_token_id": START, "think_end_token_id": END, "max_new_tokens": 40}
    options["suppress_tokens"] = [START]

    def adjust(logits, position, answer):
        logits[START] = float("-inf")
        known_behind = any(token is not None for token in answer[position + 1 :])
        if opened == "by the prompt" and END not in answer and position > 2 and not known_behind:
            logits[END] += min(8.0, position - 2)

    ramped = write(model, text, think_end_ramp={"start": 2, "slope": 1.0, "max": 8.0}, threshold=1.0, **options)
    assert ramped == naive(model, text, adjust, budget=40, threshold=1.0)
    assert (END in ramped) >= (opened == "by the prompt")


# ---- bans ------------------------------------------------------------------------------------------------------------


def test_suppressed_tokens_and_one_token_bad_words_are_never_written(model):
    text = prompt(5)
    common = sorted(set(write(model, text)), key=write(model, text).count)[-3:]

    def adjust(logits, position, answer):
        logits[common] = float("-inf")

    expected = naive(model, text, adjust)
    assert write(model, text, suppress_tokens=common) == expected
    assert write(model, text, bad_words_ids=[[token] for token in common]) == expected
    ban = lambda ids, scores: scores.index_fill(-1, torch.tensor(common), float("-inf"))  # noqa: E731
    assert write(model, text, logits_processor=[ban]) == expected


def holds(text: list[int], word: list[int]) -> bool:
    return any(text[i : i + len(word)] == word for i in range(len(text)))


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("threshold", [0.0, 0.2, 1.0])
def test_bad_words_of_several_tokens_are_never_written_however_many_are_accepted_at_once(model, length, threshold):
    text, options = prompt(5), {"threshold": threshold}
    free = write(model, text, **options)
    words = [free[i : i + length] for i in range(0, len(free) - length, 4)]
    written = write(model, text, bad_words_ids=words, **options)
    assert not any(holds(written, word) for word in words)
    assert len(written) == 30


@settings(derandomize=True, database=None, deadline=None, max_examples=25)
@given(st.integers(1, 4), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.integers(0, 3), st.integers(1, 12))
def test_no_ngram_is_written_twice(ngram, threshold, seed, length):
    options = {"no_repeat_ngram_size": ngram, "threshold": threshold, "block_size": 8}
    written = write(small_clover(seed), prompt(length), **options)
    found = [tuple(written[i : i + ngram]) for i in range(len(written) - ngram + 1)]
    assert len(set(found)) == len(found)


def test_an_answer_is_at_least_as_long_as_asked(model, monkeypatch):
    text = prompt(5)
    ends = write(model, text)[3]
    short = write(model, text, eos_token_id=ends, pad_token_id=0)
    long = write(model, text, eos_token_id=ends, pad_token_id=0, min_new_tokens=12)
    assert len(short) < 12 <= len(long)
    assert ends not in long[:12]


# ---- the user's own --------------------------------------------------------------------------------------------------


def test_a_processor_sees_the_tokens_before_each_masked_position(model):
    text, seen = prompt(11), []

    def watch(ids, scores):
        assert ids.shape[0] == scores.shape[0] == 1
        assert scores.shape[1] == VOCAB
        seen.append(ids[0].tolist())
        return scores

    written = write(model, text, logits_processor=[watch], max_new_tokens=5)
    assert [len(ids) for ids in seen[:5]] == [11, 12, 13, 14, 15]
    assert written == write(model, text, max_new_tokens=5)
    whole = text + written
    for ids in seen:
        assert ids[:11] == text
        assert all(token in (MASK, known) for token, known in zip(ids, whole, strict=False))


def test_processors_that_leave_nothing_to_choose_are_an_error(model):
    with pytest.raises(ValueError, match="no token"):
        write(model, prompt(5), logits_processor=[lambda ids, scores: scores * 0 + float("-inf")])


@pytest.mark.parametrize("name", ["no_repeat_ngram_size", "bad_words_ids"])
def test_a_limit_of_passes_and_forbidden_sequences_contradict_each_other(model, name):
    value = 2 if name == "no_repeat_ngram_size" else [[1, 2]]
    with pytest.raises(ValueError, match="`max_denoising_steps` is 1"):
        write(model, prompt(5), max_denoising_steps=1, **{name: value})


@pytest.mark.parametrize(
    "options", [{"no_repeat_ngram_size": 1}, {"bad_words_ids": [[9]]}, {"bad_words_ids": [[9, 9]]}]
)
def test_a_processor_that_forces_a_token_has_the_last_word(model, options):
    force = lambda ids, scores: torch.full_like(scores, float("-inf")).index_fill(-1, torch.tensor([9]), 0.0)  # noqa: E731
    assert write(model, prompt(5), logits_processor=[force], max_new_tokens=12, **options) == [9] * 12
