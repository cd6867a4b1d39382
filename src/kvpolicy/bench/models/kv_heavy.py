"""A model whose KV cache costs more than its weights: what compaction is for, small enough for two cores.

``python -m kvpolicy.bench.models.kv_heavy FOLDER`` writes it; its weights are random and always the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.bench.models.smollm import cache_folder, publish
from kvpolicy.core.errors import EngineContractError

if TYPE_CHECKING:
    from collections.abc import Callable

# Raise the version whenever what is written changes.
FOLDER_NAME = "kv-heavy-v1"

_SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
_WEIGHT_STD = 0.1


def kv_heavy_model(cache: Path | None = None, *, progress: Callable[[str], None]) -> Path:
    """Return the folder of the model, making it first if it is not there (about 10 s).

    Raises:
        EngineContractError: The installed transformers could not write it.
    """
    root = cache_folder(os.environ) if cache is None else cache
    folder = root / FOLDER_NAME
    if (folder / "config.json").is_file():
        return folder
    progress(f"Writing the KV-heavy model once into {folder} ...")
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}-", dir=root))
    try:
        command = [sys.executable, "-m", "kvpolicy.bench.models.kv_heavy", str(scratch)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
        if done.returncode != 0:
            raise EngineContractError(f"transformers could not write the KV-heavy model: {done.stderr.strip()[-2000:]}")
        publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write(folder: Path) -> None:
    """Write config and bfloat16 weights; there is no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=False, dtype="bfloat16"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters(), key=lambda named: named[0]):
            if weight.dim() > 1:
                weight.normal_(0.0, _WEIGHT_STD, generator=generator)
            else:
                weight.fill_(1.0)
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
