"""What a replay found, as lines, and with `--report` as Markdown with a picture beside it."""

import platform
from pathlib import Path

import torch
import transformers

from .log import Log
from .replay import Divergence, Report

WHAT = {"acceptance": "confidences", "token": "logit margins"}


def versions() -> dict[str, str]:
    """What this side runs with."""
    found = {"name": "transformers", "torch": torch.__version__, "transformers": transformers.__version__}
    return found | {"machine": platform.machine()}


def summary(report: Report) -> list[str]:
    lines = [f"requests equal: {report.requests_equal} of {report.requests}"]
    if report.comparisons:
        differences, steps = report.differences, len(report.comparisons)
        mean = sum(differences) / max(1, len(differences))
        worst = max(differences, default=0.0)
        lines += [
            f"steps equal: {report.steps_equal} of {steps} ({report.not_replayed} logged after an answer's end)",
            f"confidence difference: worst {worst:.2e}, mean {mean:.2e}, of {len(differences)}",
        ]
    else:
        lines.append("steps: none logged, only the texts are compared")
    for kind, figure, value, allowed in report.implausible:
        lines.append(f"algorithmic: {WHAT[kind]} differ by {value:.2e} ({figure}), but rounding explains {allowed:.2e}")
    return lines + [sentence(divergence) for divergence in report.divergences]


def sentence(d: Divergence) -> str:
    if d.kind in ("text", "finish"):
        return f"{d.verdict}: request {d.request}, position {d.position}: {d.ours} where {d.logged} is logged"
    where = f"request {d.request}, block {d.block}, step {d.step}, position {d.position}"
    return f"{d.verdict}: {where}: {d.kind} {d.ours} where {d.logged} is logged, decided by {d.margin:.2e}"


def write_report(path: Path, log: Log, report: Report, ours: dict) -> None:
    """Writes Markdown to `path` and, if the log has steps, a picture beside it, named alike but for `.png`.

    Args:
        ours: what this side ran with, by name: dtype, device, versions and so on.
    Raises:
        ValueError: `path` does not end in .md.
        ImportError: there are steps to draw and matplotlib is not installed; nothing is written.
    """
    check_report(path)
    theirs = {("algorithm" if name == "name" else name): value for name, value in log.header.algorithm.items()}
    theirs = log.header.engine | theirs | {"dtype": log.header.dtype} | log.header.backend
    lines = ["# Replay", "", "| | logged | replayed |", "|---|---|---|"]
    lines += [f"| {name} | {theirs.get(name, '')} | {ours.get(name, '')} |" for name in dict.fromkeys([*theirs, *ours])]
    lines += ["", *(f"- {line}" for line in summary(report))]
    if report.comparisons:
        draw(path.with_suffix(".png"), report)
        lines += ["", f"![drift by block, confidences, differences]({path.with_suffix('.png').name})"]
    path.write_text("\n".join(lines) + "\n")


def check_report(path: Path) -> None:
    if path.suffix != ".md" or not path.parent.is_dir():
        raise ValueError(f"--report is {path}, but must end in .md and lie in a folder that is there")


def draw(path: Path, report: Report) -> None:
    """Drift by the block's index in its request, logged confidences against ours, and a histogram of differences."""
    from matplotlib.figure import Figure

    by_block: dict[int, list[float]] = {}
    for comparison in report.comparisons:
        by_block.setdefault(comparison.block, []).extend(abs(a - b) for a, b in comparison.confidences)
    by_block = {block: found for block, found in sorted(by_block.items()) if found}
    pairs = [(pair, c.diverged) for c in report.comparisons for pair in c.confidences]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    blocks, scatter, histogram = figure.subplots(1, 3)
    floor = 1e-9  # zero on a logarithmic axis
    for name, of in (("worst", max), ("mean", lambda values: sum(values) / len(values))):
        blocks.plot(list(by_block), [of(values) + floor for values in by_block.values()], "o-", label=name)
    blocks.set(yscale="log", xlabel="block", ylabel="difference of confidences", xticks=list(by_block))
    blocks.legend()
    for diverged, color in ((False, "tab:blue"), (True, "tab:red")):
        points = [pair for pair, is_diverged in pairs if is_diverged == diverged]
        label = "diverging steps" if diverged else "equal steps"
        scatter.plot([a for a, _ in points], [b for _, b in points], ".", color=color, alpha=0.5, label=label)
    scatter.set(xlabel="logged confidence", ylabel="replayed confidence", xlim=(0, 1.02), ylim=(0, 1.02))
    scatter.legend()
    exponents = range(-9, 1)
    histogram.hist([d + floor for d in report.differences], bins=[10.0**e for e in exponents])
    histogram.set(xscale="log", xlabel="difference of confidences", ylabel="positions")
    figure.savefig(path, dpi=120)
