"""What a checkpoint can do on held-out exchanges, and how fast: exact match and tokens per forward (TPF).

    python -m clover.training.evaluate                       # 1,000 exchanges, by task, then over thresholds
    python -m clover.training.evaluate --markdown docs/results.md --picture docs/thresholds.png

Exact match: the answer after its thinking part equals the reference, character for character. TPF: tokens of all
answers, end tokens included, over all denoising and commit passes; the prefill is not counted. Held-out prompts are
kept out of training by a hash of the request (`corpus.split_of`).
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .corpus import heldout
from .judge import ONE_TOKEN_PER_PASS, Question, answered
from .tasks import TASKS, Exchange, is_correct

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"


@dataclass(frozen=True)
class Result:
    """Sums over exchanges answered at one threshold."""

    exchanges: int
    correct: int
    tokens: int
    denoising: int
    commits: int

    @property
    def exact_match(self) -> float:
        return self.correct / self.exchanges

    @property
    def tpf(self) -> float:
        return self.tokens / (self.denoising + self.commits)

    def __add__(self, other: "Result") -> "Result":
        return Result(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, exchanges: list[Exchange], threshold: float | None
) -> list[Result]:
    """Answers a batch of exchanges with `generate()`; one result each. Without a threshold: self-speculatively."""
    decoding = {"decoding": "self_speculative"} if threshold is None else {"threshold": threshold}
    questions = [Question(exchange.messages, exchange.tools, exchange.answer) for exchange in exchanges]
    return [
        Result(1, int(given.ended and is_correct(exchange, given.text)), given.tokens, given.denoising, given.commits)
        for exchange, given in zip(
            exchanges, answered(model, tokenizer, questions, **decoding, max_new_tokens=128), strict=True
        )
    ]


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    exchanges: list[Exchange],
    threshold: float | None,
    batch_size: int = 50,
) -> dict[str, Result]:
    """Results by task, and of all."""
    by_task = {task: Result(0, 0, 0, 0, 0) for task in TASKS}
    # Batches of similar prompts: rows wait for the slowest of their batch.
    ordered = sorted(exchanges, key=lambda exchange: exchange.task)
    for at in range(0, len(ordered), batch_size):
        batch = ordered[at : at + batch_size]
        for exchange, result in zip(batch, answer(model, tokenizer, batch, threshold), strict=True):
            by_task[exchange.task] += result
    by_task = {task: result for task, result in by_task.items() if result.exchanges}
    return by_task | {"all": sum(by_task.values(), Result(0, 0, 0, 0, 0))}


def task_table(sure: dict[str, Result], sequential: dict[str, Result]) -> str:
    """Exact match and TPF by task at one threshold, beside one-token-per-pass decoding."""
    lines = [
        "| task | exact match | TPF | tokens per answer | one token per pass: exact match | TPF |",
        "|---|" + "---|" * 5,
    ]
    for task, result in sure.items():
        one = sequential[task]
        lines.append(
            f"| {task} | {result.exact_match:.1%} | {result.tpf:.2f} | {result.tokens / result.exchanges:.1f} "
            f"| {one.exact_match:.1%} | {one.tpf:.2f} |"
        )
    return "\n".join(lines)


def threshold_table(curve: dict[float, Result]) -> str:
    """Exact match and TPF by threshold."""
    lines = ["| threshold | exact match | TPF | TPF without commits |", "|---|---|---|---|"]
    for threshold, result in curve.items():
        name = "one token per pass" if threshold == ONE_TOKEN_PER_PASS else f"{threshold:g}"
        lines.append(
            f"| {name} | {result.exact_match:.1%} | {result.tpf:.2f} | {result.tokens / result.denoising:.2f} |"
        )
    return "\n".join(lines)


def draw(curve: dict[float, Result], path: Path) -> None:
    """The curve over thresholds as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    points = [(result.tpf, 100 * result.exact_match) for result in curve.values()]
    axes.plot(*zip(*points, strict=True), marker="o", color="#2e7d32")
    for threshold, point in zip(curve, points, strict=True):
        name = "one token per pass" if threshold == ONE_TOKEN_PER_PASS else f"{threshold:g}"
        axes.annotate(name, point, textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.set_xlabel("tokens per forward, commit passes counted")
    axes.set_ylabel("exact match, %")
    axes.set_title("clover-tiny, held-out exchanges, by confidence threshold", fontsize=10)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(CHECKPOINT))
    parser.add_argument("--exchanges", type=int, default=1000)
    parser.add_argument("--thresholds", type=float, nargs="*", default=list(THRESHOLDS))
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    parser.add_argument("--picture", type=Path, help="draw the curve to this file")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=True)
    model = AutoModel.from_pretrained(arguments.model, trust_remote_code=True, dtype=torch.float32)
    exchanges = heldout(arguments.exchanges)
    results, began = {}, time.time()
    for threshold in [*dict.fromkeys([*arguments.thresholds, 0.95]), ONE_TOKEN_PER_PASS]:
        results[threshold] = evaluate(model, tokenizer, exchanges, threshold)
        print(json.dumps({"threshold": threshold} | asdict(results[threshold]["all"])), flush=True)
    drafted = evaluate(model, tokenizer, exchanges, None)["all"]
    curve = {threshold: results[threshold]["all"] for threshold in sorted(results)}
    text = (
        f"{len(exchanges)} held-out exchanges, fp32, threshold 0.95:\n\n"
        f"{task_table(results[0.95], results[ONE_TOKEN_PER_PASS])}\n\n{threshold_table(curve)}\n\n"
        f"Self-speculative decoding, which writes the autoregressive text: exact match {drafted.exact_match:.1%}, "
        f"TPF {drafted.tpf:.2f}, {drafted.tokens / drafted.commits:.2f} tokens a verifying pass.\n\n"
        f"transformers {transformers.__version__}, torch {torch.__version__}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, {time.time() - began:.0f} s\n"
    )
    print("\n" + text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if arguments.picture:
        draw(curve, arguments.picture)


if __name__ == "__main__":
    main()
