"""Starts a stock SGLang server on the CPU, in the Python that CLOVER_SGLANG_PYTHON names.

`sglang-cpu-requirements.txt` says how to make one. What SGLang lacks on a CPU is put on its path: `SITE_CPU`.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

HERE = Path(__file__).parent
SITE_CPU = HERE.parent / "parity" / "sglang_plugin" / "site_cpu"
PYTHON = os.environ.get("CLOVER_SGLANG_PYTHON")
needs_sglang = pytest.mark.skipif(
    not PYTHON, reason="CLOVER_SGLANG_PYTHON names no Python with SGLang: tests/sglang-cpu-requirements.txt makes one"
)
STARTING = 1800  # seconds: it imports much, several times over, and a loaded machine is slow


def install_observer(folder: Path) -> Path:
    """The observing plugin, installed by pip into a folder that a server can have on its path."""
    source = shutil.copytree(HERE.parent / "parity" / "sglang_observer", folder / "source")  # pip builds in it
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", folder / "site", source], check=True)
    return folder / "site"


@contextmanager
def sglang_server(
    model: Path,
    folder: Path,
    *,
    threshold: float,
    block_size: int,
    algorithm: str = "LowConfidence",
    paths: Iterable[Path] = (SITE_CPU,),
    environment: dict[str, str] | None = None,
    arguments: Iterable[str] = (),
) -> Iterator[str]:
    """The URL of a server that is up as long as the block lasts.

    Args:
        folder: for its log and its settings. paths: put before its PYTHONPATH. arguments: further ones of its command.
    """
    settings, log, port = folder / "algorithm.yaml", folder / "server.log", free_port()
    settings.write_text(f"threshold: {threshold}\nblock_size: {block_size}\n")
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1", "--port", port]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--random-seed", 0]
    command += ["--dllm-algorithm", algorithm, "--dllm-algorithm-config", settings, "--skip-tokenizer-init"]
    command += ["--max-total-tokens", 2048, "--max-running-requests", 2, "--mem-fraction-static", 0.3, *arguments]
    path = os.pathsep.join(map(str, [*paths, *filter(None, [os.environ.get("PYTHONPATH")])]))
    variables = os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"} | (environment or {})
    with open(log, "w") as file:
        server = subprocess.Popen(
            list(map(str, command)), env=variables, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_for(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(server)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(server: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + STARTING
    while time.monotonic() < end and server.poll() is None:
        try:
            with urlopen(f"{url}/server_info", timeout=10):
                return
        except (URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"SGLang did not start:\n{log.read_text()[-3000:]}")


def stop(server: subprocess.Popen) -> None:
    """Ends the server with the processes it has spawned, which share its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(timeout=20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
