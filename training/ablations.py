"""What settled the mixer, the masking and the weighting: short trainings that differ in one thing, two seeds each.

    python -m clover.training.ablations --work runs/ablations [--only A J ...]     # prints the table of held-out losses

The forms that lost live here and nowhere else; each is patched in for the length of its own training. Every run sees
the same documents in the same order, and the same masks unless masking is what it varies.
"""

import argparse
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest import mock

import torch
from transformers import AutoTokenizer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

from .. import modeling_clover
from ..modeling_clover import CloverForDiffusionLM
from ..objective_clover import Objective
from . import batches as batching
from . import tiny
from .corpus import Document, Encoder, heldout

RATIOS = (0.1, 0.5, 0.9, 1.0)
TOKENIZER = Path(__file__).parents[1] / "checkpoints" / "clover-tiny"


def plain_softmax(query, key, value, g, log_beta, state, logit_scale, history_bias, history_c):
    """A: neither decay nor write gate in the logits; the form nearest to the public words."""
    query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
    length, dim = query.shape[-2:]
    block = logit_scale[:, None, None] * (query @ key.mT)
    history = (history_bias + history_c * math.log(length))[:, None, None].expand(*block.shape[:-1], 1)
    weights = torch.cat([history, block], dim=-1).softmax(-1)
    return ((weights[..., :1] * (query @ state.float()) + weights[..., 1:] @ value) * dim**-0.5).transpose(1, 2)


def causal_recurrence(query, key, value, g, log_beta, state, *added):
    """D: the causal kernel inside the block; only the attention layers look both ways."""
    out, _ = torch_chunk_gated_delta_rule(
        query, key, value, g=g, beta=log_beta.exp(), initial_state=state, chunk_size=query.shape[1]
    )
    return out


def delta_softmax(query, key, value, g, log_beta, state, logit_scale, history_bias, history_c):
    """G: history read in full, plus a softmax over what each position would write to it."""
    query, key, value, state = (x.float() for x in (*(y.transpose(1, 2) for y in (query, key, value)), state))
    beta, dim, length = log_beta.exp().transpose(1, 2)[..., None], query.shape[-1], query.shape[-2]
    block = logit_scale[:, None, None] * (query @ key.mT)
    history = (history_bias + history_c * math.log(length))[:, None, None].expand(*block.shape[:-1], 1)
    weights = torch.cat([history, block], dim=-1).softmax(-1)[..., 1:]
    return ((query @ state + weights @ (beta * (value - key @ state))) * dim**-0.5).transpose(1, 2)


def freeze_right_taps(model: torch.nn.Module) -> None:
    """D has no right convolution either: its taps stay zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("conv_right_weight"):
            parameter.register_hook(torch.zeros_like)


MIXER = (modeling_clover, "block_softmax_mixer")
VARIANTS: dict[str, list[tuple[tuple[object, str], object]]] = {
    "J": [],
    "A": [(MIXER, plain_softmax)],
    "D": [(MIXER, causal_recurrence)],
    "G": [(MIXER, delta_softmax)],
    "J, complementary masks": [],
    "J, weights 1/ratio": [],
}
SINGLE = Objective(complementary=False)
OBJECTIVES = {"J, complementary masks": Objective(), "J, weights 1/ratio": replace(SINGLE, weighting="inverse_ratio")}


def heldout_losses(model: CloverForDiffusionLM, tokenizer, documents: int = 256) -> dict[str, float]:
    """Cross entropy of held-out answers, by masking ratio and causally, on fixed documents and masks."""
    groups = defaultdict(list)
    for ids, learnt in Encoder(tokenizer)([Document((exchange,)) for exchange in heldout(documents, seed=1)]):
        groups[-(-len(ids) // model.config.block_size)].append((ids, learnt))
    size, pad = model.config.block_size, tokenizer.pad_token_id
    batches = [batching.collate(group, size, pad, Random(0)) for group in groups.values()]
    losses, trained, model.objective = {}, model.objective, SINGLE
    for ratio in RATIOS:
        total = causal_total = 0.0
        for batch in batches:
            with torch.no_grad():
                out = model(**batch, masking_ratio=ratio)
            share = len(batch["labels"]) / documents
            total += out.denoising_loss.item() * share
            causal_total += out.causal_loss.item() * share
        losses[f"{ratio:g}"], losses["causal"] = round(total, 4), round(causal_total, 4)
    model.objective = trained
    return losses


def run(name: str, recipe: tiny.Recipe, work: Path, documents: int = 256) -> dict[str, float]:
    """Trains one variant and returns its held-out losses; a finished run is read back instead."""
    folder = work / f"{name.replace('/', ' over ')} {recipe.seed}"
    result = folder / "losses.json"
    if not result.exists():
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        recipe = replace(recipe, objective=OBJECTIVES.get(name, SINGLE))
        build = tiny.new_model

        def new_model(config, seed):
            model = build(config, seed)
            if name == "D":
                freeze_right_taps(model)
            return model

        patches = [mock.patch.object(*place, value) for place, value in VARIANTS[name]]
        patches.append(mock.patch.object(tiny, "new_model", new_model))
        for patch in patches:
            patch.start()
        try:
            losses = heldout_losses(tiny.train(recipe, tokenizer, folder), tokenizer, documents)
        finally:
            for patch in patches:
                patch.stop()
        seconds = [json.loads(line)["seconds"] for line in open(folder / "log.jsonl")]
        result.write_text(json.dumps(losses | {"minutes": round(sum(seconds) / 60, 1)}))
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    arguments = parser.parse_args()
    results = {}
    for seed in arguments.seeds:
        for name in arguments.only:
            recipe = tiny.Recipe(steps=arguments.steps, warmup=arguments.steps // 10, seed=seed)
            results[name, seed] = run(name, recipe, arguments.work)
    columns = [f"{ratio:g}" for ratio in RATIOS] + ["causal", "minutes"]
    print("| variant | seed | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 2))
    for (name, seed), losses in results.items():
        print(f"| {name} | {seed} | " + " | ".join(f"{losses[column]:.3f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
