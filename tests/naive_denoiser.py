"""The oracle for whole answers: block diffusion written from its description, sharing no code with Clover's loop.

One row, no batch; `logits_of(prefix, block)` is its model, which remembers nothing; plain Python loops over lists.
"""

from dataclasses import dataclass, field

import torch
from transformers import DynamicCache


@dataclass
class NaiveAnswer:
    tokens: list[int]
    finish_reason: str
    denoising_passes: int
    commit_passes: int
    trace: list[tuple[int, int, list[int], list[int], list[float]]] = field(default_factory=list)
    closest: float = 1.0  # by how much the closest decision was decided: below 1e-5, rounding may turn it


@torch.no_grad()
def fresh_logits(model, prefix: list[int], block: list[int]) -> torch.Tensor:
    """(T, V) denoising logits of a Clover for a block after its prefix, which is prefilled afresh every time."""
    cache = DynamicCache(config=model.config)
    if prefix:
        model(torch.tensor([prefix]), cache=cache, use_cache=True)
    return model(torch.tensor([block]), cache=cache if prefix else None, is_causal=False).logits[0]


def naive_choice(logits: torch.Tensor, mask_id: int) -> tuple[int, float, float]:
    """The most probable token that is not the mask, its probability, and its lead over the next one."""
    probabilities = logits.float().softmax(-1).tolist()
    best = -1
    for token in range(len(probabilities)):
        if token != mask_id and (best < 0 or probabilities[token] > probabilities[best]):
            best = token
    rest = [p for token, p in enumerate(probabilities) if token not in (mask_id, best)]
    return best, probabilities[best], probabilities[best] - max(rest)


def naive_accepted(confidences: dict[int, float], threshold: float) -> list[int]:
    """Which of the masked positions to fill: those that are sure, or else the surest."""
    sure = [position for position, confidence in confidences.items() if confidence > threshold]
    if sure:
        return sure
    surest = None
    for position in confidences:
        if surest is None or confidences[position] > confidences[surest]:
            surest = position
    return [surest]


def naive_generate(logits_of, prompt, *, block_size, threshold, budget, mask_id, eos=(), max_steps=None):
    """A `NaiveAnswer` to one prompt, a list of token ids."""
    text, answer = list(prompt), NaiveAnswer([], "", 0, 0)
    while True:
        start = len(text) // block_size * block_size
        prefix, block = text[:start], text[start:]
        first = len(block)
        block += [mask_id] * (block_size - first)
        hidden = list(range(first, block_size))
        cut = min(block_size, first + budget - len(answer.tokens))  # nothing after it will be shown
        step, shown = 0, None
        while shown is None:
            logits = logits_of(prefix, block)
            answer.denoising_passes += 1
            choice = {position: naive_choice(logits[position], mask_id) for position in hidden}
            confidences = {position: choice[position][1] for position in hidden}
            accepted = list(hidden) if step + 1 == max_steps else naive_accepted(confidences, threshold)
            answer.closest = min(answer.closest, _margin(choice, confidences, accepted, threshold))
            for position in accepted:
                block[position] = choice[position][0]
                hidden.remove(position)
            filled = [start + position for position in accepted]
            tokens = [block[position] for position in accepted]
            step_confidences = [confidences[position] for position in accepted]
            answer.trace.append((start // block_size, step, filled, tokens, step_confidences))
            step += 1
            shown = _shown(block, hidden, first, cut, eos)
        written = block[first:shown]
        answer.tokens += written
        text = prefix + block
        if written[-1] in eos or len(answer.tokens) == budget:
            answer.finish_reason = "stop" if written[-1] in eos else "length"
            return answer
        answer.commit_passes += 1


def _shown(block, hidden, first, cut, eos) -> int | None:
    """Where the answer's part of the block ends, once all of it is known; None until then."""
    for position in range(first, cut):
        if position in hidden:
            return None
        if block[position] in eos:
            return position + 1
    return cut


def _margin(choice, confidences, accepted, threshold) -> float:
    leads = [lead for _, _, lead in choice.values()]
    from_threshold = [abs(confidence - threshold) for confidence in confidences.values()]
    ranking = sorted(confidences.values())
    fallback = [ranking[-1] - ranking[-2]] if len(accepted) == 1 and len(ranking) > 1 else []
    return min(leads + from_threshold + fallback)
