# shellcheck shell=bash disable=SC2034
# State file RUN/slurm.state: requeue counters and status that outlive a restart, as name=value lines.

BAPO_STATE_NAMES=(job restart status signal progress crash preemption time_limit node storage engines health
    health_idle idle excluded excluded_at end nodes)
declare -A bapo_state

bapo_read_state() {
    local name value
    bapo_state=([job]=$SLURM_JOB_ID [progress]=-1 [crash]=0 [preemption]=0 [time_limit]=0 [node]=0
        [storage]=0 [engines]=0 [health]=0 [health_idle]=0 [idle]=0 [excluded]='' [excluded_at]=-1
        [status]=new [signal]='')
    [[ -f $BAPO_RUN/$BAPO_STATE_FILE ]] || return 0
    # A person submitted another job: it begins with full budgets.
    grep -qx "job=$SLURM_JOB_ID" "$BAPO_RUN/$BAPO_STATE_FILE" || return 0
    while IFS='=' read -r name value; do
        [[ -z $value ]] || bapo_state[$name]=$value
    done <"$BAPO_RUN/$BAPO_STATE_FILE"
}

# Written aside, synced and renamed: a node may die at any moment, and the next start needs whole counters.
bapo_write_state() {  # [name=value ...] to change before it is written
    local field name temporary=$BAPO_RUN/.$BAPO_STATE_FILE.$SLURM_JOB_ID.tmp
    for field in "$@"; do bapo_state[${field%%=*}]=${field#*=}; done
    for name in "${BAPO_STATE_NAMES[@]}"; do
        printf '%s=%s\n' "$name" "${bapo_state[$name]:-}"
    done >"$temporary" && sync "$temporary" && mv -f "$temporary" "$BAPO_RUN/$BAPO_STATE_FILE"
}

# Progress of the newest checkpoint with a manifest, which is written last: 1,000,000 x steps + updates of the
# next step. 0 for none.
bapo_progress() {
    local folder progress newest=0
    for folder in "$BAPO_RUN/$BAPO_CHECKPOINTS_FOLDER"/*; do
        [[ ${folder##*/} =~ $BAPO_STEP_PATTERN && -s $folder/$BAPO_MANIFEST_FILE ]] || continue
        progress=$((10#${BASH_REMATCH[1]} * 1000000 + 10#${BASH_REMATCH[3]:-0}))
        ((progress > newest)) && newest=$progress
    done
    echo "$newest"
}

bapo_checkpoint_step() { echo $(($(bapo_progress) / 1000000)); }  # the last finished step of that checkpoint
