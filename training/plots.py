"""A picture of a training: losses by step, and cross entropy by masking ratio, first against last."""

import json
from pathlib import Path

from transformers import TrainerCallback

RATIOS = "loss_by_ratio.jsonl"
PARTS = ("loss", "denoising_loss", "causal_loss", "eval_loss")


class Plots(TrainerCallback):
    """Draws `training.png` in the output folder, at each evaluation and at the end."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """What is logged of ratios up to here is kept, and what an interrupted run had after it is not."""
        path = Path(args.output_dir) / RATIOS
        if state.is_world_process_zero and path.exists():
            kept = [entry for entry in read_ratios(path.parent) if entry["step"] <= state.global_step]
            path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self.draw(args, state)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.draw(args, state)

    def draw(self, args, state) -> None:
        has_losses = any(name in entry for entry in state.log_history for name in PARTS)
        if state.is_world_process_zero and has_losses:
            draw(state.log_history, read_ratios(Path(args.output_dir)), Path(args.output_dir) / "training.png")


def read_ratios(folder: Path) -> list[dict]:
    """What the trainer logged of masking ratios: a step, and a mean cross entropy, or null, by tenth of the ratio."""
    path = folder / RATIOS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw(history: list[dict], ratios: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    losses, by_ratio = figure.subplots(1, 2)
    for name in PARTS:
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        if points:
            losses.plot(*zip(*points, strict=True), label=name)
    losses.set(xlabel="step", ylabel="loss")
    losses.legend()
    fifth = max(1, len(ratios) // 5)
    for name, part in (("first fifth", ratios[:fifth]), ("last fifth", ratios[-fifth:])):
        columns = [[v for v in column if v is not None] for column in zip(*(e["loss"] for e in part), strict=True)]
        shown = [((i + 0.5) / len(columns), sum(c) / len(c)) for i, c in enumerate(columns) if c]
        if shown:
            by_ratio.plot(*zip(*shown, strict=True), "o-", label=name)
    by_ratio.set(xlabel="masking ratio", ylabel="cross entropy of a masked token", xlim=(0, 1))
    if ratios:
        by_ratio.legend()
    figure.savefig(path, dpi=120)
