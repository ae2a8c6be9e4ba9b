"""The objective replays generation; the trainer resumes, and shares its batches between processes."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

from clover.training import ablations, batches, tiny
from clover.training.evaluate import ONE_TOKEN_PER_PASS, Result, answer, draw, task_table, threshold_table
from clover.training.objective import Batch, block_diffusion_loss

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "clover-tiny"
SHORT = tiny.Recipe(steps=4, tokens=256)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


@pytest.fixture
def model(tokenizer):
    model = tiny.new_model(tiny.tiny_config(tokenizer), seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
            elif "bd_softmax" in name:
                parameter.add_(torch.rand_like(parameter))
    return model


def test_the_denoising_loss_is_that_of_the_generation_passes(model, tokenizer):
    batch = next(batches.batches(tokenizer, 32, seed=5, tokens=384))
    losses, weights = [], []
    for n in range(len(batch.rows)):
        for row, target, noisy, weight in zip(
            batch.rows[n], batch.targets[n], batch.noisy[n], batch.weights[n], strict=True
        ):
            clean = batch.clean[row, : n * 32][None]
            prefix = model.prefill(clean, torch.ones_like(clean))
            logits = model.denoise(prefix, noisy[None], (weight > 0)[None])
            chosen = target[weight > 0]
            losses.append(-logits.log_softmax(-1)[torch.arange(len(chosen)), chosen] * weight[weight > 0])
            weights.append(weight.sum())
    expected = torch.cat(losses).sum() / torch.stack(weights).sum()
    denoising, _ = block_diffusion_loss(model, batch)
    torch.testing.assert_close(denoising, expected, rtol=1e-4, atol=1e-4)


def test_the_causal_loss_is_that_of_one_causal_pass(model, tokenizer):
    batch = next(batches.batches(tokenizer, 32, seed=6, tokens=384))
    logits = model(batch.clean).logits[:, :-1].log_softmax(-1)
    picked = logits.gather(-1, batch.clean[:, 1:, None])[..., 0]
    _, causal = block_diffusion_loss(model, batch)
    torch.testing.assert_close(causal, -picked[batch.predict[:, 1:]].mean(), rtol=1e-4, atol=1e-4)


def test_gradients_reach_every_parameter_through_the_prefix_too(model, tokenizer):
    batch = next(batches.batches(tokenizer, 32, seed=7, tokens=384))
    denoising, _ = block_diffusion_loss(model, batch)
    denoising.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []
    clean = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:  # the clean stream's gradient alone is what detaching takes away
        patch.setattr("clover.training.objective.cache_rows", detached_rows)
        block_diffusion_loss(model, batch)[0].backward()
    name = "model.layers.0.linear_attn.in_proj_a.weight"
    assert (clean[name] - dict(model.named_parameters())[name].grad).abs().max() > 1e-7


def detached_rows(cache, rows):
    from clover.modeling_clover import select_rows

    with torch.no_grad():
        return select_rows(cache, rows)


def test_padding_and_other_documents_do_not_change_a_documents_loss(model, tokenizer):
    batch = next(batches.batches(tokenizer, 32, seed=8, tokens=256))
    rows = range(len(batch.clean))
    alone = [block_diffusion_loss(model, only_row(batch, row))[0] * row_weight(batch, row) for row in rows]
    together = block_diffusion_loss(model, batch)[0] * sum(row_weight(batch, row) for row in rows)
    torch.testing.assert_close(sum(alone), together, rtol=1e-4, atol=1e-4)
    garbage = Batch(**vars(batch))
    unseen = torch.ones_like(batch.clean, dtype=torch.bool)
    for row in rows:  # what lies after a document's last predicted token is padding
        unseen[row, : int(batch.predict[row].nonzero().max()) + 1] = False
    garbage.clean = torch.where(unseen, 5, batch.clean)
    torch.testing.assert_close(block_diffusion_loss(model, garbage), block_diffusion_loss(model, batch))


def row_weight(batch, row):
    return sum(w[r == row].sum() for r, w in zip(batch.rows, batch.weights, strict=True) if len(r))


def only_row(batch: Batch, row: int) -> Batch:
    here = [rows == row if len(rows) else rows.bool() for rows in batch.rows]
    pick = lambda parts: [part[h] for part, h in zip(parts, here, strict=True)]  # noqa: E731
    rows = [torch.zeros_like(part) for part in pick(batch.rows)]
    one = slice(row, row + 1)
    return Batch(
        batch.clean[one], batch.predict[one], rows, pick(batch.targets), pick(batch.noisy), pick(batch.weights)
    )


def test_a_noisy_block_keeps_the_prompts_tail_and_knows_nothing_after_the_answer():
    ids, mask = list(range(100, 150)), [False] * 20 + [True] * 10 + [False] * 20
    blocks = list(batches.answer_blocks(ids, mask, width=16, pad=0))
    assert blocks == [(1, [*range(116, 130), 0, 0], 4, 14)]
    chosen = batches.masked_positions(4, 16, ratio=0.5, rng=Random(0))
    assert len(chosen) == 6 and min(chosen) >= 4


def test_masking_ratios_are_spread_evenly():
    drawn = list(islice(batches.ratios(Random(0)), 800))
    assert [sum(i / 8 < ratio <= (i + 1) / 8 for ratio in drawn) for i in range(8)] == [100] * 8


def test_batches_repeat_with_their_seed_and_differ_with_another(tokenizer):
    first, again, other = (
        [batch.clean for batch in islice(batches.batches(tokenizer, 32, seed, 512), 3)] for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tokenizer, tmp_path, monkeypatch):
    whole = tiny.train(SHORT, tokenizer, tmp_path / "whole", save_every=2)
    steps, average = [], tiny.average_gradients

    def interrupted(*arguments):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        average(*arguments)

    monkeypatch.setattr(tiny, "average_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.train(SHORT, tokenizer, tmp_path / "parts", save_every=2)
    monkeypatch.setattr(tiny, "average_gradients", average)
    parts = tiny.train(SHORT, tokenizer, tmp_path / "parts", save_every=2)
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_two_processes_train_the_model_that_one_does(tokenizer, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    states = []
    for name, launcher in (
        ("one", [sys.executable]),
        ("two", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]),
    ):
        out = tmp_path / f"{name}-out"
        out.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (out / file).write_bytes((CHECKPOINT / file).read_bytes())
        options = ["--work", str(tmp_path / name), "--out", str(out), "--steps", "2", "--tokens", "256"]
        subprocess.run([*launcher, "-m", "clover.training.tiny", *options], env=environment, check=True)
        lines = [json.loads(line) for line in open(tmp_path / name / "log.jsonl")]
        assert [line["step"] for line in lines] == [1, 2]
        assert (out / "modeling_clover.py").is_symlink() and (out / "model.safetensors").exists()
        model = tiny.new_model(tiny.tiny_config(tokenizer), 0)
        tiny.load_state(tmp_path / name / "state.safetensors", model, tiny.optimizers(model, tiny.Recipe()))
        states.append(model)
    for (name, a), b in zip(states[0].named_parameters(), states[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=name)


def test_every_ablation_changes_what_it_names(tokenizer, tmp_path):
    recipe = tiny.Recipe(steps=1, tokens=256)
    losses = {name: ablations.run(name, recipe, tmp_path, documents=4) for name in ablations.VARIANTS}
    assert len({(values["0.5"], values["1"]) for values in losses.values()}) == len(losses)
    assert ablations.run("J", recipe, tmp_path) == losses["J"]  # a finished run is read back


def test_exact_match_needs_the_end_token_and_counts_every_pass(model, tokenizer):
    from clover.training.corpus import heldout

    exchanges = heldout(4, seed=3)
    results = answer(model.eval(), tokenizer, exchanges, ONE_TOKEN_PER_PASS)
    assert [result.correct for result in results] == [0] * 4  # random weights
    assert all(result.denoising >= result.tokens and result.tokens <= 128 for result in results)


def test_tables_and_picture_show_what_was_measured(tmp_path):
    good, all_of_it = Result(10, 9, 200, 40, 10), Result(10, 10, 200, 200, 10)
    assert (good.exact_match, good.tpf) == (0.9, 4.0)
    assert "| sort | 90.0% | 4.00 | 20.0 | 100.0% | 0.95 |" in task_table({"sort": good}, {"sort": all_of_it})
    table = threshold_table({0.95: good, ONE_TOKEN_PER_PASS: all_of_it})
    assert "| 0.95 | 90.0% | 4.00 | 5.00 |" in table and "| one token per pass | 100.0% |" in table
    draw({0.95: good, ONE_TOKEN_PER_PASS: all_of_it}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
