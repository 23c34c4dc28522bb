"""``python -m ms_zero.cli.launch_guard PID COMMAND ...``: becomes COMMAND, and dies when process PID does.

PID is the launcher, the parent of this process. Its death must end msrun even when it is SIGKILL and the
launcher can clean up nothing; the kernel's parent-death signal survives the change to another program.

A batch system that ends a job sends SIGTERM to all its processes at once. msrun and the scheduler must
outlive the workers, which save first; ignoring the signal is inherited by them. Workers undo it.
"""

import os
import signal
import sys
from collections.abc import Sequence

from ms_zero.cli.launch_process import signal_at_parent_death


def main(arguments: Sequence[str]) -> None:
    """Ask for the signal, then replace this process; does not return."""
    launcher, *command = arguments
    signal_at_parent_death(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getppid() != int(launcher):  # it died before the request
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
