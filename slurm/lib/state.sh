# shellcheck shell=bash disable=SC2034
# RUN/slurm.state: what has to outlive a restart, as name=value lines. Written aside, then renamed.

BAPO_STATE_NAMES=(job restart status signal step_requeue crash preemption time_limit node engines idle
    excluded end nodes)
declare -A bapo_state

bapo_read_state() {
    local name value
    bapo_state=([job]=$SLURM_JOB_ID [step_requeue]=-1 [crash]=0 [preemption]=0 [time_limit]=0 [node]=0
        [engines]=0 [idle]=0 [excluded]='' [status]=new [signal]='')
    [[ -f $BAPO_RUN/slurm.state ]] || return 0
    # Another job is another decision of a person: it begins with full budgets.
    grep -qx "job=$SLURM_JOB_ID" "$BAPO_RUN/slurm.state" || return 0
    while IFS='=' read -r name value; do bapo_state[$name]=$value; done <"$BAPO_RUN/slurm.state"
}

bapo_write_state() {  # [name=value ...] to change before it is written
    local field name temporary=$BAPO_RUN/.slurm.state.$SLURM_JOB_ID.tmp
    for field in "$@"; do bapo_state[${field%%=*}]=${field#*=}; done
    for name in "${BAPO_STATE_NAMES[@]}"; do
        printf '%s=%s\n' "$name" "${bapo_state[$name]:-}"
    done >"$temporary" && sync "$temporary" && mv -f "$temporary" "$BAPO_RUN/slurm.state"
}

bapo_checkpoint_step() {  # of the newest checkpoint with a manifest, which is written last; 0 for none
    local folder name newest=0
    for folder in "$BAPO_RUN"/checkpoints/step_*; do
        name=${folder##*/step_}
        [[ $name =~ ^[0-9]+$ && -s $folder/manifest.json ]] || continue
        ((10#$name > newest)) && newest=$((10#$name))
    done
    echo "$newest"
}
