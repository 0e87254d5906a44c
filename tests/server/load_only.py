"""Loads models as SGLang's server does on the CPU, with the plug-in and without a server.

Usage: load_only.py FOLDER..., each a model whose plug-in settings lie beside it in settings.json.
SGLang is imported once; each model is loaded in a process of its own, which prints to load.log.
"""

import os
import sys
import time
from pathlib import Path

FLAGS = {
    "dtype": "float32",
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_radix_cache": True,
    "max_total_tokens": 2048,
    "mem_fraction_static": 0.3,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_backend_decode": "disabled",
}


def load(folder: Path) -> None:
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    os.environ["DRAFTSTATES_CAPTURE"] = (folder.parent / "settings.json").read_text()
    load_plugins()
    arguments = ServerArgs(model_path=str(folder), **FLAGS)
    rank = one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    one_batch.publish(
        arguments, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0)
    )
    one_batch._init_process_global_configs()
    # A tiny model has none.
    one_batch.get_tokenizer = lambda *args, **kwargs: None
    started = time.monotonic()
    one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    print(f"loaded in {time.monotonic() - started:.1f} s", flush=True)


def main() -> None:
    import sglang.benchmark.one_batch  # noqa: F401

    for name in sys.argv[1:]:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        log = os.open(Path(name).parent / "load.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            load(Path(name))
            status = 0
        except SystemExit as error:
            print(f"exit: {error}", flush=True)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)


if __name__ == "__main__":
    main()
