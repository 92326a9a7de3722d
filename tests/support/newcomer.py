"""A home folder in which the embedded model is a tiny one, and servers started in it.

Commands of the documentation then run as they are written: `tinsmith serve` serves a model under
the name of the embedded one, with random weights and a token for every byte.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support import tiny_llama
from tinsmith.engine.local.model import sources


def newcomer(home: Path) -> dict[str, str]:
    """The environment of a newcomer who has the embedded model and nothing else."""
    cache = home / ".cache" / "tinsmith"
    cache.mkdir(parents=True)
    # The place where the conversion of the embedded model is looked for.
    folder = sources.embedded_folder(cache)
    _write_tiny_model(folder)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TINKER_", "TINSMITH_", "XDG_", "HF_"))
    }
    return kept | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        "TINSMITH_PORT": "0",
        "TINKER_TELEMETRY": "0",
    }


def _write_tiny_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import ByteLevel
    from transformers import PreTrainedTokenizerFast

    tiny_llama.save(
        folder,
        seed=3,
        vocab_size=259,
        intermediate_size=64,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], pad_token=special[1]
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)


class Served:
    """A command that serves, and what it printed that clients need."""

    def __init__(self, command: str, environment: dict[str, str], folder: Path) -> None:
        self._log = folder / "server.log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=folder,
            )
        self._printed: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self._wait_until_ready()

    @property
    def exports(self) -> dict[str, str]:
        found = (re.match(r"export (\w+)=(.*)", line) for line in self._printed)
        return {match[1]: match[2] for match in found if match}

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(timeout=30) == 0, self._log.read_text()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._printed.append(line)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            url = self.exports.get("TINKER_BASE_URL")
            if url is not None:
                try:
                    with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                        return
                except urllib.error.HTTPError as error:
                    error.close()
            time.sleep(0.05)
        raise AssertionError("the server did not become ready: " + self._log.read_text())
