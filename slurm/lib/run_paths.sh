# shellcheck shell=bash disable=SC2034
# Names in the run directory $BAPO_RUN: the mirror of bapo_megatron/runtime/run_paths.py (a test compares).

BAPO_EVENTS_FILE=events.jsonl
BAPO_STATE_FILE=slurm.state
BAPO_STOP_FILE=stop
BAPO_API_KEY_FILE=api_key
BAPO_LOGS_FOLDER=logs
BAPO_ENGINES_FOLDER=engines
BAPO_CHECKPOINTS_FOLDER=checkpoints
BAPO_JOB_END_FILE=end_time  # in the logs of a job's start
BAPO_MANIFEST_FILE=manifest.json
BAPO_STEP_PATTERN='^step_([0-9]{6,})(_update_([0-9]{3,}))?$'  # of a checkpoint: steps, updates of the next
