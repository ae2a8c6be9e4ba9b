"""Whole answers through `generate()`, against the naive denoiser, and what must hold of any answer."""

import copy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_denoiser import fresh_logits, naive_generate
from small_clover import MASK, PAD, VOCAB, draw, left_padded, prompt, small_clover
from transformers import DynamicCache, GenerationConfig

EOS = [5, 9, 13, 21]
ROUNDING = 1e-5  # below this, fp32 may turn a decision


def write(model, prompts, **options):
    options = {"max_new_tokens": 20, "pad_token_id": PAD} | options
    return model.generate(**left_padded(prompts), return_dict_in_generate=True, output_trace=True, **options)


def new_tokens(out, row: int, prompts) -> list[int]:
    """A row's answer without the padding after it."""
    length = round(out.tokens_per_forward[row] * (out.num_denoising_passes[row] + out.num_commit_passes[row]))
    written = out.sequences[row, max(map(len, prompts)) :].tolist()
    assert written[length:] == [PAD] * (len(written) - length)
    return written[:length]


def assert_is_naive(model, text, block_size, threshold, budget, eos=(), max_steps=None):
    """Compares everything with the oracle; returns whether its decisions were clear of rounding."""
    naive = naive_generate(
        lambda prefix, block: fresh_logits(model, prefix, block),
        text,
        block_size=block_size,
        threshold=threshold,
        budget=budget,
        mask_id=MASK,
        eos=eos,
        max_steps=max_steps,
    )
    if naive.closest < ROUNDING:
        return False
    out = write(
        model,
        [text],
        block_size=block_size,
        threshold=threshold,
        max_new_tokens=budget,
        eos_token_id=list(eos) or None,
        max_denoising_steps=max_steps,
    )
    assert new_tokens(out, 0, [text]) == naive.tokens
    assert out.finish_reason == [naive.finish_reason]
    assert out.num_denoising_passes == [naive.denoising_passes]
    assert out.num_commit_passes == [naive.commit_passes]
    assert [(s.block, s.step, s.positions, s.tokens) for s in out.trace[0]] == [step[:4] for step in naive.trace]
    for ours, theirs in zip(out.trace[0], naive.trace, strict=True):
        assert ours.confidences == pytest.approx(theirs[4], abs=1e-4)
    return True


# ---- against the oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 8, 9, 16, 19])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3, 0.95, 1.0])
def test_an_answer_is_the_naive_denoisers(length, threshold):
    assert_is_naive(small_clover(), prompt(length), 8, threshold, budget=19, eos=EOS)


@pytest.mark.parametrize("budget", [1, 7, 8, 9, 19])
@pytest.mark.parametrize("length", [3, 8, 13])
def test_an_answer_within_any_budget_is_the_naive_denoisers(length, budget):
    assert_is_naive(small_clover(seed=1), prompt(length, seed=1), 8, 0.2, budget)


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_an_answer_in_blocks_of_any_size_is_the_naive_denoisers(block_size):
    assert_is_naive(small_clover(seed=2), prompt(21, seed=2), block_size, 0.15, budget=2 * block_size + 3, eos=EOS)


@pytest.mark.parametrize("max_steps", [1, 2, 5])
def test_with_few_passes_allowed_the_answer_is_the_naive_denoisers(max_steps):
    assert_is_naive(small_clover(), prompt(11), 8, 0.9, budget=20, max_steps=max_steps)


def test_the_oracle_decides_clearly_and_its_answers_vary():
    """What the other tests rest on: their models do not write one token over and over, nor on a knife's edge."""
    clear = [assert_is_naive(small_clover(seed), prompt(9, seed), 8, 0.3, 24) for seed in range(4)]
    assert sum(clear) >= 3
    for seed in range(4):
        out = write(small_clover(seed), [prompt(9, seed)], max_new_tokens=24, threshold=0.3)
        assert len(set(out.sequences[0, 9:].tolist())) > 4
        confidences = [c for step in out.trace[0] for c in step.confidences]
        assert min(confidences) < 0.4 < 0.6 < max(confidences)


# ---- batches ---------------------------------------------------------------------------------------------------------

PROMPTS = [prompt(length, seed=3) for length in (3, 8, 21, 1, 16)]


@pytest.mark.parametrize("options", [{"threshold": 0.2}, {"threshold": 0.95, "eos_token_id": EOS}, {"threshold": 0.0}])
def test_unequal_prompts_in_one_batch_get_what_each_gets_alone(options):
    model = small_clover(seed=3)
    together = write(model, PROMPTS, **options)
    for row, text in enumerate(PROMPTS):
        alone = write(model, [text], **options)
        assert new_tokens(together, row, PROMPTS) == new_tokens(alone, 0, [text])
        assert together.finish_reason[row] == alone.finish_reason[0]
        assert together.num_denoising_passes[row] == alone.num_denoising_passes[0]
        assert together.num_commit_passes[row] == alone.num_commit_passes[0]
        assert [s.positions for s in together.trace[row]] == [s.positions for s in alone.trace[0]]


def test_the_order_of_rows_and_the_content_of_padding_change_nothing():
    model = small_clover(seed=3)
    straight = write(model, PROMPTS, threshold=0.3)
    backwards = write(model, PROMPTS[::-1], threshold=0.3)
    for row in range(len(PROMPTS)):
        mirrored = len(PROMPTS) - 1 - row
        assert new_tokens(straight, row, PROMPTS) == new_tokens(backwards, mirrored, PROMPTS)
    inputs = left_padded(PROMPTS, pad=7)
    out = model.generate(**inputs, max_new_tokens=20, threshold=0.3, pad_token_id=PAD)
    assert torch.equal(out[:, 21:], straight.sequences[:, 21:])


def test_without_a_mask_padding_is_found_by_the_pad_token_as_in_transformers():
    model, inputs = small_clover(seed=3), left_padded(PROMPTS)
    given_mask = model.generate(**inputs, max_new_tokens=12, threshold=0.3, eos_token_id=EOS, pad_token_id=PAD)
    inferred = model.generate(inputs["input_ids"], max_new_tokens=12, threshold=0.3, eos_token_id=EOS, pad_token_id=PAD)
    assert torch.equal(given_mask, inferred)


def count_rows(model, monkeypatch) -> dict[str, int]:
    """Counts the rows that go through each verb."""
    counts = {"denoise": 0, "commit": 0}
    for verb in counts:
        original = getattr(type(model), verb)

        def counted(self, prefix, block, *args, _verb=verb, _original=original, **kwargs):
            counts[_verb] += len(block)
            return _original(self, prefix, block, *args, **kwargs)

        monkeypatch.setattr(type(model), verb, counted)
    return counts


@pytest.mark.parametrize("options", [{}, {"eos_token_id": EOS}])
def test_a_row_costs_no_pass_that_it_does_not_take(options, monkeypatch):
    model = small_clover(seed=3)
    counts = count_rows(model, monkeypatch)
    out = write(model, PROMPTS, threshold=0.3, **options)
    assert counts == {"denoise": sum(out.num_denoising_passes), "commit": sum(out.num_commit_passes)}
    assert len(set(out.num_denoising_passes)) > 1  # or nothing was shown


# ---- what holds of any answer ----------------------------------------------------------------------------------------


def test_the_mask_token_is_never_written_however_probable():
    model = draw(seed=4)
    with torch.no_grad():
        model.lm_head.weight[MASK] = 3 * model.lm_head.weight.abs().max() * torch.sign(model.lm_head.weight[1])
    out = write(model, [prompt(9)], max_new_tokens=30)
    assert MASK not in out.sequences[0, 9:].tolist()
    confidences = [confidence for step in out.trace[0] for confidence in step.confidences]
    assert min(confidences) < 0.05  # the mask token's share was left in


def test_mask_tokens_of_the_prompt_are_text():
    model, text = small_clover(), prompt(5) + [MASK, MASK, 3]
    out = write(model, [text[:7]], max_new_tokens=9)
    assert out.sequences[0, :7].tolist() == text[:7]
    assert all(position >= 7 for step in out.trace[0] for position in step.positions)
    assert_is_naive(model, text[:7], 8, 0.3, 9)


@pytest.mark.parametrize("eos", [EOS, 5])
def test_nothing_but_padding_follows_an_end_token_and_no_pass_is_spent_on_it(eos):
    ends = [eos] if isinstance(eos, int) else eos
    stopped = 0
    for seed in range(12):
        text = prompt(10, seed)
        out = write(small_clover(seed), [text], threshold=0.3, eos_token_id=eos, max_new_tokens=64)
        answer = new_tokens(out, 0, [text])
        if out.finish_reason == ["stop"]:
            stopped += 1
            assert answer[-1] in ends and not set(answer[:-1]) & set(ends)
            last = max(step.block for step in out.trace[0])
            assert last == (len(text) + len(answer) - 1) // 8
            assert out.num_commit_passes == [last - len(text) // 8]
            known = {p for step in out.trace[0][:-1] for p in step.positions}
            assert not set(range(10, 10 + len(answer))) <= known  # the last pass was needed
    assert stopped >= 2


@pytest.mark.parametrize(("threshold", "passes"), [(0.0, 1), (1.0, 8)])
def test_the_ends_of_the_threshold_are_one_pass_a_block_and_one_token_a_pass(threshold, passes):
    out = write(small_clover(), [prompt(8)], threshold=threshold, max_new_tokens=24)
    assert out.num_denoising_passes == [3 * passes] and out.num_commit_passes == [2]
    assert all(len(step.positions) == 8 // passes for step in out.trace[0])


def test_tokens_per_forward_counts_commits_and_not_the_prefill():
    out = write(small_clover(), [prompt(8)], threshold=0.0, max_new_tokens=24)
    assert out.tokens_per_forward == [24 / (3 + 2)]


def test_the_trace_tells_how_the_answer_came_to_be():
    texts = PROMPTS
    out = write(small_clover(seed=3), texts, threshold=0.25)
    for row, text in enumerate(texts):
        filled = {}
        for step in out.trace[row]:
            for position, token in zip(step.positions, step.tokens, strict=True):
                assert position not in filled and position // 8 == step.block
                filled[position] = token
        answer = new_tokens(out, row, texts)
        assert [filled[len(text) + i] for i in range(len(answer))] == answer
        assert len(out.trace[row]) == out.num_denoising_passes[row]


def test_a_callback_sees_every_step_of_every_row():
    seen = []
    out = write(small_clover(seed=3), PROMPTS, threshold=0.3, callback=lambda *event: seen.append(event))
    for row in range(len(PROMPTS)):
        mine = [(step, block) for r, step, block in seen if r == row]
        assert [step for step, _ in mine] == out.trace[row]
        for step, block in mine:
            assert [block[p - 8 * step.block] for p in step.positions] == step.tokens and len(block) == 8


def test_a_tensor_is_returned_unless_a_dictionary_is_asked_for():
    model, inputs = small_clover(), left_padded([prompt(5)])
    plain = model.generate(**inputs, max_new_tokens=6)
    full = model.generate(**inputs, max_new_tokens=6, return_dict_in_generate=True)
    assert torch.equal(plain, full.sequences) and full.trace is None


def test_after_committing_the_prefix_is_that_of_a_fresh_prefill():
    model, text = small_clover(), torch.tensor([prompt(24)])
    grown = model.prefill(text[:, :8], torch.ones(1, 8, dtype=torch.long))
    for block in text[:, 8:].split(8, dim=1):
        grown = model.commit(grown, block)
    fresh = model.prefill(text, torch.ones_like(text))
    for ours, theirs in zip(grown.cache.layers, fresh.cache.layers, strict=True):
        for name in ("keys", "values"):
            if hasattr(theirs, name):
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=2e-4, atol=2e-4)
        if hasattr(theirs, "recurrent_states"):
            torch.testing.assert_close(ours.recurrent_states[0], theirs.recurrent_states[0], rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(ours.conv_states[0], theirs.conv_states[0], rtol=2e-4, atol=2e-4)


def test_generating_leaves_the_model_as_it_was():
    model = small_clover()
    before = copy.deepcopy(model.generation_config.to_dict())
    first = model.generate(torch.tensor([prompt(5)]), max_new_tokens=9, threshold=0.2)
    model.generate(torch.tensor([prompt(7)]), max_new_tokens=3, threshold=0.9)
    assert torch.equal(first, model.generate(torch.tensor([prompt(5)]), max_new_tokens=9, threshold=0.2))
    assert model.generation_config.to_dict() == before


def test_transformers_own_loop_still_drives_the_causal_pass():
    """The weights are an autoregressive model too; its next token is that of one causal pass."""
    model, ids = small_clover(), torch.tensor([prompt(12)])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        step = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
        whole = model(ids).logits[:, -1]
    torch.testing.assert_close(step, whole, rtol=2e-4, atol=2e-4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    seed=st.integers(0, 3),
    block_size=st.sampled_from([1, 3, 8, 16]),
    threshold=st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]),
    budget=st.integers(1, 20),
    eos=st.sampled_from([(), (5,), tuple(EOS)]),
)
def test_any_batch_is_its_rows_alone_and_keeps_every_promise(lengths, seed, block_size, threshold, budget, eos):
    model, texts = small_clover(seed), [prompt(length, seed) for length in lengths]
    options = {"block_size": block_size, "threshold": threshold, "max_new_tokens": budget}
    options["eos_token_id"] = list(eos) or None
    out = write(model, texts, **options)
    for row, text in enumerate(texts):
        answer = new_tokens(out, row, texts)
        assert 1 <= len(answer) <= budget and MASK not in answer and max(answer) < VOCAB
        assert out.finish_reason[row] == ("stop" if answer[-1] in eos else "length")
        assert (out.finish_reason[row] == "stop") or len(answer) == budget
        assert not set(answer[:-1]) & set(eos)
        alone = write(model, [text], **options)
        closest = min((abs(c - threshold) for step in alone.trace[0] for c in step.confidences), default=1.0)
        if closest > ROUNDING:
            assert new_tokens(alone, 0, [text]) == answer


# ---- configuration ---------------------------------------------------------------------------------------------------


def passes(model, **options) -> int:
    out = model.generate(torch.tensor([prompt(8)]), max_new_tokens=8, return_dict_in_generate=True, **options)
    return out.num_denoising_passes[0]


def test_arguments_win_over_a_config_passed_which_wins_over_the_models_which_wins_over_the_defaults(tmp_path):
    draw().save_pretrained(tmp_path)
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(model.generation_config).__name__ == "CloverGenerationConfig"
    default = passes(model)  # threshold 0.95
    assert default == passes(model, threshold=0.95) > 1
    model.generation_config.threshold = 0.0
    assert passes(model) == 1
    assert passes(model, threshold=1.0) == 8
    kind = type(model.generation_config)
    assert passes(model, generation_config=kind(threshold=1.0, max_new_tokens=8)) == 8
    assert passes(model, generation_config=GenerationConfig(max_new_tokens=8)) == 1
    assert passes(model, generation_config=GenerationConfig(threshold=1.0)) == 8
    assert passes(model, generation_config=kind(threshold=0.0), block_size=4) == 2
    assert passes(model, max_denoising_steps=1, threshold=1.0) == 1


def test_decoding_options_survive_saving_and_take_effect(tmp_path):
    from transformers import AutoModel

    model = draw()
    model.generation_config.threshold, model.generation_config.block_size = 0.0, 4
    model.generation_config.eos_token_id = [5, 9]
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert (again.generation_config.threshold, again.generation_config.block_size) == (0.0, 4)
    assert again.generation_config.eos_token_id == [5, 9]
    assert passes(again, eos_token_id=None) in (1, 2)
    again.save_pretrained(tmp_path / "twice")
    twice = AutoModel.from_pretrained(tmp_path / "twice", trust_remote_code=True)
    ours, theirs = (m.generation_config.to_dict() for m in (again, twice))
    assert {k: v for k, v in ours.items() if v is not None} == {k: v for k, v in theirs.items() if v is not None}


def test_max_length_counts_the_prompt_and_without_a_budget_an_answer_may_fill_the_context():
    model = small_clover(max_position_embeddings=40)
    ids = torch.tensor([prompt(5)])
    assert model.generate(ids, max_length=11).shape == (1, 11)
    assert model.generate(ids).shape == (1, 40)


def test_a_block_size_that_the_model_was_not_trained_with_warns(monkeypatch):
    model, warnings = small_clover(), []
    module = sys.modules[type(model).generate.__module__]
    monkeypatch.setattr(module.logger, "warning_once", lambda message: warnings.append(message))
    ids = torch.tensor([prompt(5)])
    model.generate(ids, max_new_tokens=2)
    model.generate(ids, max_new_tokens=2, block_size=8)
    assert not warnings
    model.generate(ids, max_new_tokens=2, block_size=4)
    assert "`block_size` is 4, but this model was trained with 8" in warnings[0]
