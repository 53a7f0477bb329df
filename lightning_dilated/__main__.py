"""Run the command line with `python -m lightning_dilated`."""

from lightning_dilated.cli import main

if __name__ == "__main__":
    main()
