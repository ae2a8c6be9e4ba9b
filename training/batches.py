"""Training batches of the small checkpoint: documents of equal numbers of blocks, one a row."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from ..objective_clover import IGNORED
from .corpus import Encoder, documents


def collate(encoded: list[tuple[list[int], list[bool]]], size: int, pad: int, rng: Random) -> dict[str, torch.Tensor]:
    """Documents (ids, which of them to learn) as (B, N) arguments of `CloverForDiffusionLM.forward`, N whole blocks."""
    width = -(-max(len(ids) for ids, _ in encoded) // size) * size
    input_ids = torch.full((len(encoded), width), pad)
    labels, attention_mask = torch.full_like(input_ids, IGNORED), torch.zeros_like(input_ids)
    for row, (ids, learnt) in enumerate(encoded):
        input_ids[row, : len(ids)], attention_mask[row, : len(ids)] = torch.tensor(ids), 1
        labels[row, : len(ids)] = torch.tensor(ids).masked_fill(~torch.tensor(learnt), IGNORED)
    seeds = torch.tensor([rng.getrandbits(62) for _ in encoded])
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask, "noise_seeds": seeds}


def batches(
    tokenizer: PreTrainedTokenizerBase, size: int, seed: int, tokens: int = 4096
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end, of about `tokens` positions each; the same for the same seed."""
    rng, encoder, buckets, source = Random(f"batches {seed}"), Encoder(tokenizer), defaultdict(list), documents(seed)
    while True:
        for ids, learnt in encoder(islice(source, 64)):
            blocks = -(-len(ids) // size)
            buckets[blocks].append((ids, learnt))
            if len(buckets[blocks]) * blocks * size >= tokens:
                yield collate(buckets.pop(blocks), size, tokenizer.pad_token_id, rng)
