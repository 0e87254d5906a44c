#!/usr/bin/env bash
# The figures of a GPU machine, in one command, from a folder that holds SGLang and its start script.
#
#   benchmarks/gpu.sh CARRY DEST OUT STAGE...
#
# CARRY has on_device.sh, make_model.py and the packed SGLang; DEST is where it is unpacked; OUT gets results and logs.
# Stages: install, check (tests/gpu), dense, mla (200 to 4000 tokens), dense_long, mla_long (16k to 32k tokens in chunks).
# REPEATS (3), NATIVE (8 requests of the native path) and CHECK (options of pytest) may be set. A stage that fails does not stop the next.
set -u
carry=$1 dest=$2 out=$3
shift 3
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out" /dev/shm/draftstates-bench /tmp/draftstates-bench
began=$(date +%s)
say() { echo "[$(($(date +%s) - began)) s] $*" | tee -a "$out/summary.txt"; }

# No prefill graph: a replayed graph runs no Python, so capture could see nothing of it. No decode graph: nothing is decoded.
common="--attention-backend triton --sampling-backend pytorch --grammar-backend none --moe-runner-backend triton
  --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"

bench() { # LABEL MODEL MIX [more options]
  local label=$1 model=$2 mix=$3
  shift 3
  say "== $label"
  timeout "${LIMIT:-400}" python3 "$here/benchmarks/capture.py" --model "$dest/models/$model" --root / --logs "$out" \
    --to shm=/dev/shm/draftstates-bench --to disk=/tmp/draftstates-bench --mix "$mix" --repeats "${REPEATS:-3}" --native "${NATIVE:-8}" \
    --flags "$common --load-format dummy --chunked-prefill-size 16384 --max-total-tokens 300000 --mem-fraction-static 0.45 $*" \
    2>&1 | tee "$out/$label.txt" | tail -40
}

for stage in "$@"; do
  case $stage in
  install)
    bash "$carry/on_device.sh" install "$carry" "$dest" | tee -a "$out/summary.txt"
    eval "$(bash "$carry/on_device.sh" env "$dest")"
    # what an installation of this project would leave: the plug-in's entry point
    plug=$dest/plug/draftstates-0.1.0.dist-info
    mkdir -p "$plug"
    printf 'Metadata-Version: 2.1\nName: draftstates\nVersion: 0.1.0\n' >"$plug/METADATA"
    printf '[sglang.srt.plugins]\ndraftstates = draftstates.capture.plugin:register\n' >"$plug/entry_points.txt"
    export PYTHONPATH=$here:$dest/plug:$PYTHONPATH
    python3 "$carry/make_model.py" "$dest/models" qwen3-8b dsv2-lite || exit 1
    sed -i 's/"max_position_embeddings": 16384/"max_position_embeddings": 40960/' "$dest/models/dsv2-lite/config.json"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee -a "$out/summary.txt"
    ;;
  check)
    say "== check"
    DRAFTSTATES_GPU_FLAGS="$common --mem-fraction-static 0.3" timeout 400 python3 -m pytest -q -s "$here/tests/gpu" ${CHECK:-} \
      -p no:cacheprovider --basetemp "$dest/check" >"$out/check.txt" 2>&1
    tail -25 "$out/check.txt" | cut -c1-400
    ;;
  dense) bench dense qwen3-8b 200-4000x256 ;;
  mla) bench mla dsv2-lite 200-4000x256 ;;
  dense_long) bench dense_long qwen3-8b 16384-32768x16 ;;
  mla_long) bench mla_long dsv2-lite 16384-32768x16 ;;
  *)
    sed -n '2,9p' "$0"
    exit 2
    ;;
  esac
done
for log in "$out"/server-*.log; do
  grep -aiE "Traceback|Error|draftstates" "$log" | grep -v server_args | head -5 | cut -c1-300
done 2>/dev/null
(cd "$out" && tar czf logs.tgz --remove-files server-*.log 2>/dev/null)
say done
