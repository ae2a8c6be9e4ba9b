import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test needs a network

import pytest  # noqa: E402
import torch  # noqa: E402
from random_clover import random_clover, randomise, tiny_config  # noqa: E402
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig  # noqa: E402

from clover import CloverForDiffusionLM  # noqa: E402

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))  # the models are too small for more


@pytest.fixture(scope="session")
def clover_model() -> CloverForDiffusionLM:
    """A random Clover in fp32. Shared between tests: leave it as it is."""
    return random_clover()


@pytest.fixture(scope="session")
def stock_model() -> Qwen3_5MoeForCausalLM:
    """transformers' own model with the weights of `clover_model`."""
    config = tiny_config().to_dict()
    for name in ("model_type", "block_size", "mask_token_id", "expert_coreset_top_p", "auto_map"):
        config.pop(name, None)
    return randomise(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**config)))


@pytest.fixture(scope="session")
def repository(clover_model, tmp_path_factory):
    """`clover_model` in a folder laid out as a Hub repository: weights, metadata, the three files of code."""
    folder = tmp_path_factory.mktemp("repository")
    clover_model.save_pretrained(folder)
    return folder
