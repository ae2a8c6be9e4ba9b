"""transformers' Trainer over the block-diffusion objective: what it adds is masks that differ by epoch, parts of the
loss in the log, the loss by masking ratio, and evaluation by generation.

Losses are divided by the labels of a whole step, over accumulation steps and processes, and what is masked follows
from the rows. So a step is the same step however it is divided up, and a resumed run is the run that was interrupted.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, Trainer

from .conversion_target import keep_record
from .lora import load_added, save_added
from .plots import RATIOS

BINS = 10  # of masking ratios
EPOCH = 1_000_003  # seeds of different epochs are this far apart


class CloverTrainer(Trainer):
    """Trains a Clover, or a PEFT model around one, on rows as `data.build_rows` makes them.

    Args:
        judge: given the model, what it can do by generation, by name; called at each evaluation, on every process.
        The others are transformers'.
    """

    def __init__(self, *args, judge: Callable[[nn.Module], dict[str, float]] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.judge = judge
        self.origin: Path | None = None  # the folder that the model came from
        self._loss_shifts_labels = False  # a label at position 0 counts: it is denoised
        self._sums: dict[str, torch.Tensor] = {}

    # ---- a step ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training:
            epoch = int(self.state.epoch or 0)
            inputs = inputs | {"noise_seeds": inputs["noise_seeds"] + EPOCH * epoch}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            self._add(outputs)
        return (loss, outputs) if return_outputs else loss

    def _add(self, outputs) -> None:
        """Adds a micro-batch's parts to the sums since the last log; no number is read from the device here."""
        bins = (outputs.ratios * BINS).ceil().long().clamp(1, BINS) - 1
        one = torch.ones_like(outputs.block_losses)
        zeros = one.new_zeros(BINS)
        found = {"loss_by_ratio": torch.stack([zeros.index_add(0, bins, x) for x in (outputs.block_losses, one)])}
        for name in ("denoising_loss", "causal_loss", "aux_loss"):
            if outputs.get(name) is not None:
                found[name] = torch.stack([outputs[name].float(), one.new_ones(())])
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs and self._sums:
            sums = {name: self.accelerator.reduce(value) for name, value in self._sums.items()}
            total, count = sums.pop("loss_by_ratio").tolist()
            logs |= {name: (value[0] / value[1]).item() for name, value in sums.items()}
            self._sums = {}
            if self.is_world_process_zero():
                means = [a / n if n else None for a, n in zip(total, count, strict=True)]
                with open(Path(self.args.output_dir) / RATIOS, "a") as file:
                    file.write(json.dumps({"step": self.state.global_step, "loss": means}) + "\n")
        super().log(logs, *args, **kwargs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices alone: the added calibrations, norms and decays of the Gated DeltaNet are vectors."""
        large = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
        return [name for name in super().get_decay_parameter_names(model) if name in large]

    # ---- evaluation ----

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        has_rows = len(self.eval_dataset if eval_dataset is None else eval_dataset) > 0
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix) if has_rows else {}
        if self.judge is not None:
            model = self.accelerator.unwrap_model(self.model)
            was_training, _ = model.training, model.eval()
            found = {f"{metric_key_prefix}_{name}": value for name, value in self.judge(model).items()}
            model.train(was_training)
            self.log(found)
            metrics |= found
        if not has_rows:  # what transformers' evaluation ends with
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # ---- checkpoints: what LoRA trains beside its adapters ----

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        save_added(self.accelerator.unwrap_model(self.model), folder)
        if self.origin is not None:
            keep_record(self.origin, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        model = model or self.model
        if self.is_fsdp_enabled or isinstance(model, PeftModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            load_added(model, Path(resume_from_checkpoint))
        else:
            load_weights(model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or isinstance(self.model, PeftModel):
            super()._load_best_model()
            load_added(self.model, Path(self.state.best_model_checkpoint))
        else:
            load_weights(self.model, Path(self.state.best_model_checkpoint))


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Loads a saved model's weights into one of the same config.

    As `from_pretrained` does, which knows that a file may have each expert by itself. The Trainer's own way leaves the
    experts as they are then, with a warning.
    """
    saved = type(model).from_pretrained(folder, dtype=model.dtype)
    for parameter, value in zip(model.parameters(), saved.parameters(), strict=True):
        parameter.copy_(value)
