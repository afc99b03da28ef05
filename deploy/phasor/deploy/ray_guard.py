"""Run `ray start --block` as a child that cannot outlive its parent, even one killed with SIGKILL.

The parent keeps the write end of this process's stdin open and never writes to it. When the parent is gone,
for whatever reason, reading ends, and this process ends itself; Ray's own processes are tied to this one by
the kernel (Ray sets PR_SET_PDEATHSIG on them). It does nothing else: no settings, no environment.

    python -m phasor.deploy.ray_guard FOLDER start --head --block ...

An orphan removes FOLDER, the parent's private one, when Ray has ended.
"""

import atexit
import os
import shutil
import signal
import sys
import threading
from typing import Any


def drop_client_server(ray_params: Any, head: bool) -> None:
    """RAY_START_HOOK: leave out the Ray Client server.

    It would listen on the fixed port 10001, so that a second Ray on this machine could not start, and nothing
    of ours uses it. `ray start` has no flag for this; the hook is Ray's own way to change its parameters.
    """
    ray_params.ray_client_server_port = None


def main() -> None:
    """Watch the parent from a thread and become the Ray command line."""
    orphaned = threading.Event()

    def follow_parent() -> None:
        # Blocks until every holder of the pipe's write end is gone. The parent made it non-inheritable.
        while os.read(0, 1024):
            pass
        orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def clean_up(folder: str) -> None:
        if orphaned.is_set():
            shutil.rmtree(folder, ignore_errors=True)

    # Registered before Ray registers its own, so it runs after Ray has ended its processes.
    atexit.register(clean_up, sys.argv.pop(1))
    threading.Thread(target=follow_parent, name="follow-parent", daemon=True).start()
    from ray.scripts.scripts import main as ray_main

    sys.argv[0] = "ray"
    ray_main()


if __name__ == "__main__":
    main()
