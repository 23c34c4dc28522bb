#!/usr/bin/env bash
# Sets up .venv, then trains a small GPT on the source text of Python's standard library with 2 workers.
#
#   bash scripts/quickstart.sh [--restart] [--workers N] [key=value ...]
#
# A run that was interrupted goes on from its last checkpoint. --restart begins afresh and keeps what was there
# under another name. key=value overrides configs/runs/quickstart.yaml, for example train.steps=20.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

run=configs/runs/quickstart.yaml

say() { printf '%s\n' "$*"; }

fail() {
    printf 'quickstart: error: %s\n' "$*" >&2
    exit 2
}

# Prints "OUTPUT_DIR<tab>DONE<tab>STEPS": steps done by the last checkpoint (0 without one) and steps wanted.
run_state() {
    "$MS_ZERO_VENV/bin/python" - "$workers" "$run" "$@" <<'PYTHON'
import sys
from pathlib import Path

from ms_zero.checkpoint import latest, open_checkpoint
from ms_zero.cli.main import print_error
from ms_zero.config import load_config
from ms_zero.errors import UserError

workers, run, *overrides = sys.argv[1:]
try:
    train = load_config(run, overrides, int(workers)).config.train
    path = latest(Path(train.output_dir) / "checkpoints")
    done = open_checkpoint(path).state["progress"]["step"] if path else 0
except UserError as error:
    print_error(error)
    sys.exit(2)
print(train.output_dir, done, train.steps, sep="\t")
PYTHON
}

restart=no workers=2 overrides=()
while [ "$#" -gt 0 ]; do
    case "$1" in
        -h | --help)
            sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --restart) restart=yes ;;
        --workers)
            [ "$#" -ge 2 ] || fail "--workers needs a number"
            workers="$2"
            shift
            ;;
        -*) fail "unknown option $1; see --help" ;;
        *) overrides+=("$1") ;;
    esac
    shift
done
[[ "$workers" =~ ^[1-9][0-9]*$ ]] || fail "--workers $workers: a positive whole number is needed"

ms_zero_setup base
cd "$MS_ZERO_ROOT"
state="$(run_state "${overrides[@]}")"
IFS=$'\t' read -r output_dir step steps <<<"$state"

if [ "$restart" = yes ] && [ -e "$output_dir" ]; then
    kept="$output_dir.$(date +%Y%m%d-%H%M%S)"
    mv "$output_dir" "$kept"
    say "starting afresh; the earlier run is kept in $kept"
    step=0
elif [ "$step" -ge "$steps" ]; then
    say "the run in $output_dir is finished: $step of $steps steps"
elif [ "$step" -gt 0 ]; then
    say "found an unfinished run in $output_dir: going on after step $step of $steps (--restart begins afresh)"
fi

if [ "$step" -lt "$steps" ]; then
    "$MS_ZERO_VENV/bin/ms-zero" launch "$run" --workers "$workers" "${overrides[@]}"
    state="$(run_state "${overrides[@]}")"
    IFS=$'\t' read -r output_dir step steps <<<"$state"
    if [ "$step" -lt "$steps" ]; then
        say "stopped after step $step of $steps; run this script again to go on"
        exit 0
    fi
fi

cat <<EOF

Checkpoints are in $output_dir/checkpoints, logs in $output_dir/logs. What to try next:

  source .venv/bin/activate
  ms-zero launch $run --workers $workers train.steps=$((2 * steps))    # train on from here
  ms-zero launch configs/runs/llama-tiny.yaml --workers $workers       # a small Llama
  ms-zero launch $run --workers $workers \\
      data.source=files 'data.files=[ms_zero/**/*.py]' train.output_dir=runs/mine    # any text files
  ms-zero launch --help                                        # more workers, more machines
  bash scripts/quickstart.sh --restart                         # this run again, from step 0
  bash scripts/test.sh                                         # the tests
EOF
