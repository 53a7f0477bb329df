#!/usr/bin/env bash
# All runs on the GPUs of one host, each as one process a GPU. `plan`'s figures for eight H200 are in
# benchmarks/results/2026-11-29_plan_eight.md.
#
#   bash benchmarks/one_host.sh FOLDER [NAME ...]               # NAME: only these runs
#   RANKS=4 bash benchmarks/one_host.sh FOLDER [NAME ...]       # on four GPUs (default: all of the host)
#   DRY=1 bash benchmarks/one_host.sh FOLDER [NAME ...]         # at tiny sizes, on gloo ranks of the CPU (default: 8)
#
# Each run writes FOLDER/NAME.log and ends after LIMIT seconds (600). Its status, its seconds and the last rows of its
# table are printed. The status of `killed` is 1: a rank of it is killed.
set -u
OUT=$(realpath -m "${1:?give a folder for the logs}") && mkdir -p "$OUT" && shift
cd "$(dirname "$0")/.." && export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
ONLY=" $* " LIMIT=${LIMIT:-600}
[[ ${DRY:-} ]] && RANKS=${RANKS:-8}
RANKS=${RANKS:-$(nvidia-smi --list-gpus | wc -l)}
((RANKS > 1)) || { echo "RANKS is $RANKS: these runs need at least 2 GPUs, or DRY=1." >&2 && exit 1; }

run() {
    local name=$1 begin=$SECONDS status=0 && shift
    [[ $ONLY == "  " || $ONLY == *" $name "* ]] || return 0
    timeout -k 30 "$LIMIT" "$@" > "$OUT/$name.log" 2>&1 || status=$?
    echo "== $name: status $status, $((SECONDS - begin)) s"
    grep -E '^(\| [0-9]|longest|loss|[=]+ .* (passed|failed))' "$OUT/$name.log" | sort -u | tail -n 8
}
ranks() { echo torchrun --standalone --nproc-per-node "$1"; }
# geometric(FIRST, LAST), as a recipe writes it
geometric() {
    local lengths=$1 rates=1 length=$1 rate=1
    while ((length < $2)); do
        length=$((2 * length)) rate=$((2 * rate)) lengths+=,$length rates+=,$rate
    done
    echo "{\"segment_lengths\": [$lengths], \"dilation_rates\": [$rates]}"
}

if [[ ${DRY:-} ]]; then
    export JOB_ACCELERATOR=cpu
    SHORT=256 MIDDLE=512 LONG=1024 FIRST=64 HYBRID=2 MAX=$((512 * RANKS)) TILE=256 TOTAL=16384 CHUNK=4096
    STEP="--accelerator cpu --dim 64 --depth 2 --heads 8 --precision 32-true --no-compile --first $FIRST --steps 2 --warm 2"
    DECODED=4096 DECODER="--accelerator cpu --precision 32-true --no-compile --warm 1 --steps 1" SMALL=tiny LARGE=tiny
    STREAM="--dim 64 --depth 2 --heads 8" DENSE_STREAM="--tokens 8192 --chunk 4096 $STREAM --hybrid 2"
    MODEL="--model.dim 96 --model.depth 2 --model.num_heads 12 --model.compile_blocks false --trainer.accelerator cpu"
    MODEL+=" --trainer.precision 32-true --limit 2 --multiple 16 --data.seq_len 512 --model.optimizer.fused false"
    OP="--heads 4 --head-dim 16 --dtype float32" CALLS="--device cpu $OP --local 4096"
    EXCHANGE="$CALLS --repeats 2" CHOICE="$CALLS --rounds 2 --exchanges gather switch" CONTEXT="--cpu $OP --dense 4096 --dilated 8192 --repeats 1"
    TESTS=tests/distributed/test_nccl.py SNAPSHOT=""
else
    export JOB_ACCELERATOR=gpu
    SHORT="65536 131072" MIDDLE=262144 LONG=1048576 FIRST=2048 HYBRID=6 MAX=$((4262912 * RANKS)) TILE=16384
    TOTAL=1000000000 CHUNK=8388608
    STEP="--steps 20 --warm 64" DECODED=1048576 DECODER="--warm 1 --steps 2" SMALL=1.3B LARGE=8B
    STREAM="--dim 384 --depth 6 --heads 6" DENSE_STREAM="--tokens 4194304 --chunk 1048576 --hybrid 12"
    MODEL="" EXCHANGE="--local 262144 1048576" CHOICE="--local 65536 262144 --rounds 7"
    CONTEXT="--dense 131072 --dilated 1048576" TESTS="tests -n 8 --maxschedchunk 1" SNAPSHOT="--memory $OUT/memory"
fi
scaling="benchmarks/weak_scaling.py" fsdp="--recompute block --strategy ring_dilated_fsdp"
sizes=$(for size in 1 2 4 8; do ((size > RANKS)) || echo $size; done)

run nccl python -m pytest -m gpu tests/distributed/test_nccl.py tests/strategy/test_nccl.py tests/ext/hashed/test_nccl.py -rfEs
run alone $(ranks 1) $scaling --of "$RANKS" --tokens $SHORT $MIDDLE $STEP
run alone_long $(ranks 1) $scaling --of "$RANKS" --tokens $LONG $STEP --steps 2 --warm 1 --recompute attention-kept
run weak $(ranks $RANKS) $scaling --tokens $SHORT $MIDDLE $STEP --profile "$OUT/traces"
run weak_long $(ranks $RANKS) $scaling --tokens $LONG $STEP --steps 2 --warm 1 --recompute attention-kept
for layout in auto contiguous; do
    run hybrid_$layout $(ranks $RANKS) $scaling --tokens $MIDDLE --hybrid $HYBRID --layout $layout $STEP --steps 5 --warm 4
done
for size in $sizes; do
    run groups_$size $(ranks $RANKS) $scaling --tokens $MIDDLE --head-size $size $STEP --steps 8 --warm 16
done
run switch $(ranks $RANKS) $scaling --tokens $((MIDDLE / 4)) $DECODER --decoder $SMALL $fsdp --layout contiguous --exchange switch
run zigzag $(ranks $RANKS) $scaling --tokens $((MIDDLE / 4)) $DECODER --decoder $SMALL $fsdp --layout zigzag $SNAPSHOT
for way in dense hybrid; do
    options=$([[ $way == hybrid ]] && echo "--hybrid 1")
    run decoder_$way $(ranks $RANKS) $scaling --tokens $((DECODED / RANKS)) $DECODER --decoder $LARGE $options $fsdp --layout auto
done
run stream $(ranks $RANKS) benchmarks/stream_step.py --tokens $TOTAL --chunk $CHUNK $STREAM --steps 1 --warm $CHUNK
run stream_dense $(ranks $RANKS) benchmarks/stream_step.py $DENSE_STREAM --steps 1
run longest python benchmarks/find_max.py --config recipes/longest.yaml --gpus "$RANKS" --tokens $MAX --most $MAX $MODEL \
    --trainer.strategy ring_dilated --model.pattern "$(geometric $FIRST $MAX)" \
    --trainer.callbacks lightning_dilated.callbacks.ActivationRecompute --trainer.callbacks.policy block \
    --trainer.callbacks.every 2 --trainer.callbacks.tile $TILE --trainer.callbacks.head_chunks 6
run context $(ranks $RANKS) benchmarks/context_parallel.py $CONTEXT
run choice python benchmarks/choice.py --ranks "$RANKS" --causal 0 --head-sizes $sizes $CHOICE
run hierarchical python benchmarks/exchange.py --ranks "$RANKS" --ranks-per-node $((RANKS / 2)) --causal 0 $EXCHANGE \
    --exchanges gather hierarchical_gather hierarchical_butterfly
run tests python -m pytest -m gpu $TESTS -p no:cacheprovider -rfEs --tb short
job=$PWD/tests/strategy/job.py && mkdir -p "$OUT/job" "$OUT/undisturbed" && rm -rf "$OUT"/job/* && cd "$OUT/job" || exit 1
run killed $(ranks $RANKS) "$job" kill 1 "$RANKS"
run resumed $(ranks $((RANKS > 2 ? RANKS - 2 : 1))) "$job" kill 1 $((RANKS > 2 ? RANKS - 2 : 1))
cd "$OUT/undisturbed" && run undisturbed $(ranks 1) "$job" nothing 0 1
