#!/usr/bin/env bash
# All figures of a GPU machine in one command.
#
#   benchmarks/gpu.sh CARRY DEST OUT STAGE...
#
# CARRY has on_device.sh, make_model.py, the packed SGLang and, for `workflow`, tokenizer/ and wheels
# of Snakemake in ../.whl. SGLang is unpacked to DEST. OUT gets results and logs.
# Stages: install; fill (touch the machine's memory once); disk (its write rate); check (tests/gpu);
# dense and mla (plain, capture to /dev/shm and to disk, native; a profile; 200 to 4000 tokens, then
# 16k to 32k in chunks); prefixes (samples that share prefixes, of the first CONVERSATIONS of the
# structure STRUCTURE, which is CARRY/sharegpt_prefixes.json; a server for each of PREFIX_MODES);
# answers (the stage of answers against SGLang's own client, which is not in the packed SGLang:
# ../.whl has its folder sglang/benchmark, and wheels of renderers, openai-harmony and
# prime-pydantic-config); graphs (plain with prefill graphs); workflow (a complete `snakemake` run).
# On GPUS GPUs (all of the machine): check_several (tests/gpu/test_several_gpus.py); tp (tensor
# parallel); dp (data parallel attention); replicas_shm and replicas_disk (a server on each, behind
# one lease). `dense+mla` starts both at once, each on a GPU of its own, and measures one after the
# other. kimi: Kimi-K2.5's width with LAYERS layers (four take 108 GB), on GPUS GPUs; ATTENTION=dp has
# data parallel attention.
# Variables: GPUS, REPEATS (3), NATIVE (8 requests of the native path), PROFILE (--profile), MIXES, SHORT,
# TO (shm disk), LIMIT and TURN. A stage that fails does not stop the next one.
set -u
carry=$1 dest=$2 out=$3
shift 3
here=$(cd "$(dirname "$0")/.." && pwd)
work=/tmp/draftstates-bench
turn=${TURN:-$work/turn}
mkdir -p "$out" /dev/shm/draftstates-bench $work
began=$(date +%s)
say() { echo "[$(($(date +%s) - began)) s] $*" | tee -a "$out/summary.txt"; }

# No prefill graph: a replayed graph runs no Python, so capture would see nothing of it.
# No decode graph: nothing is decoded.
no_graphs="--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
kernels="--attention-backend triton --sampling-backend pytorch --grammar-backend none --moe-runner-backend triton"
# room for the tokens in flight and no more, so that several servers fit one GPU
room="--chunked-prefill-size 16384 --max-total-tokens 140000 --mem-fraction-static 0.88"

dummy="--load-format dummy"
both="--root /"
for to in ${TO:-shm disk}; do case $to in shm) both+=" --to shm=/dev/shm/draftstates-bench" ;; disk) both+=" --to disk=$work" ;; esac done
mixes="$(printf -- '--mix %s ' ${MIXES:-200-4000x384 16384-32768x16}) --native ${NATIVE:-8}"
short="--mix ${SHORT:-200-4000x384} --native 0"
bench() { # LABEL MODEL SERVER_FLAGS [options of capture.py]
  local label=$1 model=$2 flags=$3
  shift 3
  say "== $label"
  timeout "${LIMIT:-560}" python3 "$here/benchmarks/capture.py" --model "$model" --logs "$out" --turn $turn \
    --repeats "${REPEATS:-3}" --flags "$kernels $no_graphs $room $flags" "$@" >"$out/$label.txt" 2>&1
  say "$label ended ($?)"
  grep -aE "^\||memory|rror" "$out/$label.txt" | tail -70 | cut -c1-300
}
check() { # LABEL TESTS
  say "== $1"
  DRAFTSTATES_GPU_FLAGS="$kernels $no_graphs --max-total-tokens 60000 --mem-fraction-static 0.85" timeout "${LIMIT:-400}" \
    flock $turn python3 -m pytest -q -s "$here/tests/gpu/$2" -p no:cacheprovider --basetemp "$dest/$1" >"$out/$1.txt" 2>&1
  say "$1 ended ($?)"
  grep -aE "median|recapture|hook|prefix" "$out/$1.txt" | grep -v LayerParity | cut -c1-300
  tail -6 "$out/$1.txt" | cut -c1-400
}
random_8b() { # a model with weights: the lease tests its servers
  [ -e /dev/shm/qwen3_8b/config.json ] || python3 "$here/tests/gpu/gpu_models.py" qwen3_8b /dev/shm/qwen3_8b >"$out/model.txt" 2>&1
}

stage() {
  case $1 in
  install)
    bash "$carry/on_device.sh" install "$carry" "$dest" | tee -a "$out/summary.txt"
    # the plug-in's entry point, as an installation of this project would write it
    plug=$dest/plug/draftstates-0.1.0.dist-info
    mkdir -p "$plug"
    printf 'Metadata-Version: 2.1\nName: draftstates\nVersion: 0.1.0\n' >"$plug/METADATA"
    printf '[sglang.srt.plugins]\ndraftstates = draftstates.capture.plugin:register\n' >"$plug/entry_points.txt"
    PYTHONPATH=$dest/site python3 "$carry/make_model.py" "$dest/models" qwen3-8b dsv2-lite || exit 1
    sed -i 's/"max_position_embeddings": 16384/"max_position_embeddings": 40960/' "$dest/models/dsv2-lite/config.json"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee -a "$out/summary.txt"
    ;;
  fill) # a virtual machine may get its memory page by page on first use, at a few GB/s
    flock $turn bash -c 'for i in $(seq 8); do head -c ${FILL:-10}G /dev/zero >/dev/shm/fill.$i & done; wait; rm /dev/shm/fill.*'
    say "filled"
    ;;
  disk)
    dd if=/dev/zero of=$work/dd bs=64M count=128 oflag=direct conv=fsync 2>&1 | tail -1 | tee -a "$out/summary.txt"
    rm $work/dd
    ;;
  check) check check test_capture_on_gpu.py ;;
  dense) bench dense "$dest/models/qwen3-8b" "$dummy" $both $mixes ${PROFILE---profile} ;;
  mla) bench mla "$dest/models/dsv2-lite" "$dummy" $both $mixes ${PROFILE---profile} ;;
  prefixes)
    say "== prefixes"
    timeout "${LIMIT:-560}" python3 "$here/benchmarks/prefixes.py" --model "$dest/models/qwen3-8b" --logs "$out" --turn $turn \
      --structure "${STRUCTURE:-$carry/sharegpt_prefixes.json}" --conversations "${CONVERSATIONS:-420}" \
      --repeats "${REPEATS:-3}" --tokens-in-flight "${IN_FLIGHT:-49152}" ${PREFIX_MODES:+--modes "$PREFIX_MODES"} $both \
      --flags "$kernels $no_graphs --chunked-prefill-size 16384 --max-total-tokens ${POOL:-100000} --mem-fraction-static 0.95 $dummy" \
      >"$out/prefixes.txt" 2>&1
    say "prefixes ended ($?)"
    grep -aE "^[|{]|rror" "$out/prefixes.txt" | cut -c1-300
    ;;
  answers)
    python3 -m pip install -q --no-index --no-deps --no-cache-dir --target "$dest/answers" \
      "$carry"/../.whl/{renderers,openai_harmony,prime_pydantic_config}-*.whl
    cp -r "$carry/../.whl/benchmark" "$dest/site/sglang/"
    # the packed tokenizer has no chat template
    printf '%s' "{{ bos_token }}{% for message in messages %}{{ message.role }}:{{ message.content }}" \
      "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}" \
      "{% if add_generation_prompt %}assistant:{% endif %}" >"$dest/models/qwen3-8b/chat_template.jinja"
    say "== answers"
    PYTHONPATH=$PYTHONPATH:$dest/answers timeout "${LIMIT:-300}" python3 "$here/benchmarks/answers.py" \
      --model "$dest/models/qwen3-8b" --dtype bfloat16 --logs "$out" --turn $turn \
      --prompts 512 --new 256 --repeats "${REPEATS:-2}" \
      --flags "$kernels --chunked-prefill-size 16384 --mem-fraction-static 0.85 $dummy" >"$out/answers.txt" 2>&1
    say "answers ended ($?)"
    grep -aE "^\||^two turns|^\{|rror" "$out/answers.txt" | cut -c1-300
    ;;
  graphs) bench graphs "$dest/models/qwen3-8b" "$dummy" --root / --graphs "$kernels $room $dummy" $short ;;
  check_several) DRAFTSTATES_GPUS=$gpus check check_several test_several_gpus.py ;;
  tp) bench "tp$gpus" "$dest/models/qwen3-8b" "$dummy --tensor-parallel-size $gpus" $both $short ;;
  dp)
    bench "dp$gpus" "$dest/models/dsv2-lite" \
      "$dummy --tensor-parallel-size $gpus --data-parallel-size $gpus --enable-dp-attention" $both $short
    ;;
  kimi)
    mkdir -p "$dest/models/kimi"
    cp "$dest"/models/dsv2-lite/tokenizer* "$dest/models/kimi/"
    sed "s/\"num_hidden_layers\": 61/\"num_hidden_layers\": $layers/" \
      "$here/benchmarks/kimi_k2.5.json" >"$dest/models/kimi/config.json"
    parallel="--tensor-parallel-size $gpus"
    [ "${ATTENTION:-tp}" = dp ] && parallel+=" --data-parallel-size $gpus --enable-dp-attention"
    # r_3, r_31 and r_59 of 61 layers: the same relative depths
    bench "kimi_${ATTENTION:-tp}$gpus" "$dest/models/kimi" "$dummy $parallel" $both $short \
      --layers "$((layers / 20 + 1)),$((layers * 31 / 61)),$((layers * 59 / 61))"
    ;;
  replicas_shm)
    random_8b
    bench replicas_shm /dev/shm/qwen3_8b "" --root /dev/shm --to shm=shm $short --lease "$gpus"
    ;;
  replicas_disk)
    random_8b
    bench replicas_disk /dev/shm/qwen3_8b "" --root /tmp --to disk=disk $short --lease "$gpus"
    ;;
  workflow)
    python3 -m pip install -q --no-index --no-deps --no-cache-dir --target "$dest/snakemake" "$carry"/../.whl/*.whl
    random_8b
    cp "$carry"/tokenizer/* /dev/shm/qwen3_8b/
    rm -rf /dev/shm/draftstates-workflow
    say "== workflow"
    PYTHONPATH=$PYTHONPATH:$dest/snakemake PATH=$dest/snakemake/bin:$PATH timeout "${LIMIT:-560}" python3 "$here/benchmarks/workflow.py" \
      --model /dev/shm/qwen3_8b --vocabulary 49152 --mix "${WORKFLOW_MIX:-200-4000x2480}" --plain-every 4 --min-bytes "${MIN_BYTES:-1200MiB}" --max-bytes "${MAX_BYTES:-4800MiB}" \
      --work /dev/shm/draftstates-workflow --streams "${STREAMS:-8}" --repeats "${REPEATS:-1}" --queue-bytes 4294967296 \
      --keep --turn $turn --flags "$kernels $no_graphs $room" >"$out/workflow.txt" 2>&1
    say "workflow ended ($?)"
    tail -12 "$out/workflow.txt" | cut -c1-300
    cp /dev/shm/draftstates-workflow/{snakemake,serve}.log "$out/"
    ;;
  *)
    sed -n '2,21p' "$0"
    exit 2
    ;;
  esac
}

unset PYTHONDONTWRITEBYTECODE # as in an installed project; otherwise every job of a run compiles its imports
layers=${LAYERS:-4}
gpus=${GPUS:-$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)}
eval "$(bash "$carry/on_device.sh" env "$dest")"
export PYTHONPATH=$here:$dest/plug:$PYTHONPATH
for names in "$@"; do
  if [ "$names" = "${names/+/}" ]; then
    stage "$names"
    continue
  fi
  gpu=0
  for name in ${names//+/ }; do
    (export CUDA_VISIBLE_DEVICES=$gpu && stage "$name") &
    gpu=$(((gpu + 1) % gpus))
  done
  wait
done
for log in "$out"/server-*.log; do
  grep -aiE "Traceback|Error|draftstates" "$log" | grep -v server_args | head -5 | cut -c1-300
done 2>/dev/null
(cd "$out" && tar czf logs.tgz --remove-files server-*.log 2>/dev/null)
say done
