#!/usr/bin/env bash
# The figures of a GPU machine, in one command, from a folder that holds SGLang and its start script.
#
#   benchmarks/gpu.sh CARRY DEST OUT STAGE...
#
# CARRY has on_device.sh, make_model.py and the packed SGLang; DEST is where it is unpacked; OUT gets results and logs.
# Stages: install, disk (its write rate), check (tests/gpu), dense, mla (200 to 4000 tokens; then 16k to 32k in chunks).
# On two GPUs: check2, tp2 (tensor parallel), dp2 (data parallel attention), replicas (two servers behind one lease).
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

dummy="--load-format dummy"
shm="--to shm=/dev/shm/draftstates-bench"
bench() { # LABEL MODEL SERVER_FLAGS [options of capture.py]
  local label=$1 model=$2 flags=$3
  shift 3
  say "== $label"
  timeout "${LIMIT:-400}" python3 "$here/benchmarks/capture.py" --model "$model" --logs "$out" --to disk=/tmp/draftstates-bench \
    --repeats "${REPEATS:-3}" --flags "$common --chunked-prefill-size 16384 --max-total-tokens 300000 --mem-fraction-static 0.45 $flags" "$@" \
    2>&1 | tee "$out/$label.txt" | tail -40 | cut -c1-400
}
check() { # LABEL TESTS
  say "== $1"
  DRAFTSTATES_GPU_FLAGS="$common --mem-fraction-static 0.3" timeout 400 python3 -m pytest -q -s "$here/tests/gpu/$2" ${CHECK:-} \
    -p no:cacheprovider --basetemp "$dest/$1" >"$out/$1.txt" 2>&1
  grep -aE "median|probe|hook" "$out/$1.txt" | grep -v LayerParity | cut -c1-300
  tail -6 "$out/$1.txt" | cut -c1-400
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
  disk)
    dd if=/dev/zero of=/tmp/draftstates-bench/dd bs=64M count=128 oflag=direct conv=fsync 2>&1 | tail -1 | tee -a "$out/summary.txt"
    rm /tmp/draftstates-bench/dd
    ;;
  check) check check test_capture_on_gpu.py ;;
  dense) bench dense "$dest/models/qwen3-8b" "$dummy" --root / $shm --mix "${MIX:-200-4000x512}" --mix 16384-32768x12 --native "${NATIVE:-8}" ;;
  mla) bench mla "$dest/models/dsv2-lite" "$dummy" --root / $shm --mix "${MIX:-200-4000x512}" --mix 16384-32768x12 --native "${NATIVE:-8}" ;;
  check2) check check2 test_two_gpus.py ;;
  tp2) bench tp2 "$dest/models/qwen3-8b" "$dummy --tensor-parallel-size 2" --root / $shm --mix "${MIX:-200-4000x256}" --native 0 ;;
  dp2)
    bench dp2 "$dest/models/dsv2-lite" "$dummy --tensor-parallel-size 2 --data-parallel-size 2 --enable-dp-attention" \
      --root / --mix "${MIX:-200-4000x256}" --native 0
    ;;
  replicas) # the lease tests its servers, so that they need a model with weights
    [ -e /dev/shm/qwen3_8b ] || PYTHONPATH=$here/tests/gpu:$PYTHONPATH python3 "$here/tests/gpu/gpu_models.py" qwen3_8b /dev/shm/qwen3_8b 2>&1 | tail -1
    bench replicas_disk /dev/shm/qwen3_8b "" --root /tmp --mix "${MIX:-200-4000x384}" --native 0 --lease 2
    ;;
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
