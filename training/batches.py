"""Training batches: documents of equal numbers of blocks, and their answers' blocks with masks.

A noisy block is what `generate()` would see while it writes that answer: the prompt's tail is clean, nothing is known
of what follows the answer's end. So the positions after the end token are masked too, and become padding, with a
small weight: they tell the model where an answer stops, and are never shown.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from .corpus import Encoder, documents
from .objective import Batch

PADDING_WEIGHT = 0.25


def answer_spans(mask: list[bool]) -> list[tuple[int, int]]:
    """Start and end of every run of True."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def answer_blocks(ids: list[int], mask: list[bool], width: int, pad: int) -> Iterator[tuple[int, list[int], int, int]]:
    """Each block of each answer: its index, the tokens it is to become, and where in it the answer starts and ends."""
    for start, end in answer_spans(mask):
        for block in range(start // width, (end - 1) // width + 1):
            first, last = max(start - block * width, 0), min(end - block * width, width)
            target = ids[block * width : block * width + last]
            yield block, target + [pad] * (width - last), first, last


def masked_positions(first: int, width: int, ratio: float, rng: Random) -> list[int]:
    """A random share `ratio` of the positions from `first` on, at least one."""
    open_positions = range(first, width)
    return rng.sample(open_positions, max(1, round(ratio * len(open_positions))))


def ratios(rng: Random) -> Iterator[float]:
    """Masking ratios, uniform in (0, 1], stratified: each run of eight has one in every eighth of the interval."""
    while True:
        strata = list(range(8))
        rng.shuffle(strata)
        yield from ((stratum + 1 - rng.random()) / 8 for stratum in strata)


def collate(
    encoded: list[tuple[list[int], list[bool]]],
    width: int,
    pad: int,
    mask_token: int,
    rng: Random,
    ratio: Iterator[float],
    complementary: bool,
) -> Batch:
    """A batch of encoded documents, which all fill the same number of blocks. See `Batch`."""
    blocks = -(-len(encoded[0][0]) // width)
    clean = torch.full((len(encoded), blocks * width), pad)
    predict = torch.zeros(clean.shape, dtype=torch.bool)
    noisy = defaultdict(list)
    for row, (ids, mask) in enumerate(encoded):
        clean[row, : len(ids)], predict[row, : len(ids)] = torch.tensor(ids), torch.tensor(mask)
        for block, target, first, last in answer_blocks(ids, mask, width, pad):
            chosen = masked_positions(first, width, next(ratio), rng)
            others = sorted(set(range(first, width)) - set(chosen))
            for masked in (chosen, others) if complementary and others else (chosen,):
                seen, weight = list(target), [0.0] * width
                for position in masked:
                    seen[position] = mask_token
                    weight[position] = 1.0 if position < last else PADDING_WEIGHT
                noisy[block].append((row, target, seen, weight))
    columns = [list(zip(*noisy[block], strict=True)) or [(), (), (), ()] for block in range(blocks)]
    rows, targets, inputs, weights = ([torch.tensor(column[i]) for column in columns] for i in range(4))
    return Batch(clean, predict, rows, targets, inputs, weights)


def batches(
    tokenizer: PreTrainedTokenizerBase, width: int, seed: int, tokens: int = 4096, complementary: bool = False
) -> Iterator[Batch]:
    """Batches without end, of about `tokens` clean positions each; the same for the same seed."""
    rng, encoder, buckets = Random(f"batches {seed}"), Encoder(tokenizer), defaultdict(list)
    ratio, source = ratios(rng), documents(seed)
    pad, mask_token = tokenizer.pad_token_id, tokenizer.mask_token_id
    while True:
        for ids, mask in encoder(itertools.islice(source, 64)):
            blocks = -(-len(ids) // width)
            buckets[blocks].append((ids, mask))
            if len(buckets[blocks]) * blocks * width >= tokens:
                yield collate(buckets.pop(blocks), width, pad, mask_token, rng, ratio, complementary)
