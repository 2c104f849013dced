# What the scripts of all families share: options -> flags -> torchrun. A script sets its `program` and its family's
# defaults (`lr`, `lora_lr`, `global_batch_size`, perhaps `family_flags`) and sources this file. Needs bash 4.4.

usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    cat <<END

Start from one of
  --model DIR              Hugging Face folder: shape, weights and tokenizer
  --checkpoint DIR         checkpoints of this program: shape and weights; needs --tokenizer
  --preset NAME            random weights in a shape of docs/flags.md; needs --tokenizer and --lr
Options
  --data PREFIX ...        dataset, or weight prefix weight prefix ...; "mock": random tokens, to try a layout
  --tokenizer DIR          Hugging Face tokenizer [that of --model]
  --save DIR               checkpoints; the same command goes on from the newest one there, under any layout
  --save-interval N        steps between them [500]
  --save-hf DIR            every checkpoint in Hugging Face format, too; with --lora-rank the adapters, for peft
  --train-iters N          length of the run, steps
  --seq-length N           [4096]
  --micro-batch-size N     [1]
  --global-batch-size N    samples in a step, over all replicas [$global_batch_size]
  --lr X                   peak learning rate; cosine decay [$lr; with --lora-rank $lora_lr]
  --lora-rank N            train low-rank adapters only
  --lora-alpha X           their outputs are multiplied by this / rank
  --precision P            bf16, fp16 or fp32 [bf16]
  --tp N                   tensor parallelism, with sequence parallelism [1]
  --ep N                   expert parallelism, of a model with experts [1]
  --etp N                  tensor parallelism of its experts [that of --tp]
  --gpus N                 processes on this node [what the platform says (docs/launch.md#platforms), else 8]
  --nodes N, MIN:MAX       of which each runs this command; a range: trains with the nodes that there are, at least MIN
                           (docs/launch.md#elastic-worlds) [what the platform says, else 1]
  --master HOST:PORT       one of the nodes and a free port there, the same in all commands [what the platform says]
  --exit-duration-in-mins N   save and end after that time
  --max-restarts N         times that torchrun starts all ranks again after one was lost [3 with --save, 20 if
                           --nodes is a range; else 0]
  --dry-run                print the command only
  -- FLAG ...              flags of the program (docs/flags.md); they win over options
END
}

die() { echo "$(basename "$0"): $*" >&2; exit 2; }

own="model checkpoint preset data tokenizer save precision tp ep etp gpus nodes master max-restarts"
# By the program's own names.
same="train-iters seq-length micro-batch-size global-batch-size lr lora-rank lora-alpha save-interval save-hf"
same+=" exit-duration-in-mins"
declare -A option=([precision]=bf16 [tp]=1 [seq-length]=4096 [micro-batch-size]=1)
option[global-batch-size]=$global_batch_size
data=() dry_run=""
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
        --help | -h) usage; exit ;;
        --dry-run) dry_run=yes; shift; continue ;;
        --*) [[ " $own $same " == *" ${1#--} "* ]] || die "$1 is no option; see --help; flags of $program follow --" ;;
        *) die "'$1' belongs to no option; see --help" ;;
    esac
    [[ -n ${2-} && $2 != --* ]] || die "$1 needs a value"
    option[${1#--}]=$2
    if [ "$1" = --data ]; then data=(); while [[ -n ${2-} && $2 != --* ]]; do data+=("$2"); shift; done; else shift; fi
    shift
done
[ $# = 0 ] || shift

for name in tp ep etp gpus train-iters seq-length micro-batch-size global-batch-size lora-rank save-interval; do
    [[ ${option[$name]-1} =~ ^[1-9][0-9]*$ ]] || die "--$name must be a whole number above 0, not '${option[$name]}'"
done
precision=${option[precision]}
[[ $precision =~ ^(bf16|fp16|fp32)$ ]] || die "--precision must be bf16, fp16 or fp32, not '$precision'"
[[ -n ${option[train-iters]-} || " $* " == *" --train-samples "* ]] || die "--train-iters is missing"
[ -n "${option[data]-}" ] || die "--data is missing"
[[ "$program ${option[data]}" != "finetune.py mock" ]] || die "--data mock makes up documents, not conversations"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/platform.sh"
# A run without checkpoints would begin anew each time. With a range every node that is lost takes one of the others'.
restarts=$([[ $nodes == *:* ]] && echo 20 || echo 3)
restarts=${option[max-restarts]-$([ -n "${option[save]-}" ] && echo "$restarts" || echo 0)}
[[ $restarts =~ ^[0-9]+$ ]] || die "--max-restarts must be a whole number, not '$restarts'"

case ${option[model]+model}${option[checkpoint]+checkpoint}${option[preset]+preset} in
    model)
        flags=(--load-hf "${option[model]}")
        [ -f "${option[model]}/config.json" ] || die "--model ${option[model]} holds no config.json of Hugging Face's"
        ;;
    checkpoint) flags=(--pretrained-checkpoint "${option[checkpoint]}" --use-checkpoint-args) ;;
    preset) flags=(--preset "${option[preset]}") ;;
    *) die "give one of --model, --checkpoint and --preset" ;;
esac
if [ -n "${option[tokenizer]-}" ]; then
    flags+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "${option[tokenizer]}")
elif [ -z "${option[model]-}" ]; then
    [ "${option[data]}" = mock ] || die "--tokenizer is missing: only a --model brings one"
    flags+=(--tokenizer-type NullTokenizer)
fi
if [ "${option[data]}" = mock ]; then flags+=(--mock-data); else flags+=(--data-path "${data[@]}"); fi

if [ -z "${option[lr]-}" ]; then
    [ -z "${option[preset]-}" ] || die "--preset needs --lr: the default is for trained weights"
    if [ -n "${option[lora-rank]-}" ]; then option[lr]=$lora_lr; else option[lr]=$lr; fi
fi
if [ -n "${option[save]-}" ]; then
    flags+=(--load "${option[save]}" --save "${option[save]}")
    option[save-interval]=${option[save-interval]-500}
fi
for name in $same; do [ -z "${option[$name]-}" ] || flags+=("--$name" "${option[$name]}"); done
flags+=(--lr-decay-style cosine --adam-beta2 0.95 --weight-decay 0.1)
flags+=(--log-interval 10 --overlapped-distributed-optimizer)
[[ " $*" == *" --lr-warmup-"* ]] || flags+=(--lr-warmup-fraction 0.03)
[ $precision = fp32 ] || flags+=("--$precision")
flags+=(--tensor-model-parallel-size "${option[tp]}")
[ "${option[tp]}" = 1 ] || flags+=(--sequence-parallel)
[ -z "${option[ep]-}" ] || flags+=(--expert-model-parallel-size "${option[ep]}")
[ -z "${option[etp]-}" ] || flags+=(--expert-tensor-parallel-size "${option[etp]}")
[ -z "${family_flags-}" ] || flags+=("${family_flags[@]}")

environment=()
launcher=(--nproc-per-node "$gpus" --max-restarts "$restarts")
if [ "$nodes" = 1 ]; then
    launcher+=(--standalone)
    [ -z "${PET_NNODES-}" ] || launcher+=(--nnodes 1) # which torchrun would read
else
    launcher+=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$master")
    if [[ $nodes == *:* ]]; then
        flags+=(--elastic-world)
        # A silent node is lost after 10 s, and an attempt begins with MAX nodes, or 5 s after the last of MIN has come.
        # With torchrun's own 15 s and 30 s each lost node costs half a minute more.
        meeting_conf+=${meeting_conf:+,}keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=5
    fi
    launcher+=(--rdzv-id "${SLURM_JOB_ID:-megatron}" "${meeting[@]}")
    [ -z "$meeting_conf" ] || launcher+=(--rdzv-conf "$meeting_conf")
    # Or torchrun keeps the address of the first attempt's store, and a host that comes back cannot join.
    environment=(env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
fi
[ -z "$platform" ] || echo "$platform: $job"
command=("${environment[@]}" torchrun "${launcher[@]}" "$root/$program" "${flags[@]}" "$@")
printf '%q ' "${command[@]}" && echo
[ -n "$dry_run" ] || source "$root/examples/run.sh"
