"""Records SGLang's own `LowConfidence`, an unmodified file of its wheel, driving a Clover through transformers.

The class chooses and fills in; around it stands what SGLang's scheduler does: blocks on a grid, the first one shared
with the prompt's tail, a causal pass over each finished block, stops looked for when a block is whole. So the log has
SGLang's decisions over this model's numbers, and no engine is needed: `pip install --no-deps sglang==0.5.23` brings
the files. What SGLang's kernels compute is another matter; see `docs/parity.md`.
"""

import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import transformers

from ..generation_clover import BlockModel
from .fingerprint import describe
from .log import Commit, Header, Log, Request, Step
from .replay import ends_of

# What SGLang's diffusion package imports for the names of types, and for a question about one brand of hardware.
NAMES = {
    "arg_groups.overrides": ("resolving_view",),
    "configs.model_config": ("ModelConfig",),
    "layers.logits_processor": ("LogitsProcessorOutput",),
    "model_executor.forward_batch_info": ("ForwardBatch",),
    "model_executor.model_runner": ("ModelRunner",),
    "server_args": ("ServerArgs",),
}


def low_confidence(threshold: float, block_size: int, mask_token_id: int) -> tuple[object, str]:
    """An instance of SGLang's class, and SGLang's version.

    The real files of `sglang.srt.dllm` are imported; the modules around them are replaced by names alone while that
    lasts, since importing SGLang whole takes a GPU's libraries.

    Raises:
        ModuleNotFoundError: no SGLang is installed.
    """
    try:
        version = importlib.metadata.version("sglang")
        root = Path(importlib.util.find_spec("sglang").origin).parent
    except (importlib.metadata.PackageNotFoundError, AttributeError):
        raise ModuleNotFoundError(
            "no SGLang is installed here: `pip install --no-deps sglang==0.5.23` brings the files that are needed"
        ) from None
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]
    logging.getLogger("sglang").setLevel(logging.ERROR)  # it warns of the algorithms beside, which need more
    try:
        _stand_in(root)
        algorithm = importlib.import_module("sglang.srt.dllm.algorithm.low_confidence").LowConfidence
        config = importlib.import_module("sglang.srt.dllm.config").DllmConfig
        return algorithm(config("LowConfidence", {"threshold": threshold}, block_size, mask_token_id, 1)), version
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


def _stand_in(root: Path) -> None:
    def module(name: str, folder: Path | None = None, **names: object) -> None:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(names)
        if folder:
            sys.modules[name].__path__ = [str(folder)]

    module("sglang", root)
    module("sglang.srt", root / "srt")
    module("sglang.srt.dllm", root / "srt" / "dllm")
    module("sglang.srt.utils", is_npu=lambda: False)
    for name, types in NAMES.items():
        if "." in name:
            module(f"sglang.srt.{name.split('.')[0]}", root / "none")
        module(f"sglang.srt.{name}", **dict.fromkeys(types, type("Named", (), {})))


@torch.no_grad()
def record(
    folder: Path,
    model: BlockModel,
    requests: list[dict],
    *,
    threshold: float,
    backend: dict,
    progress: Callable[[str], None] = lambda line: None,
) -> Log:
    """The log of SGLang's `LowConfidence` over a Clover.

    Args:
        folder: the checkpoint, for its fingerprint. model: the checkpoint, loaded.
        requests: `input_ids` and `sampling_params` each, see `prompts.py`; of the latter those in `FOLLOWED`.
        backend: what the model runs with, for the header.
    Raises:
        ValueError: a request that cannot be followed; or the mask token itself was chosen, with which SGLang's loop
            does not end.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "mask_token_id"):
        raise ValueError(f"{folder} holds no Clover, which is what this records")
    if not 0 <= threshold <= 1:
        raise ValueError(f"`threshold` is {threshold}, but must be in [0, 1]")
    for number, request in enumerate(requests):
        _check_sampling(number, request["sampling_params"])
    algorithm, version = low_confidence(threshold, config.block_size, config.mask_token_id)
    header = Header(
        engine={"name": "sglang's LowConfidence over transformers", "version": version}
        | {"torch": torch.__version__, "transformers": transformers.__version__},
        model=describe(folder) | {"mask_token_id": config.mask_token_id},
        algorithm={"name": "LowConfidence", "threshold": threshold, "block_size": config.block_size},
        dtype=str(model.dtype).removeprefix("torch."),
        backend=backend,
    )
    log = Log(header, [], [], [])
    for request in requests:
        _answer(log, model, algorithm, **request)
        last = log.requests[-1]
        progress(f"request {last.request}: {len(last.output)} tokens, {last.finish_reason}")
    return log


# What of a request's sampling parameters is around the class, and so is followed here. The class itself is greedy.
FOLLOWED = ("max_new_tokens", "temperature", "ignore_eos", "stop_token_ids")


def _check_sampling(number: int, sampling: dict) -> None:
    unknown = sorted(set(sampling) - set(FOLLOWED))
    if unknown:
        raise ValueError(f"request {number} has `{unknown[0]}`, but without an engine there are {', '.join(FOLLOWED)}")
    if sampling["temperature"] != 0:
        raise ValueError(f"request {number} has `temperature` {sampling['temperature']!r}, but the class is greedy: 0")


def _answer(log: Log, model: BlockModel, algorithm: object, input_ids: list[int], sampling_params: dict) -> None:
    """Adds one request, its steps and its commits."""
    size, mask, request = algorithm.block_size, algorithm.mask_id, len(log.requests)
    log.requests.append(Request(request, input_ids, sampling_params, [], ""))
    text, start = list(input_ids), len(input_ids) // size * size
    known = torch.tensor([input_ids[:start]], dtype=torch.long, device=model.device)
    prefix = model.prefill(known, torch.ones_like(known))
    while not log.requests[request].finish_reason:
        tail = text[start:]
        block = denoised(log, model, algorithm, prefix, tail + [mask] * (size - len(tail)), start)
        prefix = model.commit(prefix, torch.tensor([block], device=model.device))
        log.commits.append(Commit(request, start // size, start, block))
        text, start = text[:start] + block, start + size
        ends = ends_of(sampling_params, log.header.model["eos_token_ids"])
        output, reason = cut(text[len(input_ids) :], sampling_params["max_new_tokens"], ends)
        log.requests[request].output, log.requests[request].finish_reason = output, reason


def cut(output: list[int], max_new_tokens: int, eos: list[int]) -> tuple[list[int], str]:
    """What is shown of whole blocks, and why it ends there: "" if it does not."""
    ends = [i + 1 for i, token in enumerate(output) if token in eos]
    if ends and ends[0] <= max_new_tokens:
        return output[: ends[0]], "stop"
    return output[:max_new_tokens], "length" if len(output) >= max_new_tokens else ""


def denoised(log: Log, model: BlockModel, algorithm: object, prefix: object, block: list[int], start: int) -> list[int]:
    """The block that the class makes of one; adds its steps to the log."""
    size, prompt = algorithm.block_size, log.requests[-1].prompt
    protected = torch.tensor([[start + i < len(prompt) for i in range(size)]], device=model.device)
    batch = SimpleNamespace(
        batch_size=1, input_ids=torch.tensor(block, device=model.device), dllm_prompt_mask=protected
    )
    everywhere = torch.ones(1, size, dtype=torch.bool, device=model.device)

    def forward(batch: SimpleNamespace, pp_proxy_tensors: None = None) -> SimpleNamespace:
        logits = model.denoise(prefix, batch.input_ids[None], everywhere).float()  # (T, V), in fp32 as SGLang's are
        return SimpleNamespace(logits_output=SimpleNamespace(full_logits=logits), can_run_graph=False)

    def step(batch: SimpleNamespace, logits: torch.Tensor, states: list) -> list[bool]:
        before = batch.input_ids.tolist()
        done = type(algorithm).step(algorithm, batch, logits, states)
        masked = [token == algorithm.mask_id and not kept for token, kept in zip(before, protected[0], strict=True)]
        if any(masked):
            log.steps.append(_step(log, start, before, batch.input_ids.tolist(), masked, logits))
        return done

    algorithm.step = step  # observes, and calls the class's own
    algorithm.run(SimpleNamespace(forward=forward), batch)
    resolved = batch.input_ids.tolist()
    if any(token == algorithm.mask_id and not kept for token, kept in zip(resolved, protected[0], strict=True)):
        raise ValueError(
            f"request {len(log.requests) - 1}: the mask token was chosen, with which SGLang goes on for ever"
        )
    return resolved


def _step(log: Log, start: int, before: list[int], after: list[int], masked: list[bool], logits: torch.Tensor) -> Step:
    size, request = len(before), len(log.requests) - 1
    top = logits.topk(2, dim=-1)
    values = (
        top.indices[:, 0].tolist(),
        torch.nn.functional.softmax(logits, dim=-1).max(-1).values.tolist(),
        (top.values[:, 0] - top.values[:, 1]).tolist(),
    )
    hidden = [[v if m else None for v, m in zip(column, masked, strict=True)] for column in values]
    number = sum(s.request == request and s.start == start for s in log.steps)
    return Step(request, start // size, number, start, before, after, *hidden)
