"""``python -m qkscope``."""

from qkscope.cli.main import run

if __name__ == "__main__":
    run()
