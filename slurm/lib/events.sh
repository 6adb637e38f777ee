# shellcheck shell=bash
# Event log: lines of RUN/events.jsonl, in the trainer's format: {"time": ..., "kind": ..., fields}.

bapo_json() {  # text as a JSON string of valid UTF-8, cut so that a line stays one write
    local LC_ALL=C text=${1:0:800}  # bytes, in every locale: the cut may lie within a character
    text=$(iconv -c -f UTF-8 -t UTF-8 <<<"$text" 2>/dev/null)
    text=${text//\\/\\\\}
    text=${text//\"/\\\"}
    text=${text//$'\n'/\\n}
    text=${text//$'\t'/\\t}
    text=$(LC_ALL=C tr -d '\000-\037' <<<"$text")
    printf '"%s"' "$text"
}

bapo_number() { [[ $1 =~ ^(0|-?[1-9][0-9]*|-?[0-9]+\.[0-9]+)$ ]]; }

# KIND [name=value ...]. One append of one line: the trainer writes to the same file.
bapo_event() {
    local kind=$1 field name value line
    shift
    line="{\"time\": \"$(date -u +%Y-%m-%dT%H:%M:%S.%3N+00:00)\", \"kind\": \"$kind\""
    for field in "$@" "job=$SLURM_JOB_ID" "restart=$BAPO_RESTART"; do
        name=${field%%=*} value=${field#*=}
        bapo_number "$value" || value=$(bapo_json "$value")
        line+=", \"$name\": $value"
    done
    bapo_mend_events
    printf '%s}\n' "$line" >>"$BAPO_RUN/$BAPO_EVENTS_FILE"
}

# Cut off the half line that a killed trainer may have left; not while a trainer runs that may be writing it.
bapo_mend_events() {
    local file=$BAPO_RUN/$BAPO_EVENTS_FILE whole
    [[ -z ${BAPO_TRAINER:-} && -s $file && -n $(tail -c 1 "$file") ]] || return 0
    whole=$(head -n -1 "$file" | wc -c)
    truncate -s "$whole" "$file"
}
