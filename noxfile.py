"""The tests with each supported pair of torch and Lightning, and of Hugging Face, in environments of their own.

All of them: ``make test-versions``. One: ``nox -s 'tests(oldest)'``. Hugging Face alone: ``nox -s hf``. It is not in
the everyday environment: torchmetrics imports transformers where it is installed, which takes seconds at each start.
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

# The same of a version of transformers; 4.57 needs an older huggingface_hub and tokenizers.
BOUND_BY_TRANSFORMERS = re.compile(r"(transformers|huggingface_hub|tokenizers|datasets|packaging)==")


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
    pair = f"torch=={torch}", f"lightning=={lightning}", f"pytorch-lightning=={lightning}"
    session.install("-c", others_than(session, BOUND_BY_A_PAIR), *pair, "-e", ".[test,recipes]")
    session.run(
        "python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *session.posargs, env={"OMP_NUM_THREADS": "1"}
    )


HF_TESTS = tuple(f"tests/e2e/test_{name}.py" for name in ("huggingface", "transformers_models", "accelerate"))


@nox.session
@nox.parametrize(
    "packages",
    [
        nox.param("transformers==4.57.6", id="oldest"),
        nox.param("transformers==5.24.0 trl==1.16.0 peft==0.21.2", id="newest"),
    ],
)
def hf(session: nox.Session, packages: str) -> None:
    """Run the tests of Hugging Face's Trainer and of Accelerate, the slow ones too; ``--`` is as above."""
    session.install(
        *("-c", others_than(session, BOUND_BY_TRANSFORMERS), *packages.split()),
        *("-e", ".[hf]", "jsonschema", "openmpi", "pytest", "pytest-timeout", "pytest-xdist"),
    )
    session.run(
        *("python", "-m", "pytest", "-m", "not soak", "-n", "2", *HF_TESTS, *session.posargs),
        env={"OMP_NUM_THREADS": "1"},
    )


def others_than(session: nox.Session, bound: re.Pattern[str]) -> str:
    """Return a file with the pins of all packages but those."""
    pins = Path("constraints.txt").read_text().splitlines(keepends=True)
    others = Path(session.virtualenv.location) / "constraints.txt"
    others.write_text("".join(pin for pin in pins if not bound.match(pin)))
    return str(others)
