"""The loop itself, over toy models that say which position becomes sure when, and over a Clover that is watched."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive_denoiser import naive_generate
from small_clover import MASK, left_padded, prompt, small_clover
from toy_models import HashModel, ScriptedModel

from clover.generation_clover import Ends, LowConfidence, block_diffusion

ROUNDING = 1e-5  # decisions closer than this may turn when sums are added in another order
TOY_MASK = 11


def write(toy, prompts, threshold=0.5, block_size=4, budget=8, eos=(), steps=None):
    return block_diffusion(
        toy,
        [torch.tensor(row) for row in prompts],
        LowConfidence(threshold, TOY_MASK),
        block_size,
        Ends(budget, tuple(eos)),
        max_denoising_steps=steps,
    )


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(
    prompts=st.lists(st.lists(st.integers(1, TOY_MASK), min_size=1, max_size=14), min_size=1, max_size=5),
    block_size=st.integers(1, 7),
    budget=st.integers(1, 17),
    threshold=st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.9, 1.0]),
    eos=st.lists(st.integers(0, 10), max_size=3),
    steps=st.sampled_from([None, None, 1, 2, 3]),
)
def test_rows_of_a_batch_are_answered_as_each_alone_and_as_the_naive_denoiser_does(
    prompts, block_size, budget, threshold, eos, steps
):
    """Over a model whose every logit depends on every token, mask tokens in the prompt among them."""
    options = {"threshold": threshold, "block_size": block_size, "budget": budget, "eos": eos}
    toy = HashModel()
    naive = [naive_generate(toy.logits_of, row, mask_id=TOY_MASK, max_steps=steps, **options) for row in prompts]
    assume(all(row.closest > ROUNDING for row in naive))
    together = write(toy, prompts, steps=steps, **options)
    assert together == [write(HashModel(), [row], steps=steps, **options)[0] for row in prompts]
    for answer, row in zip(together, naive, strict=True):
        assert (answer.tokens, answer.finish_reason) == (row.tokens, row.finish_reason)
        assert [(s.block, s.step, s.positions, s.tokens) for s in answer.trace] == [e[:4] for e in row.trace]
        assert (answer.num_denoising_passes, answer.num_commit_passes) == (row.denoising_passes, row.commit_passes)
        for step, (*_, confidences) in zip(answer.trace, row.trace, strict=True):
            assert step.confidences == pytest.approx(confidences, abs=1e-5)
    assert toy.prefilled == [len(prompts)]
    assert sum(toy.denoised) == sum(answer.num_denoising_passes for answer in together)
    assert sum(toy.committed) == sum(answer.num_commit_passes for answer in together)


# ---- where a block stops ---------------------------------------------------------------------------------------------


def test_an_accepted_end_token_waits_for_what_stands_before_it_and_for_nothing_else():
    """Position 6 ends the answer and is sure at once; 4 and 5 take a pass each; 7 to 11 are never filled."""
    toy = ScriptedModel({4: (5, 0.4), 5: (6, 0.3), 6: (9, 0.9)})
    (answer,) = write(toy, [[1, 2, 3, 4]], block_size=8, budget=20, eos=[9])
    assert answer.tokens == [5, 6, 9] and answer.finish_reason == "stop"
    assert [step.positions for step in answer.trace] == [[6], [4], [5]]
    assert toy.denoised == [1, 1, 1] and toy.committed == []


def test_an_end_token_that_comes_to_stand_before_another_ends_the_answer_there():
    toy = ScriptedModel({1: (9, 0.3), 2: (5, 0.25), 3: (8, 0.9)})
    (answer,) = write(toy, [[7]], eos=[8, 9])
    assert answer.tokens == [9]
    assert [step.positions for step in answer.trace] == [[3], [1]]


def test_an_end_token_of_the_prompt_ends_nothing():
    """Neither in a prefilled block nor in the tail that shares the answer's first block."""
    toy = ScriptedModel(dict.fromkeys(range(12), (5, 0.9)))
    (answer,) = write(toy, [[9] * 6], budget=3, eos=[9])
    assert answer.tokens == [5, 5, 5] and answer.finish_reason == "length"


def test_a_mask_token_among_the_end_tokens_ends_nothing():
    """It is never written, and a position that is still masked is no end."""
    toy = ScriptedModel({1: (5, 0.9), 2: (6, 0.3), 3: (7, 0.4)})
    (answer,) = write(toy, [[1]], budget=3, eos=[TOY_MASK])
    assert (answer.tokens, answer.finish_reason) == ([5, 6, 7], "length")


@pytest.mark.parametrize(
    "budget, tokens, reason", [(2, [5, 6], "length"), (3, [5, 6, 9], "stop"), (4, [5, 6, 9], "stop")]
)
def test_the_budgets_last_token_may_end_the_answer_and_one_after_it_may_not(budget, tokens, reason):
    toy = ScriptedModel({1: (5, 0.9), 2: (6, 0.9), 3: (9, 0.9)})
    (answer,) = write(toy, [[1]], budget=budget, eos=[9])
    assert (answer.tokens, answer.finish_reason) == (tokens, reason)


def test_what_stands_after_the_budget_is_filled_where_sure_and_not_waited_for():
    """A block is denoised whole on its grid, and is done with once what will be shown is known."""
    toy = ScriptedModel({1: (4, 0.9), 2: (5, 0.3), 6: (6, 0.9)})
    (answer,) = write(toy, [[7]], block_size=8, budget=2)
    assert answer.tokens == [4, 5]
    assert [step.positions for step in answer.trace] == [[1, 6], [2]]


def test_a_limit_of_steps_accepts_all_that_is_masked_in_the_last_one():
    toy = ScriptedModel({i: (5, 0.3 + i / 100) for i in range(12)})
    (answer,) = write(toy, [[7]], block_size=6, budget=11, steps=3)
    assert [step.positions for step in answer.trace] == [[5], [4], [1, 2, 3], [11], [10], [6, 7, 8, 9]]


def test_no_answer_takes_more_passes_at_a_lower_threshold_where_confidences_stay():
    toy = ScriptedModel({i: (i, 0.25 + i / 12) for i in range(8)})
    passes = [write(toy, [[1]], t, block_size=8, budget=7)[0].num_denoising_passes for t in (0, 0.5, 0.7, 1)]
    assert passes == [1, 4, 6, 7]


def test_rows_wait_for_each_other_at_no_cost_and_leave_when_they_are_done():
    """Row 0 ends in its first block; row 1 takes one pass a block, row 2 takes four."""

    class ByPrompt(ScriptedModel):
        def logits_of(self, prefix, block):
            sure = {1: (9, 0.9), 2: (5, 0.9), 3: (6, 0.3)}[prefix[0]]
            self.script = dict.fromkeys(range(40), sure)
            return super().logits_of(prefix, block)

    toy = ByPrompt({})
    rows = write(toy, [[1] * 4, [2] * 4, [3] * 4], eos=[9])
    assert [row.tokens for row in rows] == [[9], [5] * 8, [6] * 8]
    assert [row.num_denoising_passes for row in rows] == [1, 2, 8]
    assert [row.num_commit_passes for row in rows] == [0, 1, 1]
    assert toy.denoised == [3, 1, 1, 1, 2, 1, 1, 1] and toy.committed == [2]


# ---- what the loop gives a Clover ------------------------------------------------------------------------------------


def test_what_is_denoised_is_whole_blocks_on_the_grid_and_only_masked_positions_get_logits(monkeypatch):
    model, shapes = small_clover(), set()
    denoise = model.denoise

    def watched(prefix, block, masked, **options):
        logits = denoise(prefix, block, masked, **options)
        assert (prefix.mask.sum(-1) % 8 == 0).all() and prefix.mask.shape[0] == block.shape[0]
        assert torch.equal(masked, block == MASK) and masked.any(-1).all()
        assert logits.shape == (masked.sum(), model.config.vocab_size)
        shapes.add(tuple(block.shape))
        return logits

    monkeypatch.setattr(model, "denoise", watched)
    model.generate(**left_padded([prompt(n) for n in (3, 8, 21)]), max_new_tokens=19, threshold=0.4)
    assert shapes == {(1, 8), (2, 8), (3, 8)}


def test_what_is_committed_is_every_block_of_the_answer_but_the_last(monkeypatch):
    model, committed = small_clover(), []
    commit = model.commit
    monkeypatch.setattr(model, "commit", lambda prefix, block: committed.append(block) or commit(prefix, block))
    text = model.generate(torch.tensor([prompt(11)]), max_new_tokens=21, threshold=0.4)
    assert torch.equal(torch.cat(committed, dim=1), text[:, 8:24])  # the answer ends at 32


def test_after_all_that_was_tried_the_prefix_is_that_of_a_fresh_prefill_of_the_text(monkeypatch):
    """Rows of unequal length, one of which waits in some blocks and leaves before the others."""
    model, last = small_clover(), {}
    denoise = model.denoise

    def watched(prefix, block, masked, **options):
        for i in range(len(block)):
            last[int(prefix.mask[i].sum())] = prefix.select(torch.tensor([i]))
        return denoise(prefix, block, masked, **options)

    monkeypatch.setattr(model, "denoise", watched)
    prompts = [prompt(11), prompt(20)]
    text = model.generate(**left_padded(prompts), max_new_tokens=29, threshold=0.4)[1].tolist()
    assert max(last) == 48  # only the longer row comes so far
    fresh = model.prefill(torch.tensor([text[:48]]), torch.ones(1, 48, dtype=torch.long))
    block = torch.full((1, 8), MASK)
    with torch.no_grad():
        logits = [denoise(prefix, block, block == MASK) for prefix in (last[48], fresh)]
    torch.testing.assert_close(*logits, rtol=0, atol=2e-4)
