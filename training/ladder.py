"""Was it worth it: one backbone, trained in different ways, on the same held-out exchanges.

    python -m clover.training ladder --row "autoregressive" DIR autoregressive --row "converted" DIR low_confidence ...

Each row names a checkpoint and how it decodes: autoregressive, low_confidence or self_speculative. Exact match, tokens
per forward (denoising and commit passes; in autoregressive decoding each token is one), passes and seconds per answer,
one exchange at a time.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from ..options_clover import DECODINGS
from .corpus import heldout
from .folders import config_of
from .judge import Question, answered
from .tasks import TASKS, Exchange, is_correct

WARM_UP = 3  # exchanges answered before the clock runs


@dataclass(frozen=True)
class Rung:
    """What one way of training came to."""

    name: str
    decoding: str
    exchanges: int
    right: int
    tokens: int
    passes: int
    seconds: float

    def line(self) -> str:
        n = self.exchanges
        figures = f"{self.right / n:.1%} | {self.tokens / max(1, self.passes):.2f} | {self.passes / n:.1f}"
        return f"| {self.name} | {self.decoding} | {figures} | {1000 * self.seconds / n:.0f} |"


def climb(name: str, folder: Path, decoding: str, exchanges: list[Exchange]) -> Rung:
    """Answers the exchanges one at a time, in fp32.

    Raises:
        ValueError: the folder holds no Clover. An autoregressive checkpoint is measured as converted.
    """
    config_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    questions = [Question(e.messages, e.tools, e.answer) for e in exchanges]
    options = {"decoding": decoding, "max_new_tokens": 128}
    for question in questions[:WARM_UP]:
        answered(model, tokenizer, [question], **options)
    began, found = time.perf_counter(), []
    for question in questions:
        found += answered(model, tokenizer, [question], **options)
    seconds = time.perf_counter() - began
    right = sum(given.ended and is_correct(e, given.text) for e, given in zip(exchanges, found, strict=True))
    tokens, passes = sum(g.tokens for g in found), sum(g.denoising + g.commits for g in found)
    return Rung(name, decoding, len(exchanges), right, tokens, passes, seconds)


def table(rungs: list[Rung]) -> str:
    lines = ["| trained | decoding | exact match | TPF | passes per answer | ms per answer |", "|---|---|" + "---|" * 4]
    return "\n".join([*lines, *(rung.line() for rung in rungs)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--row", nargs=3, action="append", required=True, metavar=("NAME", "DIR", "DECODING"))
    parser.add_argument("--exchanges", type=int, default=1000)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), help="only exchanges of these kinds")
    parser.add_argument("--markdown", type=Path, help="write the table here too")


def run(arguments: argparse.Namespace) -> int:
    if arguments.exchanges < 1:
        raise ValueError(f"`--exchanges` is {arguments.exchanges}, but must be at least 1")
    for _, folder, decoding in arguments.row:
        config_of(folder)
        if decoding not in DECODINGS:
            raise ValueError(f"`--row` has the decoding {decoding!r}, but must have one of {', '.join(DECODINGS)}")
    if arguments.markdown and not arguments.markdown.parent.is_dir():
        raise ValueError(f"`--markdown` is {arguments.markdown}, in a folder that is not there")
    exchanges, rungs = heldout(arguments.exchanges, tasks=arguments.tasks), []
    for name, folder, decoding in arguments.row:
        rungs.append(climb(name, Path(folder), decoding, exchanges))
        print(rungs[-1].line(), flush=True)
    text = (
        f"{len(exchanges)} held-out exchanges, fp32, one at a time, {torch.get_num_threads()} threads:\n\n"
        f"{table(rungs)}\n"
    )
    if arguments.markdown:
        arguments.markdown.write_text(text)
    return 0
