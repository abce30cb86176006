"""A place of its own for pools that are treated badly, where all that they could leave behind is found."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

from conftest import processes_of, wait_for
from surroundings import customized

SHARED_MEMORY = Path("/dev/shm")
MEMORY_NAME = "enginepool-test-"
FAMILY = f"""
import subprocess, threading
subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; sleep 600 & wait"])
def leave_memory():
    import os, time, zlib
    from multiprocessing import resource_tracker, shared_memory
    while resource_tracker._resource_tracker._fd is None or os.getpgrp() != os.getpid():
        time.sleep(0.001)
    name = "{MEMORY_NAME}%d-%d" % (zlib.crc32(os.environ["ENGINEPOOL_RUN_DIR"].encode()), os.getpid())
    block = shared_memory.SharedMemory(name, create=True, size=4096)
    time.sleep(600)
threading.Thread(target=leave_memory, daemon=True).start()
"""
"""Code for a worker that has children of its own, deaf to all signals that can be ignored, and shared memory, as vLLM's have."""


IMPORTS = "import threading, time\nfrom enginepool import Pool, SamplingParams\nkept = []\n"
WORK = """
with Pool(engine="echo", workers=2, step_s=0.002) as pool:
    pool.generate_many(["x"] * 20, SamplingParams(max_tokens=50))
    print("done", flush=True)
"""
"""A program that starts an embedded pool, works and ends."""

FAMILY_SIZE = 4
"""The worker, the shell, its child and the resource tracker."""


class Place:
    """A run directory and a temp folder. `environment` makes a pool use them, and gives its workers a `FAMILY`."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.endpoint = f"ipc://{self.run}/default.sock"
        self.environment = {"ENGINEPOOL_RUN_DIR": str(self.run), "TMPDIR": str(self.temp)} | customized(folder, worker=FAMILY)

    def processes(self) -> list[str]:
        """What was started here and lives."""
        return [str(process) for process in processes_of(self.run)]

    def files(self) -> list[str]:
        """What lies here, and shared memory."""
        folders = [folder for folder in (self.run, self.temp) if folder.exists()]
        return [str(path) for folder in folders for path in folder.iterdir()] + self.memory()

    def memory(self) -> list[str]:
        """Shared memory that the workers' families have made."""
        prefix = f"{MEMORY_NAME}{zlib.crc32(str(self.run).encode())}-"
        return [name for name in os.listdir(SHARED_MEMORY) if name.startswith(prefix)]

    def wait_until_deserted(self) -> None:
        """Nobody lives here any more, five seconds after whatever was done, and no shared memory is left."""
        wait_for(lambda: not self.processes(), f"the end of {self.processes()}", 5)
        wait_for(lambda: not self.memory(), f"the end of {self.memory()}", 5)

    def wait_until_empty(self) -> None:
        """The same, and no file is left."""
        self.wait_until_deserted()
        wait_for(lambda: not self.files(), f"the end of {self.files()}", 5)


class Host:
    """A program in a group of its own, as a shell starts one; `wrapped` by another that gets its orphans."""

    def __init__(self, place: Place, program: str, wrapper: str | None = None, **environment: str) -> None:
        command = [sys.executable, "-c", IMPORTS + program]
        self.process = subprocess.Popen(
            command if wrapper is None else [sys.executable, "-c", wrapper, *command],
            env=os.environ | place.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def wait_for_word(self) -> list[str]:
        """The first line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def finish(self) -> str:
        """Wait for its end; what it has printed to stderr."""
        return self.process.communicate(timeout=20)[1]

    def kill(self) -> None:
        """SIGKILL to it alone."""
        self.process.kill()
        self.process.communicate()
