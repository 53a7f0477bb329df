#!/usr/bin/env bash
# Runs on two, four or eight GPUs of one host. `plan`'s figures for eight H200: benchmarks/results/2026-11-29_plan_eight.md.
#
#   bash benchmarks/one_host.sh FOLDER [NAME ...]               # NAME: only these runs
#   RANKS=4 bash benchmarks/one_host.sh FOLDER [NAME ...]       # on four GPUs (default: all that are visible)
#   DRY=1 bash benchmarks/one_host.sh FOLDER [NAME ...]         # at tiny sizes, on gloo ranks of the CPU (default: 8)
#
# Each run writes FOLDER/NAME.log and ends after LIMIT seconds (600). Its status, its seconds and the last rows of its
# table are printed. `alone` and `alone_long` need one GPU. The status of `killed` is 1: a rank of it is killed. The
# losses of `resumed` and `undisturbed` must agree to 1e-5.
set -u
OUT=$(realpath -m "${1:?give a folder for the logs}") && mkdir -p "$OUT" && shift
cd "$(dirname "$0")/.." && export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
ONLY=" $* " LIMIT=${LIMIT:-600}
[[ ${DRY:-} ]] && RANKS=${RANKS:-8}
RANKS=${RANKS:-$(python -c "import torch; print(torch.cuda.device_count())")}
[[ $RANKS =~ ^[248]$ ]] || { echo "RANKS is $RANKS: it must be 2, 4 or 8. On a CPU, set DRY=1." >&2 && exit 1; }
HERE=$PWD RAN=" "

chosen() { [[ $ONLY == "  " || $ONLY == *" $1 "* ]]; }
run() {
    local name=$1 begin=$SECONDS status=0 && shift
    RAN+="$name "
    chosen "$name" || return 0
    timeout -k 30 "$LIMIT" "$@" > "$OUT/$name.log" 2>&1 || status=$?
    echo "== $name: status $status, $((SECONDS - begin)) s"
    grep -E '^(\| [0-9]|longest|loss|[=]+ .* (passed|failed))' "$OUT/$name.log" | awk '!seen[$0]++' | tail -n 16
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
    DENSE=256 LIGHT=512 DECODER="--accelerator cpu --precision 32-true --no-compile --warm 1 --steps 1" SMALL=tiny LARGE=tiny
    STREAM="--dim 64 --depth 2 --heads 8" DENSE_STREAM="--tokens 8192 --chunk 4096 $STREAM --hybrid 2 --warm 4096"
    MODEL="--model.dim 96 --model.depth 2 --model.num_heads 12 --model.compile_blocks false --trainer.accelerator cpu"
    MODEL+=" --trainer.precision 32-true --limit 2 --multiple 16 --data.seq_len 512 --model.optimizer.fused false"
    OP="--heads 4 --head-dim 16 --dtype float32" CALLS="--device cpu $OP"
    EXCHANGE="$CALLS --local 4096 --repeats 2" CHOICE="$CALLS --local 512 --first 64 --rounds 2" PEERS=--cpu
    CONTEXT="--cpu $OP --dense 4096 --dilated 8192 --repeats 1"
else
    export JOB_ACCELERATOR=gpu
    SHORT="65536 131072" MIDDLE=262144 LONG=1048576 FIRST=2048 HYBRID=$((RANKS == 8 ? 4 : 6)) MAX=$((4262912 * RANKS)) TILE=16384
    TOTAL=1000000000 CHUNK=8388608
    STEP="--steps 12" DENSE=65536 LIGHT=$((RANKS == 8 ? 131072 : 65536)) DECODER="--warm 1 --steps 1"
    SMALL=1.3B LARGE=$([[ $RANKS == 2 ]] && echo 1.3B || echo 8B)
    STREAM="--dim 384 --depth 6 --heads 6" DENSE_STREAM="--tokens 4194304 --chunk 1048576 --hybrid 12 --warm 1048576"
    MODEL="--model.residual_dtype float32" EXCHANGE="--local 262144 1048576" CHOICE="--local 65536 262144 --rounds 7"
    CONTEXT="--dense 131072 --dilated 1048576" PEERS="--steps 1"
fi
scaling="benchmarks/weak_scaling.py" fsdp="--recompute block --strategy ring_dilated_fsdp"
sizes=$(for size in 1 2 4 8; do ((size > RANKS)) || echo $size; done)

# the tests that need several GPUs, and the others; the last two tests need a GPU of their own
TEST="python -m pytest -m gpu -vv -p no:cacheprovider -rfEs --tb short --timeout 240"
NCCL="tests/distributed/test_nccl.py tests/strategy/test_nccl.py tests/strategy/test_gpu.py tests/ext/hashed/test_nccl.py"
CORE="tests/kernels tests/attention tests/ext/decoding tests/ext/convolution tests/ext/recurrence tests/ext/hashed"
BIG=tests/attention/test_gpu.py::test_four_million_tokens
run tests_nccl $TEST $NCCL
run tests_core $TEST $CORE -n 8 --deselect $BIG --ignore tests/ext/hashed/test_nccl.py
run tests_rest $TEST tests -n 8 $(printf -- "--ignore %s " $NCCL $CORE tests/test_allocator.py)
run tests_alone $TEST tests/test_allocator.py $BIG -p no:xdist

run alone $(ranks 1) $scaling --of "$RANKS" --tokens $SHORT $MIDDLE $STEP
run alone_long $(ranks 1) $scaling --of "$RANKS" --tokens $LONG $STEP --steps 2 --recompute attention-kept
run weak $(ranks $RANKS) $scaling --tokens $SHORT $MIDDLE $STEP --profile "$OUT/traces"
run weak_long $(ranks $RANKS) $scaling --tokens $LONG $STEP --steps 2 --recompute attention-kept
for layout in auto contiguous; do
    run hybrid_$layout $(ranks $RANKS) $scaling --tokens $MIDDLE --hybrid $HYBRID --layout $layout $STEP --steps 5
done
for size in $sizes; do
    run groups_$size $(ranks $RANKS) $scaling --tokens $MIDDLE --head-size $size $STEP
done
run switch $(ranks $RANKS) $scaling --tokens $((MIDDLE / 4)) $DECODER --decoder $SMALL $fsdp --layout contiguous --exchange switch
run zigzag $(ranks $RANKS) $scaling --tokens $((MIDDLE / 4)) $DECODER --decoder $SMALL $fsdp --layout zigzag
[[ ${DRY:-} ]] || run zigzag_memory $(ranks $RANKS) $scaling --tokens $((MIDDLE / 4)) $DECODER --decoder $SMALL $fsdp --layout zigzag \
    --memory "$OUT/memory"
run peers $(ranks $RANKS) benchmarks/decoder_peers.py --size $SMALL --tokens $((MIDDLE / 4)) $PEERS
run decoder_dense $(ranks $RANKS) $scaling --tokens $DENSE $DECODER --decoder $LARGE $fsdp --layout auto
run decoder_hybrid $(ranks $RANKS) $scaling --tokens $LIGHT $DECODER --decoder $LARGE --hybrid 1 $fsdp --layout auto
run stream $(ranks $RANKS) benchmarks/stream_step.py --tokens $TOTAL --chunk $CHUNK $STREAM --steps 1 --warm $CHUNK
run stream_dense $(ranks $RANKS) benchmarks/stream_step.py $DENSE_STREAM --steps 1
run longest python benchmarks/find_max.py --config recipes/longest.yaml --gpus "$RANKS" --tokens $MAX --most $MAX $MODEL \
    --trainer.strategy ring_dilated --model.pattern "$(geometric $FIRST $MAX)" \
    --trainer.callbacks lightning_dilated.callbacks.ActivationRecompute --trainer.callbacks.policy block \
    --trainer.callbacks.every 2 --trainer.callbacks.tile $TILE --trainer.callbacks.head_chunks 6
run context $(ranks $RANKS) benchmarks/context_parallel.py $CONTEXT
run choice python benchmarks/choice.py --ranks "$RANKS" --causal 0 --head-sizes $sizes $CHOICE
((RANKS == 2)) || run hierarchical python benchmarks/exchange.py --ranks "$RANKS" --ranks-per-node $((RANKS / 2)) --causal 0 $EXCHANGE \
    --exchanges gather hierarchical_gather hierarchical_butterfly
job=$HERE/tests/strategy/job.py fewer=$((RANKS == 2 ? 1 : RANKS - 2))
chosen killed && rm -rf "$OUT/job"
chosen undisturbed && rm -rf "$OUT/undisturbed"
mkdir -p "$OUT/job" "$OUT/undisturbed" && cd "$OUT/job" || exit 1
run killed $(ranks "$RANKS") "$job" kill 1 "$RANKS"
run resumed $(ranks $fewer) "$job" kill 1 $fewer
cd "$OUT/undisturbed" && run undisturbed $(ranks 1) "$job" nothing 0 1
for name in $ONLY; do
    [[ $RAN == *" $name "* ]] || { echo "no run is named $name: take one of$RAN" >&2 && exit 1; }
done
