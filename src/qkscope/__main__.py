"""The commands, as installed, and ``python -m qkscope``: signals are handled before anything large is imported."""

from __future__ import annotations

from importlib import import_module

from qkscope.cli.signals import one_line_when_stopped


def run() -> None:
    """Run ``qkscope``."""
    _run("main", "run")


def pca_analyze() -> None:
    """Run ``pca-analyze``."""
    _run("published", "run_pca_analyze")


def rotate_analyze() -> None:
    """Run ``rotate-analyze``."""
    _run("published", "run_rotate_analyze")


def pca_visualize() -> None:
    """Run ``pca-visualize``."""
    _run("visualize", "run_pca_visualize")


def rotate_visualize() -> None:
    """Run ``rotate-visualize``."""
    _run("visualize", "run_rotate_visualize")


def _run(module: str, name: str) -> None:
    with one_line_when_stopped():
        getattr(import_module(f"qkscope.cli.{module}"), name)()


if __name__ == "__main__":
    run()
