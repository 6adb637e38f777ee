# shellcheck shell=bash
# Settings of a job: environment variables with their defaults. `bapo submit` sets them from the cluster file;
# with plain sbatch set them in the shell, e.g. `BAPO_CONTAINER=... sbatch slurm/train.sbatch RECIPE`.

BAPO_ROOT=${BAPO_ROOT:-$PWD}                        # where recipes' paths begin; tasks start here
BAPO_SLURM=${BAPO_SLURM:-$BAPO_ROOT/slurm}
BAPO_PYTHON=${BAPO_PYTHON:-python}                  # interpreter with bapo-megatron, on the nodes
BAPO_MODULES=${BAPO_MODULES:-}                      # environment modules, loaded before anything starts
BAPO_CONTAINER=${BAPO_CONTAINER:-}                  # image for pyxis; none: no container
BAPO_MOUNTS=${BAPO_MOUNTS:-}                        # HOST:CONTAINER,... for pyxis
BAPO_TASK_SETTINGS=${BAPO_TASK_SETTINGS:-}          # `export` lines of every task, stronger than the image's
BAPO_LEAD_S=${BAPO_LEAD_S:-600}                     # before the end of the job, to save and stop
BAPO_MARGIN_S=${BAPO_MARGIN_S:-60}                  # before the end of the job, to kill ranks that still save
BAPO_WAIT_S=${BAPO_WAIT_S:-900}                     # for the other ranks, once the first has ended
BAPO_CRASH_WAIT_S=${BAPO_CRASH_WAIT_S:-60}         # for the others, once one of them has failed
BAPO_DISK_WAIT_S=${BAPO_DISK_WAIT_S:-300}           # at the start, for a file system that fails
BAPO_SLURM_WAIT_S=${BAPO_SLURM_WAIT_S:-300}         # for an answer of Slurm, whose controller may be busy
BAPO_MAX_CRASHES=${BAPO_MAX_CRASHES:-20}            # budgets of one job, each of its own kind
BAPO_MAX_PREEMPTIONS=${BAPO_MAX_PREEMPTIONS:-100}
BAPO_MAX_TIME_LIMITS=${BAPO_MAX_TIME_LIMITS:-500}
BAPO_MAX_NODE_FAILURES=${BAPO_MAX_NODE_FAILURES:-20}
BAPO_MAX_IDLE=${BAPO_MAX_IDLE:-3}                   # ends that the run did not cause, without a checkpoint,
                                                    # and exclusions of bad nodes after the first
BAPO_SERVERS_PER_NODE=${BAPO_SERVERS_PER_NODE:-1}   # SGLang servers on a rollout node
BAPO_SERVER_GPUS=${BAPO_SERVER_GPUS:-8}             # GPUs of each: rollout.sglang.tensor
BAPO_SERVER_HOST=${BAPO_SERVER_HOST:-}              # address that they listen on; none: the node's own
BAPO_ENGINES=${BAPO_ENGINES:-}                      # servers to wait for; none: all of this job's own
BAPO_ENGINES_WAIT_S=${BAPO_ENGINES_WAIT_S:-1200}    # then the run starts with those that are ready
BAPO_ENGINES_LOAD_S=${BAPO_ENGINES_LOAD_S:-0}       # longer while none is ready; and until one should be
BAPO_HEALTH=${BAPO_HEALTH:-on}                      # off: no probe of the nodes
BAPO_HEALTH_WAIT_S=${BAPO_HEALTH_WAIT_S:-600}       # for the whole probe, the unpacking of an image included
BAPO_HEALTH_FLAGS=${BAPO_HEALTH_FLAGS:-}            # more flags of probe.py, e.g. --memory-gb 500
BAPO_FRESH_S=${BAPO_FRESH_S:-60}                    # a server that is silent for longer is gone
BAPO_LOOK_S=${BAPO_LOOK_S:-10}                      # between two checks of the rollout servers
BAPO_END_LOOK_S=${BAPO_END_LOOK_S:-60}              # between two looks at the job's time limit

bapo_refuse() {  # message: refuse a job that cannot run as asked
    echo "error: $*" >&2
    exit 2
}

bapo_check_numbers() {
    local name
    for name in LEAD_S MARGIN_S WAIT_S CRASH_WAIT_S DISK_WAIT_S SLURM_WAIT_S MAX_CRASHES MAX_PREEMPTIONS \
        MAX_TIME_LIMITS MAX_NODE_FAILURES MAX_IDLE SERVERS_PER_NODE SERVER_GPUS ENGINES_WAIT_S \
        ENGINES_LOAD_S HEALTH_WAIT_S FRESH_S LOOK_S END_LOOK_S; do
        local variable=BAPO_$name
        [[ ${!variable} =~ ^[0-9]+$ ]] || bapo_refuse "$variable=${!variable} must be a whole number"
    done
}

# Slurm gives a job the limits of the shell that submitted it, and login nodes limit programs.
bapo_check_limits() {
    local flag found
    for flag in -t -v; do
        found=$(ulimit "$flag")
        [[ $found = unlimited ]] || bapo_refuse "ulimit $flag is $found in this job (-t: seconds of a" \
            "processor, -v: kB of memory), as in the shell that submitted it: submit with sbatch" \
            "--propagate=NONE; in a cluster file, [sbatch] propagate = \"NONE\""
    done
}

bapo_run_directory() {  # recipe and flags of `bapo train`: where the run is
    local recipe=$1 run=
    shift
    while (($#)); do
        case $1 in
            --run-dir=* | --run_dir=* | run-dir=* | run_dir=*) run=${1#*=} ;;
            --run-dir | --run_dir) run=${2:-} ;;
        esac
        shift
    done
    recipe=${recipe##*/}
    run=${run:-runs/${recipe%.py}}  # given to every task, so that shell and trainer agree
    [[ $run = /* ]] || run=$BAPO_ROOT/$run
    echo "$run"
}

bapo_load_modules() {
    local module
    [[ -n $BAPO_MODULES ]] || return 0
    # A batch shell is not a login shell: it may lack the function `module`.
    type module >/dev/null 2>&1 || . /etc/profile.d/modules.sh 2>/dev/null ||
        . /etc/profile.d/lmod.sh 2>/dev/null
    type module >/dev/null 2>&1 || bapo_refuse "BAPO_MODULES=$BAPO_MODULES, but there is no command 'module'"
    for module in $BAPO_MODULES; do
        module load "$module" || bapo_refuse "module load $module failed"
    done
}

# srun waits for ranks that it cannot kill for Slurm's KillWait, and the requeue comes after that. But ranks
# must be told to save before they are killed: of a lead below the margin, half stays for the save.
bapo_fit_margin() {
    local kill_wait
    kill_wait=$(scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *\([1-9][0-9]*\) .*/\1/p')
    ((BAPO_MARGIN_S >= ${kill_wait:-0} + 15)) || BAPO_MARGIN_S=$((kill_wait + 30))
    ((BAPO_MARGIN_S < BAPO_LEAD_S)) || BAPO_MARGIN_S=$((BAPO_LEAD_S / 2))
}
