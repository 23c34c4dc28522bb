#!/usr/bin/env bash
# Sets up .venv if needed and runs the tests. Arguments go to pytest: bash scripts/test.sh tests/cli -k preflight
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
ms_zero_setup test
cd "$MS_ZERO_ROOT"
exec "$MS_ZERO_VENV/bin/python" -m pytest "$@"
