"""The ``ms-zero`` command line. Each command imports what it needs only when it runs."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ms_zero import __version__
from ms_zero.errors import UserError, one_line

_EPILOG = """\
A run file is YAML; "key=value" arguments override it, for example train.steps=20.
  ms-zero launch configs/runs/quickstart.yaml --workers 2
  ms-zero COMMAND --help tells the arguments of a command
"""


_MAX_MESSAGE = 300


class _Parser(argparse.ArgumentParser):
    """Turns a wrong argument into a UserError of one line."""

    def error(self, message: str) -> NoReturn:
        shown = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
        raise UserError(f"{one_line(shown)}; see '{self.prog} --help'")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 the user can fix it, 130 interrupted."""
    _prepare_streams()
    try:
        status = _dispatch(sys.argv[1:] if argv is None else argv)
        return _flushed(status)
    except UserError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        print("ms-zero: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout is gone
        abandon_stdout()
        return 1


def _prepare_streams() -> None:
    """Let no output fail for its text: a closed stream swallows it, odd characters are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123  (stays open as the stream does)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flushed(status: int) -> int:
    """Write out what is buffered; where stdout takes no more (a full disk), a good status turns bad."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        print(f"ms-zero: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return status or 1
    return status


def abandon_stdout() -> None:
    """Keep the interpreter from failing again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(error: UserError) -> None:
    """Print a user's error to stderr, one line per violation."""
    for line in str(error).splitlines():
        print(f"ms-zero: error: {one_line(line)}", file=sys.stderr)


def _dispatch(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero",
        usage="ms-zero [-h] [--version] COMMAND ...",
        description="Train large models with MindSpore.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ms-zero {__version__}")
    commands = "\n".join(f"{name:9s} {help_text}" for name, (help_text, _) in _COMMANDS.items())
    group = parser.add_argument_group("commands", commands)
    group.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    group.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    if not argv:
        raise UserError(f"no command given: use one of {', '.join(_COMMANDS)}; see 'ms-zero --help'")
    parsed = parser.parse_args(argv)
    _, command = _COMMANDS[parsed.command]
    return command(parsed.arguments)


def _train(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero train",
        description="Train in this process, or as one worker where msrun or 'ms-zero launch' started it.",
    )
    _add_run_arguments(parser)
    arguments = parser.parse_intermixed_args(argv)
    from ms_zero.cli.train import train

    return train(arguments.run, arguments.overrides)


def _launch(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero launch",
        description="Start a training run on several workers with msrun and watch over it.",
    )
    _add_run_arguments(parser)
    add = parser.add_argument
    add("--workers", type=int, required=True, metavar="N", help="number of workers, total over all nodes")
    add("--nodes", type=int, default=1, metavar="N", help="number of machines (default 1)")
    add("--node-rank", type=int, metavar="R", help="number of this machine, 0 on the master")
    add("--master", metavar="ADDR", help="name or address of the machine with node rank 0")
    add("--port", type=int, metavar="P", help="port of the master (one node: a free one; else 8118)")
    add(
        "--cluster-timeout",
        type=int,
        default=300,
        metavar="S",
        help="seconds that workers wait for each other at the start (default 300)",
    )
    arguments = parser.parse_intermixed_args(argv)
    from ms_zero.cli.launch import launch

    return launch(**vars(arguments))


def _lint(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero lint",
        description="List everything that is wrong or doubtful in a run file; status 2 if it is refused, 3 "
        "if only this version cannot run it.",
    )
    _add_run_arguments(parser)
    _add_workers(parser)
    arguments = parser.parse_intermixed_args(argv)
    from ms_zero.cli.run_file import lint

    return lint(arguments.run, arguments.overrides, arguments.workers)


def _explain(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero explain",
        description="Explain the id of a finding, a section or a key of run files; list them without a name.",
    )
    help_text = "for example MZ012, train or train.steps"
    parser.add_argument("topic", nargs="?", metavar="NAME", help=help_text)
    arguments = parser.parse_args(argv)
    from ms_zero.cli.run_file import explain

    return explain(arguments.topic)


def _config(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero config",
        usage="ms-zero config show RUN.yaml [--workers N] [key=value ...]",
        description="Show the effective config of a run file: every value with its origin.",
    )
    parser.add_argument("action", choices=["show"], help="what to do")
    _add_run_arguments(parser)
    _add_workers(parser)
    arguments = parser.parse_intermixed_args(argv)
    from ms_zero.cli.run_file import show_config

    return show_config(arguments.run, arguments.overrides, arguments.workers)


def _doctor(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero doctor",
        description="Check this machine and installation, one line a check; status 1 if there is a problem.",
    )
    add = parser.add_argument
    add("--json", metavar="PATH", help="also write the results to this file")
    add("--no-collective", action="store_true", help="do not start two workers that communicate")
    add("--target", choices=["CPU", "Ascend", "GPU"], default="CPU", help="where they run (default CPU)")
    add("--timeout", type=int, default=120, metavar="S", help="limit of each slow check (default 120 s)")
    arguments = parser.parse_args(argv)
    from ms_zero.cli.doctor import doctor

    return doctor(
        json_path=arguments.json,
        collective=not arguments.no_collective,
        target=arguments.target,
        timeout_s=arguments.timeout,
    )


def _data(argv: Sequence[str]) -> int:
    from ms_zero.cli.data import add_actions, run_action

    parser = _Parser(prog="ms-zero data", description="Prepare and check data.")
    add_actions(parser)
    return run_action(parser.parse_args(argv))


def _translate(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero translate",
        usage="ms-zero translate KIND FILE [-o OUT] [--workers N] [--include NAME] [--skip-unknown]",
        description="Write a run file with the settings of another tool's config, or the reverse; every key "
        "is translated or listed with the reason why not.",
    )
    kinds = ("deepspeed", "fsdp", "mindformers", "megatron", "to-deepspeed")
    add = parser.add_argument
    add("kind", choices=kinds, metavar="KIND", help=f"one of {', '.join(kinds)}")
    add("file", metavar="FILE", help="the other tool's config; for to-deepspeed a run file")
    add("overrides", nargs="*", default=[], metavar="key=value", help="overrides (to-deepspeed only)")
    add("-o", "--output", metavar="OUT", help="a new file for the result (default: print it)")
    add("--include", action="append", default=[], metavar="NAME", help="include this in the run file")
    add("--skip-unknown", action="store_true", help="leave out keys that the tool does not know")
    _add_workers(parser)
    arguments = parser.parse_intermixed_args(argv)
    from ms_zero.cli.translate import Order, translate

    values = vars(arguments)
    return translate(Order(includes=values.pop("include"), **values))


def _plan(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero plan",
        description="Find the fastest layouts of a model on a cluster that fit, and say why; status 2 if "
        "none does. Predictions, not measurements; no device is needed.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="preset, run file, or Hugging Face config.json")
    add("--cluster", required=True, metavar="NAME", help="entry of the device catalogue, or a file like one")
    add("--devices", type=int, required=True, metavar="N", help="number of devices")
    add("--seq", type=int, required=True, metavar="N", help="tokens of a sample")
    add("--tokens", metavar="N", help="tokens to train on, for example 2T")
    add("--global-batch", type=int, metavar="N", help="samples of a step (default: by the model's size)")
    add("--precision", default="bf16", metavar="NAME", help="bf16 (default), fp16 or fp32")
    add("--no-offload", action="store_true", help="keep everything in device memory")
    help_text = "logs/metrics-00000.jsonl of a run: correct the memory model by it (may be repeated)"
    add("--calibrate", action="append", default=[], metavar="PATH", help=help_text)
    add("--top", type=int, default=5, metavar="N", help="layouts to show (default 5)")
    add("--write", metavar="RUN.yaml", help="write a run file for the recommended layout")
    add("--html", metavar="PATH", help="write a page with charts")
    add("--json", dest="json_path", metavar="PATH", help="write the answer as JSON")
    arguments = parser.parse_args(argv)
    from ms_zero.cli.plan import plan

    return plan(**vars(arguments))


def _estimate(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero estimate",
        description="Predict memory and time of a run file; status 2 if it does not fit.",
    )
    _add_run_arguments(parser)
    _add_workers(parser)
    add = parser.add_argument
    add("--cluster", metavar="NAME", help="catalogue entry (default: hardware.device of the run file)")
    help_text = "logs/metrics-00000.jsonl of a run: correct the memory model by it (may be repeated)"
    add("--calibrate", action="append", default=[], metavar="PATH", help=help_text)
    help_text = "list remedies: memory, speed, convergence or nan"
    add("--diagnose", metavar="PROBLEM", help=help_text)
    arguments = parser.parse_intermixed_args(argv)
    from ms_zero.cli.estimate import estimate

    return estimate(**vars(arguments))


def _schedule(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero schedule",
        description="Show a pipeline schedule: timeline, bubble, and how many microbatches each rank holds.",
    )
    add = parser.add_argument
    add("--schedule", dest="name", default="1f1b", metavar="NAME", help="gpipe, 1f1b, interleaved or zb-h1")
    add("--pp", type=int, default=4, metavar="N", help="ranks (default 4)")
    add("--microbatches", type=int, default=8, metavar="N", help="microbatches of a step (default 8)")
    add("--virtual", type=int, default=1, metavar="N", help="virtual stages of a rank (default 1)")
    add("--csv", metavar="PATH", help="read the schedule from a file: a row a rank, cells such as 0F0")
    add("--times", nargs=3, default=("1", "1", "1"), metavar="T", help="times of F, B and W (default 1 1 1)")
    add("--transfer", default="0", metavar="T", help="time of a message (default 0)")
    add("--width", type=int, default=120, metavar="N", help="characters of a line (default 120)")
    add("--write", metavar="PATH", help="write the schedule as CSV")
    add("--trace", metavar="PATH", help="write a Chrome trace (Perfetto) as JSON")
    add("--figure", metavar="PATH", help="draw a .png or .svg with matplotlib")
    arguments = parser.parse_args(argv)
    from ms_zero.cli.schedule import schedule

    return schedule(**vars(arguments))


def _graph(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="ms-zero graph",
        usage="ms-zero graph inspect {RUN.yaml | FILE.py:FUNCTION} --rank R [--workers N] [key=value ...]",
        description="Show what a rank of a cluster would communicate in a step of the graph engine, as "
        "MindSpore's compiler inserts it. Neither devices nor a cluster are needed. FUNCTION returns the "
        "result of ms_zero.graph.parallelise and takes the key=value pairs as arguments.",
    )
    parser.add_argument("action", choices=["inspect"], help="what to do")
    _add_run_arguments(parser)
    _add_workers(parser)
    add = parser.add_argument
    add("--rank", type=int, default=0, metavar="R", help="whose graph it is (default 0)")
    add("--keep", metavar="PATH", help="write MindSpore's text of the graph to this file")
    add("--json", dest="json_path", metavar="PATH", help="also write every operation as JSON")
    arguments = vars(parser.parse_intermixed_args(argv))
    from ms_zero.cli.graph import inspect

    arguments.pop("action")
    return inspect(arguments.pop("run"), arguments.pop("overrides"), **arguments)


def _add_workers(parser: argparse.ArgumentParser) -> None:
    help_text = "number of workers (default: the fewest that the degrees and batch sizes allow)"
    parser.add_argument("--workers", type=int, metavar="N", help=help_text)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN.yaml", help="the run file")
    help_text = "overrides, for example train.steps=20"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help_text)


_COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "train": ("train in this process (or as one worker of msrun)", _train),
    "launch": ("train on several workers, on one or more machines", _launch),
    "lint": ("list all that is wrong or doubtful in a run file", _lint),
    "explain": ("explain the id of a finding, a section or a key", _explain),
    "config": ("show the effective config and where each value is from", _config),
    "translate": ("write a run file from a config of DeepSpeed, FSDP, MindFormers or Megatron", _translate),
    "plan": ("find the fastest layouts of a model on a cluster that fit", _plan),
    "estimate": ("predict memory and time of a run file", _estimate),
    "schedule": ("show a pipeline schedule: timeline, bubble, memory", _schedule),
    "graph": ("show what a rank of the graph engine would communicate", _graph),
    "data": ("encode text to token files, or check data", _data),
    "doctor": ("check this machine and installation", _doctor),
}
