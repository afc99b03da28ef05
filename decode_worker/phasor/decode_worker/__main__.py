"""`python -m phasor.decode_worker`: one decode worker in a process of its own, without Ray."""

import sys

from phasor.decode_worker.worker import DecodeWorker
from phasor.engine.worker_main import run_worker

if __name__ == "__main__":
    sys.exit(run_worker(DecodeWorker, "python -m phasor.decode_worker"))
