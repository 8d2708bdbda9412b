"""The everyday tests with each supported pair of torch and Lightning, in environments of their own.

All pairs: ``make test-versions``. One of them: ``nox -s 'tests(oldest)'``.
"""

import re
from pathlib import Path

import nox

nox.needs_version = ">=2024.3.2"  # the first that knows "uv|virtualenv"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"

# What a version of torch or of Lightning bounds by itself; pip chooses these, and the rest stays at its pin.
BOUND_BY_A_PAIR = re.compile(
    r"(torch|lightning|pytorch-lightning|triton|setuptools|packaging|fsspec|nvidia-.*|cuda-.*)=="
)


@nox.session
@nox.parametrize(
    ("torch", "lightning"),
    [
        nox.param("2.11.0", "2.5.0", id="oldest"),
        nox.param("2.12.1", "2.5.6", id="torch-2.12"),
        nox.param("2.13.0", "2.6.6", id="torch-2.13"),
        nox.param("2.14.1", "2.6.6", id="torch-2.14"),
        nox.param("2.15.0", "2.6.6", id="newest"),
    ],
)
def tests(session: nox.Session, torch: str, lightning: str) -> None:
    """Run the everyday tests; what follows ``--`` goes to pytest."""
    pins = Path("constraints.txt").read_text().splitlines(keepends=True)
    others = Path(session.virtualenv.location) / "constraints.txt"
    others.write_text("".join(pin for pin in pins if not BOUND_BY_A_PAIR.match(pin)))
    pair = f"torch=={torch}", f"lightning=={lightning}", f"pytorch-lightning=={lightning}"
    session.install("-c", str(others), *pair, "-e", ".[test,recipes]")
    session.run(
        "python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *session.posargs, env={"OMP_NUM_THREADS": "1"}
    )
