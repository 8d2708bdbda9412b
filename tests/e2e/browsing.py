"""A real browser without a window, and what it complains about."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")

_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Opened:
    """A page, with all that it asked for and said.

    Attributes:
        page: Playwright's.
        requests: addresses that it asked for.
        complaints: messages on the console, errors and dialogs.
    """

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def wait_for_focus(self, beginning: str) -> str:
        """Wait until what has the focus is labelled, or reads, like this; return all of it."""
        label = "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent).trim()"
        self.page.wait_for_function(f"(beginning) => {label}.startsWith(beginning)", arg=beginning)
        focused: str = self.page.evaluate(label)
        return focused


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium with an empty profile."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_QUIET))
        yield started
        started.close()


@contextmanager
def opened(started: Browser, path: Path, *, fragment: str = "", width: int = 1400, **options: Any) -> Iterator[Opened]:
    """Open a report and wait until its heat map is drawn."""
    context = started.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce", **options)
    context.set_default_timeout(15_000)
    page = context.new_page()
    found = Opened(page=page)
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("console", lambda message: found.complaints.append(message.text))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))

    def refuse(dialog: Any) -> None:
        found.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", refuse)
    page.goto(path.as_uri() + fragment)
    page.wait_for_selector("#heat svg")
    yield found
    context.close()
