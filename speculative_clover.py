# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""Autoregressive text in fewer passes: a model drafts by denoising what it then verifies causally, with one cache.

Each round, for every row:

1. draft: a block of the last known token and masks, filled by a few denoising passes, greedily;
2. verify: one causal pass over that block gives the autoregressive distribution after each of its tokens;
3. keep the drafts that agree, and the verifier's own token after them; the prefix keeps the states after just those.

Greedy, a draft agrees if it is what the verifier chooses: the text is that of greedy autoregressive decoding. Drawn, a
draft d is kept with probability p(d); otherwise the token is drawn from p without d. A draft is a fixed function of the
text before it, so this is the rejection sampling of speculative decoding (arXiv 2211.17192) for a proposal of one
point: the text has the autoregressive distribution whatever the drafts are, and they only decide the speed.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from .generation_clover import Answer, DenoisingStep, Ends, LowConfidence, Prefix, StepCallback, left_padded

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # transformers' processors: ids (1, L), scores (1, V)


class SpeculativeModel(Protocol):
    """A block model that can also verify."""

    def verify(self, prefix: Prefix, block: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], Prefix]]:
        """Causal logits (B, T, V) of blocks (B, T), and the way to the prefix with the first (B,) tokens of each."""


def verified(
    text: list[int], drafts: list[int], logits: torch.Tensor, process: Process, generator: torch.Generator | None
) -> Iterator[int]:
    """The tokens that follow a text: drafts as far as they are kept, then one of the verifier's.

    Args:
        text: all tokens so far. drafts: T-1 proposals. logits: (T, V), causal, after `text` and after each draft.
        process: what makes logits scores; generator: what draws; None is greedy.
    Yields:
        One token at a time, so that a caller who stops early draws no more.
    """
    ids = torch.tensor([text + drafts], device=logits.device)
    for i, scores in enumerate(logits):
        scores = process(ids[:, : len(text) + i], scores[None].float())[0]
        draft = drafts[i] if i < len(drafts) else None
        if generator is None:
            token = int(scores.argmax())
        else:
            p = scores.softmax(-1)
            if draft is not None and torch.rand((), generator=generator, device=p.device) < p[draft]:
                token = draft
            else:
                rest = p if draft is None else p.index_fill(0, torch.tensor([draft], device=p.device), 0.0)
                token = int(rest.multinomial(1, generator=generator))
        yield token
        if token != draft:
            return


def draft_blocks(
    model: SpeculativeModel, prefix: Prefix, block: torch.Tensor, choose: LowConfidence, steps: int, **options
) -> tuple[torch.Tensor, list[int]]:
    """Fills blocks (B, T) by at most `steps` denoising passes; returns them and the passes that each row took."""
    masked = block == choose.mask_token_id
    masked[:, 0] = False  # the last known token
    passes = torch.zeros(len(block), dtype=torch.long, device=block.device)
    for step in range(steps):
        if not masked.any():
            break
        passes += masked.any(-1)
        choice = choose(model.denoise(prefix, block, masked, **options), masked)
        accepted = masked if step + 1 == steps else choice.accepted
        block, masked = torch.where(accepted, choice.tokens, block), masked & ~accepted
    return block, passes.tolist()


def self_speculative(
    model: SpeculativeModel,
    prompts: list[torch.Tensor],
    choose: LowConfidence,
    block_size: int,
    ends: Ends,
    draft_steps: int,
    processes: list[Process],
    generators: tuple[torch.Generator, ...] | None,
    callback: StepCallback | None = None,
    **denoise_options,
) -> list[Answer]:
    """Writes an answer to each prompt: its autoregressive one. The rows share passes and nothing else.

    Args:
        prompts: 1-D token ids, one or more each. choose: fills drafts, greedily.
        draft_steps: denoising passes over a draft, at most. processes, generators: by row; see `verified`.
        callback: called after each verifying pass with the row, a step whose confidences are the verifier's
            probabilities, and the block that was drafted.
    """
    device = prompts[0].device
    texts, answers, rows = (
        [prompt.tolist() for prompt in prompts],
        [Answer() for _ in prompts],
        list(range(len(prompts))),
    )
    prefix = model.prefill(*left_padded([text[:-1] for text in texts], device))
    turn = 0
    while rows:
        block = torch.full((len(rows), block_size), choose.mask_token_id, device=device)
        block[:, 0] = torch.tensor([texts[row][-1] for row in rows], device=device)
        block, passes = draft_blocks(model, prefix, block, choose, draft_steps, **denoise_options)
        logits, keep = model.verify(prefix, block)
        gained = []
        for row, (last, *drafts), took, scores in zip(rows, block.tolist(), passes, logits, strict=True):
            answer, prompt, start = answers[row], texts[row][: len(prompts[row])], len(texts[row])
            generator = None if generators is None else generators[row]
            for token in verified(list(texts[row]), drafts, scores, processes[row], generator):
                texts[row].append(token)
                answer.tokens.append(token)
                answer.finish_reason = ends.reason(prompt, answer)
                if answer.finish_reason is not None:
                    break
            ends.expire(answer)
            gained.append(len(texts[row]) - start)
            answer.num_denoising_passes += took
            answer.num_commit_passes += 1
            new = texts[row][start:]
            p = scores[: len(new)].float().softmax(-1).gather(-1, torch.tensor(new, device=device)[:, None])[:, 0]
            record = DenoisingStep(
                block=turn,
                step=took,
                positions=list(range(start, start + len(new))),
                tokens=new,
                confidences=p.tolist(),
                settled=new,
                finish_reason=answer.finish_reason,
            )
            answer.trace.append(record)
            if callback is not None:
                callback(row, record, [last, *drafts])
        turn += 1
        going_on = [i for i, row in enumerate(rows) if answers[row].finish_reason is None]
        if going_on:
            prefix = keep(torch.tensor(gained, device=device))
            if len(going_on) < len(rows):
                prefix = prefix.select(torch.tensor(going_on, device=device))
        rows = [rows[i] for i in going_on]
    return answers
