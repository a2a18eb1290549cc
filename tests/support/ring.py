"""Start ranks as ``mlx.launch`` does: real processes over MLX's ring on loopback."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
# A hang must end; how long the ranks take is no part of any test.
LIMIT = 600


def free_ports(n):
    """Consecutive ports that nobody listens on, as far as one can know beforehand."""
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
            try:
                sockets[0].bind(("127.0.0.1", 0))
                first = sockets[0].getsockname()[1]
                for i, s in enumerate(sockets[1:], 1):
                    s.bind(("127.0.0.1", first + i))
            except (OSError, OverflowError):
                continue
            return range(first, first + n)
    raise RuntimeError("There are no free ports on the loopback interface.")


def finish(commands, env):
    """Run all at once, and leave none behind, whatever happens.

    Args:
        commands: Pairs of a command line and what to add to the environment.
        env: What to add to the environment of all.
    """
    # Open and silent: mlx.launch spins on an input that is at its end.
    silence, kept_open = os.pipe()
    options = {"stdin": silence, "stdout": subprocess.PIPE, "text": True}
    options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
    env = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"} | env
    processes = []
    try:
        for command, own in commands:
            processes.append(subprocess.Popen(command, env=env | own, **options))
        outputs = [p.communicate(timeout=LIMIT)[0] for p in processes]
    finally:
        for p in processes:
            # The whole session, as mlx.launch has children of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
            p.stdout.close()
        os.close(silence)
        os.close(kept_open)
    return [p.returncode for p in processes], "\n".join(outputs)


def run_ranks(n, folder, script, *args):
    """Start the ranks as mlx.launch does; return exit codes, reports and output."""
    folder.mkdir()
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(n)]))
    # As a module: a script's own folder would come before tests/ in the path.
    module = f"{SUPPORT.name}.{Path(script).stem}"
    command = [sys.executable, "-m", module, str(folder), *map(str, args)]
    env = {"MLX_HOSTFILE": str(hosts)} if n > 1 else {}
    codes, output = finish([(command, {"MLX_RANK": str(r)}) for r in range(n)], env)
    return codes, reports(n, folder), output


def mlx_launch(n, folder, script, *args):
    """Start the ranks by mlx.launch itself."""
    folder.mkdir()
    here = [str(Path(sys.executable).parent), os.environ["PATH"]]
    launcher = shutil.which("mlx.launch", path=os.pathsep.join(here))
    # It leaves temporary files: in our folder, where MLX shall still find the
    # kernels that it compiled before.
    kernels = Path(tempfile.gettempdir()) / "mlx"
    kernels.mkdir(exist_ok=True)
    (folder / "mlx").symlink_to(kernels)
    ring = ["--backend", "ring", "-n", str(n), "--starting-port", str(free_ports(n)[0])]
    command = [launcher, *ring, "--", sys.executable, str(script), *map(str, args)]
    _, output = finish([(command, {})], {"TMPDIR": str(folder)})
    return output


def reports(n, folder):
    files = [folder / f"{rank}.json" for rank in range(n)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files]
