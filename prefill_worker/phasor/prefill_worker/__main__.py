"""`python -m phasor.prefill_worker`: one prefill worker in a process of its own, without Ray."""

import sys

from phasor.engine.worker_main import run_worker
from phasor.prefill_worker.worker import PrefillWorker

if __name__ == "__main__":
    sys.exit(run_worker(PrefillWorker, "python -m phasor.prefill_worker"))
