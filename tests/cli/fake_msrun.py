"""Behaves as msrun 2.10.0 does, without importing mindspore: environment, sessions, polling, log files."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def start(args, role, rank, log_name, **options):
    environment = {**os.environ, "MS_ROLE": role, "MS_WORKER_NUM": str(args.worker_num)}
    environment["RANK_ID"] = str(rank or 0)
    if rank is not None:
        environment["MS_NODE_ID"] = str(rank)
    with (Path(args.log_dir) / log_name).open("w") as log:
        command = [args.task_script, *args.task_script_args]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, **options)


def main():
    parser = argparse.ArgumentParser()
    for name in ("worker_num", "local_worker_num", "node_rank", "cluster_time_out", "master_port"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("master_addr", "log_dir", "join", "tail_worker_log"):
        parser.add_argument(f"--{name}")
    parser.add_argument("task_script")
    parser.add_argument("task_script_args", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    assert args.join == "True"
    scheduler = start(args, "MS_SCHED", None, "scheduler.log") if args.node_rank == 0 else None
    first = args.node_rank * args.local_worker_num
    workers = [
        start(args, "MS_WORKER", rank, f"worker_{rank}.log", preexec_fn=os.setsid)
        for rank in range(first, first + args.local_worker_num)
    ]
    while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
        time.sleep(1)
    failed = any(worker.poll() for worker in workers)
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
    if scheduler is not None:
        failed = scheduler.wait() != 0 or failed
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
