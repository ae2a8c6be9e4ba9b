"""`model(input_ids, labels=...)` is the block-diffusion loss: what generation's own passes give, block by block."""

import math
from dataclasses import replace

import pytest
import torch
from serial_objective import Batch
from serial_objective import block_diffusion_loss as serial_loss
from small_clover import MASK, PAD, VOCAB, draw, small_clover
from torch.nn import functional as F

from clover.objective_clover import Objective, answer_blocks, mask_blocks

SIZE = 8
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def document(length: int, answers: list[tuple[int, int]], seed: int) -> tuple[list[int], list[int]]:
    """Tokens, and labels of the answers, which stand at [start, end)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, MASK, (length,), generator=generator).tolist()
    return ids, [token if any(a <= i < b for a, b in answers) else -100 for i, token in enumerate(ids)]


# Answers that begin and end inside a block, at its edges, two of them in one block, over several blocks, at position 0.
DOCUMENTS = [
    document(21, [(5, 21)], 0),
    document(30, [(3, 6), (7, 13), (20, 30)], 1),
    document(16, [(8, 16)], 2),
    document(9, [(0, 9)], 3),
    document(12, [(6, 7)], 4),
]


def packed(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """The documents of each row, each on the grid of blocks, and rows padded to the longest."""
    columns = {"input_ids": [], "labels": [], "document_ids": []}
    for row in rows:
        ids, labels, names = [], [], []
        for number, which in enumerate(row):
            for name, values, fill in zip((ids, labels), DOCUMENTS[which], (PAD, -100), strict=True):
                name += values + [fill] * (-len(values) % SIZE)
            length = len(DOCUMENTS[which][0])
            names += [number] * length + [-1] * (-length % SIZE)
        for name, values in zip(columns, (ids, labels, names), strict=True):
            columns[name].append(values)
    width = max(map(len, columns["input_ids"]))
    fills = {"input_ids": PAD, "labels": -100, "document_ids": -1}
    batch = {name: torch.tensor([v + [fills[name]] * (width - len(v)) for v in columns[name]]) for name in columns}
    return batch | {"noise_seeds": torch.arange(len(rows)) + 11}


ROWS = [[0, 3], [1], [2, 4, 3]]


def model_with(objective: Objective | None = None, **changes):
    model = draw(**changes)
    if objective is not None:
        model.objective = objective
    return model


def noisy_of(batch: dict, objective: Objective):
    blocks = answer_blocks(batch["input_ids"], batch["labels"], batch["document_ids"], SIZE, PAD)
    return mask_blocks(blocks, batch["noise_seeds"], MASK, objective.complementary)


def by_generation(model, batch: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropies of masked positions (M, T) by `prefill` and `denoise`, each noisy block alone; causal ones by a
    causal pass over each document alone. And the noisy blocks themselves."""
    noisy, losses = noisy_of(batch, model.objective), []
    for i in range(len(noisy.row)):
        row, start = int(noisy.row[i]), int(noisy.block[i]) * SIZE
        names = batch["document_ids"][row]
        prefix = batch["input_ids"][row, :start][names[:start] == names[start]][None]
        logits = model.denoise(
            model.prefill(prefix, torch.ones_like(prefix)), noisy.inputs[i][None], noisy.masked[i][None]
        )
        loss = torch.zeros(SIZE)
        loss[noisy.masked[i]] = F.cross_entropy(logits, noisy.targets[i][noisy.masked[i]], reduction="none")
        losses.append(loss)
    causal = []
    for row in ROWS:
        for which in row:
            ids, labels = (torch.tensor(values) for values in DOCUMENTS[which])
            logits = model(ids[None], is_causal=True).logits[0, :-1]
            causal.append(F.cross_entropy(logits[labels[1:] != -100], labels[1:][labels[1:] != -100], reduction="none"))
    return torch.stack(losses), torch.cat(causal), noisy


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("complementary", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_is_that_of_the_generation_passes_block_by_block(complementary, attention):
    model = model_with(Objective(complementary=complementary, tail_weight=0.25, causal_weight=0.5))
    model.set_attn_implementation(attention)
    batch = packed(ROWS)
    with torch.no_grad():
        losses, causal, noisy = by_generation(model, batch)
        out = model(**batch)
    items = int((batch["labels"] != -100).sum())
    once = 1.0 if complementary else 2.0
    expected = once * (losses * (noisy.masked & noisy.answer)).sum()
    expected += once * 0.25 * (losses * (noisy.masked & noisy.tail)).sum()
    torch.testing.assert_close(out.loss, (expected + 0.5 * causal.sum()) / items, **CLOSE)
    torch.testing.assert_close(out.causal_loss, causal.mean(), **CLOSE)
    torch.testing.assert_close(out.denoising_loss, losses[noisy.masked & noisy.answer].mean(), **CLOSE)
    counted = (noisy.masked & noisy.answer).float()
    torch.testing.assert_close(out.block_losses, (losses * counted).sum(-1) / counted.sum(-1).clamp(min=1), **CLOSE)
    assert losses.max() - losses[noisy.masked].min() > 3, "the model is too even for this to mean anything"


def test_it_is_the_same_through_remote_code():
    batch = packed(ROWS)
    with torch.no_grad():
        torch.testing.assert_close(small_clover()(**batch).loss, draw()(**batch).loss)


@pytest.mark.parametrize("which", range(5))
def test_documents_in_one_row_are_as_alone(which):
    # Masks follow from a row's seed and blocks, so each document is compared where it is first in its row.
    model, alone, together = model_with(), packed([[which]]), packed([[which, 1]])
    labels = together["labels"].clone()
    labels[:, alone["labels"].shape[1] :] = -100
    with torch.no_grad():
        torch.testing.assert_close(model(**together | {"labels": labels}).loss, model(**alone).loss, **CLOSE)


def test_what_another_document_or_padding_says_changes_nothing():
    model, batch = model_with(), packed([[4, 0, 2]])
    first = batch["labels"].clone()
    first[:, :16] = first[:, 40:] = -100  # document 0 alone is learnt
    batch["labels"] = first
    other = batch["input_ids"].clone()
    other[:, :16] = torch.randint(1, MASK, (1, 16), generator=torch.Generator().manual_seed(9))
    other[:, 37:40] = 5  # its own padding
    other[:, 40:] = 7
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, model(**batch | {"input_ids": other}).loss, **CLOSE)


def test_rows_padded_on_the_right_are_documents_of_their_own():
    model, (ids, labels), (short, short_labels) = model_with(), DOCUMENTS[1], DOCUMENTS[0]
    width = len(ids)  # no multiple of the block
    missing = width - len(short)
    inputs = torch.tensor([ids, short + [PAD] * missing])
    targets = torch.tensor([labels, short_labels + [-100] * missing])
    mask = torch.tensor([[1] * width, [1] * len(short) + [0] * missing])
    seeds = torch.tensor([11, 12])
    with torch.no_grad():
        padded = model(inputs, labels=targets, attention_mask=mask, noise_seeds=seeds).loss
        grid = packed([[1], [0]]) | {"noise_seeds": seeds}
        torch.testing.assert_close(padded, model(**grid).loss, **CLOSE)


def test_labels_of_padding_are_none():
    model, (ids, labels) = model_with(), DOCUMENTS[0]
    inputs, missing = torch.tensor([ids + [PAD] * 11]), [PAD] * 11
    mask = (inputs != PAD).long()
    losses = [
        model(inputs, labels=torch.tensor([labels + tail]), attention_mask=mask, noise_seeds=torch.tensor([3])).loss
        for tail in (missing, [-100] * 11)
    ]
    assert losses[0] == losses[1]


def test_an_answer_of_one_token_at_the_start_has_no_causal_loss():
    labels = torch.tensor([[7] + [-100] * 7])
    out = model_with()(torch.tensor([[7] + [5] * 7]), labels=labels, noise_seeds=torch.tensor([3]))
    assert out.causal_loss == 0 and out.loss.isfinite()


def test_labels_are_counted_over_accumulation_steps_and_processes():
    """Sums of losses over parts, each divided by the whole's labels, are the whole's loss."""
    model, rows = model_with(), [[0, 3], [1], [2, 4, 3]]
    whole = packed(rows)
    items = (whole["labels"] != -100).sum()
    parts = [{name: value[i : i + 1] for name, value in whole.items()} for i in range(3)]
    with torch.no_grad():
        summed = sum(model(**part, num_items_in_batch=items).loss for part in parts)
        torch.testing.assert_close(summed, model(**whole).loss, **CLOSE)


def test_the_routers_loss_counts_real_tokens_alone():
    model = model_with()
    batch = packed(ROWS)
    wider = {
        name: F.pad(value, (0, 4 * SIZE), value={"input_ids": PAD, "labels": -100, "document_ids": -1}[name])
        for name, value in batch.items()
        if name != "noise_seeds"
    } | {"noise_seeds": batch["noise_seeds"]}
    with torch.no_grad():
        out, padded = (model(**inputs, output_router_logits=True) for inputs in (batch, wider))
        without = model(**batch)
    torch.testing.assert_close(out.aux_loss, padded.aux_loss, **CLOSE)
    assert without.aux_loss is None
    coefficient = model.config.router_aux_loss_coef
    torch.testing.assert_close(out.loss, without.loss + coefficient * out.aux_loss, **CLOSE)


def test_the_autoregressive_loss_can_be_left_out():
    batch = packed(ROWS)
    with torch.no_grad():
        both, alone = (model_with(Objective(causal_weight=w))(**batch) for w in (0.5, 0.0))
    assert alone.causal_loss is None
    assert both.loss > alone.loss


def test_with_is_causal_the_loss_is_the_autoregressive_one():
    model, ids = model_with(), torch.tensor([DOCUMENTS[1][0]])
    with torch.no_grad():
        out = model(ids, labels=ids, is_causal=True)
        expected = F.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(out.loss, expected)


def test_a_chunked_head_changes_neither_loss_nor_gradient():
    results = []
    for chunk in (10_000, 5):
        model = model_with(Objective(head_chunk=chunk, confidence_weight=0.3)).train()
        out = model(**packed(ROWS))
        out.loss.backward()
        results.append((out.loss, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], **CLOSE)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, **CLOSE)


# ---- gradients -------------------------------------------------------------------------------------------------------


def serial_batch(batch: dict, objective: Objective) -> Batch:
    """The same documents, one a row, and the same noisy blocks, as the serial oracle takes them."""
    noisy, count = noisy_of(batch, objective), batch["input_ids"].shape[1] // SIZE
    weights = noisy.masked * (noisy.answer + 0.25 * noisy.tail)
    of = [noisy.block == block for block in range(count)]
    parts = [[values[chosen] for chosen in of] for values in (noisy.row, noisy.targets, noisy.inputs, weights)]
    return Batch(batch["input_ids"], batch["labels"] != -100, *parts)


def test_gradients_are_those_of_the_generation_passes_through_the_prefix_too():
    batch, gradients = packed([[0], [3], [2], [1]]), []
    items = int((batch["labels"] != -100).sum())
    for serial in (False, True):
        model = model_with(Objective(causal_weight=0.5)).train()
        if serial:
            given = serial_batch(batch, model.objective)
            denoising, causal = serial_loss(model, given)
            predicted = int(given.predict[:, 1:].sum())
            weights = sum(float(part.sum()) for part in given.weights)
            loss = (denoising * weights + 0.5 * causal * predicted) / items
        else:
            loss = model(**batch).loss
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("top_p", [None, 0.5])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing_and_routes_alike(top_p, reentrant):
    results = []
    for checkpointed in (False, True):
        model, routed = model_with(num_experts=8, expert_coreset_top_p=top_p).train(), []
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(lambda _, inputs, seen=routed: seen.append(inputs[1].clone()))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        out = model(**packed(ROWS), output_router_logits=True)
        out.loss.backward()
        results.append((out.loss, {name: p.grad for name, p in model.named_parameters()}, routed))
    (loss, gradients, routed), (again, checked, routed_again) = results
    torch.testing.assert_close(again, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(checked[name], gradient, rtol=1e-3, atol=1e-3)  # sums in another order
    layers = len(routed)
    assert len(routed_again) == 2 * layers
    for first, second in zip(routed_again[:layers], routed_again[layers:][::-1], strict=True):
        assert torch.equal(first, second)


def test_noisy_blocks_are_routed_inside_their_coreset_and_clean_ones_exactly():
    model = model_with(num_experts=8, expert_coreset_top_p=0.4)
    batch = packed(ROWS)
    with torch.no_grad():
        losses, causal, noisy = by_generation(model, batch)  # whose denoising passes take the config's coreset
        out = model(**batch)
        exact = model_with(num_experts=8)(**batch)
    torch.testing.assert_close(out.denoising_loss, losses[noisy.masked & noisy.answer].mean(), **CLOSE)
    torch.testing.assert_close(out.causal_loss, causal.mean(), **CLOSE)
    assert (out.denoising_loss - exact.denoising_loss).abs() > 1e-3


# ---- masks -----------------------------------------------------------------------------------------------------------


def drawn(count: int, objective: Objective, seed: int = 0):
    ids = torch.randint(1, MASK, (1, count * SIZE), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.clone(), "document_ids": torch.zeros_like(ids)}
    return noisy_of(batch | {"noise_seeds": torch.tensor([seed])}, objective)


def test_ratios_are_stratified_over_a_rows_blocks():
    noisy = drawn(64, Objective(complementary=False))
    masked = noisy.masked.sum(-1).sort().values
    expected = torch.arange(64) / 64 * SIZE
    assert (masked - expected).abs().max() <= 1.5
    assert abs(noisy.masked.float().mean() - 0.5) < 0.05


def test_complementary_masks_cover_each_answer_token_once():
    noisy = drawn(32, Objective())
    counts = torch.zeros(32, SIZE, dtype=torch.long).index_add(0, noisy.block, noisy.masked.long())
    assert (counts == 1).all()
    assert (noisy.inputs[noisy.masked] == MASK).all()
    assert (noisy.inputs[~noisy.masked] == noisy.targets[~noisy.masked]).all()


def test_a_row_is_masked_alike_in_any_batch_and_otherwise_with_another_seed():
    objective = Objective()
    whole, alone = noisy_of(packed(ROWS), objective), None
    batch = {name: value[1:2] for name, value in packed(ROWS).items()}
    alone = noisy_of(batch, objective)
    assert torch.equal(whole.inputs[whole.row == 1], alone.inputs)
    other = noisy_of(batch | {"noise_seeds": batch["noise_seeds"] + 1}, objective)
    assert other.inputs.shape != alone.inputs.shape or not torch.equal(other.inputs, alone.inputs)


def test_a_fixed_ratio_masks_that_share_of_every_block():
    model, batch = model_with(Objective(complementary=False)), packed(ROWS)
    with torch.no_grad():
        out = model(**batch, masking_ratio=1.0)
    assert (out.ratios == 1).all()


def test_without_seeds_masks_follow_torchs_own():
    model, batch = model_with(), packed(ROWS)
    del batch["noise_seeds"]
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(model(**batch).loss.item())
    assert losses[0] == losses[1] != losses[2]


def test_a_noisy_block_knows_nothing_after_its_answers_end():
    batch = packed([[1]])  # its first block has two answers, [3, 6) and [7, 13)
    blocks = answer_blocks(batch["input_ids"], batch["labels"], batch["document_ids"], SIZE, PAD)
    assert blocks.block.tolist() == [0, 0, 1, 2, 3]
    ids = DOCUMENTS[1][0]
    assert blocks.targets[0].tolist() == ids[:6] + [PAD, PAD]
    assert blocks.targets[1].tolist() == ids[:8]
    assert blocks.targets[2].tolist() == ids[8:13] + [PAD] * 3
    assert blocks.targets[4].tolist() == ids[24:30] + [PAD] * 2
    assert blocks.answer[0].tolist() == [False] * 3 + [True] * 3 + [False] * 2
    assert blocks.tail[0].tolist() == [False] * 6 + [True] * 2


def test_weights_of_one_over_the_ratio_are_capped():
    objective = Objective(weighting="inverse_ratio", max_weight=4.0, causal_weight=0.0, complementary=False)
    model, batch = model_with(objective), packed(ROWS)
    with torch.no_grad():
        losses, _, noisy = by_generation(model, batch)
        loss = model(**batch).loss
    weight = (1 / noisy.ratio).clamp(max=4.0)[:, None] * noisy.masked * (noisy.answer + 0.25 * noisy.tail)
    torch.testing.assert_close(loss, (losses * weight).sum() / (batch["labels"] != -100).sum(), **CLOSE)


def test_an_order_masks_what_a_teacher_decoded_last():
    batch = packed([[1], [2]])
    order = torch.arange(batch["input_ids"].numel()).view_as(batch["input_ids"]) * 7 % 31
    blocks = answer_blocks(batch["input_ids"], batch["labels"], batch["document_ids"], SIZE, PAD)
    of_blocks = order.unflatten(1, (-1, SIZE))[blocks.row, blocks.block]
    noisy = mask_blocks(blocks, batch["noise_seeds"], MASK, False, of_blocks)
    for i in range(len(noisy.row)):
        open_ = noisy.answer[i] | noisy.tail[i]
        shown = open_ & ~noisy.masked[i]
        if shown.any():
            assert of_blocks[i][shown].max() < of_blocks[i][noisy.masked[i]].min()
    assert noisy.masked.sum() < (noisy.answer | noisy.tail).sum()
    model = model_with(Objective(complementary=False))
    with torch.no_grad():
        assert model(**batch, decoding_order=order).loss != model(**batch).loss


def test_the_confidence_term_is_the_entropy_where_the_token_is_right():
    """In a model that is right everywhere it is what is left to learn; wrong tokens are not made surer."""
    ids = torch.full((1, 16), 5)
    model = model_with(Objective(confidence_weight=1.0, causal_weight=0.0))
    batch = {"input_ids": ids, "labels": ids, "noise_seeds": torch.tensor([0])}
    for right in (True, False):
        logits = torch.zeros(VOCAB)
        logits[5 if right else 6] = 2.0
        model.lm_head.forward = lambda hidden, logits=logits: logits.expand(len(hidden), -1)
        with torch.no_grad():
            loss = model(**batch).loss
        probabilities = logits.softmax(-1)
        entropy = -(probabilities * probabilities.log()).sum()
        expected = -probabilities[5].log() + (entropy if right else 0)
        torch.testing.assert_close(loss, expected, **CLOSE)


# ---- what is refused -------------------------------------------------------------------------------------------------

IDS = torch.arange(1, 17)[None]
LONG, ONE = torch.ones(1, 24, dtype=torch.long), torch.tensor([1])
REFUSED = {
    "labels that are none": ({"labels": torch.full_like(IDS, -100)}, "`labels` is '-100 everywhere but in padding'"),
    "labels of another shape": ({"labels": IDS[:, :5]}, "`labels` is \\(1, 5\\)"),
    "padding on the left": ({"attention_mask": torch.tensor([[0] * 4 + [1] * 12])}, "padded on the right only"),
    "a document off the grid": ({"document_ids": torch.tensor([[0] * 5 + [1] * 11])}, "multiple of 8"),
    "a document that goes on after padding": (
        {"document_ids": torch.tensor([[0] * 5 + [-1] * 3 + [0] * 8])},
        "multiple of 8",
    ),
    "a hole": ({"document_ids": torch.tensor([[0] * 5 + [-1] + [0] * 10])}, "multiple of 8"),
    "a share above 1": ({"masking_ratio": 1.5}, "`masking_ratio` is 1.5"),
    "a cache": ({"past_key_values": object()}, "`past_key_values`"),
    "all of it padding": ({"attention_mask": torch.zeros_like(IDS)}, "`labels` is '-100 everywhere but in padding'"),
    "a document in two pieces": (
        {"document_ids": torch.tensor([[0] * 8 + [1] * 8 + [0] * 8]), "input_ids": LONG, "labels": LONG},
        "`document_ids` is \\[0, 1, 0\\]",
    ),
    "padding said twice": (
        {"document_ids": torch.zeros_like(IDS), "attention_mask": torch.ones_like(IDS)},
        "`attention_mask`",
    ),
    "a seed too few": ({"input_ids": IDS.repeat(2, 1), "labels": IDS.repeat(2, 1), "noise_seeds": ONE}, "is \\(1,\\)"),
    "a seed too many": ({"noise_seeds": torch.tensor([1, 2])}, "`noise_seeds` is \\(2,\\)"),
    "seeds that are a list": ({"noise_seeds": [1]}, "`noise_seeds` is \\[1\\]"),
    "an order of another shape": ({"decoding_order": IDS[:, :3]}, "`decoding_order`"),
    "ids of one dimension": ({"input_ids": IDS[0], "labels": IDS[0]}, "`input_ids`"),
    "ids of 32 bits": ({"input_ids": IDS.int()}, "`input_ids` is 'torch.int32"),
    "labels of 32 bits": ({"labels": IDS.int()}, "`labels` is torch.int32"),
    "a count of nothing": ({"num_items_in_batch": 0}, "`num_items_in_batch` is 0"),
    "a misspelt argument": ({"noise_seed": torch.tensor([1])}, "noise_seed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_on_is_refused_by_name(name):
    arguments, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        small_clover()(**{"input_ids": IDS, "labels": IDS} | arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weighting": "cosine"},
        {"tail_weight": -1},
        {"tail_weight": math.inf},
        {"causal_weight": -0.1},
        {"confidence_weight": math.nan},
        {"max_weight": 0},
        {"max_weight": 8},
        {"head_chunk": 0},
    ],
)
def test_an_objective_that_cannot_be_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"`{name}`"):
        replace(Objective(), **wrong)


def test_a_model_without_a_mask_token_and_flash_attention_are_refused():
    with pytest.raises(ValueError, match="`mask_token_id`"):
        model = model_with()
        model.config.mask_token_id = None
        model(IDS, labels=IDS)
    model = model_with()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="`attn_implementation`"):
        model(IDS, labels=IDS)
