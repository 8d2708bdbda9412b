"""Processes that are forked: importing what a training needs takes longer than the test."""

import gc
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.util import _run_finalizers
from pathlib import Path
from typing import Any, NoReturn

import torch._inductor.config
from hydra.core.global_hydra import GlobalHydra

from det_callbacks.environment.variables import launch_request


def outside_ci() -> dict[str, str]:
    """The variables of this process without what says that it is a job of
    CI or a session of pytest.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name != "CI" and not name.startswith("PYTEST")
    }


def fork_process(
    words: Sequence[str],
    *,
    variables: Mapping[str, str],
    folder: Path | None = None,
    output: int | None = None,
    during: AbstractContextManager[None] | None = None,
) -> int:
    """Run ``python SCRIPT ...`` in a fork, as ``run_process`` does in a fresh process;
    ``output`` gets what is said.
    """

    def body() -> None:
        gc.freeze()  # what this process made is not the script's
        os.chdir(folder or ".")
        for name in set(os.environ) - set(variables):
            del os.environ[name]
        os.environ.update(variables)
        launch_request.cache_clear()
        sys.argv = [*words[1:]]
        sys.path.insert(0, str(Path(words[1]).resolve().parent))
        GlobalHydra.instance().clear()
        with during or nullcontext():
            runpy.run_path(words[1], run_name="__main__")

    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if not process:
        end_with(body, output)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def end_with(body: Callable[[], Any], output: int | None = None) -> NoReturn:
    """Run a body in this forked process, which prints to a file, and end it as Python would."""
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    status = 1
    try:
        # not those that pytest put there to capture what is printed
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
        )
        warnings.simplefilter("ignore")  # of Lightning and torch: what is printed is looked at
        torch.set_num_threads(1)  # threads of the parent's pools are not there
        torch._inductor.config.compile_threads = 1
        body()
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException as error:
        # a forked child has nobody above it: it prints what Python would, and ends
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
    finally:
        _run_finalizers(0)  # as Python does at its end
        _run_finalizers()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
