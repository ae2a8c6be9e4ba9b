"""Batches through generate(): every row, whatever its neighbours and its padding, is the naive denoiser's."""

import threading
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive_denoiser import fresh_logits, naive_generate
from small_clover import MASK, PAD, draw, left_padded, prompt, small_clover

ROUNDING = 1e-5  # decisions closer than this may turn in another batch


def lengths(block_size: int) -> list[int]:
    """Of prompts: one token, shorter than a block, a block, longer, multiples."""
    return sorted({1, max(1, block_size - 1), block_size, block_size + 1, 2 * block_size, 2 * block_size + 3})


def write(model, prompts: list[list[int]], **options):
    options = {"return_dict_in_generate": True, "output_trace": True} | options
    return model.generate(**left_padded(prompts), **options)


def answers(output, width: int, eos=()) -> list[list[int]]:
    """Each row's new tokens, without the padding after its end token, which is checked."""
    kept = []
    for row in output.sequences[:, width:].tolist():
        ends = [i + 1 for i, token in enumerate(row) if token in eos]
        kept.append(row[: ends[0]] if ends else row)
        assert set(row[len(kept[-1]) :]) <= {PAD}
    return kept


def naive_rows(model, prompts, *, max_new_tokens, eos=(), max_denoising_steps=None, **options):
    options |= {"budget": max_new_tokens, "max_steps": max_denoising_steps, "eos": eos, "mask_id": MASK}
    return [naive_generate(partial(fresh_logits, model), row, **options) for row in prompts]


def assert_rows_are(output, prompts, expected, eos=()):
    """The rows of `output` are these naive answers, trace included."""
    width = max(map(len, prompts))
    assert output.sequences[:, :width].tolist() == left_padded(prompts)["input_ids"].tolist()
    assert answers(output, width, eos) == [naive.tokens for naive in expected]
    assert output.finish_reason == [naive.finish_reason for naive in expected]
    assert output.num_denoising_passes == [naive.denoising_passes for naive in expected]
    assert output.num_commit_passes == [naive.commit_passes for naive in expected]
    assert output.tokens_per_forward == [
        len(naive.tokens) / (naive.denoising_passes + naive.commit_passes) for naive in expected
    ]
    for trace, naive in zip(output.trace, expected, strict=True):
        assert [(s.block, s.step, s.positions, s.tokens) for s in trace] == [entry[:4] for entry in naive.trace]
        for step, entry in zip(trace, naive.trace, strict=True):
            assert step.confidences == pytest.approx(entry[4], abs=1e-4)


def assert_agrees(model, prompts, eos=(), **options):
    output = write(model, prompts, **options, **({"eos_token_id": list(eos)} if eos else {}))
    assert_rows_are(output, prompts, naive_rows(model, prompts, eos=eos, **options), eos)
    return output


@pytest.mark.parametrize("block_size", [4, 8, 32])
@pytest.mark.parametrize("threshold", [0, 0.05, 0.3, 0.6, 0.95, 1.0])
def test_rows_are_the_naive_denoisers_at_every_threshold(threshold, block_size):
    sizes = lengths(block_size) if block_size < 32 else [1, 33, 67]
    budget = 2 * block_size + 3 if block_size < 32 else 40
    prompts = [prompt(n, seed=1) for n in sizes]
    assert_agrees(small_clover(1), prompts, block_size=block_size, threshold=threshold, max_new_tokens=budget)


@pytest.mark.parametrize("block_size", [4, 8, 32])
@pytest.mark.parametrize("blocks, more", [(0, 1), (1, -1), (1, 0), (1, 1), (2, 3)])
def test_rows_are_the_naive_denoisers_at_every_budget(blocks, more, block_size):
    prompts, budget = [prompt(n, seed=2) for n in lengths(block_size)], blocks * block_size + more
    output = assert_agrees(small_clover(2), prompts, block_size=block_size, threshold=0.4, max_new_tokens=budget)
    assert output.finish_reason == ["length"] * len(prompts)
    assert output.sequences.shape[1] == max(map(len, prompts)) + budget


@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_end_where_the_naive_denoisers_do(block_size, seed):
    """End tokens taken from the middle of answers, so that rows end at different blocks, or not at all."""
    model, prompts = small_clover(seed), [prompt(n, seed) for n in lengths(block_size)]
    options = {"block_size": block_size, "threshold": 0.4, "max_new_tokens": 2 * block_size + 3}
    endless = answers(write(model, prompts, **options), max(map(len, prompts)))
    reasons, places = set(), set()
    for row, place in zip(endless[:3], (1, block_size, 2 * block_size), strict=True):
        for eos in ([row[place]], [row[place], endless[-1][0]]):
            output = assert_agrees(model, prompts, eos, **options)
            reasons |= set(output.finish_reason)
            places |= set(output.num_commit_passes)
    assert reasons == {"stop", "length"} and len(places) >= 3


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_rows_are_the_naive_denoisers_under_a_limit_of_steps(steps):
    prompts = [prompt(n) for n in (1, 8, 13)]
    output = assert_agrees(
        small_clover(), prompts, block_size=8, threshold=0.9, max_new_tokens=19, max_denoising_steps=steps
    )
    assert max(step.step for trace in output.trace for step in trace) == steps - 1


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 18), min_size=1, max_size=4),
    block_size=st.integers(1, 9),
    budget=st.integers(1, 15),
    threshold=st.sampled_from([0.0, 0.2, 0.35, 0.5, 0.8, 1.0]),
    eos=st.sets(st.integers(0, 46), max_size=4).map(sorted),
    steps=st.sampled_from([None, None, 1, 2, 4]),
    seed=st.integers(0, 2),
)
def test_any_batch_is_answered_as_the_naive_denoiser_answers_each_row(
    sizes, block_size, budget, threshold, eos, steps, seed
):
    model, prompts = small_clover(seed), [prompt(n, i) for i, n in enumerate(sizes)]
    options = {"block_size": block_size, "threshold": threshold, "max_new_tokens": budget}
    options |= {"max_denoising_steps": steps} if steps else {}
    expected = naive_rows(model, prompts, eos=eos, **options)
    assume(all(naive.closest > ROUNDING for naive in expected))
    output = write(model, prompts, **options, **({"eos_token_id": eos} if eos else {}))
    assert_rows_are(output, prompts, expected, eos)


@pytest.mark.parametrize("love", [7.0, 12.0])
def test_rows_are_the_naive_denoisers_when_the_mask_token_is_the_likeliest(love):
    """Through both: it is never written, and its share is left in every confidence."""
    model = draw(0)
    bonus = torch.zeros(48).index_fill(0, torch.tensor([MASK]), love)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + bonus)
    prompts = [prompt(n) for n in (3, 8, 21)]
    output = assert_agrees(model, prompts, block_size=8, threshold=0.1, max_new_tokens=19)
    assert MASK not in output.sequences
    confidences = [c for trace in output.trace for step in trace for c in step.confidences]
    assert min(confidences) < 0.05


def test_rows_are_the_naive_denoisers_with_mask_tokens_in_the_prompt():
    """In whole blocks and in the tail that shares the answer's first block."""
    prompts = [prompt(13), prompt(6)]
    for row in prompts:
        row[1] = row[-1] = row[-2] = MASK
    output = assert_agrees(small_clover(), prompts, block_size=8, threshold=0.4, max_new_tokens=11)
    assert MASK not in output.sequences[:, 13:]


def test_rows_are_the_naive_denoisers_inside_an_expert_coreset():
    """By the model's config, and by an argument over a model without one."""
    plain, coreset = small_clover(), small_clover(expert_coreset_top_p=0.3)
    prompts = [prompt(n) for n in (5, 12)]
    options = {"block_size": 8, "threshold": 0.4, "max_new_tokens": 30}
    by_config = assert_agrees(coreset, prompts, **options)
    by_argument = write(plain, prompts, expert_coreset_top_p=0.3, **options)
    assert by_argument.trace == by_config.trace != write(plain, prompts, **options).trace


# ---- padding ---------------------------------------------------------------------------------------------------------

OPTIONS = {"max_new_tokens": 13, "threshold": 0.4}


def test_what_stands_in_the_padding_does_not_matter():
    """Not even the mask token, nor an id that is none."""
    inputs = left_padded([prompt(n) for n in (3, 17, 9)])
    real = inputs["attention_mask"].bool()
    clean = small_clover().generate(**inputs, **OPTIONS)
    for noise in (torch.randint(1, 47, (3, 17), generator=torch.Generator().manual_seed(0)), torch.tensor(MASK)):
        ids = torch.where(real, inputs["input_ids"], noise)
        noisy = small_clover().generate(ids, attention_mask=inputs["attention_mask"], **OPTIONS)
        assert torch.equal(clean[:, 17:], noisy[:, 17:]) and torch.equal(noisy[:, :17], ids)


def test_columns_of_nothing_but_padding_change_nothing():
    ids = torch.tensor([prompt(9)])
    padded = torch.cat([torch.full((1, 6), PAD), ids], dim=1)
    plain, more = (small_clover().generate(x, **OPTIONS) for x in (ids, padded))
    assert torch.equal(plain[:, 9:], more[:, 15:])


def test_no_attention_mask_is_inferred_where_the_pad_token_also_ends_answers():
    """As in transformers: such a token may be part of the prompt."""
    model, ids = small_clover(), torch.tensor([[PAD, PAD, *prompt(7)]])
    bare = model.generate(ids, **OPTIONS, eos_token_id=PAD)
    text, padded = torch.ones_like(ids), torch.tensor([[0, 0] + [1] * 7])
    assert torch.equal(bare, model.generate(ids, attention_mask=text, **OPTIONS, eos_token_id=PAD))
    assert not torch.equal(bare, model.generate(ids, attention_mask=padded, **OPTIONS, eos_token_id=PAD))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_an_attention_mask_may_be_of_any_dtype(dtype):
    inputs = left_padded([prompt(n) for n in (3, 17)])
    mask = inputs["attention_mask"].to(dtype)
    other = small_clover().generate(inputs["input_ids"], attention_mask=mask, **OPTIONS)
    assert torch.equal(other, small_clover().generate(**inputs, **OPTIONS))


@pytest.mark.parametrize("pad", [PAD, 45])
def test_rows_that_end_early_are_padded_with_the_pad_token(pad):
    prompts = [prompt(4), prompt(11)]
    eos = answers(write(small_clover(), prompts, **OPTIONS), 11)[0][3]
    sequences = small_clover().generate(**left_padded(prompts), **OPTIONS, eos_token_id=eos, pad_token_id=pad)
    row = sequences[0, 11:].tolist()
    assert len(row) > row.index(eos) + 1 and set(row[row.index(eos) + 1 :]) == {pad}


def test_without_a_pad_token_the_first_end_token_is_the_padding_as_in_transformers():
    model, prompts = small_clover(pad_token_id=None), [prompt(4), prompt(11)]
    eos = model.generate(**left_padded(prompts), **OPTIONS)[0, 14].item()
    row = model.generate(**left_padded(prompts), **OPTIONS, eos_token_id=[eos, 46])[0, 11:].tolist()
    assert len(row) > row.index(eos) + 1 and set(row[row.index(eos) :]) == {eos}


# ---- what comes in and what comes back -------------------------------------------------------------------------------


def test_the_prompt_is_positional_or_named_and_its_dtype_is_the_answers():
    model, ids = small_clover(), torch.tensor([prompt(11)])
    sequences = model.generate(ids, **OPTIONS)
    assert sequences.shape == (1, 24) and sequences.dtype == torch.long and torch.equal(sequences[:, :11], ids)
    for same in (model.generate(input_ids=ids, **OPTIONS), model.generate(inputs=ids, **OPTIONS)):
        assert torch.equal(same, sequences)
    narrow = model.generate(ids.int(), **OPTIONS)
    assert narrow.dtype == torch.int32 and torch.equal(narrow.long(), sequences)


def test_generation_leaves_the_random_state_alone():
    state = torch.random.get_rng_state()
    sequences = small_clover().generate(torch.tensor([prompt(11)]), **OPTIONS)
    assert torch.equal(state, torch.random.get_rng_state()) and not sequences.requires_grad


def test_a_callback_alone_changes_nothing_and_its_exception_stops_the_work():
    model, ids, calls = small_clover(), torch.tensor([prompt(11)]), []

    def stop(*call):
        calls.append(call)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **OPTIONS, callback=stop)
    assert len(calls) == 2
    assert torch.equal(model.generate(ids, **OPTIONS, callback=lambda *call: None), model.generate(ids, **OPTIONS))


def test_two_threads_write_what_each_would_write_alone_and_leave_the_model_as_it_was():
    model = draw(0)
    ids = torch.tensor([prompt(9)])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "threshold": 0.4}
    causal, alone, written = model(ids).logits, model.generate(ids, **options), []

    def work():
        written.extend(model.generate(ids, **options) for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 9
    assert all(torch.equal(one, alone) for one in written)
    assert torch.equal(model(ids).logits, causal)
