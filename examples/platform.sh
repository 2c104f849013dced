# Reads from the environment how many nodes a job has, which of them this one is, how many processes belong on it, and
# where the nodes meet. launch.sh sources this file behind its options, which win. Sets `platform` (empty: none), `nodes`,
# `gpus`, `master`, `job` in words, and `meeting`: further flags of torchrun about the place where the nodes meet, with
# `meeting_conf`, the value of its --rdzv-conf.

# A platform is recognised by one of its first two variables, and the first row counts. Launchers that run inside others
# stand first: mpirun in a job of Slurm has the variables of both. A step of srun may have fewer nodes than its job.
slurm=JOB
[ -z "${SLURM_STEP_NODELIST-}" ] || slurm=STEP
# platform, number of nodes, number of this node, processes on it, host of node 0, port
platforms="\
torchrun   PET_NNODES               PET_NODE_RANK        PET_NPROC_PER_NODE         PET_MASTER_ADDR         PET_MASTER_PORT
OpenMPI    OMPI_COMM_WORLD_SIZE     OMPI_COMM_WORLD_RANK NPROC_PER_NODE             MASTER_ADDR             MASTER_PORT
SkyPilot   SKYPILOT_NUM_NODES       SKYPILOT_NODE_RANK   SKYPILOT_NUM_GPUS_PER_NODE SKYPILOT_NODE_IPS       MASTER_PORT
Slurm      SLURM_${slurm}_NUM_NODES SLURM_NODEID         SLURM_GPUS_ON_NODE         SLURM_${slurm}_NODELIST MASTER_PORT
PyTorchJob WORLD_SIZE               RANK                 NPROC_PER_NODE             MASTER_ADDR             MASTER_PORT"

# Pods start minutes apart, while images are pulled, and torchrun would wait one minute for node 0.
pods=,read_timeout=300

# What is special about each: it may change `host`, which has the value of the table's variable, and the others.
read_torchrun() {
    [ -n "$master" ] || [[ ${PET_RDZV_BACKEND-c10d} =~ ^(c10d|static)$ ]] ||
        die "PET_RDZV_BACKEND is '$PET_RDZV_BACKEND', and the nodes meet by c10d: give --master HOST:PORT"
    master=${master:-${PET_RDZV_ENDPOINT-}} patience=$pods
}
read_OpenMPI() {
    one_copy "mpirun --map-by ppr:1:node" OMPI_COMM_WORLD_LOCAL_SIZE
    # The user chose this host, which need not be node 0.
    master=${master:-${host:+$host:${MASTER_PORT:-29500}}}
}
read_SkyPilot() {
    local addresses
    mapfile -t addresses <<<"$host"
    [ ${#addresses[@]} = "$nodes" ] || [ -n "${option[nodes]-}" ] ||
        die "SKYPILOT_NODE_IPS has ${#addresses[@]} addresses, but SKYPILOT_NUM_NODES is $nodes"
    host=${addresses[0]}
    # Other nodes may be unable to resolve the name of this one.
    [ -z "${addresses[${rank:-0}]-}" ] || meeting=(--local-addr "${addresses[${rank:-0}]}")
}
read_Slurm() {
    local hosts=()
    [ $slurm = STEP ] || [ "$nodes" = 1 ] ||
        die "Slurm's job has $nodes nodes, but srun did not start this script: use examples/slurm/launch.sbatch," \
            "'srun --ntasks-per-node=1', or --nodes 1 for this node alone"
    one_copy "srun --ntasks-per-node=1" SLURM_STEP_TASKS_PER_NODE
    if [ "$nodes" = 1 ] || [ -n "$master" ]; then return; fi
    mapfile -t hosts < <(scontrol show hostnames "$host" 2>&1)
    [[ ${hosts[0]-} =~ ^[^\ ]+$ ]] ||
        die "'scontrol show hostnames $host' names no host (${hosts[0]-no answer}): give --master HOST:PORT"
    host=${hosts[0]}
}
read_PyTorchJob() {
    [ -z "${LOCAL_RANK-}" ] ||
        die "LOCAL_RANK=$LOCAL_RANK with RANK and WORLD_SIZE belongs to one of several processes on this node: start" \
            "the script once on each node, or unset all three"
    [ -z "${DLC_JOB_ID-}${KUBERNETES_CONTAINER_RESOURCE_GPU-}" ] || platform=PAI-DLC
    gpus=${gpus:-${KUBERNETES_CONTAINER_RESOURCE_GPU-}} patience=$pods
}

one_copy() { # COMMAND NAME: torchrun starts the processes of a node, so another launcher must not
    [[ ${!2:-1} =~ ^1(\(x[0-9]+\))?$ ]] || die "$2 is ${!2}, but a node runs one copy of this script: start it with $1"
}

read_platform() { # the five variables of the platform
    local host=${!4-} rank=${!2-} patience=""
    nodes=${nodes:-${!1-}} gpus=${gpus:-${!3-}}
    [ -n "$nodes" ] || die "$platform sets $2=$rank, but not $1: set it, or give --nodes"
    [[ $nodes =~ ^([0-9]+:)?[1-9][0-9]*$ ]] || die "$platform's $1 must be a number of nodes, not '$nodes'"
    [[ $rank =~ ^(0|[1-9][0-9]*)?$ ]] || die "$platform's $2 must be the number of this node, not '$rank'"
    "read_$platform"
    [[ ${gpus:=8} =~ ^([1-9][0-9]*|auto|gpu|cpu)$ ]] || die "$platform's $3 must be a number of processes, not '$gpus'"
    job="1 node, $gpus processes"
    [ "$nodes" != 1 ] || return 0
    if [ -z "$master" ]; then
        [ -n "$rank" ] || die "$platform sets $1=$nodes, but not $2: set it, or give --master HOST:PORT"
        [ "$rank" -lt "${nodes#*:}" ] || die "$platform's $2 is $rank, but nodes are numbered from 0 to $1=$nodes less 1"
        [ -n "$host" ] || die "$platform sets $1=$nodes, but not $4, where they meet: set it, or give --master HOST:PORT"
        master=$host:${!5:-29500}
        meeting_conf=is_host=$((rank == 0))$patience
    fi
    job="$nodes nodes${rank:+, of which this is number $rank}, $gpus processes on each; they meet at $master"
}

nodes=${option[nodes]-} gpus=${option[gpus]-} master=${option[master]-} meeting=() meeting_conf="" job=""
[[ -z $nodes || ($nodes =~ ^([1-9][0-9]*:)?[1-9][0-9]*$ && ${nodes%:*} -le ${nodes#*:}) ]] ||
    die "--nodes must be a whole number above 0, or MIN:MAX, not '$nodes'"
while read -r platform variables; do
    read -ra variables <<<"$variables"
    [ -z "${!variables[0]-}${!variables[1]-}" ] || break
done <<<"$platforms"
[ -z "$platform" ] || read_platform "${variables[@]}"
nodes=${nodes:-1} gpus=${gpus:-8}
[[ $nodes != *:* || ${nodes%:*} != "${nodes#*:}" ]] || nodes=${nodes#*:}
[ "$nodes" = 1 ] || [ -n "$master" ] || die "--nodes $nodes needs --master HOST:PORT"
