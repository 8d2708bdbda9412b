"""The commands about this machine; ``doctor`` works even if other packages are broken."""

import argparse
import os

from det_callbacks.cli.parser import print_found
from det_callbacks.environment.installation import look_at_installation
from det_callbacks.errors import CheckError
from det_callbacks.report.console import make_console, print_line
from det_callbacks.report.installation import broken_report, broken_to_dict


def doctor(options: argparse.Namespace) -> int:
    variables = dict(os.environ)
    here = look_at_installation()
    if here.broken or here.missing:
        return print_found(
            options, lambda: broken_to_dict(here), lambda: broken_report(here), status=2
        )

    from det_callbacks.environment.doctor import diagnose  # noqa: PLC0415  # loads torch
    from det_callbacks.native.build import state  # noqa: PLC0415  # loads torch
    from det_callbacks.report.machine import doctor_report  # noqa: PLC0415  # loads what reads runs
    from det_callbacks.runs.store import Run  # noqa: PLC0415  # likewise

    against = None if options.against is None else Run.open(options.against)
    diagnosis = diagnose(here, against=against, recorder=state(), variables=variables)
    status = int(not diagnosis.is_well)
    return print_found(options, diagnosis.to_dict, lambda: doctor_report(diagnosis), status=status)


def native(options: argparse.Namespace) -> int:
    from det_callbacks.native.build import build  # noqa: PLC0415  # loads torch

    found = build()
    if found.path is None:
        raise CheckError(f"The native recorder cannot be built: {found.problem}.")
    print_line(
        make_console(),
        f"The native recorder is built: {found.path}. Recordings at level op use it from now on.",
    )
    return 0
