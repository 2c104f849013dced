#!/usr/bin/env bash
# The 25 positional arguments of Pai-Megatron-Patch's run_mcore_llama3_1.sh, the 26 of its scripts for Qwen2, Mistral and
# DeepSeek-V2 or those for Moonlight, or the 27 for Qwen3 and DeepSeek-V3: prints what each means here, and runs that.
#
#   examples/pai_compat.sh [--dry-run] [--gpus N] dsw 8B 1 8 1e-5 1e-6 128 128 bf16 4 1 1 true true true false none \
#       false 100 DATASET VALID CHECKPOINT 100000000 10000 OUTPUT [-- flags of the program, which win]
#   examples/pai_compat.sh [--dry-run] [--gpus N] dsw A3B 1 8 1e-5 1e-6 128 128 bf16 4 1 1 1 8 true true true false \
#       none false 100 DATASET VALID CHECKPOINT 100000000 10000 OUTPUT [-- flags of the program, which win]
#
# Behind CP stand EP, as the 26th, or ETP and EP; Moonlight's 26 have both, and no FL. A MODEL_SIZE such as 8B has no
# experts, and leaves them out.
# --dry-run prints only. --gpus N: processes on this node under dsw, instead of one a GPU. MP_AC_LAYERS, MP_SFT_PACKING,
# MP_VP and MP_PP0_LAYERS mean what they mean there. Two things differ: shape and tokenizer are those of CHECKPOINT, unless
# that is none; and the same command goes on from its own newest checkpoint, with the optimizer's state.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
first=(ENV MODEL_SIZE BATCH_SIZE GLOBAL_BATCH_SIZE LR MIN_LR SEQ_LEN PAD_LEN PR TP PP CP)
last=(SP DO FL SFT AC OPTIMIZER_OFFLOAD SAVE_INTERVAL DATASET_PATH VALID_DATASET_PATH PRETRAIN_CHECKPOINT_PATH TRAIN
    WARMUP OUTPUT_BASEPATH)
declare -A place
flags=() balance=()

die() { echo "pai_compat.sh: $*" >&2; exit 2; }
one_of() { # NAME VALUE ...
    [[ " ${*:2} " == *" ${!1} "* ]] || die "$1 is '${!1}' and must be one of: ${*:2}"
}
say() { # NAME TEXT: a row of the table
    printf '%2s %-24s %-10s %s\n' "${place[$1]-}" "$1" "${!1}" "$2"
}
means() { # NAME FLAG ...: what an argument adds to the command
    flags+=("${@:2}")
    say "$1" "${*:2}"
}
soon() { # as `means`, if the program has the flag
    grep -qF "\`$2\`" "$root/docs/flags.md" || die "$1 ${!1} means ${*:2}, but $2 is not available yet"
    means "$@"
}

dry_run="" gpus=auto
while [[ ${1-} == -* ]]; do
    case $1 in
        --help | -h) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;;
        --dry-run) dry_run=yes ;;
        --gpus) [ $# -gt 1 ] || die "--gpus needs a number"; gpus=$2; shift ;;
        *) die "$1 is no option; see --help; flags of the program follow the arguments and --" ;;
    esac
    shift
done
arguments=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do arguments+=("$1") && shift; done
[ $# = 0 ] || shift
case ${#arguments[@]} in
    25) names=("${first[@]}" "${last[@]}") sizes=(8B 70B 405B) ;;
    26)
        moonlight=(SP DO "${last[@]:3}") # without FL
        names=("${first[@]}" EP "${last[@]}") sizes=(A2.4B A21B)
        if [[ ${arguments[13]} =~ ^[0-9]+$ ]]; then names=("${first[@]}" ETP EP "${moonlight[@]}") sizes=(A3B)
        elif [[ ! ${arguments[13]} =~ ^(true|false)$ ]]; then
            die "argument 14 is '${arguments[13]}', and is SP, true or false, of the 26 arguments ${names[*]}; or EP," \
                "a number, of Moonlight's: ${first[*]} ETP EP ${moonlight[*]}"
        fi ;;
    27) names=("${first[@]}" ETP EP "${last[@]}") sizes=(A3B A22B A37B) ;;
    *) die "takes 25, 26 or 27 arguments, not ${#arguments[@]}: ${first[*]} [[ETP] EP] ${last[*]}" ;;
esac
for i in "${!names[@]}"; do
    declare "${names[i]}=${arguments[i]}"
    place[${names[i]}]=$((i + 1))
done
case ${#names[@]}-$MODEL_SIZE in
    27-A37B) weight_decay=0.1 ;;
    27-*) weight_decay=0.01 ;; # Qwen3
    *) weight_decay=0.1 ;;
esac

one_of ENV dsw dlc
one_of PR bf16 fp16 fp8
for name in SP DO ${FL+FL} SFT; do one_of $name true false; done
one_of AC none false sel full offload
[[ -n ${ETP-} && $OPTIMIZER_OFFLOAD =~ ^(0?\.[0-9]+|[01](\.0*)?)$ ]] || # a fraction
    one_of OPTIMIZER_OFFLOAD none false static auto
for name in GLOBAL_BATCH_SIZE SEQ_LEN TP ${EP+EP} TRAIN WARMUP; do # the others are checked by the program
    [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || die "$name must be a whole number, not '${!name}'"
done
[ "${MP_DATASET_TYPE:-idxmap}" = idxmap ] || die "MP_DATASET_TYPE must be idxmap; see tools/preprocess_sft.py"

if [ "$SFT" = true ]; then # TRAIN and WARMUP are steps
    program=finetune.py steps=$TRAIN warmup=$WARMUP decay=$((TRAIN - WARMUP))
    sft=(--calculate-per-token-loss)
    [ "${MP_SFT_PACKING-}" = true ] || sft+=(--no-sft-packing)
else # and tokens
    tokens=$((GLOBAL_BATCH_SIZE * SEQ_LEN))
    [ $tokens -gt 0 ] && [ "$TRAIN" -ge $tokens ] || die "TRAIN is $TRAIN tokens, and one step is $tokens"
    program=pretrain_gpt.py steps=$((TRAIN / tokens)) warmup=$((WARMUP / tokens)) decay=$((TRAIN / tokens))
fi

checkpoint=$PRETRAIN_CHECKPOINT_PATH
tracker=$checkpoint/latest_checkpointed_iteration.txt
if [ "$checkpoint" = none ]; then
    [[ ${#names[@]}-${ETP-} != 26- || $MODEL_SIZE == A2.4B || $MODEL_SIZE == A21B ]] ||
        die "PRETRAIN_CHECKPOINT_PATH none leaves the shape to MODEL_SIZE, and $MODEL_SIZE may be one of Qwen2's and of" \
            "Mistral's sizes; give a model's folder, or the flags of a shape to pretrain_gpt.py"
    one_of MODEL_SIZE "${sizes[@]}"
    [[ " $*" == *" --tokenizer-type "* ]] ||
        die "PRETRAIN_CHECKPOINT_PATH none brings no tokenizer; add -- --tokenizer-type ..."
    start=(--init-method-std 0.008)
elif [ -f "$tracker" ]; then
    convert="tools/checkpoint/convert.py --loader mcore --saver megatron --load-dir $checkpoint --save-dir DIR"
    [ "$(<"$tracker")" != release ] || die "$checkpoint is in Megatron-LM's format; first run: python $convert"
    start=(--pretrained-checkpoint "$checkpoint" --use-checkpoint-args)
    start+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$checkpoint/tokenizer")
else
    [ -f "$checkpoint/config.json" ] || die "PRETRAIN_CHECKPOINT_PATH is '$checkpoint', which holds no model"
    start=(--load-hf "$checkpoint")
fi

if [ $ENV = dsw ]; then
    launcher=(--standalone --nproc-per-node "$gpus")
else
    for name in WORLD_SIZE RANK MASTER_ADDR MASTER_PORT KUBERNETES_CONTAINER_RESOURCE_GPU; do
        [ -n "${!name-}" ] || die "ENV dlc needs the environment variable $name"
    done
    launcher=(--nnodes "$WORLD_SIZE" --node-rank "$RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    launcher+=(--nproc-per-node "$KUBERNETES_CONTAINER_RESOURCE_GPU")
fi

launcher+=(--max-restarts 3)
say ENV "torchrun ${launcher[*]}"
case ${#names[@]}-$MODEL_SIZE in
    26-A3B) preset=moonlight-16b-a3b ;;
    *-A3B) preset=qwen3-30b-a3b ;;
    *-A22B) preset=qwen3-235b-a22b ;;
    *-A2.4B) preset=deepseek-v2-lite ;;
    *-A21B) preset=deepseek-v2 ;;
    *-A37B) preset=deepseek-v3 ;;
    *) preset=llama3.1-${MODEL_SIZE,,} ;;
esac
if [ "$checkpoint" = none ]; then means MODEL_SIZE --preset $preset
else say MODEL_SIZE "no flag: the shape is that of PRETRAIN_CHECKPOINT_PATH"; fi
means BATCH_SIZE --micro-batch-size "$BATCH_SIZE"
means GLOBAL_BATCH_SIZE --global-batch-size "$GLOBAL_BATCH_SIZE"
means LR --lr "$LR"
means MIN_LR --min-lr "$MIN_LR"
means SEQ_LEN --seq-length "$SEQ_LEN"
say PAD_LEN "no flag: samples are filled up to --seq-length"
if [ $PR = fp8 ]; then soon PR --fp8-format hybrid --fp8-amax-compute-algo max --fp8-amax-history-len 1024 --bf16
else means PR --$PR; fi
means TP --tensor-model-parallel-size "$TP"
means PP --pipeline-model-parallel-size "$PP"
[ -z "${MP_VP-}" ] || soon MP_VP --num-layers-per-virtual-pipeline-stage "$MP_VP"
[ -z "${MP_PP0_LAYERS-}" ] || soon MP_PP0_LAYERS --decoder-first-pipeline-num-layers "$MP_PP0_LAYERS"
means CP --context-parallel-size "$CP"
if [ ${#names[@]} = 25 ]; then :
elif [[ $MODEL_SIZE =~ ^[0-9.]+B$ ]]; then
    [ -z "${ETP-}" ] || say ETP "no flag: a $MODEL_SIZE has no experts"
    say EP "no flag: a $MODEL_SIZE has no experts"
else
    [ -z "${ETP-}" ] || means ETP --expert-tensor-parallel-size "$ETP"
    means EP --expert-model-parallel-size "$EP"
    case ${#names[@]}-$MODEL_SIZE in
        27-A37B)
            balance=(--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001)
            balance+=(--moe-router-bias-update-rate 0.001) ;;
        27-*) balance=(--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001) ;;
        *x*) balance=(--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01) ;;
    esac
fi
if [ $SP = true ] && [ "$TP" -gt 1 ]; then means SP --sequence-parallel; else say SP "no flag: off"; fi
if [ $DO = true ]; then means DO --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
else means DO --overlap-grad-reduce; fi
[ -z "${FL-}" ] || say FL "no flag: the log names the attention kernel that was chosen; --attention-backend chooses another"
if [ $SFT = true ]; then means SFT "${sft[@]}"; else say SFT "no flag: $program"; fi
case $AC in
    none | false) say AC "no flag: off" ;;
    sel) soon AC --recompute-granularity selective ;;
    full) soon AC --recompute-granularity full --recompute-method uniform --recompute-num-layers "${MP_AC_LAYERS:-1}" ;;
    offload) soon AC --cpu-offloading --cpu-offloading-num-layers "${MP_AC_LAYERS:-1}" ;;
esac
case $OPTIMIZER_OFFLOAD in
    none | false) say OPTIMIZER_OFFLOAD "no flag: off" ;;
    static) soon OPTIMIZER_OFFLOAD --optimizer-cpu-offload --optimizer-offload-policy static --optimizer-offload-fraction 1.0 ;;
    auto) soon OPTIMIZER_OFFLOAD --optimizer-cpu-offload --optimizer-offload-policy auto ;;
    *) means OPTIMIZER_OFFLOAD --optimizer-cpu-offload --optimizer-offload-fraction "$OPTIMIZER_OFFLOAD" ;;
esac
means SAVE_INTERVAL --save-interval "$SAVE_INTERVAL"
means DATASET_PATH --data-path "$DATASET_PATH" --split 99,1,0
say VALID_DATASET_PATH "no flag: validation is 1 % of DATASET_PATH, as there"
means PRETRAIN_CHECKPOINT_PATH "${start[@]}"
means TRAIN --train-iters $steps --lr-decay-iters $decay
means WARMUP --lr-warmup-iters $warmup
# Its folders are named after the settings, too; here not after the layout, under another of which a run goes on.
run=${program%%[._]*}-$MODEL_SIZE-lr-$LR-minlr-$MIN_LR-bs-$BATCH_SIZE-gbs-$GLOBAL_BATCH_SIZE
run+=-seqlen-$SEQ_LEN-pr-$PR-ti-$steps-wi-$warmup
save=$OUTPUT_BASEPATH/checkpoint/$run
means OUTPUT_BASEPATH --save "$save" --load "$save" --tensorboard-dir "$OUTPUT_BASEPATH/tensorboard/$run"
# What that script has fixed.
fixed=(--lr-decay-style cosine --weight-decay $weight_decay --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0)
fixed+=(--log-interval 1 --log-throughput --eval-interval 10000 --eval-iters 10 --num-workers 8 "${balance[@]}")
echo "   always                              ${fixed[*]}"

command=(torchrun "${launcher[@]}" "$root/$program" "${flags[@]}" "${fixed[@]}" "$@")
printf '%q ' "${command[@]}" && echo
[ -n "$dry_run" ] || source "$root/examples/run.sh"
