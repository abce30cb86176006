"""The commands: serve, doctor, status, drain, stop, keys, demo. Pool settings become flags by themselves (enginepool/config.py)."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from enginepool.errors import CallerError, EnginePoolError, ExitCode

EXIT_CODES = """\
exit codes: 0 ok · 2 usage · 3 no worker could boot · 4 no dispatcher there · 5 all workers failed later ·
6 vLLM missing · 7 drain limit reached · 130 interrupted ·
of run-batch: 1 some lines failed · 8 the output can't be written · 9 all lines failed"""


_serve_actions: list[argparse.Action] = []
WITH_SETTINGS = ("serve", "doctor", "run-batch")


class Parser(argparse.ArgumentParser):
    """Says where a flag of vLLM's belongs, and says it as JSON where the log is to be JSON."""

    is_json = False

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        wrong = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        flags = [flag for action in _serve_actions for flag in action.option_strings]
        if near := difflib.get_close_matches(wrong, flags, 1, 0.85):
            message += f"\n(did you mean {near[0]}?)"
        elif wrong.startswith("-") and (command := next((word for word in WITH_SETTINGS if word in sys.argv), None)):
            message += f"\n(vLLM's own flags go after `--`: enginepool {command} MODEL --workers 2 -- --max-model-len 1024)"
        _complain("error", message, f"{self.prog}: error: ")
        self.exit(ExitCode.USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments, vllm_flags = _split(arguments)
    Parser.is_json = arguments[:1] == ["serve"] and _wants_json(arguments[1:], os.environ)
    args = _build_parser(next(iter(arguments), "")).parse_args(arguments)
    if vllm_flags and args.command not in WITH_SETTINGS:
        print(f"enginepool {args.command}: error: only `serve`, `doctor` and `run-batch` take vLLM flags after `--`", file=sys.stderr)
        return ExitCode.USAGE
    if args.command != "serve":
        _raise_at_interrupt()
    try:
        return int(args.run(args, vllm_flags))
    except EnginePoolError as error:
        _complain("error", str(error), f"enginepool {args.command}: {'error: ' if isinstance(error, CallerError) else ''}")
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OK


def _raise_at_interrupt() -> None:
    """Undo what `__main__` has done for the time of the imports; a dispatcher looks after signals by itself."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _complain(level: Literal["warning", "error"], text: str, prefix: str) -> None:
    """One line on stderr, in the format of the log."""
    if Parser.is_json:
        from enginepool.dispatcher.log_lines import json_line

        print(json_line(time.time(), level, None, os.getpid(), text), file=sys.stderr)
    else:
        print(f"{prefix}{text}", file=sys.stderr)


def _wants_json(arguments: list[str], environ: Mapping[str, str]) -> bool:
    """Whether the log is JSON, found before anything is checked: what is wrong with the other settings is told so too."""
    from enginepool.config import read_toml

    probe = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    probe.add_argument("--log-format", default=environ.get("ENGINEPOOL_LOG_FORMAT"))
    probe.add_argument("--config", type=Path)
    try:
        known, _ = probe.parse_known_args(arguments)
        chosen = known.log_format or (read_toml(known.config).get("log_format") if known.config else None)
    except (argparse.ArgumentError, EnginePoolError):
        return False
    return bool(chosen == "json")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _build_parser(command: str) -> argparse.ArgumentParser:
    parser = Parser(prog="enginepool", description="Many vLLM engines behind one queue.", epilog=EXIT_CODES)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=_version_or_help(parser), command="")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    serve = commands.add_parser(
        "serve",
        help="start a pool and serve it until it is stopped",
        usage="%(prog)s [MODEL] [--workers N] [settings] [-- vLLM flags]",
        description="Start a pool. vLLM's own flags go after `--`, as `vllm serve` spells them.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    serve.set_defaults(run=_serve)
    if command == "serve":
        _add_settings_flags(serve)
        _add_serve_flags(serve)
        _serve_actions[:] = serve._actions
    _add_doctor(commands, command)
    _add_run_batch(commands, command)
    _add_client_commands(commands)
    demo = commands.add_parser("demo", help="generate from bundled prompts with the embedded model and show timings")
    demo.add_argument("--workers", type=_count, default=2, help="worker processes (default 2)")
    demo.add_argument("--model", help="another model (default: the embedded one)")
    demo.set_defaults(run=_demo)
    return parser


def _add_doctor(commands: Any, command: str) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="tell what `serve` would meet here, and what to do about it",
        usage="%(prog)s [MODEL] [settings] [--json] [-- vLLM flags]",
        description="Examine what `serve` would meet with the same arguments. Nothing is started, loaded, fetched or claimed.",
        epilog="exit code: what `serve` would exit with, 0 when it would start",
        allow_abbrev=False,
    )
    doctor.set_defaults(run=_doctor)
    if command == "doctor":
        doctor.add_argument("--json", action="store_true", help="print one JSON object")
        _add_settings_flags(doctor)
        for flag in ("--ready-fd", "--ready-file"):
            doctor.add_argument(flag, help=argparse.SUPPRESS)  # so that a command line of `serve` can be pasted; it is not looked at
        doctor.add_argument("--die-with-parent", action="store_true", help=argparse.SUPPRESS)
        _serve_actions[:] = doctor._actions


def _add_run_batch(commands: Any, command: str) -> None:
    batch = commands.add_parser(
        "run-batch",
        help="run an OpenAI batch file, here or in a running pool; the same command again goes on where it stopped",
        usage="%(prog)s -i IN.jsonl -o OUT.jsonl [MODEL] [--workers N] [settings] [-- vLLM flags], or with --endpoint a running pool",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    batch.set_defaults(run=_run_batch)
    if command == "run-batch":
        from enginepool.batch.flags import NOT_ITS_OWN, add_flags

        add_flags(batch)
        _add_settings_flags(batch, leave_out=NOT_ITS_OWN)
        _serve_actions[:] = batch._actions


def _add_settings_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    from enginepool.config import iter_settings

    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="model folder or hub id (default: the embedded model)")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="settings file; flags and environment win over it")
    for setting in iter_settings():
        if setting.is_flag and setting.name not in leave_out:
            text = f"{setting.help} [{setting.env}; default: {setting.default}]".replace("%", "%%")
            parser.add_argument(setting.flag, dest=f"set_{setting.name}", metavar="V", help=text)


def _add_serve_flags(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--print-settings", action="store_true", help="print every setting with its origin and exit")
    serve.add_argument("--ready-fd", type=int, metavar="N", help="write one JSON line to this descriptor once the pool is up or has failed")
    serve.add_argument("--ready-file", type=Path, metavar="PATH", help="the same line as a file, there while the pool is up and takes work")
    serve.add_argument("--die-with-parent", action="store_true", help="stop at once when the program that started this one is gone")
    for name in ("--settings-fd", "--stages-fd", "--lifeline-fd", "--parent-pid"):
        serve.add_argument(name, type=int, help=argparse.SUPPRESS)


def _add_client_commands(commands: Any) -> None:
    status = commands.add_parser("status", help="show a running pool", epilog=EXIT_CODES)
    status.add_argument("--json", action="store_true", help="print the whole status as one JSON object")
    status.add_argument("--watch", action="store_true", help="show it in place until q is pressed; JSON lines where stdout is no terminal")
    status.add_argument("--interval-s", type=_seconds, default=1.0, metavar="S", help="with --watch: seconds between two looks (default 1)")
    status.set_defaults(run=_status)
    drain = commands.add_parser("drain", help="finish what a pool has, take nothing new, then stop it")
    drain.add_argument("--timeout-s", type=_seconds, metavar="S", help="limit (default: the pool's drain_timeout_s)")
    drain.set_defaults(run=_drain)
    stop = commands.add_parser("stop", help="stop a pool now; unfinished items are returned as retryable")
    stop.set_defaults(run=_stop)
    for command in (status, drain, stop):
        command.add_argument("--endpoint", help="where the pool is (default: ENGINEPOOL_ENDPOINT, else this user's default)")
        command.add_argument("--keys", metavar="FILE", help="keys file, for a pool that wants one (default: ENGINEPOOL_KEYS)")
    keys = commands.add_parser("keys", help="make the two keys files for a pool that is reached from other machines", epilog=EXIT_CODES)
    keys.add_argument("folder", type=Path, metavar="FOLDER", help="where to put pool.keys and client.keys; made if it is not there")
    keys.set_defaults(run=_keys)


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text!r}")
    return value


def _version_or_help(parser: argparse.ArgumentParser) -> Any:
    def run(args: argparse.Namespace, _: list[str]) -> int:
        if args.version:
            from enginepool import __version__

            print(f"enginepool {__version__}")
            return ExitCode.OK
        parser.print_help()
        return ExitCode.USAGE

    return run


def _serve(args: argparse.Namespace, vllm_flags: list[str]) -> int:
    from enginepool.config import PoolSettings, resolve_settings
    from enginepool.serve import Parent, run_dispatcher

    if args.settings_fd is not None:
        from enginepool import handover

        settings = handover.take(args.settings_fd, PoolSettings)
    else:
        settings, origins = resolve_settings(_given_settings(args, vllm_flags), os.environ, args.config)
        if args.print_settings:
            _print_settings(settings, origins)
            return ExitCode.OK
    _check_fd(args.ready_fd)
    parent = Parent(
        ready_fd=args.ready_fd,
        ready_file=args.ready_file,
        stages_fd=args.stages_fd,
        lifeline_fd=args.lifeline_fd,
        pid=(args.parent_pid or os.getppid()) if args.die_with_parent else None,
        is_embedded=args.settings_fd is not None,
    )
    return run_dispatcher(settings, parent)


def _doctor(args: argparse.Namespace, vllm_flags: list[str]) -> int:
    from enginepool.doctor.run import run_doctor

    return run_doctor(_given_settings(args, vllm_flags), args.config, as_json=args.json)


def _run_batch(args: argparse.Namespace, vllm_flags: list[str]) -> int:
    from enginepool.batch.command import run_batch
    from enginepool.batch.flags import batch_arguments, choose_pool

    return run_batch(batch_arguments(args), choose_pool(args, _given_settings(args, vllm_flags), os.environ))


def _check_fd(fd: int | None) -> None:
    from enginepool.errors import SettingsError

    try:
        if fd is not None:
            os.fstat(fd)
    except OSError:
        raise SettingsError(f"--ready-fd {fd}: this process was given no such descriptor") from None


def _given_settings(args: argparse.Namespace, vllm_flags: list[str]) -> dict[str, Any]:
    given = {name.removeprefix("set_"): value for name, value in vars(args).items() if name.startswith("set_") and value is not None}
    if args.positional_model is not None:
        if given.get("model") not in (None, args.positional_model):
            _complain("warning", f"--model {given['model']} is ignored, MODEL is given", f"enginepool {args.command}: warning: ")
        given["model"] = args.positional_model
    if vllm_flags:
        given["vllm_flags"] = vllm_flags
    return given


def _print_settings(settings: Any, origins: dict[str, str]) -> None:
    from enginepool.config import iter_settings

    for setting in iter_settings():
        print(f"{setting.name} = {getattr(settings, setting.name)!r}  ({origins.get(setting.name, 'default')})")


def _status(args: argparse.Namespace, _: list[str]) -> int:
    from enginepool.client.show_status import run_status

    return run_status(args.endpoint, args.keys, as_json=args.json, watch=args.watch, interval_s=args.interval_s)


def _drain(args: argparse.Namespace, _: list[str]) -> int:
    from enginepool.client.control import drain

    return drain(args.endpoint, args.keys, args.timeout_s)


def _stop(args: argparse.Namespace, _: list[str]) -> int:
    from enginepool.client.control import stop

    return stop(args.endpoint, args.keys)


def _keys(args: argparse.Namespace, _: list[str]) -> int:
    from enginepool.make_keys import run_keys

    return run_keys(args.folder)


def _demo(args: argparse.Namespace, _: list[str]) -> int:
    from enginepool.demo.show import run_demo

    return run_demo(workers=args.workers, model=args.model)
