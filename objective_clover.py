# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""The block-diffusion objective: what `model(input_ids, labels=...)` computes.

Two streams go through the model in one pass. The clean stream is the documents, read causally. The noisy stream is
blocks of their answers with some positions masked, each of which sees itself both ways and, of the clean stream, what
`generate()` would have in its cache there: keys, values and Gated DeltaNet states of the blocks before it. Blocks lie
on the grid of their document, and a noisy token has the position of its clean twin.

In order: `answer_blocks` finds what there is to denoise, `mask_blocks` masks it, `Streams` says to the layers who sees
what, `block_diffusion_loss` puts it together. Sources: the two streams are BD3-LM's (arXiv 2503.09573), complementary
masks and the confidence term (CAP) are LLaDA2.0's; the vendor states the two streams, the shared
positions and a cross entropy over selected noisy positions. All else is decided here.

Answers that end inside a block: nothing is known of what follows while it is denoised, so those positions, the tail,
are masked like the answer's and become padding, with a weight of their own.
"""

import math
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func, torch_chunk_gated_delta_rule
from transformers.utils import ModelOutput

from .configuration_clover import require

if TYPE_CHECKING:
    from .modeling_clover import CloverForDiffusionLM, CloverGatedDeltaNet

IGNORED = -100  # a label that counts nowhere, as everywhere in transformers
WEIGHTINGS = ("uniform", "inverse_ratio")


@dataclass(frozen=True)
class Objective:
    """What the loss is made of; `model.objective` holds the one in force.

    complementary: each noisy block twice, what is masked and what is not exchanged, so that every answer token is
        denoised exactly once. weighting: of masked positions by their block's masking ratio t, "uniform" or
        "inverse_ratio", 1/t up to `max_weight`. causal_weight: of the autoregressive loss of the clean stream, which
        keeps what commits and self-speculative decoding need; 0 leaves it out. tail_weight: of padding after an
        answer's end. confidence_weight: of the entropy where the likeliest token is the right one (CAP), which makes
        more tokens pass a threshold. head_chunk: positions whose logits exist at once.
    """

    complementary: bool = True
    weighting: str = "uniform"
    max_weight: float = 4.0
    causal_weight: float = 0.5
    tail_weight: float = 0.25
    confidence_weight: float = 0.0
    head_chunk: int = 2048

    def __post_init__(self):
        require(self.weighting in WEIGHTINGS, "weighting", self.weighting, " or ".join(WEIGHTINGS))
        for name in ("causal_weight", "tail_weight", "confidence_weight"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "at least 0, and finite")
        require(1 <= self.max_weight < math.inf, "max_weight", self.max_weight, "at least 1, and finite")
        has_effect = self.weighting == "inverse_ratio" or self.max_weight == type(self).max_weight
        require(has_effect, "max_weight", self.max_weight, "left out unless `weighting` is 'inverse_ratio'")
        require(self.head_chunk >= 1, "head_chunk", self.head_chunk, "at least 1")


@dataclass
class CloverTrainingOutput(ModelOutput):
    """`loss` is what to minimise; the others are its parts, as means, detached.

    denoising_loss: cross entropy of answer tokens (without tails), mean over those denoised here. causal_loss: of the
    next token. aux_loss: the router's. ratios, block_losses: (M,) masking ratio and mean cross entropy of each noisy
    block.
    """

    loss: torch.Tensor | None = None
    denoising_loss: torch.Tensor | None = None
    causal_loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    ratios: torch.Tensor | None = None
    block_losses: torch.Tensor | None = None


# ---- what there is to denoise ----------------------------------------------------------------------------------------


@dataclass
class NoisyBlocks:
    """M blocks to denoise, each of one row's one answer.

    row, block: (M,) where it stands. targets: (M, T) what it is to become. answer, tail: (M, T) bool, positions of the
    answer and behind its end. Once masked: inputs (M, T), masked (M, T) bool, ratio (M,).
    """

    row: torch.Tensor
    block: torch.Tensor
    targets: torch.Tensor
    answer: torch.Tensor
    tail: torch.Tensor
    inputs: torch.Tensor | None = None
    masked: torch.Tensor | None = None
    ratio: torch.Tensor | None = None

    def where(self, chosen: torch.Tensor) -> "NoisyBlocks":
        return NoisyBlocks(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


def document_ids_of(attention_mask: torch.Tensor) -> torch.Tensor:
    """One document a row, (B, N) of 0 and, where there is padding, -1."""
    require(
        bool((attention_mask.long().diff(dim=-1) <= 0).all()),
        "attention_mask",
        "padded before real tokens",
        "padded on the right only: in training blocks are counted from a row's first column",
    )
    return attention_mask.long() - 1


def check_batch(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None,
    document_ids: torch.Tensor | None,
    decoding_order: torch.Tensor | None,
    noise_seeds: torch.Tensor | None,
) -> None:
    """Raises a `ValueError` on tensors of the wrong kind or shape; values are not looked at."""
    is_batch = input_ids.ndim == 2 and input_ids.dtype == torch.long
    require(is_batch, "input_ids", f"{input_ids.dtype} {tuple(input_ids.shape)}", "torch.int64 of shape (B, N)")
    per_token = {
        "labels": labels,
        "attention_mask": attention_mask,
        "document_ids": document_ids,
        "decoding_order": decoding_order,
    }
    for name, value in per_token.items():
        fits = value is None or value.shape == input_ids.shape
        require(fits, name, value if value is None else tuple(value.shape), "of the shape of `input_ids`")
    require(labels.dtype == torch.long, "labels", labels.dtype, "torch.int64")
    twice = attention_mask is not None and document_ids is not None
    require(not twice, "attention_mask", "given with `document_ids`", "left out then: padding has document -1")
    if noise_seeds is not None:
        is_one_each = isinstance(noise_seeds, torch.Tensor) and noise_seeds.shape == input_ids.shape[:1]
        found = tuple(noise_seeds.shape) if isinstance(noise_seeds, torch.Tensor) else noise_seeds
        require(is_one_each, "noise_seeds", found, f"a tensor of one seed a row, ({len(input_ids)},)")


def check_documents(document_ids: torch.Tensor, size: int) -> None:
    """Documents begin where a block does, in one piece, and are padded, as a whole, up to the next one."""
    blocks = document_ids.unflatten(1, (-1, size))  # (B, n, T)
    for row in blocks[..., 0].tolist():
        pieces = [document for document, _ in groupby(row) if document >= 0]
        require(len(pieces) == len({*pieces}), "document_ids", pieces, "of documents in one piece each")
    real = blocks >= 0
    same = (blocks == blocks[..., :1]) | ~real
    full_before = real[:, :-1].all(-1) | (blocks[:, :-1, 0] != blocks[:, 1:, 0])
    padded_after = (real.long().diff(dim=-1) <= 0).all()
    fits = bool(same.all()) and bool(padded_after) and bool((full_before | ~real[:, 1:, 0]).all())
    allowed = f"such that each document begins at a multiple of {size} and is padded (-1) up to one"
    require(fits, "document_ids", "not on the grid of blocks", allowed)


def answer_blocks(
    input_ids: torch.Tensor, labels: torch.Tensor, document_ids: torch.Tensor, size: int, pad: int
) -> NoisyBlocks:
    """Every block of every answer, an answer being a run of labels of one document.

    Args: (B, N) each, N a multiple of `size`.
    """
    trained = (labels != IGNORED) & (document_ids >= 0)
    before = F.pad(trained, (1, 0))[:, :-1] & (document_ids == F.pad(document_ids, (1, 0), value=-1)[:, :-1])
    answers = (trained & ~before).cumsum(-1)  # (B, N) number of the answer that a trained position is of
    goes_on = F.pad(trained & before, (0, 1))[:, 1:]  # the next position is of the same answer
    rows, columns = trained.nonzero(as_tuple=True)
    row, block, answer = torch.stack([rows, columns // size, answers[rows, columns]], dim=1).unique(dim=0).unbind(1)

    def of_blocks(values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(1, (-1, size))[row, block]  # (M, T)

    own = of_blocks(trained) & (of_blocks(answers) == answer[:, None])
    ended = (own & ~of_blocks(goes_on)).long().cumsum(-1)
    tail = (ended > 0) & ~own
    targets = torch.where(own, of_blocks(labels), of_blocks(input_ids)).masked_fill(tail, pad)
    return NoisyBlocks(row, block, targets, own, tail)


def mask_blocks(
    blocks: NoisyBlocks,
    seeds: torch.Tensor,
    mask_token: int,
    complementary: bool,
    order: torch.Tensor | None = None,
    fixed_ratio: float | None = None,
) -> NoisyBlocks:
    """Masks a random share of each block's answer and tail, at least one position.

    The shares of a row's blocks are stratified: one in each M-th of (0, 1]. All that is random follows from the row's
    seed, so a row is masked alike in whatever batch it comes, and on whichever device.

    Args:
        seeds: (B,), one a row. fixed_ratio: the share, of all blocks.
        order: (M, T), when each position was decoded by a teacher; the later ones are masked, so that the block is a
            state on the teacher's way.
    """
    count, size = blocks.targets.shape
    ratio, scores, rows = torch.empty(count), torch.empty(count, size), blocks.row.cpu()
    for row, seed in enumerate(seeds.tolist()):
        mine = rows == row
        generator, number = torch.Generator().manual_seed(seed), int(mine.sum())
        strata = torch.randperm(number, generator=generator) + 1
        ratio[mine] = (strata - torch.rand(number, generator=generator)) / max(1, number)
        scores[mine] = torch.rand(number, size, generator=generator)
    if fixed_ratio is not None:
        ratio.fill_(fixed_ratio)
    ratio, scores = ratio.to(blocks.targets.device), scores.to(blocks.targets.device)
    scores = scores if order is None else order.float()
    open_ = blocks.answer | blocks.tail
    number = (ratio * open_.sum(-1)).round().clamp(min=1)
    ranks = scores.masked_fill(~open_, -1).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    chosen = open_ & (ranks < number[:, None])
    masks = [chosen, open_ & ~chosen] if complementary else [chosen]
    noisy = [
        replace(
            blocks,
            inputs=blocks.targets.masked_fill(mask, mask_token),
            masked=mask,
            ratio=mask.sum(-1) / open_.sum(-1),
        ).where(mask.any(-1))
        for mask in masks
    ]
    return NoisyBlocks(*(torch.cat(parts) for parts in zip(*(vars(part).values() for part in noisy), strict=True)))


# ---- who sees what ---------------------------------------------------------------------------------------------------


@dataclass
class Streams:
    """The layout of both streams in one sequence of N + m*T positions: n clean blocks, then m noisy ones, a row.

    clean: N. block_size: T. first: (B, n) bool, a document begins here. noisy_block: (B, m) the clean block in whose
    place a noisy one stands, -1 where a row has fewer than m. document_ids: (B, N), -1 for padding.
    """

    clean: int
    block_size: int
    first: torch.Tensor
    noisy_block: torch.Tensor
    document_ids: torch.Tensor

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, N + m*T, D) as (B, n, T, D) and (B, m, T, D)."""
        blocks = hidden.unflatten(1, (-1, self.block_size))
        return blocks.split([self.first.shape[1], self.noisy_block.shape[1]], dim=1)

    def joined(self, clean: torch.Tensor, noisy: torch.Tensor) -> torch.Tensor:
        return torch.cat([clean, noisy], dim=1).flatten(1, 2)

    def rings(self, inputs: torch.Tensor, length: int) -> torch.Tensor:
        """The last `length` inputs before each clean block, (B, n, length, C), zeros where a document begins."""
        before = F.pad(inputs.flatten(1, 2), (0, 0, length, 0))  # (B, length + N, C)
        before = before.unfold(1, length, self.block_size)[:, : inputs.shape[1]].mT
        return before.masked_fill(self.first[..., None, None], 0)

    def scan(self, written: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The states (B, n, H, d_k, d_v) before each block, where a block makes `kept @ S + written` of a state S."""
        state, before = torch.zeros_like(written[:, 0]), []
        for block in range(written.shape[1]):
            state = state.masked_fill(self.first[:, block, None, None, None], 0)
            before.append(state)
            state = kept[:, block] @ state + written[:, block]
        return torch.stack(before, dim=1)

    def of_noisy(self, of_clean: torch.Tensor) -> torch.Tensor:
        """What stands at each noisy block's clean one: (B, n, ...) as (B*m, ...)."""
        rows = torch.arange(len(of_clean), device=of_clean.device)[:, None]
        return of_clean[rows, self.noisy_block.clamp(min=0)].flatten(0, 1)

    def positions(self) -> torch.Tensor:
        """(B, N + m*T) positions in the document; a noisy token has its clean twin's."""
        index = torch.arange(self.first.shape[1], device=self.first.device).expand_as(self.first)
        start = index.masked_fill(~self.first, 0).cummax(-1).values  # (B, n) block at which the document began
        block = torch.cat([index - start, self.of_noisy(index - start).view_as(self.noisy_block)], dim=1)
        inside = torch.arange(self.block_size, device=block.device)
        return (block[..., None] * self.block_size + inside).flatten(1)

    def mask(self) -> torch.Tensor:
        """(B, 1, L, L) bool, who sees whom, L = N + m*T; everyone sees at least itself."""
        size, slots = self.block_size, self.noisy_block.shape[1]
        device = self.first.device
        document = self.document_ids
        of_block = document.unflatten(1, (-1, size))[..., 0]  # (B, n)
        noisy_document = self.of_noisy(of_block).view_as(self.noisy_block).masked_fill(self.noisy_block < 0, -2)
        column, slot = torch.arange(self.clean, device=device), torch.arange(slots, device=device)
        clean = (document[:, :, None] == document[:, None]) & (column[:, None] >= column)
        before = column < self.noisy_block[..., None] * size  # (B, m, N)
        prefix = (noisy_document[..., None] == document[:, None]) & before
        own = (slot[:, None] == slot).repeat_interleave(size, 0).repeat_interleave(size, 1)
        upper = F.pad(clean, (0, slots * size))
        lower = torch.cat([prefix.repeat_interleave(size, 1), own.expand(len(document), -1, -1)], dim=-1)
        return torch.cat([upper, lower], dim=1)[:, None]


def clean_stream(
    layer: "CloverGatedDeltaNet", clean: torch.Tensor, inputs: torch.Tensor, rings: torch.Tensor, streams: Streams
) -> tuple[torch.Tensor, torch.Tensor]:
    """A Gated DeltaNet layer's causal outputs (B, n, T, H, d_v) and the states (B, n, H, d_k, d_v) before each block.

    The rule is linear in the state, so one call over all blocks at once, each from zero, also gives what a block
    makes of any state before it: it is run beside the values, from the identity, with nothing written. What is
    left to do in order is one product a block.
    """
    batch, count, length, _ = clean.shape
    into = torch.cat([rings, inputs.mT], dim=-1).flatten(0, 1)  # (B*n, C, K-1+T)
    mixed = F.silu(F.conv1d(into, layer.conv1d.weight, groups=into.shape[1])).mT
    query, key, value = layer.heads(mixed)
    identity = torch.eye(layer.head_k_dim, device=value.device).expand(*value.shape[:1], value.shape[2], -1, -1)
    nothing = value.new_zeros(*value.shape[:-1], layer.head_k_dim)
    outputs, states = torch_chunk_gated_delta_rule(
        query,
        key,
        torch.cat([value, nothing], dim=-1),
        g=layer.log_decay(layer.in_proj_a(clean)).flatten(0, 1),
        beta=layer.in_proj_b(clean).sigmoid().flatten(0, 1),
        chunk_size=length,
        initial_state=F.pad(identity, (layer.head_v_dim, 0)),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    parts = [layer.head_v_dim, layer.head_k_dim]
    own, reads = (part.unflatten(0, (batch, count)) for part in outputs.split(parts, dim=-1))
    written, kept = (part.unflatten(0, (batch, count)) for part in states.split(parts, dim=-1))
    before = streams.scan(written, kept)
    return own + torch.einsum("bnthk,bnhkv->bnthv", reads.float(), before), before


def layout(
    noisy: NoisyBlocks, document_ids: torch.Tensor, size: int
) -> tuple[Streams, tuple[torch.Tensor, torch.Tensor]]:
    """The streams, and of each noisy block its row and its place (M,), (M,) among the row's."""
    blocks = document_ids.unflatten(1, (-1, size))[..., 0]
    first = (blocks != F.pad(blocks, (1, 0), value=-3)[:, :-1]) | (blocks < 0)
    rows = len(document_ids)
    order = noisy.row.argsort(stable=True)
    counts = torch.bincount(noisy.row, minlength=rows)
    place = torch.empty_like(noisy.row)
    place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[noisy.row[order]]
    noisy_block = noisy.block.new_full((rows, int(counts.max())), -1)
    noisy_block[noisy.row, place] = noisy.block
    return Streams(document_ids.shape[1], size, first, noisy_block, document_ids), (noisy.row, place)


def attention_mask_for(streams: Streams, implementation: str, dtype: torch.dtype) -> torch.Tensor:
    """The mask in the form that an attention implementation takes.

    Raises:
        ValueError: one that takes no mask of its own.
    """
    allowed = "sdpa or eager in training: the two streams need a mask of their own"
    require(implementation in ("sdpa", "eager"), "attn_implementation", implementation, allowed)
    mask = streams.mask()
    if implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


# ---- the loss --------------------------------------------------------------------------------------------------------


def token_losses(
    head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy (n,), and entropy (n,) where the likeliest token is the target, else 0; in fp32.

    A vocabulary of 248,320 makes logits the largest tensor there is, so no more than `chunk` rows exist at once, in
    the backward pass too.
    """

    def losses(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_probabilities = head(hidden).float().log_softmax(-1)
        loss = F.nll_loss(log_probabilities, targets, reduction="none")
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        return torch.stack([loss, entropy.masked_fill(log_probabilities.argmax(-1) != targets, 0)])

    pairs = list(zip(hidden.split(chunk), targets.split(chunk), strict=True))
    parts = [checkpoint(losses, *pair, use_reentrant=False) if len(pairs) > 1 else losses(*pair) for pair in pairs]
    return torch.cat(parts, dim=1).unbind(0)


def position_weights(noisy: NoisyBlocks, objective: Objective) -> torch.Tensor:
    """(M, T), zero where nothing is masked; summed over an answer they make, on average, its number of tokens."""
    share = noisy.ratio[:, None]
    # A token is masked once in two complementary blocks, and in half of single ones.
    uniform = torch.full_like(share, 1.0 if objective.complementary else 2.0)
    weight = uniform if objective.weighting == "uniform" else (1 / share).clamp(max=objective.max_weight) * uniform / 2
    return weight * noisy.masked * (noisy.answer + objective.tail_weight * noisy.tail)


def block_diffusion_loss(
    model: "CloverForDiffusionLM",
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    noise_seeds: torch.Tensor | None = None,
    decoding_order: torch.Tensor | None = None,
    masking_ratio: float | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    output_router_logits: bool | None = None,
    use_cache: bool | None = None,
    return_dict: bool | None = None,
) -> CloverTrainingOutput:
    """The loss of a batch.

    Args:
        input_ids: (B, N) documents; padded here to whole blocks.
        labels: (B, N) the token where one is to be learnt, -100 elsewhere; not shifted.
        attention_mask: (B, N) one document a row, padded on the right. Or
        document_ids: (B, N) whose document a position is of, -1 for padding; each begins at a multiple of the block
            size, so that several share a row and none sees another.
        noise_seeds: (B,) what masks follow from; without them they are drawn from torch's generator.
        decoding_order: (B, N) when a teacher decoded each position; masks then are states on its way.
        masking_ratio: in (0, 1], of every block; by default shares of a row's blocks are spread over (0, 1].
        num_items_in_batch: labels by which sums are divided, over all accumulation steps and processes; without it
            those of this batch.
        output_router_logits: adds the router's load-balancing loss over real tokens; by default as the config says.
    Raises:
        ValueError: no label, no mask token, or documents off the grid.
    """
    config, objective = model.config, model.objective
    size, mask_token = config.block_size, config.mask_token_id
    require(mask_token is not None, "mask_token_id", None, "set in the config: noisy blocks are made of it")
    pad = config.pad_token_id if config.pad_token_id is not None else mask_token
    check_batch(input_ids, labels, attention_mask, document_ids, decoding_order, noise_seeds)
    sums = isinstance(num_items_in_batch, torch.Tensor) or num_items_in_batch is None or num_items_in_batch > 0
    require(sums, "num_items_in_batch", num_items_in_batch, "null or at least 1")
    if document_ids is None:
        document_ids = document_ids_of(torch.ones_like(input_ids) if attention_mask is None else attention_mask)
    missing = -input_ids.shape[1] % size
    input_ids, labels = F.pad(input_ids, (0, missing), value=pad), F.pad(labels, (0, missing), value=IGNORED)
    document_ids = F.pad(document_ids, (0, missing), value=-1)
    check_documents(document_ids, size)
    labels = labels.masked_fill(document_ids < 0, IGNORED)  # padding is never learnt, so it does not count either
    require(bool((labels != IGNORED).any()), "labels", "-100 everywhere but in padding", "a token somewhere")

    in_range = masking_ratio is None or 0 < masking_ratio <= 1
    require(in_range, "masking_ratio", masking_ratio, "null or in (0, 1]")

    blocks = answer_blocks(input_ids, labels, document_ids, size, pad)
    if noise_seeds is None:
        noise_seeds = torch.randint(2**62, (len(input_ids),))
    order = None
    if decoding_order is not None:
        order = F.pad(decoding_order, (0, missing)).unflatten(1, (-1, size))[blocks.row, blocks.block]
    noisy = mask_blocks(blocks, noise_seeds, mask_token, objective.complementary, order, masking_ratio)
    streams, places = layout(noisy, document_ids, size)
    slots = streams.noisy_block.shape[1]
    inputs = input_ids.new_full((len(input_ids), slots, size), pad)
    inputs[places] = noisy.inputs
    embedded = model.get_input_embeddings()(torch.cat([input_ids, inputs.flatten(1)], dim=1))
    attention = attention_mask_for(streams, config._attn_implementation, embedded.dtype)
    outputs = model.model(
        inputs_embeds=embedded,
        attention_mask={"full_attention": attention, "linear_attention": None},
        position_ids=streams.positions(),
        streams=streams,
        use_cache=False,
        output_router_logits=config.output_router_logits if output_router_logits is None else output_router_logits,
        return_dict=True,
    )
    clean, noisy_hidden = streams.split(outputs.last_hidden_state)
    items = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch

    weights, masked = position_weights(noisy, objective), noisy.masked
    losses, entropies = token_losses(
        model.lm_head, noisy_hidden[places][masked], noisy.targets[masked], objective.head_chunk
    )
    loss = ((losses + objective.confidence_weight * entropies) * weights[masked]).sum() / items
    per_position = torch.zeros_like(weights).masked_scatter(masked, losses.detach())
    counted = noisy.answer & masked
    found = CloverTrainingOutput(
        denoising_loss=per_position[counted].mean(),
        ratios=noisy.ratio,
        block_losses=(per_position * counted).sum(-1) / counted.sum(-1).clamp(min=1),
    )
    if objective.causal_weight > 0:
        following, before = labels[:, 1:], clean.flatten(1, 2)[:, :-1]
        predicted = following != IGNORED  # a document's first token is never one: it has nothing before it
        predicted &= document_ids[:, 1:] == document_ids[:, :-1]
        causal, _ = token_losses(model.lm_head, before[predicted], following[predicted], objective.head_chunk)
        loss = loss + objective.causal_weight * causal.sum() / items
        found.causal_loss = causal.detach().sum() / max(1, len(causal))
    if outputs.router_logits:
        real = torch.cat([document_ids >= 0, (streams.noisy_block >= 0).repeat_interleave(size, 1)], dim=1)
        aux = load_balancing_loss_func(outputs.router_logits, config.num_experts, config.num_experts_per_tok, real)
        # A mean, so that of accumulated batches each counts by its labels.
        loss = loss + config.router_aux_loss_coef * aux * (labels != IGNORED).sum() / items
        found.aux_loss = aux.detach()
    found.loss = loss
    return found
