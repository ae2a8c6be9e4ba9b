"""Trains `checkpoints/clover-tiny` from scratch: one command, one seed, resumed where it stopped.

    python -m clover.training.tiny --work runs/tiny --out checkpoints/clover-tiny
    torchrun --nproc_per_node 2 -m clover.training.tiny ...     # the same batches and steps, on two processes

Every step takes two micro-batches, one after the other or one per process, so both commands train the same model.
`--work` keeps the state of training (safetensors), `--out` gets the finished checkpoint beside its tokenizer.
"""

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..configuration_clover import CloverConfig
from ..generation_clover import CloverGenerationConfig
from ..modeling_clover import CloverForDiffusionLM, CloverGatedDeltaNet
from ..objective_clover import IGNORED, Objective
from .batches import batches
from .convert import AUTO_MAP

MICRO_BATCHES = 2
EMBEDDING_STD = 0.09


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults are those of the embedded checkpoint; ablations change one at a time."""

    steps: int = 4000
    seed: int = 0
    tokens: int = 2048  # clean positions of a micro-batch
    learning_rate: float = 5e-3  # of matrices, by Muon with AdamW's update size
    adamw_rate: float = 3e-3  # of embeddings, head, convolutions and vectors
    weight_decay: float = 0.01
    warmup: int = 200  # steps
    decay: float = 0.6  # share of the steps over which the rate falls linearly to zero
    bf16: bool = True  # autocast of the passes; weights, gradients and optimiser states stay fp32
    objective: Objective = Objective()
    autoregressive: bool = False  # the causal loss alone
    base: Path | None = None  # a checkpoint to go on from; none is from scratch


def tiny_config(tokenizer: PreTrainedTokenizerBase) -> CloverConfig:
    """Every kind of layer of the 35B, at a ten-thousandth of its size."""
    return CloverConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=6,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "mrope_section": [6, 5, 5],
        },
        tie_word_embeddings=True,
        block_size=32,
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def new_model(config: CloverConfig, seed: int) -> CloverForDiffusionLM:
    """A freshly initialised model, with two starts that differ from transformers' own.

    Embeddings are wider: at transformers' 0.02 what is common to all names drowns what tells one from another, and
    copying from the request is learnt late. Decays go from long memory to short, as in flash-linear-attention:
    transformers' dt_bias of 1 forgets within a token or two.
    """
    torch.manual_seed(seed)
    model = CloverForDiffusionLM(config)
    nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    for module in model.modules():
        if isinstance(module, CloverGatedDeltaNet):
            dt = torch.exp(torch.empty(module.num_v_heads).uniform_(math.log(1e-3), math.log(1e-1)))
            module.dt_bias.data = dt + torch.log(-torch.expm1(-dt))  # softplus's inverse
            module.A_log.data = torch.empty(module.num_v_heads).uniform_(1, 16).log()
    return model.train()


class StackedMuon(torch.optim.Muon):
    """Muon, which takes matrices, over stacks of them too: the experts' (E, out, in), one view for each expert."""

    def __init__(self, matrices: list[nn.Parameter], stacks: list[nn.Parameter], **options):
        self.views = [(stack, i, nn.Parameter(stack.data[i])) for stack in stacks for i in range(len(stack))]
        super().__init__(matrices + [view for _, _, view in self.views], **options)

    def step(self, closure=None):
        for stack, i, view in self.views:
            view.grad = stack.grad[i]
        super().step(closure)


def optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for embeddings, head, convolutions and vectors; vectors are not decayed."""
    matrices, stacks, others, vectors = [], [], [], []
    for name, parameter in model.named_parameters():
        if "embed" in name or "lm_head" in name or "conv" in name:
            others.append(parameter)
        else:
            {1: vectors, 2: matrices, 3: stacks}[parameter.ndim].append(parameter)
    groups = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
    muon = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    adamw = {"lr": recipe.adamw_rate, "weight_decay": recipe.weight_decay, "betas": (0.9, 0.95)}
    return [StackedMuon(matrices, stacks, **muon), torch.optim.AdamW(groups, **adamw)]


def rate(step: int, recipe: Recipe) -> float:
    """The factor on the learning rates: linear warm-up, flat, linear decay to zero."""
    return min(1.0, (step + 1) / recipe.warmup, (1 - step / recipe.steps) / recipe.decay)


def save_state(path: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer], step: int) -> None:
    """Weights, optimiser states and step, in one safetensors file that replaces the last one at once."""
    tensors = {f"model.{name}": tensor.data for name, tensor in model.named_parameters()}
    for i, optimiser in enumerate(optimisers):
        for j, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{j}.{name}": torch.as_tensor(value) for name, value in state.items()}
    save_file(tensors, path.with_suffix(".new"), metadata={"step": str(step)})
    os.replace(path.with_suffix(".new"), path)


def load_state(path: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer]) -> int:
    """Puts a saved state back and returns the number of steps done."""
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        step = int(file.metadata()["step"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for i, optimiser in enumerate(optimisers):
        state = {}
        for key, tensor in tensors.items():
            if key.startswith(f"optimiser.{i}."):
                _, _, j, name = key.split(".")
                state.setdefault(int(j), {})[name] = tensor
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return step


def sum_gradients(model: nn.Module) -> None:
    """Gradients summed over processes."""
    if not dist.is_initialized():
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def loss_of(
    model: CloverForDiffusionLM, batch: dict[str, torch.Tensor], labels: torch.Tensor, autoregressive: bool
) -> tuple[torch.Tensor, float, float]:
    """What to minimise of a batch, and its denoising and causal losses; `labels` are those of the whole step."""
    if autoregressive:
        inputs = {name: value for name, value in batch.items() if name not in ("noise_seeds", "attention_mask")}
        # Padding is on the right, where a causal pass does not see it.
        loss = model(**inputs, is_causal=True, use_cache=False, num_items_in_batch=labels).loss
        return loss, 0.0, loss.item() * float(labels / (batch["labels"] != IGNORED).sum())
    out = model(**batch, num_items_in_batch=labels)
    return out.loss, out.denoising_loss.item(), out.causal_loss.item()


def labels_of(step: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The labels in a step's micro-batches, those of other processes too."""
    count = sum((batch["labels"] != IGNORED).sum() for batch in step)
    if dist.is_initialized():
        dist.all_reduce(count)
    return count


def train(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, work: Path, save_every: int = 200
) -> CloverForDiffusionLM:
    """Trains, or goes on from the state in `work`; a line of losses a step goes to `work`/log.jsonl."""
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if MICRO_BATCHES % processes:
        raise ValueError(f"{processes} processes cannot share {MICRO_BATCHES} micro-batches evenly.")
    work.mkdir(parents=True, exist_ok=True)
    model = new_model(tiny_config(tokenizer), recipe.seed)
    if recipe.base is not None:
        model = CloverForDiffusionLM.from_pretrained(recipe.base, dtype=torch.float32).train()
    model.objective = recipe.objective
    optimisers = optimizers(model, recipe)
    state = work / "state.safetensors"
    done = load_state(state, model, optimisers) if state.exists() else 0
    # One stream of batches per micro-batch of the step, dealt to the processes; replayed up to where we stopped.
    streams = [
        batches(tokenizer, model.config.block_size, recipe.seed * 1000 + i, recipe.tokens)
        for i in range(rank, MICRO_BATCHES, processes)
    ]
    for _ in range(done):
        for stream in streams:
            next(stream)
    for step in range(done, recipe.steps):
        began, losses = time.time(), []
        micro_batches = [next(stream) for stream in streams]
        labels = labels_of(micro_batches)
        for batch in micro_batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
                loss, *parts = loss_of(model, batch, labels, recipe.autoregressive)
            loss.backward()
            losses.append(parts)
        sum_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * rate(step, recipe)
            optimiser.step()
        model.zero_grad()
        if rank == 0:
            denoising, causal = (round(sum(part) / len(part), 4) for part in zip(*losses, strict=True))
            line = {"step": step + 1, "denoising": denoising, "causal": causal}
            line |= {"norm": round(norm.item(), 3), "seconds": round(time.time() - began, 2)}
            with open(work / "log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
            if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
                save_state(state, model, optimisers, step + 1)
    return model.eval()


def save_checkpoint(model: CloverForDiffusionLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The finished model in bf16, as a Hub repository whose code is linked, not copied."""
    model.config.auto_map = AUTO_MAP
    model.generation_config = CloverGenerationConfig(
        block_size=model.config.block_size,
        threshold=0.95,
        decoding="low_confidence",
        do_sample=False,
        think_start_token_id=tokenizer.convert_tokens_to_ids("<think>"),
        think_end_token_id=tokenizer.convert_tokens_to_ids("</think>"),
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    links = [folder / path.name for path in Path(__file__).parents[1].glob("*_clover.py")]
    for link in links:
        link.unlink(missing_ok=True)  # saving copies the code; it must not write through an old link
    for name, parameter in model.named_parameters():
        if "bd_softmax" not in name:  # these stay in fp32
            parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(folder)
    for link in links:
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(Path(__file__).parents[1] / link.name, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the state of training and its log")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's folder; its tokenizer must be there")
    for name in ("steps", "seed", "tokens", "learning_rate", "adamw_rate"):
        default = getattr(Recipe, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--base", type=Path, help="a checkpoint to go on from, as `convert` makes one")
    parser.add_argument("--autoregressive", action="store_true", help="the causal loss alone")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun: one thread each, or two processes fight for two cores
        dist.init_process_group("gloo")
        torch.set_num_threads(max(1, os.cpu_count() // dist.get_world_size()))
    names = ("steps", "seed", "tokens", "learning_rate", "adamw_rate", "base", "autoregressive")
    recipe = Recipe(**{name: getattr(arguments, name) for name in names})
    tokenizer = AutoTokenizer.from_pretrained(arguments.out)
    model = train(recipe, tokenizer, arguments.work)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_checkpoint(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
