"""Block models without weights, to drive the loop through its three verbs: instant, and exact in any batch."""

import zlib
from dataclasses import dataclass

import torch


@dataclass
class Texts:
    """A prefix as the lists of its real tokens, one a row."""

    rows: list[list[int]]

    def select(self, rows: torch.Tensor) -> "Texts":
        return Texts([list(self.rows[i]) for i in rows.tolist()])


class ToyModel:
    """Keeps the texts; counts the rows that each verb is given; subclasses say what the logits are."""

    vocab_size = 12

    def __init__(self):
        self.prefilled, self.denoised, self.committed = [], [], []

    def logits_of(self, prefix: list[int], block: list[int]) -> torch.Tensor:
        """(T, V)"""
        raise NotImplementedError

    def prefill(self, input_ids, attention_mask):
        rows = [row[real.bool()].tolist() for row, real in zip(input_ids, attention_mask, strict=True)]
        self.prefilled.append(len(rows))
        return Texts(rows)

    def denoise(self, prefix, block, masked):
        self.denoised.append(len(block))
        assert len(prefix.rows) == len(block) == len(masked)
        logits = [self.logits_of(text, row.tolist()) for text, row in zip(prefix.rows, block, strict=True)]
        return torch.stack(logits)[masked]

    def commit(self, prefix, block):
        self.committed.append(len(block))
        assert len(prefix.rows) == len(block)
        for text, row in zip(prefix.rows, block.tolist(), strict=True):
            text += row  # in place, as a cache is advanced
        return prefix


class HashModel(ToyModel):
    """Random logits that depend on every token of the prefix and of the block, and on nothing else."""

    def logits_of(self, prefix, block):
        generator = torch.Generator().manual_seed(zlib.crc32(repr((prefix, block)).encode()))
        return torch.randn(len(block), self.vocab_size, generator=generator) * 2.5


class ScriptedModel(ToyModel):
    """Knows what stands at each position and how sure it is of it; where it knows nothing, token 1 with 0.2."""

    def __init__(self, script: dict[int, tuple[int, float]]):
        super().__init__()
        self.script = script

    def logits_of(self, prefix, block):
        probabilities = torch.empty(len(block), self.vocab_size)
        for i in range(len(block)):
            token, confidence = self.script.get(len(prefix) + i, (1, 0.2))
            probabilities[i] = (1 - confidence) / (self.vocab_size - 1)
            probabilities[i, token] = confidence
        return probabilities.log()
