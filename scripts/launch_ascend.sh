#!/usr/bin/env bash
# Starts one node of a training job on an Ascend cluster. Run the same line on every node:
#
#   bash scripts/launch_ascend.sh RUN.yaml --master ADDR --nodes N [--node-rank R] [--workers-per-node 8]
#                                 [--port 8118] [key=value ...]
#
# The node rank comes from --node-rank, else from SLURM_NODEID, SLURM_PROCID or VC_TASK_INDEX (Slurm, Volcano).
# The CANN environment is sourced when ASCEND_HOME_PATH is not set yet. MS_ZERO names the command to run
# (default: the repository's .venv, else ms-zero from PATH).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

fail() {
    printf 'launch_ascend: error: %s\n' "$*" >&2
    exit 2
}

usage() {
    sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit "$1"
}

nodes=1 node_rank="${SLURM_NODEID:-${SLURM_PROCID:-${VC_TASK_INDEX:-}}}"
workers_per_node=8 master="" port="" arguments=()
while [ "$#" -gt 0 ]; do
    case "$1" in
        -h | --help) usage 0 ;;
        --master | --nodes | --node-rank | --workers-per-node | --port)
            [ "$#" -ge 2 ] || fail "$1 needs a value"
            case "$1" in
                --master) master="$2" ;;
                --nodes) nodes="$2" ;;
                --node-rank) node_rank="$2" ;;
                --workers-per-node) workers_per_node="$2" ;;
                --port) port="$2" ;;
            esac
            shift 2
            ;;
        --*) fail "unknown option $1; see --help" ;;
        *)
            arguments+=("$1")
            shift
            ;;
    esac
done
[ "${#arguments[@]}" -ge 1 ] || fail "no run file given; see --help"
for number in "$nodes" "$workers_per_node"; do
    [[ "$number" =~ ^[1-9][0-9]*$ ]] || fail "--nodes and --workers-per-node are positive whole numbers, not '$number'"
done
if [ "$nodes" -gt 1 ]; then
    [ -n "$master" ] || fail "--nodes $nodes needs --master: the address of the node with rank 0"
    [ -n "$node_rank" ] || fail "--nodes $nodes needs --node-rank (no Slurm or Volcano variable is set)"
fi

if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    cann="${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit}/set_env.sh"
    [ -f "$cann" ] || fail "CANN was not found ($cann): source its set_env.sh first, or set ASCEND_TOOLKIT_HOME"
    set +u # vendor scripts use unset variables
    # shellcheck disable=SC1090
    source "$cann"
    set -u
fi
# A compile of the first step on one node may keep the others waiting for minutes.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1200}"
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-1800}"

command="${MS_ZERO:-}"
if [ -z "$command" ]; then
    command="$root/.venv/bin/ms-zero"
    [ -x "$command" ] || command="$(command -v ms-zero)" || fail "ms-zero is not installed: pip install ."
fi
options=(--workers "$((nodes * workers_per_node))" --nodes "$nodes" --cluster-timeout 900)
[ "$nodes" -eq 1 ] || options+=(--node-rank "$node_rank")
[ -z "$master" ] || options+=(--master "$master")
[ -z "$port" ] || options+=(--port "$port")
exec "$command" launch "${arguments[0]}" "${options[@]}" hardware.target=Ascend "${arguments[@]:1}"
