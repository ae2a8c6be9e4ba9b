"""LowConfidence: which tokens it chooses for masked positions, and which of them it accepts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_denoiser import naive_accepted, naive_choice

from clover.generation_clover import LowConfidence

MASK = 4
NEVER = float("-inf")


def distribution(*probabilities: float) -> list[float]:
    """Logits of these probabilities."""
    return [math.log(p) if p else NEVER for p in probabilities]


def choose(logits, masked, threshold=0.5):
    """LowConfidence on blocks whose masked positions have these logits, in order."""
    return LowConfidence(threshold, MASK)(torch.as_tensor(logits), torch.as_tensor(masked))


def test_a_masked_position_above_the_threshold_is_accepted_with_its_most_probable_token():
    choice = choose([distribution(0.1, 0.2, 0.6, 0.1, 0)], [[False, True]])
    assert choice.accepted.tolist() == [[False, True]]
    assert choice.tokens[0, 1] == 2
    assert choice.confidences[0].tolist() == [NEVER, pytest.approx(0.6)]


def test_every_position_above_the_threshold_is_accepted_and_no_other():
    rows = [distribution(0.55, 0.45, 0, 0, 0), distribution(0.4, 0.3, 0.3, 0, 0), distribution(0, 0, 0, 1, 0)]
    assert choose(rows, [[True, True, True]]).accepted.tolist() == [[True, False, True]]


def test_a_confidence_equal_to_the_threshold_is_not_accepted():
    half = [0.0, 0.0, NEVER, NEVER, NEVER]  # 0.5 exactly
    sure = distribution(0, 0.75, 0.25, 0, 0)
    assert choose([half, sure], [[True, True]], threshold=0.5).accepted.tolist() == [[False, True]]
    assert choose([half, sure], [[True, True]], threshold=0.4999).accepted.tolist() == [[True, True]]


@pytest.mark.parametrize("size", [3, 7, 50, 1000, 248_320])
def test_equal_means_equal_to_a_softmax(size):
    """A softmax over `size` equal logits, as SGLang takes it: none of them is above itself."""
    logits = torch.zeros(4, size)
    threshold = float(logits.softmax(-1)[0, 0])
    accepted = LowConfidence(threshold, mask_token_id=0)(logits, torch.ones(1, 4, dtype=torch.bool)).accepted
    assert accepted.tolist() == [[True, False, False, False]]


def test_without_any_above_the_threshold_exactly_the_surest_is_accepted():
    rows = [distribution(0.4, 0.3, 0.3, 0, 0), distribution(0.1, 0.45, 0.45, 0, 0), [0.0] * 5]
    assert choose(rows, [[True, True, True]]).accepted.tolist() == [[False, True, False]]


def test_the_fallback_is_of_each_row_alone():
    sure, unsure, less = distribution(0.9, 0.1, 0, 0, 0), distribution(0.4, 0.3, 0.3, 0, 0), [0.0] * 5
    choice = choose([sure, unsure, less, unsure], [[True, True], [True, True]])
    assert choice.accepted.tolist() == [[True, False], [False, True]]


def test_certainty_is_not_above_a_threshold_of_one():
    certain = [0.0, NEVER, NEVER, NEVER, NEVER]
    assert choose([certain] * 3, [[True, True, True]], threshold=1.0).accepted.tolist() == [[True, False, False]]


def test_a_threshold_of_zero_accepts_every_masked_position():
    accepted = choose([[0.0] * 5] * 2, [[True, False, True]], threshold=0).accepted
    assert accepted.tolist() == [[True, False, True]]


def test_ties_between_tokens_go_to_the_first():
    assert choose([[0.0, 3.0, 3.0, 3.0, 3.0]], [[True]]).tokens.tolist() == [[1]]


def test_ties_between_positions_go_to_the_first():
    assert choose([[0.0] * 5] * 3, [[False, True, True, True]]).accepted.tolist() == [[False, True, False, False]]


def test_ties_are_broken_alike_over_a_real_vocabulary():
    logits = torch.zeros(32, 151_672)
    logits[:, 100_000:] = 1.0
    masked = torch.ones(1, 32, dtype=torch.bool)
    choice = LowConfidence(0.9, 100_000)(logits, masked)
    assert choice.tokens.tolist() == [[100_001] * 32]
    assert choice.accepted.nonzero().tolist() == [[0, 0]]


def test_the_mask_token_is_never_chosen_though_most_probable():
    choice = choose([distribution(0.05, 0.1, 0.05, 0, 0.8)], [[True]])
    assert choice.tokens.tolist() == [[1]]
    assert choice.accepted.tolist() == [[True]]


def test_the_mask_tokens_share_stays_in_the_normalisation():
    choice = choose([distribution(0.2, 0.3, 0, 0, 0.5), distribution(0.0, 0, 0.4, 0.35, 0.25)], [[True, True]])
    assert choice.confidences[0].tolist() == pytest.approx([0.3, 0.4])
    assert choice.accepted.tolist() == [[False, True]]  # without that share, 0.6 and 0.53: both above 0.5


def test_a_row_with_nothing_masked_is_untouched():
    choice = choose([[5.0, 0, 0, 0, 0]], [[False, False], [False, True], [False, False]], threshold=0)
    assert choice.accepted.tolist() == [[False, False], [False, True], [False, False]]
    assert choice.confidences[0].tolist() == choice.confidences[2].tolist() == [NEVER, NEVER]


def test_the_logits_of_masked_positions_are_taken_in_their_order():
    rows = [[9.0 if token == best else 0.0 for token in range(5)] for best in (3, 1, 2)]
    choice = choose(rows, [[False, True, False, True], [True, False, False, False]])
    assert choice.tokens[choice.accepted].tolist() == [3, 1, 2]


def test_nothing_that_it_is_given_is_changed():
    logits, masked = torch.randn(3, 5), torch.tensor([[True, False, True], [False, False, True]])
    before = logits.clone(), masked.clone()
    LowConfidence(0.5, MASK)(logits, masked)
    assert torch.equal(logits, before[0]) and torch.equal(masked, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_softmax_of_half_precision_logits_is_in_fp32(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(64, 5000) * 3).to(dtype)
    masked = torch.ones(2, 32, dtype=torch.bool)
    confidences = LowConfidence(0.5, MASK)(logits, masked).confidences
    assert confidences.dtype == torch.float32
    shares = logits.double().softmax(-1)
    shares[:, MASK] = 0
    torch.testing.assert_close(confidences.flatten().double(), shares.amax(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", [30.0, -30.0, 100.0])
def test_an_offset_of_all_logits_changes_no_confidence(offset):
    """As in a softmax, which takes the largest logit away first; SGLang's confidences are a softmax's."""
    logits = torch.tensor([[2.0, 0.5, -1.0, 0.0, 1.0], [0.25, 0.0, 0.5, 0.125, 0.0]])  # sums stay exact in fp32
    masked = torch.ones(1, 2, dtype=torch.bool)
    plain, shifted = (LowConfidence(0.5, MASK)(x, masked).confidences for x in (logits, logits + offset))
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-5)


tables = st.integers(1, 4).flatmap(
    lambda rows: st.integers(1, 6).flatmap(
        lambda width: st.lists(
            st.lists(
                st.one_of(st.none(), st.lists(st.integers(-3, 3), min_size=5, max_size=5)),
                min_size=width,
                max_size=width,
            ),
            min_size=rows,
            max_size=rows,
        )
    )
)


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(tables, st.sampled_from([0.0, 0.25, 0.375, 0.5, 0.75, 1.0]))
def test_it_chooses_and_accepts_as_plain_loops_do(blocks, threshold):
    """Integer logits, so that ties abound; None is a position that is not masked."""
    masked = torch.tensor([[cell is not None for cell in row] for row in blocks])
    cells = [cell for row in blocks for cell in row if cell is not None]
    choice = choose(torch.tensor(cells, dtype=torch.float32).view(-1, 5), masked, threshold)
    for row, tokens, accepted, confidences in zip(blocks, *(x.tolist() for x in choice), strict=True):
        naive = {j: naive_choice(torch.tensor(cell), MASK) for j, cell in enumerate(row) if cell}
        got = {j: confidences[j] for j in naive}
        assert [tokens[j] for j in naive] == [token for token, _, _ in naive.values()]
        assert got == pytest.approx({j: confidence for j, (_, confidence, _) in naive.items()}, abs=1e-6)
        expected = naive_accepted(got, threshold) if naive else []
        assert [j for j, yes in enumerate(accepted) if yes] == expected


def test_confidences_are_exact_over_a_wide_vocabulary():
    logits = torch.zeros(4, 151_672)
    logits[:, 100:164] = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 5
    choice = LowConfidence(0.5, 151_669)(logits, torch.ones(1, 4, dtype=torch.bool))
    exact = logits.double().softmax(-1).amax(-1)
    assert (choice.confidences[0].double() - exact).abs().max() < 1e-5
