"""Replays a log through Clover's own loop and explains every divergence.

The loop runs as in `generate()`; only its choice is watched. After each pass what `LowConfidence` chose is compared
with the logged step, and the logged tokens are what is filled in, so that a divergence does not hide the blocks after
it. Where nothing diverges, that is exactly what the loop would have done by itself.

A divergence is *numerical* if the logged decision was closer than the two paths' measured noise: the worst difference
between theirs and ours over all steps that are equal. Otherwise it is *algorithmic*: the paths do not compute the same
thing. Noise is measured, not judged: a fault that changes every logit looks like much noise, so look at the worst
difference too.
"""

from dataclasses import dataclass, field

import torch

from ..generation_clover import BlockModel, Choice, Ends, LowConfidence, block_diffusion
from .log import Log, Step


@dataclass
class Divergence:
    """One position where the loop decided otherwise than the log. `margin` is how close the logged decision was:
    in probability ("acceptance") or in logits ("token")."""

    request: int
    block: int
    step: int
    position: int
    kind: str  # "token", "acceptance", "finish" or "missing step"
    logged: object
    ours: object
    margin: float
    verdict: str = ""  # "numerical" or "algorithmic"


@dataclass
class Comparison:
    """One logged step beside ours: the differences at positions where both name the same token."""

    request: int
    block: int
    confidences: list[tuple[float, float]]  # logged, ours
    margins: list[tuple[float, float]]
    diverged: bool


@dataclass
class Report:
    requests: int = 0
    requests_equal: int = 0
    comparisons: list[Comparison] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    not_replayed: int = 0  # logged steps after an answer's end: the loop does not take them

    @property
    def steps_equal(self) -> int:
        return sum(not comparison.diverged for comparison in self.comparisons)

    @property
    def differences(self) -> list[float]:
        return [abs(a - b) for comparison in self.comparisons for a, b in comparison.confidences]

    @property
    def noise(self) -> dict[str, float]:
        """The worst difference between the two paths in steps that are equal, of confidences and of logit margins."""
        equal = [comparison for comparison in self.comparisons if not comparison.diverged]
        confidences = [abs(a - b) for comparison in equal for a, b in comparison.confidences]
        margins = [abs(a - b) for comparison in equal for a, b in comparison.margins]
        return {"acceptance": max(confidences, default=0.0), "token": max(margins, default=0.0)}

    @property
    def algorithmic(self) -> list[Divergence]:
        return [divergence for divergence in self.divergences if divergence.verdict == "algorithmic"]


class Watched:
    """Chooses as `LowConfidence` does, compares with the logged step, and goes on with the logged one."""

    def __init__(self, choose: LowConfidence, steps: list[Step], report: Report):
        self.choose, self.mask_token_id, self.report = choose, choose.mask_token_id, report
        self.steps, self.taken = steps, 0

    def __call__(self, logits: torch.Tensor, masked: torch.Tensor, rows: list[int] | None = None) -> Choice:
        choice = self.choose(logits, masked, rows)
        if self.taken == len(self.steps):
            last = self.steps[-1] if self.steps else None
            where = (last.request, last.block, last.step, last.start) if last else (-1, -1, -1, -1)
            self.report.divergences.append(Divergence(*where, "missing step", None, "a further step", float("inf")))
            return choice
        step, self.taken = self.steps[self.taken], self.taken + 1
        top = logits.float().topk(2, dim=-1).values
        compare(step, choice, masked[0].tolist(), (top[:, 0] - top[:, 1]).tolist(), self.choose.threshold, self.report)
        tokens = torch.tensor([step.after], device=masked.device)
        return Choice(tokens, masked & (tokens != self.mask_token_id), choice.confidences)


def compare(
    step: Step, choice: Choice, masked: list[bool], margins: list[float], threshold: float, report: Report
) -> None:
    """Adds what one step tells to the report. `margins` are those of the masked positions, in order."""
    positions = [i for i, is_masked in enumerate(masked) if is_masked]
    found, confidences, ours_margins = [], [], []
    logged_filled = {i for i in positions if step.after[i] != step.before[i]}
    for i, margin in zip(positions, margins, strict=True):
        token, accepted = int(choice.tokens[0, i]), bool(choice.accepted[0, i])
        confidence = float(choice.confidences[0, i])
        where = (step.request, step.block, step.step, step.start + i)
        if step.tokens[i] != token:
            if i in logged_filled or accepted:
                found.append(Divergence(*where, "token", step.tokens[i], token, step.margins[i]))
            continue
        confidences.append((step.confidences[i], confidence))
        ours_margins.append((step.margins[i], margin))
        if (i in logged_filled) != accepted:
            closeness = decided_by(step, i, positions, threshold)
            found.append(Divergence(*where, "acceptance", i in logged_filled, accepted, closeness))
    report.divergences += found
    report.comparisons.append(Comparison(step.request, step.block, confidences, ours_margins, bool(found)))


def decided_by(step: Step, i: int, positions: list[int], threshold: float) -> float:
    """How close the logged decision about position i was: to the threshold, or, where the surest one was taken because
    none was above it, to the next surest."""
    to_threshold = abs(step.confidences[i] - threshold)
    best = sorted((step.confidences[j] for j in positions), reverse=True)
    if best[0] > threshold:
        return to_threshold
    others = [c for j, c in enumerate(step.confidences) if c is not None and j != i]
    to_another = min((abs(step.confidences[i] - c) for c in others), default=float("inf"))
    return min(to_threshold, to_another)


def replay(log: Log, model: BlockModel, device: torch.device | str = "cpu", **denoise_options) -> Report:
    """Runs the loop over every logged request.

    Args:
        log: of greedy requests; see `log.py`. model: the logged model behind the loop's three verbs.
    Raises:
        ValueError: the log holds no steps, or an algorithm that Clover's loop is not.
    """
    algorithm, header = log.header.algorithm, log.header
    if algorithm.get("name") != "LowConfidence":
        raise ValueError(f"the log is of {algorithm.get('name')!r}, but the loop is LowConfidence")
    if log.requests and not log.steps:
        raise ValueError("the log holds no steps: record it with the plugin, or compare the texts alone")
    report, mask = Report(requests=len(log.requests)), header.model["mask_token_id"]
    for request in log.requests:
        before = len(report.divergences)
        watched = Watched(LowConfidence(algorithm["threshold"], mask), log.steps_of(request.request), report)
        eos = () if request.sampling.get("ignore_eos") else tuple(header.model["eos_token_ids"])
        (answer,) = block_diffusion(
            model,
            [torch.tensor(request.prompt, device=device)],
            watched,
            block_size=algorithm["block_size"],
            ends=Ends(request.sampling["max_new_tokens"], eos),
            **denoise_options,
        )
        report.not_replayed += len(watched.steps) - watched.taken
        ended = (answer.tokens, answer.finish_reason)
        if ended != (request.output, request.finish_reason):
            where = (request.request, -1, -1, len(request.prompt))
            logged = (request.output, request.finish_reason)
            report.divergences.append(Divergence(*where, "finish", logged, ended, float("inf")))
        report.requests_equal += len(report.divergences) == before
    for divergence in report.divergences:
        noise = report.noise.get(divergence.kind, 0.0)
        divergence.verdict = "numerical" if divergence.margin < noise else "algorithmic"
    return report
