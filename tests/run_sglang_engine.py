"""Run by a python that has SGLang 0.5.23: answers requests with SGLang's engine on a CPU and writes a raw recording.

    python run_sglang_engine.py MODEL OUT MODE THRESHOLD      # MODE: fdfo or sync

`test_sglang_serves_clover.py` has the environment that it needs. The steps come from `parity/sglang_observer`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

RUNNING = 3  # requests at once


def prompt(length: int, shift: int) -> list[int]:
    return [1 + (7 * i + shift) % 140 for i in range(length)]


def requests() -> list[dict]:
    """Prompts shorter than a block, of whole blocks and of parts; budgets inside a block; an answer that may end."""
    wanted = [(3, 0, 13, True), (8, 1, 16, True), (10, 2, 24, True), (10, 2, 7, True), (21, 3, 40, False)]
    wanted += [(13, 4, 24, True), (16, 5, 32, False), (5, 6, 24, False)]
    return [
        {
            "input_ids": prompt(length, shift),
            "sampling_params": {"max_new_tokens": budget, "temperature": 0, "ignore_eos": ignore_eos},
        }
        for length, shift, budget, ignore_eos in wanted
    ]


def steps_at_the_mask_token_are_ours() -> bool:
    """Whether the plugin's step is Clover's where the mask token is the likeliest one; the engine need not run."""
    import torch
    from sglang.srt.dllm.config import DllmConfig

    from clover.generation_clover import LowConfidence
    from clover.parity.sglang_plugin.algorithm import CloverLowConfidence

    rows, size, vocabulary, mask, threshold = 3, 8, 20, 19, 0.3
    config = DllmConfig("CloverLowConfidence", {"threshold": threshold}, size, mask, rows)
    theirs, ours = CloverLowConfidence(config), LowConfidence(threshold, mask)
    generator, equal = torch.Generator().manual_seed(0), []
    for _ in range(50):
        logits = 2 * torch.randn(rows * size, vocabulary, generator=generator)
        logits[::3, mask] += 6
        block = torch.randint(mask, (rows, size), generator=generator)
        masked = torch.rand(rows, size, generator=generator) < 0.6
        masked[:, 0] = True
        block[masked] = mask
        batch = SimpleNamespace(batch_size=rows, input_ids=block.flatten().clone(), dllm_prompt_mask=None)
        CloverLowConfidence.step(theirs, batch, logits, [None] * rows)
        choice = ours(logits[masked.flatten()], masked)
        equal.append(torch.equal(batch.input_ids.view(rows, size), torch.where(choice.accepted, choice.tokens, block)))
    return all(equal)


def main(model: str, out: str, mode: str, threshold: str) -> None:
    import sglang
    import torch
    import transformers

    steps, config = out + ".steps", {"threshold": float(threshold)}
    os.environ["CLOVER_STEPS"] = steps
    Path(steps).unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(json.dumps(config))  # which is YAML too
        file.flush()
        arguments = {
            "device": "cpu",
            "attention_backend": "torch_native",
            "dllm_algorithm": "CloverLowConfidence",
            "dllm_fdfo": mode == "fdfo",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_total_tokens": 2048,
            "max_running_requests": RUNNING,
            "mem_fraction_static": 0.3,
            "random_seed": 0,
            "disable_radix_cache": True,
        }
        engine = sglang.Engine(
            model_path=model, dllm_algorithm_config=file.name, log_level="warning", watchdog_timeout=3600, **arguments
        )
        try:
            asked = requests()
            runs = [{"request": one, "response": engine.generate(**one)} for one in asked]
            batch = {name: [one[name] for one in asked] for name in asked[0]}
            runs.append({"request": asked, "response": engine.generate(**batch)})
            refused = None
            try:
                engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 4, "temperature": 0.7})
            except ValueError as error:
                refused = str(error)
        finally:
            engine.shutdown()
    block_size = json.loads((Path(model) / "config.json").read_text())["block_size"]
    algorithm = {"threshold": config["threshold"], "block_size": block_size}
    recording = {
        "sglang": sglang.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "engine_args": arguments,
        "algorithm_config": algorithm,
        "runs": runs,
        "steps": [json.loads(line) for line in Path(steps).read_text().splitlines()],
        "refused": refused,
        "steps_at_the_mask_token_are_ours": steps_at_the_mask_token_are_ours(),
    }
    Path(out).write_text(json.dumps(recording))


if __name__ == "__main__":
    main(*sys.argv[1:])
