"""The tests with each supported pair of torch and Lightning, and of Hugging Face,
in environments of their own.

All of them: ``make test-versions``. One: ``nox -s 'tests(oldest)'``. Hugging Face alone: ``nox -s
hf``. It is not in the everyday environment: torchmetrics imports transformers where it is
installed, which takes seconds at each start.
"""

import re
import tomllib
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2024.3.2"  # the first that knows "uv|virtualenv"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"

# What a version of torch or of Lightning bounds by itself; pip chooses these,
# and the rest stays at its pin.
BOUND_BY_A_PAIR = re.compile(
    r"(torch|lightning|pytorch-lightning|triton|setuptools|packaging|fsspec|nvidia-.*|cuda-.*)=="
)

# The extras that users install; the others are for development.
EXTRAS = ("cli", "pytest", "recipes")

# The same of a version of transformers; 4.57 needs an older huggingface_hub and tokenizers.
BOUND_BY_TRANSFORMERS = re.compile(
    r"(transformers|huggingface_hub|tokenizers|datasets|packaging)=="
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
    """Run the everyday tests; what follows ``--`` goes to pytest.

    The oldest pair has the lowest version that ``pyproject.toml`` allows of
    every other dependency too.
    """
    pair = f"torch=={torch}", f"lightning=={lightning}", f"pytorch-lightning=={lightning}"
    lowest = (
        []
        if torch != "2.11.0"
        else [one for one in lower_bounds() if not BOUND_BY_A_PAIR.match(one)]
    )
    bound = "|".join(
        [BOUND_BY_A_PAIR.pattern, *(re.escape(one.partition("==")[0] + "==") for one in lowest)]
    )
    others = others_than(session, re.compile(bound, re.IGNORECASE))
    session.install("-c", others, *pair, *lowest, "-e", ".[test,recipes]")
    session.run(
        "python",
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "worksteal",
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )


_HF_FILES = ("huggingface", "transformers_models", "accelerate", "ways_in")
HF_TESTS = tuple(f"tests/e2e/test_{name}.py" for name in _HF_FILES)


@nox.session
@nox.parametrize(
    "packages",
    [
        nox.param("transformers==4.57.6", id="oldest"),
        nox.param("transformers==5.24.0 trl==1.16.0 peft==0.21.2", id="newest"),
    ],
)
def hf(session: nox.Session, packages: str) -> None:
    """Run the tests of Hugging Face's Trainer and of Accelerate, the slow
    ones too; ``--`` is as above.
    """
    session.install(
        *("-c", others_than(session, BOUND_BY_TRANSFORMERS), *packages.split()),
        *("-e", ".[hf]", "jsonschema", "openmpi", "pytest", "pytest-timeout", "pytest-xdist"),
    )
    session.run(
        *("python", "-m", "pytest", "-m", "not soak", "-n", "2", *HF_TESTS, *session.posargs),
        env={"OMP_NUM_THREADS": "1"},
    )


def lower_bounds() -> list[str]:
    """Return the lowest versions that the package and its extras for users allow: "numpy==1.26"."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"]]
    texts += [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    lowest = []
    for text in texts:
        requirement = Requirement(text)
        (version,) = (one.version for one in requirement.specifier if one.operator == ">=")
        lowest.append(f"{requirement.name}=={version}")
    return lowest


def others_than(session: nox.Session, bound: re.Pattern[str]) -> str:
    """Return a file with the pins of all packages but those."""
    pins = Path("constraints.txt").read_text().splitlines(keepends=True)
    others = Path(session.virtualenv.location) / "constraints.txt"
    others.write_text("".join(pin for pin in pins if not bound.match(pin)))
    return str(others)
