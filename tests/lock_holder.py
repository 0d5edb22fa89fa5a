"""A process for the tests of the run lock: acquires the lock of a folder, prints the result, and obeys commands on its standard input.

`python lock_holder.py FOLDER TIMEOUT HEARTBEAT STALE [MACHINE]`
"""

import functools
import logging
import sys

from callsheet.errors import RunInUseError, RunLockLostError
from callsheet.run import lock_claims, run_lock


def main(folder: str, timeout: str, heartbeat: str, stale: str, machine: str = "") -> None:
    logging.basicConfig(level=logging.INFO, format="log: %(message)s", stream=sys.stdout)
    run_lock.HEARTBEAT_SECONDS, lock_claims.STALE_SECONDS = float(heartbeat), float(stale)
    if machine:
        lock_claims.machine_id = functools.cache(lambda: machine)
    lock = run_lock.RunLock(folder, on_loss=lambda: print("loss", flush=True))
    try:
        lock.acquire(float(timeout))
    except RunInUseError as error:
        print(f"rejected: {error}", flush=True)
        return
    print("acquired", flush=True)
    for line in sys.stdin:
        if line.strip() == "check":
            try:
                lock.check()
                print("owner", flush=True)
            except RunLockLostError as error:
                print(f"lost: {error}", flush=True)
        elif line.strip() == "release":
            lock.release()
            print("released", flush=True)


main(*sys.argv[1:])
