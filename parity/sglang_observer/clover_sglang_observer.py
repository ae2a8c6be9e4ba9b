"""An SGLang plugin that writes each step of `LowConfidence` as a JSON line to a file, and changes nothing.

    pip install --no-deps parity/sglang_observer            # in the environment of the server
    CLOVER_STEPS=/tmp/steps.jsonl python -m sglang.launch_server ...
    python -m clover.parity record ... --steps /tmp/steps.jsonl

Without `CLOVER_STEPS` it does nothing. Subclasses are observed too, whatever their `step` does; one that never fills
in the mask token says so by an attribute `excludes_mask_token = True`, or the log has it as a position's choice.
"""

import json
import logging
import os

ALGORITHM = "sglang.srt.dllm.algorithm.low_confidence.LowConfidence"
logger = logging.getLogger(__name__)


def activate() -> None:
    """The entry point: SGLang calls it in each of its processes, the spawned schedulers too."""
    if not os.environ.get("CLOVER_STEPS"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{ALGORITHM}.__init__", observe, HookType.AFTER)


def observe(result, algorithm, *arguments, **options) -> None:
    """Puts an observer around the `step` of one algorithm: of the object, so that it is the outermost one."""
    step = algorithm.step

    def observed(forward_batch, full_logits, states):
        before = rows(forward_batch.input_ids, algorithm)
        seen = choices(full_logits, algorithm)
        done = step(forward_batch, full_logits, states)
        write(described(algorithm, forward_batch) | {"block_in": before} | seen)
        return done

    algorithm.step = observed


def rows(values, algorithm) -> list[list[int]]:
    return values.view(-1, algorithm.block_size).tolist()


def choices(full_logits, algorithm) -> dict[str, list]:
    """For each position the likeliest token, its probability, and how far its logit is above the second one's.

    Token and probability are computed as `LowConfidence` does, so that they are the very numbers it decides by.
    """
    import torch

    logits = full_logits.view(-1, algorithm.block_size, full_logits.shape[-1])
    probabilities = torch.nn.functional.softmax(logits, dim=-1)
    if getattr(algorithm, "excludes_mask_token", False):
        mask = torch.tensor([algorithm.mask_id], device=logits.device)
        logits = logits.index_fill(-1, mask, float("-inf"))  # its probability stays in what the others' are shares of
    tokens = torch.argmax(logits, dim=-1)
    confidences = torch.gather(probabilities, dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
    first, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    return {
        "argmax": tokens.tolist(),
        "confidence": confidences.float().tolist(),
        "argmax_margin": (first - second).tolist(),
    }


def described(algorithm, forward_batch) -> dict:
    """What is known of a step beside the choices; the blocks as the step left them."""
    return {
        "event": "step",
        "algorithm": type(algorithm).__name__,
        "threshold": algorithm.threshold,
        "block_size": algorithm.block_size,
        "mask_id": algorithm.mask_id,
        "rank": rank(),
        "rids": list(forward_batch.rids),
        "positions": rows(forward_batch.positions, algorithm),
        "block_out": rows(forward_batch.input_ids, algorithm),
    }


def rank() -> int:
    """Each tensor-parallel rank takes every step and writes it: the reader keeps one of them."""
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def write(event: dict) -> None:
    """Appends a line in one write, which no other process's can fall into."""
    line = (json.dumps(event) + "\n").encode()
    try:
        file = os.open(os.environ["CLOVER_STEPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)
    except OSError:  # the server goes on; the recorder finds that the step is missing
        logger.exception("a step could not be written")
