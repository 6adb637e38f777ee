# shellcheck shell=bash
# Helper jobs of a run: rollout servers, evaluations, conversions. They do not change its state and budgets.

bapo_begin_helper() {  # RECIPE [flags of bapo train]
    [[ -n ${1:-} && $1 != -* ]] || bapo_refuse "usage: sbatch slurm/rollout.sbatch RECIPE --run-dir RUN"
    bapo_enter "$(bapo_run_directory "$@")"
    bapo_forget_engines
    bapo_event rollout_start "nodes=$(bapo_nodes 0 | paste -sd' ')"
}

bapo_enter() {  # run directory
    cd "$BAPO_ROOT" || exit 2
    BAPO_RUN=$1
    BAPO_TRAINER=another  # may be writing events: repair nothing
    bapo_check_numbers
    bapo_check_limits
    bapo_open_logs
    bapo_load_modules
    bapo_rendezvous
    bapo_export
}

bapo_wait_helper() {  # pid of an srun: end it at a signal, else its exit code
    trap 'kill -TERM "$1" 2>/dev/null' TERM USR1
    while kill -0 "$1" 2>/dev/null; do builtin wait "$1"; done
    builtin wait "$1"
}

bapo_run_command() {  # name of the log, RUN, command: run it in one srun
    local name=$1 run=${2:-} argument arguments=() code
    (($# >= 3)) || bapo_refuse "usage: sbatch slurm/$name.sbatch RUN COMMAND [ARGUMENTS]"
    [[ -d $run ]] || bapo_refuse "run directory $run does not exist"
    shift 2
    for argument in "$@"; do
        argument=${argument//\{shard\}/${BAPO_SHARD:-0}}
        arguments+=("${argument//\{shards\}/${BAPO_SHARDS:-1}}")
    done
    bapo_enter "$(cd "$run" && pwd)"
    bapo_srun_flags 0 "$name"
    srun "${bapo_flags[@]}" "--output=$BAPO_LOGS/$name-%N-${BAPO_SHARD:-0}.log" \
        bash "$BAPO_SLURM/task.sh" command "${arguments[@]}" &
    bapo_wait_helper "$!"
    code=$?
    bapo_event "${name}_done" "exit_code=$code" "shard=${BAPO_SHARD:-0}"
    return "$code"
}

# Number of this array element, and of all: the elements of --array=0-N. With --array=3 Slurm counts one, and
# the harness would do a part of another size than the first time: then BAPO_SHARDS must say how many.
bapo_shard() {
    export BAPO_SHARD=${SLURM_ARRAY_TASK_ID:-0} BAPO_SHARDS=${BAPO_SHARDS:-${SLURM_ARRAY_TASK_COUNT:-1}}
    [[ $BAPO_SHARDS =~ ^[1-9][0-9]*$ ]] || bapo_refuse "BAPO_SHARDS=$BAPO_SHARDS must be a whole number"
    ((BAPO_SHARD < BAPO_SHARDS)) || bapo_refuse "element $BAPO_SHARD of $BAPO_SHARDS: arrays begin at 0;" \
        "to repeat some elements say how many there were, e.g. BAPO_SHARDS=8 sbatch --array=$BAPO_SHARD ..."
}

bapo_pick_evaluation() {  # STEPS SUITES element: its step and its suite, or an error message
    local steps suites
    IFS=, read -ra steps <<<"$1"
    IFS=, read -ra suites <<<"$2"
    if (($3 >= ${#steps[@]} * ${#suites[@]})); then
        echo "element $3: ${#steps[@]} steps and ${#suites[@]} suites make" \
            "--array=0-$((${#steps[@]} * ${#suites[@]} - 1))"
        return 1
    fi
    echo "${steps[$3 / ${#suites[@]}]} ${suites[$3 % ${#suites[@]}]}"
}
