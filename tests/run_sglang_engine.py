"""Run by a python that has SGLang 0.5.23, on a CPU, with the plugin that serves a Clover.

    python run_sglang_engine.py record MODEL OUT MODE THRESHOLD  # the engine's answers and steps; MODE: fdfo or sync
    python run_sglang_engine.py refuse CASES OUT                 # what is said to each of many cases, without an engine

`test_sglang_serves_clover.py` has the environment that it needs. The steps come from `parity/sglang_observer`.
"""

import copy
import json
import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def record(model: str, out: str, mode: str, threshold: str) -> None:
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


# ---- refusals --------------------------------------------------------------------------------------------------------

Check = Callable[[dict], str | None]


def refuse(cases: str, out: str) -> None:
    """Writes what is said to each case, by kind and name; null where nothing is refused."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # by their entry points, as each of SGLang's processes does
    asked = json.loads(Path(cases).read_text())
    said = {}
    for kind, checking in (("requests", requests_of), ("servers", servers_of), ("checkpoints", checkpoints_of)):
        check = checking(asked["models"])
        said[kind] = {name: said_to(check, case) for name, case in asked[kind].items()}
    Path(out).write_text(json.dumps(said))


def said_to(check: Check, case: dict) -> str | None:
    try:
        return check(case)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    except Exception as error:  # no refusal: an accident
        return f"{type(error).__name__}: {error}"


def settled(model: str, arguments: Sequence[str] = ()) -> Any:
    """The arguments of a server's command, as its launcher settles them before it starts anything."""
    from sglang.srt.server_args import prepare_server_args

    command = ["--model-path", model, "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    command += ["--skip-tokenizer-init", "--dllm-algorithm", "CloverLowConfidence", "--log-level", "error", *arguments]
    server_args = prepare_server_args(command)
    server_args.resolve_once()
    return server_args


def servers_of(models: dict[str, str]) -> Check:
    """Cases: a `model`, `arguments` of the command, `settings` in its algorithm's file."""

    def check(case: dict) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(case.get("settings", ""))
            file.flush()
            arguments = ["--dllm-algorithm-config", file.name] if "settings" in case else []
            settled(models[case.get("model", "attention")], [*arguments, *case.get("arguments", [])])

    return check


def requests_of(models: dict[str, str]) -> Check:
    """Cases: `input_ids`, `sampling_params`, and whatever else a request of SGLang's scheduler has."""
    from sglang.srt.dllm.config import DllmConfig
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    config = DllmConfig.from_server_args(settled(models["attention"]))
    vocabulary = json.loads((Path(models["attention"]) / "config.json").read_text())["vocab_size"]

    def check(case: dict) -> str | None:
        case = {"input_ids": [1, 2, 3], "sampling_params": {}} | case
        ids, sampling = array("q", case.pop("input_ids")), {"temperature": 0} | case.pop("sampling_params")
        request = Req("a", "", ids, SamplingParams(**sampling), dllm_config=config, vocab_size=vocabulary, **case)
        return config.validate_request(request)

    return check


def checkpoints_of(models: dict[str, str]) -> Check:
    """Cases: a tensor `without` which, or `shapes` of tensors with which it is loaded; experts `split`; a `config`."""
    import torch
    from safetensors.torch import load_file

    model, tensors = loaded(models["hybrid"]), load_file(Path(models["hybrid"]) / "model.safetensors")
    parameters = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def check(case: dict) -> str | None:
        config = copy.deepcopy(model.config)
        for name, value in case.get("config", {}).items():
            setattr(config, name, value)
        if "config" in case:
            type(model)(config)
        given = {name: tensor for name, tensor in tensors.items() if name != case.get("without")}
        given |= {name: torch.zeros(shape) for name, shape in case.get("shapes", {}).items()}
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_weights((split(given) if case.get("split") else given).items())
        same = all(torch.equal(parameter, parameters[name]) for name, parameter in model.named_parameters())
        return None if same else "loaded as another model"

    return check


def split(tensors: dict) -> dict:
    """One tensor per expert, as `save_pretrained` writes them."""
    result = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith("experts"):
            result[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            parts = expert.chunk(2) if last == "gate_up_proj" else [expert]
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            result |= {f"{stem}.{i}.{part}.weight": half for part, half in zip(names, parts, strict=True)}
    return result


def loaded(folder: str) -> Any:
    """The model as SGLang's loader makes it, in this process."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs

    server_args, load_config = settled(folder, ["--disable-radix-cache"]), LoadConfig()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    port = PortArgs.init_new(server_args).nccl_port
    bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=port)
    config = adjust_config_with_unaligned_cpu_tp(ModelConfig.from_server_args(server_args), load_config, tp_size=1)
    bootstrap.init_layer_runtime(model_config=config)
    return get_model(model_config=config, load_config=load_config, device_config=DeviceConfig("cpu"))


if __name__ == "__main__":
    {"record": record, "refuse": refuse}[sys.argv[1]](*sys.argv[2:])
