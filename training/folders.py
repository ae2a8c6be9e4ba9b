"""Folders of models, before anything is done with them: is it a Clover, may a run write there, where does it go on."""

import json
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.trainer_utils import get_last_checkpoint

from ..configuration_clover import CloverConfig

ADAPTER = "adapter_config.json"  # PEFT's


def config_of(name: str | Path) -> PreTrainedConfig:
    """The config of a Clover, a folder's or one of the Hub.

    Raises:
        ValueError: it is no Clover, or an adapter of one; or there is none of that name.
    """
    folder = Path(name)
    if (folder / ADAPTER).is_file():
        raise ValueError(f"{name} holds a LoRA adapter, not a model: `python -m clover.training merge` makes one of it")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=True)
    except (OSError, ValueError) as error:
        if folder.exists():
            raise ValueError(f"{name} holds no model: {error}") from None
        raise ValueError(f"{name} is no folder, and the Hub gives none: {str(error).splitlines()[0]}") from None
    if config.model_type != CloverConfig.model_type:
        raise ValueError(
            f"{name} holds a {config.model_type!r}, but must hold a {CloverConfig.model_type!r}: "
            "`python -m clover.training convert` makes one of a Qwen3.5-MoE"
        )
    return config


def check_output(folder: Path) -> None:
    """Raises a `ValueError` if a new run would write into the folder of another."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"`output_dir` is {folder}, which is not empty: go on from its last checkpoint with "
            "`--resume_from_checkpoint True`, remove it, or name another folder"
        )


def checkpoint_to_resume(wanted: str | bool | None, output: Path, lora_rank: int, max_steps: int) -> str | None:
    """The folder of the checkpoint to go on from, if any.

    Args:
        wanted: True for the last one in `output`, or a folder.
    Raises:
        ValueError: there is none, it is of a training of another kind, or it has no step left to take.
    """
    if wanted is None or str(wanted).lower() in ("false", "none", ""):
        return None
    is_last = str(wanted).lower() == "true"
    found = (get_last_checkpoint(str(output)) if output.is_dir() else None) if is_last else str(wanted)
    if found is None:
        raise ValueError(f"`resume_from_checkpoint` is {wanted}, but {output} has no checkpoint")
    if not (Path(found) / "trainer_state.json").is_file():
        raise ValueError(f"`resume_from_checkpoint` is {wanted}, but must be True or a checkpoint's folder")
    adapter = Path(found) / ADAPTER
    rank = json.loads(adapter.read_text())["r"] if adapter.is_file() else 0
    if rank != lora_rank:
        raise ValueError(f"`lora_rank` is {lora_rank}, but {found} was trained with {rank}")
    done = json.loads((Path(found) / "trainer_state.json").read_text())["global_step"]
    if 0 < max_steps <= done:
        raise ValueError(f"`max_steps` is {max_steps}, but {found} has taken {done} already")
    return found
