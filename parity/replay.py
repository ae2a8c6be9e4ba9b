"""Replays a log through Clover's own loop and explains every divergence.

The loop runs as in `generate()`; only its choice is watched. After each pass what `LowConfidence` chose is compared
with the logged step, and the logged tokens are what is filled in, so that a divergence does not hide the blocks after
it. Where nothing diverges, that is exactly what the loop would have done by itself.

A divergence is *numerical* if the logged decision was closer than the two paths' measured noise: the worst difference
between theirs and ours at all positions whose decision did not diverge. Otherwise it is *algorithmic*: the paths do not
compute the same thing. A fault that moves every logit must not pass as much noise, so noise counts only up to what
rounding explains (`PLAUSIBLE`), and where the differences are more than that, on average or the worst of them, this is
reported as such, whether or not a decision diverged. Where one did, the difference there must be so explained too.

A log without steps (a server that shows none) can only be compared by its texts: the loop then runs freely, and a
difference is *unexplained*.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..generation_clover import Answer, BlockModel, Choice, Ends, LowConfidence, block_diffusion
from .log import Log, Request, Step


class Bound(NamedTuple):
    """What rounding explains of differences: their mean, and the worst of them."""

    mean: float
    worst: float


# Of probabilities, and of distances between two logits: some times what `drift.md` lists for the type.
PLAUSIBLE = {
    "float32": {"acceptance": Bound(1e-3, 1e-2), "token": Bound(1e-2, 1e-1)},
    "float16": {"acceptance": Bound(1e-2, 2e-1), "token": Bound(1e-1, 2.0)},
    "bfloat16": {"acceptance": Bound(5e-2, 5e-1), "token": Bound(5e-1, 8.0)},
}
ALGORITHMS = {"LowConfidence", "CloverLowConfidence"}  # the second is the first, with a pass of its own for commits


@dataclass
class Divergence:
    """One position where the loop decided otherwise than the log. `margin` is how close the logged decision was:
    in probability ("acceptance") or in logits ("token")."""

    request: int
    block: int
    step: int
    position: int
    kind: str  # "token", "acceptance", "finish", "text" or "missing step"
    logged: object
    ours: object
    margin: float
    difference: float = 0.0  # of the two paths here: of the confidences, or of how far the logged token is ahead
    verdict: str = ""  # "numerical", "algorithmic" or "unexplained"


@dataclass
class Comparison:
    """One logged step beside ours.

    confidences: logged and ours, where both name the same token. margins: how far the logged token is above the other
    one, ours negative where we have them the other way round. Both but where a decision diverged, which is no measure
    of how far the others are from doing so.
    """

    request: int
    block: int
    confidences: list[tuple[float, float]]  # logged, ours
    margins: list[tuple[float, float]]
    diverged: bool


@dataclass
class Report:
    plausible: dict[str, Bound]
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
    def measured(self) -> dict[str, Bound]:
        """The differences between the two paths, of confidences and of logit margins."""
        margins = [abs(a - b) for comparison in self.comparisons for a, b in comparison.margins]
        return {
            kind: Bound(sum(found) / max(1, len(found)), max(found, default=0.0))
            for kind, found in (("acceptance", self.differences), ("token", margins))
        }

    @property
    def noise(self) -> dict[str, float]:
        """As much of the worst difference as rounding explains."""
        return {kind: min(found.worst, self.plausible[kind].worst) for kind, found in self.measured.items()}

    @property
    def implausible(self) -> list[tuple[str, str, float, float]]:
        """What is more than rounding explains: which differences, which figure of them, how much, how much may be."""
        return [
            (kind, figure, getattr(found, figure), getattr(self.plausible[kind], figure))
            for kind, found in self.measured.items()
            for figure in Bound._fields
            if getattr(found, figure) > getattr(self.plausible[kind], figure)
        ]

    @property
    def is_explained(self) -> bool:
        """Whether the two paths differ by rounding alone."""
        return not self.implausible and all(d.verdict == "numerical" for d in self.divergences)

    def judge(self) -> None:
        """Gives every divergence its verdict; all steps have to be in, for the noise is measured over them."""
        for divergence in self.divergences:
            if divergence.kind == "text":
                divergence.verdict = "unexplained"
            else:
                noise, kind = self.noise.get(divergence.kind, 0.0), divergence.kind
                close = divergence.margin < noise and divergence.difference <= self.plausible[kind].worst
                divergence.verdict = "numerical" if close else "algorithmic"


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
        if [confidence is not None for confidence in step.confidences] != masked[0].tolist():
            where = f"request {step.request}, block {step.block}, step {step.step}"
            raise ValueError(f"{where}: the log does not go on from the step before it; one of them may be missing")
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
        same = step.tokens[i] == token
        if not same and (i in logged_filled or accepted):
            found.append(Divergence(*where, "token", step.tokens[i], token, step.margins[i], step.margins[i] + margin))
        elif same and (i in logged_filled) != accepted:
            closeness = decided_by(step, i, positions, threshold)
            found.append(
                Divergence(
                    *where, "acceptance", i in logged_filled, accepted, closeness, abs(step.confidences[i] - confidence)
                )
            )
        else:
            ours_margins.append((step.margins[i], margin if same else -margin))
            if same:
                confidences.append((step.confidences[i], confidence))
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


@torch.no_grad()
def replay(
    log: Log, model: BlockModel, dtype: str = "float32", device: torch.device | str = "cpu", **denoise_options
) -> Report:
    """Runs the loop over every logged request.

    Args:
        log: of greedy requests; see `log.py`. model: the logged model behind the loop's three verbs.
        dtype: the model's, which with the log's says how much noise is plausible.
    Raises:
        ValueError: an algorithm that Clover's loop is not, or a stop that needs the server's tokenizer.
    """
    _check_that_it_can_be_replayed(log)
    coarser = max((PLAUSIBLE[name] for name in (log.header.dtype, dtype)), key=lambda bounds: bounds["token"].worst)
    report = Report(coarser, requests=len(log.requests))
    for request in log.requests:
        before = len(report.divergences)
        steps = log.steps_of(request.request)
        choose = LowConfidence(log.header.algorithm["threshold"], log.header.model["mask_token_id"])
        watched = Watched(choose, steps, report) if log.steps else choose
        answer = _answer(log, request, model, watched, device, denoise_options)
        if log.steps:
            report.not_replayed += len(steps) - watched.taken
        report.divergences += _differing_end(request, answer, "finish" if log.steps else "text")
        report.requests_equal += len(report.divergences) == before
    report.judge()
    return report


def _check_that_it_can_be_replayed(log: Log) -> None:
    name, dtype = log.header.algorithm["name"], log.header.dtype
    if name not in ALGORITHMS:
        raise ValueError(f"the log is of the algorithm {name!r}, but the loop is {' or '.join(sorted(ALGORITHMS))}")
    if dtype not in PLAUSIBLE:
        raise ValueError(f"the log's `dtype` is {dtype!r}, but must be one of {', '.join(PLAUSIBLE)}")
    if not log.requests:
        raise ValueError("the log holds no requests: there is nothing to compare")
    for request in log.requests:
        for name in ("stop", "stop_regex", "min_new_tokens"):
            if request.sampling.get(name):
                value = request.sampling[name]
                raise ValueError(f"request {request.request} has `{name}`: {value!r}, which a replay cannot follow")


def _answer(log: Log, request: Request, model: BlockModel, choose, device, denoise_options: dict) -> Answer:
    eos = ends_of(request.sampling, log.header.model["eos_token_ids"])
    (answer,) = block_diffusion(
        model,
        [torch.tensor(request.prompt, device=device)],
        choose,
        block_size=log.header.algorithm["block_size"],
        ends=Ends(request.sampling["max_new_tokens"], eos),
        **denoise_options,
    )
    return answer


def ends_of(sampling: dict, eos_token_ids: list[int]) -> list[int]:
    """The tokens that end a request in SGLang, where `ignore_eos` ignores the request's own stop tokens too."""
    return [] if sampling.get("ignore_eos") else [*eos_token_ids, *(sampling.get("stop_token_ids") or [])]


def _differing_end(request: Request, answer: Answer, kind: str) -> list[Divergence]:
    """What differs between the two answers as wholes; the position is that of the first token that does."""
    logged, ours = (request.output, request.finish_reason), (answer.tokens, answer.finish_reason)
    if logged == ours:
        return []
    pairs = enumerate(zip(request.output, answer.tokens, strict=False))
    shorter = min(len(request.output), len(answer.tokens))
    first = next((i for i, (a, b) in pairs if a != b), shorter)
    return [Divergence(request.request, -1, -1, len(request.prompt) + first, kind, logged, ours, float("inf"))]
